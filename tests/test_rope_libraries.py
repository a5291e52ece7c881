"""The RoPE family beside the code of the libraries whose models it serves."""

from __future__ import annotations

import pytest
import reference
import torch
from conftest import DTYPES
from reference import assert_no_worse_than_eager
from rope_problems import make_table

FP32, FP16, BF16 = DTYPES.values()


def test_matches_the_ltx_video_processor(k, device, dtype):
    """norm_q and norm_k over all heads, then apply_rotary_emb over the whole hidden size."""
    ltx = pytest.importorskip("diffusers.models.transformers.transformer_ltx")
    embed = ltx.LTXVideoRotaryPosEmbed(dim=256)
    hidden = torch.randn(2, 24, 256, device=device).to(dtype)
    cos, sin = embed(hidden, num_frames=2, height=3, width=4)
    norm = torch.nn.RMSNorm(256, eps=1e-5, device=device, dtype=dtype)
    with torch.no_grad():
        norm.weight.copy_(torch.randn(256))
        stock = ltx.apply_rotary_emb(norm(hidden), (cos, sin))
    weight = norm.weight.detach()
    heads = [t.unflatten(-1, (4, 64)) for t in (hidden, cos, sin)]
    flat = reference.qk_norm_rope(hidden, None, weight, None, cos, sin, 1e-5)[0]
    for x, c, s in ((hidden, cos, sin), heads, (heads[0], heads[1][..., ::2], heads[2][..., ::2])):
        got = k.qk_norm_rope(x, None, weight, None, c, s, 1e-5, across_heads=True)[0]
        assert_no_worse_than_eager(got.reshape(hidden.shape), stock, flat)


def test_matches_ltx_2_split_rope(k, device, dtype):
    ltx2 = pytest.importorskip("diffusers.models.transformers.transformer_ltx2")
    x = torch.randn(2, 7, 4 * 32, device=device).to(dtype)
    cos, sin = make_table("batch-heads", 2, 7, 4, 32, device, FP32, False)
    stock = ltx2.apply_split_rotary_emb(x, (cos.transpose(1, 2), sin.transpose(1, 2)))
    expected = reference.rope(x, cos, sin, interleaved=False)
    assert_no_worse_than_eager(k.rope(x, cos, sin, interleaved=False), stock, expected)


@pytest.mark.parametrize("interleaved", [True, False])
def test_matches_diffusers_apply_rotary_emb(k, device, dtype, interleaved):
    embeddings = pytest.importorskip("diffusers.models.embeddings")
    x = torch.randn(2, 7, 3, 64, device=device).to(dtype)
    cos, sin = make_table("shared-full", 2, 7, 1, 64, device, FP32, interleaved)
    stock = embeddings.apply_rotary_emb(x, (cos, sin), use_real_unbind_dim=-1 if interleaved else -2, sequence_dim=1)
    expected = reference.rope(x, cos, sin, interleaved=interleaved)
    assert_no_worse_than_eager(k.rope(x, cos, sin, interleaved=interleaved), stock, expected)


def test_matches_diffusers_complex_rope(k, device):
    """Lumina2, Z-Image, Qwen-Image: the table is the real view of a complex one."""
    embeddings = pytest.importorskip("diffusers.models.embeddings")
    x = torch.randn(2, 7, 3, 64, device=device)
    angles = torch.randn(2, 7, 32, device=device)
    freqs = torch.polar(torch.ones_like(angles), angles)
    stock = embeddings.apply_rotary_emb(x, freqs, use_real=False)
    cos, sin = torch.view_as_real(freqs).unbind(-1)
    assert_no_worse_than_eager(k.rope(x, cos, sin), stock, reference.rope(x, cos, sin))


def test_matches_transformers_apply_rotary_pos_emb(k, device, dtype):
    """q and k come as transposed [B, H, S, d] views, cos and sin in the model's dtype."""
    llama = pytest.importorskip("transformers.models.llama.modeling_llama")
    q, key = (torch.randn(2, 7, heads, 64, device=device).to(dtype).transpose(1, 2) for heads in (4, 2))
    cos, sin = make_table("batch-full", 2, 7, 1, 64, device, dtype, False)
    stock = llama.apply_rotary_pos_emb(q, key, cos, sin)
    ours = k.qk_norm_rope(q.transpose(1, 2), key.transpose(1, 2), cos=cos, sin=sin, norm="none", interleaved=False)
    for output, best, x in zip(ours, stock, (q, key)):
        expected = reference.rope(x.transpose(1, 2), cos, sin, interleaved=False)
        assert_no_worse_than_eager(output, best.transpose(1, 2), expected)


def test_matches_transformers_interleaved_rope(k, device, dtype):
    cohere = pytest.importorskip("transformers.models.cohere.modeling_cohere")
    q = torch.randn(2, 7, 4, 64, device=device).to(dtype).transpose(1, 2)
    cos, sin = make_table("batch-full", 2, 7, 1, 64, device, dtype, True)
    stock = cohere.apply_rotary_pos_emb(q, q, cos, sin)[0]
    ours = k.rope(q.transpose(1, 2), cos, sin)
    assert_no_worse_than_eager(ours, stock.transpose(1, 2), reference.rope(q.transpose(1, 2), cos, sin))
