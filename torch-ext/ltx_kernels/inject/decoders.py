"""Decoder layers, gated MLPs and rotary embeddings of language models: the expressions that our ops take over.

    add, then norm     h = a + b; norm(h)        one op: residual_ada_norm
    gated activation   act(gate) * up            one op, whether gate and up are halves of one tensor or two
    rotary embedding   apply_rotary_pos_emb(..)  one op for q and k, read and written as they lie, with the norms of
                                                 their heads where these come before it

Each replacement looks at its operands on each call: a dtype or device that our ops do not take, autocast, a gradient
that is wanted, a hook on the norm or the activation: then the expression is computed as it stands in the library. The
ops have no backward.
"""

import ast
import functools
import inspect
from types import MethodType
from typing import Any, Callable, NamedTuple, Optional, Union

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling

from .. import functional
from .blocks import call_plain
from .norms import supported
from .patching import at_rest, is_plain, own_forward
from .rewriting import call, innermost, parsed, rewritten, self_attribute, submodule

# In a decode step a call costs the host more than the GPU: the checks are written for speed.


def served(x: Tensor, *others: Tensor) -> bool:
    """Our ops compute from these what the library computes, and no gradient is wanted."""
    if torch._C._is_any_autocast_enabled() or not supported(x):
        return False
    dtype, device = x.dtype, x.device
    for other in others:
        if other.dtype is not dtype or other.device != device:
            return False
    return not torch.is_grad_enabled() or not any(t.requires_grad for t in (x, *others))


# ---- norms, add and norm


def layer_norm(norm: nn.Module, x: Tensor) -> Tensor:
    """What a torch.nn.LayerNorm computes."""
    weight, bias = norm.weight, norm.bias
    if served(x, *(t for t in (weight, bias) if t is not None)) and x.shape[-1:] == norm.normalized_shape:
        return functional.layer_norm(x, weight, bias, norm.eps)
    return type(norm).forward(norm, x)


# LayerNorm alone is one kernel in torch too. Ours takes the GPU less time and the host 4 us more: for an input of fewer
# elements it is the host that counts, as in SDXL at 1024 x 1024 (2^22).
LAYER_NORM_ELEMENTS = 2**23


@own_forward("layer_norm")
def layer_norm_forward(self, input):
    if is_compiling():  # Inductor fuses torch's with what is around it; its class is guarded on once for all norms
        return nn.LayerNorm.forward(self, input)
    if input.numel() < LAYER_NORM_ELEMENTS:
        return type(self).forward(self, input)
    return layer_norm(self, input)


class Norm(NamedTuple):
    """What a norm of a class computes, and where its epsilon is."""

    cls: type
    eps: str
    statistic: str = "rms"
    weight_offset: float = 0.0
    dtypes: frozenset = frozenset()  # (x, weight) that our op computes as the class does; empty: both the same


def _norm_served(x: Tensor, weight: Optional[Tensor], bias: Optional[Tensor], dtypes: frozenset) -> bool:
    if weight is None or (weight.dtype is not x.dtype and (x.dtype, weight.dtype) not in dtypes):
        return False
    if weight.device != x.device or (bias is not None and bias.dtype is not weight.dtype):
        return False
    return not torch.is_grad_enabled() or not (weight.requires_grad or (bias is not None and bias.requires_grad))


