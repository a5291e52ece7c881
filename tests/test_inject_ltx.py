"""LTX-Video and LTX-2 with fused blocks: the results of stock, and everything diffusers does to a model still working.

docs/diffusers-integration.md names the test of each feature; a test here checks that each exists.
"""

from __future__ import annotations

import copy
import os
import re
import sys

import pytest
import tiny_models
import torch
from conftest import ROOT
from tiny_models import count, relative
from torch import nn

diffusers = pytest.importorskip("diffusers")
pytestmark = pytest.mark.usefixtures("fresh_dynamo")

RELEASED = {"gated_attn": True, "audio_gated_attn": True, "cross_attn_mod": True, "audio_cross_attn_mod": True}
MODELS = {
    "ltx_video": lambda: (tiny_models.ltx_video(), tiny_models.ltx_video_inputs()),
    "ltx_video_per_token": lambda: (tiny_models.ltx_video(), tiny_models.ltx_video_inputs(per_token=True)),
    "ltx_video_long_prompt": lambda: (tiny_models.ltx_video(), tiny_models.ltx_video_inputs(text=40)),
    "ltx_video_affine": lambda: (
        tiny_models.ltx_video(norm_elementwise_affine=True),
        tiny_models.ltx_video_inputs(),
    ),
    "ltx_video_coords": lambda: (tiny_models.ltx_video(), with_coords(tiny_models.ltx_video_inputs(per_token=True))),
    "ltx2": lambda: with_inputs(tiny_models.ltx2()),
    "ltx2_per_token": lambda: with_inputs(tiny_models.ltx2(), per_token=True),
    "ltx2_isolated": lambda: with_inputs(tiny_models.ltx2(), isolate_modalities=True),
    "ltx2_interleaved": lambda: with_inputs(tiny_models.ltx2(rope_type="interleaved")),
    "ltx2.3": lambda: with_inputs(tiny_models.ltx2(**RELEASED, perturbed_attn=True, use_prompt_embeddings=False)),
    "ltx2.5": lambda: with_inputs(tiny_models.ltx2(**RELEASED, use_prompt_adaln_single=False, ff_bias=False)),
    "ltx2_perturbed": lambda: with_inputs(
        tiny_models.ltx2(**RELEASED, perturbed_attn=True),
        spatio_temporal_guidance_blocks=[0],
        perturbation_mask=torch.tensor([0.0, 1.0]),
    ),
}


def with_inputs(model, **arguments):
    return model, tiny_models.ltx2_inputs(model, **arguments)


def with_coords(inputs: dict) -> dict:
    """As the condition pipeline calls the model: coordinates given, one timestep a token."""
    generator = torch.Generator().manual_seed(5)
    tokens = inputs["hidden_states"].shape[1]
    inputs["video_coords"] = 20 * torch.rand(inputs["hidden_states"].shape[0], 3, tokens, generator=generator)
    inputs["rope_interpolation_scale"] = None
    return inputs


def to(inputs: dict, device: str) -> dict:
    return {k: v.to(device) if torch.is_tensor(v) else v for k, v in inputs.items()}


def run(model, inputs) -> list[torch.Tensor]:
    with torch.no_grad():
        return list(model(**inputs))


def differences(results, references) -> float:
    return max(relative(a, b) for a, b in zip(results, references))


@pytest.fixture(params=MODELS)
def case(request):
    return MODELS[request.param]()


@pytest.fixture(params=["ltx_video", "ltx2"])
def model_and_inputs(request):
    return MODELS[request.param]()


@pytest.fixture
def ltx():
    """(model, inputs, stock's output) of LTX-Video."""
    model, inputs = tiny_models.ltx_video(layers=3), tiny_models.ltx_video_inputs()
    return model, inputs, run(model, inputs)


@pytest.fixture
def inner(k):
    """inner("blocks"): a module of the loaded package's inject folder."""
    return lambda name: sys.modules[f"{k.__name__}.inject.{name}"]


def blocks(model) -> int:
    return len(model.transformer_blocks)


def fused(k, model, inputs) -> bool:
    """Do all blocks run fused?"""
    calls = count(model, **inputs)
    return calls["ada_norm"] >= blocks(model) and calls["residual_ada_norm"] >= blocks(model)


# ---- results


