"""The Hub layers, through `kernels.kernelize` with a local repository, in each of its modes."""

from __future__ import annotations

import copy
from pathlib import Path

import kernels
import pytest
import tiny_models
import torch
from conftest import ROOT
from tiny_models import count, relative

transformers = pytest.importorskip("transformers")

MODES = {
    "inference": kernels.Mode.INFERENCE,
    "training": kernels.Mode.TRAINING,
    "inference_compile": kernels.Mode.INFERENCE | kernels.Mode.TORCH_COMPILE,
    "training_compile": kernels.Mode.TRAINING | kernels.Mode.TORCH_COMPILE,
}


@pytest.fixture
def kernelized(k):
    """kernelized(model, mode): a copy whose Llama RMSNorms are the package's layer."""
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    kernels.replace_kernel_forward_from_hub(LlamaRMSNorm, "LtxTestRMSNorm")
    repository = kernels.LocalLayerRepository(repo_path=Path(ROOT), layer_name="RMSNorm")

    def kernelize(model, mode, device="cpu"):
        with kernels.use_kernel_mapping({"LtxTestRMSNorm": {device: repository}}):
            return kernels.kernelize(copy.deepcopy(model), mode=mode, device=device)

    return kernelize


@pytest.mark.kernels_ci
@pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
def test_rms_norm_layer_in_each_mode(kernelized, device, mode):
    model = tiny_models.llama().to(device)
    inputs = tiny_models.tokens(device)
    layered = kernelized(model, mode, device)
    assert count(layered, **inputs)["rms_norm"] == 5
    with torch.no_grad():
        assert relative(layered(**inputs).logits, model(**inputs).logits) < 1e-5


def test_rms_norm_layer_trains_as_stock(kernelized, device):
    model = tiny_models.llama().to(device)
    layered = kernelized(model, kernels.Mode.TRAINING, device).train()
    inputs = tiny_models.tokens(device)
    for each in (model, layered):
        each(**inputs, labels=inputs["input_ids"]).loss.backward()
    for (name, expected), result in zip(model.named_parameters(), layered.parameters()):
        assert relative(result.grad, expected.grad) < 1e-4, name


@pytest.mark.parametrize("weight_dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("x_dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64], ids=str)
def test_rms_norm_layer_returns_the_dtype_of_stock(k, device, x_dtype, weight_dtype):
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    module = LlamaRMSNorm(48).to(device, weight_dtype)
    torch.nn.init.normal_(module.weight, 1.0)
    x = torch.randn(5, 48, device=device).to(x_dtype)
    expected, result = LlamaRMSNorm.forward(module, x), k.layers.RMSNorm.forward(module, x)
    assert result.dtype is expected.dtype
    assert (result != expected).float().mean() < (1 if x_dtype is torch.float32 else 0.02)
    torch.testing.assert_close(result, expected, rtol=1e-2 if x_dtype.itemsize == 2 else 1e-6, atol=0)


@pytest.mark.parametrize("layer", ["RMSNorm", "RMSNormZeroCentered", "LayerNorm"])
def test_norm_layers_compute_what_the_op_has_no_rule_for(k, layer):
    """vmap, and tensors of parts."""
    forward = getattr(k.layers, layer).forward
    module = torch.nn.LayerNorm(32, bias=layer == "LayerNorm")  # with all that a layer asks for
    x = torch.randn(2, 3, 32)
    with torch.no_grad():
        expected = forward(module, x)
        assert relative(torch.func.vmap(lambda row: forward(module, row))(x), expected) < 1e-6
        nested = forward(module, torch.nested.as_nested_tensor(x, layout=torch.jagged))
        assert relative(torch.stack(nested.unbind()), expected) < 1e-6


def test_rms_norm_layer_compiles_fullgraph(kernelized):
    model, inputs = tiny_models.llama(), tiny_models.tokens()
    layered = kernelized(model, kernels.Mode.INFERENCE | kernels.Mode.TORCH_COMPILE)
    with torch.no_grad():
        expected = layered(**inputs, use_cache=False).logits
        result = torch.compile(layered, fullgraph=True, backend="aot_eager")(**inputs, use_cache=False).logits
    assert relative(result, expected) < 1e-6


@pytest.mark.parametrize("mode", [None, *MODES.values()], ids=["default", *MODES])
def test_transformers_use_kernels(k, mode):
    """Its own switch, with our layer in its mapping: the decorated classes, no name of ours."""
    model, inputs = tiny_models.llama("Qwen2"), tiny_models.tokens()
    if getattr(type(model.model.norm), "kernel_layer_name", None) != "RMSNorm":
        pytest.skip("this transformers asks for another version of kernels: its decorators do nothing")
    with torch.no_grad():
        expected = model(**inputs).logits
    repository = kernels.LocalLayerRepository(repo_path=Path(ROOT), layer_name="RMSNorm")
    with kernels.use_kernel_mapping({"RMSNorm": {"cpu": repository}}):
        model.set_use_kernels(True, mode=mode)
    assert count(model, **inputs) == {"rms_norm": 5}
    with torch.no_grad():
        assert relative(model(**inputs).logits, expected) < 1e-5


