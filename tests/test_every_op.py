"""What every public op does, whatever it computes: one table of ops, one test for each behaviour.

The files of the families hold what differs: the results, the layouts, the names of the arguments.
"""

from __future__ import annotations

import inspect
from typing import Callable, NamedTuple

import pytest
import torch
from conftest import DTYPES

FP32, FP16, BF16 = DTYPES.values()
TOKENS, HEADS = 6, 4


class Op(NamedTuple):
    """A function, the shapes of its tensors for a batch and a width, and the options that choose what it computes.

    A tensor of more than one dimension has the batch first.
    """

    function: str
    shapes: Callable[[int, int], dict]
    options: dict = {}
    memory_format: torch.memory_format = torch.contiguous_format


def norm_shapes(*names: str) -> Callable[[int, int], dict]:
    def shapes(batch: int, width: int) -> dict:
        rows = dict.fromkeys(("x", "residual"), (batch, TOKENS, width))
        modulations = dict.fromkeys(("gate", "scale", "shift"), (batch, 1, width))
        return {name: {**rows, **modulations}.get(name, (width,)) for name in names}

    return shapes


def rope_shapes(heads: dict, weights: Callable[[int], dict] = lambda width: {}, tables: bool = True) -> Callable:
    def shapes(batch: int, width: int) -> dict:
        cos_sin = dict.fromkeys(("cos", "sin") if tables else (), (batch, TOKENS, width // 2))
        return {**{name: (batch, TOKENS, n, width) for name, n in heads.items()}, **weights(width), **cos_sin}

    return shapes


def glu_shapes(batch: int, width: int) -> dict:
    return {"x": (batch, TOKENS, 2 * width)}


def activation_shapes(*names: str) -> Callable[[int, int], dict]:
    return lambda batch, width: dict.fromkeys(names, (batch, TOKENS, width))


def pixel_shapes(batch: int, width: int) -> dict:
    return {"x": (batch, width, 3, 4), **dict.fromkeys(("scale", "shift"), (batch, width, 1, 1))}


_ADA = ("x", "scale", "shift", "weight", "bias", "scale_table", "shift_table")
_RESIDUAL_ADA = ("residual", "x", "gate", "gate_table", *_ADA[1:])
_QK = {"q": HEADS, "k": HEADS // 2}

OPS = {
    "rms_norm": Op("rms_norm", norm_shapes("x", "weight")),
    "layer_norm": Op("layer_norm", norm_shapes("x", "weight", "bias")),
    "ada_norm-rms": Op("ada_norm", norm_shapes(*_ADA)),
    "ada_norm-layer": Op("ada_norm", norm_shapes(*_ADA), {"norm": "layer"}),
    "gated_residual": Op("gated_residual", norm_shapes("residual", "x", "gate", "gate_table")),
    "residual_ada_norm-rms": Op("residual_ada_norm", norm_shapes(*_RESIDUAL_ADA)),
    "residual_ada_norm-layer": Op("residual_ada_norm", norm_shapes(*_RESIDUAL_ADA), {"norm": "layer"}),
    "add_rms_norm": Op("add_rms_norm", norm_shapes("x", "residual", "weight")),
    "rope": Op("rope", rope_shapes({"x": HEADS})),
    "rope-half": Op("rope", rope_shapes({"x": HEADS}), {"interleaved": False}),
    "rope_3d": Op("rope_3d", rope_shapes(_QK, tables=False), {"grid": (1, 2, 3)}),
    "qk_norm_rope-per_head": Op(
        "qk_norm_rope", rope_shapes(_QK, lambda width: dict.fromkeys(("q_weight", "k_weight"), (width,)))
    ),
    "qk_norm_rope-across_heads": Op(
        "qk_norm_rope",
        rope_shapes(_QK, lambda width: {"q_weight": (HEADS * width,), "k_weight": (HEADS // 2 * width,)}),
        {"across_heads": True},
    ),
    "qk_norm_rope-q_only": Op(
        "qk_norm_rope",
        rope_shapes({"q": HEADS}, lambda width: {"q_weight": (width,), "q_bias": (width,)}),
        {"k": None, "norm": "layer", "interleaved": False},
    ),
    "geglu": Op("geglu", glu_shapes),
    "geglu-tanh": Op("geglu", glu_shapes, {"approximate": "tanh", "gate_first": True}),
    "swiglu": Op("swiglu", glu_shapes),
    "swiglu-two": Op("swiglu", activation_shapes("x", "up")),
    "gelu": Op("gelu", activation_shapes("x")),
    "gelu-erf": Op("gelu", activation_shapes("x"), {"approximate": "none"}),
    "pixel_norm_silu": Op("pixel_norm_silu", pixel_shapes),
    "pixel_norm_silu-channels_last": Op("pixel_norm_silu", pixel_shapes, {}, torch.channels_last),
}


@pytest.fixture(params=OPS)
def op(request) -> Op:
    return OPS[request.param]


def make_inputs(op: Op, batch: int, width: int, dtype: torch.dtype, device: str) -> dict:
    inputs = {name: torch.randn(shape, device=device).to(dtype) for name, shape in op.shapes(batch, width).items()}
    return {n: t.contiguous(memory_format=op.memory_format) if t.dim() == 4 else t for n, t in inputs.items()}


def call(k, op: Op, inputs: dict) -> list[torch.Tensor]:
    outputs = getattr(k, op.function)(**{**op.options, **inputs})
    return [t for t in (outputs if isinstance(outputs, tuple) else (outputs,)) if t is not None]


def test_every_public_function_is_in_the_table(k):
    functions = {name for name in k.__all__ if inspect.isfunction(getattr(k, name))}
    functions -= {name for name in functions if getattr(k, name).__module__ != f"{k.__name__}.functional"}
    assert functions - {"rmsnorm"} == {op.function for op in OPS.values()}


# ---- bad input


@pytest.mark.parametrize("wrong", [None, [1.0], 3, 2.5, "x", object()], ids=lambda value: type(value).__name__)
@pytest.mark.parametrize("grad", [True, False])
def test_something_that_is_no_tensor_is_named(k, op, device, wrong, grad):
    inputs = make_inputs(op, 2, 16, FP32, device)
    parameters = inspect.signature(getattr(k, op.function)).parameters
    for name in inputs:
        # qk_norm_rope asks for a k that may be None
        may_be_none = parameters[name].default is None or (name == "k" and op.function == "qk_norm_rope")
        if wrong is None and may_be_none:
            continue
        needed = "a tensor or None" if parameters[name].default is None else "a tensor"
        message = f"ltx_kernels: {name} is of type {type(wrong).__name__}; {needed} is needed"
        with torch.set_grad_enabled(grad), pytest.raises(TypeError, match=message):
            call(k, op, {**inputs, name: wrong})
    call(k, op, inputs)
