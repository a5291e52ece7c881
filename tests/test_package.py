"""The sources as a Hub package: what kernel-builder would refuse is refused here, without Nix."""

from __future__ import annotations

import ast
import inspect
import json
import re
import sys
from pathlib import Path

import pytest
import torch
from conftest import REPO_ID, ROOT, VERSION

build_variant = pytest.importorskip("build_variant", reason="scripts/ is not there (a Nix build has only tests/)")

PROJECT = build_variant.Project(ROOT)
PACKAGE = ROOT / "torch-ext" / PROJECT.python_name
PYTHON_FILES = sorted(p for p in PACKAGE.rglob("*.py") if "__pycache__" not in p.parts)


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


# ---- build.toml


def test_real_parser_accepts_build_toml():
    rust = pytest.importorskip("kernels._rust")
    build = rust.Build.open(ROOT)
    assert {str(b).lower() for b in build.general.backends} == {"cuda", "cpu"}


def test_build_toml_says_what_the_design_says():
    general = PROJECT.general
    assert (general["name"], general["version"], general["edition"]) == ("ltx-kernels", VERSION, 5)
    assert general["license"] == "Apache-2.0"
    assert general["hub"]["repo-id"] == REPO_ID
    assert PROJECT.torch["stable-abi"] == {"cuda": "2.11", "cpu": "2.11"}
    assert [k["cuda-capabilities"] for k in PROJECT.kernels("cuda")] == [["7.5", "8.0", "9.0+PTX"]]


def test_every_listed_source_exists():
    missing = [s for s in PROJECT.native_sources() if not (ROOT / s).is_file()]
    assert not missing


def test_every_native_file_is_listed():
    """The Nix build sees the files that build.toml names and no other."""
    suffixes = {".cu", ".cuh", ".cpp", ".h"}
    there = {relative(p) for d in ("kernel_src", "torch-ext") for p in (ROOT / d).rglob("*") if p.suffix in suffixes}
    unlisted = there - set(PROJECT.native_sources()) - {"torch-ext/registration.h"}
    assert not unlisted, f"add to a src of build.toml: {sorted(unlisted)}"


def test_cuda_variant_holds_the_cpu_sources():
    def compiled(backend: str) -> set[str]:
        return {u.source for u in PROJECT.units(backend)}

    assert compiled("cpu") < compiled("cuda")


# ---- C++ and CUDA sources


def includes(source: str) -> list[tuple[str, str]]:
    """(`"` or `<`, name) of each #include."""
    return re.findall(r'^\s*#\s*include\s*(["<])([^">]+)[">]', (ROOT / source).read_text(), re.MULTILINE)


def resolve(source: str, name: str, directories: list[str]) -> str | None:
    for directory in ((ROOT / source).parent, *(ROOT / d for d in directories)):
        if (directory / name).is_file():
            return relative((directory / name).resolve())
    return None


@pytest.mark.parametrize("backend", ["cpu", "cuda"])
def test_every_header_a_backend_includes_is_listed_for_it(backend):
    """Through headers as well, and found from the include folders of build.toml alone."""
    listed = set(PROJECT.torch["src"]).union(*(k["src"] for k in PROJECT.kernels(backend)))
    problems = []
    for unit in PROJECT.units(backend):
        queue, seen = [unit.source], set()
        while queue:
            source = queue.pop()
            seen.add(source)
            for kind, name in includes(source):
                if kind == "<" or (name == "registration.h" and source == "torch-ext/torch_binding.cpp"):
                    continue  # system headers, and the one that is generated
                target = resolve(source, name, unit.include)
                if target is None or target not in listed:
                    problems.append(f'{source}: #include "{name}" is {"not found" if target is None else "not listed"}')
                elif target not in seen:
                    queue.append(target)
    assert not problems


STABLE_HEADERS = ("torch/csrc/stable/", "torch/headeronly/", "torch/csrc/inductor/aoti_torch/c/shim.h")


def test_only_stable_torch_headers_are_included():
    problems = [
        f"{source}: {name}"
        for source in PROJECT.native_sources()
        for _, name in includes(source)
        if name.startswith(("torch/", "ATen/", "c10/", "caffe2/", "pybind11/")) and not name.startswith(STABLE_HEADERS)
    ]
    assert not problems


