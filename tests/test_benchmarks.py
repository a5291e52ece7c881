"""The benchmarks: how time is taken, what they leave behind when something fails, the comparison, the pictures."""

from __future__ import annotations

import gc
import json
import os
import re
import sys
import time
from dataclasses import replace

import pytest
import torch
from conftest import ROOT
from test_results_schema import GOOD

sys.path.insert(0, str(ROOT / "benchmarks"))
_results = pytest.importorskip("_results", reason="benchmarks/ is not there (a Nix build has only tests/)")
_timing = pytest.importorskip("_timing")
_cases = pytest.importorskip("_cases")
_sets = pytest.importorskip("_sets")
micro = pytest.importorskip("micro")
benchmark_rmsnorm = pytest.importorskip("benchmark_rmsnorm")
compare = pytest.importorskip("compare")
_models = pytest.importorskip("_models")


@pytest.fixture
def bench(k, tmp_path, monkeypatch):
    """Run micro.py in this process; returns the result that it wrote."""
    monkeypatch.setattr(micro, "load_package", lambda: k)
    out = tmp_path / "micro.json"

    def run(*arguments):
        assert micro.main([*arguments, "--device", "cpu", "--budget-ms", "1", "--out", str(out)]) == 0
        result = json.loads(out.read_text())
        assert not _results.problems(result)
        return result

    return run


# ---- the host's time


def test_host_candidates_take_turns_and_each_gets_every_sample():
    order = []
    calls = {name: (lambda name=name: order.append(name)) for name in "abc"}
    samples = _timing.host_times(calls, rounds=3, burst=5)
    assert {name: len(taken) for name, taken in samples.items()} == dict.fromkeys("abc", 3)
    bursts = [name for before, name in zip([None, *order], order) if name != before]
    assert "".join(bursts) == "abcbcacab"


def test_host_times_are_those_of_the_calls():
    def wait():
        until = time.perf_counter() + 200e-6
        while time.perf_counter() < until:
            pass

    samples = _timing.host_times({"slow": wait, "fast": lambda: None}, rounds=3, burst=5)
    assert min(samples["slow"]) >= 200 > 10 * min(samples["fast"])


def test_quiet_pins_the_thread_and_restores_all_after_an_error():
    if not hasattr(os, "sched_getaffinity"):
        pytest.skip("this system does not pin threads")
    cores = os.sched_getaffinity(0)
    with pytest.raises(ZeroDivisionError), _timing.quiet():
        assert len(os.sched_getaffinity(0)) == 1
        assert not gc.isenabled()
        _ = 1 / 0
    assert os.sched_getaffinity(0) == cores
    assert gc.isenabled()


def test_host_rows_have_their_minimum(bench):
    result = bench("--set", "host", "--op", "rms_norm", "--peer", "torch")
    rows = {row["candidate"]: row for row in result["rows"]}
    assert set(rows) == {"ours", "torch"}
    assert all(0 < row["us_min"] <= row["us_p10"] for row in rows.values())
    assert rows["ours"]["op"] == "rms_norm:host"


# ---- samples of candidates in turns


def test_a_configuration_that_fails_while_it_is_timed_leaves_the_others():
    calls = []

    def fails_later():
        calls.append(0)
        if len(calls) > 4:
            raise torch.OutOfMemoryError("at last")

    reasons = {}
    bench = _timing.Bench("cpu", "clock", budget_ms=1, rounds=3)
    run = {"good": [lambda: None], "bad": [fails_later]}
    samples = bench.run(run, lambda name, error: reasons.__setitem__(name, str(error)))
    assert set(samples) == {"good"} and reasons == {"bad": "at last"}


def sleeper(ms: float, calls: list):
    def call():
        calls.append(ms)
        time.sleep(ms / 1e3)

    return call


def never(name, error):
    raise AssertionError(f"{name}: {error}")


def test_a_long_call_is_sampled_three_times_whatever_the_budget():
    """And warmed up once: the steps of a large model took minutes of a budget of a second."""
    calls = []
    bench = _timing.Bench("cpu", "clock", budget_ms=1, rounds=6)
    samples = bench.run({"a": [sleeper(5, calls)], "b": [sleeper(6, calls)]}, never)
    assert {name: len(taken) for name, taken in samples.items()} == {"a": 3, "b": 3}
    assert calls == [5, 6] + [5, 6, 6, 5, 5, 6], "warm, then in turns that rotate"


