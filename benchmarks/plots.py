#!/usr/bin/env python3
"""Pictures of measured results: bandwidth over size, models end to end over their floor, errors beside eager's.

    python benchmarks/plots.py                                           the pictures of the README, into docs/images/
    python benchmarks/plots.py benchmarks/results/h200/*.json            every picture of each file, into .build/plots/
    python benchmarks/plots.py e2e_flux.json e2e_sdxl.json --kind e2e    one picture of several files

PNG and SVG. Each names the device, the date and its JSON. A light neutral background of its own keeps them legible on a
light and on a dark page.
"""

from __future__ import annotations

import argparse
import math
import sys
import textwrap
from pathlib import Path

import matplotlib

matplotlib.use("agg")
import matplotlib.pyplot as plt  # noqa: E402
from _results import ROOT, WORKLOAD, by_problem, read_result, shown_path  # noqa: E402

BACKGROUND, TEXT, GRID = "#f5f5f3", "#1f1f1f", "#cfcfca"
#: Each candidate has a colour and a marker: either alone tells it. All have a contrast of 3 or more on the background.
STYLE = {
    "ours": ("#0b5fa5", "o"),
    "eager": ("#c44e00", "s"),
    "torch": ("#00795a", "^"),
    "compile": ("#8a3f8a", "D"),
    "liger": ("#8a6a00", "v"),
    "quack": ("#b0244c", "P"),
    "flashinfer": ("#55585e", "X"),
    "stock": ("#c44e00", "s"),
    "compiled": ("#8a3f8a", "D"),
    "injected": ("#0b5fa5", "o"),
    "injected_compiled": ("#00795a", "^"),
    "injected_graph": ("#55585e", "X"),
    "injected_no_format": ("#8a6a00", "v"),
}
NAMES = {"torch": "torch.nn.functional", "compile": "torch.compile", "injected_compiled": "injected + compile"}
NAMES |= {"injected_graph": "injected, CUDA graph", "injected_no_format": "injected, memory format kept"}
RC = {
    "figure.facecolor": BACKGROUND,
    "axes.facecolor": BACKGROUND,
    "savefig.facecolor": BACKGROUND,
    **dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), TEXT),
    "grid.color": GRID,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "font.size": 10,
    "legend.frameon": False,
    "svg.hashsalt": "ltx-kernels",  # with it the same result gives the same file
}

Results = list[tuple[Path, dict]]


