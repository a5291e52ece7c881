"""Query and key between their projections and the attention: norm and rotary embedding of both in one op.

The `__call__` of a processor is taken as it is. A norm of query or key is put off, and so are what is done to it until
the tensor is needed: splitting into heads, a rotation of all tokens or of some, a concatenation with the other stream.
When the one of query and key is needed, the other is computed with it.
"""

import ast
import functools
import inspect
import sys
from collections.abc import Iterator, Set
from typing import Any, Callable, Optional, Union

import torch
from torch import Tensor, nn

from .. import functional
from .blocks import call_plain, is_packed, left_to_inductor, project
from .deferred import Defer, Deferred, deferred_tree, stock_only, taken, value
from .norms import know_norm, norm_arguments
from .rewriting import call, is_of, parsed, recompiled, rewritten, self_attribute, submodule
from .rotations import PROCESSORS, ROPES, Tables


def _slice_of(index: Any, shape: torch.Size) -> Optional[tuple[int, int, int]]:
    """(dim, start, stop), where `x[index]` is a slice along dimension 1 or 2 and nothing else."""
    if type(index) is not tuple or len(index) not in (2, 3) or any(type(part) is not slice for part in index):
        return None
    dim = len(index) - 1
    part, size = index[dim], shape[dim]
    if part.step is not None or any(whole != slice(None) for whole in index[:dim]):
        return None
    # Dynamo knows no slice.indices.
    start, stop = 0 if part.start is None else part.start, size if part.stop is None else part.stop
    start, stop = start + size if start < 0 else start, stop + size if stop < 0 else stop
    return (dim, start, stop) if 0 <= start < stop <= size else None


class Projected(Deferred):
    """linear(x): one GEMM with the other projections of x, where their weights lie side by side."""

    operands = ("x", "linear")

    def __init__(self, step: "Step", x: Tensor, linear: nn.Module):
        self.step, self.x, self.linear = step, x, linear

    def compute(self) -> Tensor:
        x = self.x
        together = [other for other in self.step.projections if other.x is x]
        self.step.projections = [other for other in self.step.projections if other.x is not x]
        if len(together) == 1:
            return self.linear(x)
        for projected, result in zip(together, project(x, [each.linear for each in together])):
            projected.resolve(result)
        return self.computed


