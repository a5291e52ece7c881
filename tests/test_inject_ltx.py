"""LTX-Video and LTX-2 with fused blocks: the results of stock, gradients, rotary tables, copies and removal.

docs/diffusers-integration.md names the test of each feature; a test here checks that each exists.
"""

from __future__ import annotations

import copy
import functools
import re

import pytest
import tiny_models
import torch
from conftest import ROOT
from ltx_models import MODELS, blocks, differences, fused, run, to, with_coords
from tiny_models import count, relative
from torch import nn

pytest.importorskip("diffusers")


# ---- results


@pytest.fixture(params=MODELS)
def case(request):
    return MODELS[request.param]()


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


def test_a_block_of_ltx_video_is_five_calls(k, ltx):
    """What a block adds at its end, the norm at the start of the next one adds; behind the last there is an AdaLN."""
    model, inputs, _ = ltx
    k.inject_optimized_kernels(model)
    calls = {"qk_norm_rope": 3 * 2, "gated_residual": 3 + 1, "residual_ada_norm": 3 + 2, "ada_norm": 1 + 1}
    assert count(model, **inputs) == calls
    k.remove_optimized_kernels(model)
    k.inject_optimized_kernels(model, skip="ltx_video.transformer")
    calls = {"qk_norm_rope": 2, "gated_residual": 2, "residual_ada_norm": 1, "ada_norm": 1}
    assert count(model, **inputs) == {name: 3 * number for name, number in calls.items()}


class Between(torch.nn.Module):
    """A block of somebody else's, with the parameters of LTX-Video's."""

    def forward(self, hidden_states, encoder_hidden_states, temb, image_rotary_emb=None, encoder_attention_mask=None):
        assert isinstance(hidden_states, torch.Tensor)
        return hidden_states.mul_(1.5).roll(1, 1)  # in place: nobody may need what it was


def test_whatever_stands_between_blocks_gets_a_tensor(k, ltx):
    model, inputs, expected = ltx
    k.inject_optimized_kernels(model)
    seen = []
    handles = [
        model.transformer_blocks[1].register_forward_pre_hook(
            lambda block, args, kwargs: seen.append(kwargs), with_kwargs=True
        ),
        model.transformer_blocks[1].register_forward_hook(lambda block, args, result: seen.append(result)),
    ]
    assert differences(run(model, inputs), expected) < 1e-5
    assert type(seen[0]["hidden_states"]) is type(seen[1]) is torch.Tensor
    for handle in handles:
        handle.remove()
    assert differences(run(model, inputs), expected) < 1e-5
    k.remove_optimized_kernels(model)
    model.transformer_blocks[1] = Between()
    expected = run(model, inputs)
    k.inject_optimized_kernels(model)
    assert differences(run(model, inputs), expected) < 1e-5


@pytest.mark.parametrize("name", ["", "transformer_blocks.1"])
def test_a_wrapper_bound_to_a_module_is_called_and_kept(k, ltx, name):
    """As caches put theirs; functools.wraps copies the marks of our forward."""
    model, inputs, _ = ltx
    module = model.get_submodule(name)

    def wrap():
        inside = module.forward

        @functools.wraps(inside)
        def forward(self, *args, **options):
            result = inside(*args, **options)
            return (result[0] * 2,) if isinstance(result, tuple) else result * 2

        module.forward = forward.__get__(module)

    def unwrap():
        del module.__dict__["forward"]

    wrap()
    expected = run(model, inputs)
    unwrap()
    k.inject_optimized_kernels(model)
    wrap()
    for _ in range(2):
        assert differences(run(model, inputs), expected) < 1e-5
        k.inject_optimized_kernels(model)
    k.remove_optimized_kernels(model)
    assert differences(run(model, inputs), expected) < 1e-5


def test_a_forward_put_on_the_transformers_class_gets_what_the_caller_gives(k, ltx, monkeypatch):
    model, inputs, expected = ltx
    cls = type(model)
    stock = cls.forward
    seen = []

    def forward(self, *args, cache=None, **options):
        seen.append((cache, options["attention_kwargs"]["scale"]))
        return stock(self, *args, **options)

    options = {"cache": 1, "attention_kwargs": {"scale": 0.5}}
    k.inject_optimized_kernels(model)
    with monkeypatch.context() as patch:
        patch.setattr(cls, "forward", forward)
        assert differences(run(model, {**inputs, **options}), expected) < 1e-5
        k.remove_optimized_kernels(model)
        k.inject_optimized_kernels(model)
        assert differences(run(model, {**inputs, **options}), expected) < 1e-5
    assert seen == [(1, 0.5)] * 2
    assert differences(run(model, inputs), expected) < 1e-5


def test_a_hook_on_all_modules_sees_the_blocks(k, ltx):
    model, inputs, expected = ltx
    k.inject_optimized_kernels(model)
    seen = []
    handle = torch.nn.modules.module.register_module_forward_hook(lambda module, args, result: seen.append(module))
    try:
        assert differences(run(model, inputs), expected) < 1e-5
    finally:
        handle.remove()
    assert all(any(module is block for module in seen) for block in model.transformer_blocks)


def test_a_block_put_between_others_after_injection_gets_a_tensor(k, ltx):
    model, inputs, _ = ltx
    k.inject_optimized_kernels(model)
    model.transformer_blocks.insert(1, Between())
    results = run(model, inputs)
    k.remove_optimized_kernels(model)
    assert differences(results, run(model, inputs)) < 1e-5


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


def test_forward_mode_derivatives_are_those_of_stock(k, ltx, own_attention_backend):
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
    assert relative(result, expected) < 1e-5 and ops.calls["residual_ada_norm"] == (2 + 1) * 3
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
