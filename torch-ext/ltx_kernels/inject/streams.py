"""The residual stream of a block: what its forward does around its attentions and its feed-forwards, in few ops.

    norm(x) * (1 + scale) + shift      one op: ada_norm
    residual + gate * branch           one op: gated_residual
    that sum, when a norm reads it     one op: residual_ada_norm
    gelu(linear(x))                    one GEMM with its epilogue, on a GPU in half precision

Each is a deferred value (deferred.py) that grows as long as the forward goes on so. A chain in fp32 that is cast back
(Wan, Mochi) is one op as well: our ops compute in fp32 and round once.
"""

import ast
import functools
from types import MethodType
from typing import Any, Callable, Optional, Union

import torch
from torch import Tensor, nn

from .. import functional
from .blocks import ResidualStream, call_forward, calls_forward, linear_gelu_tanh
from .deferred import INNER, Defer, Deferred, deferred_forward, deferred_tree, taken, value
from .norms import FLOATS, know_norm, norm_arguments
from .patching import is_plain
from .rewriting import call, is_of, recompiled, self_attribute, submodule

# ---- deferred values


class Upcast(Deferred):
    """x.float() of a half precision x: our ops read x itself."""

    operands = ()  # x may still be read

    def __init__(self, x: Union[Tensor, Deferred]):
        self.x, self.shape, self.dtype = x, x.shape, torch.float32

    def compute(self) -> Tensor:
        return value(self.x).float()

    def __getitem__(self, index: Any) -> "Upcast":
        return Upcast(self.x[index])

    def unsqueeze(self, dim: int) -> "Upcast":
        return Upcast(self.x.unsqueeze(dim))


def _promoted(x: Any, *others: Any) -> torch.dtype:
    """The dtype of a sum or a product of these, of which some may be None."""
    dtype = x.dtype
    for other in others:
        if other is not None and other.dtype is not dtype:
            dtype = torch.promote_types(dtype, other.dtype)
    return dtype


def _source(x: Any) -> Any:
    return x.x if isinstance(x, Upcast) else x


def _read(x: Any) -> Any:
    """The tensor that our op reads for x; None for None."""
    return x if x is None or type(x) is Tensor else value(_source(x))


class OnePlus(Deferred):
    """1 + scale"""

    operands = ()

    def __init__(self, scale: Union[Tensor, Upcast]):
        self.scale, self.shape, self.dtype = scale, scale.shape, scale.dtype

    def compute(self) -> Tensor:
        return 1 + value(self.scale)

    def __getitem__(self, index: Any) -> "OnePlus":
        return OnePlus(self.scale[index])

    def unsqueeze(self, dim: int) -> "OnePlus":
        return OnePlus(self.scale.unsqueeze(dim))


class Product(Deferred):
    """a * b; one of them may turn out to be a gate."""

    operands = ("a", "b")

    def __init__(self, a: Any, b: Any):
        self.a, self.b = a, b
        self.dtype = _promoted(a, b)

    @property
    def shape(self) -> torch.Size:
        return self.value().shape

    def compute(self) -> Tensor:
        return value(self.a) * value(self.b)

    def cast(self, dtype: torch.dtype) -> Any:
        for normed, gate in ((self.a, self.b), (self.b, self.a)):
            if isinstance(normed, Normed) and gate.dtype is dtype:
                return Product(normed.cast(dtype), gate)  # rounded once here as well, before the gate
        return self.value().to(dtype)


def _broadcasts(x: Tensor, shape: torch.Size) -> bool:
    """To a modulation of a row each, as our ops read it."""
    sizes = x.shape
    if len(sizes) == len(shape) == 3:  # nearly always, and asked often
        return sizes[2] == shape[2] and sizes[1] in (1, shape[1]) and sizes[0] in (1, shape[0])
    if len(sizes) > len(shape) or sizes[-1] != shape[-1]:
        return False
    return all(size in (1, wanted) for size, wanted in zip(reversed(sizes), reversed(shape)))