class Heads(Deferred):
    """norm(x), some of its tokens rotated.

    x is [B, S, H, d], or [B, H, S, d] where `tokens` is 2. The tokens [start, stop) are rotated by the rows of `tables`
    from `row` on.
    """

    operands = ("x", "whole", "arguments", "tables")

    def __init__(self, step: "Step", x: Tensor, arguments: Optional[dict], across: bool = False):
        self.step, self.x, self.arguments, self.across = step, x, arguments, across
        self.shape, self.dtype = x.shape, x.dtype
        self.tokens = 2 if x.dim() == 4 and x.stride(1) < x.stride(2) else 1
        self.whole, self.offset = x, 0  # the tensor that x is a slice of, along `tokens`, from `offset` on
        self.tables: Optional[Tables] = None
        self.start = self.stop = self.row = 0

    def resolve(self, computed: Tensor) -> Tensor:
        self.step.pending = [heads for heads in self.step.pending if heads is not self]
        return super().resolve(computed)

    def is_open(self) -> bool:
        return self.computed is None and self.tables is None

    def unflatten(self, dim: int, sizes: Any) -> Any:
        """Heads of a norm over all of them."""
        if self.is_open() and self.x.dim() == 3 and dim in (2, -1):
            return self.step.replace(self, Heads(self.step, self.x.unflatten(dim, sizes), self.arguments, across=True))
        return self.value().unflatten(dim, sizes)

    def __getitem__(self, index: Any) -> Any:
        """A slice of the tokens stays deferred."""
        if self.is_open() and self.x.dim() == 4 and self.x is self.whole:
            part = _slice_of(index, self.shape)
            if part is not None and part[0] == self.tokens:
                made = Heads(self.step, self.x[index], self.arguments, self.across)
                made.tokens, made.whole, made.offset = self.tokens, self.x, part[1]
                return self.step.replace(self, made)
        return self.value()[index]

    def rotated(self, tables: Tables, tokens: int, row: int) -> "Heads":
        """All its tokens, which are along dimension `tokens`."""
        made = Heads(self.step, self.x, self.arguments, self.across)
        if tokens == self.tokens:
            made.whole, made.offset = self.whole, self.offset
        made.tokens, made.tables, made.stop, made.row = tokens, tables, self.shape[tokens], row
        return self.step.replace(self, made)

    def in_place(self) -> "Heads":
        """The whole tensor, of which only these tokens are rotated."""
        made = Heads(self.step, self.whole, self.arguments, self.across)
        made.tokens, made.tables, made.row = self.tokens, self.tables, self.row
        made.start, made.stop = self.offset, self.offset + self.shape[self.tokens]
        return self.step.replace(self, made)

    def pairs_with(self, other: "Heads") -> bool:
        """One op computes both."""
        if other is self or other.computed is not None or other.dtype is not self.dtype:
            return False
        ours, theirs = self.arguments, other.arguments
        if (ours is None) != (theirs is None):
            return False
        if ours is not None and (ours["eps"] != theirs["eps"] or ours["norm"] != theirs["norm"]):
            return False
        same = self.across is other.across and self.tables is other.tables and self.tokens == other.tokens
        if not same or (self.start, self.stop, self.row) != (other.start, other.stop, other.row):
            return False
        if len(self.shape) != len(other.shape) or self.shape[0] != other.shape[0] or self.shape[-1] != other.shape[-1]:
            return False
        return self.tables is None or self.shape[self.tokens] == other.shape[self.tokens]

    def compute(self) -> Tensor:
        other = self.step.partner_of(self)
        swap = self.tokens == 2
        x, y = (None if each is None else each.x.transpose(1, 2) if swap else each.x for each in (self, other))
        cos = sin = None
        where = {}
        if self.tables is not None:
            cos, sin = self.tables.rows(self.row, self.row + self.stop - self.start)
            where = {"rope_start": self.start, "rope_len": self.stop - self.start}
            where["interleaved"] = self.tables.interleaved
        norm = self.arguments or _NO_NORM
        with_norm = _NO_NORM if other is None else other.arguments or _NO_NORM
        result, with_it = functional.qk_norm_rope(
            x,
            y,
            norm["weight"],
            with_norm["weight"],
            cos,
            sin,
            norm["eps"],
            across_heads=self.across,
            norm=norm["norm"],
            q_bias=norm["bias"],
            k_bias=with_norm["bias"],
            **where,
        )
        if other is not None:
            other.resolve(with_it.transpose(1, 2) if swap else with_it)
        return result.transpose(1, 2) if swap else result


_NO_NORM = {"weight": None, "bias": None, "eps": 1e-6, "norm": "none"}


class Joined(Deferred):
    """torch.cat of tokens, some of them deferred."""

    operands = ("parts",)

    def __init__(self, parts: list, dim: int, concatenate: Callable):
        self.parts, self.along, self.concatenate, self.dtype = parts, dim, concatenate, parts[0].dtype

    @property
    def shape(self) -> torch.Size:
        return self.value().shape

    def compute(self) -> Tensor:
        return self.concatenate(value(self.parts), dim=self.along)


