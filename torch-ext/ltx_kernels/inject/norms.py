"""RMSNorm in place: the formulas that libraries use, and a forward that computes each with our kernel.

Libraries agree on the maths and differ in the rounding and in the dtype they return. A forward here returns, bit for
bit up to the last rounding, what the class returns; where our op cannot (its output has x's dtype), that call runs the
class's own code.
"""

import functools
from dataclasses import dataclass
from typing import Callable, NamedTuple, Optional

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

from .. import functional
from .patching import HAS_CUDA, is_plain, own_forward
from .rewriting import is_of

FLOATS = (torch.float32, torch.float16, torch.bfloat16)


def is_transformed() -> bool:
    """Within a transform of torch.func or forward-mode AD, for which our ops have no rules."""
    if forward_ad._current_level >= 0:
        return True
    return torch._C._functorch.peek_interpreter_stack() is not None and not torch.compiler.is_compiling()


def is_dense(x: Tensor) -> bool:
    """No tensor of parts (DTensor, nested), for which our ops have no rules either; a fake one is no such."""
    return not x.is_nested and (type(x) is Tensor or not hasattr(type(x), "__tensor_flatten__"))


def supported(x: Tensor) -> bool:
    """Our ops take this kind of tensor, dtype and device, here."""
    return x.dtype in FLOATS and (x.is_cuda and HAS_CUDA or x.is_cpu) and is_dense(x) and not is_transformed()


@dataclass(frozen=True)
class RmsFormula:
    """One way to write RMSNorm with a weight; `reference(normed_fp32, x_dtype, weight)` follows the division."""

    name: str
    reference: Callable[[Tensor, torch.dtype, Tensor], Tensor]
    returns_x_dtype: Callable[[torch.dtype, torch.dtype], bool]  # (x, weight): is the result in x's dtype?
    weight_offset: float = 0.0
    cast_before_weight: bool = False

    @functools.cached_property
    def dtypes(self) -> frozenset:
        """(x, weight) dtypes that our op computes as the class does."""
        return frozenset((x, w) for x in FLOATS for w in FLOATS if self.returns_x_dtype(x, w))


def _diffusers(normed: Tensor, dtype: torch.dtype, weight: Tensor) -> Tensor:
    return (normed if weight.dtype is torch.float32 else normed.to(weight.dtype)) * weight


FORMULAS: dict[str, RmsFormula] = {
    formula.name: formula
    for formula in (
        # Llama and 128 more of transformers: rounded to x's dtype, then `weight *`
        RmsFormula(
            "llama",
            lambda normed, dtype, weight: weight * normed.to(dtype),
            lambda x, w: x is w or x is torch.float32,
            cast_before_weight=True,
        ),
        # diffusers' RMSNorm, T5LayerNorm: rounded to the weight's dtype if that is a half precision one
        RmsFormula("diffusers", _diffusers, lambda x, w: x is w, cast_before_weight=True),
        # GptOss, Olmo2, Mochi, torch.nn.RMSNorm: one rounding
        RmsFormula("single", lambda normed, dtype, weight: (weight * normed).to(dtype), lambda x, w: True),
        # Gemma: a weight stored around zero
        RmsFormula(
            "gemma",
            lambda normed, dtype, weight: (normed * (1.0 + weight.float())).to(dtype),
            lambda x, w: True,
            weight_offset=1.0,
        ),
    )
}


