"""The norm family, forward: rms_norm, layer_norm, ada_norm, gated_residual, residual_ada_norm, add_rms_norm.

Every test runs on both backends. Accuracy is judged by reference.py's rule; a regression test is named by the failure
that it guards.
"""

from __future__ import annotations

import pytest
import reference
import torch
import torch._dynamo
import torch.nn.functional as F
from conftest import DTYPES, full_gpu_memory, misaligned, same_bits
from layouts import VIEWS, RandomLayouts, assert_nothing_copied
from reference import assert_no_worse_than_eager, assert_rounded_once

FP32, FP16, BF16 = DTYPES.values()
FP64 = torch.float64

#: op -> (function, keyword arguments that choose the variant). Each gets its whole sentence from `make_inputs`.
OPS = {
    "rms_norm": ("rms_norm", {}),
    "layer_norm": ("layer_norm", {}),
    "ada_norm-rms": ("ada_norm", {"norm": "rms"}),
    "ada_norm-layer": ("ada_norm", {"norm": "layer"}),
    "gated_residual": ("gated_residual", {}),
    "residual_ada_norm-rms": ("residual_ada_norm", {"norm": "rms"}),
    "residual_ada_norm-layer": ("residual_ada_norm", {"norm": "layer"}),
    "add_rms_norm": ("add_rms_norm", {}),
}
OPERANDS = {
    "rms_norm": ("x", "weight"),
    "layer_norm": ("x", "weight", "bias"),
    "ada_norm": ("x", "scale", "shift", "weight", "bias", "scale_table", "shift_table"),
    "gated_residual": ("residual", "x", "gate", "gate_table"),
    "residual_ada_norm": (
        "residual", "x", "gate", "scale", "shift", "weight", "bias", "gate_table", "scale_table", "shift_table",
    ),
    "add_rms_norm": ("x", "residual", "weight"),
}  # fmt: skip
MODULATIONS = ("gate", "scale", "shift")

# Below and above every step of the launch policy, odd ones, and those that users reported.
# 24584 and 33000: clusters of blocks with segments that are not full, or empty.
HIDDEN = [1, 2, 7, 8, 9, 63, 64, 96, 127, 1000, 1001, 3420, 3584, 4096, 12288, 16384, 24584, 33000, 65536, 70001]


@pytest.fixture(params=OPS)
def op(request) -> str:
    return request.param


def make_inputs(op, shape, dtype, device, *, param_dtype=None, residual_dtype=None, modulation=None) -> dict:
    """The op's whole sentence. `modulation`: the shape of gate, scale and shift ([..., 1, D] unless given)."""
    hidden = shape[-1]
    if modulation is None:
        modulation = (*shape[:-2], 1, hidden) if len(shape) > 1 else (hidden,)
    shapes = {"x": shape, "residual": shape, **dict.fromkeys(MODULATIONS, modulation)}
    inputs = {}
    for name in OPERANDS[OPS[op][0]]:
        of = {"x": dtype, "residual": residual_dtype or dtype}.get(name, param_dtype or dtype)
        inputs[name] = torch.randn(shapes.get(name, (hidden,)), device=device).to(of)
    return inputs


def call(k, op, inputs, **extra):
    name, variant = OPS[op]
    outputs = getattr(k, name)(**inputs, **variant, **extra)
    return outputs if isinstance(outputs, tuple) else (outputs,)


def check(k, op, inputs, **extra):
    """The op against fp64 by the rule: outputs contiguous and of their dtypes, the inputs untouched."""
    name, variant = OPS[op]
    before = {key: tensor.clone() for key, tensor in inputs.items()}
    outputs = call(k, op, inputs, **extra)
    for key, tensor in inputs.items():
        assert torch.equal(tensor, before[key]), f"{name} wrote to {key}"
    assert all(output.is_contiguous() for output in outputs)
    if len(outputs) == 2:
        extra["new_residual"] = outputs[1]
    expected, eager = (getattr(reference, name)(**inputs, **variant, **extra, compute=t) for t in (FP64, FP32))
    if len(outputs) == 2:
        assert_no_worse_than_eager(outputs[1], eager[1], expected[1], inputs["residual"].dtype)
        expected, eager = expected[0], eager[0]
    dtype = inputs["residual" if name == "gated_residual" else "x"].dtype
    assert_no_worse_than_eager(outputs[0], eager, expected, dtype)
    return outputs