def _add_norm(norm_kind: Norm) -> Callable:
    cls, eps, statistic, weight_offset, dtypes = norm_kind

    def add_norm(norm: nn.Module, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        """(norm(a + b), a + b)"""
        if is_plain(norm, cls) and served(a, b) and a.shape == b.shape:
            weight, bias = norm.weight, getattr(norm, "bias", None) if statistic == "layer" else None
            if _norm_served(a, weight, bias, dtypes):
                return functional.residual_ada_norm(
                    a,
                    b,
                    weight=weight,
                    bias=bias,
                    eps=getattr(norm, eps),
                    norm=statistic,
                    weight_offset=weight_offset,
                )
        h = a + b
        return norm(h), h

    return add_norm


def _fuse_add_norm(body: list[ast.stmt]) -> list[str]:
    """Replace `h = a + b` and the norm that reads h next, in a list of statements; returns the norms' names."""
    norms = []
    for i, statement in enumerate(body):
        for block in ("body", "orelse"):
            norms += _fuse_add_norm(getattr(statement, block, []))
        h = _target(statement)
        if not h or not (isinstance(statement.value, ast.BinOp) and isinstance(statement.value.op, ast.Add)):
            continue
        following = [s for s in body[i + 1 : i + 3] if not (_target(s) and _is_name(s.value, h))][:1]
        if not following or not isinstance(following[0], (ast.Assign, ast.Return)):
            continue
        is_norm = functools.partial(_is_norm_of, h)
        calls = [node for node in ast.walk(following[0]) if is_norm(node)]
        if len(calls) != 1:
            continue
        norm, normed = calls[0].func, f"_ltx_normed_{i}"
        norms.append(norm.attr)
        _Replace(is_norm, lambda node, normed=normed: ast.Name(normed, ast.Load())).visit(following[0])
        targets = ast.Tuple([ast.Name(normed, ast.Store()), ast.Name(h, ast.Store())], ast.Store())
        value = call("_ltx_add_norm", norm, statement.value.left, statement.value.right)
        body[i] = ast.copy_location(ast.Assign([targets], value), statement)
    return norms


def _is_name(node: ast.AST, name: str) -> bool:
    return isinstance(node, ast.Name) and node.id == name


def _target(statement: ast.stmt) -> str:
    """The name that a plain assignment binds."""
    plain = isinstance(statement, ast.Assign) and len(statement.targets) == 1
    return statement.targets[0].id if plain and isinstance(statement.targets[0], ast.Name) else ""


def _is_norm_of(name: str, node: ast.AST) -> bool:
    if not isinstance(node, ast.Call) or len(node.args) != 1 or node.keywords or not _is_name(node.args[0], name):
        return False
    return "norm" in self_attribute(node.func)


class _Replace(ast.NodeTransformer):
    """Replace the expressions that `matches` by what `make` makes of them."""

    def __init__(self, matches: Callable[[ast.AST], bool], make: Callable[[Any], ast.expr]):
        self.matches, self.make = matches, make

    def generic_visit(self, node: ast.AST) -> ast.AST:
        super().generic_visit(node)
        return ast.copy_location(self.make(node), node) if self.matches(node) else node


@functools.cache  # one function for all layers: they compile once
def _layer_forward(stock: Callable, norm: Norm) -> Callable:
    tree = parsed(stock)
    _fuse_add_norm(tree.body)
    return rewritten(stock, tree, "decoder_layer", _ltx_add_norm=_add_norm(norm))


def decoder_layer(module: nn.Module, norm_of: Callable[[nn.Module], Union[Norm, str]]) -> Union[Callable, str]:
    """The forward of a layer whose sums that go into a norm are fused with it."""
    stock = type(module).forward
    tree = parsed(stock)
    if isinstance(tree, str):
        return tree
    names = set(_fuse_add_norm(tree.body))
    if not names or getattr(module, "use_parallel_residual", False):
        return "no sum in its forward goes into a norm"
    kinds = {norm_of(getattr(module, name)) for name in names}
    for kind in kinds:
        if isinstance(kind, str):
            return f"the norm after its attention: {kind}"
    return _layer_forward(stock, *kinds) if len(kinds) == 1 else "its norms are of several classes"


# ---- projections


def _linears(module: nn.Module) -> frozenset[str]:
    return frozenset(name for name, child in module.named_children() if type(child) is nn.Linear)


def _call_plain(tree: ast.AST, linears: frozenset[str]) -> ast.AST:
    """A tree whose calls of the attributes `linears` are handed to `call_plain`."""

    def is_call(node: ast.AST) -> bool:
        is_of_one = isinstance(node, ast.Call) and len(node.args) == 1 and not node.keywords
        return is_of_one and self_attribute(node.func) in linears and not isinstance(node.args[0], ast.Starred)

    return _Replace(is_call, lambda node: call("_ltx_call_plain", submodule(node.func), *node.args)).visit(tree)


# ---- gated activations

#: (defining module, class) -> the name that functional.gated_activation has for it
ACTIVATIONS = {
    ("torch.nn.modules.activation", "SiLU"): "silu",
    ("transformers.activations", "SiLUActivation"): "silu",
    ("transformers.activations", "GELUActivation"): "gelu",
    ("transformers.activations", "GELUTanh"): "gelu_tanh",
    ("transformers.activations", "NewGELUActivation"): "gelu_tanh",
    ("diffusers.models.activations", "FP32SiLU"): "silu",
    ("diffusers.models.activations", "GEGLU.gelu"): "gelu",  # a method
}


def _gated(known: Union[type, Callable], activation: str) -> Callable:
    def gated(act: Callable, gate: Tensor, up: Tensor) -> Tensor:
        """act(gate) * up"""
        is_known = act.__func__ is known if isinstance(act, MethodType) else is_plain(act, known)
        if is_known and gate.shape == up.shape and served(gate, up):
            return functional.gated_activation(gate, up, activation)
        return act(gate) * up

    return gated


_ACTIVATION_NAMES = ("act_fn", "activation", "activation_fn", "gate_fn", "gelu", "silu")


def _activation_of(node: ast.AST) -> str:
    """The name of the activation that an expression is a call of."""
    is_call = isinstance(node, ast.Call) and len(node.args) == 1 and not node.keywords
    name = self_attribute(node.func) if is_call else ""
    return name if name in _ACTIVATION_NAMES else ""


def _is_gated(node: ast.AST) -> bool:
    is_product = isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult)
    return is_product and bool(_activation_of(node.left)) != bool(_activation_of(node.right))