def test_output_is_that_of_stock(k, device, case):
    model, inputs = case[0].to(device), to(case[1], device)
    expected = run(model, inputs)
    k.inject_optimized_kernels(model)
    for _ in range(2):  # the second call has its tables kept
        assert differences(run(model, inputs), expected) < 1e-5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", ["ltx_video", "ltx_video_per_token", "ltx_video_affine", "ltx2", "ltx2.3"])
def test_half_precision_is_no_less_accurate_than_stock(k, device, name, dtype):
    """Each block on what it gets in the model, against fp64: whole models add noise that is not the blocks'."""
    model, inputs = MODELS[name]()
    if name.startswith("ltx_video"):  # enough elements for a difference that is not noise
        inputs = tiny_models.ltx_video_inputs(grid=(4, 6, 8), per_token=name.endswith("per_token"))
    model, inputs = tiny_models.in_dtype(model, inputs, dtype)
    calls = []  # (block, its arguments)

    def keep(block, args, kwargs):
        calls.append((block, kwargs))

    handles = [block.register_forward_pre_hook(keep, with_kwargs=True) for block in model.transformer_blocks]
    run(model, inputs)
    for handle in handles:
        handle.remove()

    def cast(value, *to):
        if isinstance(value, tuple):
            return tuple(cast(v, *to) for v in value)
        return value.to(*to) if torch.is_tensor(value) and value.is_floating_point() else value

    errors = torch.zeros(2)
    with torch.no_grad():
        for block, kwargs in calls:
            exact = copy.deepcopy(block).double()(**{n: cast(v, torch.float64) for n, v in kwargs.items()})
            block, kwargs = copy.deepcopy(block).to(device), {n: cast(v, device) for n, v in kwargs.items()}
            for i in range(2):
                results = block(**kwargs)
                pairs = zip(*((r,) if torch.is_tensor(r) else r for r in (results, exact)))
                errors[i] += sum(relative(result.cpu(), reference) for result, reference in pairs)
                k.inject_optimized_kernels(block)
    assert errors[1] <= errors[0]


def test_at_least_five_of_our_ops_a_block_and_none_after_removal(k, case):
    model, inputs = case
    report = k.inject_optimized_kernels(model)
    assert sum(count(model, **inputs).values()) >= 5 * blocks(model)
    assert not report.left_alone
    assert k.remove_optimized_kernels(model) == len(report.injected)
    assert not count(model, **inputs)


def test_a_block_of_ltx_video_is_six_calls(k, ltx):
    model, inputs, _ = ltx
    k.inject_optimized_kernels(model)
    calls = {"ada_norm": 1, "qk_norm_rope": 2, "gated_residual": 2, "residual_ada_norm": 1}
    assert count(model, **inputs) == {name: 3 * number for name, number in calls.items()}


