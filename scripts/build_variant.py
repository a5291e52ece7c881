#!/usr/bin/env python3
"""Build a Hub variant of this kernel without Nix, for development.

Releases are built by kernel-builder (`nix run .#build-and-copy`). This script makes the same thing for one backend on
this machine: it reads the same build.toml, compiles with ninja (parallel, incremental, header changes included) and
lays build/<variant>/ out as kernel-builder does: the .abi3.so, _ops.py, the Python files, metadata.json.

    python scripts/build_variant.py                     the backend the installed torch has
    python scripts/build_variant.py --backend cuda      CUDA; needs nvcc, but no GPU and no CUDA torch (stable ABI)
    python scripts/build_variant.py --backend cuda --archs 9.0          one architecture, for quick work
    python scripts/build_variant.py --backend cuda --archs compute_75   PTX alone: another chip's code path on any GPU
    python scripts/build_variant.py --check             is build/ made from the present sources?

The ops live in torch.ops._ltx_kernels_<backend>_<id> where <id> is a digest of all sources. So a changed source is a
new namespace and two builds load side by side in one process, and the id in metadata.json tells which sources a variant
was made from. Only torch_binding.cpp sees the namespace: any change recompiles that file, and no other for its sake.
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import hashlib
import json
import platform
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

try:
    import tomllib
except ImportError:  # Python 3.10
    import tomli as tomllib

import ptxas_report
from toolchain import BuildError, Nvcc, Torch, compiler, jobs, ninja, output, python_include

PROJECT = Path(__file__).resolve().parent.parent
BACKENDS = ("cpu", "cuda")

# What kernel-builder generates for a torch extension: how ops find their namespace, and how a plain import loads it.
OPS_PY = '''\
import torch
from . import {ops}
ops = torch.ops.{ops}

def add_op_namespace_prefix(op_name: str):
    """
    Prefix op by namespace.
    """
    return f"{ops}::{{op_name}}"
'''

REGISTRATION_H = """\
#pragma once

#include <Python.h>

#define _CONCAT(A, B) A##B
#define CONCAT(A, B) _CONCAT(A, B)

#define _STRINGIFY(A) #A
#define STRINGIFY(A) _STRINGIFY(A)

// The registration macros of torch with NAME expanded first, so that it can be TORCH_EXTENSION_NAME.
#define TORCH_LIBRARY_EXPAND(NAME, MODULE) TORCH_LIBRARY(NAME, MODULE)
#define STABLE_TORCH_LIBRARY_EXPAND(NAME, MODULE) STABLE_TORCH_LIBRARY(NAME, MODULE)
#define TORCH_LIBRARY_IMPL_EXPAND(NAME, DEVICE, MODULE) TORCH_LIBRARY_IMPL(NAME, DEVICE, MODULE)
#define STABLE_TORCH_LIBRARY_IMPL_EXPAND(NAME, DEVICE, MODULE) STABLE_TORCH_LIBRARY_IMPL(NAME, DEVICE, MODULE)

// An empty Python module: importing the shared library loads it, and loading registers the ops.
#define REGISTER_EXTENSION(NAME)                                               \\
  PyMODINIT_FUNC CONCAT(PyInit_, NAME)() {                                     \\
    static struct PyModuleDef module = {PyModuleDef_HEAD_INIT,                 \\
                                        STRINGIFY(NAME), nullptr, 0, nullptr}; \\
    return PyModule_Create(&module);                                           \\
  }
