"""RMSNorm injection: what is recognised, what it returns, and that a patch behaves like the module it is on."""

from __future__ import annotations

import copy
import io
import pickle
import types

import pytest
import tiny_models
import torch
from tiny_models import count, relative
from torch import nn

diffusers = pytest.importorskip("diffusers")
transformers = pytest.importorskip("transformers")


def diffusers_norm(name="RMSNorm", dim=48, **kwargs):
    from diffusers.models import normalization

    return getattr(normalization, name)(dim, eps=1e-6, **kwargs)


def transformers_norm(family: str, name: str, dim=48):
    module = getattr(__import__(f"transformers.models.{family}.modeling_{family}", fromlist=[name]), name)
    return module(dim)


NORMS = {
    "torch": lambda: nn.RMSNorm(48, eps=1e-5),
    "torch_eps_none": lambda: nn.RMSNorm(48),
    "torch_no_weight": lambda: nn.RMSNorm(48, eps=1e-6, elementwise_affine=False),
    "diffusers": diffusers_norm,
    "diffusers_no_weight": lambda: diffusers_norm(elementwise_affine=False),
    "mochi": lambda: diffusers_norm("MochiRMSNorm"),
    "llama": lambda: transformers_norm("llama", "LlamaRMSNorm"),
    "qwen3": lambda: transformers_norm("qwen3", "Qwen3RMSNorm"),
    "gpt_oss": lambda: transformers_norm("gpt_oss", "GptOssRMSNorm"),
    "olmo2": lambda: transformers_norm("olmo2", "Olmo2RMSNorm"),
    "gemma": lambda: transformers_norm("gemma", "GemmaRMSNorm"),
    "gemma3": lambda: transformers_norm("gemma3", "Gemma3RMSNorm"),
    "t5": lambda: transformers_norm("t5", "T5LayerNorm"),
}
FLOATS = [torch.float32, torch.float16, torch.bfloat16]


def stock(module, x):
    return type(module).forward(module, x)


@pytest.fixture(params=NORMS)
def norm(request):
    torch.manual_seed(0)
    module = NORMS[request.param]()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(1 + torch.randn_like(parameter))
    return module


# ---- what it computes


@pytest.mark.parametrize("weight_dtype", FLOATS, ids=str)
@pytest.mark.parametrize("x_dtype", FLOATS, ids=str)
def test_norm_returns_what_stock_returns(k, device, norm, x_dtype, weight_dtype):
    """In every pair of dtypes: the dtype of stock, and values of stock up to the last rounding."""
    norm.to(device, weight_dtype)
    assert k.patch_rmsnorm(norm) == 1
    x = torch.randn(7, 5, 48, device=device).to(x_dtype)
    x[0] *= 1e-3  # the epsilon counts
    with torch.no_grad():
        expected, result = stock(norm, x), norm(x)
    assert result.dtype is expected.dtype
    tolerance = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}[result.dtype]
    torch.testing.assert_close(result, expected, rtol=tolerance, atol=0)
    if result.dtype is not torch.float32:  # the right formula, not a like one: they differ in a quarter of the elements
        assert (result != expected).float().mean() < 0.01


def test_our_op_runs_in_the_model_dtype(k, norm):
    k.patch_rmsnorm(norm)
    for dtype in FLOATS:
        assert count(norm.to(dtype), torch.randn(3, 48).to(dtype)) == {"rms_norm": 1}


def test_float64_runs_stock(k, norm):
    norm.double()
    k.patch_rmsnorm(norm)
    x = torch.randn(3, 48, dtype=torch.float64)
    assert torch.equal(norm(x), stock(norm, x))
    assert not count(norm, x)


