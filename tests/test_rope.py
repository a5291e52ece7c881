"""The RoPE family: rope, qk_norm_rope, rope_3d.

Every test runs on both backends. Accuracy is judged by reference.py's rule; a regression test is named by the failure
that it guards.
"""

from __future__ import annotations

import pytest
import reference
import torch
import torch._dynamo
import torch.nn.functional as F
from conftest import DTYPES, misaligned, outputs_of, same_bits
from layouts import FAR, room_for_far
from reference import assert_no_worse_than_eager
from rope_problems import MODELS, check, make_inputs, make_table

FP32, FP16, BF16 = DTYPES.values()


@pytest.fixture(params=MODELS)
def model(request) -> str:
    return request.param


# ---- what the models need --------------------------------------------------------------------------------


@pytest.mark.kernels_ci
@pytest.mark.parametrize("table_dtype", [FP32, None], ids=["fp32-table", "model-table"])
def test_models(k, model, device, dtype, table_dtype):
    check(k, "qk_norm_rope", **make_inputs(model, dtype, device, table_dtype=table_dtype or dtype))


@pytest.mark.parametrize("param_dtype", DTYPES.values(), ids=DTYPES)
def test_parameters_of_every_dtype(k, device, dtype, param_dtype):
    for model in ("ltx", "layer-across"):
        check(k, "qk_norm_rope", **make_inputs(model, dtype, device, param_dtype=param_dtype))


def test_no_worse_than_the_chain_of_norm_and_rope(k, model, device, dtype):
    """The eager chain rounds the normed value: the fused op does not, and is nearer to fp64."""
    inputs = make_inputs(model, dtype, device)
    expected = outputs_of(reference.qk_norm_rope(**inputs))
    chain = outputs_of(reference.qk_norm_rope(**inputs, compute=FP32, round_norm_to=dtype))
    for output, best, right in zip(outputs_of(k.qk_norm_rope(**inputs)), chain, expected):
        assert_no_worse_than_eager(output, best, right)


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize(
    "head_size, rotary",
    [(32, None), (64, None), (72, None), (80, 32), (96, None), (96, 24), (112, None), (128, 6), (128, 64), (160, None),
     (256, None), (512, None), (2, None), (6, 2), (7, 4), (33, 32), (100, 50), (20, 18)],
)  # fmt: skip
def test_head_sizes(k, device, dtype, head_size, rotary, interleaved):
    """vllm#51049 (64 of 128), vllm#53115 (512, 96); odd halves, which no vector fits."""
    q = torch.randn(2, 5, 3, head_size, device=device).to(dtype)
    key = torch.randn(2, 5, 2, head_size, device=device).to(dtype)
    cos, sin = make_table("batch", 2, 5, 1, rotary or head_size, device, FP32, interleaved)
    options = {"cos": cos, "sin": sin, "interleaved": interleaved, "rotary_dim": rotary}
    weights = [torch.randn(head_size, device=device).to(dtype) for _ in range(2)]
    check(k, "qk_norm_rope", q=q, k=key, q_weight=weights[0], k_weight=weights[1], **options)
    check(k, "qk_norm_rope", q=q, k=key, norm="layer", q_bias=weights[0], **options)
    check(k, "rope", x=q, **options)


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize(
    "heads, head_size", [(1, 8), (4, 8), (32, 64), (32, 128), (40, 128), (5, 100), (3, 7), (64, 512)]
)
def test_across_heads_of_every_hidden_size(k, device, dtype, heads, head_size, interleaved):
    rotary = head_size - 1 if head_size % 2 and interleaved else head_size - head_size % 2
    q = torch.randn(2, 3, heads, head_size, device=device).to(dtype)
    weight = torch.randn(heads * head_size, device=device).to(dtype)
    for kind in ("heads", "batch-heads", "shared"):
        cos, sin = make_table(kind, 2, 3, heads, rotary, device, FP32, interleaved)
        check(
            k, "qk_norm_rope", q=q, k=q.flip(0), q_weight=weight, k_weight=weight, cos=cos, sin=sin, across_heads=True,
            interleaved=interleaved, rotary_dim=rotary,
        )  # fmt: skip


