"""benchmarks/benchmark*.py, which `kernels benchmark` runs: every op is in them, and their references agree."""

from __future__ import annotations

import importlib.util
import inspect
import os
import subprocess
import sys

import kernels
import pytest
import torch
from conftest import ROOT

SCRIPTS = sorted((ROOT / "benchmarks").glob("benchmark*.py"))  # all that the runner takes
if not SCRIPTS:
    pytest.skip("benchmarks/ is not there (a Nix build has only tests/)", allow_module_level=True)


def load(script):
    """The Benchmark classes of a script, loaded as the runner does: by its path, without its folder on the path."""
    spec = importlib.util.spec_from_file_location("benchmark_module", script)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    classes = [c for c in vars(module).values() if inspect.isclass(c) and issubclass(c, kernels.Benchmark)]
    return [c for c in classes if c is not kernels.Benchmark]


CLASSES = [cls for script in SCRIPTS for cls in load(script)]
PREFIX = "benchmark_"
WORKLOADS = [(c, name[len(PREFIX) :]) for c in CLASSES for name in dir(c) if name.startswith(PREFIX)]


def test_every_op_has_a_workload(k):
    source = (ROOT / "benchmarks" / "benchmark.py").read_text(encoding="utf-8")
    ops = [n for n in k.__all__ if inspect.isfunction(getattr(k, n)) and "kernels" not in n and n != "patch_rmsnorm"]
    assert len(ops) > 10
    assert not [op for op in ops if op != "rmsnorm" and f"self.kernel.{op}(" not in source]


@pytest.mark.parametrize(("cls", "name"), WORKLOADS, ids=[name for _, name in WORKLOADS])
def test_workload_passes_its_verification(k, device, cls, name):
    """What the runner does: setup, benchmark, verify, allclose with these tolerances."""
    workload = cls()
    workload.kernel, workload.device = k, device
    torch.manual_seed(workload.seed)
    workload.setup()
    getattr(workload, f"benchmark_{name}")()
    expected = getattr(workload, f"verify_{name}")()
    assert workload.out.dtype == expected.dtype
    assert torch.allclose(workload.out, expected, atol=1e-2)
    # Outputs near zero would pass whatever they are.
    assert not torch.allclose(workload.out, torch.zeros_like(expected), atol=5e-2)


def test_kernels_benchmark_runs_every_script(k):
    """The command itself: it fails on a benchmark*.py that cannot be loaded alone or has no class of the Hub's."""
    command = "from kernels.cli import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", command, "benchmark", ".", "--iterations", "2", "--warmup", "1"],
        cwd=ROOT,
        env={**os.environ, "COLUMNS": "200"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    shown = done.stdout + done.stderr
    assert all(f"Running {script.name}" in shown for script in SCRIPTS)
    assert [name for _, name in WORKLOADS if name not in shown] == []
    assert "✗" not in shown
