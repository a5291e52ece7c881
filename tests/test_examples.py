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
SMALL = ["--num-frames", "9", "--height", "64", "--width", "96"]


def run_example(name: str, arguments: list[str], says: str, **environment: str | None) -> None:
    script = ROOT / "examples" / name
    if not script.is_file():
        pytest.skip("the examples are not there (a Nix build has only tests/)")
    if torch.cuda.is_available() and torch.cuda.get_device_properties(0).total_memory < 40 << 30:
        pytest.skip("on a GPU the models have their true size")
    variables = {**os.environ, "HF_HUB_OFFLINE": "1", **environment}
    variables = {name: value for name, value in variables.items() if value is not None}
    command = [sys.executable, script, *arguments]
    run = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=600)
    assert run.returncode == 0, run.stderr[-2000:]
    assert says in run.stdout


@pytest.mark.parametrize("name", EXAMPLES)
def test_example_runs(k, name):
    pytest.importorskip("transformers")
    environment = {"LOCAL_KERNELS": None} if name.endswith("offline") else {}
    run_example(name.split()[0], *EXAMPLES[name], **environment)


def test_demo_runs(k):
    """`make demo`: on a GPU the 2B model."""
    pytest.importorskip("diffusers")
    run_example("ltx_video/demo.py", ["--steps", "2", *([] if torch.cuda.is_available() else SMALL)], "speed-up")


def test_generate_video_compares_and_writes(k, tmp_path):
    """On a GPU the four configurations at true sizes; without one a tiny model injected, for compiling takes long."""
    for module in ("diffusers", "imageio_ffmpeg", "PIL"):
        pytest.importorskip(module)
    output = tmp_path / "video.mp4"
    options = ["--output", str(output), "--steps", "2", "--warmup-iterations", "1"]
    if torch.cuda.is_available():
        run_example(
            "ltx_video/generate_video.py", [*options, "--random-weights", "--num-frames", "49", "--compare"], "dB"
        )
        assert output.with_suffix(".png").is_file()
    else:
        run_example("ltx_video/generate_video.py", [*options, "--tiny"], "peak memory")
    assert output.stat().st_size > 1000