def test_llama_hidden_sizes_beyond_shared_memory(k, device, dtype):
    """flashinfer#718: rows and tables that no shared memory holds are read again."""
    heads, head_size = (64, 512) if dtype == FP32 else (128, 512)
    q = torch.randn(1, 2, heads, head_size, device=device).to(dtype)
    weight = torch.randn(heads * head_size, device=device).to(dtype)
    cos, sin = make_table("heads", 1, 2, heads, head_size, device, FP32, True)
    inputs = {"q": q, "k": q.flip(1), "q_weight": weight, "cos": cos, "sin": sin, "across_heads": True}
    check(k, "qk_norm_rope", **inputs)
    check(k, "qk_norm_rope", **inputs, interleaved=False, norm="layer")
    check(k, "rope", x=q.flatten(2), cos=cos.flatten(2), sin=sin.flatten(2))
    check(k, "rope", x=q.flatten(2), cos=cos.flatten(2), sin=sin.flatten(2), interleaved=False)


def test_grouped_queries(k, device, dtype):
    """Liger#342: one k head; more k heads than q heads too."""
    for heads, k_heads in ((8, 1), (8, 2), (1, 1), (2, 5)):
        q = torch.randn(2, 4, heads, 64, device=device).to(dtype)
        key = torch.randn(2, 4, k_heads, 64, device=device).to(dtype)
        cos, sin = make_table("batch", 2, 4, 1, 64, device, FP32, True)
        check(k, "qk_norm_rope", q=q, k=key, cos=cos, sin=sin)
        check(k, "qk_norm_rope", q=q, k=key, cos=cos, sin=sin, across_heads=True)


@pytest.mark.parametrize("interleaved", [True, False])
def test_no_head_is_left_out_whatever_their_number(k, device, dtype, interleaved):
    for heads in (24, 25, 255, 256, 515):  # those of a thread lie 4, 1, 64, .. apart
        q = torch.randn(2, 3, heads, 16, device=device).to(dtype)
        for kind in ("shared", "heads"):
            cos, sin = make_table(kind, 2, 3, heads, 16, device, FP32, interleaved)
            options = {"cos": cos, "sin": sin, "interleaved": interleaved}
            check(k, "qk_norm_rope", q=q, k=q[:, :, :3] if kind == "shared" else q, **options)
            check(k, "rope", x=q.transpose(1, 2).contiguous().transpose(1, 2), **options)


def test_transformers_45564_k_is_none(k, device, dtype):
    inputs = make_inputs("qwen3", dtype, device)
    both = k.qk_norm_rope(**inputs)
    alone = k.qk_norm_rope(**{**inputs, "k": None, "k_weight": None})
    assert alone[1] is None
    assert torch.equal(alone[0], both[0])


def test_k_with_its_own_tables_and_length(k, device, dtype):
    """LTX-2's video-to-audio attention: other tokens, other positions."""
    q = torch.randn(2, 9, 4, 64, device=device).to(dtype)
    key = torch.randn(2, 5, 4, 64, device=device).to(dtype)
    for kind, k_kind in (("heads", "batch-heads"), ("shared", "heads"), ("batch-full", "shared"), ("heads", "heads")):
        cos, sin = make_table(kind, 2, 9, 4, 64, device, FP32, False)
        k_cos, k_sin = make_table(k_kind, 2, 5, 4, 64, device, BF16, False)
        inputs = {"q": q, "k": key, "cos": cos, "sin": sin, "k_cos": k_cos, "k_sin": k_sin, "interleaved": False}
        check(k, "qk_norm_rope", **inputs)
        check(k, "qk_norm_rope", **inputs, across_heads=True)
    check(k, "qk_norm_rope", q=q, k=key, across_heads=True)
    check(k, "qk_norm_rope", q=q, k=key, k_cos=k_cos, k_sin=k_sin, interleaved=False)


@pytest.mark.parametrize("start, length", [(0, 4), (3, None), (3, 4), (0, 0), (9, None), (5, 0), (0, 9)])
def test_token_ranges(k, device, dtype, start, length):
    """Tokens outside the range are normed but not rotated; the tables have the range's rows."""
    q, key = (torch.randn(2, 9, 3, 64, device=device).to(dtype) for _ in range(2))
    rows = 9 - start if length is None else length
    for kind in ("shared-full", "heads"):
        cos, sin = make_table(kind, 2, rows, 3, 64, device, FP32, True)
        inputs = {"q": q, "k": key, "cos": cos, "sin": sin, "rope_start": start, "rope_len": length}
        check(k, "qk_norm_rope", **inputs)
        for outside, normed in zip(k.qk_norm_rope(**inputs), k.qk_norm_rope(q, key)):
            assert torch.equal(outside[:, :start], normed[:, :start])
            assert torch.equal(outside[:, start + rows :], normed[:, start + rows :])
        raw = k.qk_norm_rope(**inputs, norm="none")
        assert torch.equal(raw[0][:, :start], q[:, :start])