def test_float64_runs_stock(k, model_and_inputs):
    model, inputs = tiny_models.in_dtype(*model_and_inputs, torch.float64)
    expected = run(model, inputs)
    k.inject_optimized_kernels(model)
    assert all(map(torch.equal, run(model, inputs), expected))
    assert not count(model, **inputs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_autocast_returns_what_stock_returns(k, device, model_and_inputs, dtype):
    model, inputs = tiny_models.in_dtype(*model_and_inputs, dtype)
    model, inputs = model.to(device), to(inputs, device)
    with torch.autocast(device, torch.bfloat16):
        expected = run(model, inputs)
        k.inject_optimized_kernels(model)
        results = run(model, inputs)
    assert [r.dtype for r in results] == [e.dtype for e in expected]
    assert differences(results, expected) < 2e-2


def test_meta_tensors_run_stock(k, model_and_inputs):
    """Shapes without data, as for planning a device map."""
    model, inputs = model_and_inputs
    k.inject_optimized_kernels(model)
    results = run(model.to("meta"), to(inputs, "meta"))
    assert all(r.is_meta for r in results)


def test_export_of_an_injected_model(k, ltx):
    model, inputs, expected = ltx
    k.inject_optimized_kernels(model)
    exported = torch.export.export(model.requires_grad_(False), (), inputs)
    assert sum("_ltx_kernels_" in str(node.target) for node in exported.graph.nodes) >= 5 * 3
    assert differences(run(exported.module(), inputs), expected) < 1e-5


def test_mixed_dtypes_run_stock(k):
    """A table kept in fp32 makes stock's results fp32: those of stock, then."""
    model, inputs = tiny_models.in_dtype(*MODELS["ltx_video"](), torch.bfloat16)
    for block in model.transformer_blocks:
        block.scale_shift_table.data = block.scale_shift_table.data.float()
    block = model.transformer_blocks[0]
    x, text, temb = (
        torch.randn(2, 24, 64).bfloat16(),
        torch.randn(2, 5, 64).bfloat16(),
        torch.randn(2, 1, 384).bfloat16(),
    )
    with torch.no_grad():
        try:
            expected = block(x, text, temb)
        except RuntimeError as error:  # a Linear refuses mixed dtypes
            expected = error
        k.inject_optimized_kernels(model)
        if isinstance(expected, RuntimeError):
            with pytest.raises(RuntimeError, match=re.escape(str(expected))[:40]):
                block(x, text, temb)
        else:
            assert block(x, text, temb).dtype is expected.dtype


# ---- report, removal, copies


def test_report_says_what_runs(k, model_and_inputs):
    model, _ = model_and_inputs
    report = k.inject_optimized_kernels(model)
    kind = "ltx2.block" if "LTX2" in type(model).__name__ else "ltx_video.block"
    assert report.counts[kind] == 2
    assert report.counts["rms_norm"] and report.counts["gelu"]
    assert kind in str(report)


def test_idempotent(k, ltx):
    model, inputs, expected = ltx
    first = k.inject_optimized_kernels(model).to_dict()
    assert k.inject_optimized_kernels(model).to_dict() == first
    assert differences(run(model, inputs), expected) < 1e-5
    k.remove_optimized_kernels(model)
    assert not count(model, **inputs)


def test_remove_restores_exactly(k, model_and_inputs):
    model, inputs = model_and_inputs
    expected = run(model, inputs)
    before = [dict(vars(m)) for m in model.modules()]
    state = {name: value.clone() for name, value in model.state_dict().items()}
    k.inject_optimized_kernels(model)
    run(model, inputs)
    k.remove_optimized_kernels(model)
    assert [dict(vars(m)) for m in model.modules()] == before
    assert list(state) == list(model.state_dict())
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert all(map(torch.equal, run(model, inputs), expected))


def test_deepcopy_runs_on_its_own_weights(k, model_and_inputs):
    model, inputs = model_and_inputs
    k.inject_optimized_kernels(model)
    expected = run(model, inputs)
    copied = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert fused(k, copied, inputs)
    assert differences(run(copied, inputs), expected) < 1e-6


def test_save_pretrained(k, model_and_inputs, tmp_path, inner):
    model, inputs = model_and_inputs
    state = {name: value.clone() for name, value in model.state_dict().items()}
    k.inject_optimized_kernels(model)
    for block in model.transformer_blocks:  # as on a GPU
        for linears in inner("ltx")._projections(block):
            assert inner("blocks").pack(linears)
    expected = run(model, inputs)
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path)
    assert loaded.state_dict().keys() == state.keys()
    assert all(torch.equal(value, state[name]) for name, value in loaded.state_dict().items())
    assert differences(run(loaded, inputs), expected) < 1e-5


def test_move_before_and_after(k, ltx, device):
    """.to() and dtype changes after the injection."""
    model, inputs, expected = ltx
    k.inject_optimized_kernels(model)
    model, inputs = model.to(device), to(inputs, device)
    assert differences([r.cpu() for r in run(model, inputs)], expected) < 1e-5
    model, inputs = model.to(torch.bfloat16), tiny_models.in_dtype(nn.Module(), inputs, torch.bfloat16)[1]
    assert fused(k, model, inputs)
    assert differences([r.cpu() for r in run(model, inputs)], expected) < 5e-2


# ---- gradients


def gradients(model, inputs):
    model.zero_grad()
    inputs = {**inputs, "hidden_states": inputs["hidden_states"].clone().requires_grad_()}
    sum(out.square().mean() for out in model(**inputs)).backward()
    return [inputs["hidden_states"].grad, *(p.grad for p in model.parameters() if p.grad is not None)]