def _as_gated(product: ast.BinOp) -> ast.Call:
    act, up = (product.left, product.right) if _activation_of(product.left) else (product.right, product.left)
    return call("_ltx_gated", act.func, act.args[0], up)


@functools.cache
def _mlp_forward(
    stock: Callable, act: Union[type, Callable], activation: str, linears: frozenset[str] = frozenset()
) -> Callable:
    tree = _Replace(_is_gated, _as_gated).visit(_call_plain(parsed(stock), linears))
    return rewritten(stock, tree, "gated_mlp", _ltx_gated=_gated(act, activation), _ltx_call_plain=call_plain)


def _activation_class(module: nn.Module, tree: ast.AST) -> Union[tuple[Union[type, Callable], str], str]:
    """(class of the one activation that gates in `tree`, its name in functional.gated_activation), or why not."""
    names = {_activation_of(node.left) or _activation_of(node.right) for node in ast.walk(tree) if _is_gated(node)}
    if not names:
        return "it has no gated activation"
    act = getattr(module, names.pop(), None)
    act = act.__func__ if isinstance(act, MethodType) else type(act)
    activation = None if names else ACTIVATIONS.get((act.__module__, act.__qualname__))
    if activation is None:
        return f"its activation is not one that this package knows ({act.__name__})"
    return act, activation


def gated_mlp(module: nn.Module) -> Union[Callable, str]:
    """The forward of an MLP whose `act(gate) * up` is one op."""
    tree = parsed(type(module).forward)
    activation = tree if isinstance(tree, str) else _activation_class(module, tree)
    if isinstance(activation, str):
        return activation
    return _mlp_forward(type(module).forward, *activation, _linears(module))


# Experts compute in their forward, or, as their config says on each call, in a function of transformers (batched,
# grouped GEMM) that calls their gate. So the forward is that of a gated MLP, and the instance gets a gate of its own.
_GATE = "_apply_gate"