def test_nothing_is_rotated_without_tables(k, device, dtype):
    q, key = (torch.randn(2, 4, 3, 64, device=device).to(dtype) for _ in range(2))
    assert same_bits(k.qk_norm_rope(q, key, norm="none"), (q, key))


def test_elements_beyond_the_rotary_dim_pass_through_untouched(k, device, dtype):
    """Also beside infinities, which no product with zero may reach."""
    x = torch.randn(2, 4, 3, 64, device=device).to(dtype)
    x[..., 20::3] = float("inf")
    x[..., 21::3] = float("nan")
    for interleaved in (True, False):
        cos, sin = make_table("batch", 2, 4, 3, 20, device, FP32, interleaved)
        y = k.rope(x, cos, sin, interleaved=interleaved, rotary_dim=20)
        torch.testing.assert_close(y[..., 20:], x[..., 20:], rtol=0, atol=0, equal_nan=True)
        assert y[..., :20].isfinite().all()


def test_layer_norm_of_a_large_mean(k, device, dtype):
    """1000 + randn: E[x²] - mean² cancels to nothing, and a rounded mean alone costs 3e-5."""
    q = (1000 + torch.randn(2, 3, 4, 64, device=device)).to(dtype)
    for across_heads, x in ((True, q.flatten(2)), (False, q)):
        y, _ = k.qk_norm_rope(q, None, eps=1e-5, norm="layer", across_heads=across_heads)
        eager = torch.nn.functional.layer_norm(x, x.shape[-1:], eps=1e-5)
        assert_no_worse_than_eager(y.view_as(x), eager, reference.layer_norm(x), dtype)