def concatenated(parts: list[Tensor], dim: int) -> Tensor:
    """torch.cat, but heads [B, H, S, d] that lie as [B, S, H, d] stay so, and so does what attention makes of them.

    Strided parts are copied to their place: torch.cat of such took 14.9 of 132 ms of GPU time of a step of Stable
    Diffusion 3.5 (benchmarks/results/h200/tuning/kernels_of_a_step.txt).
    """
    if parts[0].dim() != 4 or all(map(Tensor.is_contiguous, parts)):
        return torch.cat(parts, dim=dim)
    if dim == 2 and all(part.dim() == 4 and part.stride(1) < part.stride(2) for part in parts):
        return concatenated([part.transpose(1, 2) for part in parts], 1).transpose(1, 2)
    alike = {(part.dim(), part.dtype, part.device, part.shape[0], part.shape[2:]) for part in parts}
    if dim != 1 or len(alike) > 1:
        return torch.cat(parts, dim=dim)
    sizes = [part.shape[1] for part in parts]
    whole = parts[0].new_empty(parts[0].shape[0], sum(sizes), *parts[0].shape[2:])
    for part, place in zip(parts, whole.split_with_sizes(sizes, dim=1)):
        place.copy_(part)
    return whole


class Step:
    """One call of a processor: what it has put off."""

    def __init__(self, conventions: tuple, own_convention: Optional[Callable]):
        self.pending: list[Heads] = []
        self.projections: list[Projected] = []
        self.is_compiled = torch.compiler.is_compiling()
        self.concatenate = torch.cat if self.is_compiled else concatenated
        self.conventions = conventions  # (function, its convention)
        self.own_convention = own_convention  # of a function that is defined within the processor
        self.made_from: tuple = ()
        self.tables: Optional[Tables] = None

    def replace(self, old: Optional[Heads], new: Heads) -> Heads:
        self.pending = [heads for heads in self.pending if heads is not old]
        self.pending.append(new)
        return new

    def partner_of(self, heads: Heads) -> Optional[Heads]:
        for other in self.pending:
            if heads.pairs_with(other):
                return other
        return None

    # What the operations of a processor become.

    def project(self, linear: Any, x: Any) -> Any:
        if self.is_compiled or type(linear) is not nn.Linear or not is_packed(linear):
            return call_plain(linear, value(x))
        projected = Projected(self, value(x), linear)
        self.projections.append(projected)
        return projected

    def follow(self, function: Callable, *args: Any, **options: Any) -> Any:
        """A function of the library that makes the projections."""
        followed = None if self.is_compiled else _followed.get(function)
        return function(*value(args), **options) if followed is None else followed(self, *args, **options)

    def norm(self, norm: Any, x: Any) -> Any:
        x = value(x)
        if taken(x) and x.dim() in (3, 4) and isinstance(norm, nn.Module):
            arguments = norm_arguments(norm, x.dtype, x.shape[-1])
            if arguments is not None:
                return self.replace(None, Heads(self, x, arguments, across=x.dim() == 3))
        return norm(x)

    def rope(self, function: Callable, x: Any, *args: Any, **options: Any) -> Any:
        convention = self.own_convention
        for known, its_convention in self.conventions:
            if function is known:
                convention = its_convention
        made = None if convention is None else convention(*args, **options)
        if made is not None:
            make, source, tokens = made
            tables = self._tables(make, *(source if type(source) in (list, tuple) else (source,)))
            result = None if tables is None else self._rotated(x, tables, tokens)
            if result is not None:
                return result
        return function(value(x), *value(args), **options)

    def _tables(self, *made_from: Any) -> Optional[Tables]:
        """made_from[0] of the rest: query and key come with the same, which is made once and known to be the same."""
        known = self.made_from
        if len(known) != len(made_from) or any(a is not b for a, b in zip(known, made_from)):
            self.made_from, self.tables = made_from, made_from[0](*made_from[1:])
        return self.tables

    def _rotated(self, x: Any, tables: Tables, tokens: int) -> Optional[Deferred]:
        is_joined = isinstance(x, Joined) and x.computed is None and x.along == tokens
        parts = [self._as_heads(part, tables, tokens) for part in (x.parts if is_joined else [x])]
        if None in parts or sum(part.shape[tokens] for part in parts) != tables.tokens():
            return None
        row = 0
        for i, part in enumerate(parts):
            parts[i] = part.rotated(tables, tokens, row)
            row += part.shape[tokens]
        return Joined(parts, tokens, self.concatenate) if is_joined else parts[0]

    def _as_heads(self, x: Any, tables: Tables, tokens: int) -> Optional[Heads]:
        """x as heads that `tables` can rotate."""
        if not (isinstance(x, Heads) and x.is_open()):
            x = value(x)
            if not taken(x):
                return None
            x = self.replace(None, Heads(self, x, None))
        cos = tables.cos
        width, size = cos.shape[-1], x.shape[-1]
        if len(x.shape) != 4 or width not in (size, size // 2) or size % 2 or cos.device != x.x.device:
            return None
        fits = (cos.dim() < 3 or cos.shape[0] in (1, x.shape[0])) and (
            cos.dim() < 4 or cos.shape[2] in (1, x.shape[3 - tokens])
        )
        return x if fits else None

    def cat(self, parts: Any, dim: int = 0) -> Any:
        if not any(isinstance(part, Deferred) for part in parts):
            return self.concatenate(parts, dim=dim)
        if len(parts) == 2 and all(isinstance(part, Heads) and part.computed is None for part in parts):
            rotated, rest = parts
            end = rotated.shape[dim]
            are_halves = rotated.whole is rest.whole and rotated.tokens == rest.tokens == dim and rest.is_open()
            if (
                are_halves
                and (rotated.offset, rest.offset) == (0, end)
                and end + rest.shape[dim] == rest.whole.shape[dim]
            ):
                self.pending = [heads for heads in self.pending if heads is not rest]
                return rotated.in_place()
        return Joined(list(parts), dim, self.concatenate)

    def put(self, x: Any, index: Any, rotated: Any) -> Any:
        """x, after x[index] = rotated."""
        are_heads = isinstance(x, Heads) and isinstance(rotated, Heads) and rotated.computed is None
        if are_heads and x.is_open() and rotated.whole is x.x:
            begin, size = rotated.offset, rotated.shape[rotated.tokens]
            if _slice_of(index, x.shape) == (rotated.tokens, begin, begin + size):
                return rotated.in_place()
        x, rotated = value(x), value(rotated)
        for waiting in [*self.pending, *self.projections]:
            waiting.value()  # of what x was: it may be what they are to be made of
        x[index] = rotated
        return x


def divide(x: Any, divisor: Any) -> Any:
    """x / divisor; Attention divides by a factor that is 1 in all but a few models."""
    x = value(x)
    if type(divisor) in (int, float) and divisor == 1 and isinstance(x, Tensor) and x.is_floating_point():
        return x
    return x / divisor


_HELPERS = {"_ltx_divide": divide, "_ltx_value": value, "_ltx_call_plain": call_plain}

# ---- processors

#: names of attributes that project, and of functions that do
_PROJECTIONS = (("to_q", "to_k", "to_v"), ("add_q_proj", "add_k_proj", "add_v_proj"))
_OUTPUT = ("attn.to_out[0]", "attn.to_out[1]", "attn.to_add_out")
_FOLLOWED = ("_get_qkv_projections", "_get_projections", "_get_added_kv_projections")

_FUSED = "Fused"  # fuse_qkv_projections puts FusedX in the place of X


class _DeferHeads(Defer):
    answered = ("unflatten",)
    gives_tensor = tuple(_HELPERS)

    def __init__(self, within: bool = False):
        self.within = within  # the step: what is returned stays in it

    @staticmethod
    def _step(method: str, *arguments: ast.expr, keywords: list = ()) -> ast.Call:
        function = ast.Attribute(ast.Name("_ltx_step", ast.Load()), method, ast.Load())
        return ast.Call(function, list(arguments), list(keywords))

    def visit_Call(self, node: ast.Call) -> ast.AST:
        function = node.func
        is_call_of_one = len(node.args) == 1 and not node.keywords
        if is_call_of_one and getattr(getattr(function, "value", None), "id", "") == "attn":
            for method, is_meant in (
                ("norm", "norm_" in function.attr),
                ("project", function.attr in sum(_PROJECTIONS, ())),
            ):
                if is_meant:
                    return self._step(method, submodule(function), self.visit(node.args[0]))
        if is_call_of_one and ast.unparse(function) in _OUTPUT:
            return call("_ltx_call_plain", submodule(function), self.value(self.visit(node.args[0])))
        if isinstance(function, ast.Name):
            followed, rotates = function.id in _FOLLOWED, function.id.startswith("apply_rotary_emb")
            if followed or rotates:
                self.generic_visit(node)
                return self._step("follow" if followed else "rope", function, *node.args, keywords=node.keywords)
        if isinstance(function, ast.Attribute) and function.attr == "cat":
            self.generic_visit(node)
            return self._step("cat", *node.args, keywords=node.keywords)
        return super().visit_Call(node)

    def visit_BinOp(self, node: ast.BinOp) -> ast.AST:
        if isinstance(node.op, ast.Div):
            self.generic_visit(node)
            return call("_ltx_divide", node.left, node.right)
        return super().visit_BinOp(node)

    def visit_Assign(self, node: ast.Assign) -> ast.AST:
        (target,) = node.targets if len(node.targets) == 1 else (None,)
        if not isinstance(target, ast.Subscript) or not isinstance(target.value, ast.Name):
            return super().visit_Assign(node)
        self.generic_visit(node)
        name, index = target.value.id, target.slice
        node.targets = [ast.Name(name, ast.Store())]
        node.value = self._step("put", ast.Name(name, ast.Load()), _as_index(index), node.value)
        return node

    @staticmethod
    def writes(node: ast.AST) -> bool:
        return Defer.writes(node) and not isinstance(node.value, ast.Name)  # else `put` does it

    def visit_Return(self, node: ast.Return) -> ast.AST:
        self.generic_visit(node)
        if not self.within:
            node.value = node.value and self.value(node.value)
        return node


def _as_index(node: ast.expr) -> ast.expr:
    """What stands between brackets, as an expression."""
    if isinstance(node, ast.Slice):
        bounds = [bound or ast.Constant(None) for bound in (node.lower, node.upper, node.step)]
        return ast.Call(ast.Name("slice", ast.Load()), bounds, [])
    if isinstance(node, ast.Tuple):
        return ast.Tuple([_as_index(item) for item in node.elts], ast.Load())
    return node


def _names(function: Callable) -> list[str]:
    return list(inspect.signature(function).parameters)


_processors: dict[type, tuple[Callable, Callable]] = {}  # class -> its __call__, what is run in its place
_followed: dict[Callable, Callable] = {}


def _follow(module: str) -> None:
    for name in _FOLLOWED:
        function = getattr(sys.modules[module], name, None)
        tree = deferred_tree(function, _DeferHeads(within=True), arguments=True) if is_of(function, module) else ""
        if not isinstance(tree, str):
            tree.args.args.insert(0, ast.arg("_ltx_step"))
            _followed[function] = recompiled(function, tree, **_HELPERS)


@functools.cache
def _rewritten_call(cls: type, stock: Callable) -> Union[Callable, str]:
    name = (cls.__module__, cls.__qualname__)
    if name not in PROCESSORS:
        return f"its processor {cls.__name__} is not one that this package knows"
    tree = deferred_tree(stock, _DeferHeads())
    if isinstance(tree, str):
        return tree
    step = ast.Assign([ast.Name("_ltx_step", ast.Store())], call("_ltx_begin"))
    tree.body.insert(0, ast.copy_location(step, tree.body[0]))
    found = [(getattr(sys.modules.get(module), name, None), module, rope) for (module, name), rope in ROPES.items()]
    conventions = tuple((f, rope) for f, module, rope in found if is_of(f, module) and _names(f)[1:] == _names(rope))
    own_convention = PROCESSORS[name]
    own = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node is not tree]
    if own_convention and [[a.arg for a in f.args.args[1:]] for f in own] != [_names(own_convention)]:
        return f"the rotation in its processor {cls.__name__} takes other arguments than this package knows"

    _follow(cls.__module__)

    def begin() -> Step:
        return Step(conventions, own_convention)

    return recompiled(stock, tree, _ltx_begin=begin, **_HELPERS)