@pytest.mark.parametrize("checkpointing", [False, True])
def test_gradients_are_those_of_stock(k, model_and_inputs, checkpointing):
    model, inputs = model_and_inputs
    expected = [g.clone() for g in gradients(model.train(), inputs)]
    k.inject_optimized_kernels(model)
    if checkpointing:
        model.enable_gradient_checkpointing()
    results = gradients(model, inputs)
    assert len(results) == len(expected)
    for result, reference in zip(results, expected):
        assert relative(result, reference) < 1e-4


def test_a_hook_in_a_frozen_block_may_bring_in_what_is_trained(k, ltx):
    """A steering vector, say: neither an input nor a parameter of the block, so grad enabled means stock."""
    model, inputs, _ = ltx
    model.requires_grad_(False)
    steering = torch.randn(64, requires_grad=True)
    model.transformer_blocks[0].attn1.to_q.register_forward_hook(lambda module, args, output: output + steering)
    gradient = []
    for injected in (False, True):
        if injected:
            k.inject_optimized_kernels(model)
        gradient.append(torch.autograd.grad(model(**inputs)[0].square().mean(), steering)[0])
    assert relative(gradient[1], gradient[0]) < 1e-4


def test_forward_mode_derivatives_are_those_of_stock(k, ltx):
    model, inputs, _ = ltx
    model.set_attention_backend("_native_math")  # the other kernels of attention have no forward-mode derivative
    x = inputs.pop("hidden_states")
    tangents = []
    for injected in (False, True):
        if injected:
            k.inject_optimized_kernels(model)
        with torch.no_grad():
            tangents.append(
                torch.func.jvp(lambda v: model(hidden_states=v, **inputs)[0], (x,), (torch.ones_like(x),))[1]
            )
    assert tangents[0].norm() > 0 and relative(tangents[1], tangents[0]) < 1e-4


def test_functional_gradients_are_those_of_stock(k, ltx):
    model, inputs, _ = ltx
    parameters = dict(model.named_parameters())
    results = []
    for injected in (False, True):
        if injected:
            k.inject_optimized_kernels(model)

        def loss(values):
            return torch.func.functional_call(model, values, kwargs=inputs)[0].square().mean()

        results.append(torch.func.grad(loss)(parameters))
    for name, expected in results[0].items():
        assert relative(results[1][name], expected) < 1e-4, name


def test_tables_in_float64_are_left_to_stock(k, ltx):
    model, inputs, _ = ltx
    inputs = with_coords(inputs)
    inputs["video_coords"] = inputs["video_coords"].double()
    expected = run(model, inputs)
    k.inject_optimized_kernels(model)
    assert differences(run(model, inputs), expected) < 1e-5


def test_pairs_that_reach_over_two_heads_are_left_to_stock(k):
    model, inputs = tiny_models.ltx_video(heads=2, head_dim=7), tiny_models.ltx_video_inputs()
    expected = run(model, inputs)
    k.inject_optimized_kernels(model)
    assert differences(run(model, inputs), expected) < 1e-5


def test_tables_follow_the_settings_of_the_rope_module(k, ltx):
    model, inputs, expected = ltx
    k.inject_optimized_kernels(model)
    assert differences(run(model, inputs), expected) < 1e-5
    model.rope.theta = 100.0
    changed = run(model, inputs)
    k.remove_optimized_kernels(model)
    assert differences(changed, run(model, inputs)) < 1e-5 and differences(changed, expected) > 1e-3


# ---- adapters, hooks, quantised layers: looked at on each call


def lora(model):
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=2, target_modules=["to_q", "to_v", "to_out.0", "net.0.proj"], init_lora_weights=False)
    torch.manual_seed(1)
    model.add_adapter(config, "test")


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


def test_set_attention_backend(k, ltx, monkeypatch):
    from diffusers.models import attention_dispatch

    model, inputs, expected = ltx
    k.inject_optimized_kernels(model)
    active = attention_dispatch._AttentionBackendRegistry.get_active_backend()[0]
    math = attention_dispatch.AttentionBackendName._NATIVE_MATH
    calls = []
    real = attention_dispatch._AttentionBackendRegistry._backends[math]

    def spy(*args, **kwargs):
        calls.append(1)
        return real(*args, **kwargs)

    monkeypatch.setitem(attention_dispatch._AttentionBackendRegistry._backends, math, spy)
    try:
        model.set_attention_backend("_native_math")
        assert differences(run(model, inputs), expected) < 1e-5
    finally:
        attention_dispatch._AttentionBackendRegistry.set_active_backend(active)
    assert len(calls) == 6
    assert fused(k, model, inputs)


