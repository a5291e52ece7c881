"""benchmarks/benchmark.py, which `kernels benchmark` runs: every op is in it, and its references agree."""

from __future__ import annotations

import importlib.util
import inspect

import kernels
import pytest
import torch
from conftest import ROOT

SCRIPT = ROOT / "benchmarks" / "benchmark.py"
if not SCRIPT.is_file():
    pytest.skip("benchmarks/ is not there (a Nix build has only tests/)", allow_module_level=True)


def load():
    """As the runner loads it: by its path, with nothing else of the folder on the path."""
    spec = importlib.util.spec_from_file_location("benchmark_module", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


CLASSES = [c for c in vars(load()).values() if inspect.isclass(c) and issubclass(c, kernels.Benchmark)]
CLASSES.remove(kernels.Benchmark)
PREFIX = "benchmark_"
WORKLOADS = [(c, name[len(PREFIX) :]) for c in CLASSES for name in dir(c) if name.startswith(PREFIX)]


def test_every_op_has_a_workload(k):
    source = SCRIPT.read_text(encoding="utf-8")
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
