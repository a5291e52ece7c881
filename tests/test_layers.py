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


def test_rms_norm_layer_compiles_fullgraph(kernelized):
    model, inputs = tiny_models.llama(), tiny_models.tokens()
    layered = kernelized(model, kernels.Mode.INFERENCE | kernels.Mode.TORCH_COMPILE)
    with torch.no_grad():
        expected = layered(**inputs, use_cache=False).logits
        result = torch.compile(layered, fullgraph=True, backend="aot_eager")(**inputs, use_cache=False).logits
    assert relative(result, expected) < 1e-6


def test_layers_obey_the_rules_of_the_hub(k):
    for name in k.layers.__all__:
        layer = getattr(k.layers, name)
        assert layer.__init__ is torch.nn.Module.__init__
        assert set(dir(layer)) - set(dir(torch.nn.Module)) <= {"has_backward", "can_torch_compile"}
        assert layer.has_backward is True and layer.can_torch_compile is True