@functools.cache
def _gate(stock: Callable, act: type, activation: str) -> Callable:
    gate = _mlp_forward(stock, act, activation)
    gate.__name__ = _GATE  # what a pickle looks up
    return gate


def install_gate(experts: nn.Module) -> None:
    stock = getattr(type(experts), _GATE, None)
    tree = parsed(stock) if stock is not None and _GATE not in vars(experts) else ""
    activation = tree if isinstance(tree, str) else _activation_class(experts, tree)
    if not isinstance(activation, str):
        setattr(experts, _GATE, MethodType(_gate(stock, *activation), experts))


def remove_gate(experts: nn.Module) -> None:
    vars(experts).pop(_GATE, None)


# ---- rotary embeddings


class Rotation(NamedTuple):
    """What an `apply_rotary_pos_emb` of q and k, or of one of them, computes: half rotation, with tables of .."""

    partial: bool  # .. any even width up to the head size; the rest of the head passes through
    half: bool  # .. half the head size, each value once (else of the head size, each value twice)


ROTATIONS = (Rotation(False, False), Rotation(True, False), Rotation(False, True))


def _width_fits(rotation: Rotation, width: int, head_size: int) -> bool:
    if rotation.half:
        return 2 * width == head_size
    return width == head_size or (rotation.partial and width < head_size and width % 2 == 0)


def _is_known_call(rest: tuple, options: dict) -> bool:
    # transformers 4 has an unused argument position_ids before unsqueeze_dim.
    return not rest and len(options) == ("unsqueeze_dim" in options)


def _rope(rotation: Rotation, stock: Callable) -> Callable:
    def rope(apply, q, k, cos, sin, *rest, **options):
        dim = options.get("unsqueeze_dim", 1)
        if apply is not stock or not _is_known_call(rest, options) or not fits(rotation, q, k, cos, sin, dim):
            return apply(q, k, cos, sin, *rest, **options)
        return rotate(rotation, q, k, cos, sin, dim)

    def rope_of_one(apply, x, cos, sin, *rest, **options):
        dim = options.get("unsqueeze_dim", 1)
        if apply is not stock or not _is_known_call(rest, options) or not fits(rotation, x, x, cos, sin, dim):
            return apply(x, cos, sin, *rest, **options)
        return rotate(rotation, x, None, cos, sin, dim)[0]

    return rope_of_one if _parameters(stock) == _OF_ONE else rope


def _norm_rope(rotation: Rotation, stock: Callable, norm: Norm) -> Callable:
    rope = _rope(rotation, stock)

    def is_served(module: nn.Module, x: Tensor) -> bool:
        if not is_plain(module, norm.cls) or not _norm_served(x, module.weight, None, norm.dtypes):
            return False
        return module.weight.shape == x.shape[3:]

    def norm_rope(apply, q_norm, k_norm, q, k, cos, sin, *rest, **options):
        """`apply` of norm(q) and norm(k), each norm over the heads [B, S, H, d] of q and k [B, H, S, d]."""
        is_known = apply is stock and _is_known_call(rest, options) and options.get("unsqueeze_dim", 1) == 1
        if is_known and fits(rotation, q, k, cos, sin, 1) and is_served(q_norm, q) and is_served(k_norm, k):
            eps = getattr(q_norm, norm.eps)
            if eps == getattr(k_norm, norm.eps):
                return rotate(rotation, q, k, cos, sin, 1, q_norm.weight, k_norm.weight, eps)
        q, k = (head_norm(x.transpose(1, 2)).transpose(1, 2) for head_norm, x in ((q_norm, q), (k_norm, k)))
        return rope(apply, q, k, cos, sin, *rest, **options)

    return norm_rope


