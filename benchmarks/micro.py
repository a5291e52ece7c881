#!/usr/bin/env python3
"""Time every op beside eager, torch, torch.compile, Liger, quack, flashinfer and a copy of as many bytes.

    python benchmarks/micro.py                                  the set for this device
    python benchmarks/micro.py --set rmsnorm --out FILE         a set of shapes; benchmarks/README.md lists them
    python benchmarks/micro.py --op rms_norm --shape 16384,4096 --dtype bf16 --peer quack --peer torch

Each candidate is compared with fp64 before it is timed; a wrong one is a row that says so, without times. A peer that
is not installed is a row with that reason. All candidates of a problem are timed in one run, in turns, from a cold L2
(_timing.py says how); `rms_norm:warm` is with a warm one, `rms_norm:host` the time of a call on the host. The file is
written after each problem: the same command again goes on where it stopped.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
import time
from dataclasses import replace
from pathlib import Path

import torch
import torch._dynamo
import torch._functorch.config
from _cases import OPS, Inputs, Op, outputs_of
from _results import (
    CPU_NOTE,
    TIMES,
    ResultFile,
    by_problem,
    columned,
    count,
    default_out,
    end_with,
    header,
    load_package,
    short,
    shown_path,
)
from _sets import ALL, DTYPES, SETS, Problem
from _timing import Bench, host_times, input_sets, method, spread

PEERS = ("ours", "eager", "torch", "compile", "liger", "quack", "flashinfer")
PACKAGES = {"liger": "liger_kernel", "quack": "quack", "flashinfer": "flashinfer"}
NOT_INSTALLED = "is not installed"
#: fp64 of more elements than this is computed on fewer rows of the same length.
MAX_CHECKED = {"cuda": 1 << 27, "cpu": 1 << 22}
#: The host's time: bursts of each candidate, and calls a burst. On a CPU a call computes, too.
HOST_EFFORT = {"cuda": {"rounds": 100, "burst": 200}, "cpu": {"rounds": 5, "burst": 20}}
#: A candidate is wrong when its error is more than this many times eager's: Llama's second rounding is 1.4 times.
WRONG = 4.0
FP32_FLOOR = 1e-6


def relative_error(actual: tuple, expected: tuple) -> float:
    """The largest over the outputs: RMS of the difference over the RMS of the reference."""
    worst = 0.0
    for a, e in zip(actual, expected):
        if a.shape != e.shape:
            raise RuntimeError(f"shape {list(a.shape)}, not {list(e.shape)}")
        error = ((a.double() - e).square().mean().sqrt() / e.square().mean().sqrt()).item()
        worst = max(worst, error if error == error else float("inf"))
    return worst


def is_absent(candidate: str) -> bool:
    return candidate in PACKAGES and importlib.util.find_spec(PACKAGES[candidate]) is None


class Progress:
    """One line on stderr that counts problems and says what runs; plain lines where there is no terminal."""

    def __init__(self, total: int):
        self.total, self.done, self.start = total, 0, time.perf_counter()
        self.live = sys.stderr.isatty()

    def step(self, text: str) -> None:
        self.done += 1
        filled = 24 * self.done // max(1, self.total)
        spent = time.perf_counter() - self.start
        line = f"[{'#' * filled}{'.' * (24 - filled)}] {self.done}/{self.total} {spent:4.0f} s  {text}"
        print(f"\r{line[:118]:<118}" if self.live else line, end="" if self.live else "\n", file=sys.stderr, flush=True)

    def close(self) -> None:
        if self.live:
            print(file=sys.stderr)


class Runner:
    def __init__(self, package, device: str, args):
        self.package, self.device, self.args = package, device, args

    @staticmethod
    def row(problem: Problem, candidate: str, times: dict, reasons: dict, how: str, **values) -> dict:
        row = {"op": problem.op, "shape": list(problem.shape), "dtype": problem.dtype, "candidate": candidate}
        measured = [round(t, 3) for t in times[candidate]] if candidate in times else [None] * 3
        row |= dict(zip(TIMES, measured)) | values
        return row | ({"method": how} if candidate in times else {"reason": reasons[candidate]})

    def checked(self, problem: Problem, wanted: list[str]):
        """(candidates that compute the right thing, error of each wanted one, reason of each that drops out)."""
        op, dtype = OPS[problem.base], DTYPES[problem.dtype]
        inputs = op.make(self.checked_shape(problem.shape), dtype, self.device)
        expected = op.reference(inputs)
        factories = op.candidates(self.package)
        eager = factories["eager"]()
        limit = relative_error(outputs_of(eager.call(eager.prepare(inputs))), expected)
        limit = WRONG * max(limit, FP32_FLOOR if dtype == torch.float32 else torch.finfo(dtype).eps / 4)
        good, errors, reasons = {}, {}, {}
        for name in wanted:
            if is_absent(name):
                reasons[name] = f"{PACKAGES[name]} {NOT_INSTALLED}"
                continue
            try:
                candidate = factories[name]()
                prepared = candidate.prepare(inputs)
                self.poison(expected, dtype)
                errors[name] = relative_error(outputs_of(candidate.call(prepared)), expected)
            except Exception as error:  # an absent dependency, an unsupported shape: the row says what
                reasons[name] = short(error)
                continue
            if errors[name] <= limit:
                good[name] = candidate
            else:
                reasons[name] = f"wrong: error {errors[name]:.1e} against fp64, {limit:.1e} is allowed"
                errors[name] = errors[name] if errors[name] < float("inf") else None
        return good, errors, reasons

    @staticmethod
    def poison(expected: tuple, dtype: torch.dtype) -> None:
        """Fill the memory that the next outputs will get, so that an earlier right answer does not pass for theirs."""
        for output in expected:
            torch.full_like(output, float("nan"), dtype=dtype)

    def checked_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        elements = torch.Size(shape).numel()
        axis = 0 if shape[0] > 1 or len(shape) < 2 else 1
        excess = -(-elements // MAX_CHECKED[self.device])
        return tuple(max(1, size // excess) if i == axis else size for i, size in enumerate(shape))

    def run(self, problem: Problem, wanted: list[str]) -> list[dict]:
        stream = torch.cuda.Stream() if self.device == "cuda" else None
        try:
            with torch.no_grad(), torch.cuda.stream(stream):
                rows = (self.host if problem.variant == "host" else self.timed)(problem, wanted)
        except Exception as error:  # too large for this device, say: no reason to lose the other problems
            if "CUDA error" in str(error):  # every later call would fail as well
                raise
            reasons = dict.fromkeys(wanted, short(error))
            values = {"bytes": 0, "copy_us": None, "error_fp64": None}
            rows = [self.row(problem, name, {}, reasons, "", **values) for name in wanted]
        torch._dynamo.reset()
        if self.device == "cuda":
            torch.cuda.empty_cache()
        return rows

    def timed(self, problem: Problem, wanted: list[str]) -> list[dict]:
        op: Op = OPS[problem.base]
        dtype = DTYPES[problem.dtype]
        good, errors, reasons = self.checked(problem, wanted)

        def make() -> Inputs:
            return op.make(problem.shape, dtype, self.device)

        inputs = make()
        eager = op.candidates(self.package)["eager"]()
        nbytes = op.bytes(inputs, outputs_of(eager.call(eager.prepare(inputs))))
        warm = problem.variant == "warm"
        count = input_sets(self.device, nbytes, warm)
        sets = [inputs] + [make() for _ in range(count - 1)]
        how = method(self.device, nbytes, count, warm)
        calls = {"copy": [self.copy(nbytes) for _ in range(count)]}
        for name, candidate in good.items():
            calls[name] = [
                lambda call=candidate.call, prepared=prepared: call(prepared)
                for prepared in map(candidate.prepare, sets)
            ]
        bench = Bench(self.device, how.split(",")[0], self.args.budget_ms)
        samples = bench.run(calls, lambda name, error: reasons.__setitem__(name, short(error)))
        times = {name: spread(taken) for name, taken in samples.items()}
        copy_us = round(times["copy"][1], 3) if "copy" in times else None
        return [
            self.row(problem, name, times, reasons, how, bytes=nbytes, copy_us=copy_us, error_fp64=errors.get(name))
            for name in ["copy", *wanted]
        ]

    def copy(self, nbytes: int):
        """A copy that reads and writes as many bytes as the op in all."""
        source = torch.randint(-128, 127, (max(1, nbytes // 2),), dtype=torch.int8, device=self.device)
        target = torch.empty_like(source)
        return lambda: target.copy_(source)

    def host(self, problem: Problem, wanted: list[str]) -> list[dict]:
        """Host time of a call under no_grad."""
        op = OPS[problem.base]
        good, errors, reasons = self.checked(problem, wanted)
        inputs = op.make(problem.shape, DTYPES[problem.dtype], self.device)
        nbytes = op.bytes(inputs, op.reference(inputs))
        prepared = {name: candidate.prepare(inputs) for name, candidate in good.items()}
        calls = {
            name: lambda call=candidate.call, inputs=prepared[name]: call(inputs) for name, candidate in good.items()
        }
        samples = host_times(calls, **HOST_EFFORT[self.device])
        times = {name: spread(taken) for name, taken in samples.items()}
        rows = []
        for name in wanted:
            values = {"bytes": nbytes, "copy_us": None, "error_fp64": errors.get(name)}
            if name in samples:
                values["us_min"] = round(min(samples[name]), 3)
            rows.append(self.row(problem, name, times, reasons, "host clock", **values))
        return rows


# ---- what to run, and the table --------------------------------------------------------------------------


def parse_shape(text: str) -> tuple[int, ...]:
    return tuple(map(count, text.replace("x", ",").split(",")))


def is_called(base: str, op: str) -> bool:
    return base == op or base.startswith(op + "[")


def chosen(args, package) -> list[Problem]:
    """The problems of the sets and filters; with --shape also such that no set has."""
    problems = list(dict.fromkeys(problem for name in args.set for problem in SETS[name]()))
    if args.op:
        problems = [p for p in problems if any(is_called(p.base, op) for op in args.op)]
    if args.shape:
        listed = [p for p in problems if p.shape in args.shape]
        extra = [
            Problem(op, s)
            for s in args.shape
            for op in args.op or []
            if op in OPS and s not in {p.shape for p in listed}
        ]
        problems = listed + extra
    if args.dtype:
        problems = list(dict.fromkeys(replace(p, dtype=dtype) for p in problems for dtype in args.dtype))
    if args.warm:
        problems = list(dict.fromkeys(p.of("warm") for p in problems if p.variant != "host"))
    if not args.host:
        problems = [p for p in problems if p.variant != "host"]
    return [p for p in problems if hasattr(package, OPS[p.base].needs)]


def wanted_candidates(problem: Problem, args) -> list[str]:
    """What to time beside the copy; --peer chooses peers, `ours` is always there."""
    names = PEERS if problem.candidates is ALL or args.peer else problem.candidates
    if args.peer:
        names = [name for name in names if name == "ours" or name in args.peer]
    known = OPS[problem.base].candidates(None)
    return [name for name in names if name in known]


def table(rows: list[dict]) -> str:
    """A line a problem: microseconds; of ours the GB/s, what it takes in copies, what eager and the best other take.

    Medians; of the host's time the 10th percentile with the minimum before and the median behind it.
    """
    columns = ["copy", *(name for name in PEERS if any(r["candidate"] == name for r in rows))]
    head = ["op", "shape", "dtype", "MiB", *columns, "GB/s", "ours/copy", "eager/ours", "best other/ours"]
    lines = [head]
    for (op, shape, dtype), group in by_problem(rows).items():
        nbytes = max(r["bytes"] for r in group.values())
        cells = [op, "x".join(map(str, shape)), dtype, f"{nbytes / 2**20:.1f}"]
        for name in columns:
            row = group.get(name, {})
            if row.get("us_min"):
                cells.append(f"{row['us_min']:.1f} {row['us_p10']:.1f} {row['us_median']:.1f}")
            elif row.get("us_median"):
                cells.append(f"{row['us_median']:.1f}")
            else:
                cells.append("wrong" if row.get("reason", "").startswith("wrong") else "-")
        of_host = op.endswith(":host")
        times = {name: row["us_p10" if of_host else "us_median"] for name, row in group.items() if row["us_median"]}
        ours, copy, eager = (times.get(name) for name in ("ours", "copy", "eager"))
        others = [(us, name) for name, us in times.items() if name not in ("ours", "copy")]
        cells.append(f"{nbytes / ours / 1e3:.0f}" if ours and not of_host else "")
        cells.append(f"{ours / copy:.3f}" if ours and copy else "")
        cells.append(f"{eager / ours:.2f}" if ours and eager else "")
        cells.append(f"{min(others)[0] / ours:.2f} {min(others)[1]}" if ours and others else "")
        lines.append(cells)
    return columned(lines, left=3) + "".join(
        f"\n{reason}" for reason in sorted({f"{r['candidate']}: {r['reason']}" for r in rows if r.get("reason")})
    )


def arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--set", action="append", choices=SETS, help="shapes (default: all but smoke; on a CPU smoke)")
    parser.add_argument("--op", action="append", metavar="OP", help=f"{', '.join(OPS)}; `rope` is `rope[half]` too")
    parser.add_argument("--shape", action="append", type=parse_shape, metavar="2,2688,2048", help="of the output")
    parser.add_argument("--dtype", action="append", choices=DTYPES)
    parser.add_argument("--peer", action="append", choices=PEERS, help="only these beside ours and the copy")
    parser.add_argument("--budget-ms", type=float, default=60.0, help="time for each candidate of a problem")
    parser.add_argument("--max-seconds", type=float, help="start no problem after this; the same command goes on")
    parser.add_argument("--warm", action="store_true", help="the same problems with a warm L2")
    parser.add_argument(
        "--host", action=argparse.BooleanOptionalAction, default=True, help="the problems of the host's time too"
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument(
        "--out", type=Path, help="the JSON (default: benchmarks/results/<chip>/<set>.json, all.json of all)"
    )
    parser.add_argument("--fresh", action="store_true", help="measure everything again")
    args = parser.parse_args(argv)
    if unknown := [op for op in args.op or [] if not any(is_called(base, op) for base in OPS)]:
        parser.error(f"no op is called {', '.join(unknown)}; there are {', '.join(OPS)}")
    args.name = "-".join(args.set or ["smoke" if args.device == "cpu" else "all"])
    if not args.set:
        args.set = ["smoke"] if args.device == "cpu" else [name for name in SETS if name != "smoke"]
    return args


def measure(args: argparse.Namespace) -> list[dict]:
    """The rows of all chosen problems, measured now or found in the file."""
    start = time.perf_counter()
    torch.manual_seed(0)
    torch._functorch.config.donated_buffer = False  # a compiled backward that may run more than once
    package = load_package()
    out = args.out or default_out(args.device, args.name)
    file = ResultFile(out, header(package, args.device), args.fresh)
    runner = Runner(package, args.device, args)
    problems = chosen(args, package)
    progress = Progress(len(problems))
    shown: list[dict] = []
    left = 0
    for problem in problems:
        wanted = wanted_candidates(problem, args)
        name = f"{problem.op} {list(problem.shape)} {problem.dtype}"
        known = file.candidates(problem.op, problem.shape, problem.dtype)
        if all(n in known and (is_absent(n) or NOT_INSTALLED not in known[n].get("reason", "")) for n in wanted):
            progress.step(f"{name}: there already")
        elif args.max_seconds is not None and time.perf_counter() - start > args.max_seconds:
            left += 1
            continue
        else:
            progress.step(name)
            wanted = [n for n in PEERS if n in wanted or n in known]  # compared inside one run
            file.replace(runner.run(problem, wanted))
        shown += file.candidates(problem.op, problem.shape, problem.dtype).values()
    progress.close()
    spent = time.perf_counter() - start
    print(f"{len(shown)} rows, {spent:.0f} s, {shown_path(out)}", file=sys.stderr)
    if left:
        print(f"{left} problems left: the same command goes on with them", file=sys.stderr)
    return shown


def main(argv: list[str] | None = None) -> int:
    args = arguments(argv)
    print(table(measure(args)))
    if args.device == "cpu":
        print(CPU_NOTE)
    return 0


if __name__ == "__main__":
    end_with(main)
