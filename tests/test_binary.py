"""The built files: ABI, symbols, architectures, and that the CPU sources compile elsewhere.

Each variant in build/ that is of this tree is checked, loadable here or not; `make build-cuda` adds the CUDA one.
"""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT, VERSION

build_variant = pytest.importorskip("build_variant", reason="scripts/ is not there (a Nix build has only tests/)")

PROJECT = build_variant.Project(ROOT)


def variant(backend: str) -> Path:
    """The folder in build/; the one that is loaded here must be of this tree, the other one is optional."""
    problem = build_variant.check(PROJECT, ROOT / "build", backend)
    if problem and backend != build_variant.default_backend():
        pytest.skip(problem)
    assert problem is None, problem
    return build_variant.variants(ROOT / "build", backend)[0]


@pytest.fixture(params=["cpu", "cuda"])
def library(request) -> Path:
    return next(variant(request.param).glob("*.abi3.so"))


@pytest.fixture
def cuda_library() -> Path:
    return next(variant("cuda").glob("*.abi3.so"))


def run(*command: str | Path) -> str:
    result = subprocess.run([str(c) for c in command], capture_output=True, text=True, check=False)
    assert result.returncode == 0, f"{' '.join(map(str, command))}\n{result.stdout}{result.stderr}"
    return result.stdout


def undefined_symbols(library: Path) -> list[str]:
    if shutil.which("nm") is None:
        pytest.skip("nm (binutils) is not installed")
    return [line.split()[-1] if "(" not in line else line.strip() for line in _nm(library, "--undefined-only")]


def _nm(library: Path, which: str) -> list[str]:
    return run("nm", "-DC", which, library).splitlines()


def test_manylinux_and_python_abi(library):
    abi = pytest.importorskip("kernel_abi_check")
    file = abi.ObjectFile(library)
    assert not file.check_manylinux("manylinux_2_28")
    assert not file.check_python_abi("3.9")


def test_no_symbol_of_torch_beyond_the_stable_c_interface(library):
    """Undefined c10:: or at:: symbols would tie the binary to one torch release."""
    symbols = undefined_symbols(library)
    assert not [s for s in symbols if re.search(r"\b(c10|at|torch|caffe2)::", s)]
    assert any("aoti_torch" in s for s in symbols), "nm shows no shim symbol at all: is this the right file?"


def test_exports_the_module_and_nothing_of_ours(library):
    """-fvisibility=hidden: two builds in one process must not resolve to each other's functions."""
    if shutil.which("nm") is None:
        pytest.skip("nm (binutils) is not installed")
    exported = [line.split(maxsplit=2)[2] for line in _nm(library, "--defined-only")]
    linker = {"__bss_start", "_edata", "_end", "_init", "_fini"}
    ours = [s for s in exported if s not in linker and not re.search(r"\bstd::|__gnu_cxx", s)]
    assert ours == [f"PyInit_{library.name.split('.')[0]}"]


def test_needs_the_torch_libraries(library):
    """Without these DT_NEEDED entries the import fails on missing aoti_* symbols."""
    if shutil.which("readelf") is None:
        pytest.skip("readelf (binutils) is not installed")
    dynamic = run("readelf", "-d", library)
    needed = set(re.findall(r"\(NEEDED\).*\[(.+)\]", dynamic))
    assert {"libtorch.so", "libtorch_cpu.so", "libc10.so"} <= needed
    assert "RPATH" not in dynamic and "RUNPATH" not in dynamic
    cudart = {n for n in needed if n.startswith("libcudart")}
    assert cudart == ({"libcudart.so.13"} if "_cuda_" in library.name else set())


def test_no_path_of_the_build_machine(library):
    assert str(ROOT).encode() not in library.read_bytes()


def cuobjdump() -> Path:
    spec = importlib.util.find_spec("nvidia")
    places = [Path(p, "cu13", "bin", "cuobjdump") for p in (spec.submodule_search_locations if spec else ())]
    if on_path := shutil.which("cuobjdump"):
        places.append(Path(on_path))
    for place in places:
        if place.is_file():
            return place
    pytest.skip("cuobjdump is not installed (pip install nvidia-cuda-cuobjdump)")


def test_architectures_in_the_file(cuda_library):
    cubins = set(re.findall(r"\.(sm_\w+)\.cubin", run(cuobjdump(), "-lelf", cuda_library)))
    ptx = set(re.findall(r"\.(sm_\w+)\.ptx", run(cuobjdump(), "-lptx", cuda_library)))
    assert cubins == {"sm_75", "sm_80", "sm_90"}
    assert ptx == {"sm_90"}


@pytest.mark.parametrize("backend", ["cpu", "cuda"])
def test_metadata(backend):
    rust = pytest.importorskip("kernels._rust")
    folder = variant(backend)
    metadata = rust.Metadata.read_from_file(folder / "metadata.json")
    assert metadata.id == PROJECT.ops_name(backend)
    assert (str(metadata.name), metadata.version, metadata.license) == ("ltx-kernels", VERSION, "Apache-2.0")
    assert metadata.python_depends == [] and metadata.kernel_depends == []
    assert str(metadata.backend.backend_type).lower() == backend
    assert metadata.backend.archs == (["7.5", "8.0", "9.0+PTX"] if backend == "cuda" else None)
    metadata.digest.validate(rust.Digest.hash_variant(metadata.digest.algorithm, folder))
    assert metadata.provenance.kernel_builder.version == "scripts/build_variant.py"


@pytest.mark.parametrize("backend", ["cpu", "cuda"])
def test_layout_of_the_variant(backend):
    """The Python files of torch-ext, what is generated, and nothing else."""
    folder = variant(backend)
    ops = PROJECT.ops_name(backend)
    there = {p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file() and p.suffix != ".pyc"}
    package = {p.as_posix() for p in PROJECT.package_files()}
    assert there == package | {"_ops.py", "metadata.json", f"{ops}.abi3.so"}
    assert f"torch.ops.{ops}" in (folder / "_ops.py").read_text()


# ---- the CPU sources with another compiler and for other machines

TARGETS = ["x86_64-linux-gnu.2.28", "aarch64-linux-gnu.2.28", "aarch64-macos"]


@pytest.mark.parametrize("target", TARGETS)
def test_cpu_sources_compile_with_clang(target, tmp_path):
    """clang of ziglang, which brings each target's headers. Objects only: there is no torch to link for them."""
    if importlib.util.find_spec("ziglang") is None:
        pytest.skip("ziglang is not installed")
    torch = build_variant.Torch.find()
    jobs = []
    for unit in PROJECT.units("cpu"):
        if unit.binding:
            continue  # it needs the target's Python.h; all else is ours
        command = [sys.executable, "-m", "ziglang", "c++", "-target", target, "-std=c++20", "-O1", "-c", "-Wall"]
        command += ["-Werror=return-type", "-DCPU_KERNEL", "-DTORCH_TARGET_VERSION=0x020b000000000000", "-fPIC"]
        command += ["-isystem", torch.root / "include", *(f"-I{d}" for d in unit.include), *unit.flags]
        command += [unit.source, "-o", tmp_path / (Path(unit.source).stem + ".o")]
        jobs.append(subprocess.Popen([str(c) for c in command], cwd=ROOT, stderr=subprocess.PIPE, text=True))
    errors = [job.communicate()[1] for job in jobs]
    assert all(job.returncode == 0 for job in jobs), "\n".join(errors)
