#!/usr/bin/env python3
"""Models end to end in one table: stock, compiled and injected, what injection brings, and where it brings least.

    python benchmarks/summary.py                                   all e2e_*.json of benchmarks/results/h200
    python benchmarks/summary.py FOLDER e2e_flux.json              of a folder, of a file

A line a workload, medians in ms (a token's, where it decodes); `?` behind one of a run that was interrupted. Two ratios
must not be below 1: stock / injected, and compiled / injected + compile. Lines are in order of the lower one, so the
worst is the last (0 where ours failed); below it stands whether it is slower beyond the spread of its samples.
GPU/floor: GPU time of the injected model over that of its GEMMs and attention.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from _results import INTERRUPTED, ROOT, WORKLOAD, by_problem, columned, read_result, shown_path
from compare import TOLERANCE, verdict

CONFIGURATIONS = ("stock", "compiled", "injected", "injected_compiled")
RATIOS = {"stock/injected": ("stock", "injected"), "compiled/injected_compiled": ("compiled", "injected_compiled")}
HEAD = ["workload", "shape", "dtype", *CONFIGURATIONS, *RATIOS, "GPU/floor"]


def cell(row: dict | None) -> str:
    if not row or row["us_median"] is None:
        return "-"
    return f"{row['us_median'] / 1e3:.2f}" + ("?" if row.get("method", "").startswith(INTERRUPTED) else "")


def ratios_of(group: dict[str, dict]) -> dict[str, float]:
    """Of a problem's rows, those whose both sides were measured; 0 where ours failed."""
    medians = {name: row["us_median"] for name, row in group.items()}
    return {
        name: medians[base] / medians[ours] if medians[ours] else 0.0
        for name, (base, ours) in RATIOS.items()
        if medians.get(base) and ours in medians
    }


def over_floor(groups: dict, problem: tuple) -> float | None:
    op, shape, dtype = problem
    us = {
        kind: groups.get((f"{op}:{kind}", shape, dtype), {}).get("injected", {}).get("us_median") or 0.0
        for kind in ("gpu", "gemm", "attention")
    }
    floor = us["gemm"] + us["attention"]
    return us["gpu"] / floor if us["gpu"] and floor else None


def summary(results: list[dict]) -> str:
    """The table and the worst line of it; empty where no result has a workload with a time."""
    lines = []
    for result in results:
        groups = by_problem(result["rows"])
        for problem, group in groups.items():
            if not (WORKLOAD.search(problem[0]) and any(row["us_median"] for row in group.values())):
                continue
            op, shape, dtype = problem
            ratios, floor = ratios_of(group), over_floor(groups, problem)
            cells = [op, "x".join(map(str, shape)), dtype, *(cell(group.get(name)) for name in CONFIGURATIONS)]
            cells += [f"{ratios[name]:.3f}" if name in ratios else "-" for name in RATIOS]
            cells.append(f"{floor:.3f}" if floor else "-")
            lines.append((min(ratios.values(), default=float("inf")), cells, ratios, group))
    if not lines:
        return ""
    lines.sort(key=lambda line: -line[0])
    worst, cells, ratios, group = lines[-1]
    text = columned([HEAD, *(line[1] for line in lines)], left=3)
    if not ratios:
        return text
    name = min(ratios, key=ratios.get)
    base, ours = RATIOS[name]
    meaning = {"lost": group[ours].get("reason"), "slower": "slower beyond the spread", "same": "within the spread"}
    what = verdict(group[base], group[ours], TOLERANCE)
    return f"{text}\nworst: {cells[0]} {cells[1]}, {name} {worst:.3f}: {meaning.get(what, what)}"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("results", type=Path, nargs="*", default=[ROOT / "benchmarks" / "results" / "h200"])
    args = parser.parse_args(argv)
    paths = [
        path for given in args.results for path in (sorted(given.glob("e2e_*.json")) if given.is_dir() else [given])
    ]
    results = [read_result(path) for path in paths]
    for path, result in zip(paths, results):
        print(f"{shown_path(path)}: {result['device']}, torch {result['torch']}, {result['date'][:10]}")
    text = summary(results)
    print(text or "no result of a model")
    return 0 if text else 1


if __name__ == "__main__":
    sys.exit(main())
