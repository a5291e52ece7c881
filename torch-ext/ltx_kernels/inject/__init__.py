"""Put the kernels into a model of diffusers or transformers, and take them out again.

Neither library is imported: a class is recognised by the module that defines it and its name (and, where these do not
tell, by what it computes). Only instances are patched, never a class or a function of a library. Unknown modules are
left alone.
"""

import fnmatch
import functools
import inspect
import logging
import os
import re
from collections.abc import Iterable
from typing import Any, Callable, Optional, Union

from torch import nn

from . import diffusers, transformers
from .patching import Recipe, install, installed_kind, modules_of, uninstall
from .report import Injected, InjectionReport, LeftAlone
from .rewriting import is_made_of, is_of

__all__ = ["InjectionReport", "inject_optimized_kernels", "patch_rmsnorm", "remove_optimized_kernels"]

logger = logging.getLogger(__name__)

# What is worth a line in the report when it is left alone: a class that looks like what the package replaces.
_LOOKS_REPLACEABLE = re.compile(r"RMSNorm|(GLU|TransformerBlock)$")

#: what `only` and `skip` may name besides classes and modules
KINDS = {recipe.kind for recipe in diffusers.RECIPES.values()} | transformers.KINDS

# Parts that the own forward of a block or of a feed-forward calls (`install`), and that run the kernels when it does:
# with grad or under autocast neither does.
_PARTS = {"attention", "feed_forward", "gated_mlp", "gelu", "layer_norm"}
_WHOLES = {"transformer_block", "feed_forward"}

Names = Union[str, Iterable[str], None]


@functools.cache
def _recipe_for(cls: type) -> Optional[Recipe]:
    return diffusers.recipe_for(cls) or transformers.recipe_for(cls)


def _disabled() -> str:
    if os.environ.get("LTX_KERNELS_DISABLE", "") in ("", "0"):
        return ""
    logger.warning("ltx-kernels: LTX_KERNELS_DISABLE is set, nothing is injected")
    return "LTX_KERNELS_DISABLE is set"


def inject_optimized_kernels(model_or_pipeline: Any, *, only: Names = None, skip: Names = None) -> InjectionReport:
    """Let a model run the kernels of this package; undone by :func:`remove_optimized_kernels`.

    Call it after the model is loaded, best on its device; before or after offload, LoRA, a cache or ``compile``. Each
    call of an injected module decides anew: what the kernels cannot do as the module does it (float64, a gradient that
    an op has no formula for, a dtype the module would not return) runs the module's own code. Calling it again is
    harmless.

    Args:
        model_or_pipeline: any ``torch.nn.Module``, or a pipeline (all its models).
        only: leave everything else alone: kinds as the report names them ("rms_norm"), class names, or patterns of
            module names ("transformer_blocks.0.*").
        skip: leave these alone, named in the same way.

    Returns:
        A report: what runs the kernels now, what was left alone and why. ``print`` shows it as a table.

    Raises:
        TypeError: ``model_or_pipeline`` holds no module, or ``only`` or ``skip`` something other than names.
        ValueError: an entry of ``only`` or ``skip`` that matches nothing in this model.
    """
    modules = list(modules_of(model_or_pipeline))
    report = InjectionReport(disabled=_disabled())
    if report.disabled:
        return report
    choose = _Choice(only, skip)
    chosen = [choose(name, type(module)) for name, module in modules]
    choose.refuse_unmatched()  # before anything is changed
    by_name = dict(modules)
    for (name, module), is_chosen in zip(modules, chosen):
        reason = _inject(module, _is_part(name, by_name)) if is_chosen else "not chosen (only, skip)"
        cls, kind = type(module).__name__, installed_kind(module)
        if kind is not None:
            report.injected.append(Injected(kind, cls, name))
        elif _recipe_for(type(module)) or _LOOKS_REPLACEABLE.search(cls):
            report.left_alone.append(LeftAlone(cls, name, reason))
    return report


def _is_part(name: str, modules: dict[str, nn.Module]) -> bool:
    """Whether a module needs its own forward only within that of the block that it is a part of."""
    module, parent = modules[name], name.rpartition(".")[0]
    recipe = _recipe_for(type(module))
    if recipe is None or recipe.kind not in _PARTS or getattr(module, "norm_q", None) is not None:
        return False  # caches put hooks on attentions, under which those that norm their heads gain most
    if isinstance(modules.get(parent), nn.ModuleList):
        parent = parent.rpartition(".")[0]
    return name != parent and parent in modules and installed_kind(modules[parent]) in _WHOLES


