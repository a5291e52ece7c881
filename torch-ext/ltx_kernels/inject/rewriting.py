"""A class's own forward with a few of its expressions handed to our ops.

transformers has a hundred decoder layers, MLPs and attentions that differ in everything but the expressions worth
fusing. So no forward is copied here: the source of the class's forward is read, the expressions are replaced in its
syntax tree, and what comes out is compiled as a function of its own over the live globals of the stock module. All else
stays what it is: the signature, the keyword arguments, another version's additions. A traceback shows the stock lines.

The source is believed only if it compiles to the very bytecode that the class runs. The helpers that the expressions
are replaced with reach the function as closure variables: nothing is written into a module of the library.
"""

import ast
import copy
import functools
import inspect
from collections.abc import Sequence
from types import CellType, CodeType, FunctionType
from typing import Any, Callable, Optional, Union

from .patching import own_forward


def parsed(forward: Callable) -> Union[ast.FunctionDef, str]:
    """A syntax tree of a stock forward, to be changed; or why it cannot be had."""
    return copy.deepcopy(_parsed(forward))


@functools.cache
def _parsed(forward: Callable) -> Union[ast.FunctionDef, str]:
    stock = innermost(forward)
    if not isinstance(stock, FunctionType) or stock.__code__.co_freevars or _rewrapped(forward, stock) is None:
        return "its forward is a closure, or wrapped by a decorator that this package cannot look into"
    code = stock.__code__
    try:
        module, fingerprints = _compiled("".join(inspect.findsource(stock)[0]), code.co_filename)
    except (OSError, TypeError, SyntaxError, ValueError):
        return "the source of its forward is not there"
    if _fingerprint(code) not in fingerprints:
        return "the source of its forward is not what it runs"
    named = (node for node in ast.walk(module) if isinstance(node, ast.FunctionDef) and node.name == code.co_name)
    (tree,) = (node for node in named if _first_line(node) == code.co_firstlineno)
    tree.decorator_list = []  # `rewritten` puts what they made of it around the new function
    arguments = tree.args
    for argument in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, arguments.vararg, arguments.kwarg):
        if argument is not None:
            argument.annotation = None  # nothing is evaluated again: `rewritten` takes what the stock function has
    tree.returns = None
    arguments.defaults = [ast.Constant(None) for _ in arguments.defaults]
    arguments.kw_defaults = [default and ast.Constant(None) for default in arguments.kw_defaults]
    return tree


@functools.lru_cache(maxsize=1)
def _compiled(source: str, filename: str) -> tuple[ast.Module, frozenset]:
    """The syntax tree of a file, and the fingerprints of all its functions.

    The whole file: Python 3.11 compiles a method call on an imported name in another way than one on any name.
    """
    module = ast.parse(source)
    codes, fingerprints = [compile(module, filename, "exec", dont_inherit=True)], set()
    while codes:
        code = codes.pop()
        fingerprints.add(_fingerprint(code))
        codes += [const for const in code.co_consts if isinstance(const, CodeType)]
    return module, frozenset(fingerprints)


def _first_line(function: ast.FunctionDef) -> int:
    return min(node.lineno for node in (function, *function.decorator_list))


def innermost(forward: Callable) -> Callable:
    """The function that a class's author wrote, below decorators."""
    while hasattr(forward, "__wrapped__"):
        forward = forward.__wrapped__
    return forward


def is_of(function: Callable, module: str) -> bool:
    """Whether the author of a module wrote it, and nobody has wrapped it since."""
    return not hasattr(function, "__wrapped__") and getattr(function, "__module__", None) == module


def is_made_of(forward: Callable, stock: Callable) -> bool:
    """Whether a forward is `rewritten`, from `stock`, and not one of our own."""
    return innermost(forward).__globals__ is getattr(innermost(stock), "__globals__", None)