class Sum(Deferred):
    """residual + gate * branch, and its cast to `dtype`."""

    operands = ("residual", "branch", "gate")

    def __init__(self, residual: Any, branch: Any, gate: Optional[Any], dtype: Optional[torch.dtype] = None):
        self.residual, self.branch, self.gate, self.shape = residual, branch, gate, residual.shape
        self.dtype = dtype or _promoted(residual, branch, gate)

    def cast(self, dtype: torch.dtype) -> "Sum":
        return Sum(self.residual, self.branch, self.gate, dtype)

    def as_read(self) -> Optional[tuple[Tensor, Tensor, Optional[Tensor]]]:
        """(residual, branch, gate), if our op returns the dtype that the library does."""
        residual = _read(self.residual)
        if residual.dtype is not self.dtype:
            return None
        return residual, _read(self.branch), _read(self.gate)

    def compute(self) -> Tensor:
        operands = None if self.gate is None else self.as_read()
        if operands is not None:
            return functional.gated_residual(*operands)
        branch = value(self.branch)
        total = value(self.residual) + (branch if self.gate is None else value(self.gate) * branch)
        return total if total.dtype is self.dtype else total.to(self.dtype)


class Normed(Deferred):
    """norm(x) * (1 + scale) + shift, and its cast to `dtype`."""

    operands = ("x", "scale", "shift")

    def __init__(self, module: nn.Module, x: Any, arguments: dict, scale=None, shift=None, dtype=None):
        self.module, self.x, self.arguments, self.scale, self.shift = module, x, arguments, scale, shift
        self.shape = x.shape
        self.dtype = x.dtype if dtype is None else dtype

    def cast(self, dtype: torch.dtype) -> "Normed":
        return Normed(self.module, self.x, self.arguments, self.scale, self.shift, dtype)

    def scaled(self, scale: Any) -> "Normed":
        return Normed(self.module, self.x, self.arguments, scale, dtype=_promoted(self, scale))

    def shifted(self, shift: Any) -> "Normed":
        return Normed(self.module, self.x, self.arguments, self.scale, shift, _promoted(self, shift))

    def is_bare(self) -> bool:
        return self.computed is None and self.scale is None

    def __getitem__(self, index: Any) -> Any:
        rows = type(index) is tuple and len(index) < len(self.shape) and all(type(i) is slice for i in index)
        if rows and self.is_bare():
            return Normed(self.module, value(self.x)[index], self.arguments, dtype=self.dtype)
        return self.value()[index]

    def compute(self) -> Tensor:
        x = _source(self.x)
        is_open = isinstance(x, Sum) and x.computed is None
        if self.scale is None and not is_open and x is self.x:
            return call_forward(self.module, value(x))  # nothing to fuse
        scale, shift = _read(self.scale), _read(self.shift)
        if self.dtype is x.dtype:
            operands = x.as_read() if is_open else None
            if operands is not None and operands[1].dtype is self.dtype:
                result, total = functional.residual_ada_norm(*operands, scale, shift, **self.arguments)
                x.resolve(total)
                return result
            return functional.ada_norm(value(x), scale, shift, **self.arguments)
        result = call_forward(self.module, value(self.x))
        if scale is not None:
            result = result * (1 + value(self.scale))
        if shift is not None:
            result = result + value(self.shift)
        return result.to(self.dtype)


# ---- what a forward's operations become


def one_plus(one: Union[int, float], x: Any) -> Any:
    return OnePlus(x) if isinstance(x, Upcast) or _is_vector(x) else one + value(x)


def _is_vector(x: Any) -> bool:
    """A tensor that may be an operand of our ops; one of no dimension is none, and has no part in promotion either."""
    return taken(x) and x.dim() > 0


def _is_operand(x: Any) -> bool:
    return taken(x) and x.dim() > 0 if isinstance(x, Tensor) else isinstance(x, (Upcast, Sum, Normed))


def multiply(a: Any, b: Any) -> Any:
    for x, factor in ((a, b), (b, a)):
        is_scale = isinstance(factor, OnePlus) and isinstance(x, Normed) and x.is_bare()
        if is_scale and _broadcasts(factor, x.shape):
            return x.scaled(factor.scale)
    return Product(a, b) if _is_operand(a) and _is_operand(b) else value(a) * value(b)


