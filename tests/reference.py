"""References in fp64, the eager compositions beside them, and the rule that judges an output.

The rule: against an fp64 reference an op is never less accurate than the eager composition in the same dtype, measured
as RMS over the tensor. Fixed tolerances of 1e-1 in bf16 hide a wrong cast; this rule does not.

Layout: the rule first, then one section a family. A reference has the public function's name and arguments and returns
fp64; with `compute=torch.float32` and one rounding at the end it is the most accurate eager composition that a user
could write by hand.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

# ---- the rule --------------------------------------------------------------------------------------------

#: fp32 arithmetic in another order than the eager one's: a handful of roundings of 2^-24 each.
FP32_FLOOR = 1.5e-7
#: Two results that are each rounded once differ in how near-ties fell.
TIES = 1.001


def rms_error(actual: Tensor, expected: Tensor) -> float:
    """RMS of ``actual - expected`` over the RMS of ``expected``, in fp64; 0 for empty tensors."""
    if expected.numel() == 0:
        return 0.0
    expected = expected.double()
    difference = (actual.double() - expected).square().mean().sqrt().item()
    size = expected.square().mean().sqrt().item()
    return difference / size if size > 0 else difference


def _worst(actual: Tensor, expected: Tensor) -> float:
    return (actual.double() - expected.double()).abs().max().item() if expected.numel() else 0.0


def _check_form(actual: Tensor, expected: Tensor, dtype: torch.dtype | None) -> None:
    assert actual.shape == expected.shape, f"shape {tuple(actual.shape)}, expected {tuple(expected.shape)}"
    assert dtype is None or actual.dtype == dtype, f"dtype {actual.dtype}, expected {dtype}"
    wrong = torch.isfinite(actual) != torch.isfinite(expected.to(actual.dtype))
    assert not wrong.any(), f"{int(wrong.sum())} of {wrong.numel()} elements are finite in one and not in the other"


def _check_error(actual: Tensor, expected: Tensor, best: Tensor, what: str) -> None:
    """`best` is what `actual` is measured by: the eager result, or the reference rounded to the dtype."""
    floor = FP32_FLOOR if actual.dtype == torch.float32 else rms_error(expected.to(actual.dtype), expected)
    ours, limit = rms_error(actual, expected), max(rms_error(best, expected), floor) * TIES
    assert ours <= limit, f"RMS error {ours:.3e} against fp64, {what} has {limit:.3e}"
    # One wrong element among millions hides in an RMS; no right one is four units of the largest element off.
    unit = torch.finfo(actual.dtype).eps * max(expected.abs().max().item(), torch.finfo(actual.dtype).tiny)
    worst, allowed = _worst(actual, expected), 4 * max(_worst(best, expected), unit)
    if not worst <= allowed:
        index = (actual.double() - expected.double()).abs().argmax().cpu()
        place = tuple(int(i) for i in torch.unravel_index(index, expected.shape))
        raise AssertionError(f"element {place} is {worst:.3e} off, {allowed:.3e} is allowed")


def assert_no_worse_than_eager(
    actual: Tensor, eager: Tensor, expected: Tensor, dtype: torch.dtype | None = None
) -> None:
    """`actual` is at least as near to the fp64 `expected` as `eager`, the composition in the same dtype.

    `eager` may come unrounded (fp32): it is rounded to `actual`'s dtype, once. In fp32 there is a floor of 1.5e-7, in
    the others the error of the rounding alone.
    """
    _check_form(actual, expected, dtype)
    if expected.numel():
        _check_error(actual, expected, eager.to(actual.dtype), "eager")


def assert_rounded_once(actual: Tensor, expected: Tensor, dtype: torch.dtype | None = None) -> None:
    """`actual` is as near to the fp64 `expected` as its dtype can be: fp32 inside, one rounding at the end."""
    _check_form(actual, expected, dtype)
    if expected.numel():
        _check_error(actual, expected, expected.to(actual.dtype), "one rounding")


# ---- norm ------------------------------------------------------------------------------------------------


def _normed(h: Tensor, eps: float, norm: str) -> Tensor:
    if norm == "layer":
        h = h - h.mean(-1, keepdim=True)
    return h * torch.rsqrt(h.square().mean(-1, keepdim=True) + eps)


def _modulated(y, scale, shift, weight, bias, scale_table, shift_table, weight_offset=0.0):
    scale, shift, weight, bias, scale_table, shift_table = (
        None if t is None else t.to(y.dtype) for t in (scale, shift, weight, bias, scale_table, shift_table)
    )
    if weight is not None:
        y = y * (weight_offset + weight)
    if bias is not None:
        y = y + bias
    if scale is not None:
        y = y * (1 + scale + (0 if scale_table is None else scale_table))
    if shift is not None:
        y = y + shift + (0 if shift_table is None else shift_table)
    return y


def _through(y: Tensor, dtype: torch.dtype) -> Tensor:
    """y rounded to `dtype`, with a gradient that passes straight through the rounding."""
    return y + (y.to(dtype).to(y.dtype) - y).detach()


def rms_norm(x, weight=None, eps=1e-6, *, weight_offset=0.0, cast_before_weight=False, compute=torch.float64):
    y = _normed(x.to(compute), eps, "rms")
    if cast_before_weight:
        y = _through(y, x.dtype)
    return _modulated(y, None, None, weight, None, None, None, weight_offset)


def layer_norm(x, weight=None, bias=None, eps=1e-5, *, compute=torch.float64):
    return _modulated(_normed(x.to(compute), eps, "layer"), None, None, weight, bias, None, None)


def ada_norm(
    x,
    scale=None,
    shift=None,
    weight=None,
    bias=None,
    eps=1e-6,
    *,
    norm="rms",
    scale_table=None,
    shift_table=None,
    compute=torch.float64,
):
    return _modulated(_normed(x.to(compute), eps, norm), scale, shift, weight, bias, scale_table, shift_table)


def gated_residual(residual, x, gate=None, *, gate_table=None, compute=torch.float64):
    h = x.to(compute)
    if gate is not None:
        h = h * (gate.to(compute) + (0 if gate_table is None else gate_table.to(compute)))
    return residual.to(compute) + h


def residual_ada_norm(
    residual,
    x,
    gate=None,
    scale=None,
    shift=None,
    weight=None,
    bias=None,
    eps=1e-6,
    *,
    norm="rms",
    gate_table=None,
    scale_table=None,
    shift_table=None,
    weight_offset=0.0,
    compute=torch.float64,
    new_residual=None,
):
    """``(y, h)``; y is of h rounded to the residual's dtype, or of `new_residual`, the one an op returned."""
    h = gated_residual(residual, x, gate, gate_table=gate_table, compute=compute)
    seen = h.to(residual.dtype) if new_residual is None else new_residual
    y = _normed(seen.to(compute), eps, norm)
    return _modulated(y, scale, shift, weight, bias, scale_table, shift_table, weight_offset), h