@pytest.mark.parametrize("autocast_dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_autocast_returns_the_dtype_of_stock(k, device, norm, dtype, autocast_dtype):
    norm.to(device, dtype)
    k.patch_rmsnorm(norm)
    x = torch.randn(3, 48, device=device).to(dtype)
    with torch.no_grad(), torch.autocast(device, autocast_dtype):
        assert norm(x).dtype is stock(norm, x).dtype


def test_gradients_are_those_of_stock(k, device, norm):
    norm.to(device)
    k.patch_rmsnorm(norm)
    inputs = torch.randn(2, 6, 48, device=device)
    results = []
    for forward in (norm, lambda x: stock(norm, x)):
        x = inputs[0].clone().requires_grad_()
        norm.zero_grad()
        (forward(x) * inputs[1]).sum().backward()
        results.append([x.grad, *(p.grad.clone() for p in norm.parameters())])
    for result, expected in zip(*results):
        assert relative(result, expected) < 1e-5


def test_compiles_fullgraph(k, any_size, norm):
    k.patch_rmsnorm(norm)
    compiled = torch.compile(norm, fullgraph=True, backend="aot_eager")
    x = torch.randn(6, 48)
    with torch.no_grad():
        assert torch.equal(compiled(x), norm(x))


@pytest.mark.parametrize("width", [1, 24, 96])
def test_another_width_is_refused_as_by_stock(k, width):
    for module in (nn.RMSNorm(48), nn.RMSNorm(48, elementwise_affine=False)):
        k.patch_rmsnorm(module)
        with pytest.raises(RuntimeError, match="48"):
            module(torch.randn(3, width))


# ---- what is recognised


class FancyRMSNorm(nn.Module):
    """A stranger: the name and the attributes of Llama's, other maths."""

    def __init__(self, hidden_size):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden_size))
        self.variance_epsilon = 1e-6

    def forward(self, hidden_states):
        return hidden_states * self.weight


def test_a_strangers_norm_is_left_alone_and_reported(k):
    model = nn.Sequential(FancyRMSNorm(8), nn.RMSNorm(8))
    report = k.inject_optimized_kernels(model)
    assert [(e.name, e.kind) for e in report.injected] == [("1", "rms_norm")]
    assert [(e.name, e.cls) for e in report.left_alone] == [("0", "FancyRMSNorm")]
    assert "forward" not in vars(model[0])


def test_a_subclass_is_a_stranger(k):
    class MyNorm(nn.RMSNorm):
        def forward(self, x):
            return super().forward(x) + 1

    assert k.patch_rmsnorm(MyNorm(8)) == 0


@pytest.mark.parametrize(
    "module, reason",
    [
        (nn.RMSNorm((4, 8)), "2 dimensions"),
        (diffusers_norm(bias=True), "bias"),
    ],
)
def test_what_the_op_cannot_do_is_left_alone_with_the_reason(k, module, reason):
    report = k.inject_optimized_kernels(module)
    assert not report.injected and reason in report.left_alone[0].reason


def test_a_class_of_another_version_is_left_alone(k):
    from diffusers.models import normalization

    class RMSNorm(normalization.RMSNorm):
        def forward(self, hidden_states, scale):
            return hidden_states * scale

    RMSNorm.__qualname__, RMSNorm.__module__ = "RMSNorm", normalization.__name__
    report = k.inject_optimized_kernels(RMSNorm(8, 1e-6))
    assert not report.injected and "other parameters" in report.left_alone[0].reason


def test_transformers_norm_of_another_formula_is_left_alone(k):
    """Decided by what the class computes: here one whose forward was changed, under the name and module of Llama's."""
    from transformers.models.llama import modeling_llama

    other = type("LlamaRMSNorm", (modeling_llama.LlamaRMSNorm,), {"__module__": modeling_llama.__name__})
    other.forward = lambda self, hidden_states: hidden_states * self.weight
    report = k.inject_optimized_kernels(other(48))
    assert not report.injected and "formula" in report.left_alone[0].reason


def test_recognised_before_the_weights_are_there(k):
    """Weights on meta (from_pretrained with a device map, sequential offload): the formula is found all the same."""
    with torch.device("meta"):
        module = transformers_norm("gemma", "GemmaRMSNorm")
    assert k.patch_rmsnorm(module) == 1
    module.to_empty(device="cpu")
    nn.init.normal_(module.weight)
    x = torch.randn(4, 48)
    torch.testing.assert_close(module(x), stock(module, x), rtol=1e-5, atol=1e-6)


def a_mode(name: str):
    from torch._subclasses import FakeTensorMode

    return {
        "fake": lambda: FakeTensorMode(allow_non_fake_inputs=True),
        "autocast_fp16": lambda: torch.autocast("cpu", torch.float16),
        "autocast_bf16": lambda: torch.autocast("cpu", torch.bfloat16),
        "inference": torch.inference_mode,
        "on_meta": lambda: torch.device("meta"),
    }[name]()


