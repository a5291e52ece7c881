"""What is replaced in diffusers and in torch.nn: a table of classes, by the module that defines them and their name."""

from typing import Callable, Optional, Union

from torch import nn

from . import ltx, ltx_vae
from .blocks import linear_gelu_tanh
from .norms import rms_norm_forward, weight_of
from .patching import Recipe, own_forward


def _rms_norm(formula: str, parameter: str, stock_under_autocast: bool = False) -> Recipe:
    def plan(module: nn.Module) -> Union[Callable, str]:
        reason = weight_of(module)[1]
        if reason is None and len(getattr(module, "normalized_shape", (1,))) > 1:
            reason = f"it normalises over {len(module.normalized_shape)} dimensions"
        return reason or rms_norm_forward(formula, "eps", parameter, stock_under_autocast)

    return Recipe("rms_norm", plan)


@own_forward("gelu")
def _gelu(self, hidden_states):
    """activations.GELU, a Linear and a GELU: one GEMM in inference."""
    y = linear_gelu_tanh(hidden_states, self.proj) if self.approximate == "tanh" else None
    return type(self).forward(self, hidden_states) if y is None else y


#: (defining module, class name) -> recipe
RECIPES: dict[tuple[str, str], Recipe] = {
    # CUDA's autocast runs torch.rms_norm in fp32 and so changes what it returns
    ("torch.nn.modules.normalization", "RMSNorm"): _rms_norm("single", "x", stock_under_autocast=True),
    ("diffusers.models.normalization", "RMSNorm"): _rms_norm("diffusers", "hidden_states"),
    ("diffusers.models.normalization", "MochiRMSNorm"): _rms_norm("single", "hidden_states"),
    ("diffusers.models.activations", "GELU"): Recipe("gelu", lambda module: _gelu),
    **ltx.RECIPES,
    **ltx_vae.RECIPES,
}


def recipe_for(cls: type) -> Optional[Recipe]:
    return RECIPES.get((cls.__module__, cls.__qualname__))
