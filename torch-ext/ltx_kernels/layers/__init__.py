"""Stateless layers for `kernels.kernelize`: each takes over a module's `forward` and works on that module's attributes.

The rules of a Hub layer: no `__init__`, no members but `has_backward` and `can_torch_compile`, the parameters of the
forward it replaces. What an op does not take (float64, autocast where torch's dtypes differ, a gradient where there is
no backward) is computed by torch. A layer without a backward says so: kernelize leaves the stock module in training.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..functional import gated_activation, geglu, gelu, rms_norm
from ..inject.decoders import Rotation, fits, rotate, served
from ..inject.decoders import layer_norm as _layer_norm
from ..inject.norms import FLOATS, rms_norm_forward, supported

__all__ = [
    "DiffusersRMSNorm",
    "GEGLU",
    "GELU",
    "GELUTanh",
    "GeGLUMLP",
    "LayerNorm",
    "RMSNorm",
    "RMSNormZeroCentered",
    "RotaryPosEmb",
    "SwiGLUMLP",
]

_diffusers_rms_norm = rms_norm_forward("diffusers", "eps", "hidden_states")
_FULL = Rotation(partial=False, half=False)


def _llama_rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`weight * normed.to(x.dtype)`, with the dtype that this product has."""
    if not supported(x):
        normed = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + eps)
        return weight * normed.to(x.dtype)
    if weight.dtype is x.dtype or (x.dtype is torch.float32 and weight.dtype in FLOATS):
        return rms_norm(x, weight, eps, cast_before_weight=True)
    return weight * rms_norm(x, None, eps)  # a wider weight makes a wider result


class RMSNorm(nn.Module):
    """RMSNorm as Llama and most of transformers compute it: rounded to the input's dtype before the weight.

    Of the adopting module: `weight` [D] and `variance_epsilon`, or `eps` where it has no such attribute.
    """

    has_backward = True
    can_torch_compile = True

    weight: Tensor
    variance_epsilon: float

    def forward(self, hidden_states: Tensor) -> Tensor:
        eps = self.variance_epsilon if hasattr(self, "variance_epsilon") else self.eps
        return _llama_rms_norm(hidden_states, self.weight, eps)


class RMSNormZeroCentered(nn.Module):
    """RMSNorm with a weight stored around zero, rounded once: Gemma, Qwen3-Next, Qwen3.5.

    Of the adopting module: `weight` [D] and `eps`.
    """

    has_backward = True
    can_torch_compile = True

    weight: Tensor
    eps: float

    def forward(self, x: Tensor) -> Tensor:
        if supported(x) and self.weight.dtype in FLOATS:
            return rms_norm(x, self.weight, self.eps, weight_offset=1.0)
        normed = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + self.eps)
        return (normed * (1.0 + self.weight.float())).type_as(x)


class DiffusersRMSNorm(nn.Module):
    """diffusers' RMSNorm: rounded before the weight, if that is in half precision, and in the weight's dtype.

    Of the adopting module: `weight` and `bias` (None or [D]) and `eps`. With a bias its class's forward computes.
    """

    has_backward = True
    can_torch_compile = True

    weight: Tensor
    bias: Tensor
    eps: float

    def forward(self, hidden_states: Tensor) -> Tensor:
        if self.bias is not None:
            return type(self).forward(self, hidden_states)
        return _diffusers_rms_norm(self, hidden_states)


class LayerNorm(nn.Module):
    """torch.nn.LayerNorm.

    Of the adopting module: `weight`, `bias` (None or of the normalised shape), `normalized_shape` and `eps`.
    """

    has_backward = False
    can_torch_compile = True

    normalized_shape: tuple
    weight: Tensor
    bias: Tensor
    eps: float

    def forward(self, input: Tensor) -> Tensor:
        return _layer_norm(self, input)


def _gelu_tanh(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


def _gated_mlp(layer: nn.Module, x: Tensor, name: str, activation: Callable[[Tensor], Tensor]) -> Tensor:
    """A function, because a Hub layer may not inherit members. `name` is what gated_activation calls `activation`."""
    gate, up = layer.gate_proj(x), layer.up_proj(x)
    return layer.down_proj(gated_activation(gate, up, name) if served(gate, up) else activation(gate) * up)


class SwiGLUMLP(nn.Module):
    """`down_proj(silu(gate_proj(x)) * up_proj(x))`: Llama, Mistral, Qwen2 and Qwen3. The projections are called.

    Of the adopting module: `gate_proj`, `up_proj` and `down_proj`.
    """

    has_backward = False
    can_torch_compile = True

    gate_proj: nn.Module
    up_proj: nn.Module
    down_proj: nn.Module

    def forward(self, x: Tensor) -> Tensor:
        return _gated_mlp(self, x, "silu", F.silu)


class GeGLUMLP(nn.Module):
    """`down_proj(gelu(gate_proj(x)) * up_proj(x))` with the tanh formula: Gemma 1 to 3.

    Of the adopting module: `gate_proj`, `up_proj` and `down_proj`.
    """

    has_backward = False
    can_torch_compile = True

    gate_proj: nn.Module
    up_proj: nn.Module
    down_proj: nn.Module

    def forward(self, x: Tensor) -> Tensor:
        return _gated_mlp(self, x, "gelu_tanh", _gelu_tanh)


class GEGLU(nn.Module):
    """diffusers' GEGLU: `value * gelu(gate)` with `value, gate = proj(hidden_states).chunk(2, dim=-1)`.

    Of the adopting module: `proj`, which is called, and `gelu`, which computes what the op does not take.
    """

    has_backward = False
    can_torch_compile = True

    proj: nn.Module

    def forward(self, hidden_states: Tensor, *args, **kwargs) -> Tensor:
        if args or kwargs:  # deprecated: its class's forward says so
            return type(self).forward(self, hidden_states, *args, **kwargs)
        packed = self.proj(hidden_states)
        if served(packed):
            return geglu(packed)
        value, gate = packed.chunk(2, dim=-1)
        return value * self.gelu(gate)


class GELU(nn.Module):
    """GELU with erf: transformers' "GeLU"."""

    has_backward = False
    can_torch_compile = True

    def forward(self, input: Tensor) -> Tensor:
        return gelu(input, approximate="none") if served(input) else F.gelu(input)


class GELUTanh(nn.Module):
    """GELU with tanh: transformers' "GeluTanh", "NewGELU" and "FastGELU", which are one formula.

    Of the adopting module nothing, but its class's forward computes what the op does not take: written out, the formula
    has other dtypes under CUDA's autocast than `torch.nn.functional.gelu`.
    """

    has_backward = False
    can_torch_compile = True

    def forward(self, input: Tensor) -> Tensor:
        return gelu(input, approximate="tanh") if served(input) else type(self).forward(self, input)


class RotaryPosEmb(nn.Module):
    """transformers' "rotary_pos_emb": half rotation of q and k [B, H, S, d] by tables [B | 1, S, d], each value twice.

    Of the adopting module nothing, but its class's forward computes what the op does not take: other tables (partial,
    of half the width), other dtypes, and where a gradient is wanted.
    """

    has_backward = False
    can_torch_compile = True

    def forward(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
        if fits(_FULL, q, k, cos, sin, unsqueeze_dim):
            return rotate(_FULL, q, k, cos, sin, unsqueeze_dim)
        return type(self).forward(self, q, k, cos, sin, unsqueeze_dim)
