"""Stateless layers for `kernels.kernelize`: each takes over the `forward` of a module and works on that module's attributes.

The rules of a Hub layer: no `__init__`, no members but `has_backward` and `can_torch_compile`, the parameters of the forward it replaces.
"""

import torch
from torch import Tensor, nn

from ..functional import rms_norm

__all__ = ["RMSNorm"]

_FLOATS = (torch.float32, torch.float16, torch.bfloat16)


def _llama_rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`weight * normed.to(x.dtype)`, with the dtype that this product has."""
    if x.dtype not in _FLOATS:
        normed = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + eps)
        return weight * normed.to(x.dtype)
    if weight.dtype is x.dtype or (x.dtype is torch.float32 and weight.dtype in _FLOATS):
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
