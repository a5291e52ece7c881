"""scripts/build_variant.py: what it reads, what it compiles anew, and what it says when something is missing."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from conftest import ROOT, copy_sources

build_variant = pytest.importorskip("build_variant", reason="scripts/ is not there (a Nix build has only tests/)")
import ptxas_report  # noqa: E402


@pytest.fixture
def tree(tmp_path) -> Path:
    """A copy of the sources that a test may change."""
    return copy_sources(tmp_path)


def source_id(tree: Path) -> str:
    return build_variant.Project(tree).source_id()


def change(path: Path) -> None:
    path.write_text(path.read_text() + "\n")


def test_any_changed_source_is_a_new_namespace(tree):
    before = source_id(tree)
    assert re.fullmatch("[a-z2-7]{13}", before), "the id is part of a C++ macro and of a Python module's name"
    project = build_variant.Project(tree)
    names = ["build.toml", *project.native_sources(), "torch-ext/ltx_kernels/__init__.py"]
    ids = {before}
    for name in names:
        change(tree / name)
        ids.add(source_id(tree))
    assert len(ids) == len(names) + 1


def test_what_is_no_source_leaves_the_namespace(tree):
    before = source_id(tree)
    package = tree / "torch-ext" / "ltx_kernels"
    (package / "__pycache__").mkdir(exist_ok=True)
    (package / "__pycache__" / "x.py").touch()
    (package / "_ops.py").touch()  # a checkout in which kernel-builder has been run
    (package / "notes.md").touch()
    (tree / "README.md").touch()
    assert source_id(tree) == before


def test_a_source_that_is_not_there_is_named(tree):
    path = tree / build_variant.Project(tree).native_sources()[0]
    path.unlink()
    with pytest.raises(build_variant.BuildError, match=re.escape(path.relative_to(tree).as_posix())):
        source_id(tree)


def plan(tree: Path, backend: str = "cpu") -> str:
    project = build_variant.Project(tree)
    nvcc = None
    if backend == "cuda":  # a toolkit of nothing but the library's name
        (tree / "lib").mkdir()
        (tree / "lib" / "libcudart.so.13").touch()
        nvcc = build_variant.Nvcc(Path("nvcc"), "13.0", [], tree / "lib")
    units = project.units(backend)
    torch = build_variant.Torch.find()
    return build_variant.ninja_file(project, backend, "_ops_name", units, Path(".build/work"), torch, nvcc)


@pytest.mark.parametrize("backend", ["cpu", "cuda"])
def test_only_the_binding_sees_the_namespace(tree, backend):
    """A changed Python file must not recompile every .cu."""
    edges = re.findall(r"^build (\S+): \w+ (\S+)\n  flags = (.*)$", plan(tree, backend), re.MULTILINE)
    assert len(edges) > 2
    assert [source for _, source, flags in edges if "_ops_name" in flags] == ["torch-ext/torch_binding.cpp"]


def test_the_plan_for_cuda(tree):
    text = plan(tree, "cuda")
    for flag in ("-gencode=arch=compute_75,code=sm_75", "-gencode=arch=compute_80,code=sm_80"):
        assert flag in text
    assert "-gencode=arch=compute_90,code=[sm_90,compute_90]" in text.replace("'", "")
    for flag in ("-DCUDA_KERNEL", "-DUSE_CUDA=1", "-DTORCH_TARGET_VERSION=0x020b000000000000", "-std=c++20"):
        assert flag in text
    assert "libcudart.so.13" in text


def test_a_changed_header_recompiles_what_includes_it(tmp_path):
    project = build_variant.Project(copy_sources(tmp_path, objects=True))
    try:
        variant = build_variant.build(project, "cpu", tmp_path / "build")
    except build_variant.BuildError as error:
        pytest.skip(f"cannot build here: {error}")

    def recompiled() -> set[str]:
        ninja = [build_variant.ninja(), "-C", tmp_path, "-f", f".build/{variant.name}/build.ninja", "-n"]
        output = subprocess.run(ninja, capture_output=True, text=True, check=True).stdout
        return set(re.findall(r"CXX (\S+)", output))

    assert recompiled() == set()
    os.utime(tmp_path / "torch-ext" / "torch_binding.h")
    assert recompiled() == {"torch-ext/torch_binding.cpp"}
    os.utime(tmp_path / "kernel_src" / "norm" / "norm.h")
    assert {"torch-ext/torch_binding.cpp", "kernel_src/cpu/norm.cpp"} <= recompiled()


def test_missing_tools_are_named_with_their_cure(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    for variable in ("CUDA_HOME", "CUDA_PATH", "CXX"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr("sys.path", [])
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(tmp_path))
    with pytest.raises(build_variant.BuildError, match="nvidia-cuda-nvcc==13.0.88"):
        build_variant.Nvcc.find()
    with pytest.raises(build_variant.BuildError, match="install one"):
        build_variant.compiler()
    with pytest.raises(build_variant.BuildError, match="pip install ninja"):
        build_variant.ninja()
    with pytest.raises(build_variant.BuildError, match="python3-dev"):
        build_variant.python_include()


@pytest.mark.parametrize(
    ("capabilities", "flags"),
    [
        (["7.5"], ["-gencode=arch=compute_75,code=sm_75"]),
        (["9.0+PTX"], ["-gencode=arch=compute_90,code=[sm_90,compute_90]"]),
        (["10.0"], ["-gencode=arch=compute_100,code=sm_100"]),
        (["9.0a"], ["-gencode=arch=compute_90a,code=sm_90a"]),
        (["compute_75"], ["-gencode=arch=compute_75,code=compute_75"]),
    ],
)
def test_gencode_flags(capabilities, flags):
    assert build_variant.gencode_flags(capabilities) == flags


def test_a_capability_that_is_none_is_refused():
    with pytest.raises(build_variant.BuildError, match="sm_90.*write it like"):
        build_variant.gencode_flags(["sm_90"])


def test_check_sees_another_source_and_a_touched_file(tree, k, tmp_path):
    """What `make test` fails on."""
    loaded = Path(k.__file__).parent
    project = build_variant.Project(ROOT)
    if build_variant.stale(project, loaded):
        pytest.fail("the loaded variant is not of this tree: `make build`")
    copy = tmp_path / "build" / loaded.name
    shutil.copytree(loaded, copy)
    assert build_variant.stale(project, copy) is None
    change(copy / "__init__.py")
    assert "was changed after it was built" in build_variant.stale(project, copy)
    change(tree / "torch-ext" / "ltx_kernels" / "__init__.py")
    assert "was made from other sources" in build_variant.stale(build_variant.Project(tree), loaded)
    assert "not there" in build_variant.stale(project, tmp_path / "nothing")
    assert "make build" in build_variant.check(project, tmp_path / "nothing", "cpu")


PTXAS_LOG = """\
ptxas info    : 28 bytes gmem, 224 bytes cmem[4]
ptxas info    : Compiling entry function '_Z12scale_kernelIfEvPKT_PS0_lf' for 'sm_80'
ptxas info    : Function properties for _Z12scale_kernelIfEvPKT_PS0_lf
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 10 registers, used 1 barriers, 1024 bytes smem, 380 bytes cmem[0]
ptxas info    : Compiling entry function '_Z12scale_kernelIfEvPKT_PS0_lf' for 'sm_90'
ptxas info    : Function properties for _Z12scale_kernelIfEvPKT_PS0_lf
    64 bytes stack frame, 48 bytes spill stores, 32 bytes spill loads