# ---- tables ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("head_size", [64, 20])
@pytest.mark.parametrize("table_dtype", DTYPES.values(), ids=DTYPES)
def test_full_and_compact_tables_give_the_same_bits(k, device, dtype, table_dtype, head_size, interleaved):
    """However a table lies in memory: what is read through strides is what a compact copy holds."""
    q = torch.randn(2, 6, 3, head_size, device=device).to(dtype)
    for kind in ("shared", "batch", "heads", "batch-heads"):
        cos, sin = make_table(f"{kind}-full", 2, 6, 3, head_size, device, table_dtype, interleaved)
        compact = [t[..., ::2] if interleaved else t[..., : head_size // 2] for t in (cos, sin)]
        expected = k.qk_norm_rope(q, None, cos=cos, sin=sin, interleaved=interleaved)
        layouts = {
            "views": compact,
            "contiguous": [t.contiguous() for t in compact],
            "at every second place": [t.repeat_interleave(2, dim=-1)[..., ::2] for t in compact],
            "misaligned": [misaligned(t) for t in compact],
            "complex": torch.view_as_real(torch.complex(*(t.float() for t in compact))).to(table_dtype).unbind(-1),
            "last dim outermost": [t.transpose(0, -1).contiguous().transpose(0, -1) for t in compact],
            "different strides": [compact[0].contiguous(), compact[1]],
        }
        for name, table in layouts.items():
            got = k.qk_norm_rope(q, None, cos=table[0], sin=table[1], interleaved=interleaved)
            assert same_bits(got, expected), (kind, name)
        if "batch" not in kind:
            wide = [t[None] if kind == "shared" else t for t in (cos, sin)]
            wide = [t.expand(2, *t.shape[1:]) for t in wide]
            assert same_bits(k.qk_norm_rope(q, None, cos=wide[0], sin=wide[1], interleaved=interleaved), expected)
        if kind in ("heads", "batch-heads"):  # LTX-2: [B, H, S, R/2]
            outer = [t.transpose(1, 2).contiguous().transpose(1, 2) for t in compact]
            assert same_bits(k.qk_norm_rope(q, None, cos=outer[0], sin=outer[1], interleaved=interleaved), expected)


def test_heads_of_a_flat_x_are_those_of_the_table(k, device, dtype):
    x = torch.randn(2, 5, 3 * 64, device=device).to(dtype)
    cos, sin = make_table("heads", 2, 5, 3, 64, device, FP32, False)
    flat = check(k, "rope", x=x, cos=cos, sin=sin, interleaved=False)[0]
    assert torch.equal(flat.unflatten(-1, (3, 64)), k.rope(x.unflatten(-1, (3, 64)), cos, sin, interleaved=False))
    whole = make_table("batch-full", 2, 5, 1, 192, device, FP32, True)
    check(k, "rope", x=x, cos=whole[0], sin=whole[1])


# ---- layouts ---------------------------------------------------------------------------------------------


def layouts(x):
    """The same q in every memory layout that models have."""
    batch, tokens, heads, size = x.shape
    qkv = torch.randn(batch, tokens, 3 * heads * size, device=x.device).to(x.dtype)
    packed = qkv[..., heads * size : 2 * heads * size].unflatten(-1, (heads, size))
    odd = torch.randn(batch, tokens, heads, size + 1, device=x.device).to(x.dtype)[..., :size]
    return {
        "contiguous": x.contiguous(),
        "slice of qkv": packed.copy_(x),
        "transposed": x.transpose(1, 2).contiguous().transpose(1, 2),
        "batch inside": x.transpose(0, 1).contiguous().transpose(0, 1),
        "misaligned": misaligned(x),
        "odd rows": odd.copy_(x),
        "last dim strided": x.transpose(-1, -2).contiguous().transpose(-1, -2),
    }


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("across_heads", [True, False])
@pytest.mark.parametrize("head_size", [64, 36, 20])
def test_the_layout_does_not_change_bits(k, device, dtype, head_size, across_heads, interleaved):
    q = torch.randn(2, 5, 3, head_size, device=device).to(dtype)
    width = head_size * (3 if across_heads else 1)
    weight, bias = (torch.randn(width, device=device).to(dtype) for _ in range(2))
    cos, sin = make_table("heads", 2, 5, 3, head_size, device, FP32, interleaved)
    options = {"cos": cos, "sin": sin, "across_heads": across_heads, "interleaved": interleaved, "norm": "layer"}
    expected = k.qk_norm_rope(q, q, weight, weight, q_bias=bias, k_bias=bias, **options)
    for name, x in layouts(q).items():
        got = k.qk_norm_rope(x, q, weight, weight, q_bias=bias, k_bias=bias, **options)
        assert same_bits(got, expected), name
        got = k.qk_norm_rope(q, x, misaligned(weight), weight, q_bias=bias, k_bias=misaligned(bias), **options)
        assert same_bits(got, expected), name


def test_flash_attention_289_view_with_strides_925200_3600_1(k, device, dtype):
    x = torch.randn(2, 257, 3600, device=device).to(dtype)[:, :, 1200:2400]
    cos, sin = make_table("shared", 2, 257, 1, 1200, device, FP32, True)
    check(k, "rope", x=x, cos=cos, sin=sin)


def test_row_offsets_beyond_2_31_elements(k, device):
    """flashinfer#3005: a q view whose offsets wrap in int32. Two rows far apart; what lies between is never touched."""
    memory = room_for_far(512, device)
    q = torch.randn(1, 2, 2, 64, device=device).to(BF16)
    cos, sin = make_table("shared", 1, 2, 1, 64, device, FP32, True)
    for dim in range(3):
        x = q.transpose(0, 1).contiguous() if dim == 0 else q
        strides = list(x.stride())
        strides[dim] = FAR
        view = memory.as_strided(x.shape, strides).copy_(x)
        rows = x.shape[1]
        expected = k.rope(x, cos[:rows], sin[:rows])
        assert torch.equal(k.rope(view, cos[:rows], sin[:rows]), expected), dim


@pytest.mark.parametrize("across_heads", [True, False])
def test_head_offsets_beyond_2_31_elements(k, device, across_heads):
    """Each head is near the one before it, the last one far from the first."""
    memory = room_for_far(512, device)
    q = torch.randn(1, 1, 5, 64, device=device).to(BF16)
    cos, sin = make_table("heads", 1, 1, 5, 64, device, FP32, True)
    view = memory.as_strided(q.shape, (0, 0, FAR // 4, 1)).copy_(q)
    options = {"cos": cos, "sin": sin, "across_heads": across_heads}
    assert same_bits(k.qk_norm_rope(view, None, **options), k.qk_norm_rope(q, None, **options))


@pytest.mark.gpu
def test_more_than_2_31_elements(k, gpu):
    shape = (2, 139_811, 60, 128)  # flashinfer#3005: S >= 139811
    if torch.cuda.mem_get_info()[0] < 3 * 2 * torch.Size(shape).numel():
        pytest.skip("needs 13 GB of free GPU memory")
    q = torch.empty(shape, dtype=BF16, device="cuda").normal_()
    cos, sin = make_table("shared", 2, shape[1], 1, 128, "cuda", FP32, True)
    y, _ = k.qk_norm_rope(q, None, cos=cos, sin=sin)
    for batch in range(2):
        for rows in (slice(0, 3), slice(70_000, 70_003), slice(-3, None)):
            part = k.qk_norm_rope(q[batch : batch + 1, rows], None, cos=cos[rows], sin=sin[rows])[0]
            assert torch.equal(y[batch : batch + 1, rows], part)


@pytest.mark.parametrize("tokens", [65535, 65536, 65537])
def test_apex_411_any_number_of_tokens(k, device, tokens):
    x = torch.randn(1, tokens, 1, 32, device=device).to(BF16)
    cos, sin = make_table("shared", 1, tokens, 1, 32, device, FP32, True)
    check(k, "rope", x=x, cos=cos, sin=sin)


def test_no_tokens(k, device, dtype):
    """sglang#3304: an empty batch, and the next op still works."""
    cos, sin = make_table("shared", 1, 4, 1, 64, device, FP32, True)
    for shape in ((0, 4, 3, 64), (2, 4, 0, 64), (0, 4, 64)):
        y = k.rope(torch.empty(shape, device=device, dtype=dtype), cos, sin)
        assert y.shape == shape and y.dtype == dtype
    empty = torch.empty(2, 0, 3, 64, device=device, dtype=dtype)
    assert k.rope(empty, cos[:0], sin[:0]).shape == empty.shape
    q = torch.randn(2, 4, 3, 64, device=device).to(dtype)
    a, b = k.qk_norm_rope(q, empty, k_cos=cos[:0], k_sin=sin[:0], cos=cos, sin=sin)
    assert b.shape == empty.shape
    assert torch.equal(a, k.qk_norm_rope(q, None, cos=cos, sin=sin)[0])
    a, b = k.qk_norm_rope(empty, q, cos=cos[:0], sin=sin[:0], k_cos=cos, k_sin=sin)
    assert torch.equal(b, k.qk_norm_rope(q, None, cos=cos, sin=sin)[0])


@pytest.mark.parametrize("case", range(40))
def test_random_problems(k, device, case):
    """Sizes, options, dtypes and layouts that nobody would think of."""
    generator = torch.Generator().manual_seed(case)

    def pick(*choices):
        return choices[int(torch.randint(len(choices), (), generator=generator))]

    dtype = pick(FP32, FP16, BF16)
    batch, tokens, heads, k_heads = pick(1, 2, 3), pick(1, 2, 7, 40), pick(1, 2, 3, 8, 24), pick(1, 2, 3, 8)
    head_size = pick(8, 16, 24, 40, 64, 96, 128, 130, 192)
    interleaved, across_heads, norm = pick(True, False), pick(True, False), pick("rms", "layer", "none")
    rotary = pick(None, None, 2 * (head_size // 4), 2)
    start = pick(0, 0, tokens // 2)
    kind = pick("shared", "batch", "shared-full", "batch-full", "heads", "batch-heads-full")
    q = pick(*layouts(torch.randn(batch, tokens, heads, head_size, generator=generator).to(device, dtype)).values())
    if "heads" in kind:
        k_heads = heads
    key = pick(*layouts(torch.randn(batch, tokens, k_heads, head_size, generator=generator).to(device, dtype)).values())
    cos, sin = make_table(
        kind, batch, tokens - start, heads, rotary or head_size, device, pick(FP32, FP16, BF16), interleaved
    )
    inputs = {
        "q": q,
        "k": key,
        "cos": cos,
        "sin": sin,
        "interleaved": interleaved,
        "across_heads": across_heads,
        "norm": norm,
    }
    if norm != "none" and pick(True, False):
        for name, count in (("q", heads), ("k", k_heads)):
            size = head_size * (count if across_heads else 1)
            inputs[f"{name}_weight"] = torch.randn(size, device=device).to(pick(FP32, FP16, BF16))
            inputs[f"{name}_bias"] = torch.randn(size, device=device).to(pick(FP32, FP16, BF16))
    check(k, "qk_norm_rope", **inputs, rotary_dim=rotary, rope_start=start)


# ---- the same bits every time ----------------------------------------------------------------------------


@pytest.mark.kernels_ci
def test_batch_invariance(k, model, device, dtype):
    """vllm#48271: a token's bits do not depend on how many others there are."""
    inputs = make_inputs(model, dtype, device)
    whole = outputs_of(k.qk_norm_rope(**inputs))
    start = inputs.get("rope_start", 0)
    length = inputs.get("rope_len")
    for batch, token in ((0, 0), (0, 4), (0, 9), (1, 5)):
        if batch >= inputs["q"].shape[0]:
            continue
        one = dict(inputs)
        for name in ("q", "k"):
            if one[name] is not None:
                one[name] = one[name][batch : batch + 1, token : token + 1]
        rotated = start <= token < (start + length if length is not None else 10)
        one["rope_start"], one["rope_len"] = 0, None
        for name in ("cos", "sin"):
            if name not in one:
                continue
            table = one[name]
            rows = slice(token - start, token - start + 1)
            one[name] = (
                None if not rotated
                else table[rows] if table.dim() == 2
                else table[batch if table.shape[0] > 1 else 0, rows][None]
            )  # fmt: skip
        if not rotated and one.get("interleaved", True) is False:
            continue
        for part, all_of_them in zip(outputs_of(k.qk_norm_rope(**one)), whole):
            assert torch.equal(part[0, 0], all_of_them[batch, token])


# ---- torch: compile, fakes, autograd ---------------------------------------------------------------------


def test_opcheck(k, device):
    ops = getattr(torch.ops, k.add_op_namespace_prefix("x").split("::")[0])
    q = torch.randn(2, 5, 3, 64, device=device).to(BF16)
    key = torch.randn(2, 5, 192, device=device).to(BF16)[..., :128].unflatten(-1, (2, 64))
    weight = torch.randn(64, device=device)
    cos, sin = make_table("batch-full", 2, 3, 1, 64, device, FP32, True)
    options = (1e-6, False, True, 1)
    torch.library.opcheck(ops.rope.default, (q[:, :3], cos, sin, True, None))
    torch.library.opcheck(ops.rope.default, (q.flatten(2)[:, :3], cos[..., ::4], sin[..., ::4], False, 32))
    for arguments in ((None, None, None, 0, None), (weight, None, None, 2, 3)):
        torch.library.opcheck(
            ops.qk_norm_rope.default,
            (q, key, weight, None, *((cos, sin) if arguments[3] else (None, None)), *options, *arguments[:2],
             None, None, None, *arguments[3:]),
        )  # fmt: skip
    torch.library.opcheck(ops.q_norm_rope.default, (q, weight, cos, sin, *options, None, None, 1, 3))
    tables = [torch.randn(n, 32 // 3, 2, device=device) for n in (1, 1)] + [torch.randn(5, 12, 2, device=device)]
    torch.library.opcheck(ops.rope_3d.default, (q, key, *tables))


@pytest.mark.kernels_ci
def test_compile_fullgraph_with_dynamic_shapes_and_no_recompile(k, device, fresh_dynamo):
    """diffusers#11126: one graph for every batch, sequence length, text length and grid."""

    def block(q, key, weight, cos, sin, text, grid):
        a, b = k.qk_norm_rope(q, key, weight, weight, cos, sin, across_heads=True, rope_start=text)
        c, _ = k.qk_norm_rope(q, None, cos=cos, sin=sin, norm="layer", rope_len=q.shape[1] - text)
        d, e = k.rope_3d(a, b, grid)
        return a, b, c, d, e, k.rope(q[:, text:], cos, sin)

    compiled = torch.compile(block, fullgraph=True, dynamic=True, backend="aot_eager")
    weight = torch.randn(320, device=device)
    with torch.no_grad(), torch._dynamo.config.patch(error_on_recompile=True):
        for batch, grid, text in ((2, (2, 3, 4), 4), (3, (3, 4, 5), 7), (4, (2, 5, 7), 9), (2, (4, 4, 4), 33)):
            tokens = grid[0] * grid[1] * grid[2]
            q, key = (torch.randn(batch, tokens, 5, 64, device=device).to(BF16) for _ in range(2))
            cos, sin = make_table("shared", batch, tokens - text, 1, 64, device, FP32, True)
            arguments = (q, key, weight, cos, sin, text, grid)
            for got, expected in zip(compiled(*arguments), block(*arguments)):
                torch.testing.assert_close(got, expected, rtol=1e-2, atol=1e-2)


def test_compile_with_inductor_among_other_ops(k, device, fresh_dynamo):
    weight = torch.randn(128, device=device)

    def block(x, cos, sin):
        q, key = (x * 2).unflatten(-1, (4, 64)).chunk(2, dim=2)
        q, key = k.qk_norm_rope(q, key, weight, weight, cos, sin, across_heads=True)
        q, key = k.rope_3d(q + 1, key, (1, 2, 3))
        return F.scaled_dot_product_attention(q, key, k.rope(q, cos, sin))

    x = torch.randn(2, 6, 256, device=device).to(BF16)
    cos, sin = make_table("shared", 2, 6, 1, 64, device, FP32, True)
    with torch.no_grad():
        compiled = torch.compile(block, fullgraph=True)(x, cos, sin)
        torch.testing.assert_close(compiled, block(x, cos, sin), atol=0.1, rtol=0.05)


# ---- bad input -------------------------------------------------------------------------------------------


@pytest.fixture
def good(device):
    q = torch.randn(2, 5, 4, 64, device=device)
    key = torch.randn(2, 5, 2, 64, device=device)
    cos, sin = make_table("batch", 2, 5, 1, 64, device, FP32, True)
    return {"q": q, "k": key, "q_weight": torch.ones(64, device=device), "cos": cos, "sin": sin}


def table(*shape):
    return {"cos": torch.ones(shape), "sin": torch.ones(shape)}


@pytest.mark.parametrize(
    "change, message",
    [
        ({"q": torch.ones(5, 64)}, r"q has shape \[5, 64\]; \[batch, tokens, heads, head size\]"),
        ({"q": torch.ones(1, 2, 5, 4, 64)}, r"q has shape \[1, 2, 5, 4, 64\]"),
        ({"q": torch.ones(2, 5, 4, 64, dtype=torch.float64)}, "q has dtype float64; float32, float16 or bfloat16 is"),
        ({"q": torch.ones(2, 5, 4, 64, dtype=torch.int64)}, "q has dtype int64"),
        ({"k": torch.ones(2, 5, 2, 64, dtype=BF16)}, "k has dtype bfloat16; the dtype of q is needed: float32"),
        ({"k": torch.ones(3, 5, 2, 64)}, r"k has shape \[3, 5, 2, 64\]"),
        ({"k": torch.ones(2, 5, 2, 32)}, r"k has shape \[2, 5, 2, 32\].*head size \(64\)"),
        ({"k": torch.ones(2, 5, 128)}, r"k has shape \[2, 5, 128\]"),
        ({"k": torch.ones(2, 6, 2, 64)}, r"cos has shape \[2, 5, 32\]; for k \[6, R\]"),
        ({"q_weight": torch.ones(65)}, r"q_weight has shape \[65\]; \[64\], the head size of q, is needed"),
        ({"q_weight": torch.ones(1, 64)}, r"q_weight has shape \[1, 64\]"),
        ({"q_weight": torch.ones(64, dtype=torch.float64)}, "q_weight has dtype float64"),
        ({"q_weight": torch.ones(64), "across_heads": True}, r"q_weight has shape \[64\]; \[256\], the heads times"),
        ({"k_weight": torch.ones(256), "q_weight": None, "across_heads": True}, r"k_weight has shape \[256\]; \[128\]"),
        ({"k_bias": torch.ones(63)}, r"k_bias has shape \[63\]"),
        ({"norm": "none"}, "q_weight is given and norm is 'none'"),
        ({"norm": "none", "q_weight": None, "q_bias": torch.ones(64)}, "q_bias is given and norm is 'none'"),
        ({"sin": None}, "sin is missing; it goes with cos"),
        ({"cos": None}, "cos is missing; it goes with sin"),
        ({"k_cos": torch.ones(5, 64)}, "k_sin is missing; it goes with k_cos"),
        ({"sin": torch.ones(2, 5, 64)}, r"sin has shape \[2, 5, 64\]; the shape of cos is needed: \[2, 5, 32\]"),
        ({"sin": torch.ones(2, 5, 32, dtype=BF16)}, "sin has dtype bfloat16; the dtype of cos is needed: float32"),
        (table(2, 5, 48), r"cos has shape \[2, 5, 48\].*R being the head size 64"),
        (table(4, 32), r"cos has shape \[4, 32\]; for q \[5, R\]"),
        (table(3, 5, 32), r"cos has shape \[3, 5, 32\]; for q .*\[2 or 1, 5, R\]"),
        (table(5, 4, 32), r"cos has shape \[5, 4, 32\]"),
        (table(1, 5, 3, 32), r"cos has shape \[1, 5, 3, 32\].*4 or 1, R\]"),
        (table(1, 5, 4, 32), r"cos has shape \[1, 5, 4, 32\]; for k"),
        (table(32), r"cos has shape \[32\]"),
        ({"cos": torch.ones(5, 64).double(), "sin": torch.ones(5, 64).double()}, "cos has dtype float64"),
        ({"rotary_dim": 66}, "rotary_dim is 66; 1 to the head size 64 is needed"),
        ({"rotary_dim": 0}, "rotary_dim is 0"),
        ({"rotary_dim": -2}, "rotary_dim is -2"),
        ({"rotary_dim": 33}, r"R being the rotary_dim 33 \(an even number\)"),
        ({"rope_start": -1}, "rope_start is -1; 0 or more is needed"),
        ({"rope_start": 6}, "rope_start is 6; q has only 5 tokens"),
        ({"rope_len": -1}, "rope_len is -1"),
        ({"rope_start": 3, "rope_len": 3}, "rope_start is 3 and rope_len 3; q has only 5 tokens"),
        ({"rope_start": 1}, r"cos has shape \[2, 5, 32\]; for q \[4, R\]"),
    ],
)  # fmt: skip
def test_bad_arguments_are_named(k, device, good, change, message):
    change = {name: v.to(device) if isinstance(v, torch.Tensor) else v for name, v in change.items()}
    with pytest.raises(RuntimeError, match=message):
        k.qk_norm_rope(**{**good, **change})
    k.qk_norm_rope(**good)


def test_an_argument_on_another_device_is_named(k, device, good):
    other = "meta" if device == "cpu" else "cpu"
    for name in ("k", "q_weight", "cos", "sin"):
        with pytest.raises(RuntimeError, match=f"{name} is on"):
            k.qk_norm_rope(**{**good, name: good[name].to(other)})


def test_bad_values_are_named(k, device, good):
    with pytest.raises(ValueError, match="norm is 'batch'"):
        k.qk_norm_rope(**good, norm="batch")
    with pytest.raises(ValueError, match="k_weight is given and k is None"):
        k.qk_norm_rope(**{**good, "k": None, "k_weight": good["q_weight"]})
    q = good["q"][:1, :, :, :24]
    with pytest.raises(ValueError, match=r"grid is \(1, 5\); three sizes"):
        k.rope_3d(q, q, (1, 5))
    for axes_dim in ((8, 8, 6), (9, 9, 6), (12, 12), (26, -2, 0)):
        with pytest.raises(ValueError, match="axes_dim is .*three even sizes that sum to the head size 24"):
            k.rope_3d(q, q, (1, 1, 5), axes_dim=axes_dim)
    for grid in ((1, 1, 5.0), (1.0, 1, 5), (1, 0.5, 10), (-1, -1, 5), ("1", 1, 5)):
        with pytest.raises(ValueError, match="grid is .*three sizes"):
            k.rope_3d(q, q, grid)
    for axes_dim in ((8.0, 8, 8), (8, 8, "8")):
        with pytest.raises(ValueError, match="axes_dim is .*three even sizes"):
            k.rope_3d(q, q, (1, 1, 5), axes_dim=axes_dim)
    with pytest.raises(RuntimeError, match=r"q has shape \[\]"):
        k.rope_3d(torch.tensor(1.0, device=device), q, (1, 1, 5))
    with pytest.raises(RuntimeError, match=r"grid is \(1, 2, 3\), 6 tokens; q has 5"):
        k.rope_3d(q, q, (1, 2, 3))
    with pytest.raises(RuntimeError, match=r"x has shape \[2, 5\]"):
        k.rope(torch.ones(2, 5, device=device), good["cos"], good["sin"])
    with pytest.raises(RuntimeError, match="cos has shape .* 3 heads; x has a hidden size of 64"):
        k.rope(torch.ones(2, 5, 64, device=device), *(torch.ones(1, 5, 3, 16, device=device),) * 2)
