"""What ptxas says about each kernel (registers, shared memory, spills), from the logs that build_variant.py keeps.

python scripts/build_variant.py --backend cuda --ptxas-info FILE     writes the table
python scripts/ptxas_report.py FILE                                  fails if any kernel spills
python scripts/ptxas_report.py FILE --expect COMMITTED               and if it differs from the committed table
"""

from __future__ import annotations

import argparse
import csv
import re
import shutil
import subprocess
import sys
from pathlib import Path

# Bytes; registers are a thread's, smem is the static part of a block's.
COLUMNS = ("source", "arch", "registers", "smem", "stack", "spill_stores", "spill_loads", "kernel")


def parse(logs: dict[str, Path]) -> list[dict[str, str]]:
    """One row a kernel and architecture, from {source: log of its compile with --resource-usage}."""
    rows = []
    for source, log in logs.items():
        text = log.read_text(encoding="utf-8")
        for entry in re.split(r"^ptxas info\s*: Compiling entry function ", text, flags=re.MULTILINE)[1:]:
            kernel, arch = re.match(r"'([^']+)' for '(\w+)'", entry).groups()
            values = [
                match.group(1) if (match := re.search(r"(\d+) " + what, entry)) else "0"
                for what in ("registers", "bytes smem", "bytes stack frame", "bytes spill stores", "bytes spill loads")
            ]
            rows.append(dict(zip(COLUMNS, (source, arch, *values, kernel))))
    if rows and (filt := shutil.which("c++filt")):
        mangled = "\n".join(row["kernel"] for row in rows)
        names = subprocess.run([filt], input=mangled, capture_output=True, text=True, check=True).stdout.splitlines()
        for row, name in zip(rows, names):
            row["kernel"] = name
    return sorted(rows, key=lambda r: (r["source"], r["kernel"], r["arch"]))


def write(rows: list[dict[str, str]], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, delimiter="\t", lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def read(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file, delimiter="\t"))


def spills(rows: list[dict[str, str]], limit: int = 0) -> list[str]:
    """The kernels that store or load more than `limit` bytes a thread."""
    return [
        f"{r['source']} {r['arch']}: {r['kernel']} spills {r['spill_stores']} + {r['spill_loads']} bytes"
        for r in rows
        if max(int(r["spill_stores"]), int(r["spill_loads"])) > limit
    ]


def differences(rows: list[dict[str, str]], expected: list[dict[str, str]]) -> list[str]:
    """What is not as expected, a line a kernel and architecture."""

    def by_kernel(table: list[dict[str, str]]) -> dict[tuple[str, ...], tuple[str, ...]]:
        return {(r["source"], r["arch"], r["kernel"]): tuple(r[name] for name in COLUMNS[2:-1]) for r in table}

    found, wanted = by_kernel(rows), by_kernel(expected)
    return [
        f"{' '.join(key)}: {found.get(key, 'gone')}, expected {wanted.get(key, 'none')}"
        for key in sorted(found.keys() | wanted.keys())
        if found.get(key) != wanted.get(key)
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("file", type=Path, help="the table that build_variant.py --ptxas-info wrote")
    parser.add_argument("--max-spill", type=int, default=0, metavar="BYTES", help="what a thread may spill")
    parser.add_argument("--expect", type=Path, metavar="FILE", help="a table that this one must equal")
    args = parser.parse_args()
    rows = read(args.file)
    found = spills(rows, args.max_spill)
    changed = differences(rows, read(args.expect)) if args.expect else []
    most = max((int(r["registers"]) for r in rows), default=0)
    print(*found, sep="\n", end="\n" if found else "")
    print(f"{len(rows)} kernels, {len(spills(rows))} spill, {len(found)} too much; at most {most} registers a thread")
    if changed:
        print(*changed[:20], sep="\n")
        print(f"{len(changed)} kernels are not as in {args.expect}; `make ptxas-report` if that is meant")
    return 1 if found or changed or not rows else 0


if __name__ == "__main__":
    sys.exit(main())