def fits(rotation: Rotation, q: Any, k: Any, cos: Any, sin: Any, unsqueeze_dim: Any) -> bool:
    """`rotate` computes what the library computes from these."""
    for tensor in (q, k, cos, sin):
        if not isinstance(tensor, Tensor):
            return False
    if q.dim() != 4 or k.dim() != 4 or cos.dim() != 3 or unsqueeze_dim not in (1, 2) or not served(q, k, cos, sin):
        return False
    (batch, *tokens, size), (k_batch, *k_tokens, k_size), table = q.shape, k.shape, cos.shape
    at = 2 - unsqueeze_dim  # [B, H, S, d] or [B, S, H, d]
    if k_batch != batch or k_size != size or k_tokens[at] != tokens[at] or sin.shape != table:
        return False
    return table[0] in (1, batch) and table[1] == tokens[at] and _width_fits(rotation, table[2], size)


def rotate(
    rotation: Rotation,
    q: Tensor,
    k: Optional[Tensor],
    cos: Tensor,
    sin: Tensor,
    unsqueeze_dim: int,
    q_weight: Optional[Tensor] = None,
    k_weight: Optional[Tensor] = None,
    eps: float = 1e-6,
):
    """q and k [B, H, S, d] (unsqueeze_dim 1) or [B, S, H, d] (2), rotated by tables [B | 1, S, width].

    With weights [d], RMSNorm of each head before.
    """
    swap = unsqueeze_dim == 1
    if swap:  # to [B, S, H, d]; nothing is copied
        q, k = q.transpose(1, 2), None if k is None else k.transpose(1, 2)
    rotary_dim = cos.shape[2] if rotation.partial else None
    norm = "none" if q_weight is None else "rms"
    q, k = functional.qk_norm_rope(
        q, k, q_weight, k_weight, cos, sin, eps, interleaved=False, norm=norm, rotary_dim=rotary_dim
    )
    return (q.transpose(1, 2), None if k is None else k.transpose(1, 2)) if swap else (q, k)


_OF_BOTH = ["q", "k", "cos", "sin", "unsqueeze_dim"]
_OF_ONE = ["x", "cos", "sin", "unsqueeze_dim"]


def _parameters(function: Callable) -> list[str]:
    # kernels makes a module of a decorated function; its forward has the function's signature.
    names = inspect.signature(getattr(function, "forward", function)).parameters
    return [name for name in names if name != "position_ids"]


@functools.cache
@at_rest()
def _rotation_of(stock: Callable) -> Optional[Rotation]:
    """The rotation that a function computes, told by its results."""
    of_one = _parameters(stock) == _OF_ONE
    if not of_one and _parameters(stock) != _OF_BOTH:
        return None
    generator = torch.Generator("cpu").manual_seed(0)
    on_cpu = {"generator": generator, "dtype": torch.float32, "device": "cpu"}
    q, k = (torch.randn(2, heads, 3, 16, **on_cpu) for heads in (4, 2))
    matching = []
    for rotation in ROTATIONS:
        angles = torch.randn(2, 3, 4 if rotation.partial else 8, **on_cpu)
        tables = [t if rotation.half else torch.cat((t, t), -1) for t in (angles.cos(), angles.sin())]
        same = True
        for dtype in (torch.float32, torch.bfloat16):
            inputs = [t.to(dtype) for t in (q, k, *tables)]
            try:
                results = [stock(x, *inputs[2:]) for x in inputs[:2]] if of_one else stock(*inputs)
            except Exception:  # whatever a foreign function may raise
                same = False
                break
            tolerance = 1e-5 if dtype is torch.float32 else 3e-2
            for result, expected in zip(results, rotate(rotation, *inputs, 1)):
                same = same and result.dtype is dtype and result.shape == expected.shape
                same = same and torch.allclose(result.float(), expected.float(), rtol=tolerance, atol=tolerance)
        if same:
            matching.append(rotation)
    # The partial form contains the full one.
    return matching[-1] if matching else None


_ROPE = "apply_rotary_pos_emb"


