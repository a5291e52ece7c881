"""Values that are computed when they are needed: how the forwards of diffusers are fused without being copied.

diffusers writes a block as one expression a line: a gate times a branch, a sum, a norm, a scale, a shift. The forward
of the class is taken as it is (rewriting.py), and its operations are handed to functions that put off what may become
part of one of our ops. Whatever looks at such a value, or passes it on, gets the tensor: in one op where what was put
off is one, else as the library computes it. So the order of statements, the names and the branches of a forward do not
matter, and a family is a line in a table.

streams.py puts off what a block does with its residual stream, heads.py what an attention does with query and key.
"""

import ast
import functools
from collections.abc import Iterator
from typing import Any, Callable, Optional, Union

import torch
from torch import Tensor, nn

from .norms import FLOATS, is_dense, is_transformed
from .patching import HAS_CUDA
from .rewriting import call, innermost, parsed, passed_on, recompiled, rewritten

#: of an own forward: what gets and returns deferred values, of this copy of the package
INNER = f"_ltx_kernels_inner_{__name__.replace('.', '_')}"


def stock_only() -> bool:
    """Whether this call belongs to the class's own code: with grad, under autocast, within a transform, while traced.

    The ops have no backward, and what wants a gradient may be a tensor that a hook inside brings in. torch.jit.trace
    follows sizes as tensors, where we count with them.
    """
    is_other = torch.is_grad_enabled() or torch._C._is_any_autocast_enabled()
    return is_other or is_transformed() or torch._C._get_tracing_state() is not None


def taken(x: Any) -> bool:
    """A tensor of a kind, a dtype and a device that our ops take."""
    if not isinstance(x, Tensor) or x.dtype not in FLOATS or x.is_nested:
        return False
    return (x.is_cuda and HAS_CUDA or x.is_cpu) and (type(x) is Tensor or is_dense(x))


class Deferred:
    """A tensor that is not computed yet. What a subclass does not answer itself is asked of the tensor."""

    shape: torch.Size
    dtype: torch.dtype  # the one that the library's expression has
    operands: tuple[str, ...]  # attributes that are of no use any more when it is computed: they may be large
    computed: Optional[Tensor] = None

    def compute(self) -> Tensor:
        """The tensor: each subclass has its own way to it."""
        raise NotImplementedError(type(self).__name__)

    def value(self) -> Tensor:
        return self.resolve(self.compute()) if self.computed is None else self.computed

    def resolve(self, computed: Tensor) -> Tensor:
        self.computed = computed
        for name in self.operands:
            setattr(self, name, None)
        return computed

    @property
    def ndim(self) -> int:
        return len(self.shape)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.value(), name)

    def __getitem__(self, index: Any) -> Any:
        return self.value()[index]

    def __bool__(self) -> bool:
        return bool(self.value())

    def __len__(self) -> int:
        return len(self.value())


def value(x: Any) -> Any:
    """A tensor for a deferred one, within lists and tuples too; all else as it is."""
    if type(x) is Tensor:
        return x
    if isinstance(x, Deferred):
        return x.value()
    if type(x) in (list, tuple):
        return type(x)([value(item) for item in x])
    return x


# ---- forwards


class Defer(ast.NodeTransformer):
    """Hands the operations of a forward to helpers; here the rule for all others: they get tensors."""

    answered: tuple[str, ...] = ()  # methods that a deferred value has itself
    gives_tensor: tuple[str, ...] = ("_ltx_value",)  # helpers that do

    @staticmethod
    def value(node: ast.expr) -> ast.expr:
        if isinstance(node, ast.Starred):
            return ast.Starred(Defer.value(node.value), node.ctx)
        return call("_ltx_value", node)

    @classmethod
    def may_be_deferred(cls, node: ast.expr, names: set[str]) -> bool:
        """Whether what an expression gives may be, where what `names` hold may be."""
        if isinstance(node, ast.Name):
            return node.id in names
        if isinstance(node, ast.Call):  # of a helper, or of a method that a deferred value has itself
            function = node.func
            if isinstance(function, ast.Name):
                return function.id.startswith("_ltx_") and function.id not in cls.gives_tensor
            of = getattr(function, "value", None)
            is_answered = getattr(function, "attr", "") in cls.answered and cls.may_be_deferred(of, names)
            return is_answered or getattr(of, "id", "").startswith("_ltx_")
        if isinstance(node, (ast.Attribute, ast.BinOp, ast.Compare, ast.UnaryOp)):
            return False
        return any(cls.may_be_deferred(child, names) for child in ast.iter_child_nodes(node))

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        node.args = [self.value(argument) for argument in node.args]
        for keyword in node.keywords:
            if keyword.arg is not None:  # **options holds what the caller gave
                keyword.value = self.value(keyword.value)
        return node

    def visit_BinOp(self, node: ast.BinOp) -> ast.AST:
        self.generic_visit(node)
        node.left, node.right = self.value(node.left), self.value(node.right)
        return node

    def visit_UnaryOp(self, node: ast.UnaryOp) -> ast.AST:
        self.generic_visit(node)
        node.operand = self.value(node.operand)
        return node

    def visit_Compare(self, node: ast.Compare) -> ast.AST:
        self.generic_visit(node)
        if not all(isinstance(operator, (ast.Is, ast.IsNot)) for operator in node.ops):
            node.left, node.comparators = self.value(node.left), [self.value(other) for other in node.comparators]
        return node

    def visit_Assign(self, node: ast.Assign) -> ast.AST:
        self.generic_visit(node)
        if any(isinstance(target, (ast.Attribute, ast.Subscript)) for target in node.targets):
            node.value = self.value(node.value)  # it leaves the forward
        return node

    @staticmethod
    def writes(node: ast.AST) -> bool:
        """Whether `x[index] = y` is not followed."""
        return isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        return node  # a function within the forward gets tensors, see below

    def body_of(self, tree: ast.FunctionDef, arguments: bool) -> None:
        """`arguments`: those of the forward may be deferred."""
        tree.body = [self.visit(statement) for statement in tree.body]
        asked = _Ask(functools.partial(self.may_be_deferred, names=self._names(tree, arguments)))
        tree.body = [asked.visit(statement) for statement in tree.body]

    def _names(self, tree: ast.FunctionDef, arguments: bool) -> set[str]:
        """Names that may hold what is deferred."""
        of = tree.args
        parameters = (*of.posonlyargs, *of.args, *of.kwonlyargs, of.vararg, of.kwarg)
        names = {parameter.arg for parameter in parameters if parameter and arguments}
        given = []  # (what binds names, to what)
        for node in _own_nodes(tree):
            if isinstance(node, ast.Assign):
                given += [(target, node.value) for target in node.targets]
            elif isinstance(node, (ast.For, ast.comprehension)):
                given.append((node.target, node.iter))
        while True:
            bound = [target for target, of in given if self.may_be_deferred(of, names)]
            found = {node.id for target in bound for node in ast.walk(target) if isinstance(node, ast.Name)}
            if found <= names:
                return names
            names |= found


