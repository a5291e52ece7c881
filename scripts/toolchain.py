"""The tools that build_variant.py needs, found on this machine; a missing one is an error that says its cure."""

from __future__ import annotations

import importlib.util
import os
import re
import runpy
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from dataclasses import dataclass
from pathlib import Path

NVCC_CURE = (
    "install the CUDA toolkit (or point CUDA_HOME at it), or the PyPI packages nvidia-cuda-nvcc==13.0.88 together with "
    "nvidia-cuda-crt, nvidia-nvvm, nvidia-cuda-runtime and nvidia-cuda-cccl of version 13.0 (`make nvcc` does that)"
)


class BuildError(Exception):
    """Something the user can cure; the message says how."""


@dataclass(frozen=True)
class Torch:
    root: Path
    version: str
    cuda: str | None

    @staticmethod
    def find() -> Torch:
        spec = importlib.util.find_spec("torch")
        if spec is None or spec.origin is None:
            raise BuildError(f"torch is not installed for {sys.executable}: `make setup`, or use a Python that has it")
        root = Path(spec.origin).parent
        facts = runpy.run_path(str(root / "version.py"))  # the facts without the seconds of `import torch`
        torch = Torch(root, facts["__version__"], facts.get("cuda"))
        if not (root / "include/torch/csrc/stable/library.h").is_file():
            raise BuildError(f"torch {torch.version} has no stable-ABI headers; torch 2.11 or newer is needed")
        return torch


@dataclass(frozen=True)
class Nvcc:
    path: Path
    version: str  # "13.0"
    include: list[Path]
    lib: Path

    @staticmethod
    def find() -> Nvcc:
        """CUDA_HOME, then PATH, then the nvidia-cuda-nvcc package of this Python."""
        candidates = []
        for variable in ("CUDA_HOME", "CUDA_PATH"):
            if os.environ.get(variable):
                candidates.append(Path(os.environ[variable], "bin", "nvcc"))
        if on_path := shutil.which("nvcc"):
            candidates.append(Path(on_path))
        for site in dict.fromkeys((sysconfig.get_path("purelib"), sysconfig.get_path("platlib"), *sys.path)):
            candidates += sorted(Path(site, "nvidia").glob("cu*/bin/nvcc"), reverse=True)
        for path in candidates:
            if path.is_file():
                return Nvcc._describe(path)
        raise BuildError(f"no nvcc in CUDA_HOME, on PATH or among Python's packages: {NVCC_CURE}")

    @staticmethod
    def _describe(path: Path) -> Nvcc:
        # A wheel's nvcc may lack its execute bit; nvcc on PATH may be a wrapper, so it is asked where its toolkit is.
        if not os.access(path, os.X_OK):
            path.chmod(path.stat().st_mode | 0o111)
        version = re.search(r"release (\d+\.\d+)", output([str(path), "--version"]))
        with tempfile.TemporaryDirectory() as scratch:
            probe = Path(scratch, "probe.cu")
            probe.touch()
            dryrun = output([str(path), "--dryrun", "-c", str(probe), "-o", str(Path(scratch, "probe.o"))])
        top = re.search(r"^#\$ TOP=(.+)$", dryrun, re.MULTILINE)
        if version is None or top is None:
            raise BuildError(f"{path} does not answer as nvcc does (--version, --dryrun): {NVCC_CURE}")
        top = Path(path.parent, top.group(1).strip()).resolve()
        roots = [top, *sorted(top.glob("targets/*-linux"))]
        include = [d for root in roots if (d := root / "include").is_dir()]
        libs = [d for root in roots for d in (root / "lib64", root / "lib") if list(d.glob("libcudart.so*"))]
        for header, package in (("cuda_runtime.h", "nvidia-cuda-runtime"), ("crt/host_config.h", "nvidia-cuda-crt")):
            if not any((d / header).is_file() for d in include):
                raise BuildError(f"{header} not found beside {path} ({package} missing?): {NVCC_CURE}")
        if not libs:
            raise BuildError(f"libcudart.so not found beside {path} (nvidia-cuda-runtime missing?): {NVCC_CURE}")
        return Nvcc(path, version.group(1), include, libs[0])


def output(command: list[str]) -> str:
    """stdout and stderr of a quick command; empty when it cannot run."""
    try:
        result = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    except OSError:
        return ""
    return result.stdout


def compiler() -> str:
    for name in (os.environ.get("CXX"), "g++", "clang++"):
        if name and shutil.which(name.split()[0]):
            return name
    raise BuildError("no C++ compiler (CXX, g++, clang++): install one, on Debian `apt-get install g++`")


def ninja() -> str:
    beside = Path(sysconfig.get_path("scripts"), "ninja")
    if beside.is_file():
        return str(beside)
    if found := shutil.which("ninja"):
        return found
    raise BuildError("ninja not found: `pip install ninja`")


def python_include() -> str:
    include = sysconfig.get_path("include")
    if not Path(include, "Python.h").is_file():
        raise BuildError(f"Python.h not found in {include}: on Debian `apt-get install python3-dev`")
    return include


def jobs() -> int:
    """How many compilers may run at once."""
    return int(os.environ.get("MAX_JOBS") or getattr(os, "process_cpu_count", os.cpu_count)() or 1)
