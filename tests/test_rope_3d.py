"""rope_3d: the rotation of q and k by their place on a grid of tokens, without a table of all of them."""

from __future__ import annotations

import pytest
import reference
import torch
from conftest import DTYPES, same_bits
from reference import assert_no_worse_than_eager, assert_rounded_once
from rope_problems import check, make_table

FP32, FP16, BF16 = DTYPES.values()


@pytest.mark.parametrize(
    "grid, head_size, options",
    [
        ((3, 4, 5), 128, {}),
        ((2, 3, 2), 64, {}),
        ((1, 1, 1), 64, {}),
        ((2, 3, 4), 128, {"axes_dim": (16, 56, 56), "theta": 256.0}),
        ((2, 3, 4), 96, {"axes_dim": (32, 32, 32)}),
        ((4, 2, 3), 32, {"axes_dim": (32, 0, 0)}),
        ((4, 2, 3), 32, {"axes_dim": (0, 20, 12)}),
        ((2, 2, 3), 10, {"axes_dim": (2, 2, 6)}),
        ((1, 1, 700), 64, {}),
    ],
)
def test_rope_3d(k, device, dtype, grid, head_size, options):
    tokens = grid[0] * grid[1] * grid[2]
    q = torch.randn(2, tokens, 3, head_size, device=device).to(dtype)
    key = torch.randn(2, 1, tokens, head_size, device=device).to(dtype).transpose(1, 2)
    check(k, "rope_3d", q=q, k=key, grid=grid, **options)


def test_rope_3d_agrees_with_diffusers_wan(k, device, dtype):
    wan = pytest.importorskip("diffusers.models.transformers.transformer_wan")
    rope = wan.WanRotaryPosEmbed(attention_head_dim=128, patch_size=(1, 2, 2), max_seq_len=64).to(device)
    cos, sin = rope(torch.zeros(1, 16, 3, 8, 10, device=device))
    q, key = (torch.randn(1, 3 * 4 * 5, 4, 128, device=device).to(dtype) for _ in range(2))
    for output, x in zip(k.rope_3d(q, key, (3, 4, 5)), (q, key)):
        x1, x2 = x.unflatten(-1, (-1, 2)).unbind(-1)  # WanAttnProcessor's own function is local to its call
        c, s = cos[..., 0::2], sin[..., 1::2]
        stock = torch.empty_like(x)
        stock[..., 0::2] = x1 * c - x2 * s
        stock[..., 1::2] = x1 * s + x2 * c
        expected = reference.rope(x, cos, sin)
        assert_no_worse_than_eager(output, stock, expected)


def test_rope_3d_agrees_with_diffusers_hunyuan_video(k, device, dtype):
    hunyuan = pytest.importorskip("diffusers.models.transformers.transformer_hunyuan_video")
    from diffusers.models.embeddings import apply_rotary_emb

    rope = hunyuan.HunyuanVideoRotaryPosEmbed(patch_size=2, patch_size_t=1, rope_dim=[16, 56, 56], theta=256.0)
    cos, sin = rope(torch.zeros(1, 16, 3, 8, 10, device=device))
    q, key = (torch.randn(1, 3 * 4 * 5, 4, 128, device=device).to(dtype) for _ in range(2))
    outputs = k.rope_3d(q, key, (3, 4, 5), axes_dim=(16, 56, 56), theta=256.0)
    for output, x in zip(outputs, (q, key)):
        stock = apply_rotary_emb(x, (cos, sin), sequence_dim=1)
        torch.testing.assert_close(output, stock, rtol=1e-2, atol=1e-2 if dtype == BF16 else 2e-3)
        # its frequencies are fp32: ours, in fp64, are nearer to the formula
        assert_rounded_once(output, reference.rope_3d(x, x, (3, 4, 5), axes_dim=(16, 56, 56), theta=256.0)[0])


def test_rope_positions_up_to_1e5(k, device):
    """A fast sincos or fp32 frequencies fail there."""
    q = torch.randn(1, 100_000, 1, 12, device=device)
    expected = reference.rope_3d(q, q, (100_000, 1, 1), axes_dim=(12, 0, 0))[0]
    got = k.rope_3d(q, q, (100_000, 1, 1), axes_dim=(12, 0, 0))[0]
    assert_rounded_once(got[:, -100:], expected[:, -100:])


def tables_module(k):
    import sys

    return sys.modules[k.rope_3d.__module__.rsplit(".", 1)[0] + "._rope_tables"]


def test_rope_3d_tables_are_built_once_and_of_use_outside_inference_mode(k, device):
    tables = tables_module(k)._tables
    q = torch.randn(1, 2 * 3 * 5, 2, 24, device=device)
    before = len(tables)
    with torch.inference_mode():
        first = k.rope_3d(q, q, (2, 3, 5), theta=123.0)
    assert len(tables) == before + 1
    assert not any(table.is_inference() for entry in tables.values() for table in entry)
    assert same_bits(k.rope_3d(q, q, (2, 3, 5), theta=123.0), first)
    assert len(tables) == before + 1


def test_rope_3d_tables_are_never_fake(k, device):
    from torch._subclasses.fake_tensor import FakeTensorMode

    tables = tables_module(k)._tables
    before = len(tables)
    with FakeTensorMode():
        q = torch.empty(1, 6, 2, 24, device=device)
        assert k.rope_3d(q, q, (1, 2, 3), theta=77.0)[0].shape == q.shape
    assert len(tables) == before


@pytest.mark.gpu
def test_rope_3d_under_capture(k, gpu):
    """A first call inside a capture fills no table that outlives it."""
    tables = tables_module(k)._tables
    q = torch.randn(1, 24, 2, 64, device="cuda")
    k.rope(q, *make_table("shared", 1, 24, 1, 64, "cuda", FP32, True))
    before = len(tables)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = k.rope_3d(q, q, (2, 3, 4), theta=55.0)
    assert len(tables) == before
    graph.replay()
    assert same_bits(captured, k.rope_3d(q, q, (2, 3, 4), theta=55.0))


def test_rope_3d_follows_the_value_of_a_tensor_theta(k, device):
    q = torch.randn(1, 4, 2, 32, device=device)
    theta = torch.tensor(1e4)
    first = k.rope_3d(q, q, (1, 2, 2), theta=theta)[0]
    theta.fill_(10.0)
    assert torch.equal(k.rope_3d(q, q, (1, 2, 2), theta=theta)[0], k.rope_3d(q, q, (1, 2, 2), theta=10.0)[0])
    assert torch.equal(k.rope_3d(q, q, (1, 2, 2))[0], first)
    for bad in (0.0, -1.0, float("nan")):
        with pytest.raises(ValueError, match="theta"):
            k.rope_3d(q, q, (1, 2, 2), theta=bad)
