"""Instance patching: how an own `forward` is put on a module, found again under hooks, and taken off.

A patch is a bound method in the instance's __dict__, and nothing else is stored:
- `copy.deepcopy` binds it to the copy, which so runs on its own weights;
- its function is named "forward", so that a pickle holds `getattr(module, "forward")`: unpickled, the module runs its
  class's forward;
- accelerate and diffusers put their hooks around it, as around any forward.
Where hooks are there already, it is put below them, where the class's forward was: no hook is lost.
A part of a fused block has it under another name, and the block's forward calls it: see `install`.
"""

import contextlib
from collections.abc import Iterator
from types import MethodType
from typing import Any, Callable, NamedTuple, Optional, Union

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

from .._ops import add_op_namespace_prefix


class Recipe(NamedTuple):
    """What is done with the instances of a class."""

    kind: str  # what the report, `only` and `skip` call it
    plan: Callable[[nn.Module], Union[Callable, str]]  # the forward to install, or why the instance is left alone
    installed: Optional[Callable[[nn.Module], None]] = None
    removed: Optional[Callable[[nn.Module], None]] = None


#: of an own forward: (kind, the function itself)
MARK = "_ltx_kernels_forward"

#: where a part of a fused block has its own forward, see `install`
PART = "_ltx_kernels_part"

#: the CPU variant has no CUDA kernels; the CUDA variant has both
HAS_CUDA = add_op_namespace_prefix("").startswith("_ltx_kernels_cuda")


def own_forward(kind: str) -> Callable:
    """Decorate a function that is to be installed as a module's forward; `kind` is what the report calls it."""

    def mark(function: Callable) -> Callable:
        function.__name__ = "forward"  # see the module docstring: what a pickle looks up
        setattr(function, MARK, (kind, function))
        return function

    return mark


def kind_of(forward: Any) -> Optional[str]:
    """The kind of an own forward of this package (of any loaded version of it); None for anything else."""
    if not isinstance(forward, MethodType):  # a hook's wrapper
        return None
    # Whoever wraps a forward may copy its attributes (functools.wraps), and bind the wrapper to the module as well.
    kind, function = getattr(forward.__func__, MARK, (None, None))
    return kind if function is forward.__func__ else None


def is_plain(module: nn.Module, cls: type) -> bool:
    """Calling `module` would run `cls.forward`, or our forward in its place, and nothing else: no hook, no other class.

    Looked at on each call of a fused block, since hooks and adapters come and go; torch.compile guards on all of it.
    """
    if type(module) is not cls or module._forward_hooks or module._forward_pre_hooks:
        return False
    own = module.__dict__.get("forward")
    if own is None:
        return True
    if not isinstance(own, MethodType):  # a hook's wrapper
        return False
    # No getattr with a default on the method itself: to torch 2.11's dynamo a method has no __func__ then.
    function = own.__func__
    return getattr(function, MARK, (None, None))[1] is function or function is cls.forward


@contextlib.contextmanager
def at_rest() -> Iterator[None]:
    """The state in which a class is tried out, whatever the caller's: what is learnt is kept for the class.

    No fake tensors or other dispatch modes, no autocast, no gradients, no inference tensors.
    """
    with _disable_current_modes(), torch.autocast("cpu", enabled=False), torch.inference_mode(False), torch.no_grad():
        yield


def _slot(module: nn.Module) -> Optional[tuple[Any, str]]:
    """(owner, attribute) of the innermost forward, below all hooks; None where it is neither stock nor ours."""

    def is_known(forward: Any) -> bool:
        if not isinstance(forward, MethodType) or forward.__self__ is not module:
            return False
        # Taking a hook off or unpickling leaves the class's forward behind as an attribute of the instance.
        return forward.__func__ is type(module).forward or kind_of(forward) is not None

    own = module.__dict__
    if "forward" not in own or is_known(own["forward"]):
        return module, "forward"
    if is_known(own.get("_old_forward")):  # accelerate
        return module, "_old_forward"
    references = getattr(own.get("_diffusers_hook"), "_fn_refs", None)
    if references:  # the first one registered is the innermost
        name = "forward" if references[0].original_forward is None else "original_forward"
        if is_known(getattr(references[0], name)):
            return references[0], name
    return None


def installed_kind(module: nn.Module) -> Optional[str]:
    """The kind of the own forward that is installed on `module`, under hooks or not."""
    slot = _slot(module)
    return (kind_of(vars(slot[0]).get(slot[1])) or kind_of(module.__dict__.get(PART))) if slot else None


def install(module: nn.Module, forward: Callable, as_part: bool = False) -> bool:
    """Make `forward` the innermost forward of `module`. False where another library has replaced the forward.

    `as_part`: where there are no hooks, only the own forward of the block that the module is a part of will run it
    (`call_forward`). Whatever else calls the module runs its class's. In a compiled block that is left to Inductor each
    own forward that dynamo sees is guarded on, 10 guards a part: SDXL's seven took the host 1 to 2 us in each call.
    """
    slot = _slot(module)
    if slot is None:
        return False
    uninstall(module)
    if as_part and "forward" not in module.__dict__:
        slot = module, PART
    setattr(slot[0], slot[1], MethodType(forward, module))
    return True


def uninstall(module: nn.Module) -> bool:
    """Undo `install`; False where nothing was installed."""
    if installed_kind(module) is None:
        return False
    if module.__dict__.pop(PART, None) is not None:
        return True
    owner, name = _slot(module)
    if owner is module and name == "forward":
        del module.__dict__["forward"]
    else:
        setattr(owner, name, MethodType(type(module).forward, module))
    return True


def modules_of(target: Any) -> Iterator[tuple[str, nn.Module]]:
    """(name, module) of all modules of a module, or of a pipeline: an object with `components` or with modules."""
    if isinstance(target, nn.Module):
        yield from target.named_modules()
        return
    components = getattr(target, "components", None)
    parts = components if isinstance(components, dict) else getattr(target, "__dict__", {})
    models = {name: part for name, part in parts.items() if isinstance(part, nn.Module)}
    if not models:
        raise TypeError(
            f"model_or_pipeline is a {type(target).__name__} without any torch.nn.Module; a model or a pipeline is "
            "needed"
        )
    seen = set()
    for name, model in models.items():
        yield from model.named_modules(prefix=name, memo=seen)
