"""The benchmarks: how time is taken, what they leave behind when something fails, the comparison, the pictures."""

from __future__ import annotations

import gc
import json
import os
import sys

import pytest
import torch
from conftest import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))
_results = pytest.importorskip("_results", reason="benchmarks/ is not there (a Nix build has only tests/)")
_timing = pytest.importorskip("_timing")
_cases = pytest.importorskip("_cases")
micro = pytest.importorskip("micro")


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
    import time

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


# ---- the problems


def test_every_op_is_measured_over_sizes_dtypes_and_on_the_host():
    for name in ("sizes", "dtypes", "host", "smoke"):
        assert {p.base for p in _cases.SETS[name]()} == set(_cases.OPS), name
    rows = {p.shape[0] for p in _cases.sizes() if p.op == "rms_norm"}
    hidden = {p.shape[1] for p in _cases.sizes() if p.op == "rms_norm"}
    assert (min(rows), max(rows), min(hidden), max(hidden)) == (1, 1 << 20, 64, 65536)
    assert {p.dtype for p in _cases.dtypes()} == set(_cases.DTYPES)


@pytest.mark.parametrize("op", list(_cases.OPS))
def test_the_smallest_problem_of_each_op_can_be_made(op):
    """Among the sizes are one row and one head: the reference runs on them."""
    shapes = {_cases.shape_of(op, *size) for size in ((1, 64), (64, 64), _cases.HOST_SIZE)}
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

    monkeypatch.setitem(_cases.OPS, "swiglu", _cases.replace(_cases.OPS["swiglu"], make=make))
    result = bench("--op", "swiglu", "--op", "gelu", "--shape", "2,12,64", "--peer", "eager")
    reasons = {(row["op"], row["candidate"]): row.get("reason") for row in result["rows"]}
    assert reasons["swiglu", "ours"] == "OutOfMemoryError: needs 5 GiB"
    assert reasons["gelu", "ours"] is None, "the next problem is measured"
