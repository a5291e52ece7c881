#!/usr/bin/env python3
"""What got slower from one result to another, beyond their noise; exits 1 if anything did.

    python benchmarks/compare.py old.json new.json
    python benchmarks/compare.py old.json new.json --candidate ours --tolerance 0.05

A row is slower when its 10th percentile now lies above the 90th it had, and its median grew by more than the tolerance
(which is all there is where a row holds one sample, as a profile does). A row that had a time and now has a reason
instead counts as slower. Rows that only one of the files has are counted, not judged. Only our own candidates are
looked at: that a peer got slower is no regression. Exits 2 where there is nothing to compare: no result, another
device, or no common row.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from _results import columned, read_result, row_key

#: Growth of a median that is never noise.
TOLERANCE = 0.03
OURS = ("ours", "injected", "injected_compiled", "injected_graph")


def timed(result: dict, candidates: tuple[str, ...]) -> dict[tuple, dict]:
    return {row_key(row): row for row in result["rows"] if row["candidate"] in candidates}


def verdict(old: dict, new: dict, tolerance: float) -> str:
    """slower, faster, same, lost (no time any more) or "" (there was none)."""
    if old["us_median"] is None:
        return ""
    if new["us_median"] is None:
        return "lost"
    ratio = new["us_median"] / old["us_median"]
    if new["us_p10"] > old["us_p90"] and ratio > 1 + tolerance:
        return "slower"
    return "faster" if new["us_p90"] < old["us_p10"] and ratio < 1 / (1 + tolerance) else "same"


def compare(old: dict, new: dict, candidates: tuple[str, ...], tolerance: float) -> tuple[list[list[str]], dict]:
    """(a line for each row that changed, the worst first; how many rows of each verdict)."""
    before, after = timed(old, candidates), timed(new, candidates)
    counts = {"slower": 0, "lost": 0, "faster": 0, "same": 0, "only in one": len(before.keys() ^ after.keys())}
    changed = []
    for key in before.keys() & after.keys():
        was, now = before[key], after[key]
        what = verdict(was, now, tolerance)
        if not what:
            continue
        counts[what] += 1
        if what == "same":
            continue
        op, shape, dtype, candidate = key
        ratio = now["us_median"] / was["us_median"] if what != "lost" else float("inf")
        spreads = [f"{r['us_p10']:.1f} {r['us_median']:.1f} {r['us_p90']:.1f}" for r in (was, now) if r["us_median"]]
        cells = [what, op, "x".join(map(str, shape)), dtype, candidate, *spreads]
        cells += [f"{ratio:.3f}"] if what != "lost" else [now.get("reason", ""), ""]
        changed.append((-ratio, cells))
    return [cells for _, cells in sorted(changed)], counts


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path)
    parser.add_argument("--candidate", action="append", help=f"whose rows (default: {', '.join(OURS)})")
    parser.add_argument(
        "--tolerance", type=float, default=TOLERANCE, help=f"growth of a median that is never noise ({TOLERANCE})"
    )
    args = parser.parse_args(argv)
    old, new = read_result(args.old), read_result(args.new)
    if old["device"] != new["device"]:
        print(f"not to be compared: {old['device']} and {new['device']}", file=sys.stderr)
        return 2
    changed, counts = compare(old, new, tuple(args.candidate or OURS), args.tolerance)
    if not sum(counts[what] for what in ("slower", "lost", "faster", "same")):
        print("not to be compared: no row of both files has a time", file=sys.stderr)
        return 2
    if changed:
        head = ["", "op", "shape", "dtype", "candidate", "us p10 p50 p90, old", "new", "new/old"]
        print(columned([head, *changed], left=5))
    print(", ".join(f"{count} {what}" for what, count in counts.items()))
    return 1 if counts["slower"] or counts["lost"] else 0


if __name__ == "__main__":
    sys.exit(main())