def add(a: Any, b: Any) -> Any:
    are_tensors = isinstance(a, Tensor) and isinstance(b, Tensor)
    for x, other in () if are_tensors else ((a, b), (b, a)):
        if isinstance(other, Product) and other.computed is None and _is_operand(x):
            pairs = ((other.a, other.b), (other.b, other.a))
            for gate, branch in pairs if _source(other.b).dtype is _source(x).dtype else pairs[::-1]:
                if branch.shape == x.shape and _broadcasts(gate, x.shape):
                    return Sum(x, branch, gate)
        is_shift = isinstance(x, Normed) and x.scale is not None and x.shift is None and _is_operand(other)
        if is_shift and _broadcasts(other, x.shape):
            return x.shifted(other)
    if _is_operand(a) and _is_operand(b) and a.shape == b.shape:
        return Sum(a, b, None)
    return value(a) + value(b)


def cast(x: Any, dtype: Any) -> Any:
    if not isinstance(dtype, torch.dtype) or not isinstance(x, (Tensor, Deferred)):  # to a device, or a module
        return value(x).to(value(dtype))
    if x.dtype is dtype:
        return x
    if isinstance(x, (Sum, Normed, Product)) and x.dtype is torch.float32 and x.computed is None and dtype in FLOATS:
        return x.cast(dtype)
    if dtype is torch.float32 and (isinstance(x, Deferred) or _is_vector(x)):
        return Upcast(x)
    return value(x).to(dtype)


def call_module(module: Any, *args: Any, **options: Any) -> Any:
    """module(*args, **options), deferred where the module's forward is, and not called where it is a norm to fuse."""
    if isinstance(module, nn.Module):
        own, cls = module.__dict__.get("forward"), type(module)
        stock, inner = getattr(own.__func__, INNER, (None, None)) if isinstance(own, MethodType) else (None, None)
        if inner is not None:
            if cls.forward is stock and calls_forward(module) and is_plain(module, cls):
                return inner(module, *args, **options)
        elif len(args) == 1 and not options:
            x = value(args[0]) if isinstance(args[0], ResidualStream) else args[0]  # the sum first: once a model
            if isinstance(x, (Upcast, Sum)) or taken(x):
                arguments = norm_arguments(module, x.dtype, x.shape[-1])
                if arguments is not None:
                    return Normed(module, x, arguments)
    return call_forward(module, *value(args), **{name: value(option) for name, option in options.items()})


def call_both(outer: Any, inner: Any, x: Any) -> Any:
    """outer(inner(x)): a GELU behind a Linear is its epilogue."""
    if type(outer) is nn.GELU and outer.approximate == "tanh" and is_plain(outer, nn.GELU):
        y = linear_gelu_tanh(value(x), inner)
        if y is not None:
            return y
    return call_module(outer, call_forward(inner, value(x)))


def called(module: Any) -> Callable:
    """What a function that calls `module` is given instead: a part of a block runs its own forward."""
    return functools.partial(call_forward, module)


class _DeferStream(Defer):
    answered = ("unsqueeze",)
    gives_tensor = ("_ltx_value", "_ltx_call_forward", "_ltx_called")

    def __init__(
        self, followed: tuple[str, ...], modules: frozenset[str], others: frozenset[str], lists: frozenset[str]
    ):
        self.followed = followed  # methods of the class that have a part in the stream
        self.modules = modules  # attributes that are modules with a part in it
        self.others = others  # .. and those that get tensors and return them
        self.lists = lists  # .. and lists of modules with a part in it
        self.members: set[str] = set()  # variables that stand for a module of such a list

    def visit_For(self, node: ast.For) -> ast.AST:
        if self_attribute(node.iter) in self.lists and isinstance(node.target, ast.Name):
            self.members.add(node.target.id)
        self.generic_visit(node)
        return node

    def visit_Call(self, node: ast.Call) -> ast.AST:
        function, arguments = node.func, node.args
        name = self_attribute(function)
        if getattr(function, "id", "") in self.members:
            self.generic_visit(node)
            return call("_ltx_call_module", function, *node.args, keywords=node.keywords)
        if name in self.followed:
            self.generic_visit(node)
            return call(_HELPER_OF.format(name), function.value, *node.args, keywords=node.keywords)
        if name in self.modules:
            inner = arguments[0] if len(arguments) == 1 and not node.keywords else None
            is_of_one = isinstance(inner, ast.Call) and len(inner.args) == 1 and not inner.keywords
            if is_of_one and self_attribute(inner.func) not in ("", *self.modules, *self.followed):
                return call("_ltx_call_both", function, inner.func, self.visit(inner.args[0]))
            self.generic_visit(node)
            return call("_ltx_call_module", submodule(function), *node.args, keywords=node.keywords)
        if isinstance(function, ast.Attribute) and not node.keywords:
            self_value = functools.partial(self.visit, function.value)
            if function.attr == "float" and not arguments:
                return call("_ltx_cast", self_value(), ast.Name("_ltx_float32", ast.Load()))
            if function.attr == "type_as" and len(arguments) == 1:
                dtype = ast.Attribute(self.visit(arguments[0]), "dtype", ast.Load())
                return call("_ltx_cast", self_value(), dtype)
            if function.attr == "to" and len(arguments) == 1:
                return call("_ltx_cast", self_value(), self.visit(arguments[0]))
        node = super().visit_Call(node)
        if name in self.others:
            return call("_ltx_call_forward", submodule(function), *node.args, keywords=node.keywords)
        if getattr(function, "id", "") == "_chunked_feed_forward":  # it calls its argument, self.ff
            node.args[0] = call("_ltx_called", arguments[0])
        return node

    def visit_BinOp(self, node: ast.BinOp) -> ast.AST:
        if isinstance(node.op, (ast.Add, ast.Mult)):
            self.generic_visit(node)
            if isinstance(node.op, ast.Mult):
                return call("_ltx_multiply", node.left, node.right)
            if isinstance(node.left, ast.Constant) and node.left.value == 1:
                return call("_ltx_one_plus", node.left, node.right)
            return call("_ltx_add", node.left, node.right)
        return super().visit_BinOp(node)