def panels(count: int, columns: int, height: float):
    """(figure, axes of the panels in use)"""
    columns = min(columns, count)
    lines = -(-count // columns)
    figure, grid = plt.subplots(
        lines, columns, figsize=(5.2 * columns, height * lines + 1.0), squeeze=False, layout="constrained"
    )
    axes = list(grid.flat)
    for unused in axes[count:]:
        unused.set_visible(False)
    return figure, axes[:count]


def finish(figure, title: str, results: Results) -> None:
    """Title above; device, date and source below; a legend beside, of the labels that any panel has."""
    devices = " · ".join(dict.fromkeys(f"{r['device']}, torch {r['torch']}, {r['date'][:10]}" for _, r in results))
    sources = ", ".join(path.name for path, _ in results)
    figure.suptitle(title, fontsize=12)
    source = textwrap.fill(f"{devices} · {sources}", int(16 * figure.get_figwidth()))
    figure.supxlabel(source, fontsize=8, x=0.01, ha="left")
    entries = {label: handle for ax in figure.axes for handle, label in zip(*ax.get_legend_handles_labels())}
    if entries:
        figure.legend(entries.values(), entries.keys(), loc="outside right upper", fontsize=9)


def size_label(nbytes: float, _position=None) -> str:
    for unit, name in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if nbytes >= unit:
            return f"{nbytes / unit:g} {name}"
    return f"{nbytes:g} B"


def ms_label(us: float) -> str:
    return f"{us / 1e3:.0f} ms" if us >= 1e5 else f"{us / 1e3:.3g} ms"


def bandwidth(results: Results):
    """GB/s of the bytes that each op must move over their number, a panel an op, and a copy as the roof."""
    rows = [
        row for _, result in results for row in result["rows"] if row["us_median"] and row["bytes"] and row["copy_us"]
    ]
    rows = [row for row in rows if ":" not in row["op"] and row["dtype"] == "bf16"]
    ops = list(dict.fromkeys(row["op"] for row in rows))
    if not ops:
        return None
    figure, axes = panels(len(ops), 3, 3.4)
    for ax, op in zip(axes, ops):
        of_op = [row for row in rows if row["op"] == op]
        copies: dict[float, float] = {}
        for row in of_op:
            size = 2.0 ** round(math.log2(row["bytes"]), 1)  # nearly as many bytes are one point of the line
            copies[size] = max(copies.get(size, 0.0), row["bytes"] / row["copy_us"] / 1e3)
        ax.plot(*zip(*sorted(copies.items())), color=TEXT, linestyle="--", linewidth=1.2, label="copy of as many bytes")
        for candidate in STYLE:
            points = [(r["bytes"], r["bytes"] / r["us_median"] / 1e3) for r in of_op if r["candidate"] == candidate]
            if points:
                color, marker = STYLE[candidate]
                size = 42 if candidate == "ours" else 26
                label = NAMES.get(candidate, candidate)
                ax.scatter(*zip(*points), color=color, marker=marker, s=size, alpha=0.85, linewidths=0, label=label)
        ax.set_xscale("log", base=2)
        exponents = [math.log2(nbytes) for nbytes in copies]
        step = max(1, round((max(exponents) - min(exponents)) / 5))
        ticks = [2.0**e for e in range(math.floor(min(exponents)), math.ceil(max(exponents)) + 1, step)]
        ax.set_xticks(ticks, [size_label(tick) for tick in ticks])
        ax.minorticks_off()
        ax.set_ylim(bottom=0)
        ax.set_title(op, fontsize=11)
        ax.set_xlabel("bytes read and written at least")
        ax.set_ylabel("GB/s")
    finish(figure, "Bandwidth over size, bf16; each point is a shape", results)
    return figure


def end_to_end(results: Results):
    """A bar each configuration, a panel each workload, and the floor where the file has it."""
    groups = {key: group for _, result in results for key, group in by_problem(result["rows"]).items()}
    shown = {key: group for key, group in groups.items() if WORKLOAD.search(key[0])}
    if not shown:
        return None
    floors = 0
    most = max(len(group) for group in shown.values())
    figure, axes = panels(len(shown), 2, 0.55 + 0.36 * most)
    for ax, ((op, shape, dtype), group) in zip(axes, shown.items()):
        bars = [(name, group[name]["us_median"]) for name in STYLE if name in group and group[name]["us_median"]]
        floor = [
            groups.get((f"{op}:{kind}", shape, dtype), {}).get("injected", {}).get("us_median")
            for kind in ("gemm", "attention")
        ]
        for y, (name, us) in enumerate(bars):
            row = group[name]
            error = [[(us - row["us_p10"]) / 1e3], [(row["us_p90"] - us) / 1e3]]
            ax.barh(y, us / 1e3, color=STYLE[name][0], height=0.72, xerr=error, error_kw={"ecolor": TEXT, "lw": 1})
            ax.text(row["us_p90"] / 1e3, y, f"  {ms_label(us)}", va="center", fontsize=9)
        if any(floor):
            us = sum(us or 0.0 for us in floor)
            floors += 1
            ax.axvline(us / 1e3, color=TEXT, linestyle="--", linewidth=1.2)
            ax.text(us / 1e3, -0.62, f" floor {ms_label(us)}", fontsize=8, va="bottom")
        ax.set_yticks(range(len(bars)), [NAMES.get(name, name) for name, _ in bars])
        ax.set_ylim(len(bars) - 0.5, -1.1)
        ax.set_xlim(right=1.2 * max((group[name]["us_p90"] for name, _ in bars), default=1.0) / 1e3)
        ax.grid(axis="y", visible=False)
        words = [op.replace(":", ", "), f"{'x'.join(map(str, shape))}, {dtype}"]
        ax.set_title((", " if len("".join(words)) < 44 else ",\n").join(words), fontsize=10)
        ax.set_xlabel("ms a token, median, p10 to p90" if ":decode[" in op else "ms, median, p10 to p90")
    title = "Models end to end, random weights"
    finish(figure, title + "; floor: the GEMMs and attention of the injected model" if floors else title, results)
    return figure


def errors(results: Results):
    """The error against fp64 of ours and of eager, a line each op and dtype: the largest over its shapes."""
    worst: dict[tuple[str, str], dict[str, float]] = {}
    for _, result in results:
        for (op, _, dtype), group in by_problem(result["rows"]).items():
            pair = {name: group[name]["error_fp64"] for name in ("ours", "eager") if name in group}
            if ":" in op or len(pair) < 2 or None in pair.values():
                continue
            known = worst.setdefault((op, dtype), dict.fromkeys(pair, 0.0))
            worst[op, dtype] = {name: max(known[name], pair[name]) for name in pair}
    if not worst:
        return None
    lines = sorted(worst, key=lambda key: (key[1], key[0]))
    figure, (ax,) = panels(1, 1, 0.8 + 0.27 * len(lines))
    figure.set_figwidth(8.0)
    for name in ("eager", "ours"):
        color, marker = STYLE[name]
        values = [worst[key][name] for key in lines]
        ax.scatter(values, range(len(lines)), color=color, marker=marker, s=40, label=name, zorder=3)
    for y, key in enumerate(lines):
        ax.plot(list(worst[key].values()), [y, y], color=TEXT, linewidth=0.8)
    values = [value for pair in worst.values() for value in pair.values() if value]
    if values and max(values) > 10 * min(values):
        ax.set_xscale("log")
    else:
        ax.xaxis.set_major_formatter(lambda value, _: f"{value:.1e}")
        ax.locator_params(axis="x", nbins=6)
    ax.set_yticks(range(len(lines)), [f"{op}, {dtype}" for op, dtype in lines])
    ax.set_ylim(len(lines) - 0.5, -0.5)
    ax.set_xlabel("RMS error relative to the RMS of the result; the largest over the shapes")
    finish(figure, "Error against fp64", results)
    return figure


KINDS = {"bandwidth": bandwidth, "e2e": end_to_end, "error": errors}
IMAGES = ROOT / "docs" / "images"
RESULTS = "benchmarks/results/h200"
#: The pictures of the README: name -> (kind, results).
README = {
    "rms_norm_bandwidth": ("bandwidth", [f"{RESULTS}/rmsnorm.json"]),
    "ltx_video_step": ("e2e", [f"{RESULTS}/e2e_ltx-2b.json"]),
}


def draw(
    kind: str, paths: list[Path], name: str, folder: Path, formats: tuple[str, ...] = ("png", "svg")
) -> list[Path]:
    """The files of one picture; none where the results have nothing of that kind."""
    with plt.rc_context(RC):
        figure = KINDS[kind]([(path, read_result(path)) for path in paths])
        if figure is None:
            return []
        folder.mkdir(parents=True, exist_ok=True)
        written = []
        for suffix in formats:
            file = folder / f"{name}.{suffix}"
            source = " ".join(shown_path(path).as_posix() for path in paths)
            metadata = {"Date": None, "Source": source} if suffix == "svg" else {"Source": source}
            figure.savefig(file, dpi=140, metadata=metadata)
            written.append(file)
        plt.close(figure)
    return written


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("results", type=Path, nargs="*", help="JSON files (default: those of the README's pictures)")
    parser.add_argument("--kind", choices=KINDS, help="one picture of all files")
    parser.add_argument("--out", type=Path, default=ROOT / ".build" / "plots")
    args = parser.parse_args(argv)
    written = []
    if not args.results:
        for name, (kind, paths) in README.items():
            written += draw(kind, [ROOT / path for path in paths], name, IMAGES, ("svg",))
    elif args.kind:
        written += draw(args.kind, args.results, args.kind, args.out)
    else:
        for path in args.results:
            for kind in KINDS:
                written += draw(kind, [path], f"{path.stem}_{kind}", args.out)
    for file in written:
        print(shown_path(file))
    return 0 if written else 1


if __name__ == "__main__":
    sys.exit(main())