def _fused_call(cls: type) -> Union[Callable, str]:
    fused = _rewritten_call(cls, cls.__call__)
    if not isinstance(fused, str):
        _processors[cls] = cls.__call__, fused
    return fused


def process(processor: Any, attn: nn.Module, hidden_states: Any, *args: Any, **options: Any) -> Any:
    """processor(..), in its rewritten form where its class is known: looked at on each call, for it may be changed."""
    if not left_to_inductor(hidden_states):
        cls = type(processor)
        stock, fused = _processors.get(cls, (None, None))
        if fused is not None and cls.__call__ is stock and not stock_only():
            return fused(processor, attn, hidden_states, *args, **options)
    return processor(attn, hidden_states, *args, **options)


class ParameterNames(Set):
    """The names that a processor takes, found when they are asked for: seldom, for there are hardly ever options.

    inspect.signature takes the host as long as launching a few kernels, and compiled code guards on all it looks at.
    """

    _from_iterable = set  # what its operators give

    def __init__(self, processor: Any):
        self.processor, self.found = processor, None

    def names(self) -> set[str]:
        if self.found is None:
            self.found = set(inspect.signature(self.processor.__call__).parameters)
        return self.found

    def __contains__(self, name: Any) -> bool:
        return name in self.names()

    def __iter__(self) -> Iterator[str]:
        return iter(self.names())

    def __len__(self) -> int:
        return len(self.names())