def _is_rope(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and _is_name(node.func, _ROPE)


def _as_rope(node: ast.Call) -> ast.Call:
    return call("_ltx_rope", node.func, *node.args, keywords=node.keywords)


def _fuse_norm_rope(body: list[ast.stmt]) -> list[str]:
    """Hand the norms of q and k to the rotation that follows, in a list of statements; returns the norms' names.

    q = self.q_norm(..).transpose(1, 2); k = the same; ..; q, k = apply_rotary_pos_emb(q, k, cos, sin)
    """
    for end, statement in enumerate(body):
        rope = statement.value if isinstance(statement, ast.Assign) else None
        if not _is_rope(rope) or len(rope.args) < 2:
            continue
        names = [arg.id if isinstance(arg, ast.Name) else "" for arg in rope.args[:2]]
        assigned = [getattr(name, "id", "") for name in getattr(statement.targets[0], "elts", ())]
        if len(statement.targets) > 1 or assigned != names:  # what is normed and not rotated is used as well
            continue
        normed = [[s for s in body[:end] if _target(s) == name][-1:] for name in names]
        norms = [_transposed_norm(s[0].value) if s else None for s in normed]
        if None in norms or any(
            isinstance(node, ast.Name) and node.id == name
            for name, (first,) in zip(names, normed)
            for between in body[body.index(first) + 1 : end]
            for node in ast.walk(between)
        ):
            continue
        for (first,), norm in zip(normed, norms):
            first.value.func.value = norm.args[0]
        statement.value = call(
            "_ltx_norm_rope", rope.func, *(n.func for n in norms), *rope.args, keywords=rope.keywords
        )
        return [norm.func.attr for norm in norms]
    return []


def _transposed_norm(node: ast.expr) -> Optional[ast.Call]:
    """`self.norm(..)` in `self.norm(..).transpose(1, 2)`."""
    is_call = isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and not node.keywords
    if not is_call or node.func.attr != "transpose" or [getattr(arg, "value", None) for arg in node.args] != [1, 2]:
        return None
    norm = node.func.value
    is_norm = isinstance(norm, ast.Call) and len(norm.args) == 1 and not norm.keywords
    return norm if is_norm and "norm" in self_attribute(norm.func) else None


@functools.cache
def _attention_forward(
    stock: Callable, apply: Callable, rotation: Rotation, norm: Optional[Norm], linears: frozenset[str]
) -> Callable:
    tree = parsed(stock)
    if norm is not None:
        _fuse_norm_rope(tree.body)
    tree = _call_plain(_Replace(_is_rope, _as_rope).visit(tree), linears)
    helpers = {} if norm is None else {"_ltx_norm_rope": _norm_rope(rotation, apply, norm)}
    return rewritten(stock, tree, "rope", _ltx_rope=_rope(rotation, apply), _ltx_call_plain=call_plain, **helpers)


def attention(module: nn.Module, norm_of: Callable[[nn.Module], Union[Norm, str]]) -> Union[Callable, str]:
    """The forward of an attention whose `apply_rotary_pos_emb` is ours, with the RMSNorms of q's and k's heads.

    All else, attention itself too, is its own.
    """
    stock = type(module).forward
    tree = parsed(stock)
    if isinstance(tree, str):
        return tree
    apply = innermost(stock).__globals__.get(_ROPE)
    if apply is None or not any(map(_is_rope, ast.walk(tree))):
        return f"it calls no {_ROPE}"
    rotation = _rotation_of(apply)
    if rotation is None:
        return f"its {_ROPE} computes no rotation that this package knows"
    norms = {norm_of(getattr(module, name)) for name in _fuse_norm_rope(tree.body)}
    norm = norms.pop() if len(norms) == 1 else None
    # The op has no offset for a weight stored around zero.
    fuses = isinstance(norm, Norm) and norm.statistic == "rms" and norm.weight_offset == 0.0
    return _attention_forward(stock, apply, rotation, norm if fuses else None, _linears(module))
