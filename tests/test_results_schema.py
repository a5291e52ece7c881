"""The committed results are of one schema, and benchmarks/micro.py writes it."""

from __future__ import annotations

import copy
import json
import sys

import pytest
from conftest import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))
_results = pytest.importorskip("_results", reason="benchmarks/ is not there (a Nix build has only tests/)")
micro = pytest.importorskip("micro")

RESULTS = sorted((ROOT / "benchmarks" / "results").rglob("*.json"))

GOOD = {
    "device": "NVIDIA H200",
    "driver": "580.1",
    "torch": "2.11.0+cu130",
    "cuda": "13.0",
    "date": "2026-11-30T10:00:00Z",
    "commit": "0" * 40,
    "library_sha256": "0" * 64,
    "command": "python benchmarks/micro.py",
    "rows": [
        {
            "op": "rms_norm",
            "shape": [16, 64],
            "dtype": "bf16",
            "candidate": "ours",
            "us_p10": 1.0,
            "us_median": 2.0,
            "us_p90": 3.0,
            "bytes": 4096,
            "copy_us": 1.5,
            "error_fp64": 1e-3,
        }
    ],
}


@pytest.mark.parametrize("path", RESULTS, ids=[str(path.relative_to(ROOT)) for path in RESULTS])
def test_every_committed_result_is_of_the_schema(path):
    assert not _results.problems(json.loads(path.read_text()))


def test_a_good_result_passes():
    assert not _results.problems(GOOD)


def changed(**values):
    return {**copy.deepcopy(GOOD), **values}


def changed_row(**values):
    return changed(rows=[{**GOOD["rows"][0], **values}])


BAD = {
    "not an object": [],
    "no rows": changed(rows=[]),
    "a key is missing": {key: value for key, value in GOOD.items() if key != "driver"},
    "a key too many": changed(comment="fast"),
    "a date in words": changed(date="yesterday"),
    "no digest": changed(library_sha256="abc"),
    "a row lacks its error": changed(rows=[{k: v for k, v in GOOD["rows"][0].items() if k != "error_fp64"}]),
    "a row with a key too many": changed_row(gbps=3000),
    "a shape in words": changed_row(shape="16x64"),
    "a time without spread": changed_row(us_p90=None),
    "a median outside its spread": changed_row(us_median=4.0),
    "no time and no reason": changed_row(us_p10=None, us_median=None, us_p90=None),
    "a time of zero": changed_row(us_p10=0.0),
    "a minimum above its p10": changed_row(us_min=1.5),
    "an error that is no number": changed_row(error_fp64=float("nan")),
    "bytes in words": changed_row(bytes="4 KiB"),
    "the same row twice": changed(rows=GOOD["rows"] * 2),
}


@pytest.mark.parametrize("what", BAD)
def test_a_bad_result_is_refused(what):
    assert _results.problems(BAD[what])


def test_an_absent_peer_is_a_row_with_its_reason():
    row = changed_row(us_p10=None, us_median=None, us_p90=None, error_fp64=None, reason="quack is not installed")
    assert not _results.problems(row)


@pytest.fixture
def bench(k, tmp_path, monkeypatch):
    """Run micro.py in this process; returns the result that it wrote."""
    monkeypatch.setattr(micro, "load_package", lambda: k)
    out = tmp_path / "micro.json"

    def run(*arguments):
        assert micro.main([*arguments, "--device", "cpu", "--budget-ms", "1", "--out", str(out)]) == 0
        return json.loads(out.read_text())

    return run


@pytest.mark.parametrize("op", list(micro.OPS))
def test_every_op_is_measured_right(k, bench, op, capsys):
    """Ours and eager agree with fp64: the formula, the call and the shapes of each case fit together."""
    if not hasattr(k, micro.OPS[op].needs):
        pytest.skip(f"the package has no {micro.OPS[op].needs} yet")
    shape = {"rope": "2,12,4,64", "qk_norm_rope": "2,12,4,64", "rope_3d": "2,64,4,64", "pixel_norm_silu": "2,8,3,4,5"}
    result = bench("--op", op, "--shape", shape.get(micro.OPS[op].needs, "2,12,64"), "--peer", "eager", "--fresh")
    assert not _results.problems(result)
    rows = {row["candidate"]: row for row in result["rows"] if row["op"] == op}
    assert set(rows) == {"copy", "ours", "eager"}
    assert all("reason" not in row for row in rows.values()), rows
    assert rows["ours"]["error_fp64"] <= rows["eager"]["error_fp64"] * 1.01
    assert "CPU figures are not GPU figures" in capsys.readouterr().out


def test_an_absent_peer_is_written_down(bench):
    result = bench("--op", "rms_norm", "--shape", "4,64", "--peer", "flashinfer")
    assert not _results.problems(result)
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
    assert not _results.problems(result)


def test_a_run_goes_on_where_it_stopped(bench, monkeypatch):
    arguments = ("--op", "rms_norm", "--shape", "4,64", "--peer", "eager")
    first = bench(*arguments)
    assert bench(*arguments)["rows"] == first["rows"], "nothing is measured twice"
    more = bench(*arguments, "--peer", "torch")
    assert {row["candidate"] for row in more["rows"]} == {"copy", "ours", "eager", "torch"}
    assert not _results.problems(more)
    assert more["rows"] != first["rows"], "a new candidate is measured beside all others"
    fresh = bench(*arguments, "--fresh")
    assert {row["candidate"] for row in fresh["rows"]} == {"copy", "ours", "eager"}