def test_transformers_use_kernels_of_the_rotation(k):
    """The function is one module for all models: it is given back at the end."""
    model, inputs = tiny_models.llama("Qwen2"), tiny_models.tokens()
    if not isinstance(transformers.models.qwen2.modeling_qwen2.apply_rotary_pos_emb, torch.nn.Module):
        pytest.skip("this transformers asks for another version of kernels: its decorators do nothing")

    def gradient():
        model.zero_grad()
        model(**inputs, labels=inputs["input_ids"]).loss.backward()
        return model.model.layers[0].self_attn.q_proj.weight.grad.clone()

    with torch.no_grad():
        expected = model(**inputs).logits
    stock_gradient = gradient()
    repository = kernels.LocalLayerRepository(repo_path=Path(ROOT), layer_name="RotaryPosEmb")
    for mapping, ops in (({"rotary_pos_emb": {"cpu": repository}}, {"qk_norm_rope": 2}), ({}, {})):
        with kernels.use_kernel_mapping(mapping, inherit_mapping=False):
            model.set_use_kernels(True)
        assert count(model, **inputs) == ops
        with torch.no_grad():
            assert relative(model(**inputs).logits, expected) < 1e-5
        assert torch.equal(gradient(), stock_gradient)


def test_layers_obey_the_rules_of_the_hub(k):
    """And are honest: the differentiable ones are those whose op has a backward."""
    assert len(k.layers.__all__) == 10
    for name in k.layers.__all__:
        layer = getattr(k.layers, name)
        assert layer.__init__ is torch.nn.Module.__init__
        assert set(dir(layer)) - set(dir(torch.nn.Module)) <= {"has_backward", "can_torch_compile"}
        assert layer.has_backward is ("RMSNorm" in name) and layer.can_torch_compile is True


# ---- the other layers: the class that adopts each, made ready, and its input


def _gemma_norm():
    module = transformers.models.gemma3.modeling_gemma3.Gemma3RMSNorm(48)
    torch.nn.init.normal_(module.weight)
    return module


def _mlp(kind: str):
    return copy.deepcopy(tiny_models.llama(kind).model.layers[0].mlp)


def _layer_norm(*shape, **arguments):
    module = torch.nn.LayerNorm(shape, **arguments)
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter)
    return module


def _diffusers(module: str, name: str, *arguments):
    source = pytest.importorskip(f"diffusers.models.{module}")
    torch.manual_seed(0)
    return tiny_models.randomize(torch.nn.ModuleDict({"norm": getattr(source, name)(*arguments)}))["norm"]


LAYERS = {
    "DiffusersRMSNorm": (lambda: _diffusers("normalization", "RMSNorm", 48, 1e-6), 48, "rms_norm"),
    "GEGLU": (lambda: _diffusers("activations", "GEGLU", 48, 32), 48, "glu"),
    "RMSNormZeroCentered": (_gemma_norm, 48, "rms_norm"),
    "LayerNorm": (lambda: _layer_norm(48), 48, "layer_norm"),
    "SwiGLUMLP": (lambda: _mlp("Llama"), 64, "activate"),
    "GeGLUMLP": (lambda: _mlp("Gemma"), 64, "activate"),
    "GELU": (lambda: transformers.activations.GELUActivation(), 48, "activate"),
    "GELUTanh": (lambda: transformers.activations.NewGELUActivation(), 48, "activate"),
}


@pytest.fixture
def adopt(k):
    """adopt(module, layer, mode): a copy that kernelize has given the package's layer."""

    def adopt(module, layer, mode, device="cpu"):
        name = f"LtxTest{layer}"
        kernels.replace_kernel_forward_from_hub(type(module), name)
        repository = kernels.LocalLayerRepository(repo_path=Path(ROOT), layer_name=layer)
        with kernels.use_kernel_mapping({name: {device: repository}}):
            return kernels.kernelize(copy.deepcopy(module), mode=mode, device=device)

    return adopt


@pytest.mark.kernels_ci
@pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
@pytest.mark.parametrize("layer", LAYERS)
def test_layer_in_each_mode(k, adopt, device, layer, mode):
    """It runs where its flags say so, and the stock module where not."""
    make, size, op = LAYERS[layer]
    module, x = make().to(device), torch.randn(3, 7, size, device=device)
    adopted = adopt(module, layer, mode, device)
    runs = getattr(k.layers, layer).has_backward or kernels.Mode.TRAINING not in mode
    assert count(adopted, x) == ({op: 1} if runs else {})
    with torch.no_grad():
        assert relative(adopted(x), module(x)) < 1e-5


