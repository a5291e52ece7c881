"""What is replaced in diffusers and in torch.nn: a table of classes, by the module that defines them and their name."""

import ast
import functools
from typing import Callable, Optional, Union

from torch import Tensor, nn
from torch.compiler import is_dynamo_compiling

from .. import functional
from . import blocks, decoders, heads, ltx, ltx_vae, streams
from .blocks import call_forward, call_plain, left_to_inductor, linear_gelu_tanh, packing
from .deferred import stock_only, taken
from .norms import know_norm, norm_arguments, rms_norm_forward, weight_of
from .patching import MARK, Recipe, own_forward
from .rewriting import innermost, parsed, passed_on, recompiled


@functools.cache  # one forward for all instances of a class: they compile once
def _for_large(forward: Callable, cls: type, elements: int) -> Callable:
    """`forward`; in compiled code, for an input of fewer than `elements`, the class's own.

    Each thing looked at on the way is a guard, which takes time in every call. So the arguments are those of the
    class's forward, and no tuple and dict; `left_to_inductor` is written out, without the globals that it reads; and
    the class is found in its module: what is asked of an instance's type keeps torch 2.11 from skipping the guards of
    all that the instance holds while the tags of their dicts are the same.
    """
    stock, name = cls.forward, cls.__name__
    tree = parsed(stock)
    if isinstance(tree, str) or innermost(stock) is not stock or stock.__globals__.get(name) is not cls:
        return forward
    x = tree.args.args[1].arg
    is_small = f"_ltx_is_compiling() and isinstance({x}, _ltx_tensor) and {x}.numel() < {elements}"
    is_left = ast.parse(f"{is_small} and {name}.forward is _ltx_stock", mode="eval").body
    tree.body = [
        ast.If(is_left, [ast.Return(passed_on(tree, "_ltx_stock"))], []),
        ast.Return(passed_on(tree, "_ltx_forward")),
    ]
    helpers = {"_ltx_is_compiling": is_dynamo_compiling, "_ltx_tensor": Tensor}
    either = recompiled(stock, tree, _ltx_stock=stock, _ltx_forward=forward, **helpers)
    # By this name dynamo keeps what sizes were seen.
    either.__code__ = either.__code__.replace(co_name=stock.__qualname__)
    return own_forward(getattr(forward, MARK)[0])(functools.wraps(forward)(either))


def _large(plan: Callable) -> Callable:
    """The plan of a recipe whose forwards are `_for_large` inputs."""

    def plan_of(module: nn.Module) -> Union[Callable, str]:
        forward = plan(module)
        return forward if isinstance(forward, str) else _for_large(forward, type(module), blocks.COMPILED_ELEMENTS)

    return plan_of


@functools.cache
def _unless_replaced(forward: Callable, stock: Callable) -> Callable:
    @own_forward(getattr(forward, MARK)[0])
    @functools.wraps(forward)
    def whole(self, *args, **options):
        if type(self).forward is not stock:
            return type(self).forward(self, *args, **options)
        return forward(self, *args, **options)

    return whole


def _model(plan: Callable) -> Callable:
    """The plan of a recipe for a whole model: what replaces its class's forward is called with what the caller gave."""

    def plan_of(module: nn.Module) -> Union[Callable, str]:
        forward = plan(module)
        return forward if isinstance(forward, str) else _unless_replaced(forward, type(module).forward)

    return plan_of


def _rms_norm(formula: str, parameter: str, stock_under_autocast: bool = False) -> Recipe:
    def plan(module: nn.Module) -> Union[Callable, str]:
        reason = weight_of(module)[1]
        if reason is None and len(getattr(module, "normalized_shape", (1,))) > 1:
            reason = f"it normalises over {len(module.normalized_shape)} dimensions"
        return reason or rms_norm_forward(formula, "eps", parameter, stock_under_autocast)

    return Recipe("rms_norm", _large(plan))


@own_forward("gelu")
def _gelu(self, hidden_states):
    """activations.GELU, a Linear and a GELU: one GEMM in inference."""
    y = linear_gelu_tanh(hidden_states, self.proj) if self.approximate == "tanh" else None
    return type(self).forward(self, hidden_states) if y is None else y


@own_forward("feed_forward")
def _feed_forward(self, hidden_states, *args, **kwargs):
    """attention.FeedForward: a plain Linear or Dropout of it is called past nn.Module, but in compiled code."""
    if args or kwargs or left_to_inductor(hidden_states):
        return type(self).forward(self, hidden_states, *args, **kwargs)
    call_part = call_forward if is_dynamo_compiling() else call_plain
    for module in self.net:
        hidden_states = call_part(module, hidden_states)
    return hidden_states


@own_forward("layer_norm")
def _layer_norm(self, inputs):
    """FP32LayerNorm: in fp32 without a copy in fp32."""
    arguments = None if stock_only() or not taken(inputs) else norm_arguments(self, inputs.dtype, inputs.shape[-1])
    if arguments is None:
        return type(self).forward(self, inputs)
    return functional.layer_norm(inputs, arguments["weight"], arguments["bias"], arguments["eps"])


@own_forward("gated_mlp")
def _z_image_mlp(self, x):
    gate, up = self.w1(x), self.w3(x)
    is_plain_method = "_forward_silu_gating" not in self.__dict__
    if is_plain_method and gate.shape == up.shape and decoders.served(gate, up):
        return self.w2(functional.swiglu(gate, up))
    return self.w2(self._forward_silu_gating(gate, up))


def _plan_layer_norm(module: nn.Module) -> Callable:
    know_norm(type(module))
    return _layer_norm


_MODELS = "diffusers.models."
_NORMALIZATION = f"{_MODELS}normalization"
_TRANSFORMERS = f"{_MODELS}transformers.transformer_"


