"""What an injection did, for people (`str`) and for programs (`to_dict`, `counts`)."""

from dataclasses import dataclass, field
from typing import Any, NamedTuple


class Injected(NamedTuple):
    kind: str  # "rms_norm", as `only` and `skip` call it
    cls: str
    name: str  # where it is in the model: "transformer_blocks.0.norm1"


class LeftAlone(NamedTuple):
    cls: str
    name: str
    reason: str


@dataclass
class InjectionReport:
    """Which modules run our kernels after an injection, and which were left alone and why."""

    injected: list[Injected] = field(default_factory=list)
    left_alone: list[LeftAlone] = field(default_factory=list)
    #: why nothing was done at all; empty otherwise
    disabled: str = ""

    @property
    def counts(self) -> dict[str, int]:
        """Injected modules by kind."""
        counts: dict[str, int] = {}
        for entry in self.injected:
            counts[entry.kind] = counts.get(entry.kind, 0) + 1
        return counts

    def to_dict(self) -> dict[str, Any]:
        return {
            "disabled": self.disabled,
            "counts": self.counts,
            "injected": [entry._asdict() for entry in self.injected],
            "left_alone": [entry._asdict() for entry in self.left_alone],
        }

    def __str__(self) -> str:
        if self.disabled:
            return f"ltx-kernels: nothing injected: {self.disabled}"
        groups: dict[tuple[str, str, str], list[str]] = {}
        for entry in self.injected:
            groups.setdefault(("injected", entry.kind, entry.cls), []).append(entry.name)
        for entry in self.left_alone:
            groups.setdefault(("left alone", entry.reason, entry.cls), []).append(entry.name)
        if not groups:
            return "ltx-kernels: nothing injected: no module that this package knows"
        header = ("", "class", "number", "kind, or why not", "first")
        rows = [header] + [(done, cls, str(len(names)), what, names[0]) for (done, what, cls), names in groups.items()]
        widths = [max(len(row[i]) for row in rows) for i in range(len(header) - 1)]
        lines = [
            "  ".join([*(cell.ljust(width) for cell, width in zip(row, widths)), row[-1]]).rstrip() for row in rows
        ]
        return "\n".join(lines)