def test_attention_backend_context(k, ltx, monkeypatch):
    from diffusers.models import attention_dispatch

    model, inputs, expected = ltx
    k.inject_optimized_kernels(model)
    with attention_dispatch.attention_backend("_native_math"):
        assert differences(run(model, inputs), expected) < 1e-5


# ---- caches


def cached(model, inputs, steps=3):
    results = []
    for step in range(steps):
        with torch.no_grad(), model.cache_context("cond_uncond"):
            x = inputs["hidden_states"] * (1 + 0.001 * step)
            results.append(model(**{**inputs, "hidden_states": x})[0])
    return results


@pytest.mark.parametrize("order", ["cache_first", "inject_first"])
def test_first_block_cache(k, ltx, order):
    from diffusers import FirstBlockCacheConfig

    model, inputs, _ = ltx
    reference = copy.deepcopy(model)
    reference.enable_cache(FirstBlockCacheConfig(threshold=0.5))
    expected = cached(reference, inputs)
    steps = [
        lambda: model.enable_cache(FirstBlockCacheConfig(threshold=0.5)),
        lambda: k.inject_optimized_kernels(model),
    ]
    for step in steps if order == "cache_first" else reversed(steps):
        step()
    with tiny_models.OpCounter() as ops:
        results = cached(model, inputs)
    assert differences(results, expected) < 1e-5
    assert ops.calls["residual_ada_norm"] == 3 + 1 + 1  # all blocks in the first step, the first one in the others
    model.disable_cache()
    assert fused(k, model, inputs)
    k.remove_optimized_kernels(model)
    assert not count(model, **inputs)


# ---- offload


ORDERS = ["inject_first", "offload_first"]


def offloaded(k, model, inputs, order, offload):
    """Offload and inject in one order or the other; returns the result of two calls."""
    steps = [lambda: offload(model), lambda: k.inject_optimized_kernels(model)]
    for step in steps if order == "offload_first" else reversed(steps):
        step()
    run(model, inputs)
    return [r.cpu() for r in run(model, inputs)]


@pytest.mark.parametrize("order", ORDERS)
def test_model_cpu_offload(k, ltx, device, order):
    accelerate = pytest.importorskip("accelerate")
    model, inputs, expected = ltx
    result = offloaded(
        k, model, to(inputs, device), order, lambda m: accelerate.cpu_offload_with_hook(m, torch.device(device))
    )
    assert differences(result, expected) < 1e-5
    assert fused(k, model, to(inputs, device))


@pytest.mark.parametrize("order", ORDERS)
def test_sequential_cpu_offload(k, ltx, device, order):
    accelerate = pytest.importorskip("accelerate")
    model, inputs, expected = ltx
    result = offloaded(k, model, to(inputs, device), order, lambda m: accelerate.cpu_offload(m, torch.device(device)))
    assert differences(result, expected) < 1e-5
    assert model.transformer_blocks[0].attn1.norm_q.weight.is_meta  # the hooks were not lost
    assert count(model, **to(inputs, device))["residual_ada_norm"] == 3
    assert k.remove_optimized_kernels(model)
    assert differences([r.cpu() for r in run(model, to(inputs, device))], expected) < 1e-5
    assert not count(model, **to(inputs, device))
    assert model.transformer_blocks[0].attn1.norm_q.weight.is_meta


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("kind", ["block_level", "leaf_level"])
def test_group_offload(k, ltx, device, order, kind):
    from diffusers.hooks import apply_group_offloading

    def offload(model):
        apply_group_offloading(
            model,
            onload_device=torch.device(device),
            offload_device=torch.device("cpu"),
            offload_type=kind,
            num_blocks_per_group=1 if kind == "block_level" else None,
        )

    model, inputs, expected = ltx
    assert differences(offloaded(k, model, to(inputs, device), order, offload), expected) < 1e-5
    assert count(model, **to(inputs, device))["residual_ada_norm"] == 3


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["block_level", "leaf_level"])
def test_group_offload_with_streams(k, ltx, kind):
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    from diffusers.hooks import apply_group_offloading

    model, inputs, expected = ltx
    k.inject_optimized_kernels(model)
    apply_group_offloading(
        model,
        onload_device=torch.device("cuda"),
        offload_device=torch.device("cpu"),
        offload_type=kind,
        num_blocks_per_group=1 if kind == "block_level" else None,
        use_stream=True,
    )
    for _ in range(3):
        assert differences([r.cpu() for r in run(model, to(inputs, "cuda"))], expected) < 1e-5


