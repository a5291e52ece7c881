"""Adapters, hooks, quantised layers, attention processors and backends in an injected LTX-Video, and the projections
that are joined: all looked at on each call.
"""

from __future__ import annotations

import copy

import pytest
import torch
from ltx_models import differences, fused, lora, run, to
from tiny_models import relative
from torch import nn

pytest.importorskip("diffusers")


# ---- adapters, hooks, quantised layers: looked at on each call


def test_lora_added_and_deleted_after_injection(k, ltx):
    model, inputs, expected = ltx
    adapted = copy.deepcopy(model)
    lora(adapted)
    with_adapter = run(adapted, inputs)
    assert differences(with_adapter, expected) > 1e-3
    k.inject_optimized_kernels(model)
    run(model, inputs)
    lora(model)
    assert differences(run(model, inputs), with_adapter) < 1e-5 and fused(k, model, inputs)
    model.disable_adapters()
    assert differences(run(model, inputs), expected) < 1e-5
    model.enable_adapters()
    model.delete_adapters("test")
    assert differences(run(model, inputs), expected) < 1e-5 and fused(k, model, inputs)


def test_lora_fused_and_unfused(k, ltx):
    model, inputs, expected = ltx
    lora(model)
    with_adapter = run(model, inputs)
    k.inject_optimized_kernels(model)
    model.fuse_lora()
    assert differences(run(model, inputs), with_adapter) < 1e-4
    model.unfuse_lora()
    model.disable_adapters()
    assert differences(run(model, inputs), expected) < 1e-4


def test_lora_training_gradients_are_those_of_stock(k, ltx):
    """Only the adapter requires a gradient: nothing that a block's inputs show."""
    model, inputs, _ = ltx
    model.requires_grad_(False)
    lora(model)
    stock = copy.deepcopy(model)
    k.inject_optimized_kernels(model)
    for each in (stock, model):
        each(**inputs)[0].square().mean().backward()
    trained = [(a, b) for a, b in zip(model.parameters(), stock.parameters()) if b.grad is not None]
    assert trained
    for ours, theirs in trained:
        assert relative(ours.grad, theirs.grad) < 1e-4


def test_quantised_linears_are_called_as_modules(k, ltx):
    model, inputs, _ = ltx
    model = torch.ao.quantization.quantize_dynamic(model, {nn.Linear}, dtype=torch.qint8)
    expected = run(model, inputs)
    k.inject_optimized_kernels(model)
    assert fused(k, model, inputs)
    assert differences(run(model, inputs), expected) < 1e-2  # each layer rounds its input to 8 bits


def test_hooked_linears_are_called_as_modules(k, ltx, device):
    model, inputs, _ = ltx
    model, inputs = model.to(device), to(inputs, device)
    k.inject_optimized_kernels(model)
    seen = []
    block = model.transformer_blocks[0]
    for layer in (block.attn1.to_q, block.attn1.to_v, block.attn2.to_k, block.ff.net[0].proj, block.attn1.to_out[0]):
        layer.register_forward_hook(lambda *_: seen.append(1))
    run(model, inputs)
    assert len(seen) == 5


@pytest.mark.parametrize("path", ["norm1", "norm2", "attn1", "attn1.norm_q", "attn2.norm_k", "ff", "ff.net.0"])
def test_module_hooks_inside_a_block_run(k, ltx, path):
    """Hooks on modules that the fused block does not call otherwise."""
    model, inputs, expected = ltx
    k.inject_optimized_kernels(model)
    seen = []
    handle = model.transformer_blocks[1].get_submodule(path).register_forward_hook(lambda *_: seen.append(1))
    assert differences(run(model, inputs), expected) < 1e-5
    assert len(seen) == 1
    handle.remove()
    assert fused(k, model, inputs)


def test_a_hook_that_changes_an_output_changes_the_result_as_stock(k, ltx):
    model, inputs, _ = ltx
    for name in ("norm1", "attn1.norm_k"):
        model.transformer_blocks[1].get_submodule(name).register_forward_hook(lambda m, a, out: 2 * out + 1)
    expected = run(model, inputs)
    k.inject_optimized_kernels(model)
    assert differences(run(model, inputs), expected) < 1e-5


def test_another_attention_processor_is_used(k, ltx):
    from diffusers.models.transformers.transformer_ltx import LTXVideoAttnProcessor

    calls = []

    class Mine(LTXVideoAttnProcessor):
        def __call__(self, attn, hidden_states, encoder_hidden_states=None, attention_mask=None, image_rotary_emb=None):
            calls.append(image_rotary_emb is not None)
            return super().__call__(attn, hidden_states, encoder_hidden_states, attention_mask, image_rotary_emb)

    model, inputs, expected = ltx
    k.inject_optimized_kernels(model)
    stock = model.attn_processors
    model.set_attn_processor(Mine())
    assert differences(run(model, inputs), expected) < 1e-5
    assert calls == [True, False] * 3
    model.set_attn_processor(dict(stock))
    assert differences(run(model, inputs), expected) < 1e-5 and len(calls) == 6