def test_samples_fill_the_budget():
    calls = []
    bench = _timing.Bench("cpu", "clock", budget_ms=60, rounds=3)
    (samples,) = bench.run({"a": [sleeper(2, calls)]}, never).values()
    assert 10 <= len(samples) <= 30
    assert len(calls) == 3 + 3 + len(samples), "three to warm up, one to settle each round"


# ---- candidates


@pytest.mark.parametrize("op", list(micro.OPS))
def test_every_op_is_measured_right(k, bench, op, capsys):
    """Ours and eager agree with fp64: the formula, the call and the shapes of each case fit together."""
    if not hasattr(k, micro.OPS[op].needs):
        pytest.skip(f"the package has no {micro.OPS[op].needs} yet")
    shape = {"rope": "2,12,4,64", "qk_norm_rope": "2,12,4,64", "rope_3d": "2,64,4,64", "pixel_norm_silu": "2,8,3,4,5"}
    result = bench("--op", op, "--shape", shape.get(micro.OPS[op].needs, "2,12,64"), "--peer", "eager", "--fresh")
    rows = {row["candidate"]: row for row in result["rows"] if row["op"] == op}
    assert set(rows) == {"copy", "ours", "eager"}
    assert all("reason" not in row for row in rows.values()), rows
    assert rows["ours"]["error_fp64"] <= rows["eager"]["error_fp64"] * 1.01
    assert "CPU figures are not GPU figures" in capsys.readouterr().out


def test_an_absent_peer_is_written_down(bench):
    result = bench("--op", "rms_norm", "--shape", "4,64", "--peer", "flashinfer")
    row = next(row for row in result["rows"] if row["candidate"] == "flashinfer")
    if micro.is_absent("flashinfer"):
        assert row["us_median"] is None and row["reason"] == "flashinfer is not installed"


def test_a_wrong_candidate_is_marked_and_not_timed(k, bench, monkeypatch):
    class Wrong:
        rms_norm = staticmethod(lambda x, weight, eps: k.rms_norm(x, None, eps))
        __file__ = k.__file__

    monkeypatch.setattr(micro, "load_package", lambda: Wrong)
    result = bench("--op", "rms_norm", "--shape", "16,64", "--peer", "eager")
    row = next(row for row in result["rows"] if row["candidate"] == "ours")
    assert row["us_median"] is None and row["reason"].startswith("wrong: error")


def test_a_run_goes_on_where_it_stopped(bench):
    arguments = ("--op", "rms_norm", "--shape", "4,64", "--peer", "eager")
    first = bench(*arguments)
    assert bench(*arguments)["rows"] == first["rows"], "nothing is measured twice"
    more = bench(*arguments, "--peer", "torch")
    assert {row["candidate"] for row in more["rows"]} == {"copy", "ours", "eager", "torch"}
    assert more["rows"] != first["rows"], "a new candidate is measured beside all others"
    fresh = bench(*arguments, "--fresh")
    assert {row["candidate"] for row in fresh["rows"]} == {"copy", "ours", "eager"}


def test_an_op_or_shape_that_does_not_exist_is_an_error(bench, capsys):
    """Not a table without rows, nor rows that the schema refuses."""
    shapes = [("--op", "rms_norm", "--shape", shape) for shape in ("axb", "0x8", "2x-3", "2.5,8", "")]
    for wrong in (("--op", "rmsnorm"), ("--op", "rms_norm", "--op", "gel"), *shapes):
        with pytest.raises(SystemExit):
            bench(*wrong)
        assert re.search("no op is called (rmsnorm|gel);|is not a whole number", capsys.readouterr().err)


