"""The public functions: what they compute, which op they call, and whether a gradient is wanted."""

from typing import Optional, Tuple

import torch
from torch import Tensor

from ._ops import ops

# Autograd costs a call about 5 us even under no_grad, so the plain ops carry none: an op with a backward is chosen only where a gradient
# is wanted.


def _wants_grad(*tensors: Optional[Tensor]) -> bool:
    return torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in tensors)


def _call(op, *args):
    """Call an op; a failed allocation, whose type the stable ABI loses, becomes torch.OutOfMemoryError again."""
    try:
        return op(*args)
    except RuntimeError as error:
        if "CUDA out of memory" in str(error):
            raise torch.OutOfMemoryError(str(error)) from None
        raise


def rms_norm(
    x: Tensor,
    weight: Optional[Tensor] = None,
    eps: float = 1e-6,
    *,
    weight_offset: float = 0.0,
    cast_before_weight: bool = False,
) -> Tensor:
    """Root mean square norm over the last dimension: ``x / sqrt(mean(x**2) + eps) * (weight_offset + weight)``.

    Computed in fp32 and rounded once. Differentiable in ``x`` and ``weight``.

    Args:
        x: ``[*, D]``, float32, float16 or bfloat16. Any strides in front of the last dimension are read in place.
        weight: ``[D]`` in any of the three dtypes, or None for a factor of 1 (``weight_offset`` is ignored then).
        eps: added to the mean square.
        weight_offset: 1.0 for weights stored around zero, as Gemma's.
        cast_before_weight: round the normed value to x's dtype before the weight, as Llama's RMSNorm does.

    Returns:
        ``[*, D]`` in x's dtype, contiguous.

    Raises:
        RuntimeError: a wrong dtype, device or shape; the message names the argument, what came and what is needed.

    Source: Zhang and Sennrich, "Root Mean Square Layer Normalization", 2019.
    """
    if _wants_grad(x, weight):
        return _call(ops.rms_norm_with_rstd.default, x, weight, eps, weight_offset, cast_before_weight)[0]
    return _call(ops.rms_norm.default, x, weight, eps, weight_offset, cast_before_weight)


rmsnorm = rms_norm


def _refuse_grad(function: str, *tensors: Optional[Tensor]) -> None:
    if _wants_grad(*tensors):
        raise RuntimeError(
            f"ltx_kernels: {function} has no backward yet and an input requires a gradient; call it under torch.no_grad() or use the "
            "eager composition"
        )


def _is_layer(norm: str) -> bool:
    if norm not in ("rms", "layer"):
        raise ValueError(f"ltx_kernels: norm is {norm!r}; 'rms' or 'layer' is needed")
    return norm == "layer"


def layer_norm(x: Tensor, weight: Optional[Tensor] = None, bias: Optional[Tensor] = None, eps: float = 1e-5) -> Tensor:
    """Layer norm over the last dimension: ``(x - mean(x)) / sqrt(var(x) + eps) * weight + bias``.

    Computed in fp32 with the variance in a second pass (a large mean costs no accuracy) and rounded once. Forward only.

    Args:
        x: ``[*, D]``, float32, float16 or bfloat16. Any strides in front of the last dimension are read in place.
        weight, bias: ``[D]`` in any of the three dtypes, or None.
        eps: added to the variance.

    Returns:
        ``[*, D]`` in x's dtype, contiguous.

    Raises:
        RuntimeError: a wrong dtype, device or shape, or an input that requires a gradient while grad is enabled.

    Source: Ba, Kiros and Hinton, "Layer Normalization", 2016.
    """
    _refuse_grad("layer_norm", x, weight, bias)
    return _call(ops.layer_norm.default, x, weight, bias, eps)


def ada_norm(
    x: Tensor,
    scale: Optional[Tensor] = None,
    shift: Optional[Tensor] = None,
    weight: Optional[Tensor] = None,
    bias: Optional[Tensor] = None,
    eps: float = 1e-6,
    *,
    norm: str = "rms",
    scale_table: Optional[Tensor] = None,
    shift_table: Optional[Tensor] = None,
) -> Tensor:
    """Adaptive norm (AdaLN): ``(norm(x) * weight + bias) * (1 + scale + scale_table) + shift + shift_table``.

    Computed in fp32 and rounded once. Forward only.

    Args:
        x: ``[*, D]``, float32, float16 or bfloat16.
        scale, shift: broadcast to x by torch's rules (``[D]``, ``[B, 1, D]``, ``[B, S, D]``), any of the three dtypes, read in place
            through their strides (views of a ``chunk`` or ``unbind``); or None.
        weight, bias: ``[D]``, or None.
        eps: added to the mean square or the variance.
        norm: "rms" or "layer".
        scale_table, shift_table: broadcast like ``scale`` and ``shift``, and are added to them in fp32.

    Returns:
        ``[*, D]`` in x's dtype, contiguous.

    Raises:
        ValueError: ``norm`` is neither "rms" nor "layer".
        RuntimeError: a wrong dtype, device or shape, or an input that requires a gradient while grad is enabled.

    Source: Peebles and Xie, "Scalable Diffusion Models with Transformers", 2023.
    """
    _refuse_grad("ada_norm", x, scale, shift, weight, bias, scale_table, shift_table)
    return _call(ops.ada_norm.default, x, scale, shift, weight, bias, eps, _is_layer(norm), scale_table, shift_table)