# ---- sizes, dtypes, operands ------------------------------------------------------------------------------


@pytest.mark.parametrize("hidden", HIDDEN)
def test_every_hidden_size(k, op, device, dtype, hidden):
    check(k, op, make_inputs(op, (2, 3, hidden) if hidden < 20000 else (2, hidden), dtype, device))


@pytest.mark.kernels_ci
@pytest.mark.parametrize("hidden", [64, 1001, 2048])
def test_typical_sizes(k, op, device, dtype, hidden):
    check(k, op, make_inputs(op, (2, 16, hidden), dtype, device))


@pytest.mark.parametrize("rows", [0, 1, 65535, 65536, 65537])
def test_any_number_of_rows(k, op, device, rows):
    """apex#411: a grid dimension ends at 65535."""
    check(k, op, make_inputs(op, (rows, 8), BF16, device))


@pytest.mark.parametrize("hidden", [96, 100])
@pytest.mark.parametrize("param_dtype", DTYPES.values(), ids=DTYPES)
def test_parameters_of_every_dtype(k, op, device, dtype, param_dtype, hidden):
    check(k, op, make_inputs(op, (2, 5, hidden), dtype, device, param_dtype=param_dtype))


@pytest.mark.parametrize("op", ["gated_residual", "residual_ada_norm-rms", "residual_ada_norm-layer", "add_rms_norm"])
@pytest.mark.parametrize("hidden", [96, 1001, 16384])
@pytest.mark.parametrize("residual_dtype", DTYPES.values(), ids=DTYPES)
def test_residual_of_another_dtype(k, op, device, dtype, residual_dtype, hidden):
    check(k, op, make_inputs(op, (2, 3, hidden), dtype, device, residual_dtype=residual_dtype))


def test_each_operand_may_be_absent(k, op, device, dtype):
    """apex#403: weight=None. Every subset of the optional operands, a table only beside what it is added to."""
    full = make_inputs(op, (2, 3, 40), dtype, device)
    optional = [name for name in full if name not in ("x", "residual") and not name.endswith("_table")]
    for chosen in range(1 << len(optional)):
        inputs = {name: full[name] for name in ("x", "residual") if name in full}
        for bit, name in enumerate(optional):
            if chosen >> bit & 1:
                inputs[name] = full[name]
                if (table := f"{name}_table") in full and chosen & 1:
                    inputs[table] = full[table]
        check(k, op, inputs)


@pytest.mark.parametrize("op", ["rms_norm", "residual_ada_norm-rms", "add_rms_norm"])
def test_weight_offset_is_added_in_fp32(k, op, device, dtype):
    """Gemma's 1 + w: w = 15.8125 is exact in bf16 and 16.8125 is not."""
    inputs = make_inputs(op, (4, 512), dtype, device)
    inputs["weight"] = torch.full((512,), 15.8125, dtype=dtype, device=device)
    check(k, op, inputs, weight_offset=1.0)


@pytest.mark.parametrize("op", ["rms_norm", "residual_ada_norm-rms", "add_rms_norm"])
def test_weight_offset_is_ignored_without_a_weight(k, op, device):
    inputs = make_inputs(op, (4, 64), FP32, device)
    del inputs["weight"]
    assert same_bits(call(k, op, inputs, weight_offset=1.0), call(k, op, inputs))


@pytest.mark.parametrize("eps", [0.0, 1e-8, 1e-5, 1.0])
def test_eps(k, device, dtype, eps):
    x = torch.randn(4, 256, device=device).to(dtype) * 1e-3
    assert_rounded_once(k.rms_norm(x, eps=eps), reference.rms_norm(x, eps=eps), dtype)
    assert_rounded_once(k.layer_norm(x, eps=eps), reference.layer_norm(x, eps=eps), dtype)