@pytest.mark.parametrize("order", ORDERS)
def test_layerwise_casting(k, ltx, order):
    model, inputs, _ = ltx
    model, inputs = tiny_models.in_dtype(model, inputs, torch.bfloat16)

    def cast(m):
        m.enable_layerwise_casting(storage_dtype=torch.float8_e4m3fn, compute_dtype=torch.bfloat16)

    stock = copy.deepcopy(model)
    cast(stock)
    expected = run(stock, inputs)
    assert differences(offloaded(k, model, inputs, order, cast), expected) < 3e-2
    assert count(model, **inputs)["residual_ada_norm"] == 3


# ---- compilation


class Graphs:
    """A backend that keeps the graphs and runs them eagerly."""

    def __init__(self):
        self.graphs = []

    def __call__(self, graph, inputs):
        self.graphs.append(graph)
        return graph.forward

    def ops(self) -> list[str]:
        return [
            str(node.target).split(".")[1]
            for graph in self.graphs
            for node in graph.graph.nodes
            if str(node.target).startswith("_ltx_kernels_")
        ]


@pytest.mark.parametrize("order", ["inject_first", "compile_first"])
def test_compile_repeated_blocks_fullgraph(k, model_and_inputs, order):
    model, inputs = model_and_inputs
    expected = run(model, inputs)
    backend = Graphs()
    steps = [
        lambda: model.compile_repeated_blocks(fullgraph=True, backend=backend),
        lambda: k.inject_optimized_kernels(model),
    ]
    for step in steps if order == "compile_first" else reversed(steps):
        step()
    for _ in range(2):
        assert differences(run(model, inputs), expected) < 1e-5
    assert len(backend.graphs) == 1  # once for all blocks and steps
    assert len(backend.ops()) >= 5


@pytest.mark.parametrize("name", ["ltx_video", "ltx_video_per_token", "ltx2.3"])
def test_compile_of_the_whole_model_fullgraph(k, name):
    model, inputs = MODELS[name]()
    expected = run(model, inputs)
    k.inject_optimized_kernels(model)
    backend = Graphs()
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    assert differences(run(compiled, inputs), expected) < 1e-5
    assert len(backend.ops()) >= 5 * blocks(model)


def test_compiled_with_inductor(k, ltx, device):
    model, inputs, expected = ltx
    model, inputs = model.to(device), to(inputs, device)
    k.inject_optimized_kernels(model)
    model.compile_repeated_blocks(fullgraph=True)
    for _ in range(2):
        assert differences([r.cpu() for r in run(model, inputs)], expected) < 1e-5


def test_compiled_blocks_notice_changes(k, ltx):
    """LoRA and removal after the compilation: guards see them."""
    model, inputs, expected = ltx
    stock = copy.deepcopy(model)
    k.inject_optimized_kernels(model)
    backend = Graphs()
    model.compile_repeated_blocks(backend=backend)
    assert differences(run(model, inputs), expected) < 1e-5
    lora(stock), lora(model)
    assert differences(run(model, inputs), run(stock, inputs)) < 1e-5
    model.delete_adapters("test")
    assert differences(run(model, inputs), expected) < 1e-5
    backend.graphs.clear()
    k.remove_optimized_kernels(model)
    assert differences(run(model, inputs), expected) < 1e-6
    assert backend.graphs and not backend.ops()


def test_other_shapes_compile_no_more_often_than_stock(k, ltx):
    model, inputs, _ = ltx
    graphs = []
    for each in (copy.deepcopy(model), model):
        if each is model:
            k.inject_optimized_kernels(each)
        backend = Graphs()
        each.compile_repeated_blocks(fullgraph=True, backend=backend)
        for grid in ((2, 3, 4), (3, 3, 4), (4, 3, 4), (5, 4, 4)):
            run(each, tiny_models.ltx_video_inputs(grid=grid))
        graphs.append(len(backend.graphs))
        torch._dynamo.reset()
    assert graphs[1] <= graphs[0] + 1