"""

# libstdc++ reads this variable of glibc 2.32 to skip atomics in single-threaded programs; manylinux_2_28 lacks it. Zero
# means "there are threads", which is always correct. kernel-builder needs no such thing: its toolchain has glibc 2.28.
GLIBC_COMPAT_C = """\
__attribute__((visibility("hidden"))) char __libc_single_threaded = 0;
"""


@dataclass
class Unit:
    """One file to compile, with what build.toml says about it."""

    source: str
    include: list[str]
    flags: list[str]
    capabilities: list[str] = field(default_factory=list)
    binding: bool = False  # a torch.src file: it alone sees the namespace

    @property
    def is_cuda(self) -> bool:
        return self.source.endswith(".cu")


class Project:
    """build.toml of a project folder and what follows from it."""

    def __init__(self, root: Path):
        self.root = root
        path = root / "build.toml"
        if not path.is_file():
            raise BuildError(f"{path} not found: --project must be the folder that holds build.toml")
        self.config = tomllib.loads(path.read_text(encoding="utf-8"))
        self.general = self.config["general"]
        self.torch = self.config["torch"]
        self.name = self.general["name"]
        self.python_name = self.name.replace("-", "_")

    def kernels(self, backend: str) -> list[dict]:
        return [k for k in self.config.get("kernel", {}).values() if k["backend"] == backend]

    def native_sources(self) -> list[str]:
        """Every file named in a `src`, headers included, each once."""
        names = list(self.torch["src"])
        for kernel in self.config.get("kernel", {}).values():
            names += kernel["src"]
        return list(dict.fromkeys(names))

    def package_files(self) -> list[Path]:
        """The files a variant takes from torch-ext, relative to the package folder."""
        package = self.root / "torch-ext" / self.python_name
        suffixes = {".py", *("." + ext for ext in self.torch.get("pyext", []))}
        files = (p for p in package.rglob("*") if p.suffix in suffixes and p.is_file())
        return sorted(p.relative_to(package) for p in files if p.name != "_ops.py" and "__pycache__" not in p.parts)

    def units(self, backend: str, archs: list[str] | None = None) -> list[Unit]:
        def compiled(names: list[str]) -> list[str]:
            return [n for n in names if n.endswith((".cpp", ".cc", ".cxx", ".cu"))]

        units = [
            Unit(s, self.torch.get("include", []), self.torch.get("cxx-flags", []), binding=True)
            for s in compiled(self.torch["src"])
        ]
        for kernel in self.kernels(backend):
            capabilities = archs or kernel.get("cuda-capabilities", [])
            for source in compiled(kernel["src"]):
                flags = kernel.get("cuda-flags" if source.endswith(".cu") else "cxx-flags", [])
                units.append(Unit(source, kernel.get("include", []), flags, capabilities))
        return units

    def stable_abi(self, backend: str) -> str:
        abi = self.torch.get("stable-abi")
        version = abi.get(backend) if isinstance(abi, dict) else abi
        if version is None:
            raise BuildError(f"build.toml gives no [torch.stable-abi] version for {backend}; this script needs one")
        return version

    def source_id(self) -> str:
        """A digest of all that a variant is made from, short enough for a namespace.

        This script is in it for its compiler flags; kernel-builder's own ids are git revisions and need no such thing.
        """
        package = Path("torch-ext", self.python_name)
        names = {"build.toml", *self.native_sources(), *((package / f).as_posix() for f in self.package_files())}
        missing = sorted(n for n in names if not (self.root / n).is_file())
        if missing:
            raise BuildError(f"build.toml names files that are not there: {', '.join(missing)}")
        digest = hashlib.sha256(Path(__file__).read_bytes())
        for name in sorted(names):
            content = (self.root / name).read_bytes()
            digest.update(f"{name}\0{len(content)}\0".encode() + content)
        return base64.b32encode(digest.digest()[:8]).decode().rstrip("=").lower()

    def ops_name(self, backend: str) -> str:
        return f"_{self.python_name}_{backend}_{self.source_id()}"


def variant_name(project: Project, backend: str, cuda_version: str | None = None) -> str:
    machine = platform.machine().lower().replace("amd64", "x86_64").replace("arm64", "aarch64")
    compute = "cpu" if backend == "cpu" else "cu" + str(cuda_version).replace(".", "")
    abi = project.stable_abi(backend).replace(".", "")
    return f"torch-stable-abi{abi}-{compute}-{machine}-{platform.system().lower()}"


def default_backend() -> str:
    """The backend whose variant `kernels` loads here: it goes by the torch that is installed, not by the GPU."""
    return "cuda" if Torch.find().cuda else "cpu"


# ---- ninja -----------------------------------------------------------------------------------------------


def gencode_flags(capabilities: list[str]) -> list[str]:
    """["8.0", "9.0+PTX", "compute_75"] -> SASS for the first two, PTX for the last two."""
    flags = []
    for capability in capabilities:
        if re.fullmatch(r"compute_\d+[af]?", capability):
            flags.append(f"-gencode=arch={capability},code={capability}")
            continue
        match = re.fullmatch(r"(\d+)\.(\d+[af]?)(\+PTX)?", capability)
        if match is None:
            raise BuildError(
                f"CUDA capability {capability!r}: write it like 8.0, 9.0a, 9.0+PTX or compute_90 (PTX alone)"
            )
        number = match.group(1) + match.group(2)
        code = f"[sm_{number},compute_{number}]" if match.group(3) else f"sm_{number}"
        flags.append(f"-gencode=arch=compute_{number},code={code}")
    return flags


def ninja_file(
    project: Project, backend: str, ops: str, units: list[Unit], work: Path, torch: Torch, nvcc: Nvcc | None
) -> str:
    """The text of build.ninja. Flags follow kernel-builder's CMake for a Release build on the stable ABI.

    Ninja runs in the project's folder and `work` is relative to it: the tree can move or be copied with its objects.
    """
    cxx = compiler()
    darwin = platform.system() == "Darwin"
    major, minor = project.stable_abi(backend).split(".")
    defines = [
        f"-DTORCH_TARGET_VERSION={int(major) << 56 | int(minor) << 48:#018x}",
        "-DPy_LIMITED_API=0x03090000",
        *(["-DCUDA_KERNEL", "-DUSE_CUDA=1"] if nvcc else ["-DCPU_KERNEL"]),
        "-DNDEBUG",
    ]
    system = ["-isystem", str(torch.root / "include")]
    # -ffile-prefix-map: torch's checks put __FILE__ into the binary, and that should name no folder of this machine.
    # -fno-gnu-unique: else template statics of two builds in one process are merged by the dynamic linker.
    host = ["-fPIC", "-fvisibility=hidden", f"-ffile-prefix-map={torch.root}=torch"]
    if "clang" not in output([*shlex.split(cxx), "--version"]).lower():
        host.append("-fno-gnu-unique")
    warnings = ["-Wall", "-Wextra", "-Wno-unused-parameter"]
    # The toolkit's headers are on the C++ side too: the binding of a CUDA variant may name a stream.
    cuda_include = [part for d in nvcc.include for part in ("-isystem", str(d))] if nvcc else []
    cxx_flags = ["-std=c++20", "-O3", *host, *warnings, *defines, *system, *cuda_include]

    libraries = [f"-L{torch.root / 'lib'}", "-Wl,--no-as-needed", "-ltorch", "-ltorch_cpu", "-lc10"]
    if darwin:
        libraries = [f"-L{torch.root / 'lib'}", "-undefined", "dynamic_lookup", "-ltorch", "-ltorch_cpu", "-lc10"]
    if nvcc:
        # Dynamic, found by its soname: torch has loaded libcudart.so.<major> already, and there must be one of it.
        libraries.append(str(min(nvcc.lib.glob("libcudart.so*"), key=lambda p: len(p.name))))

    def command(*parts: str) -> str:
        return " ".join(shlex.quote(p).replace("$", "$$") for p in parts)

    lines = [
        "ninja_required_version = 1.5",
        f"builddir = {work}",
        "rule cxx",
        f"  command = {cxx} $flags -MD -MF $out.d -c $in -o $out",
        "  depfile = $out.d",
        "  deps = gcc",
        "  description = CXX $in",
        "rule link",
        f"  command = {cxx} -shared $in -o $out {command(*libraries)}",
        "  description = LINK $out",
    ]
    if nvcc:
        cuda_units = sum(u.is_cuda for u in units)
        archs = max((len(u.capabilities) for u in units), default=1)
        threads = max(1, min(archs, jobs() // max(1, cuda_units)))  # one nvcc a core; several when files are few
        # ptxas speaks on every compile and its words are kept beside the object, so a report costs no recompile.
        nvcc_flags = [
            "-std=c++20",
            "-O3",
            "--expt-relaxed-constexpr",
            "--resource-usage",
            f"--threads={threads}",
            "-ccbin",
            shlex.split(cxx)[0],
            *(f"-Xcompiler={f}" for f in (*host, "-Wall")),
            *defines,
            *system,
        ]
        lines += [
            f"nvcc_flags = {command(*nvcc_flags)}",
            "rule nvcc",
            f"  command = {command(str(nvcc.path))} $nvcc_flags $flags -MD -MF $out.d -c $in -o $out > $out.log 2>&1; "
            + "rc=$$?; grep -Ev '^ptxas info|bytes stack frame|^$$' $out.log; exit $$rc",
            "  depfile = $out.d",
            "  deps = gcc",
            "  description = NVCC $in",
        ]

    objects = []
    for unit in units:
        flags = [f"-I{d}" for d in unit.include]
        if unit.binding:
            flags += ["-isystem", str(work / "generated"), "-isystem", python_include()]
            flags.append(f"-DTORCH_EXTENSION_NAME={ops}")
        if unit.is_cuda:
            flags += gencode_flags(unit.capabilities)
        else:
            flags = cxx_flags + flags
        obj = work / "objects" / (unit.source + ".o")
        objects.append(obj)
        lines.append(f"build {obj}: {'nvcc' if unit.is_cuda else 'cxx'} {unit.source}")
        lines.append(f"  flags = {command(*flags, *unit.flags)}")
    if platform.system() == "Linux":
        compat = work / "objects" / "glibc_compat.o"
        objects.append(compat)
        lines += [f"build {compat}: cxx {work / 'generated' / 'glibc_compat.c'}", "  flags = -xc -O2 -fPIC"]
    lines.append(f"build {work / 'library.so'}: link {' '.join(map(str, objects))}")
    return "\n".join(lines) + "\n"


# ---- the variant -----------------------------------------------------------------------------------------


def git_status(root: Path) -> dict | None:
    """HEAD and whether tracked files differ from it, as kernel-builder records them; None where there is no commit."""
    git = ["git", "-C", str(root)]
    head = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
    if head.returncode != 0:
        return None
    status = subprocess.run([*git, "status", "--porcelain", "-uno"], capture_output=True, text=True, check=False)
    return {"commit": head.stdout.strip(), "dirty": bool(status.stdout.strip())}


def metadata(project: Project, backend: str, ops: str, units: list[Unit], staged: Path) -> dict:
    from kernels._rust import Digest, DigestAlgorithm  # the loader's own; needed to stage only

    archs = sorted({a for u in units if u.is_cuda for a in u.capabilities})
    general = project.general
    provenance: dict = {"kernel-builder": {"version": "scripts/build_variant.py"}}
    if (status := git_status(project.root)) is not None:
        provenance["kernel"] = status
    return {
        "name": project.name,
        "id": ops,
        "version": general["version"],
        "license": general["license"],
        **{key: general[key] for key in ("upstream", "source") if key in general},
        "python-depends": general.get("python-depends", []),
        "kernel-depends": [],
        "backend": {"type": backend, **({"archs": archs} if archs else {})},
        "digest": {
            "algorithm": "sha256",
            "files": Digest.hash_variant(DigestAlgorithm.SHA256, staged).files,
        },
        "provenance": provenance,
    }


def stage(project: Project, backend: str, ops: str, units: list[Unit], library: Path, variant: Path) -> None:
    """Lay the variant out beside its place and swap it in, so that nobody ever loads a half-written one."""
    variant.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".staging-", dir=variant.parent) as scratch:
        staged = Path(scratch, "new")
        staged.mkdir()
        shutil.copy(library, staged / f"{ops}.abi3.so")
        (staged / "_ops.py").write_text(OPS_PY.format(ops=ops), encoding="utf-8")
        for file in project.package_files():
            (staged / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(project.root / "torch-ext" / project.python_name / file, staged / file)
        text = json.dumps(metadata(project, backend, ops, units, staged), indent=2) + "\n"
        (staged / "metadata.json").write_text(text, encoding="utf-8")
        if variant.exists():
            variant.rename(Path(scratch, "old"))
        staged.rename(variant)


def stale(project: Project, variant: Path) -> str | None:
    """None when `variant` was made from the present sources and is whole; else what differs."""
    from kernels._rust import Digest, DigestAlgorithm, DigestValidationError, Metadata

    if not (variant / "metadata.json").is_file():
        return f"{variant} is not there"
    meta = Metadata.read_from_file(variant / "metadata.json")
    expected = project.ops_name(str(meta.backend.backend_type).lower())
    if meta.id != expected:
        return f"{variant} was made from other sources: its id is {meta.id}, the tree's {expected}"
    try:
        if meta.digest is None:
            return f"{variant} has no digest"
        meta.digest.validate(Digest.hash_variant(DigestAlgorithm.SHA256, variant))
    except DigestValidationError as error:
        return f"{variant} was changed after it was built: {error}"
    return None


def variants(out: Path, backend: str) -> list[Path]:
    """The stable-ABI variants of a backend in `out`."""
    compute = re.compile("cpu" if backend == "cpu" else r"cu\d+")
    return sorted(p for p in out.glob("torch-stable-abi*-*-*-*") if compute.fullmatch(p.name.split("-")[3]))


def check(project: Project, out: Path, backend: str) -> str | None:
    """None when the variant of `backend` in `out` is up to date; else what is wrong and what to do."""
    cure = "`make build`" if backend == default_backend() else f"`make build-{backend}`"
    found = variants(out, backend)
    if not found:
        return f"no {backend} variant in {out}: build it with {cure}"
    problems = [problem for variant in found if (problem := stale(project, variant))]
    return f"{'; '.join(problems)}: build again with {cure}" if problems else None


@contextlib.contextmanager
def _locked(work: Path):
    """One build at a time in a work folder: ninja does not guard itself against a second one."""
    import fcntl

    with open(work / "lock", "w", encoding="utf-8") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def build(
    project: Project, backend: str, out: Path, archs: list[str] | None = None, ptxas_info: Path | None = None
) -> Path:
    """Compile and lay out one variant; returns its folder."""
    if backend not in project.general["backends"]:
        raise BuildError(f"backend {backend!r} is not one of build.toml's: {', '.join(project.general['backends'])}")
    torch = Torch.find()
    nvcc = Nvcc.find() if backend == "cuda" else None
    if nvcc and torch.cuda and torch.cuda.split(".")[0] != nvcc.version.split(".")[0]:
        print(
            f"warning: this variant is for CUDA {nvcc.version.split('.')[0]} (nvcc {nvcc.version}); the installed "
            f"torch {torch.version} has CUDA {torch.cuda} and will not load it",
            file=sys.stderr,
        )
    name = variant_name(project, backend, nvcc.version if nvcc else None)
    relative = Path(".build", "@".join([name, *(archs or [])]))  # other architectures, other objects
    work = project.root / relative
    (work / "generated").mkdir(parents=True, exist_ok=True)
    units = project.units(backend, archs)
    with _locked(work):
        ops = project.ops_name(backend)  # once: files that change during the build must not split it
        plan = ninja_file(project, backend, ops, units, relative, torch, nvcc)
        _write_if_changed(work / "generated" / "registration.h", REGISTRATION_H)
        _write_if_changed(work / "generated" / "glibc_compat.c", GLIBC_COMPAT_C)
        _write_if_changed(work / "build.ninja", plan)
        command = [ninja(), "-C", str(project.root), "-f", str(relative / "build.ninja"), "-j", str(jobs()), "--quiet"]
        subprocess.run(command, check=True)
        if ptxas_info:
            logs = {u.source: work / "objects" / (u.source + ".o.log") for u in units if u.is_cuda}
            ptxas_report.write(ptxas_report.parse(logs), ptxas_info)
        stage(project, backend, ops, units, work / "library.so", out / name)
    if project.ops_name(backend) != ops:
        print("warning: sources changed during the build, so the variant is stale: build again", file=sys.stderr)
    return out / name


def _write_if_changed(path: Path, text: str) -> None:
    """An untouched file keeps its time and recompiles nothing."""
    if not path.is_file() or path.read_text(encoding="utf-8") != text:
        path.write_text(text, encoding="utf-8")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument(
        "--backend", choices=("auto", *BACKENDS), default="auto", help="auto: what the torch here is for"
    )
    parser.add_argument("--archs", nargs="+", metavar="X.Y", help="CUDA capabilities in place of build.toml's")
    parser.add_argument("--out", type=Path, help="where variants go (default: build/ of the project)")
    parser.add_argument(
        "--ptxas-info", type=Path, metavar="FILE", help="write registers, smem and spills of each kernel"
    )
    parser.add_argument("--project", type=Path, default=PROJECT, help="the folder that holds build.toml")
    parser.add_argument("--check", action="store_true", help="build nothing; fail if the variant is not the tree's")
    parser.add_argument("--print-backend", action="store_true", help="say what --backend auto is here")
    args = parser.parse_args(argv)
    try:
        if args.print_backend:
            print(default_backend())
            return 0
        project = Project(args.project.resolve())
        out = (args.out or project.root / "build").resolve()
        backend = default_backend() if args.backend == "auto" else args.backend
        if args.check:
            problem = check(project, out, backend)
            if problem:
                raise BuildError(problem)
            print(f"{out}: the {backend} variant is made from the present sources")
        else:
            print(build(project, backend, out, args.archs, args.ptxas_info))
    except BuildError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except subprocess.CalledProcessError as error:
        print(f"error: {Path(error.cmd[0]).name} failed, see above", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