def test_no_time_left_starts_no_problem(k, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(micro, "load_package", lambda: k)
    arguments = ["--device", "cpu", "--op", "gelu", "--shape", "2x8", "--max-seconds", "0"]
    assert micro.main([*arguments, "--out", str(tmp_path / "none.json")]) == 0
    assert "1 problems left" in capsys.readouterr().err


# ---- the problems


def test_every_op_is_measured_over_sizes_dtypes_and_on_the_host():
    for name in ("sizes", "dtypes", "host", "smoke"):
        assert {p.base for p in _sets.SETS[name]()} == set(_cases.OPS), name
    rows = {p.shape[0] for p in _sets.sizes() if p.op == "rms_norm"}
    hidden = {p.shape[1] for p in _sets.sizes() if p.op == "rms_norm"}
    assert (min(rows), max(rows), min(hidden), max(hidden)) == (1, 1 << 20, 64, 65536)
    assert {p.dtype for p in _sets.dtypes()} == set(_sets.DTYPES)


@pytest.mark.parametrize("op", list(_cases.OPS))
def test_the_smallest_problem_of_each_op_can_be_made(op):
    """Among the sizes are one row and one head: the reference runs on them."""
    shapes = {_sets.shape_of(op, *size) for size in ((1, 64), (64, 64), _sets.HOST_SIZE)}
    for shape in shapes:
        inputs = _cases.OPS[op].make(shape, torch.float32, "cpu")
        outputs = _cases.OPS[op].reference(inputs)
        assert outputs[0].numel() == torch.Size(shape).numel() and outputs[0].isfinite().all()


def test_warm_and_cold_are_two_problems_of_one_file(bench):
    arguments = ("--op", "rms_norm", "--shape", "4,64", "--peer", "eager", "--no-host")
    bench(*arguments)
    result = bench(*arguments, "--warm")
    assert {row["op"] for row in result["rows"]} == {"rms_norm", "rms_norm:warm"}


def test_a_problem_that_fails_is_rows_with_its_reason(bench, monkeypatch):
    def make(shape, dtype, device):
        raise torch.OutOfMemoryError("needs 5 GiB")

    monkeypatch.setitem(_cases.OPS, "swiglu", replace(_cases.OPS["swiglu"], make=make))
    result = bench("--op", "swiglu", "--op", "gelu", "--shape", "2,12,64", "--peer", "eager")
    reasons = {(row["op"], row["candidate"]): row.get("reason") for row in result["rows"]}
    assert reasons["swiglu", "ours"] == "OutOfMemoryError: needs 5 GiB"
    assert reasons["gelu", "ours"] is None, "the next problem is measured"


# ---- the classic table


def test_classic_table_of_known_times():
    """2 MiB read and written once: 10 us are 419 GB/s."""

    def row(candidate, us):
        times = dict.fromkeys(_results.TIMES, us)
        shape = {"op": "rms_norm", "shape": [1, 512, 2048], "dtype": "bf16", "candidate": candidate}
        return {**shape, **times, "bytes": 2 * 512 * 2048 * 2, "copy_us": 8.0, "error_fp64": None}

    rows = [row("copy", 8.0), row("ours", 10.0), row("eager", 45.0), row("torch", 12.5), row("liger", None)]
    head, line = benchmark_rmsnorm.classic_table(rows, "NVIDIA H200").splitlines()
    cells = ["[1x512x2048]", "bf16", "0.0100", "0.0450", "4.50x", "419", "80.0%", "8.7%", "1.25", "-"]
    assert line.split() == cells
    assert head.split()[-2:] == ["torch/custom", "liger/custom"]


def test_nominal_bandwidth_is_that_of_the_most_special_name():
    assert benchmark_rmsnorm.nominal_gbps("NVIDIA H100 PCIe") == 2000
    assert benchmark_rmsnorm.nominal_gbps("NVIDIA H100 80GB HBM3") == 3350
    assert benchmark_rmsnorm.nominal_gbps("NVIDIA H200") == 4800
    assert benchmark_rmsnorm.nominal_gbps("CPU, some, 2 threads") is None


def test_classic_table_runs_on_the_cpu_and_says_so(k, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(micro, "load_package", lambda: k)
    out = tmp_path / "classic.json"
    arguments = ["--device", "cpu", "--peer", "torch", "--shape", "1x8x64", "--budget-ms", "1", "--out", str(out)]
    arguments += ["--op", "gelu"]  # which would be a line of the table as if it were the norm
    assert benchmark_rmsnorm.main(arguments) == 0
    said = capsys.readouterr().out
    assert "[1x8x64]" in said and _results.CPU_NOTE in said
    rows = json.loads(out.read_text())["rows"]
    assert {row["candidate"] for row in rows} == {"copy", "ours", "eager", "torch"}
    assert {row["op"] for row in rows} == {"rms_norm"}


# ---- compare.py


def result(device=GOOD["device"], **times) -> dict:
    """A result with one row of each given (p10, median, p90), or of each reason."""
    rows = []
    for op, spread in times.items():
        reason = {"reason": spread} if isinstance(spread, str) else {}
        spread = (None,) * 3 if reason else spread
        rows.append({**GOOD["rows"][0], "op": op, **dict(zip(_results.TIMES, spread)), **reason})
    return {**GOOD, "device": device, "rows": rows}


OLD = result(steady=(9.9, 10.0, 10.1), noisy=(9.0, 10.0, 13.0), quick=(1.0, 1.0, 1.0))
CASES = {
    "nothing changed": (OLD, 0),
    "within the spread": (result(noisy=(12.0, 12.5, 13.0)), 0),
    "beyond the spread": (result(noisy=(13.1, 13.2, 14.0)), 1),
    "beyond the spread, less than the tolerance": (result(steady=(10.2, 10.25, 10.3)), 0),
    "a single sample beyond the tolerance": (result(quick=(1.05, 1.05, 1.05)), 1),
    "faster": (result(steady=(5.0, 5.0, 5.0)), 0),
    "one slower among faster ones": (result(steady=(20.0, 20.0, 20.0), quick=(0.5, 0.5, 0.5)), 1),
    "no time any more": (result(steady="wrong: error 1.0 against fp64"), 1),
    "another device": (result(device="NVIDIA A100", steady=(9.9, 10.0, 10.1)), 2),
    "no common row": (result(other=(9.9, 10.0, 10.1)), 2),
}


@pytest.mark.parametrize("what", CASES)
def test_compare_tells_slower_from_noise(what, tmp_path, capsys):
    new, code = CASES[what]
    for name, content in (("old", OLD), ("new", new)):
        (tmp_path / f"{name}.json").write_text(_results.dump(content))
    assert compare.main([str(tmp_path / "old.json"), str(tmp_path / "new.json")]) == code
    said = capsys.readouterr()
    assert ("not to be compared" in said.err) == (code == 2)
    if code == 1:
        assert said.out.splitlines()[1].startswith(("slower", "lost")), "the worst row is printed first"


def test_compare_refuses_what_is_no_result(tmp_path, capsys):
    """With 2: a CI that looks for 1 would call a file that is not there a regression."""
    for name, content in (("empty", "{}"), ("broken", "{"), ("text", "12 passed")):
        (tmp_path / name).write_text(content)
    for name in ("empty", "broken", "text", "absent"):
        with pytest.raises(SystemExit) as ended:
            compare.main([str(tmp_path / name)] * 2)
        assert ended.value.code == 2
        assert "is not a result" in capsys.readouterr().err


# ---- plots.py


@pytest.fixture
def plots():
    pytest.importorskip("matplotlib")
    import plots

    return plots


def luminance(color: str) -> float:
    """Relative luminance of #rrggbb (WCAG 2)."""
    channels = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return sum(weight * c for weight, c in zip((0.2126, 0.7152, 0.0722), linear))


def contrast(one: str, other: str) -> float:
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def test_colours_are_legible_on_the_background_of_the_pictures(plots):
    assert contrast("#000000", "#ffffff") == pytest.approx(21)
    assert contrast(plots.TEXT, plots.BACKGROUND) >= 7
    assert all(contrast(color, plots.BACKGROUND) >= 3 for color, _ in plots.STYLE.values())
    # Candidates of one picture differ in both.
    for names in (micro.PEERS, ("stock", "compiled", "injected", "injected_compiled", "injected_graph")):
        assert (
            len({plots.STYLE[name][0] for name in names}) == len({plots.STYLE[name][1] for name in names}) == len(names)
        )


def test_readme_pictures_are_drawn_from_the_committed_results(plots, tmp_path):
    """`make plots` after a result has changed."""
    import matplotlib

    pinned = re.search(r"^matplotlib==(\S+)", (ROOT / "requirements-dev.txt").read_text(), re.MULTILINE)[1]
    if matplotlib.__version__ != pinned:
        pytest.skip(f"matplotlib {matplotlib.__version__} draws a little differently than {pinned}")
    shown = re.findall(r"\(docs/images/(\w+)\.svg\)", (ROOT / "README.md").read_text())
    assert sorted(shown) == sorted(plots.README) and len(shown) == 2
    for name, (kind, paths) in plots.README.items():
        (drawn,) = plots.draw(kind, [ROOT / path for path in paths], name, tmp_path, ("svg",))
        committed = plots.IMAGES / drawn.name
        assert committed.stat().st_size < 100_000
        assert drawn.read_text() == committed.read_text(), f"{committed.name} is not that of {paths}: run `make plots`"


def test_every_kind_of_picture_names_units_device_and_date(plots, tmp_path, monkeypatch):
    monkeypatch.setitem(plots.RC, "svg.fonttype", "none")  # text as text
    rows = []
    for candidate, us, error in (
        ("copy", 8.0, None),
        ("ours", 10.0, 1e-3),
        ("eager", 45.0, 2e-3),
        ("quack", None, None),
    ):
        reason = {"reason": "quack is not installed"} if us is None else {}
        times = dict.fromkeys(_results.TIMES, us)
        problem = {"op": "rms_norm", "shape": [512, 2048], "dtype": "bf16", "candidate": candidate}
        rows.append({**problem, **times, "bytes": 4194304, "copy_us": 8.0, "error_fp64": error, **reason})
    for op, candidate, us in (
        ("ltx_vae:decode", "stock", 2.102e6),
        *(("flux_1:step", "stock", 2e5), ("flux_1:step", "injected", 1.5e5), ("flux_1:step", "compiled", None)),
        *(("flux_1:step:gemm", "injected", 9e4), ("flux_1:step:attention", "injected", 3e4)),
        ("llama_3_8b:decode[static cache]", "stock", 2e4),
    ):
        times, reason = dict.fromkeys(_results.TIMES, us), {"reason": "OutOfMemoryError: much"} if us is None else {}
        problem = {"op": op, "shape": [1, 64, 64], "dtype": "bf16", "candidate": candidate}
        rows.append({**problem, **times, "bytes": 0, "copy_us": None, "error_fp64": None, **reason})
    file = tmp_path / "one.json"
    file.write_text(_results.dump({**result(), "rows": rows}))
    assert plots.main([str(file), "--out", str(tmp_path)]) == 0
    said = {kind: (tmp_path / f"one_{kind}.svg").read_text() for kind in plots.KINDS}
    for text in said.values():
        assert "NVIDIA H200, torch 2.11.0+cu130, 2026-11-30" in text and "one.json" in text
    assert "GB/s" in said["bandwidth"] and "copy of as many bytes" in said["bandwidth"] and "eager" in said["bandwidth"]
    assert "floor 120 ms" in said["e2e"] and "150 ms" in said["e2e"] and "20 ms" in said["e2e"]
    assert said["e2e"].count(">ms a token") == 1, "of the language model, not of the VAE"
    assert "2102 ms" in said["e2e"]
    assert said["e2e"].count("compiled") == 0, "a bar that has no time"
    assert "RMS error" in said["error"] and "rms_norm, bf16" in said["error"]
    assert all((tmp_path / f"one_{kind}.png").stat().st_size > 1000 for kind in plots.KINDS)


def test_a_result_without_anything_to_draw_is_no_picture(plots, tmp_path):
    file = tmp_path / "host.json"
    file.write_text(_results.dump(result(**{"rms_norm:host": (1.0, 1.0, 1.0)})))
    assert plots.main([str(file), "--out", str(tmp_path)]) == 1
    assert not list(tmp_path.glob("*.png"))


# ---- what the documents say


def documented() -> list[str]:
    """The commands of benchmarks/README.md and docs/performance.md that measure."""
    texts = [
        (ROOT / page).read_text() for page in ("benchmarks/README.md", "docs/performance.md") if (ROOT / page).is_file()
    ]
    found = re.findall(
        r"(?:python benchmarks/|gpu_slice.sh \d+ )((?:micro|e2e|benchmark_rmsnorm)\.py[^`#\n]*)", "\n".join(texts)
    )
    return sorted({command.strip() for command in found})


@pytest.mark.parametrize("command", documented())
def test_documented_commands_are_understood(command):
    script, *words = command.replace("<model>", "flux").split()
    module = pytest.importorskip("e2e") if script == "e2e.py" else micro
    module.arguments(words)


def test_every_set_and_every_model_is_documented():
    commands = " ".join(documented()) + (ROOT / "docs" / "performance.md").read_text()
    assert not [name for name in _sets.SETS if name not in ("smoke", "classic") and f"--set {name}" not in commands]
    assert not [name for name in _models.FAMILIES if name not in commands]
