"""The documents are true: their Python runs, their links, files and commands exist, their numbers are those measured.

A page is read as a reader reads it: the ```python blocks of a file run one after the other, in one namespace, on the
CPU. A block that cannot says why in its first line: `# not run: needs the Hub`.
"""

from __future__ import annotations

import ast
import importlib
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT, copy_sources

if not (ROOT / "README.md").is_file():
    pytest.skip("the documents are not there (a Nix build has only tests/)", allow_module_level=True)

#: file -> (```python blocks that run, blocks that say why they do not). A block that is lost would go unnoticed else.
BLOCKS = {
    "CHANGELOG.md": (0, 0),
    "CONTRIBUTING.md": (0, 0),
    "README.md": (1, 1),
    "benchmarks/README.md": (0, 0),
    "docs/a100-optimization-guide.md": (0, 0),
    "docs/diffusers-integration.md": (0, 1),
    "docs/h100-optimization-guide.md": (0, 0),
    "docs/huggingface-kernels-integration.md": (4, 2),
    "docs/kernel-templates.md": (0, 0),
    "docs/performance.md": (0, 0),
    "docs/profiling.md": (2, 1),
    "docs/publishing.md": (0, 0),
    "docs/t4-optimization-guide.md": (0, 0),
    "docs/transformers-integration.md": (2, 0),
    "docs/troubleshooting.md": (3, 0),
}
DOCUMENTS = sorted(
    p.relative_to(ROOT).as_posix() for folder in (".", "docs", "benchmarks") for p in (ROOT / folder).glob("*.md")
)
DOCUMENTS.remove("CARD.md")  # a template: test_package.py renders it

#: What a build or a measurement makes.
GENERATED = ("build/", ".build/", ".venv/", "benchmarks/results/")
FOLDERS = ("benchmarks/", "docs/", "examples/", "kernel_src/", "scripts/", "tests/", "torch-ext/", ".ci/")