@functools.cache
def rms_norm_forward(formula: str, eps: str, parameter: str, stock_under_autocast: bool = False) -> Callable:
    """The forward for a formula; `eps` is the attribute that holds the epsilon, `parameter` the name of the input."""
    rule = FORMULAS[formula]
    dtypes, weight_offset, cast_before_weight = rule.dtypes, rule.weight_offset, rule.cast_before_weight

    def run(self: nn.Module, x: Tensor) -> Tensor:
        weight = getattr(self, "weight", None)  # Gemma 4 has norms without one
        if not supported(x) or (weight is not None and (x.dtype, weight.dtype) not in dtypes):
            return type(self).forward(self, x)
        if stock_under_autocast and torch.is_autocast_enabled(x.device.type):
            return type(self).forward(self, x)
        if weight is None and getattr(self, "normalized_shape", x.shape[-1:]) != x.shape[-1:]:
            return type(self).forward(self, x)  # torch.nn.RMSNorm, which refuses another width
        epsilon = getattr(self, eps)
        if epsilon is None:  # torch.nn.RMSNorm: that of the dtype it computes in
            epsilon = torch.finfo(torch.float32).eps
        return functional.rms_norm(
            x, weight, epsilon, weight_offset=weight_offset, cast_before_weight=cast_before_weight
        )

    if parameter == "x":

        @own_forward("rms_norm")
        def forward(self, x):
            return run(self, x)
    else:

        @own_forward("rms_norm")
        def forward(self, hidden_states):
            return run(self, hidden_states)

    return forward


def weight_of(module: nn.Module) -> tuple[Optional[Tensor], Optional[str]]:
    """(weight or None, None), or (None, why this is not a plain RMSNorm over the last dimension)."""
    parameters = {name: value for name, value in module._parameters.items() if value is not None}
    extra = [
        *(set(parameters) - {"weight"}),
        *(n for n, b in module._buffers.items() if b is not None),
        *module._modules,
    ]
    if extra:
        return None, f"it has more than a weight: {', '.join(sorted(extra))}"
    weight = parameters.get("weight")
    if weight is not None and weight.dim() != 1:
        return None, f"it normalises over {weight.dim()} dimensions"
    return weight, None


class _Norm(NamedTuple):
    statistic: str
    any_weight: bool = False  # the result has x's dtype whatever the weight's is


#: norms that fused ops compute, by defining module and name
_NORMS = {
    ("torch.nn.modules.normalization", "LayerNorm"): _Norm("layer"),
    ("torch.nn.modules.normalization", "RMSNorm"): _Norm("rms", True),
    ("diffusers.models.normalization", "FP32LayerNorm"): _Norm("layer", True),
    ("diffusers.models.normalization", "RMSNorm"): _Norm("rms"),
    ("diffusers.models.normalization", "MochiRMSNorm"): _Norm("rms", True),
}
_known: dict[type, tuple[_Norm, Callable]] = {}  # by class, with its forward: what is looked up in each call


def know_norm(cls: type) -> bool:
    """Whether `norm_arguments` will know a class; to be asked once before it does."""
    norm = _NORMS.get((cls.__module__, cls.__qualname__))
    is_known = norm is not None and is_of(cls.forward, cls.__module__)
    if is_known:
        _known[cls] = norm, cls.forward
    return is_known


def norm_arguments(norm: nn.Module, dtype: torch.dtype, width: int) -> Optional[dict]:
    """What `ada_norm` needs to compute `norm` of an x [*, width] of `dtype`.

    None where it cannot, where `norm` has hooks, or refuses this width, or somebody has replaced its class's forward.
    """
    cls = type(norm)
    kind, forward = _known.get(cls, (None, None))
    if kind is None or cls.forward is not forward or not is_plain(norm, cls):
        return None
    own = norm.__dict__
    if own.get("normalized_shape", (width,)) != (width,) or norm._buffers:
        return None
    parameters = norm._parameters
    weight = parameters.get("weight", own.get("weight"))  # FSDP makes them plain attributes
    bias = parameters.get("bias", own.get("bias"))
    for parameter in (weight, bias):
        if parameter is not None:
            known_dtype = parameter.dtype is dtype or (kind.any_weight and parameter.dtype in FLOATS)
            if parameter.dim() != 1 or not known_dtype:
                return None
    eps = norm.eps
    if eps is None:  # torch.nn.RMSNorm: that of the dtype it computes in
        eps = torch.finfo(torch.float32).eps
    return {"weight": weight, "bias": bias, "eps": eps, "norm": kind.statistic}