class _Ask(ast.NodeTransformer):
    """Asks for the tensor of no expression that is never deferred: sizes, masks, what has been asked for before."""

    def __init__(self, may_be_deferred: Callable[[ast.expr], bool]):
        self.may_be_deferred = may_be_deferred

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        is_asked = isinstance(node.func, ast.Name) and node.func.id == "_ltx_value"
        return node.args[0] if is_asked and not self.may_be_deferred(node.args[0]) else node

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        return node


_NOT_FOLLOWED = (ast.AnnAssign, ast.AugAssign, ast.Await, ast.Dict, ast.Lambda, ast.NamedExpr, ast.Try, ast.Yield)


def _writes(node: ast.AST) -> bool:
    """x.mul_(..), relu_(x), add(.., out=x): it may change what a value that is put off is to be made of."""
    if not isinstance(node, ast.Call):
        return False
    name = getattr(node.func, "attr", getattr(node.func, "id", ""))
    return (name.endswith("_") and not name.endswith("__")) or any(k.arg in ("out", "inplace") for k in node.keywords)


def _own_nodes(tree: ast.FunctionDef) -> Iterator[ast.AST]:
    """All nodes but those of functions within, which get tensors and return them."""
    nodes = list(tree.body)
    while nodes:
        node = nodes.pop()
        yield node
        if not isinstance(node, ast.FunctionDef):
            nodes += ast.iter_child_nodes(node)


def deferred_tree(function: Callable, defer: Defer, arguments: bool = False) -> Union[ast.FunctionDef, str]:
    """The tree of a function of a library with its operations handed to helpers, or why not.

    `arguments`: it may be called with deferred ones.
    """
    tree = parsed(function)
    if isinstance(tree, str):
        return tree
    other = [
        type(node).__name__
        for node in ast.walk(tree)
        if isinstance(node, _NOT_FOLLOWED) and getattr(node, "values", True)
    ]
    other += ["With" for node in _own_nodes(tree) if isinstance(node, ast.With)]  # what is put off leaves it
    other += ["in-place operation" for node in _own_nodes(tree) if _writes(node) or defer.writes(node)]
    if other or innermost(function).__code__.co_cellvars:  # a function within the forward that uses its variables
        what = other[0] if other else "closure"
        return f"its {tree.name} holds what this package does not follow ({what})"
    defer.body_of(tree, arguments)
    return tree


def deferred_forward(stock: Callable, kind: str, tree: ast.FunctionDef, **helpers: Callable) -> Callable:
    """The own forward for a class's `stock`: its code where `stock_only`, else `tree`, whose results it computes.

    Forwards that are deferred themselves call what `tree` says directly (INNER) and may get a deferred value back.
    """
    inner = recompiled(innermost(stock), tree, **helpers)
    outer = parsed(stock)
    module = ast.Name(outer.args.args[0].arg, ast.Load())

    def runs_stock(module: nn.Module) -> bool:
        return type(module).forward is not stock or stock_only()

    def run_stock(module: nn.Module, *args: Any, **options: Any) -> Any:
        forward = type(module).forward  # somebody may have put another there
        return (innermost(stock) if forward is stock else forward)(module, *args, **options)

    outer.body = [
        ast.If(call("_ltx_runs_stock", module), [ast.Return(passed_on(outer, "_ltx_run_stock"))], []),
        ast.Return(call("_ltx_value", passed_on(outer, "_ltx_inner"))),
    ]
    helpers = {
        "_ltx_runs_stock": runs_stock,
        "_ltx_run_stock": run_stock,
        "_ltx_inner": inner,
        "_ltx_value": value,
    }
    forward = rewritten(stock, outer, kind, **helpers)
    if innermost(stock) is stock:  # else a decorator has a part in it
        setattr(forward, INNER, (stock, inner))
    return forward