@pytest.mark.parametrize("mode", ["fake", "autocast_fp16", "autocast_bf16", "inference", "on_meta"])
def test_a_class_is_recognised_whatever_mode_it_is_first_met_in(k, inner, monkeypatch, mode):
    """What a class computes is found out once: in FakeTensorMode or under autocast it was found wrong, for good."""
    from transformers.models.gemma import modeling_gemma

    def forward(self, x):  # with a product of matrices, which autocast casts
        mean = nn.functional.linear(x.float().pow(2), torch.ones(1, x.shape[-1], device=x.device)) / x.shape[-1]
        return (x.float() * torch.rsqrt(mean.float() + self.eps) * (1.0 + self.weight.float())).type_as(x)

    members = {"__module__": modeling_gemma.__name__, "forward": forward}
    module = type("GemmaRMSNorm", (modeling_gemma.GemmaRMSNorm,), members)(48)
    source = inner("transformers")
    monkeypatch.setattr(source, "_formulas", {})
    with a_mode(mode):
        k.patch_rmsnorm(module)
    assert set(source._formulas.values()) == {"gemma"}
    x = torch.randn(4, 48)
    assert count(module, x) == {"rms_norm": 1}
    torch.testing.assert_close(module(x), stock(module, x), rtol=1e-5, atol=1e-6)


def test_a_class_is_recognised_under_another_default_dtype(k, inner, monkeypatch):
    source = inner("transformers")
    monkeypatch.setattr(source, "_formulas", {})
    module = transformers_norm("gpt_oss", "GptOssRMSNorm")
    torch.set_default_dtype(torch.float16)
    try:
        k.patch_rmsnorm(module)
    finally:
        torch.set_default_dtype(torch.float32)
    assert set(source._formulas.values()) == {"single"}


def test_recognising_leaves_the_random_state_alone(k):
    torch.manual_seed(3)
    expected = torch.rand(1)
    torch.manual_seed(3)
    k.patch_rmsnorm(transformers_norm("mistral", "MistralRMSNorm"))
    assert torch.equal(torch.rand(1), expected)


# ---- whole models

LANGUAGE_MODELS = ["Llama", "Mistral", "Qwen2", "Qwen3", "Gemma", "Phi3", "Olmo2", "Helium", "GptOss"]


@pytest.mark.parametrize("kind", LANGUAGE_MODELS)
def test_language_model_runs_the_kernels_and_keeps_its_output(k, device, kind):
    model = tiny_models.llama(kind).to(device)
    inputs = tiny_models.tokens(device)
    with torch.no_grad():
        expected = model(**inputs).logits
    number = k.patch_rmsnorm(model)
    norms = [m for m in model.modules() if "Norm" in type(m).__name__]
    with torch.no_grad():
        result = model(**inputs).logits
    assert relative(result, expected) < 1e-5
    assert number == len(norms)
    assert count(model, **inputs)["rms_norm"] == len(norms) >= 2 * 2 + 1
    assert k.remove_optimized_kernels(model) == len(norms)
    assert not count(model, **inputs)
    with torch.no_grad():
        assert torch.equal(model(**inputs).logits, expected)


def test_language_model_in_bf16_is_no_less_accurate(k):
    model, inputs = tiny_models.llama(), tiny_models.tokens()
    half, _ = tiny_models.in_dtype(model, {}, torch.bfloat16)
    with torch.no_grad():
        reference = copy.deepcopy(model).double()(**inputs).logits
        stock_error = relative(half(**inputs).logits, reference)
        k.patch_rmsnorm(half)
        assert relative(half(**inputs).logits, reference) <= stock_error * 1.02


def test_ltx_video_runs_at_least_four_norms_a_block(k, device):
    model, inputs = tiny_models.ltx_video().to(device), tiny_models.ltx_video_inputs(device)
    with torch.no_grad():
        expected = model(**inputs)[0]
    assert k.patch_rmsnorm(model) == 2 * 6
    assert count(model, **inputs)["rms_norm"] == 2 * 6
    with torch.no_grad():
        assert relative(model(**inputs)[0], expected) < 1e-5
    k.remove_optimized_kernels(model)
    assert not count(model, **inputs)


# ---- a patch behaves like the module it is on


def test_injecting_twice_changes_nothing(k):
    model = tiny_models.llama()
    first = k.inject_optimized_kernels(model)
    forwards = [vars(m).get("forward") for m in model.modules()]
    second = k.inject_optimized_kernels(model)
    assert first.to_dict() == second.to_dict()
    assert forwards == [vars(m).get("forward") for m in model.modules()]
    assert k.patch_rmsnorm(model) == k.patch_rmsnorm(model) == 5


