"""The package under test, loaded as a user loads it: through `kernels.get_kernel`.

LOCAL_KERNELS points the loader at this project's build/ unless the caller has set it (kernel-builder's ci-test does).
On a CUDA torch the loaded variant is the CUDA one, which holds the CPU implementation too: it serves every `device`.
"""

from __future__ import annotations

import contextlib
import gc
import os
import shutil
import sys
from pathlib import Path
from typing import Callable

REPO_ID = "org/ltx-kernels"
VERSION = 1
ROOT = Path(__file__).resolve().parent.parent

os.environ.setdefault("LOCAL_KERNELS", f"{REPO_ID}={ROOT}")  # before `kernels` is imported
os.environ.setdefault("HF_HUB_OFFLINE", "1")  # no test may reach the network

import kernels  # noqa: E402
import pytest  # noqa: E402
import torch  # noqa: E402
import torch._dynamo  # noqa: E402

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


def copy_sources(tree: Path, objects: bool = False) -> Path:
    """Copy what a build reads, for a test that changes it; with the compiled objects a build there takes seconds."""
    for name in ("build.toml", "kernel_src", "torch-ext"):
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy2
        copy(ROOT / name, tree / name)
    if objects:
        for work in (ROOT / ".build").glob("*-cpu-*"):
            shutil.copytree(work, tree / ".build" / work.name)
    return tree


@pytest.fixture(scope="session")
def k():
    """The loaded package: `k.rms_norm(...)`."""
    try:
        return kernels.get_kernel(REPO_ID, version=VERSION)
    except FileNotFoundError as error:
        pytest.exit(f"no variant to test, run `make build` first: {error}", returncode=2)


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request) -> str:
    """Every test that takes it runs on both backends: what passes on one must pass on the other."""
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    return request.param


@pytest.fixture
def gpu():
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")


@pytest.fixture
def fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture(params=DTYPES.values(), ids=DTYPES.keys())
def dtype(request) -> torch.dtype:
    return request.param


@pytest.fixture(autouse=True)
def fp32_convolutions(monkeypatch):
    """torch's default is TF32, which turns a difference in the last bit before a convolution into one of 1e-4."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)


@pytest.fixture(autouse=True)
def seed():
    """The same numbers in every run and in any order of the tests."""
    torch.manual_seed(0)


# ---- outputs and inputs of any op


def outputs_of(result) -> tuple[torch.Tensor, ...]:
    """The tensors that an op returned: one, or several of which some may be None."""
    return tuple(t for t in (result if isinstance(result, (tuple, list)) else (result,)) if t is not None)


def same_bits(a, b) -> bool:
    a, b = outputs_of(a), outputs_of(b)
    return len(a) == len(b) > 0 and all(torch.equal(x, y) for x, y in zip(a, b))


def misaligned(tensor: torch.Tensor) -> torch.Tensor:
    """The same values and memory format, one element past an aligned start: what `flat[1:1+D]` gives."""
    flat = torch.empty(tensor.numel() + 1, dtype=tensor.dtype, device=tensor.device)
    return flat[1:].as_strided(tensor.shape, torch.empty_like(tensor).stride()).copy_(tensor)


@contextlib.contextmanager
def full_gpu_memory(make: Callable):
    """What `make` allocates, and behind it one megabyte.

    The cache is emptied first: in a segment of an earlier test there would be room that counts as taken.
    """
    gc.collect()
    torch.cuda.empty_cache()
    made = make()
    total = torch.cuda.mem_get_info()[1]
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + (1 << 20)) / total)
    try:
        yield made
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


# ---- injected models


@pytest.fixture(params=["ltx_video", "ltx2"])
def model_and_inputs(request):
    from ltx_models import MODELS

    return MODELS[request.param]()


@pytest.fixture
def ltx():
    """(model, inputs, stock's output) of LTX-Video."""
    import tiny_models
    from ltx_models import run

    model, inputs = tiny_models.ltx_video(layers=3), tiny_models.ltx_video_inputs()
    return model, inputs, run(model, inputs)


@pytest.fixture
def flux():
    """(model, inputs, stock's output) of FLUX.1."""
    from tiny_diffusers import FAMILIES, run

    model, inputs = FAMILIES["flux"].build(), FAMILIES["flux"].inputs()
    return model, inputs, run(model, inputs)


@pytest.fixture
def inner(k):
    """inner("blocks"): a module of the loaded package's inject folder."""
    return lambda name: sys.modules[f"{k.__name__}.inject.{name}"]


@pytest.fixture
def any_size(monkeypatch, inner):
    """Compiled models of diffusers run the ops on tiny tensors as well."""
    monkeypatch.setattr(inner("blocks"), "COMPILED_ELEMENTS", 0)


@pytest.fixture
def own_attention_backend():
    """A model's set_attention_backend sets that of the process as well: it is put back."""
    dispatch = pytest.importorskip("diffusers.models.attention_dispatch")
    with dispatch.attention_backend(dispatch._AttentionBackendRegistry.get_active_backend()[0]):
        yield


@pytest.fixture
def every_layer_norm(inner, monkeypatch):
    """LayerNorms of tiny models are left to torch otherwise."""
    monkeypatch.setattr(inner("decoders"), "LAYER_NORM_ELEMENTS", 0)
