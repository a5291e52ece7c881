"""Problems of the RoPE family: the models' own, random tables, and the check against fp64."""

from __future__ import annotations

import reference
import torch
from conftest import DTYPES, outputs_of
from reference import assert_no_worse_than_eager

FP32 = DTYPES["fp32"]

#: name -> (shape of q, heads of k, options). The models that the op is for, at few tokens.
MODELS = {
    "ltx": ((2, 10, 8, 64), 8, {"across_heads": True, "table": "heads"}),
    "ltx-2": ((2, 10, 8, 64), 8, {"across_heads": True, "interleaved": False, "table": "batch-heads"}),
    "ltx-one-head": ((2, 10, 512), None, {"across_heads": True, "table": "shared"}),
    "wan": ((1, 10, 4, 128), 4, {"across_heads": True, "table": "shared-full"}),
    "flux": ((1, 10, 3, 128), 3, {"table": "shared-full"}),
    "hunyuan": ((1, 10, 3, 128), 3, {"table": "shared-full", "rope_start": 0, "rope_len": 7}),
    "cogvideox": ((1, 10, 3, 64), 3, {"norm": "layer", "bias": True, "table": "shared-full", "rope_start": 3}),
    "mochi": ((1, 10, 3, 128), 3, {"table": "heads"}),
    "lumina2": ((2, 10, 6, 96), 2, {"table": "batch"}),
    "llama": ((2, 10, 8, 128), 2, {"norm": "none", "interleaved": False, "table": "batch-full"}),
    "neox": ((2, 10, 3, 96), 3, {"norm": "none", "interleaved": False, "table": "batch", "rotary_dim": 24}),
    "glm": ((2, 10, 4, 128), 1, {"norm": "none", "table": "batch", "rotary_dim": 64}),
    "qwen3": ((2, 10, 4, 128), 2, {"interleaved": False, "table": "batch-full"}),
    "cross-attention": ((2, 10, 4, 64), 4, {"across_heads": True, "table": None}),
    "layer-across": (
        (2, 10, 3, 48),
        2,
        {"across_heads": True, "norm": "layer", "bias": True, "interleaved": False, "table": "batch"},
    ),
}


def make_table(kind, batch, rows, heads, rotary, device, dtype, interleaved):
    """cos and sin of random angles. kind: shared, batch, heads or batch-heads, with -full for each value twice."""
    full = kind.endswith("-full")
    kind = kind.removesuffix("-full")
    shape = {
        "shared": (rows,),
        "batch": (batch, rows),
        "heads": (1, rows, heads),
        "batch-heads": (batch, rows, heads),
    }[kind]
    angles = torch.randn(*shape, rotary // 2, device=device) * 3
    if full:
        angles = angles.repeat_interleave(2, dim=-1) if interleaved else torch.cat((angles, angles), dim=-1)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def make_inputs(model, dtype, device, *, table_dtype=FP32, param_dtype=None) -> dict:
    """Arguments of qk_norm_rope for one of MODELS."""
    shape, k_heads, options = MODELS[model]
    options = dict(options)
    kind, bias = options.pop("table"), options.pop("bias", False)
    batch, tokens, head_size = shape[0], shape[1], shape[-1]
    heads = shape[2] if len(shape) == 4 else 1
    inputs = {"q": torch.randn(shape, device=device).to(dtype), "k": None}
    if k_heads is not None:
        inputs["k"] = (torch.randn(batch, tokens, k_heads, head_size, device=device) * 2).to(dtype)
    if options.get("norm") != "none":
        for name, count in (("q", heads), ("k", k_heads)):
            if count is None:
                continue
            size = head_size * (count if options.get("across_heads") else 1)
            inputs[f"{name}_weight"] = (1 + torch.randn(size, device=device) / 4).to(param_dtype or dtype)
            if bias:
                inputs[f"{name}_bias"] = torch.randn(size, device=device).to(param_dtype or dtype)
    if kind is not None:
        rows = options.get("rope_len") or tokens - options.get("rope_start", 0)
        rotary = options.get("rotary_dim") or head_size
        interleaved = options.get("interleaved", True)
        inputs["cos"], inputs["sin"] = make_table(kind, batch, rows, heads, rotary, device, table_dtype, interleaved)
    return {**inputs, **options}


def check(k, function, /, **inputs):
    """The op against fp64 by the rule: outputs contiguous, of their dtypes, rounded once; the inputs untouched."""
    before = {name: value.clone() for name, value in inputs.items() if isinstance(value, torch.Tensor)}
    outputs = outputs_of(getattr(k, function)(**inputs))
    for name, value in before.items():
        assert torch.equal(inputs[name], value), f"{function} wrote to {name}"
    expected = outputs_of(getattr(reference, function)(**inputs))
    eager = outputs_of(getattr(reference, function)(**inputs, compute=FP32))
    dtype = inputs.get("q", inputs.get("x")).dtype
    assert len(outputs) == len(expected)
    for output, best, right in zip(outputs, eager, expected):
        assert output.is_contiguous()
        assert_no_worse_than_eager(output, best, right, dtype=dtype)
    return outputs
