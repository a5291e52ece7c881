"""The one schema of every measured result, and the environment that goes with it.

{device, driver, torch, cuda, date, commit, library_sha256, variant, command, rows: [{op, shape, dtype, candidate,
us_p10, us_median, us_p90, bytes, copy_us, error_fp64, and where they apply us_min, reason, method}]}

commit: what the library was built from. variant: its id, a digest of its sources. bytes: the fewest that the op must
move (each input read once, each output written once). copy_us: the median of a copy of as many bytes in the same run.
error_fp64: RMS error against fp64 relative to the RMS of the result. A candidate that could not be timed (absent,
failed, wrong) is a row without times and with its `reason`.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import platform
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable
from datetime import datetime, timezone
from pathlib import Path
from typing import NoReturn

import torch

ROOT = Path(__file__).resolve().parent.parent
REPO_ID, VERSION = "org/ltx-kernels", 1

HEADER = {
    "device": str,
    "driver": str,
    "torch": str,
    "cuda": str,
    "date": str,
    "commit": str,
    "library_sha256": str,
    "command": str,
    "rows": list,
}
ROW = {
    "op": str,
    "shape": list,
    "dtype": str,
    "candidate": str,
    "us_p10": (int, float, None),
    "us_median": (int, float, None),
    "us_p90": (int, float, None),
    "bytes": (int,),
    "copy_us": (int, float, None),
    "error_fp64": (int, float, None),
}
OPTIONAL = {"us_min": (int, float), "reason": str, "method": str}
OPTIONAL_HEADER = {"variant": str}  # results from before it was written have none
TIMES = ("us_p10", "us_median", "us_p90")
#: How the method of a row begins whose samples a signal ended: it is measured again.
INTERRUPTED = "interrupted: "
#: The ops of a row that is a model's, not one of a kind of its kernels.
WORKLOAD = re.compile(r":(step|prefill|decode(\[[^:]*\])?|pipeline\[[^:]*\])$")


def _is(value, types) -> bool:
    types = types if isinstance(types, tuple) else (types,)
    if value is None:
        return None in types
    return isinstance(value, tuple(t for t in types if t is not None)) and not isinstance(value, bool)


def problems(result: dict) -> list[str]:
    """What is wrong with a result; empty when it is of the schema."""
    if not isinstance(result, dict):
        return ["the file holds no object"]
    found = [f"{key} is missing" for key in HEADER if key not in result]
    known = {**HEADER, **OPTIONAL_HEADER}
    found += [f"{key} is not of the schema" for key in result if key not in known]
    found += [f"{key} is {result[key]!r}" for key in known if key in result and not _is(result[key], known[key])]
    if found:
        return found
    if not re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", result["date"]):
        found.append(f"date is {result['date']!r}; like 2026-01-31T12:00:00Z is needed")
    if not re.fullmatch(r"[0-9a-f]{64}|none", result["library_sha256"]):
        found.append(f"library_sha256 is {result['library_sha256']!r}")
    if not result["rows"]:
        found.append("there are no rows")
    seen = set()
    for i, row in enumerate(result["rows"]):
        found += [f"row {i}: {problem}" for problem in _row_problems(row)]
        if not found:
            key = row_key(row)
            found += [f"row {i}: {key} is there twice"] if key in seen else []
            seen.add(key)
    return found


def _row_problems(row: dict) -> list[str]:
    if not isinstance(row, dict):
        return [f"is {row!r}"]
    known = {**ROW, **OPTIONAL}
    found = [f"{key} is missing" for key in ROW if key not in row]
    found += [f"{key} is not of the schema" for key in row if key not in known]
    found += [f"{key} is {row[key]!r}" for key in known if key in row and not _is(row[key], known[key])]
    if found:
        return found
    if not all(isinstance(size, int) and size >= 0 for size in row["shape"]):
        found.append(f"shape is {row['shape']!r}")
    times = [row[key] for key in TIMES]
    if any(value is None for value in times):
        if times != [None] * 3 or not row.get("reason"):
            found.append("there is no time and no reason")
    elif not (0 < times[0] <= times[1] <= times[2] and math.isfinite(times[2])):
        found.append(f"p10, median, p90 are {times}")
    elif not 0 < row.get("us_min", times[0]) <= times[0]:
        found.append(f"us_min is {row['us_min']}, p10 {times[0]}")
    if row["error_fp64"] is not None and not (row["error_fp64"] >= 0 and math.isfinite(row["error_fp64"])):
        found.append(f"error_fp64 is {row['error_fp64']}")
    return found


def row_key(row: dict) -> tuple:
    return row["op"], tuple(row["shape"]), row["dtype"], row["candidate"]


def by_problem(rows: list[dict]) -> dict[tuple, dict[str, dict]]:
    """{(op, shape, dtype): {candidate: row}}"""
    problems: dict[tuple, dict[str, dict]] = {}
    for row in rows:
        *problem, candidate = row_key(row)
        problems.setdefault(tuple(problem), {})[candidate] = row
    return problems


def read_result(path: Path) -> dict:
    """A result of the schema. Where the file holds none the program ends, with 2: it is not what a script looks for."""
    try:
        result = json.loads(path.read_text())
        found = problems(result)
    except (OSError, ValueError) as error:
        found = [short(error)]
    if found:
        print(f"{path} is not a result: {found[0]}", file=sys.stderr)
        raise SystemExit(2)
    return result


# ---- the environment -------------------------------------------------------------------------------------


def load_package():
    """The package as a user loads it; LOCAL_KERNELS points at this project unless it is set."""
    os.environ.setdefault("LOCAL_KERNELS", f"{REPO_ID}={ROOT}")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    from kernels import get_kernel

    return get_kernel(REPO_ID, version=VERSION)


def _output(*command: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    except OSError:
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def commit(metadata: dict) -> str:
    """The commit that was measured: LTX_KERNELS_COMMIT, else what the variant was built from, else git's.

    git comes last: on a GPU host, .git may be a copy of an older state, or of none of what was copied there.
    """
    if os.environ.get("LTX_KERNELS_COMMIT"):
        return os.environ["LTX_KERNELS_COMMIT"]
    if kernel := metadata.get("provenance", {}).get("kernel"):
        return kernel["commit"] + ("-dirty" if kernel["dirty"] else "")
    if head := _output("git", "rev-parse", "HEAD"):
        return head + ("-dirty" if _output("git", "status", "--porcelain", "-uno") else "")
    return "unknown"


def device_name(device: str) -> str:
    if device == "cuda":
        return torch.cuda.get_device_name()
    model = ""
    if Path("/proc/cpuinfo").is_file():
        found = re.search(r"model name\s*:\s*(.+)", Path("/proc/cpuinfo").read_text())
        model = found.group(1).strip() if found else ""
    return f"CPU, {model or platform.processor() or platform.machine()}, {torch.get_num_threads()} threads"


def _relative(argument: str) -> str:
    """No path of the machine that measured."""
    return Path(argument).name if os.path.isabs(argument) else argument


def header(package, device: str) -> dict:
    variant = Path(package.__file__).parent
    library, metadata = next(variant.glob("*.abi3.so"), None), variant / "metadata.json"
    metadata = json.loads(metadata.read_text()) if metadata.is_file() else {}
    driver = _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader") if device == "cuda" else ""
    return {
        "device": device_name(device),
        "driver": driver.splitlines()[0] if driver else "none",
        "torch": torch.__version__,
        "cuda": str(torch.version.cuda or "none"),
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "commit": commit(metadata),
        "library_sha256": hashlib.sha256(library.read_bytes()).hexdigest() if library else "none",
        "variant": metadata.get("id", "unknown"),
        "command": shlex.join(["python", os.path.relpath(sys.argv[0], ROOT), *map(_relative, sys.argv[1:])]),
        "rows": [],
    }


def end_with(main: Callable[[], int]) -> NoReturn:
    """Ends the process with what `main` returns; on SIGINT (Ctrl-C, gpu_slice.sh) at once, with 130 and no traceback.

    `main` sees a KeyboardInterrupt, and writes what it has. Only one: `timeout` sends two signals.
    """

    def interrupt(_signal, _frame):
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        raise KeyboardInterrupt

    signal.signal(signal.SIGINT, interrupt)
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        print("stopped: the same command goes on", file=sys.stderr)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(130)  # an ordinary end waits for the compiler's workers


class ResultFile:
    """A result that grows group by group and is whole on disk at any time, so that a run can be resumed."""

    def __init__(self, path: Path, environment: dict, fresh: bool = False):
        self.path = path
        self.result = environment
        if path.is_file() and not fresh:
            old = json.loads(path.read_text())
            differing = [key for key in ("device", "torch", "library_sha256") if old.get(key) != environment[key]]
            if differing:
                print(f"{path} is of another {', '.join(differing)}: starting over", file=sys.stderr)
            else:
                self.result["rows"] = old["rows"]

    def candidates(self, op: str, shape, dtype: str) -> dict[str, dict]:
        """The rows of one problem, by candidate."""
        problem = (op, tuple(shape), dtype)
        return {row["candidate"]: row for row in self.result["rows"] if row_key(row)[:3] == problem}

    def replace(self, rows: list[dict]) -> None:
        """Put a group's rows in place of its old ones and write the file."""
        groups = {row_key(row)[:3] for row in rows}
        self.result["rows"] = [r for r in self.result["rows"] if row_key(r)[:3] not in groups] + rows
        self.path.parent.mkdir(parents=True, exist_ok=True)
        scratch = self.path.with_suffix(".tmp")
        scratch.write_text(dump(self.result))
        scratch.replace(self.path)