def _rewrapped(wrapper: Callable, inner: Callable) -> Optional[Callable]:
    """What decorators made of a function, made of `inner`; None where they do not just close over the function."""
    if not hasattr(wrapper, "__wrapped__"):
        return inner
    inner = _rewrapped(wrapper.__wrapped__, inner)
    cells = getattr(wrapper, "__closure__", None) or ()
    try:
        holds = [cell.cell_contents is wrapper.__wrapped__ for cell in cells]
    except ValueError:  # an empty cell
        return None
    if inner is None or holds.count(True) != 1 or not isinstance(wrapper, FunctionType):
        return None
    cells = tuple(CellType(inner) if held else cell for held, cell in zip(holds, cells))
    made = FunctionType(wrapper.__code__, wrapper.__globals__, wrapper.__name__, wrapper.__defaults__, cells)
    made.__kwdefaults__ = wrapper.__kwdefaults__
    functools.update_wrapper(made, inner)
    return made


def _fingerprint(code: CodeType) -> tuple:
    """What a function runs, and where it is."""
    consts = tuple(_fingerprint(c) if isinstance(c, CodeType) else (type(c), repr(c)) for c in code.co_consts)
    return code.co_firstlineno, code.co_code, consts, code.co_names, code.co_varnames, code.co_flags


def rewritten(forward: Callable, tree: ast.FunctionDef, kind: str, **helpers: Callable) -> Callable:
    """The forward that a changed tree of `forward` says, which may use the names of `helpers`."""
    return own_forward(kind)(recompiled(forward, tree, **helpers))


def recompiled(function: Callable, tree: ast.FunctionDef, **helpers: Any) -> Callable:
    """What a changed tree of `function` says, within its decorators."""
    stock = innermost(function)
    module = ast.parse(f"def make({', '.join(helpers)}):\n    return {tree.name}")
    module.body[0].body.insert(0, tree)
    namespace: dict[str, Any] = {}
    # Over the globals of the stock module, so that whatever changes there is seen; `make` goes elsewhere.
    exec(compile(ast.fix_missing_locations(module), stock.__code__.co_filename, "exec"), stock.__globals__, namespace)
    made = namespace["make"](**helpers)
    made.__defaults__, made.__kwdefaults__ = stock.__defaults__, stock.__kwdefaults__
    made.__annotations__, made.__qualname__ = dict(stock.__annotations__), stock.__qualname__
    return _rewrapped(function, made)


def call(function: str, *arguments: ast.expr, keywords: Sequence[ast.keyword] = ()) -> ast.Call:
    return ast.Call(ast.Name(function, ast.Load()), list(arguments), list(keywords))


def passed_on(tree: ast.FunctionDef, function: str) -> ast.Call:
    """The call of `function` with all arguments of `tree`."""
    arguments = tree.args
    positional = [ast.Name(a.arg, ast.Load()) for a in (*arguments.posonlyargs, *arguments.args)]
    if arguments.vararg:
        positional.append(ast.Starred(ast.Name(arguments.vararg.arg, ast.Load()), ast.Load()))
    keywords = [ast.keyword(a.arg, ast.Name(a.arg, ast.Load())) for a in arguments.kwonlyargs]
    if arguments.kwarg:
        keywords.append(ast.keyword(None, ast.Name(arguments.kwarg.arg, ast.Load())))
    return call(function, *positional, keywords=keywords)


def submodule(node: ast.expr) -> ast.expr:
    """The expression `module.name` or `module.name[0]` of a submodule, found before nn.Module.__getattr__ is asked.

    That is written in Python and takes the host as long as a few views of a tensor do.
    """
    is_attribute = isinstance(node, ast.Attribute)
    owner, name = (node.value, node.attr) if is_attribute else (submodule(node.value), str(node.slice.value))
    of_owner = ast.Attribute(ast.Attribute(owner, "_modules", ast.Load()), "get", ast.Load())
    return ast.BoolOp(ast.Or(), [ast.Call(of_owner, [ast.Constant(name)], []), node])


def self_attribute(node: ast.AST) -> str:
    """The name in `self.name`; empty for any other expression."""
    is_self = isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self"
    return node.attr if is_self else ""