@pytest.mark.parametrize("layer", LAYERS)
def test_layer_gives_the_gradient_of_stock(adopt, device, layer):
    """In inference mode too, where a gradient is wanted all the same."""
    make, size, _ = LAYERS[layer]
    module = make().to(device)
    for mode in (kernels.Mode.INFERENCE, kernels.Mode.TRAINING):
        grads = []
        for each in (module, adopt(module, layer, mode, device)):
            torch.manual_seed(1)
            x = torch.randn(3, 7, size, device=device, requires_grad=True)
            each.zero_grad()
            each(x).square().sum().backward()
            grads.append([x.grad, *(p.grad for p in each.parameters())])
        for expected, result in zip(*grads):
            assert relative(result, expected) < 1e-4


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("layer", LAYERS)
def test_layer_returns_what_stock_returns(adopt, device, layer, dtype):
    make, size, _ = LAYERS[layer]
    module, x = make().to(device, dtype), torch.randn(3, 7, size, device=device).to(dtype)
    adopted = adopt(module, layer, kernels.Mode.INFERENCE, device)
    with torch.no_grad():
        expected, result = module(x), adopted(x)
        with torch.autocast(device, torch.bfloat16):
            assert adopted(x).dtype is module(x).dtype
    assert result.dtype is expected.dtype
    assert relative(result, expected) < (1e-2 if dtype.itemsize == 2 else 1e-5)


@pytest.mark.parametrize("layer", LAYERS)
def test_layer_compiles_fullgraph(adopt, layer):
    torch._dynamo.reset()
    make, size, _ = LAYERS[layer]
    x = torch.randn(3, 7, size)
    adopted = adopt(make(), layer, kernels.Mode.INFERENCE | kernels.Mode.TORCH_COMPILE)
    with torch.no_grad():
        assert relative(torch.compile(adopted, fullgraph=True, backend="aot_eager")(x), adopted(x)) < 1e-6


@pytest.mark.parametrize(
    "module", [_layer_norm(4, 48), _layer_norm(48, elementwise_affine=False), _layer_norm(48, bias=False)]
)
def test_layer_norm_layer_of_any_kind(adopt, module):
    x = torch.randn(3, 4, 48)
    adopted = adopt(module, "LayerNorm", kernels.Mode.INFERENCE)
    with torch.no_grad():
        assert relative(adopted(x), module(x)) < 1e-5


@pytest.mark.parametrize("arguments", [(48, 1e-6, False), (48, 1e-6, True, True)], ids=["no_weight", "bias"])
def test_diffusers_rms_norm_layer_of_any_kind(adopt, arguments):
    module, x = _diffusers("normalization", "RMSNorm", *arguments), torch.randn(3, 4, 48)
    adopted = adopt(module, "DiffusersRMSNorm", kernels.Mode.INFERENCE)
    with torch.no_grad():
        assert count(adopted, x) == ({} if module.bias is not None else {"rms_norm": 1})
        assert relative(adopted(x), module(x)) < 1e-6


def test_geglu_layer_says_what_is_deprecated(adopt):
    module, x = _diffusers("activations", "GEGLU", 48, 32), torch.randn(3, 4, 48)
    adopted = adopt(module, "GEGLU", kernels.Mode.INFERENCE)
    with torch.no_grad(), pytest.warns(FutureWarning, match="scale"):
        assert relative(adopted(x, scale=1.0), module(x)) < 1e-6


def test_layer_norm_layer_refuses_another_width_as_stock(adopt):
    layered = adopt(torch.nn.LayerNorm(8, elementwise_affine=False), "LayerNorm", kernels.Mode.INFERENCE)
    with pytest.raises(RuntimeError, match="normalized_shape"):
        layered(torch.randn(2, 16))


def test_rotary_layer(adopt, device):
    """In place of a decorated function, which is a module of its own; what it does not take goes to that function."""

    def rotary(q, k, cos, sin, unsqueeze_dim=1):
        half = cos.shape[-1] // 2
        cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
        rotated = [torch.cat((-x[..., half:], x[..., :half]), -1) for x in (q, k)]
        return q * cos + rotated[0] * sin, k * cos + rotated[1] * sin

    function = kernels.use_kernel_forward_from_hub("LtxTestRotary")(rotary)
    adopted = adopt(function, "RotaryPosEmb", kernels.Mode.INFERENCE | kernels.Mode.TORCH_COMPILE, device)
    angles = torch.randn(1, 5, 8, device=device)
    tables = [torch.cat((t, t), -1) for t in (angles.cos(), angles.sin())]
    for unsqueeze_dim, shape in ((1, (2, 4, 5, 16)), (2, (2, 5, 4, 16))):
        q, k = torch.randn(2, *shape, device=device)
        assert count(adopted, q, k, *tables, unsqueeze_dim) == {"qk_norm_rope": 1}
        for result, expected in zip(adopted(q, k, *tables, unsqueeze_dim), rotary(q, k, *tables, unsqueeze_dim)):
            assert relative(result, expected) < 1e-5
    q, k = torch.randn(2, 2, 4, 5, 16, device=device, dtype=torch.float64)
    assert torch.equal(adopted(q, k, *tables)[0], rotary(q, k, *tables)[0])