CPU_NOTE = "CPU figures are not GPU figures: they say that everything runs, and nothing about a GPU."


def default_out(device: str, name: str) -> Path:
    """Measured GPU results are kept in the repository, by chip; a CPU's are not worth it."""
    if device == "cpu":
        return ROOT / ".build" / "bench" / f"cpu-{name}.json"
    words = torch.cuda.get_device_name().lower().split()
    chip = next((word for word in words if any(c.isdigit() for c in word)), "gpu")
    return ROOT / "benchmarks" / "results" / chip / f"{name}.json"


def short(error: BaseException) -> str:
    """One line for a row's reason."""
    first = (str(error).strip().splitlines() or [""])[0]
    return f"{type(error).__name__}: {first}"[:160]


def count(text: str) -> int:
    """The type of an option that is a whole number from 1 on."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1 on")
    return int(text)


def shown_path(path: Path) -> Path:
    path = path.resolve()
    return path.relative_to(ROOT) if path.is_relative_to(ROOT) else path


def columned(lines: list[list[str]], left: int) -> str:
    """Cells in columns; the first `left` of them aligned to the left."""
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    text = (
        "  ".join(cell.ljust(w) if i < left else cell.rjust(w) for i, (cell, w) in enumerate(zip(line, widths)))
        for line in lines
    )
    return "\n".join(line.rstrip() for line in text)


def dump(result: dict) -> str:
    """JSON with one row a line: a diff of two results can be read."""
    head = {key: value for key, value in result.items() if key != "rows"}
    lines = json.dumps(head, indent=1)[:-2] + ',\n "rows": [\n'
    return lines + ",\n".join("  " + json.dumps(row) for row in result["rows"]) + "\n ]\n}\n"