@pytest.mark.gpu
def test_compile_reduce_overhead(k, ltx):
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    model, inputs, expected = ltx
    model, inputs = model.to("cuda"), to(inputs, "cuda")
    k.inject_optimized_kernels(model)
    compiled = torch.compile(model, mode="reduce-overhead")
    for _ in range(4):
        assert differences([r.cpu() for r in run(compiled, inputs)], expected) < 1e-5


@pytest.mark.gpu
def test_cuda_graph_capture(k, ltx):
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    model, inputs, expected = ltx
    model, inputs = model.to("cuda"), to(inputs, "cuda")
    inputs["encoder_attention_mask"] = inputs["encoder_attention_mask"].bool()
    k.inject_optimized_kernels(model)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream), torch.no_grad():
        model(**inputs)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            result = model(**inputs)[0]
        graph.replay()
    torch.cuda.synchronize()
    assert differences([result.cpu()], expected) < 1e-5


# ---- rotary tables


def test_rope_tables_are_made_once_for_a_shape(k, ltx):
    model, inputs, _ = ltx
    stock = model.rope(inputs["hidden_states"], 2, 3, 4, (8 / 25, 32.0, 32.0))
    k.inject_optimized_kernels(model)
    first = model.rope(inputs["hidden_states"], 2, 3, 4, (8 / 25, 32.0, 32.0))
    assert all(map(torch.equal, first, stock))  # for everybody else they are what they were
    assert model.rope(inputs["hidden_states"], 2, 3, 4, (8 / 25, 32.0, 32.0))[0] is first[0]
    for other in ((2, 4, 3, (8 / 25, 32.0, 32.0)), (2, 3, 4, (8 / 24, 32.0, 32.0)), (2, 3, 4, None)):
        result = model.rope(inputs["hidden_states"], *other)
        assert all(map(torch.equal, result, type(model.rope).forward(model.rope, inputs["hidden_states"], *other)))
    assert model.rope(inputs["hidden_states"][:1], 2, 3, 4, None)[0].shape[0] == 1


def test_rope_tables_of_coordinates_follow_their_changes(k, ltx):
    model, inputs, _ = ltx
    k.inject_optimized_kernels(model)
    x, coords = inputs["hidden_states"], with_coords(dict(inputs))["video_coords"]
    first = model.rope(x, video_coords=coords)[0]
    assert model.rope(x, video_coords=coords)[0] is first
    assert torch.equal(model.rope(x, video_coords=coords.clone())[0], first)
    coords.mul_(2)
    assert torch.equal(
        model.rope(x, video_coords=coords)[0], type(model.rope).forward(model.rope, x, video_coords=coords)[0]
    )


def test_rope_tables_made_in_inference_mode_serve_training(k, ltx):
    model, inputs, _ = ltx
    k.inject_optimized_kernels(model)
    with torch.inference_mode():
        model(**inputs)
    model(**inputs)[0].sum().backward()


def test_rope_tables_are_not_kept_from_fake_tensors(k, ltx):
    from torch._subclasses import FakeTensorMode

    model, inputs, expected = ltx
    k.inject_optimized_kernels(model)
    with FakeTensorMode(allow_non_fake_inputs=True):
        model.rope(inputs["hidden_states"], 2, 3, 4, (8 / 25, 32.0, 32.0))
    assert differences(run(model, inputs), expected) < 1e-5


@pytest.mark.parametrize("grad_mode", [torch.no_grad, torch.inference_mode], ids=lambda mode: mode.__name__)
def test_tables_that_a_hook_writes_to_are_used_once(k, grad_mode):
    """The tables handed out are those that are kept: what is written into them was there in the next step."""
    model, inputs = tiny_models.ltx_video(), tiny_models.ltx_video_inputs(batch=1)
    expected = run(model, inputs)
    k.inject_optimized_kernels(model)
    with grad_mode():
        model(**inputs)
    for target in (model, stock_model := copy.deepcopy(model)):
        target.rope.register_forward_hook(lambda m, a, out: tuple(t.mul_(0.5) for t in out))
    k.remove_optimized_kernels(stock_model)
    changed = run(stock_model, inputs)
    for _ in range(2):
        with grad_mode():
            assert differences(list(model(**inputs)), changed) < 1e-5
    model.rope._forward_hooks.clear()
    assert differences(run(model, inputs), expected) < 1e-5 and differences(changed, expected) > 1e-3


