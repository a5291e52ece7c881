"""The public functions: what they compute, which op they call, and whether a gradient is wanted."""

import numbers
from typing import Optional

import torch
from torch import Tensor
from torch.autograd import forward_ad

from ._ops import ops
from ._rope_tables import axis_tables

# Autograd costs a call about 5 us even under no_grad, so the plain ops carry none: an op with a backward is chosen only
# where a gradient is wanted.


def _wants_grad(*tensors: Optional[Tensor]) -> bool:
    """Asked only while grad is enabled: what is no tensor is refused by the op."""
    return any(isinstance(tensor, Tensor) and tensor.requires_grad for tensor in tensors)


def _call(op, *args):
    """Call an op; a failed allocation, whose type the stable ABI loses, becomes torch.OutOfMemoryError again."""
    if forward_ad._current_level >= 0:  # an op without a forward-mode formula would silently give zeros
        raise RuntimeError(
            f"ltx_kernels: {op} has no forward-mode derivative (torch.func.jvp, torch.autograd.forward_ad); use the "
            "eager composition there"
        )
    try:
        return op(*args)
    except RuntimeError as error:
        if "CUDA out of memory" in str(error):
            raise torch.OutOfMemoryError(str(error)) from None
        # Looked for only now, so that it costs a good call nothing. Torch takes None for a tensor without memory.
        for argument, value in zip(op._schema.arguments, args):
            _refuse_no_tensor(argument.name, value, str(argument.type))
        raise


def _refuse_no_tensor(name: str, value: object, needed: str = "Tensor") -> None:
    is_fine = "Tensor" not in needed or isinstance(value, Tensor) or (value is None and needed != "Tensor")
    if not is_fine:
        or_none = "" if needed == "Tensor" else " or None"
        raise TypeError(f"ltx_kernels: {name} is of type {type(value).__name__}; a tensor{or_none} is needed") from None


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
        TypeError: something other than a tensor where one is needed.
        RuntimeError: a wrong dtype, device or shape; the message names the argument, what came and what is needed.

    Source: Zhang and Sennrich, "Root Mean Square Layer Normalization", 2019.
    """
    # Decoding calls this a hundred times a token: the usual case asks one question and calls the op.
    if torch.is_grad_enabled() and _wants_grad(x, weight):
        return _call(ops.rms_norm_with_rstd.default, x, weight, eps, weight_offset, cast_before_weight)[0]
    return _call(ops.rms_norm.default, x, weight, eps, weight_offset, cast_before_weight)


rmsnorm = rms_norm


def _refuse_grad(function: str, *tensors: Optional[Tensor]) -> None:
    if torch.is_grad_enabled() and _wants_grad(*tensors):
        raise RuntimeError(
            f"ltx_kernels: {function} has no backward yet and an input requires a gradient; call it under "
            "torch.no_grad() or use the eager composition"
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
        TypeError: something other than a tensor where one is needed.
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
        scale, shift: broadcast to x by torch's rules (``[D]``, ``[B, 1, D]``, ``[B, S, D]``), any of the three dtypes,
            read in place through their strides (views of a ``chunk`` or ``unbind``); or None.
        weight, bias: ``[D]`` in any of the three dtypes, or None.
        eps: added to the mean square or the variance.
        norm: "rms" or "layer".
        scale_table, shift_table: broadcast like ``scale`` and ``shift``, and are added to them in fp32.

    Returns:
        ``[*, D]`` in x's dtype, contiguous.

    Raises:
        TypeError: something other than a tensor where one is needed.
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
        gate: broadcasts to x by torch's rules (``[.., D]``), any of the three dtypes; None is a gate of 1.
        gate_table: broadcasts like ``gate`` and is added to it in fp32.

    Returns:
        ``[*, D]`` in the residual's dtype, contiguous.

    Raises:
        TypeError: something other than a tensor where one is needed.
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
) -> tuple[Tensor, Tensor]:
    """:func:`gated_residual` and :func:`ada_norm` of its result in one pass.

    ``h = residual + (gate + gate_table) * x`` is rounded to the residual's dtype, and
    ``y = (norm(h) * (weight_offset + weight) + bias) * (1 + scale + scale_table) + shift + shift_table`` reads the
    rounded value, as an unfused model does. Forward only.

    Args:
        residual, x: ``[*, D]`` of one shape, float32, float16 or bfloat16, each with its own dtype.
        gate, scale, shift and their tables: broadcast to x by torch's rules (``[.., D]``), any of the three dtypes,
            or None.
        weight, bias: ``[D]`` in any of the three dtypes, or None.
        eps: added to the mean square or the variance.
        norm: "rms" or "layer".
        weight_offset: 1.0 for weights stored around zero; ignored without a weight.

    Returns:
        ``(y, h)``: y in x's dtype, h in the residual's, both contiguous.

    Raises:
        TypeError: something other than a tensor where one is needed.
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
) -> tuple[Tensor, Tensor]:
    """``h = residual + x`` and ``y = rms_norm(h, weight)`` in one pass.

    It is :func:`residual_ada_norm` without gate and modulation.

    Args:
        x, residual: ``[*, D]`` of one shape, float32, float16 or bfloat16, each with its own dtype.
        weight: ``[D]`` in any of the three dtypes, or None for a factor of 1 (``weight_offset`` is ignored then).
        eps: added to the mean square.
        weight_offset: 1.0 for weights stored around zero, as Gemma's.

    Returns:
        ``(y, h)``: y in x's dtype, h in the residual's, both contiguous.

    Raises:
        TypeError: something other than a tensor where one is needed.
        RuntimeError: a wrong dtype, device or shape, or an input that requires a gradient while grad is enabled.

    Source: Zhang and Sennrich, "Root Mean Square Layer Normalization", 2019.
    """
    _refuse_grad("add_rms_norm", x, residual, weight)
    return residual_ada_norm(residual, x, weight=weight, eps=eps, weight_offset=weight_offset)


