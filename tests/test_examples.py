"""The examples that need no weights run, in a process of their own as a user runs them."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from conftest import ROOT

EXAMPLES = {
    "transformers_injection_example.py": (["--tokens", "4"], "removed: the stock model again"),
    "huggingface_kernels_example.py": ([], "Mode.TRAINING|TORCH_COMPILE: RMSNorm runs"),
    "huggingface_kernels_example.py offline": ([], "not from the Hub"),
}


@pytest.mark.parametrize("name", EXAMPLES)
def test_example_runs(k, name):
    arguments, says = EXAMPLES[name]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    if name.endswith("offline"):
        environment.pop("LOCAL_KERNELS", None)
    script = ROOT / "examples" / name.split()[0]
    if not script.is_file():
        pytest.skip("the examples are not there (a Nix build has only tests/)")
    pytest.importorskip("transformers")
    if torch.cuda.is_available() and torch.cuda.get_device_properties(0).total_memory < 40 << 30:
        pytest.skip("on a GPU the model has 8 billion parameters")
    run = subprocess.run(
        [sys.executable, script, *arguments], env=environment, capture_output=True, text=True, timeout=600
    )
    assert run.returncode == 0, run.stderr[-2000:]
    assert says in run.stdout