@pytest.mark.parametrize("op", ["residual_ada_norm-rms", "residual_ada_norm-layer", "add_rms_norm"])
def test_the_chain_of_both_roundings_is_no_worse_than_eager(k, op, device, dtype):
    """`check` takes the op's own new_residual; here the reference rounds nothing between."""
    name, variant = OPS[op]
    inputs = make_inputs(op, (2, 64, 2048), dtype, device)
    eager = getattr(reference, name)(**inputs, **variant, compute=FP32)
    exact = {key: tensor.double() for key, tensor in inputs.items()}
    expected = getattr(reference, name)(**exact, **variant)
    for actual, e, r in zip(call(k, op, inputs), eager, expected):
        assert_no_worse_than_eager(actual, e, r, dtype)


@pytest.mark.parametrize("hidden", [64, 1000, 2048, 4096, 16384, 24584, 33000, 65536, 70001])
def test_no_worse_than_torch_over_long_rows(k, device, dtype, hidden):
    """A running sum over a long row loses what torch's pairwise one keeps."""
    x = torch.randn(8, hidden, device=device).to(dtype)
    weight, bias = (torch.randn(hidden, device=device).to(dtype) for _ in range(2))
    eager = F.rms_norm(x, (hidden,), weight, eps=1e-6)
    assert_no_worse_than_eager(k.rms_norm(x, weight), eager, reference.rms_norm(x, weight), dtype)
    eager = F.layer_norm(x, (hidden,), weight, bias, eps=1e-5)
    assert_no_worse_than_eager(k.layer_norm(x, weight, bias), eager, reference.layer_norm(x, weight, bias), dtype)


def test_llama_rounding(k, device):
    """cast_before_weight rounds to x's dtype, then multiplies: transformers' LlamaRMSNorm, bit for bit but for ties."""
    for dtype in (FP16, BF16):
        x = torch.randn(64, 4096, device=device).to(dtype)
        weight = torch.randn(4096, device=device).to(dtype)
        stock = weight * (x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + 1e-5)).to(dtype)
        ours = k.rms_norm(x, weight, 1e-5, cast_before_weight=True)
        differing = (ours != stock).float().mean().item()
        assert differing < 1e-3, f"{differing:.1%} of the elements differ"
        assert (ours.float() - stock.float()).abs().max() <= torch.finfo(dtype).eps * stock.float().abs().max()
        once = k.rms_norm(x, weight, 1e-5)
        assert (once != stock).float().mean() > 0.1, "without the switch there is one rounding, not two"


def test_rmsnorm_is_the_same_function(k):
    assert k.rmsnorm is k.rms_norm


# ---- layouts ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("op", [op for op in OPS if any(m in OPERANDS[OPS[op][0]] for m in MODULATIONS)])
@pytest.mark.parametrize("hidden", [96, 101])
@pytest.mark.parametrize("shape", ["D", "1,1,D", "B,1,D", "1,S,D", "S,D", "B,S,D", "1,D"])
def test_modulation_shapes(k, op, device, dtype, shape, hidden):
    sizes = {"B": 2, "S": 5, "D": hidden, "1": 1}
    modulation = tuple(sizes[s] for s in shape.split(","))
    for param_dtype in (dtype, FP32):
        check(k, op, make_inputs(op, (2, 5, hidden), dtype, device, modulation=modulation, param_dtype=param_dtype))


@pytest.mark.parametrize("tokens", [1, 5])
@pytest.mark.parametrize("source", ["chunk", "unbind"])
@pytest.mark.parametrize("hidden", [64, 65])
def test_modulation_views_are_read_in_place(k, device, dtype, source, tokens, hidden):
    """Views of chunk(6, dim=-1) and of unbind(dim=2) of [B, M, 6, D], M = 1 or one a token."""
    if source == "chunk":
        six = torch.randn(2, tokens, 6 * hidden, device=device).to(dtype).chunk(6, dim=-1)
    else:
        six = torch.randn(2, tokens, 6, hidden, device=device).to(dtype).unbind(dim=2)
    tables = torch.randn(6, hidden, device=device)  # LTX-Video's scale_shift_table, fp32 beside a 16-bit model
    x, residual = (torch.randn(2, 5, hidden, device=device).to(dtype) for _ in range(2))
    inputs = {"residual": residual, "x": x, "gate": six[2], "scale": six[1], "shift": six[0]}
    inputs |= {"gate_table": tables[2], "scale_table": tables[1], "shift_table": tables[0]}
    check(k, "residual_ada_norm-rms", inputs)
    assert_nothing_copied(lambda: call(k, "residual_ada_norm-rms", inputs))