ptxas info    : Used 255 registers, used 1 barriers
"""


def test_ptxas_report(tmp_path):
    log, table = tmp_path / "log", tmp_path / "table.tsv"
    log.write_text(PTXAS_LOG)
    ptxas_report.write(ptxas_report.parse({"scale.cu": log}), table)
    rows = ptxas_report.read(table)
    assert [(r["arch"], r["registers"], r["smem"]) for r in rows] == [("sm_80", "10", "1024"), ("sm_90", "255", "0")]
    (spill,) = ptxas_report.spills(rows)
    assert "scale.cu sm_90" in spill and "48 + 32 bytes" in spill
    assert ptxas_report.spills(rows, limit=47) and not ptxas_report.spills(rows, limit=48)


def test_a_kernel_that_changed_appeared_or_went_is_reported():
    numbers = dict.fromkeys(ptxas_report.COLUMNS[2:-1], "0")
    rows = [{"source": "a.cu", "arch": "sm_90", "kernel": name, **numbers, "registers": "40"} for name in "abc"]
    assert not ptxas_report.differences(rows, rows[::-1])
    expected = [rows[0], {**rows[1], "registers": "38"}, {**rows[2], "kernel": "d"}]
    changed, appeared, went = ptxas_report.differences(rows, expected)
    assert changed.startswith("a.cu sm_90 b:") and "40" in changed and "38" in changed
    assert appeared.endswith("expected none") and "gone" in went