def test_device_headers_know_no_torch():
    """core/ and every .cuh take raw pointers: they compile alone, and another framework could use them."""
    headers = [s for s in PROJECT.native_sources() if s.endswith(".cuh") or s.startswith("kernel_src/core/")]
    assert headers
    assert not [f"{s}: {name}" for s in headers for _, name in includes(s) if "torch" in name]


def test_every_kernel_waits_for_the_one_before():
    """launch_kernel lets a kernel begin early on sm_90: one without this first statement would read too early."""
    kernels = {}
    for source in (s for s in PROJECT.native_sources() if s.endswith((".cu", ".cuh"))):
        text = re.sub(r"//.*", "", (ROOT / source).read_text(encoding="utf-8"))
        assert "<<<" not in text, f"{source}: launch through launch_kernel"
        for name, body in re.findall(r"__global__[^{;]*?(\w+_kernel)\([^{;]*\{\s*([^;]*;)", text):
            kernels[name] = body.strip()
        assert text.count("__global__") == len(re.findall(r"__global__[^{;]*?\w+_kernel\([^{;]*\{", text)), source
    assert len(kernels) > 8
    assert set(kernels.values()) == {"wait_for_previous_kernel();"}, kernels


def test_every_kernel_bounds_its_threads():
    """Without bounds ptxas gave a kernel of 1024 threads 68 registers on sm_75: more than there are, no launch."""
    for source in (s for s in PROJECT.native_sources() if s.endswith((".cu", ".cuh"))):
        text = re.sub(r"//.*", "", (ROOT / source).read_text(encoding="utf-8"))
        declarations = re.findall(r"__global__[^{;]*?\w+_kernel\(", text)
        assert len(declarations) == text.count("__global__"), source
        for declaration in declarations:
            assert "__launch_bounds__" in declaration, f"{source}: {declaration}"


def test_no_x86_only_header_without_a_guard():
    """CPU code is built for ARM and macOS too; intrinsics would need an #if around their header."""
    intrinsics = re.compile(r"(immintrin|[a-z]mmintrin|x86intrin|cpuid)\.h$")
    assert not [f"{s}: {name}" for s in PROJECT.native_sources() for _, name in includes(s) if intrinsics.search(name)]


# ---- the Python package


def test_layout():
    assert (PACKAGE / "__init__.py").is_file()
    assert not (PACKAGE / PROJECT.python_name).exists(), "kernel-builder refuses a package inside the package"
    generated = [p for p in (PACKAGE / "_ops.py", ROOT / "torch-ext" / "registration.h") if p.exists()]
    assert not generated, "generated files do not belong into torch-ext/"


@pytest.mark.parametrize("path", PYTHON_FILES, ids=relative)
def test_python_39_syntax(path):
    ast.parse(path.read_text(encoding="utf-8"), filename=relative(path), feature_version=(3, 9))


@pytest.mark.parametrize("path", PYTHON_FILES, ids=relative)
def test_imports_only_torch_and_the_standard_library(path):
    """Inside functions too: a Hub kernel runs where neither diffusers nor transformers is installed."""
    allowed = {"torch"} | set(sys.stdlib_module_names)
    imported = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            imported |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            imported.add(node.module.split(".")[0])
    assert not imported - allowed


OP_DECORATORS = {
    "custom_op",
    "triton_op",
    "register_kernel",
    "register_fake",
    "register_vmap",
    "register_torch_dispatch",
}


@pytest.mark.parametrize("path", [*PYTHON_FILES, *sorted((ROOT / "tests").glob("*.py"))], ids=relative)
def test_op_decorators_take_a_literal_name(path):
    """@register_fake(add_op_namespace_prefix("name")): a literal namespace would clash between two builds."""

    def called(node: ast.expr) -> str | None:
        if not isinstance(node, ast.Call):
            return None
        return node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", None)

    problems = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            continue
        for decorator in node.decorator_list:
            if called(decorator) not in OP_DECORATORS or not decorator.args:
                continue
            name = decorator.args[0]
            if called(name) != "add_op_namespace_prefix" or not isinstance(name.args[0], ast.Constant):
                problems.append(f"line {node.lineno}: {ast.unparse(decorator)}")
    assert not problems


