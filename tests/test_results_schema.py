"""The committed results are of one schema; that the benchmarks write it is in test_benchmarks.py."""

from __future__ import annotations

import copy
import json
import sys
from pathlib import Path

import pytest
from conftest import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))
_results = pytest.importorskip("_results", reason="benchmarks/ is not there (a Nix build has only tests/)")

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
    assert not _results.problems(changed(variant="_ltx_kernels_cuda_abc"))


def test_the_commit_is_that_of_the_library_not_of_the_host(monkeypatch):
    """A GPU host's .git was of another commit than the build that was copied there, and named in the results."""
    monkeypatch.setattr(_results, "_output", lambda *command: "" if "status" in command else "b" * 40)
    monkeypatch.delenv("LTX_KERNELS_COMMIT", raising=False)
    built = {"provenance": {"kernel": {"commit": "a" * 40, "dirty": False}}}
    assert _results.commit(built) == "a" * 40
    built["provenance"]["kernel"]["dirty"] = True
    assert _results.commit(built) == "a" * 40 + "-dirty"
    assert _results.commit({"provenance": {}}) == _results.commit({}) == "b" * 40
    monkeypatch.setenv("LTX_KERNELS_COMMIT", "c" * 40)
    assert _results.commit(built) == "c" * 40


def test_the_header_names_the_variant_that_was_loaded(k):
    header = _results.header(k, "cpu")
    assert header["variant"] == json.loads((Path(k.__file__).parent / "metadata.json").read_text())["id"]
    assert not _results.problems({**header, "rows": GOOD["rows"]})


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
    "a variant in numbers": changed(variant=7),
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