def test_rope_tables_split_by_a_hook_are_read_in_full(k, ltx):
    """What context parallelism does: the tables that arrive are other tensors than those that were made."""
    model, inputs, expected = ltx
    k.inject_optimized_kernels(model)
    model.rope.register_forward_hook(lambda m, a, out: tuple(t.clone() for t in out))
    assert differences(run(model, inputs), expected) < 1e-5 and fused(k, model, inputs)


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
def test_projections_are_packed_on_a_gpu(k, ltx):
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
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


# ---- context parallelism


def _context_parallel_worker(rank, path, port):
    import kernels
    import torch.distributed as dist
    from diffusers import ContextParallelConfig

    os.environ.update(
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE="2", LOCAL_RANK=str(rank)
    )
    torch.set_num_threads(1)
    torch.accelerator.device_count = lambda: 1  # diffusers divides by it
    dist.init_process_group("gloo")
    k = kernels.get_kernel("org/ltx-kernels", version=1)
    model, inputs = tiny_models.ltx_video(layers=2), tiny_models.ltx_video_inputs(text=6)
    inputs["encoder_attention_mask"] = None  # diffusers refuses masks in context-parallel attention
    expected = run(model, inputs)
    k.inject_optimized_kernels(model)
    model.enable_parallelism(config=ContextParallelConfig(ulysses_degree=2))
    result = run(model, inputs)
    calls = count(model, **inputs)
    torch.save((differences(result, expected), dict(calls)), f"{path}/{rank}")
    dist.destroy_process_group()


def test_context_parallel(k, tmp_path):
    import socket

    import torch.multiprocessing as mp

    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    mp.spawn(_context_parallel_worker, args=(str(tmp_path), port), nprocs=2)
    for rank in range(2):
        difference, calls = torch.load(tmp_path / str(rank))
        assert difference < 1e-5 and calls["residual_ada_norm"] == 2


# ---- pipelines


def pipeline(vae=False):
    from diffusers import FlowMatchEulerDiscreteScheduler, LTXPipeline

    scheduler = FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True)
    model = tiny_models.ltx_video(layers=2)
    return LTXPipeline(scheduler=scheduler, vae=None, text_encoder=None, tokenizer=None, transformer=model)


def test_pipeline(k):
    pipe = pipeline()
    pipe.set_progress_bar_config(disable=True)
    generator = torch.Generator().manual_seed(0)
    arguments = {}
    for name in ("prompt", "negative_prompt"):
        arguments[f"{name}_embeds"] = torch.randn(1, 6, 24, generator=generator)
        arguments[f"{name}_attention_mask"] = torch.ones(1, 6, dtype=torch.bool)
    sizes = {"height": 64, "width": 96, "num_frames": 9, "num_inference_steps": 3, "output_type": "latent"}

    def frames():
        return pipe(**arguments, **sizes, generator=torch.Generator().manual_seed(1)).frames

    expected = frames()
    report = k.inject_optimized_kernels(pipe)
    assert report.counts["ltx_video.block"] == 2
    with tiny_models.OpCounter() as ops:
        result = frames()
    assert relative(result, expected) < 1e-5 and ops.calls["residual_ada_norm"] == 2 * 3
    k.remove_optimized_kernels(pipe)
    assert torch.equal(frames(), expected)


# ---- the documentation


@pytest.mark.skipif(not (ROOT / "docs").is_dir(), reason="docs/ is not there (a Nix build has only tests/)")
def test_each_feature_of_the_docs_has_its_test():
    text = (ROOT / "docs" / "diffusers-integration.md").read_text(encoding="utf-8")
    named = re.findall(r"`(test_\w+)`", text)
    sources = "\n".join(p.read_text(encoding="utf-8") for p in (ROOT / "tests").glob("test_*.py"))
    assert len(set(named)) >= 20
    assert not [name for name in named if f"def {name}(" not in sources]