def gated_residual(
    residual: Tensor, x: Tensor, gate: Optional[Tensor] = None, *, gate_table: Optional[Tensor] = None
) -> Tensor:
    """Gated residual connection: ``residual + (gate + gate_table) * x``.

    Computed in fp32 and rounded once. Forward only.

    Args:
        residual, x: ``[*, D]`` of one shape, float32, float16 or bfloat16, each with its own dtype.
        gate: broadcasts to x by torch's rules, any of the three dtypes; None is a gate of 1.
        gate_table: broadcasts like ``gate`` and is added to it in fp32.

    Returns:
        ``[*, D]`` in the residual's dtype, contiguous.

    Raises:
        RuntimeError: a wrong dtype, device or shape, or an input that requires a gradient while grad is enabled.

    Source: Peebles and Xie, "Scalable Diffusion Models with Transformers", 2023 (adaLN-Zero).
    """
    _refuse_grad("gated_residual", residual, x, gate, gate_table)
    return _call(ops.gated_residual.default, residual, x, gate, gate_table)


def residual_ada_norm(
    residual: Tensor,
    x: Tensor,
    gate: Optional[Tensor] = None,
    scale: Optional[Tensor] = None,
    shift: Optional[Tensor] = None,
    weight: Optional[Tensor] = None,
    bias: Optional[Tensor] = None,
    eps: float = 1e-6,
    *,
    norm: str = "rms",
    gate_table: Optional[Tensor] = None,
    scale_table: Optional[Tensor] = None,
    shift_table: Optional[Tensor] = None,
    weight_offset: float = 0.0,
) -> Tuple[Tensor, Tensor]:
    """:func:`gated_residual` and :func:`ada_norm` of its result in one pass.

    ``h = residual + (gate + gate_table) * x`` is rounded to the residual's dtype, and
    ``y = (norm(h) * (weight_offset + weight) + bias) * (1 + scale + scale_table) + shift + shift_table`` reads the rounded value, as an
    unfused model does. Forward only.

    Args:
        residual, x: ``[*, D]`` of one shape, each with its own dtype.
        gate, scale, shift and their tables: broadcast to x by torch's rules, any of the three dtypes, or None.
        weight, bias: ``[D]``, or None; ``weight_offset`` is ignored without a weight.
        eps: added to the mean square or the variance.
        norm: "rms" or "layer".

    Returns:
        ``(y, h)``: y in x's dtype, h in the residual's, both contiguous.

    Raises:
        ValueError: ``norm`` is neither "rms" nor "layer".
        RuntimeError: a wrong dtype, device or shape, or an input that requires a gradient while grad is enabled.

    Source: Peebles and Xie, "Scalable Diffusion Models with Transformers", 2023.
    """
    layer = _is_layer(norm)
    _refuse_grad(
        "residual_ada_norm", residual, x, gate, scale, shift, weight, bias, gate_table, scale_table, shift_table
    )
    return _call(
        ops.residual_ada_norm.default,
        residual,
        x,
        gate,
        scale,
        shift,
        weight,
        bias,
        eps,
        layer,
        gate_table,
        scale_table,
        shift_table,
        weight_offset,
    )


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Optional[Tensor] = None, eps: float = 1e-6, *, weight_offset: float = 0.0
) -> Tuple[Tensor, Tensor]:
    """``h = residual + x`` and ``y = rms_norm(h, weight)`` in one pass: :func:`residual_ada_norm` without gate and modulation.

    Args:
        x, residual: ``[*, D]`` of one shape, each with its own dtype.
        weight: ``[D]``, or None; ``weight_offset`` is ignored then.
        eps: added to the mean square.

    Returns:
        ``(y, h)``: y in x's dtype, h in the residual's, both contiguous.

    Raises:
        RuntimeError: a wrong dtype, device or shape, or an input that requires a gradient while grad is enabled.

    Source: Zhang and Sennrich, "Root Mean Square Layer Normalization", 2019.
    """
    return residual_ada_norm(residual, x, weight=weight, eps=eps, weight_offset=weight_offset)