def test_row_strided_x_is_read_in_place(k, op, device, dtype):
    """q of a fused QKV projection: [B, S, 3D] sliced."""
    inputs = make_inputs(op, (2, 5, 64), dtype, device)
    for name in ("x", "residual"):
        if name in inputs:
            inputs[name] = torch.randn(2, 5, 192, device=device).to(inputs[name].dtype)[..., 64:128]
    check(k, op, inputs)
    assert_nothing_copied(lambda: call(k, op, inputs))


VIEWS = {**VIEWS, "one column of many": lambda r: r(6, 5)[:, 2:3]}


@pytest.mark.parametrize("view", VIEWS)
def test_views_of_every_rank(k, op, device, view):
    """LightLLM#1467: x = y.t(). What cannot be read in place is copied, never misread."""
    for dtype in (FP32, BF16):
        x = VIEWS[view](lambda *shape, d=dtype: torch.randn(shape, device=device).to(d))
        inputs = make_inputs(op, tuple(x.shape), dtype, device)
        inputs["x"] = x
        check(k, op, inputs)
        if "residual" in inputs:
            check(k, op, {**inputs, "residual": VIEWS[view](lambda *s, d=dtype: torch.randn(s, device=device).to(d))})


@pytest.mark.parametrize("case", range(60))
def test_random_layouts(k, device, case):
    """Random rank, sizes, dtypes, permutations, slices, broadcasts and offsets of all operands at once."""
    random = RandomLayouts(case, device)
    pick = random.pick
    rank = pick(1, 2, 3, 3, 4, 5, 6)
    shape = tuple(pick(1, 2, 3) for _ in range(rank - 1)) + (pick(1, 5, 8, 24, 40, 129),)
    op = pick(*OPS)
    dtype, residual_dtype, param_dtype = (pick(FP32, FP16, BF16) for _ in range(3))
    inputs = make_inputs(op, shape, dtype, device, residual_dtype=residual_dtype, param_dtype=param_dtype)
    for name in inputs:
        if name in ("x", "residual"):
            inputs[name] = random.tensor(shape, inputs[name].dtype)
        elif name not in ("weight", "bias"):
            drop = pick(*range(rank))
            broadcast = tuple(pick(1, size) for size in shape[:-1])[drop:] + shape[-1:]
            inputs[name] = random.tensor(broadcast, pick(FP32, FP16, BF16))
    check(k, op, inputs)


# ---- silent failures that users of other packages met ----------------------------------------------------


def test_flashinfer_634_fp16_3584_misaligned(k, device):
    x = misaligned(torch.randn(7, 3584, device=device, dtype=FP16))
    check(k, "rms_norm", {"x": x, "weight": misaligned(torch.randn(3584, device=device, dtype=FP16))})


def test_flashinfer_718_hidden_16384_needs_no_more_shared_memory_than_there_is(k, device):
    check(k, "add_rms_norm", make_inputs("add_rms_norm", (3, 16384), FP16, device))
    check(k, "residual_ada_norm-layer", make_inputs("residual_ada_norm-layer", (3, 16384), FP32, device))


def test_flash_attention_289_view_with_strides_925200_3600_1(k, op, device):
    inputs = make_inputs(op, (2, 257, 1200), FP16, device)
    inputs["x"] = torch.randn(2, 257, 3600, device=device, dtype=FP16)[..., 1200:2400]
    assert inputs["x"].stride() == (925200, 3600, 1)
    check(k, op, inputs)


def test_flash_attention_781_x_of_one_dimension(k, op, device, dtype):
    check(k, op, make_inputs(op, (4,), dtype, device))


def test_flash_attention_120_hidden_12288(k, op, device):
    check(k, op, make_inputs(op, (2, 2, 12288), BF16, device))


def test_quack_12_bf16_weight_and_three_dimensions(k, device):
    check(k, "rms_norm", make_inputs("rms_norm", (3, 7, 768), BF16, device, param_dtype=BF16))


def test_transformer_engine_490_weight_of_a_flat_buffer(k, op, device, dtype):
    hidden = 512
    flat = torch.randn(8 * hidden + 1, device=device).to(dtype)
    inputs = make_inputs(op, (5, hidden), dtype, device)
    for i, name in enumerate(n for n in ("weight", "bias") if n in inputs):
        inputs[name] = flat[1 + i * hidden : 1 + (i + 1) * hidden]
    check(k, op, inputs)