def public_names() -> list[str]:
    """`__all__` as kernel-builder reads it for the card: a plain assignment of a list of literals."""
    for node in ast.parse((PACKAGE / "__init__.py").read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", None) == "__all__":
            assert isinstance(node.value, ast.List), "__all__ must be a list, or the card lists no functions"
            return [ast.literal_eval(element) for element in node.value.elts]
    raise AssertionError("no __all__ in __init__.py")


def test_all_is_literal_and_true(k):
    names = public_names()
    assert len(names) == len(set(names))
    assert not [n for n in names if not hasattr(k, n)]
    assert k.__all__ == names


def test_public_functions_are_documented(k):
    undocumented = [n for n in k.__all__ if callable(getattr(k, n)) and not (getattr(k, n).__doc__ or "").strip()]
    assert not undocumented


def test_public_functions_have_types(k):
    """Inline: stubs and py.typed are not installed."""
    untyped = []
    for function in (getattr(k, name) for name in k.__all__ if inspect.isfunction(getattr(k, name))):
        signature = inspect.signature(function)
        kinds = [signature.return_annotation, *(p.annotation for p in signature.parameters.values())]
        untyped += [function.__name__] * (inspect.Signature.empty in kinds)
    assert not untyped


# ---- flake, card, licence


def test_flake_lock_is_the_lock_of_flake_nix():
    lock = json.loads((ROOT / "flake.lock").read_text())
    flake = (ROOT / "flake.nix").read_text()
    urls = dict(re.findall(r'inputs\.([\w-]+)\.url\s*=\s*"github:([\w-]+/[\w.-]+)"', flake))
    assert lock["version"] == 7
    nodes = lock["nodes"]
    assert set(nodes[lock["root"]]["inputs"]) == set(urls) == {"kernel-builder"}
    for name, url in urls.items():
        node = nodes[nodes[lock["root"]]["inputs"][name]]
        for part in (node["original"], node["locked"]):
            assert (part["type"], f"{part['owner']}/{part['repo']}") == ("github", url)
        assert re.fullmatch(r"[0-9a-f]{40}", node["locked"]["rev"])
        assert node["locked"]["narHash"].startswith("sha256-")
    # Every input of every node leads to a node: a list is a path from the root, a string the node's own name.
    for node in nodes.values():
        for target in node.get("inputs", {}).values():
            if isinstance(target, str):
                assert target in nodes
            else:
                at = lock["root"]
                for step in target:
                    at = nodes[at]["inputs"][step]
                assert at in nodes
    assert "path = ./.;" in flake and "genKernelFlakeOutputs" in flake


def test_card_renders_and_its_python_runs(k):
    minijinja = pytest.importorskip("minijinja", reason="minijinja renders CARD.md as kernel-builder does")
    functions = [n for n in public_names() if n != "layers"]
    layer_file = next((p for p in (PACKAGE / "layers" / "__init__.py", PACKAGE / "layers.py") if p.is_file()), None)
    layers = []
    if "layers" in public_names():
        layers = [n.name for n in ast.parse(layer_file.read_text()).body if isinstance(n, ast.ClassDef)]
        assert layers, "kernel-builder finds layers as classes defined in layers/__init__.py or layers.py itself"
    env = minijinja.Environment(trim_blocks=True, templates={"card": (ROOT / "CARD.md").read_text(encoding="utf-8")})
    context = {
        "repo_id": REPO_ID,
        "version": VERSION,
        "functions": functions,
        "layers": layers,
        "has_benchmark": (ROOT / "benchmarks" / "benchmark.py").is_file(),
        "upstream": None,
        "source": None,
        "license": PROJECT.general["license"].lower(),
    }
    card = env.render_template("card", **context)
    front, body = card.split("---\n", 2)[1:]
    assert "license: apache-2.0" in front
    assert f'get_kernel("{REPO_ID}", version={VERSION})' in body
    for name in functions + layers:
        assert f"- `{name}`\n" in body
    assert "{{" not in card and "{%" not in card
    snippets = re.findall(r"```python\n(.*?)```", body, re.DOTALL)
    assert len(snippets) == 2
    namespace = {"pipeline": torch.nn.Sequential(torch.nn.RMSNorm(64))}  # of the user, who has one
    for snippet in snippets:
        exec(snippet, namespace)
    assert namespace["y"].shape == namespace["x"].shape and namespace["report"].counts == {"rms_norm": 1}


def test_license_is_apache_2():
    text = (ROOT / "LICENSE").read_text()
    assert "Apache License" in text and "Version 2.0" in text