def add_rms_norm(x, residual, weight=None, eps=1e-6, *, weight_offset=0.0, compute=torch.float64, new_residual=None):
    return residual_ada_norm(
        residual, x, weight=weight, eps=eps, weight_offset=weight_offset, compute=compute, new_residual=new_residual
    )


def rms_norm_backward(
    grad_y, x, weight=None, eps=1e-6, *, weight_offset=0.0, cast_before_weight=False, compute=torch.float64
):
    """``(grad_x, grad_weight)`` by autograd through the reference; grad_weight is None without a weight."""
    inputs = [t.detach().to(compute).clone().requires_grad_() for t in (x, weight) if t is not None]
    y = _normed(inputs[0], eps, "rms")
    if cast_before_weight:
        y = _through(y, x.dtype)
    y = _modulated(y, None, None, inputs[1] if weight is not None else None, None, None, None, weight_offset)
    grads = torch.autograd.grad(y, inputs, grad_y.to(compute))
    return grads[0], None if weight is None else grads[1]


# ---- gated activations -----------------------------------------------------------------------------------


def _gelu(x: Tensor, approximate: str) -> Tensor:
    if approximate == "none" and x.dtype == torch.float64:
        return x * 0.5 * torch.special.erfc(-x * 0.5**0.5)  # 1 + erf cancels where x is far below zero
    return F.gelu(x, approximate=approximate)


def _halves(x: Tensor, gate_first: bool) -> tuple[Tensor, Tensor]:
    first, second = x.chunk(2, dim=-1)
    return (first, second) if gate_first else (second, first)


def gelu(x, *, approximate="tanh", compute=torch.float64):
    return _gelu(x.to(compute), approximate)


def geglu(x, *, approximate="none", gate_first=False, compute=torch.float64):
    gate, value = _halves(x.to(compute), gate_first)
    return _gelu(gate, approximate) * value


def swiglu(x, up=None, *, gate_first=True, compute=torch.float64):
    gate, value = _halves(x.to(compute), gate_first) if up is None else (x.to(compute), up.to(compute))
    return F.silu(gate) * value