def test_remove_restores_every_instance_exactly(k):
    model = tiny_models.llama()
    before = [dict(vars(m)) for m in model.modules()]
    state = {name: value.clone() for name, value in model.state_dict().items()}
    k.inject_optimized_kernels(model)
    assert k.remove_optimized_kernels(model) > 0
    assert [dict(vars(m)) for m in model.modules()] == before
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert k.remove_optimized_kernels(model) == 0


def test_a_deepcopy_runs_on_its_own_weights(k):
    module = nn.RMSNorm(16)
    k.patch_rmsnorm(module)
    copied = copy.deepcopy(module)
    nn.init.constant_(copied.weight, 3.0)
    x = torch.randn(2, 16)
    assert count(copied, x) == {"rms_norm": 1}
    torch.testing.assert_close(copied(x), 3 * module(x))
    k.remove_optimized_kernels(copied)
    assert not count(copied, x) and count(module, x)


def test_a_pickled_model_comes_back_stock(k):
    """A pickle must load where this package is not; injected again, it runs the kernels again."""
    module = nn.Sequential(nn.RMSNorm(16))
    k.patch_rmsnorm(module)
    text = pickle.dumps(module)
    assert b"ltx_kernels" not in text
    loaded = pickle.loads(text)
    x = torch.randn(2, 16)
    assert not count(loaded, x)
    assert torch.equal(loaded(x), stock(loaded[0], x))
    assert k.patch_rmsnorm(loaded) == 1 and count(loaded, x)

    buffer = io.BytesIO()
    torch.save(module, buffer)
    buffer.seek(0)
    assert not count(torch.load(buffer, weights_only=False), x)


def test_save_pretrained_round_trip(k, tmp_path):
    model, inputs = tiny_models.llama(), tiny_models.tokens()
    k.inject_optimized_kernels(model)
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path)
    with torch.no_grad():
        assert relative(model(**inputs).logits, loaded(**inputs).logits) < 1e-6


def test_module_hooks_still_run(k):
    module = nn.RMSNorm(16)
    calls = []
    module.register_forward_hook(lambda *_: calls.append("after"))
    module.register_forward_pre_hook(lambda *_: calls.append("before"))
    k.patch_rmsnorm(module)
    module(torch.randn(2, 16))
    assert calls == ["before", "after"]


@pytest.mark.parametrize("order", ["hook_first", "inject_first"])
def test_accelerate_hook_is_never_lost(k, order):
    hooks = pytest.importorskip("accelerate.hooks")
    calls = []

    class Spy(hooks.ModelHook):
        def pre_forward(self, module, *args, **kwargs):
            calls.append(1)
            return args, kwargs

    module, x = nn.RMSNorm(16), torch.randn(2, 16)
    steps = [lambda: hooks.add_hook_to_module(module, Spy()), lambda: k.patch_rmsnorm(module)]
    for step in steps if order == "hook_first" else reversed(steps):
        step()
    assert count(module, x) == {"rms_norm": 1} and len(calls) == 1
    assert k.remove_optimized_kernels(module) == 1
    assert not count(module, x) and len(calls) == 2
    k.patch_rmsnorm(module)
    hooks.remove_hook_from_module(module)
    assert count(module, x) == {"rms_norm": 1} and len(calls) == 2


@pytest.mark.parametrize("order", ["hook_first", "inject_first"])
def test_diffusers_hook_is_never_lost(k, order):
    from diffusers.hooks.hooks import HookRegistry, ModelHook

    calls = []

    class Spy(ModelHook):
        def new_forward(self, module, *args, **kwargs):
            calls.append(1)
            return self.fn_ref.original_forward(*args, **kwargs)

    class Second(ModelHook):
        def pre_forward(self, module, *args, **kwargs):
            calls.append(2)
            return args, kwargs

    module, x = nn.RMSNorm(16), torch.randn(2, 16)

    def hook():
        registry = HookRegistry.check_if_exists_or_initialize(module)
        registry.register_hook(Spy(), "spy")
        registry.register_hook(Second(), "second")

    steps = [hook, lambda: k.patch_rmsnorm(module)]
    for step in steps if order == "hook_first" else reversed(steps):
        step()
    assert count(module, x) == {"rms_norm": 1} and calls == [2, 1]
    k.remove_optimized_kernels(module)
    assert not count(module, x) and calls == [2, 1] * 2
    k.patch_rmsnorm(module)
    module._diffusers_hook.remove_hook("spy")
    module._diffusers_hook.remove_hook("second")
    assert count(module, x) == {"rms_norm": 1} and calls == [2, 1] * 2