def _is_ada_norm(cls: type) -> bool:
    return recipe_for(cls) is _ADA_NORM


def _is_ltx_block(cls: type) -> bool:
    return recipe_for(cls) is ltx.RECIPES[f"{_TRANSFORMERS}ltx", "LTXVideoTransformerBlock"]


_ADA_NORM = Recipe("ada_norm", _large(streams.plan("ada_norm", _is_ada_norm)))
_BLOCK = Recipe("transformer_block", _large(streams.plan("transformer_block", _is_ada_norm)))
# Wider than SDXL's text, 2048: there one GEMM for key and value of 77 tokens costs the host more than the second GEMM.
_ATTENTION = Recipe("attention", heads.attention, *packing(heads.projections, min_width=2304))
_GATED_MLP = Recipe("gated_mlp", _large(decoders.gated_mlp))

#: recipe -> module that defines a class: names of classes
_FAMILIES: dict[Recipe, dict[str, tuple[str, ...]]] = {
    _ADA_NORM: {
        _NORMALIZATION: (
            "AdaLayerNorm",
            "AdaLayerNormContinuous",
            "AdaLayerNormZero",
            "AdaLayerNormZeroSingle",
            "CogVideoXLayerNormZero",
            "LuminaLayerNormContinuous",
            "LuminaRMSNormZero",
            "SD35AdaLayerNormZeroX",
        ),
        f"{_TRANSFORMERS}hunyuan_video": (
            "HunyuanVideoTokenReplaceAdaLayerNormZero",
            "HunyuanVideoTokenReplaceAdaLayerNormZeroSingle",
        ),
        f"{_TRANSFORMERS}mochi": ("MochiLayerNormContinuous", "MochiModulatedRMSNorm", "MochiRMSNormZero"),
        f"{_TRANSFORMERS}z_image": ("FinalLayer",),
    },
    _BLOCK: {
        f"{_MODELS}attention": ("BasicTransformerBlock", "JointTransformerBlock"),
        f"{_MODELS}transformers.cogvideox_transformer_3d": ("CogVideoXBlock",),
        f"{_TRANSFORMERS}flux": ("FluxTransformerBlock", "FluxSingleTransformerBlock"),
        f"{_TRANSFORMERS}flux2": ("Flux2TransformerBlock", "Flux2SingleTransformerBlock"),
        f"{_TRANSFORMERS}hunyuan_video": (
            "HunyuanVideoIndividualTokenRefinerBlock",
            "HunyuanVideoSingleTransformerBlock",
            "HunyuanVideoTokenReplaceSingleTransformerBlock",
            "HunyuanVideoTokenReplaceTransformerBlock",
            "HunyuanVideoTransformerBlock",
        ),
        f"{_TRANSFORMERS}lumina2": ("Lumina2TransformerBlock",),
        f"{_TRANSFORMERS}mochi": ("MochiTransformerBlock",),
        f"{_TRANSFORMERS}sd3": ("SD3SingleTransformerBlock",),
        f"{_TRANSFORMERS}wan": ("WanTransformerBlock",),
        f"{_TRANSFORMERS}z_image": ("ZImageTransformerBlock",),
    },
    Recipe("transformer_block", _large(streams.plan("transformer_block", _is_ada_norm, "_modulate"))): {
        f"{_TRANSFORMERS}qwenimage": ("QwenImageTransformerBlock",),
    },
    _ATTENTION: {
        f"{_MODELS}attention_processor": ("Attention", "MochiAttention"),
        f"{_TRANSFORMERS}flux": ("FluxAttention",),
        f"{_TRANSFORMERS}flux2": ("Flux2Attention", "Flux2ParallelSelfAttention"),
        f"{_TRANSFORMERS}wan": ("WanAttention",),
    },
    _GATED_MLP: {
        f"{_MODELS}activations": ("GEGLU", "SwiGLU"),
        f"{_MODELS}attention": ("LuminaFeedForward",),
        f"{_TRANSFORMERS}flux2": ("Flux2SwiGLU",),
    },
    # Its blocks hand the residual stream on, and what follows them is an AdaLN.
    Recipe("ltx_video.transformer", _model(streams.plan("ltx_video.transformer", _is_ltx_block))): {
        f"{_TRANSFORMERS}ltx": ("LTXVideoTransformer3DModel",),
    },
    Recipe("gated_mlp", _large(lambda module: _z_image_mlp)): {f"{_TRANSFORMERS}z_image": ("FeedForward",)},
}

#: (defining module, class name) -> recipe
RECIPES: dict[tuple[str, str], Recipe] = {
    # CUDA's autocast runs torch.rms_norm in fp32 and so changes what it returns
    ("torch.nn.modules.normalization", "RMSNorm"): _rms_norm("single", "x", stock_under_autocast=True),
    ("diffusers.models.normalization", "RMSNorm"): _rms_norm("diffusers", "hidden_states"),
    ("diffusers.models.normalization", "MochiRMSNorm"): _rms_norm("single", "hidden_states"),
    ("diffusers.models.normalization", "FP32LayerNorm"): Recipe("layer_norm", _large(_plan_layer_norm)),
    ("diffusers.models.activations", "GELU"): Recipe("gelu", _large(lambda module: _gelu)),
    ("diffusers.models.attention", "FeedForward"): Recipe("feed_forward", lambda module: _feed_forward),
    **{
        (module, name): recipe
        for recipe, classes in _FAMILIES.items()
        for module, names in classes.items()
        for name in names
    },
    **ltx.RECIPES,
    **ltx_vae.RECIPES,
}


def recipe_for(cls: type) -> Optional[Recipe]:
    return RECIPES.get((cls.__module__, cls.__qualname__))