_HELPERS = {
    "_ltx_one_plus": one_plus,
    "_ltx_multiply": multiply,
    "_ltx_add": add,
    "_ltx_cast": cast,
    "_ltx_call_module": call_module,
    "_ltx_call_both": call_both,
    "_ltx_call_forward": call_forward,
    "_ltx_called": called,
    "_ltx_float32": torch.float32,
    "_ltx_value": value,
}
_HELPER_OF = "_ltx_self{}"


def _method(stock: Callable, tree: ast.FunctionDef) -> Callable:
    """What a call of a method of a block, `stock`, becomes; unless somebody has put another in its place."""
    name, deferred = stock.__name__, recompiled(stock, tree, **_HELPERS)

    def call_method(self: nn.Module, *args: Any, **options: Any) -> Any:
        if name not in self.__dict__ and getattr(type(self), name) is stock:
            return deferred(self, *args, **options)
        return getattr(self, name)(*value(args), **{name: value(option) for name, option in options.items()})

    return call_method


@functools.cache  # one forward for all instances of a class that have the same parts: they compile once
def _forward(
    stock: Callable,
    kind: str,
    methods: tuple[Callable, ...],
    modules: frozenset[str],
    others: frozenset[str],
    lists: frozenset[str],
    arguments: bool,
) -> Union[Callable, str]:
    defer = _DeferStream(tuple(method.__name__ for method in methods), modules, others, lists)
    trees = [deferred_tree(stock, defer, arguments), *(deferred_tree(method, defer, True) for method in methods)]
    for tree in trees:
        if isinstance(tree, str):
            return tree
    helpers = dict(_HELPERS)
    for method, tree in zip(methods, trees[1:]):
        helpers[_HELPER_OF.format(method.__name__)] = _method(method, tree)
    return deferred_forward(stock, kind, trees[0], **helpers)


def plan(kind: str, is_deferred: Callable[[type], bool], *followed: str) -> Callable:
    """What a recipe does with a class: its forward, and the methods of it that are `followed`, with deferred values.

    `is_deferred` tells the classes of submodules, and of members of lists of them, that are planned so as well.
    """

    def plan_of(module: nn.Module) -> Union[Callable, str]:
        children = [(name, type(child)) for name, child in module.named_children()]
        modules = frozenset(n for n, cls in children if know_norm(cls) or cls is nn.GELU or is_deferred(cls))
        others = frozenset(n for n, cls in children) - modules
        lists = frozenset(
            name
            for name, child in module.named_children()
            if isinstance(child, nn.ModuleList) and len(child) and all(is_deferred(type(member)) for member in child)
        )
        cls = type(module)
        methods = (getattr(cls, name) for name in followed)
        followed_methods = tuple(method for method in methods if is_of(method, cls.__module__))
        return _forward(cls.forward, kind, followed_methods, modules, others, lists, arguments=is_deferred(cls))

    return plan_of