# The numbers of kernel_src/core/activation.h; the stable ABI leaks the memory of a string argument.
_GELU, _GELU_TANH, _SILU = range(3)


def _gelu_number(approximate: str) -> int:
    if approximate not in ("none", "tanh"):
        raise ValueError(f"ltx_kernels: approximate is {approximate!r}; 'none' or 'tanh' is needed")
    return _GELU if approximate == "none" else _GELU_TANH


def geglu(x: Tensor, *, approximate: str = "none", gate_first: bool = False) -> Tensor:
    """GELU-gated linear unit: ``value * gelu(gate)`` with ``value, gate = x.chunk(2, dim=-1)``.

    Computed in fp32 and rounded once. Forward only.

    Args:
        x: ``[*, 2 * D]``, float32, float16 or bfloat16; both halves are read in place, whatever D and the strides in
            front of it.
        approximate: "none" is the exact formula with erf, "tanh" its approximation.
        gate_first: the first half is the gate, not the second as in diffusers' GEGLU.

    Returns:
        ``[*, D]`` in x's dtype, contiguous.

    Raises:
        TypeError: something other than a tensor where one is needed.
        ValueError: ``approximate`` is neither "none" nor "tanh".
        RuntimeError: a wrong dtype, an odd last dimension, or an input that requires a gradient while grad is enabled.

    Source: Shazeer, "GLU Variants Improve Transformer", 2020.
    """
    activation = _gelu_number(approximate)
    _refuse_grad("geglu", x)
    return _call(ops.glu.default, x, activation, gate_first)


def swiglu(x: Tensor, up: Optional[Tensor] = None, *, gate_first: bool = True) -> Tensor:
    """SiLU-gated linear unit: ``silu(gate) * up``, packed in one tensor or as two.

    Computed in fp32 and rounded once. Forward only.

    Args:
        x: ``[*, 2 * D]``, the gate and the value side by side; or, with ``up``, the gate alone, ``[*, D]``. float32,
            float16 or bfloat16, read in place whatever D and the strides in front of it.
        up: ``[*, D]``, the shape and dtype of x; ``gate_first`` is ignored then.
        gate_first: the first half is the gate, as in Llama's and FLUX.2's packed projections; False for diffusers'
            SwiGLU.

    Returns:
        ``[*, D]`` in x's dtype, contiguous.

    Raises:
        TypeError: something other than a tensor where one is needed.
        RuntimeError: a wrong dtype, device or shape, an odd last dimension of a packed x, or an input that requires a
            gradient while grad is enabled.

    Source: Shazeer, "GLU Variants Improve Transformer", 2020.
    """
    _refuse_grad("swiglu", x, up)
    if up is None:
        return _call(ops.glu.default, x, _SILU, gate_first)
    return _call(ops.activate.default, x, up, _SILU)