def test_transformers_30236_output_has_the_dtype_of_x(k, device):
    """An fp32 weight beside bf16 x must not promote the output."""
    x, weight = torch.randn(3, 64, device=device, dtype=BF16), torch.randn(64, device=device)
    assert k.rms_norm(x, weight).dtype == BF16
    assert k.layer_norm(x, weight, weight).dtype == BF16
    y, new_residual = k.add_rms_norm(x, x.float(), weight)
    assert (y.dtype, new_residual.dtype) == (BF16, FP32)


def test_lightllm_1467_transposed_x(k, op, device, dtype):
    inputs = make_inputs(op, (24, 40), dtype, device)
    inputs["x"] = torch.randn(40, 24, device=device).to(dtype).t()
    check(k, op, inputs)


@pytest.mark.parametrize("shape", [(0,), (0, 0), (3, 0), (0, 8), (2, 0, 8), (0, 3, 1, 8), (2, 3, 0)])
def test_zero_size_inputs(k, op, device, dtype, shape):
    for output in call(k, op, make_inputs(op, shape, dtype, device)):
        assert output.shape == shape and output.dtype == dtype and output.device.type == device


@pytest.mark.parametrize("hidden", [64, 768, 3072, 4096, 65536, 70001])
def test_layer_norm_of_a_large_mean(k, device, hidden):
    """1000 + randn: E[x²] - mean² cancels to nothing, and a rounded mean alone costs 3e-5."""
    for dtype in (FP32, FP16, BF16):
        x = (1000 + torch.randn(6, hidden, device=device)).to(dtype)
        eager = F.layer_norm(x, (hidden,), eps=1e-5)
        assert_no_worse_than_eager(k.layer_norm(x), eager, reference.layer_norm(x), dtype)
        inputs = make_inputs("residual_ada_norm-layer", (6, hidden), dtype, device)
        inputs["residual"] = x
        y, new_residual = call(k, "residual_ada_norm-layer", inputs)
        expected, _ = reference.residual_ada_norm(**inputs, norm="layer", new_residual=new_residual)
        eager, _ = reference.residual_ada_norm(**inputs, norm="layer", new_residual=new_residual, compute=FP32)
        assert_no_worse_than_eager(y, eager.to(dtype), expected, dtype)


@pytest.mark.parametrize("value, hidden", [(3.3, 1000), (1000.0, 1920), (3000.0, 3584)])
def test_layer_norm_of_a_constant_row_is_the_bias(k, device, dtype, value, hidden):
    """Its variance is 0, and rstd 1 / sqrt(eps): what the mean is off by would show a thousandfold."""
    weight, bias = (torch.randn(hidden, device=device, dtype=dtype) for _ in range(2))
    x = torch.full((3, hidden), value, device=device, dtype=dtype)
    torch.testing.assert_close(k.layer_norm(x, weight, bias, 1e-6), bias.expand_as(x), rtol=0, atol=1e-3)


def test_magnitudes_near_the_ends_of_the_range(k, device):
    """Squares are formed in fp32: 6e4 in fp16 does not overflow; tiny rows are not flushed."""
    for dtype, size in ((FP16, 6e4), (FP16, 1e-4), (BF16, 1e17), (BF16, 1e-15), (FP32, 1e17), (FP32, 1e-15)):
        x = (size * (0.5 + torch.rand(4, 1024, device=device))).to(dtype)
        x = x.clamp(max=torch.finfo(dtype).max)
        assert_rounded_once(k.rms_norm(x, eps=0.0), reference.rms_norm(x, eps=0.0), dtype)


def test_nan_and_inf_stay_in_their_row(k, op, device, dtype):
    inputs = make_inputs(op, (6, 200), dtype, device)
    clean = call(k, op, inputs)
    inputs["x"][1, 17] = float("nan")
    inputs["x"][3, 199] = float("inf")
    for output, before in zip(call(k, op, inputs), clean):
        assert output[1].isnan().any() and not output[3].isfinite().all()
        for row in (0, 2, 4, 5):
            assert torch.equal(output[row], before[row])
    if op != "gated_residual":
        assert call(k, op, inputs)[0][1].isnan().all(), "a NaN reaches its whole row through the statistic"