def blocks(document: str, language: str = r"[\w-]*") -> list[tuple[int, str, str]]:
    """(line of the first line of code, language, code) of each fenced block."""
    text = (ROOT / document).read_text(encoding="utf-8")
    found = re.finditer(rf"^```({language})\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    return [(text.count("\n", 0, match.start(2)) + 1, match[1], match[2]) for match in found]


def prose(document: str) -> str:
    return re.sub(r"^```.*?^```$", "", (ROOT / document).read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)


def reason_not_to_run(code: str) -> str | None:
    match = re.match(r"# not run: (.+)", code)
    return match and match[1]


# ---- code


def test_every_document_has_its_number_of_blocks():
    counted = {}
    for document in DOCUMENTS:
        reasons = [reason_not_to_run(code) for _, _, code in blocks(document, "python")]
        counted[document] = (reasons.count(None), len(reasons) - reasons.count(None))
    assert counted == {document: BLOCKS.get(document) for document in DOCUMENTS}


#: Empty lines in front of each block: a traceback names the line of the document.
READER = """
import json, sys
document, blocks = json.load(sys.stdin)
namespace = {"__name__": "__main__"}
for line, code in blocks:
    exec(compile("\\n" * (line - 1) + code, document, "exec"), namespace)
"""


@pytest.mark.parametrize("document", [d for d in DOCUMENTS if blocks(d, "python")])
def test_python_runs(k, document, tmp_path):
    """In a process of its own: a block may register layers, or write files."""
    run = []
    for line, _, code in blocks(document, "python"):
        ast.parse(code, document)
        if reason_not_to_run(code) is None:
            run.append((line, code))
    page = json.dumps([str(ROOT / document), run])
    command = [sys.executable, "-c", READER]
    done = subprocess.run(command, input=page, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


#: Of languages other than these a block must be an edit of the worked example, which is applied and run.
LANGUAGES = ("python", "bash", "toml")


@pytest.mark.parametrize("document", DOCUMENTS)
def test_no_block_escapes(document):
    """Every fence belongs to a block that is found, and no other language hides Python from READER."""
    text = (ROOT / document).read_text(encoding="utf-8")
    found = blocks(document)
    assert len(re.findall(r"^\s*(?:```|~~~)", text, re.MULTILINE)) == 2 * len(found)
    applied = {code for _, _, _, code in edits(document)}
    for line, language, code in found:
        assert language in LANGUAGES or code in applied, f"{document}:{line}: {language!r}, and nothing applies it"
        reason = reason_not_to_run(code)
        assert reason is None or len(reason.split()) >= 2, f"{document}:{line}: {reason!r} is no reason"


def test_lines_of_prose_end_at_120():
    """Tables and pictures cannot be broken."""
    long = []
    for document in DOCUMENTS:
        lines = (ROOT / document).read_text(encoding="utf-8").split("\n")
        long += [f"{document}:{i}" for i, line in enumerate(lines, 1) if len(line) > 120 and line[0] not in "|!"]
    assert not long


# ---- links, files, commands


def anchors(document: Path) -> set[str]:
    headings = re.findall(r"^#+ (.+)$", document.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("document", DOCUMENTS)
def test_relative_links_resolve(document):
    broken = []
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(document)):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        file = (ROOT / document).parent / path if path else ROOT / document
        if not file.exists() or (anchor and anchor not in anchors(file)):
            broken.append(target)
    assert not broken


@pytest.mark.parametrize("document", DOCUMENTS)
def test_named_files_exist(document):
    """In `backticks` and in shell blocks; what holds <, * or { stands for more than one file."""
    words = re.findall(r"`([^`\n]+)`", prose(document))
    words += [word for _, _, code in blocks(document, "bash") for word in code.split()]
    new = {place for kind, place, _, _ in edits(document) if kind == "new"}
    missing = []
    for word in words:
        word = word.split("::")[0].rstrip(",.;:")
        if not word.startswith(FOLDERS) or word.startswith(GENERATED) or re.search(r"[<*{\s]", word):
            continue
        if not (ROOT / word).exists() and word not in new:
            missing.append(word)
    assert not missing


def commands(document: str) -> list[list[str]]:
    """Lines of shell blocks as words, without comments, prompts, variables and continuation."""
    found = []
    for _, _, code in blocks(document, "bash"):
        for line in code.replace("\\\n", " ").splitlines():
            words = re.sub(r"(^|\s)#.*", "", line).split()
            while words and re.fullmatch(r"[A-Z_]+=\S*", words[0]):
                words.pop(0)
            if words:
                found.append(words)
    return found


@pytest.mark.parametrize("document", DOCUMENTS)
def test_named_commands_exist(document):
    """Targets of make, options of our scripts, subcommands of `kernels`."""
    targets = re.findall(r"^([\w-]+):(?!=)", (ROOT / "Makefile").read_text(), re.MULTILINE)
    cli = Path(pytest.importorskip("kernels").__file__).parent / "cli" / "__init__.py"
    problems = []
    for words in commands(document):
        if words[0] == "make":
            problems += [w for w in words[1:] if re.fullmatch(r"[\w-]+", w) and w not in targets]
        elif Path(words[0]).name == "kernels" and f'"{words[1]}"' not in cli.read_text():
            problems.append(" ".join(words))
        scripts = [w for w in words if w.startswith(FOLDERS) and w.endswith(".py") and (ROOT / w).is_file()]
        for script in scripts:
            options = [w.split("=")[0] for w in words[words.index(script) + 1 :] if w.startswith("--")]
            problems += [f"{script} {o}" for o in options if f'"{o}"' not in (ROOT / script).read_text()]
    assert not problems


def test_benchmarks_take_the_arguments_that_documents_give_them(monkeypatch):
    """In shell blocks and in `backticks`: their own parsers know the sets, models, ops and parts that are named."""
    pytest.importorskip("diffusers")
    pytest.importorskip("transformers")
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    parsers = {name: importlib.import_module(name).arguments for name in ("micro", "e2e")}
    problems, parsed = [], 0
    for document in DOCUMENTS:
        if document == "docs/kernel-templates.md":
            continue  # of an op that only the worked example has, and that runs it
        inline = [code.split() for code in re.findall(r"`([^`\n]+)`", prose(document))]
        for words in commands(document) + inline:
            at = next((i for i, word in enumerate(words) if Path(word).name in ("micro.py", "e2e.py")), None)
            if at is None or at + 1 == len(words):
                continue
            parsed += 1
            try:
                parsers[Path(words[at]).stem](words[at + 1 :])
            except SystemExit:
                problems.append(f"{document}: {' '.join(words)}")
    assert parsed > 20 and not problems


def test_docs_are_in_the_index():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert not [d for d in DOCUMENTS if d.startswith("docs/") and f"({d})" not in readme]


def test_readme_lists_every_public_function_with_its_arguments(k):
    """A row of the table of ops starts with a signature; the names of its arguments are those of the function."""
    import inspect

    rows = re.findall(r"^\| `(\w+)\(([^`]*)\)` \|", (ROOT / "README.md").read_text(encoding="utf-8"), re.MULTILINE)
    listed = {name: re.findall(r"(?:^|, )(\w+)", arguments) for name, arguments in rows}
    public = {n: getattr(k, n) for n in k.__all__ if inspect.isfunction(getattr(k, n)) and n != "rmsnorm"}
    assert listed == {name: list(inspect.signature(function).parameters) for name, function in public.items()}


def test_readme_names_what_is_injected():
    """The kinds of the recipes, as `only` and `skip` take them, and no other."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    section = text.split("## What is injected", 1)[1].split("\n## ", 1)[0]
    named = set(re.findall(r"^\| `([\w.]+)` \|", section, re.MULTILINE))
    folder = ROOT / "torch-ext" / "ltx_kernels" / "inject"
    kinds = {kind for file in folder.glob("*.py") for kind in recipe_kinds(ast.parse(file.read_text()))}
    assert named == kinds


def recipe_kinds(tree: ast.AST) -> set[str]:
    """The first arguments of the `Recipe(...)` calls."""
    calls = [n for n in ast.walk(tree) if isinstance(n, ast.Call) and getattr(n.func, "id", None) == "Recipe"]
    return {call.args[0].value for call in calls if call.args and isinstance(call.args[0], ast.Constant)}


# ---- numbers


def test_readme_numbers_are_those_measured():
    """Each table of the README with `op | shape | dtype` is that of the JSON named before it; steps in milliseconds."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    tables = re.findall(r"`(benchmarks/results/\S+\.json)`[^|`]*`[^`]*`:\n\n((?:\|.*\n)+)", text)
    assert len(tables) == text.count("| op | shape | dtype |") == 3
    for path, table in tables:
        if not (ROOT / path).is_file():
            pytest.skip(f"{path} is not there")
        rows = json.loads((ROOT / path).read_text())["rows"]
        measured = {(r["op"], str(r["shape"]), r["dtype"], r["candidate"]): r["us_median"] for r in rows}
        header, _, *lines = ([cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines())
        for line in lines:
            key, unit = line[:3], 1000 if line[0].endswith(":step") else 1
            values = [measured.get((*key, candidate)) for candidate in header[3:]]
            cells = ["-" if v is None else f"{v / unit:.{1 if v / unit >= 10 else 2}f}" for v in values]
            assert line == key + cells, f"{path}: README.md should have\n| {' | '.join(key + cells)} |"


def test_the_first_number_of_the_readme_is_that_of_its_table():
    text = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    stated = re.search(
        r"49 frames: ([\d.]+) ms stock, ([\d.]+) compiled, ([\d.]+) injected, ([\d.]+) with `torch.compile`", text
    )
    cells = r" \| ".join([r"([\d.]+)"] * 4)
    row = re.search(rf"ltx_video_2b:step \| \[2, 2688, 2048\] \| bf16 \| {cells} \|", text)
    stock, injected, compiled, both = row.groups()
    assert stated.groups() == (stock, compiled, injected, both)


#: What a row of the guides' tables of registers stands for, in the names of ptxas.tsv.
_OF_BF16 = r"<__nv_bfloat16, __nv_bfloat16, "
_RMS = r"\(ltx_kernels::Statistic\)1, "
REGISTERS = {
    "norm, RMS with a weight, bf16, 2 vectors": rf"::norm_fast_kernel{_OF_BF16}{_RMS}1u, 2, 1, false>",
    "norm, gated residual with scale, shift and tables, bf16, 1 vector": (
        rf"::norm_fast_kernel{_OF_BF16}{_RMS}60u, 1, 1, false>"
    ),
    "norm, all combinations": "::norm_fast_kernel<",
    "norm, general": "::norm_general_kernel<",
    "RMSNorm backward": "::norm_backward_kernel<",
    "RMSNorm backward, the longest rows": "::norm_backward_long_kernel<",
    "RoPE, norm across heads, interleaved, bf16, 2 rows": rf"::rope_fast_kernel{_OF_BF16}float, true, {_RMS}2, 2>",
    "RoPE, all combinations": "::rope_fast_kernel<",
    "RoPE, general": "::rope_general_kernel<",
    "gated activations": "::glu_kernel<",
    "pixel norm, planes in registers": "::pixel_norm_held_kernel<",
    "pixel norm, other": "::pixel_norm_kernel<",
}


@pytest.mark.parametrize(("chip", "arch"), [("h100", "sm_90"), ("a100", "sm_80"), ("t4", "sm_75")])
def test_registers_of_the_guides_are_those_of_the_report(chip, arch):
    ptxas_report = pytest.importorskip("ptxas_report")
    rows = [r for r in ptxas_report.read(ROOT / "benchmarks" / "results" / "ptxas.tsv") if r["arch"] == arch]
    assert rows and not ptxas_report.spills(rows)  # as the guides say
    table = "| Kernel | Registers |\n| --- | --- |\n"
    for label, pattern in REGISTERS.items():
        counts = [int(r["registers"]) for r in rows if re.search(pattern, r["kernel"])]
        low, high = min(counts), max(counts)
        table += f"| {label} | {low if low == high else f'{low}-{high}'} |\n"
    document = f"docs/{chip}-optimization-guide.md"
    assert table in (ROOT / document).read_text(encoding="utf-8"), f"{document} should have\n{table}"


# ---- the worked example of kernel-templates.md


def edits(document: str) -> list[tuple[str, str, str, str]]:
    """(new, append, before or after; file; its line; code) of the blocks that have such a comment above them."""
    text = (ROOT / document).read_text(encoding="utf-8")
    pattern = r"^<!-- (new|append|before|after): (\S+?)(?: \| +(.+?))? -->\n```\w+\n(.*?)^```$"
    return re.findall(pattern, text, re.DOTALL | re.MULTILINE)


@pytest.fixture(scope="module")
def worked_example(tmp_path_factory) -> Path:
    """A copy of the tree with the page applied."""
    tree = tmp_path_factory.mktemp("worked") / "ltx-kernels"
    for folder in ("benchmarks", "tests"):
        shutil.copytree(ROOT / folder, tree / folder, ignore=shutil.ignore_patterns("results", "__pycache__"))
    copy_sources(tree, objects=True)
    for kind, file, anchor, code in edits("docs/kernel-templates.md"):
        path = tree / file
        path.parent.mkdir(parents=True, exist_ok=True)
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        assert (kind == "new") == (not path.exists()), file
        if anchor:
            assert any(anchor in line for line in lines), f"{file} has no line with {anchor!r}"
            parts = ("before", "line") if kind == "before" else ("line", "after")
            lines = [
                line if part == "line" else code for line in lines for part in parts if part == "line" or anchor in line
            ]
        else:
            lines.append(("\n\n" if kind == "append" else "") + code)
        path.write_text("".join(lines))
    return tree


def without_local_kernels() -> dict[str, str]:
    """The environment in which a tree loads its own build/."""
    return {name: value for name, value in os.environ.items() if name != "LOCAL_KERNELS"}


def pytest_in(tree: Path, *arguments: str) -> None:
    """Tests of another tree: some run, and all of them pass."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", os.devnull]
    done = subprocess.run(
        [*command, "-o", f"pythonpath={ROOT / 'scripts'}", "--rootdir", str(tree), *arguments],
        cwd=tree,
        env=without_local_kernels(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout


def test_the_worked_example_has_all_its_edits():
    kinds = [kind for kind, _, _, _ in edits("docs/kernel-templates.md")]
    assert {kind: kinds.count(kind) for kind in set(kinds)} == {"new": 6, "append": 3, "before": 7, "after": 9}


def test_the_worked_example_builds_and_passes_its_test(worked_example):
    build_variant = pytest.importorskip("build_variant")
    if build_variant.default_backend() != "cpu":
        pytest.skip("it is built for the CPU, which a CUDA torch does not load")
    try:
        build_variant.build(build_variant.Project(worked_example), "cpu", worked_example / "build")
    except build_variant.BuildError as error:
        if "install" in str(error):
            pytest.skip(f"cannot build here: {error}")
        raise
    tests = ("test_modulate.py", "test_modulate_injected.py", "test_every_op.py", "test_hub_benchmark.py")
    pytest_in(worked_example, *(f"tests/{name}" for name in tests), "-k", "modulate or in_the_table or has_a_workload")
    micro = ["--op", "modulate", "--shape", "2,96,256", "--dtype", "fp32", "--peer", "eager", "--out", "micro.json"]
    command = [sys.executable, "benchmarks/micro.py", *micro]
    subprocess.run(command, cwd=worked_example, env=without_local_kernels(), check=True)
    rows = json.loads((worked_example / "micro.json").read_text())["rows"]
    assert {row["candidate"] for row in rows if row["us_median"]} == {"copy", "eager", "ours"}, rows


def test_the_worked_example_keeps_the_rules_of_the_sources(worked_example):
    """Every file is listed, every kernel waits, only stable headers, as the page says."""
    pytest.importorskip("build_variant")
    rules = "listed or exists or kernel_waits or stable_torch_headers or x86_only or python_39 or imports_only"
    pytest_in(worked_example, "tests/test_package.py", "-k", rules)


def test_the_worked_example_compiles_for_a_gpu(worked_example, tmp_path):
    build_variant = pytest.importorskip("build_variant")
    try:
        nvcc = build_variant.Nvcc.find()
    except build_variant.BuildError as error:
        pytest.skip(f"cannot compile for a GPU here: {error}")
    project, name = build_variant.Project(worked_example), "kernel_src/modulate/modulate.cu"
    units = [unit for unit in project.units("cuda") if unit.source == name]
    plan = tmp_path / "build.ninja"
    plan.write_text(
        build_variant.ninja_file(project, "cuda", "_ops", units, tmp_path, build_variant.Torch.find(), nvcc)
    )
    target = str(tmp_path / "objects" / f"{name}.o")
    command = [build_variant.ninja(), "-C", str(worked_example), "-f", str(plan), target]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def test_the_worked_example_passes_make_lint(worked_example):
    """In step 7 the reader runs it."""
    tools = os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", "")))
    ruff, clang_format = (shutil.which(name, path=tools) for name in ("ruff", "clang-format"))
    if ruff is None or clang_format is None:
        pytest.skip("ruff and clang-format are not both installed")
    files = {file for _, file, _, _ in edits("docs/kernel-templates.md")}
    python = sorted(file for file in files if file.endswith(".py"))
    native = sorted(file for file in files if Path(file).suffix in (".cu", ".cpp", ".h"))
    settings = ["--no-cache", "--config", str(ROOT / "pyproject.toml")]
    for command in (
        [clang_format, f"--style=file:{ROOT / '.clang-format'}", "--dry-run", "-Werror", *native],
        [ruff, "check", *settings, *python],
        [ruff, "format", "--check", *settings, *python],
    ):
        done = subprocess.run(command, cwd=worked_example, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