def test_fuse_qkv_projections_is_harmless(k, ltx):
    model, inputs, expected = ltx
    k.inject_optimized_kernels(model)
    model.fuse_qkv_projections()
    assert differences(run(model, inputs), expected) < 1e-5
    model.unfuse_qkv_projections()
    assert differences(run(model, inputs), expected) < 1e-5


# ---- attention backends


def test_set_attention_backend(k, ltx, own_attention_backend, monkeypatch):
    from diffusers.models import attention_dispatch

    model, inputs, expected = ltx
    k.inject_optimized_kernels(model)
    math = attention_dispatch.AttentionBackendName._NATIVE_MATH
    calls = []
    real = attention_dispatch._AttentionBackendRegistry._backends[math]

    def spy(*args, **kwargs):
        calls.append(1)
        return real(*args, **kwargs)

    monkeypatch.setitem(attention_dispatch._AttentionBackendRegistry._backends, math, spy)
    model.set_attention_backend("_native_math")
    assert differences(run(model, inputs), expected) < 1e-5
    assert len(calls) == 6
    assert fused(k, model, inputs)


def test_attention_backend_context(k, ltx, monkeypatch):
    from diffusers.models import attention_dispatch

    model, inputs, expected = ltx
    k.inject_optimized_kernels(model)
    with attention_dispatch.attention_backend("_native_math"):
        assert differences(run(model, inputs), expected) < 1e-5


# ---- one GEMM for query, key and value


def packed(inner, model):
    for block in model.transformer_blocks:
        for linears in inner("ltx")._projections(block):
            assert inner("blocks").pack(linears)


def gemms(model, inputs) -> int:
    from torch.utils._python_dispatch import TorchDispatchMode

    class Count(TorchDispatchMode):
        calls = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.calls += func in (torch.ops.aten.addmm.default, torch.ops.aten.mm.default)
            return func(*args, **(kwargs or {}))

    with torch.no_grad(), Count() as mode:
        model(**inputs)
    return mode.calls


def test_packed_projections_are_one_gemm_and_cost_no_memory(k, ltx, inner):
    model, inputs, expected = ltx
    k.inject_optimized_kernels(model)
    before, state = gemms(model, inputs), {n: p.clone() for n, p in model.named_parameters()}
    parameters = dict(model.named_parameters())
    packed(inner, model)
    assert gemms(model, inputs) == before - 3 * (2 + 1)
    assert differences(run(model, inputs), expected) < 1e-5
    assert all(p is parameters[n] and torch.equal(p, state[n]) for n, p in model.named_parameters())
    attn = model.transformer_blocks[0].attn1
    storages = {p.weight.untyped_storage().data_ptr() for p in (attn.to_q, attn.to_k, attn.to_v)}
    assert len(storages) == 1 and attn.to_q.weight.untyped_storage().nbytes() == 3 * attn.to_q.weight.nbytes
    k.remove_optimized_kernels(model)
    assert all(p.untyped_storage().nbytes() == p.nbytes for p in model.parameters())


@pytest.mark.parametrize(
    "part",
    [
        lambda m: m.to(torch.float64).to(torch.float32),
        copy.deepcopy,
        lambda m: m.transformer_blocks[0].attn1.to_k.weight.data.copy_(torch.randn(64, 64)) is None or m,
        lambda m: setattr(m.transformer_blocks[0].attn1.to_k.weight, "data", torch.randn(64, 64)) or m,
        lambda m: setattr(m.transformer_blocks[0].attn1.to_k, "bias", None) or m,
        lambda m: setattr(m.transformer_blocks[0].attn1, "to_v", nn.Linear(64, 64)) or m,
    ],
    ids=["to", "deepcopy", "written", "replaced_data", "no_bias", "replaced_layer"],
)
def test_packed_projections_that_were_parted_or_changed(k, ltx, inner, part):
    model, inputs, _ = ltx
    k.inject_optimized_kernels(model)
    packed(inner, model)
    model = part(model)
    stock = copy.deepcopy(model)
    k.remove_optimized_kernels(stock)
    assert differences(run(model, inputs), run(stock, inputs)) < 1e-5


@pytest.mark.gpu
def test_projections_are_packed_on_a_gpu(k, ltx, gpu):
    model, inputs, expected = ltx
    model, inputs = model.to("cuda"), to(inputs, "cuda")
    before = gemms(model, inputs)
    k.inject_optimized_kernels(model)
    assert gemms(model, inputs) == before - 3 * (2 + 1)
    assert differences([r.cpu() for r in run(model, inputs)], expected) < 1e-5


def test_neighbouring_storages_are_not_taken_for_one(k, inner):
    """An allocator may put separate tensors side by side."""
    whole = torch.randn(8, 4)
    parts = [whole[:4], whole[4:]]
    assert torch.equal(inner("blocks")._joined(parts), whole)
    apart = [torch.frombuffer(bytearray(whole[:4].numpy().tobytes()), dtype=torch.float32).view(4, 4) for _ in range(2)]
    assert inner("blocks")._joined(apart) is None
    assert inner("blocks")._joined(parts[::-1]) is None