# ---- pixel norm ------------------------------------------------------------------------------------------


def pixel_norm_silu(x, scale=None, shift=None, eps=1e-8, *, compute=torch.float64):
    x, scale, shift = (None if t is None else t.to(compute) for t in (x, scale, shift))
    y = x * torch.rsqrt(x.square().mean(1, keepdim=True) + eps)
    if scale is not None:
        y = y * (1 + scale)
    if shift is not None:
        y = y + shift
    return F.silu(y)


# ---- rope ------------------------------------------------------------------------------------------------


def _compact(table: Tensor, rotary: int, interleaved: bool) -> Tensor:
    """A table as [B | 1, S, 1 | H, R/2]: one value a pair."""
    if table.shape[-1] == rotary:
        table = table[..., ::2] if interleaved else table[..., : rotary // 2]
    return table if table.dim() == 4 else table.unsqueeze(-2) if table.dim() == 3 else table[None, :, None]


def _rotated(x: Tensor, cos: Tensor, sin: Tensor, rotary: int, interleaved: bool) -> Tensor:
    a, b = (x[..., 0:rotary:2], x[..., 1:rotary:2]) if interleaved else x[..., :rotary].chunk(2, dim=-1)
    pair = (a * cos - b * sin, b * cos + a * sin)
    y = torch.stack(pair, dim=-1).flatten(-2) if interleaved else torch.cat(pair, dim=-1)
    return torch.cat((y, x[..., rotary:]), dim=-1)


def rope(x, cos, sin, *, interleaved=True, rotary_dim=None, compute=torch.float64):
    heads = x.unflatten(-1, (cos.shape[2] if cos.dim() == 4 else 1, -1)) if x.dim() == 3 else x
    rotary = rotary_dim or heads.shape[-1]
    cos, sin = (_compact(table, rotary, interleaved).to(compute) for table in (cos, sin))
    return _rotated(heads.to(compute), cos, sin, rotary, interleaved).reshape(x.shape)


def grid_tables(grid, axes_dim, theta=10000.0):
    """cos and sin [T*Hh*W, d/2] in fp64, t outermost."""
    positions = torch.cartesian_prod(*(torch.arange(size, dtype=torch.float64) for size in grid)).reshape(-1, 3)
    angles = [
        positions[:, axis, None] * theta ** (-torch.arange(0, dim, 2, dtype=torch.float64) / max(dim, 1))
        for axis, dim in enumerate(axes_dim)
    ]
    angles = torch.cat(angles, dim=-1)
    return angles.cos(), angles.sin()


def rope_3d(q, k, grid, *, axes_dim=None, theta=10000.0, compute=torch.float64):
    if axes_dim is None:
        side = 2 * (q.shape[-1] // 6)
        axes_dim = (q.shape[-1] - 2 * side, side, side)
    cos, sin = (table.to(q.device) for table in grid_tables(grid, axes_dim, theta))
    return rope(q, cos, sin, compute=compute), rope(k, cos, sin, compute=compute)


def qk_norm_rope(
    q,
    k,
    q_weight=None,
    k_weight=None,
    cos=None,
    sin=None,
    eps=1e-6,
    *,
    across_heads=False,
    interleaved=True,
    norm="rms",
    q_bias=None,
    k_bias=None,
    k_cos=None,
    k_sin=None,
    rotary_dim=None,
    rope_start=0,
    rope_len=None,
    compute=torch.float64,
    round_norm_to=None,
):
    """`round_norm_to`: the dtype that a chain of a norm and a RoPE kernel rounds the normed value to."""

    def one(x, weight, bias, cos, sin):
        y = x.to(compute)
        if norm != "none":
            flat = y.flatten(2) if across_heads else y
            y = _modulated(_normed(flat, eps, norm), None, None, weight, bias, None, None).reshape(x.shape)
        if round_norm_to is not None:
            y = y.to(round_norm_to).to(compute)
        if cos is None:
            return y
        end = x.shape[1] if rope_len is None else rope_start + rope_len
        middle = rope(y[:, rope_start:end], cos, sin, interleaved=interleaved, rotary_dim=rotary_dim, compute=compute)
        return torch.cat((y[:, :rope_start], middle, y[:, end:]), dim=1)

    own = (cos, sin) if k_cos is None else (k_cos, k_sin)
    return one(q, q_weight, q_bias, cos, sin), None if k is None else one(k, k_weight, k_bias, *own)
