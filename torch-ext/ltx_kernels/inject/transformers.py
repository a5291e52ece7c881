"""What is replaced in transformers.

Its RMSNorms are some 190 classes in as many files, of a handful of formulas that neither the names nor the attributes
tell apart (Gemma's weight is stored around zero, GptOss rounds later than Llama). So a class is told by where it is
defined and by what it computes: a few rows are put through its own forward on the CPU, once a class, and compared with
each formula.
"""

import inspect
import re
from typing import Callable, NamedTuple, Optional, Union

import torch
from torch import Tensor, nn

from . import decoders
from .norms import FORMULAS, rms_norm_forward, weight_of
from .patching import Recipe, at_rest

_MODULE = re.compile(r"transformers\.models\.")
_NAME = re.compile(r"(RMSNorm|T5LayerNorm)$")  # the T5 kind: T5, MT5, UMT5, LongT5
_EPS = ("variance_epsilon", "eps")

# The families whose layers, MLPs and attentions are looked into: those that are tested. Their rotary tables hold each
# value twice, or once at half the width.
FAMILIES = r"falcon|gemma[234]?|gemma3n|gpt_neox|gpt_oss|llama|mistral|mixtral|phi3|qwen[23](_moe)?"
_FAMILY = re.compile(rf"transformers\.models\.({FAMILIES})\.modeling_\w+$")

_formulas: dict[tuple, Optional[str]] = {}


def recipe_for(cls: type) -> Optional[Recipe]:
    if cls is nn.LayerNorm:
        return LAYER_NORM
    if _MODULE.match(cls.__module__) and _NAME.search(cls.__name__):
        return RMS_NORM
    if _FAMILY.match(cls.__module__):
        return next((recipe for name, recipe in PARTS if re.search(name, cls.__name__)), None)
    return None


class _Formula(NamedTuple):
    name: str  # in FORMULAS
    eps: str  # the attribute that holds the epsilon
    parameter: str  # the name of the input


def _formula_of(module: nn.Module) -> Union[_Formula, str]:
    weight, reason = weight_of(module)
    if reason:
        return reason
    eps = [name for name in _EPS if isinstance(getattr(module, name, None), float)]
    parameters = list(inspect.signature(type(module).forward).parameters)
    if len(eps) != 1 or parameters not in (["self", "x"], ["self", "hidden_states"]):
        return "its epsilon or its signature is not one that this package knows"
    flags = tuple(sorted((n, v) for n, v in vars(module).items() if isinstance(v, (bool, str)) and n != "training"))
    key = (type(module), weight is None, flags)
    if key not in _formulas:
        _formulas[key] = _classify(module, eps[0], weight)
    if _formulas[key] is None:
        return "it computes none of the formulas that this package knows"
    return _Formula(_formulas[key], eps[0], parameters[1])


def _rms_norm(module: nn.Module) -> Union[Callable, str]:
    formula = _formula_of(module)
    return formula if isinstance(formula, str) else rms_norm_forward(*formula)


def _norm_of(module: nn.Module) -> Union[decoders.Norm, str]:
    """What the norm of a decoder layer computes."""
    cls = type(module)
    if cls is nn.LayerNorm:
        plain = len(module.normalized_shape) == 1 and module.weight is not None
        return decoders.Norm(cls, "eps", "layer") if plain else "it is no LayerNorm over one dimension with a weight"
    if recipe_for(cls) is not RMS_NORM:
        return f"{cls.__name__} is not a norm that this package knows"
    formula = _formula_of(module)
    if isinstance(formula, str):
        return formula
    rule = FORMULAS[formula.name]
    return decoders.Norm(cls, formula.eps, "rms", rule.weight_offset, rule.dtypes)


@at_rest()
def _classify(module: nn.Module, eps: str, weight: Optional[Tensor]) -> Optional[str]:
    """The formula whose results and dtypes are those of the module's class."""
    hidden = weight.numel() if weight is not None else 256
    generator = torch.Generator("cpu").manual_seed(0)
    # Rows around the epsilon in size as well, so that it is known to be used in the same way.
    on_cpu = {"dtype": torch.float32, "device": "cpu"}
    size = torch.tensor([10.0, 1.0, 0.1, getattr(module, eps) ** 0.5], **on_cpu)[:, None]
    x = size * torch.randn(4, hidden, generator=generator, **on_cpu)
    w = 1 + torch.randn(hidden, generator=generator, **on_cpu)
    matching = set(FORMULAS)
    halves = (torch.float32, torch.bfloat16)
    for x_dtype, w_dtype in [(a, b) for a in halves for b in halves]:
        try:
            result = _stock(module, w.to(w_dtype) if weight is not None else None, x.to(x_dtype))
        except Exception:  # whatever a foreign forward may raise on a bare instance
            return None
        x_float = x.to(x_dtype).float()
        normed = x_float * torch.rsqrt(x_float.pow(2).mean(-1, keepdim=True) + getattr(module, eps))
        for name in list(matching):
            expected = (
                normed.to(x_dtype) if weight is None else FORMULAS[name].reference(normed, x_dtype, w.to(w_dtype))
            )
            if not _same(result, expected):
                matching.discard(name)
    # Without a weight the formulas are one.
    return min(matching) if len(matching) == 1 or (weight is None and matching) else None


def _stock(module: nn.Module, weight: Optional[Tensor], x: Tensor) -> Tensor:
    """The class's forward on a bare instance with other weights: the real ones may be on a GPU, or on meta."""
    bare = type(module).__new__(type(module))
    nn.Module.__init__(bare)
    plain = (bool, int, float, str, tuple, torch.Size, type(None))
    for name, value in vars(module).items():
        if name not in vars(bare) and isinstance(value, plain):
            object.__setattr__(bare, name, value)
    if "weight" in module._parameters:
        bare.register_parameter("weight", None if weight is None else nn.Parameter(weight, requires_grad=False))
    return type(module).forward(bare, x)


def _same(result: Tensor, expected: Tensor) -> bool:
    """The same dtype; values at most a rounding apart, and hardly anywhere at all (formulas differ in a quarter)."""
    if type(result) is not Tensor or result.dtype is not expected.dtype or result.shape != expected.shape:
        return False
    if result.dtype is torch.float32:
        return torch.allclose(result, expected, rtol=1e-5, atol=0.0)
    return (
        torch.allclose(result.float(), expected.float(), rtol=2**-7, atol=0.0)
        and (result != expected).float().mean() < 0.02
    )


RMS_NORM = Recipe("rms_norm", _rms_norm)
LAYER_NORM = Recipe("layer_norm", lambda norm: decoders.layer_norm_forward)

#: class name -> recipe, in the modules of FAMILIES
PARTS = (
    (r"(DecoderLayer|NeoXLayer)$", Recipe("decoder_layer", lambda layer: decoders.decoder_layer(layer, _norm_of))),
    (r"Experts$", Recipe("gated_mlp", decoders.gated_mlp, decoders.install_gate, decoders.remove_gate)),
    (r"MLP\d?$", Recipe("gated_mlp", decoders.gated_mlp)),
    (r"Attention2?$", Recipe("rope", lambda attention: decoders.attention(attention, _norm_of))),
)
KINDS = {RMS_NORM.kind, LAYER_NORM.kind, *(recipe.kind for _, recipe in PARTS)}