@pytest.mark.gpu
@pytest.mark.parametrize(
    "op, shape, dtype",
    [
        ("rms_norm", (1048641, 4096), FP16),  # vllm#42862
        ("rms_norm", (2**23 + 16, 256), BF16),  # Liger#1483
        ("residual_ada_norm-rms", (2, 2**19 + 1, 2048), BF16),
        ("layer_norm", (2**31 // 8 + 3, 8), BF16),
        ("layer_norm", (2**28 - 5, 16), BF16),  # the most rows that the fast kernel takes
    ],
)
def test_more_than_2_31_elements(k, op, shape, dtype, gpu):
    elements = torch.Size(shape).numel()
    needed = elements * 2 * (5 if op.startswith("residual") else 3)
    if torch.cuda.mem_get_info()[0] < needed:
        pytest.skip(f"needs {needed >> 30} GB of free GPU memory")
    inputs = make_inputs(op, shape[:-2] + (1, shape[-1]) if len(shape) > 2 else (1, shape[-1]), dtype, "cuda")
    for name in ("x", "residual"):
        if name in inputs:
            inputs[name] = torch.empty(shape, dtype=dtype, device="cuda").normal_()
    outputs = call(k, op, inputs)
    for rows in (slice(0, 16), slice(shape[-2] // 2, shape[-2] // 2 + 16), slice(shape[-2] - 16, shape[-2])):
        part = {n: t[..., rows, :] if n in ("x", "residual") else t for n, t in inputs.items()}
        expected = check(k, op, part)
        assert same_bits([output[..., rows, :] for output in outputs], expected)
    del outputs, inputs
    torch.cuda.empty_cache()


# ---- determinism -----------------------------------------------------------------------------------------


def test_the_layout_does_not_change_bits(k, op, device, dtype):
    """A strided, a transposed and a contiguous x are one row each to the kernel."""
    inputs = make_inputs(op, (6, 200), dtype, device)
    expected = call(k, op, inputs)
    x = inputs["x"]
    wide = torch.zeros(6, 403, device=device, dtype=dtype)
    wide[:, 101:301] = x
    for moved in (
        wide[:, 101:301],
        x.t().contiguous().t(),
        x.reshape(2, 3, 200).transpose(0, 1).contiguous().transpose(0, 1).reshape(6, 200),
    ):
        assert same_bits(call(k, op, {**inputs, "x": moved}), expected)


@pytest.mark.parametrize("hidden", [3584, 12288, 24584, 33000, 65536])
def test_alignment_does_not_change_bits_of_long_rows(k, device, dtype, hidden):
    """Aligned rows may be those of a cluster of blocks, the others go through one block."""
    x, weight, bias = (torch.randn(*shape, hidden, device=device).to(dtype) for shape in ((3,), (), ()))
    wide = torch.zeros(3, hidden + 9, device=device, dtype=dtype)
    wide[:, 5 : 5 + hidden] = x
    moved = wide[:, 5 : 5 + hidden]
    assert same_bits(k.rms_norm(moved, weight), k.rms_norm(x, weight))
    assert same_bits(k.layer_norm(moved, weight, bias), k.layer_norm(x, weight, bias))


# ---- streams, graphs, devices ----------------------------------------------------------------------------


@pytest.mark.gpu
def test_out_of_memory_in_a_copy_keeps_its_type(k, op, gpu):
    """An x that cannot be read in place is copied; a copy that finds no room counts too."""

    def make() -> dict:
        inputs = make_inputs(op, (1, 4096), BF16, "cuda")
        x = torch.empty(4096, 2**16, dtype=BF16, device="cuda").t()
        return {**inputs, "x": x, **({"residual": x} if "residual" in inputs else {})}

    with full_gpu_memory(make) as big, pytest.raises(torch.OutOfMemoryError):
        call(k, op, big)
    del big
    torch.cuda.empty_cache()
    check(k, op, make_inputs(op, (3, 64), BF16, "cuda"))


# ---- torch.compile ----------------------------------------------------------------------------------------


def test_compile_with_inductor_among_other_ops(k, device, fresh_dynamo):
    """All ops in one graph with pointwise ops around them, as in a model."""
    x, residual = (torch.randn(2, 6, 64, device=device, dtype=BF16) for _ in range(2))
    scale, shift, gate = torch.randn(2, 1, 192, device=device, dtype=BF16).chunk(3, dim=-1)
    weight = torch.randn(64, device=device)

    def block(x, residual, scale, shift, gate, weight):
        y = k.ada_norm(x * 2, scale, shift) + k.layer_norm(x, weight)
        y, h = k.residual_ada_norm(residual, y, gate, scale, shift, weight)
        y, h = k.add_rms_norm(y.relu(), h, weight)
        return k.gated_residual(h, k.rms_norm(y, weight) - 1, gate)

    with torch.no_grad():
        arguments = (x, residual, scale, shift, gate, weight)
        compiled = torch.compile(block, fullgraph=True)(*arguments)
        torch.testing.assert_close(compiled, block(*arguments), atol=0.1, rtol=0.05)


@pytest.mark.gpu
def test_compile_reduce_overhead(k, gpu, fresh_dynamo):
    """Inductor's CUDA graphs over our ops."""
    weight = torch.randn(256, device="cuda", dtype=BF16)
    compiled = torch.compile(lambda x: k.rms_norm(x + 1, weight) * 2, mode="reduce-overhead", fullgraph=True)
    with torch.no_grad():
        for _ in range(4):
            x = torch.randn(8, 256, device="cuda", dtype=BF16)
            torch.testing.assert_close(compiled(x).clone(), k.rms_norm(x + 1, weight) * 2, atol=0.1, rtol=0.05)


# ---- bad input -------------------------------------------------------------------------------------------


def test_an_operand_of_a_wrong_shape_is_named(k, op, device):
    inputs = make_inputs(op, (2, 3, 16), FP32, device)
    for name in inputs:
        wrongs = [(15,), (17,), (2, 3, 8), (4, 3, 16), (2, 4, 16), (1, 2, 3, 16), (1,), (0,), (3, 2, 16), ()]
        if name in ("weight", "bias"):
            wrongs += [(1, 16), (3, 16)]
        if name == "x":
            wrongs = [(2, 3, 15), ()]  # any other shape is a right one, with the others wrong
        for shape in wrongs:
            with pytest.raises(RuntimeError, match=r"has shape \[.*is needed|at least one dimension is needed"):
                call(k, op, {**inputs, name: torch.ones(shape, device=device)})
        if name != "x":
            with pytest.raises(RuntimeError, match=rf"{name} has shape \[17\].*needed"):
                call(k, op, {**inputs, name: torch.ones(17, device=device)})
    check(k, op, inputs)


def test_a_table_without_its_modulation(k, device):
    x, table = torch.randn(2, 16, device=device), torch.randn(16, device=device)
    for arguments in ({"scale_table": table}, {"shift_table": table}):
        with pytest.raises(RuntimeError, match="_table is given without"):
            k.ada_norm(x, **arguments)
    with pytest.raises(RuntimeError, match="gate_table is given without gate"):
        k.gated_residual(x, x, gate_table=table)


@pytest.mark.parametrize("norm", ["RMS", "batch", "", None])
def test_an_unknown_norm(k, device, norm):
    x = torch.randn(2, 16, device=device)
    with pytest.raises(ValueError, match="'rms' or 'layer' is needed"):
        k.ada_norm(x, norm=norm)
    with pytest.raises(ValueError, match="'rms' or 'layer' is needed"):
        k.residual_ada_norm(x, x, norm=norm)


def test_more_dimensions_than_are_supported(k, device):
    x = torch.randn([1] * 15 + [8], device=device)
    check(k, "rms_norm", {"x": x})
    with pytest.raises(RuntimeError, match="at most 16 are supported"):
        k.rms_norm(x[None])


def test_forward_mode_derivatives_are_a_clear_error(k, device):
    """Without a formula torch would give zeros, silently."""
    x = torch.randn(3, 8, device=device)
    for function in (k.rms_norm, k.layer_norm, k.ada_norm, k.gelu, lambda v: k.gated_residual(v, v)):
        with pytest.raises(RuntimeError, match="no forward-mode derivative"):
            torch.func.jvp(function, (x,), (x,))