class _Process(ast.NodeTransformer):
    found = False

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        if self_attribute(node.func) == "processor":
            self.found = True
            return call("_ltx_process", node.func, *node.args, keywords=node.keywords)
        if ast.unparse(node) == "set(inspect.signature(self.processor.__call__).parameters.keys())":
            return call("_ltx_parameter_names", ast.parse("self.processor", mode="eval").body)
        return node


@functools.cache
def _forward(stock: Callable) -> Union[Callable, str]:
    tree = parsed(stock)
    if isinstance(tree, str):
        return tree
    process_calls = _Process()
    tree = process_calls.visit(tree)
    if not process_calls.found:
        return "its forward calls no processor"
    return rewritten(stock, tree, "attention", _ltx_process=process, _ltx_parameter_names=ParameterNames)


def projections(attn: nn.Module) -> Iterator[list[nn.Module]]:
    """The Linears of one input: of query, key and value, or of key and value alone."""
    for names in _PROJECTIONS:
        linears = [getattr(attn, name, None) for name in names]
        linears = [linear for linear in linears if type(linear) is nn.Linear]
        widths = [linear.in_features for linear in linears]
        if len(linears) > 1:
            yield linears if len(set(widths)) == 1 else linears[1:]


def attention(module: nn.Module) -> Union[Callable, str]:
    """The forward of an attention module; what it does itself stays, its processor's work on heads is fused."""
    cls = type(module.processor)
    fused = _fused_call(cls)
    if isinstance(fused, str):
        return fused
    other = cls.__name__[len(_FUSED) :] if cls.__name__.startswith(_FUSED) else _FUSED + cls.__name__
    other = getattr(sys.modules[cls.__module__], other, None)
    if inspect.isclass(other):
        _fused_call(other)
    for child in module.children():
        know_norm(type(child))
    return _forward(type(module).forward)
