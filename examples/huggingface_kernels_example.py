"""The kernels library with this package: load it from the Hub or from a local build, call it, let kernelize use it.

python huggingface_kernels_example.py                   the Hub; a local build where the Hub cannot be reached
python huggingface_kernels_example.py --local ..        a local build: this repository, its build/, or a variant
python huggingface_kernels_example.py --trust           also from a publisher that the Hub does not list as trusted
"""

from __future__ import annotations

import argparse
import copy
import os
from pathlib import Path

import kernels
import torch
from torch import nn

REPOSITORY = "org/ltx-kernels"
VERSION = 1  # the newest build of the API's first version: what works with it works with all of version 1
ROOT = Path(__file__).resolve().parent.parent
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def local_build(trusted: list[str] | bool) -> Path | None:
    """None where the Hub has a build for this machine; else the build of this repository."""
    try:
        # False: there is a kernel, but no build of it for this torch, CUDA and processor. An error: none, or no Hub.
        if kernels.has_kernel(REPOSITORY, version=VERSION, trust_remote_code=trusted):
            return None
        reason = "no build for this machine"
    except Exception as error:  # offline, not published, not trusted: each has its own class
        reason = f"{type(error).__name__}: {error}"
    print(f"not from the Hub ({reason.splitlines()[0][:100]})")
    if not (ROOT / "build").is_dir():
        raise SystemExit("and there is no local build: run `make build` in the repository")
    return ROOT


class RMSNorm(nn.Module):
    """A norm as most language models have it."""

    def __init__(self, size: int, eps: float = 1e-6):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.variance_epsilon = eps

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        x = hidden_states.float()
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return self.weight * x.to(hidden_states.dtype)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--local", type=Path, help="a local build in place of the Hub")
    parser.add_argument("--trust", action="store_true", help=f"trust {REPOSITORY} whoever publishes it")
    args = parser.parse_args()

    # A kernel is code that runs with your rights. By default only publishers that the Hub lists as trusted are loaded;
    # name the repositories that you trust beyond these.
    trusted = [REPOSITORY] if args.trust else False
    local = args.local or local_build(trusted)
    if local is None:
        k = kernels.get_kernel(REPOSITORY, version=VERSION, trust_remote_code=trusted)
    else:
        k = kernels.get_local_kernel(local)
    print(f"from {local or REPOSITORY}: backend {k.backend}, {len(k.__all__)} names: {', '.join(sorted(k.__all__))}")

    # 1. The functions.
    x, residual = torch.randn(2, 4, 1024, device=DEVICE)
    weight = torch.ones(1024, device=DEVICE)
    y, new_residual = k.add_rms_norm(x, residual, weight)
    torch.testing.assert_close(new_residual, x + residual)
    torch.testing.assert_close(y, torch.nn.functional.rms_norm(x + residual, (1024,), weight, 1e-6))
    print(f"add_rms_norm: {tuple(y.shape)} on {y.device}")

    # 2. The layers, through kernelize: a class is given a name, the name is mapped to a layer of a repository.
    if local is None and "LOCAL_KERNELS" not in os.environ:
        hub = {"repo_id": REPOSITORY, "version": VERSION, "trust_remote_code": trusted}
        layer = kernels.LayerRepository(layer_name="RMSNorm", **hub)
    else:  # LOCAL_KERNELS stands in for the Hub in has_kernel and get_kernel, not here
        layer = kernels.LocalLayerRepository(local or Path(k.__file__).parent, layer_name="RMSNorm")
    kernels.replace_kernel_forward_from_hub(RMSNorm, "ExampleRMSNorm")
    model = nn.Sequential(nn.Linear(1024, 1024), RMSNorm(1024)).to(DEVICE)
    for mode in (kernels.Mode.INFERENCE, kernels.Mode.TRAINING, kernels.Mode.TRAINING | kernels.Mode.TORCH_COMPILE):
        with kernels.use_kernel_mapping({"ExampleRMSNorm": {DEVICE: layer}}):
            fast = kernels.kernelize(copy.deepcopy(model), mode=mode, device=DEVICE)
        torch.testing.assert_close(fast(x), model(x))
        print(f"kernelize, {mode}: {k.layers.RMSNorm.__name__} runs, the result is that of the stock module")

    # 3. The models of diffusers and transformers need no mapping: see the other examples.
    print(k.inject_optimized_kernels(nn.Sequential(nn.RMSNorm(1024))))


if __name__ == "__main__":
    main()