_GATED = {"gelu": _GELU, "gelu_tanh": _GELU_TANH, "silu": _SILU}


def gated_activation(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    """``act(gate) * up`` of two tensors ``[*, D]``, for the integrations: "silu", "gelu" or "gelu_tanh"."""
    _refuse_grad("gated_activation", gate, up)
    return _call(ops.activate.default, gate, up, _GATED[activation])


def gelu(x: Tensor, *, approximate: str = "tanh") -> Tensor:
    """Gaussian error linear unit: ``x * Phi(x)``, Phi being the normal distribution, or its approximation
    ``x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 * x**3)))``.

    Computed in fp32 and rounded once. Forward only.

    Args:
        x: ``[*, D]``, float32, float16 or bfloat16.
        approximate: "none" or "tanh", as in torch.nn.functional.gelu, but with the default of the transformers that
            use it.

    Returns:
        ``[*, D]`` in x's dtype, contiguous.

    Raises:
        TypeError: something other than a tensor where one is needed.
        ValueError: ``approximate`` is neither "none" nor "tanh".
        RuntimeError: a wrong dtype, or an input that requires a gradient while grad is enabled.

    Source: Hendrycks and Gimpel, "Gaussian Error Linear Units (GELUs)", 2016.
    """
    activation = _gelu_number(approximate)
    _refuse_grad("gelu", x)
    return _call(ops.activate.default, x, None, activation)


def pixel_norm_silu(
    x: Tensor, scale: Optional[Tensor] = None, shift: Optional[Tensor] = None, eps: float = 1e-8
) -> Tensor:
    """Norm, modulation and activation of the LTX-Video VAE:
    ``silu(x / sqrt(mean(x**2, dim=1) + eps) * (1 + scale) + shift)``.

    Computed in fp32 and rounded once. Forward only.

    Args:
        x: ``[B, C, H, W]`` or ``[B, C, D, H, W]``, float32, float16 or bfloat16, contiguous or with channels last; a
            slice of channels or frames is read in place too.
        scale, shift: ``[B, C, 1, 1]`` or ``[B, C, 1, 1, 1]``, B may be 1; any of the three dtypes, or None.
        eps: added to the mean square.

    Returns:
        x's shape and dtype, in x's memory format.

    Raises:
        TypeError: something other than a tensor where one is needed.
        RuntimeError: a wrong dtype, device or shape, or an input that requires a gradient while grad is enabled.

    Source: Karras et al., "Progressive Growing of GANs for Improved Quality, Stability, and Variation", 2018.
    """
    _refuse_grad("pixel_norm_silu", x, scale, shift)
    return _call(ops.pixel_norm_silu.default, x, scale, shift, eps)


_NORMS = {"none": 0, "rms": 1, "layer": 2}


def rope(x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool = True, rotary_dim: Optional[int] = None) -> Tensor:
    """Rotary position embedding: each pair ``(a, b)`` becomes ``(a * cos - b * sin, b * cos + a * sin)``.

    Computed in fp32 and rounded once. Forward only.

    Args:
        x: ``[B, S, H, d]`` with any strides in front of the last dimension (a transposed ``[B, H, S, d]``, a slice of a
            fused QKV projection), or ``[B, S, D]``: one head of size D, or as many heads as a 4-D table has. float32,
            float16 or bfloat16.
        cos, sin: ``[S, w]``, ``[B | 1, S, w]`` or ``[B | 1, S, 1 | H, w]`` of one shape and one of the three dtypes,
            read in place through their strides. ``w`` is R (the rotary dim; each value twice: at 2i and 2i+1 when
            interleaved, at i and i + R/2 when not) or R/2. A table a head without a batch, ``[S, H, w]``, is given as
            ``cos[None]``.
        interleaved: the pairs are ``(2i, 2i+1)``; else ``(i, i + R/2)``.
        rotary_dim: R, an even number; the head size when None. Elements from R on pass through.

    Returns:
        x's shape and dtype, contiguous.

    Raises:
        TypeError: something other than a tensor where one is needed.
        RuntimeError: a wrong dtype, device or shape, or an input that requires a gradient while grad is enabled.

    Source: Su et al., "RoFormer: Enhanced Transformer with Rotary Position Embedding", 2021.
    """
    _refuse_grad("rope", x, cos, sin)
    return _call(ops.rope.default, x, cos, sin, interleaved, rotary_dim)


def _is_size(value: object) -> bool:
    return isinstance(value, (numbers.Integral, torch.SymInt)) and value >= 0


def rope_3d(
    q: Tensor,
    k: Tensor,
    grid: tuple[int, int, int],
    *,
    axes_dim: Optional[tuple[int, int, int]] = None,
    theta: float = 10000.0,
) -> tuple[Tensor, Tensor]:
    """Rotary position embedding of the tokens of a video, without a table of all tokens.

    Token ``(p_t * Hh + p_h) * W + p_w`` lies at ``(p_t, p_h, p_w)``: t is the slowest axis, w the fastest. Each axis
    rotates its part of the head, t first, then h, then w: pair i of an axis with a elements, ``(2i, 2i+1)``
    (interleaved), by the angle ``p * theta ** (-2i / a)``. This is the convention of Wan (the defaults) and
    HunyuanVideo (``axes_dim=(16, 56, 56), theta=256.0``); LTX-Video scales its positions, its tables go through
    :func:`qk_norm_rope`.

    Computed in fp32, from tables of each axis that are computed in fp64 once a grid and device; rounded once. Forward
    only.

    Args:
        q, k: ``[B, T * Hh * W, H, d]`` and ``[B, T * Hh * W, Hk, d]``, float32, float16 or bfloat16, with any strides
            in front of the last dimension.
        grid: ``(T, Hh, W)``, in tokens.
        axes_dim: even sizes that sum to d; None is Wan's, ``2 * (d // 6)`` for h and w and the rest for t.
        theta: the base of the frequencies.

    Returns:
        ``(q, k)`` in their shapes and dtype, contiguous.

    Raises:
        TypeError: something other than a tensor where one is needed.
        ValueError: ``grid`` or ``axes_dim`` is not three sizes of the right kind, or ``theta`` is not above 0.
        RuntimeError: a wrong dtype, device or shape, or an input that requires a gradient while grad is enabled.

    Source: Su et al., "RoFormer: Enhanced Transformer with Rotary Position Embedding", 2021; Wan Team, "Wan: Open and
    Advanced Large-Scale Video Generative Models", 2025.
    """
    _refuse_grad("rope_3d", q, k)
    _refuse_no_tensor("q", q)
    if q.dim() != 4:
        raise RuntimeError(f"ltx_kernels: q has shape {list(q.shape)}; [B, T * Hh * W, H, d] is needed")
    if len(grid) != 3 or not all(_is_size(size) for size in grid):
        raise ValueError(f"ltx_kernels: grid is {tuple(grid)!r}; three sizes (T, Hh, W) are needed")
    head_size = q.shape[-1]
    if axes_dim is None:
        side = 2 * (head_size // 6)
        axes_dim = (head_size - 2 * side, side, side)
    even = len(axes_dim) == 3 and all(_is_size(dim) and dim % 2 == 0 for dim in axes_dim)
    if not even or sum(axes_dim) != head_size:
        raise ValueError(
            f"ltx_kernels: axes_dim is {tuple(axes_dim)!r}; three even sizes that sum to the head size {head_size} "
            "are needed"
        )
    if isinstance(theta, Tensor):  # tables are kept by its value
        theta = theta.item()
    if not theta > 0:
        raise ValueError(f"ltx_kernels: theta is {theta!r}; a number above 0 is needed")
    return _call(ops.rope_3d.default, q, k, *axis_tables(tuple(grid), tuple(axes_dim), theta, q.device))


def qk_norm_rope(
    q: Tensor,
    k: Optional[Tensor],
    q_weight: Optional[Tensor] = None,
    k_weight: Optional[Tensor] = None,
    cos: Optional[Tensor] = None,
    sin: Optional[Tensor] = None,
    eps: float = 1e-6,
    *,
    across_heads: bool = False,
    interleaved: bool = True,
    norm: str = "rms",
    q_bias: Optional[Tensor] = None,
    k_bias: Optional[Tensor] = None,
    k_cos: Optional[Tensor] = None,
    k_sin: Optional[Tensor] = None,
    rotary_dim: Optional[int] = None,
    rope_start: int = 0,
    rope_len: Optional[int] = None,
) -> tuple[Tensor, Optional[Tensor]]:
    """Norm of q and k, then :func:`rope`, in one pass: what attention does between its projections and its scores.

    Computed in fp32 and rounded once: the normed value is not rounded before it is rotated. Forward only.

    Args:
        q: ``[B, S, H, d]`` with any strides in front of the last dimension, or ``[B, S, D]`` as in :func:`rope`;
            float32, float16 or bfloat16.
        k: ``[B, Sk, Hk, d]`` of q's dtype; heads and tokens may be fewer or more than q's. None: only q.
        q_weight, k_weight, q_bias, k_bias: ``[d]``, or ``[H * d]`` and ``[Hk * d]`` across heads, any of the three
            dtypes; or None.
        cos, sin: tables as in :func:`rope`, for q and for k; None: no rotation. They have a row for each token that is
            rotated.
        eps: added to the mean square or the variance.
        across_heads: the statistic is over all heads of a token, as in LTX-Video and Wan; else over each head.
        interleaved: the pairs are ``(2i, 2i+1)``; else ``(i, i + R/2)``.
        norm: "rms", "layer" or "none".
        k_cos, k_sin: k's own tables; cos and sin when None.
        rotary_dim: R, as in :func:`rope`.
        rope_start, rope_len: the tokens ``[rope_start, rope_start + rope_len)`` are rotated (to the last token when
            rope_len is None), and the tables have rope_len rows; the other tokens are normed only.

    Returns:
        ``(q, k)`` in their shapes and dtype, contiguous; k is None when it was.

    Raises:
        TypeError: something other than a tensor where one is needed.
        ValueError: an unknown ``norm``, or an argument of k without k.
        RuntimeError: a wrong dtype, device or shape, or an input that requires a gradient while grad is enabled.

    Source: Henry et al., "Query-Key Normalization for Transformers", 2020; Su et al., "RoFormer", 2021.
    """
    if norm not in _NORMS:
        raise ValueError(f"ltx_kernels: norm is {norm!r}; 'rms', 'layer' or 'none' is needed")
    _refuse_grad("qk_norm_rope", q, k, q_weight, k_weight, cos, sin, q_bias, k_bias, k_cos, k_sin)
    if k is None:
        for name, value in (("k_weight", k_weight), ("k_bias", k_bias), ("k_cos", k_cos), ("k_sin", k_sin)):
            if value is not None:
                raise ValueError(f"ltx_kernels: {name} is given and k is None; k is needed with it")
        out = _call(
            ops.q_norm_rope.default,
            q,
            q_weight,
            cos,
            sin,
            eps,
            across_heads,
            interleaved,
            _NORMS[norm],
            q_bias,
            rotary_dim,
            rope_start,
            rope_len,
        )
        return out, None
    return _call(
        ops.qk_norm_rope.default,
        q,
        k,
        q_weight,
        k_weight,
        cos,
        sin,
        eps,
        across_heads,
        interleaved,
        _NORMS[norm],
        q_bias,
        k_bias,
        k_cos,
        k_sin,
        rotary_dim,
        rope_start,
        rope_len,
    )