def _inject(module: nn.Module, as_part: bool) -> str:
    """Apply the recipe of a module's class; returns why nothing was installed, if so."""
    recipe = _recipe_for(type(module))
    if recipe is None:
        return "not a class that this package knows"
    try:
        forward = recipe.plan(module)
    except (AttributeError, KeyError) as error:
        return f"its library is of another version: {error}"
    if isinstance(forward, str):
        return forward
    if not _same_parameters(type(module).forward, forward):
        return "its forward takes other parameters than the one that this package knows"
    if not (_is_read(type(module), forward) or _has_its_own_forward(type(module))):
        return "something else has replaced the forward of its class"
    if not install(module, forward, as_part):
        return "something else has replaced its forward (kernelize, another patch)"
    if recipe.installed is not None:
        recipe.installed(module)
    return ""


def _is_read(cls: type, forward: Callable) -> bool:
    """Whether a class is known by what its forward says or computes, and not by its name."""
    return diffusers.recipe_for(cls) is None or is_made_of(forward, cls.forward)


def _has_its_own_forward(cls: type) -> bool:
    """The one that its library gave it, or a base class of it."""
    base = next(base for base in cls.__mro__ if "forward" in vars(base))
    return is_of(cls.forward, base.__module__)


@functools.cache
def _same_parameters(stock: Callable, forward: Callable) -> bool:
    return list(inspect.signature(stock).parameters) == list(inspect.signature(forward).parameters)


class _Choice:
    """`only` and `skip` over module names, classes and kinds; an entry that matches nothing is a typing error."""

    def __init__(self, only: Names, skip: Names):
        self.only, self.skip = self._entries("only", only), self._entries("skip", skip)
        self.unmatched = {*(self.only or ()), *(self.skip or ())} - KINDS

    @staticmethod
    def _entries(argument: str, names: Names) -> Optional[list[str]]:
        if names is None or isinstance(names, str):
            return None if names is None else [names]
        entries = list(names) if isinstance(names, Iterable) else [names]
        for entry in entries:
            if not isinstance(entry, str):
                raise TypeError(f"{argument} names {entry!r}; kinds, class names or module names (str) are needed")
        return entries

    def __call__(self, name: str, cls: type) -> bool:
        recipe = _recipe_for(cls)
        kind = recipe and recipe.kind

        def matches(entries: list[str]) -> bool:
            found = [e for e in entries if e in (kind, cls.__name__) or fnmatch.fnmatchcase(name, e)]
            self.unmatched.difference_update(found)
            return bool(found)

        wanted = self.only is None or matches(self.only)
        return not (self.skip is not None and matches(self.skip)) and wanted

    def refuse_unmatched(self) -> None:
        if self.unmatched:
            raise ValueError(
                f"only/skip: {sorted(self.unmatched)} match no kind ({', '.join(sorted(KINDS))}), class name or module "
                "name of this model; names may hold * and ?"
            )


def remove_optimized_kernels(model_or_pipeline: Any) -> int:
    """Undo :func:`inject_optimized_kernels` and :func:`patch_rmsnorm` exactly.

    Args:
        model_or_pipeline: as for :func:`inject_optimized_kernels`.

    Returns:
        How many modules were restored; 0 for a model that was not touched.

    Raises:
        TypeError: ``model_or_pipeline`` holds no module.
    """
    restored = 0
    for _, module in modules_of(model_or_pipeline):
        if uninstall(module):
            restored += 1
            recipe = _recipe_for(type(module))
            if recipe is not None and recipe.removed is not None:
                recipe.removed(module)
    return restored


def patch_rmsnorm(model: Any) -> int:
    """Let only the RMSNorms of a model run :func:`rms_norm`: ``inject_optimized_kernels(model, only="rms_norm")``.

    Args:
        model: any ``torch.nn.Module``, or a pipeline.

    Returns:
        How many RMSNorms run it now.

    Raises:
        TypeError: ``model`` holds no module.
    """
    return inject_optimized_kernels(model, only="rms_norm").counts.get("rms_norm", 0)