def test_a_foreign_forward_is_left_alone_and_reported(k):
    module = nn.RMSNorm(16)
    module.forward = types.MethodType(lambda self, x: x + 1, module)
    report = k.inject_optimized_kernels(module)
    assert not report.injected and "replaced its forward" in report.left_alone[0].reason
    assert torch.equal(module(torch.zeros(2, 16)), torch.ones(2, 16))


def test_a_compiled_module_notices(k, any_size):
    """compile() first, inject later, remove later still."""
    torch._dynamo.reset()

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = nn.RMSNorm(16)

        def forward(self, x):
            return self.norm(x) + 1

    module, x = Model(), torch.randn(2, 16)
    seen = []

    def backend(graph, _):
        seen.append(any("rms_norm" in str(n.target) and "_ltx_kernels" in str(n.target) for n in graph.graph.nodes))
        return graph.forward

    module.compile(backend=backend, fullgraph=True)
    with torch.no_grad():
        for step in (lambda m: None, k.patch_rmsnorm, k.remove_optimized_kernels):
            step(module)
            module(x)
    assert seen[:2] == [False, True]
    with torch.no_grad():
        assert torch.equal(module(x), stock(module.norm, x) + 1)


# ---- the interface


def test_environment_disables_injection_and_says_so(k, monkeypatch):
    monkeypatch.setenv("LTX_KERNELS_DISABLE", "1")
    module = nn.RMSNorm(16)
    report = k.inject_optimized_kernels(module)
    assert "LTX_KERNELS_DISABLE" in str(report) and report.to_dict()["disabled"]
    assert k.patch_rmsnorm(module) == 0 and "forward" not in vars(module)


def test_only_and_skip(k):
    model = tiny_models.llama()

    def norms(**choice) -> set[str]:
        k.remove_optimized_kernels(model)
        report = k.inject_optimized_kernels(model, **choice)
        return {entry.name for entry in report.injected if entry.kind == "rms_norm"}

    first = {f"model.layers.0.{name}" for name in ("input_layernorm", "post_attention_layernorm")}
    assert norms(only="model.layers.0.*") == first
    assert norms(skip=["rms_norm"]) == norms(skip="LlamaRMSNorm") == set()
    assert norms(only="rms_norm", skip="model.norm") == first | {name.replace("0", "1") for name in first}
    report = k.inject_optimized_kernels(model, only="rms_norm", skip="model.norm")
    assert "model.norm" in {entry.name for entry in report.left_alone}


def test_only_and_skip_refuse_what_matches_nothing(k):
    module = nn.RMSNorm(16)
    with pytest.raises(ValueError, match="rmsnrom.*rms_norm"):
        k.inject_optimized_kernels(module, only="rmsnrom")
    assert "forward" not in vars(module)


@pytest.mark.parametrize("argument", ["only", "skip"])
@pytest.mark.parametrize("wrong", [3, [3], nn.RMSNorm, ["rms_norm", nn.RMSNorm]], ids=repr)
def test_only_and_skip_of_another_type_are_named(k, argument, wrong):
    module = nn.RMSNorm(16)
    with pytest.raises(TypeError, match=f"{argument} names (3|<class 'torch.*RMSNorm'>); "):
        k.inject_optimized_kernels(module, **{argument: wrong})
    assert "forward" not in vars(module)


def test_a_pipeline_is_all_its_models(k):
    class Pipeline:
        def __init__(self):
            self.components = {"transformer": tiny_models.ltx_video(), "vae": None, "scheduler": object()}

    report = k.inject_optimized_kernels(Pipeline())
    assert report.injected and {e.name.split(".")[0] for e in report.injected} == {"transformer"}


def test_something_without_modules_is_a_type_error(k):
    with pytest.raises(TypeError, match="model_or_pipeline"):
        k.inject_optimized_kernels("a string")


def test_report_prints_as_a_table(k):
    report = k.inject_optimized_kernels(nn.Sequential(nn.RMSNorm(8), nn.RMSNorm(8), FancyRMSNorm(8)))
    lines = str(report).splitlines()
    assert len(lines) == 3 and "rms_norm" in lines[1] and " 2 " in lines[1] and "FancyRMSNorm" in lines[2]
    assert report.counts == {"rms_norm": 2}
    assert len(report.to_dict()["left_alone"]) == 1
