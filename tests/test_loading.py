"""Every way `kernels` finds a variant, over its real code paths and without a network.

Each scenario runs in a process of its own: the Hub libraries read their environment at import, and a second copy of the
same build in one process would register its ops twice.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import textwrap
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from conftest import REPO_ID, VERSION, copy_sources

build_variant = pytest.importorskip("build_variant", reason="scripts/ is not there (a Nix build has only tests/)")

# What every scenario does with a loaded package: call an op and compare.
PRELUDE = """
import json, os, sys
from pathlib import Path
import torch
import kernels

def works(module):
    x = torch.arange(24, dtype=torch.float32).reshape(2, 12)
    y = module.rms_norm(x, eps=1e-6)
    return torch.allclose(y, x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6), atol=1e-6)

def refused(call):
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None
"""


def scenario(code: str, *arguments: object, **env: str) -> dict:
    """Run `code` in a fresh process with `arguments` in sys.argv[1:]; it leaves its findings in `result`."""
    base = {k: v for k, v in os.environ.items() if k not in ("LOCAL_KERNELS", "HF_HUB_OFFLINE", "HF_ENDPOINT")}
    source = PRELUDE + textwrap.dedent(code) + "\nprint('\\n' + json.dumps(result))"
    command = [sys.executable, "-c", source, *map(str, arguments)]
    # No GPU is visible: a user imports on a login node, and nothing here needs one.
    done = subprocess.run(
        command, env={**base, "CUDA_VISIBLE_DEVICES": "", **env}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="session")
def variant(k) -> Path:
    """The folder of the variant under test."""
    return Path(k.__file__).parent


@pytest.fixture(scope="session")
def changed_variant(tmp_path_factory) -> Path:
    """A CPU variant of the same package with one Python line more, as a next version would be."""
    tree = copy_sources(tmp_path_factory.mktemp("changed"), objects=True)
    with (tree / "torch-ext" / "ltx_kernels" / "__init__.py").open("a") as file:
        file.write("\nCHANGED = True\n")
    try:
        return build_variant.build(build_variant.Project(tree), "cpu", tree / "build")
    except build_variant.BuildError as error:
        pytest.skip(f"cannot build a second variant here: {error}")


def hub_cache(home: Path, repo_id: str, versions: dict[str, Path]) -> None:
    """Lay out a Hub cache by hand: {"v1": variant folder}."""
    repo = home / "hub" / f"kernels--{repo_id.replace('/', '--')}"
    for ref, source in versions.items():
        commit = hashlib.sha1(ref.encode()).hexdigest()
        (repo / "refs").mkdir(parents=True, exist_ok=True)
        (repo / "refs" / ref).write_text(commit)
        shutil.copytree(source, repo / "snapshots" / commit / "build" / source.name)


def test_local_paths(variant):
    """The project, its build/ and the variant itself, by LOCAL_KERNELS and by get_local_kernel."""
    result = scenario(
        """
        paths = [Path(p) for p in sys.argv[1:]]
        modules = [kernels.get_local_kernel(p) for p in paths]
        for p in paths:
            os.environ["LOCAL_KERNELS"] = f"org/ltx-kernels={p}"
            assert kernels.has_kernel("org/ltx-kernels", version=1)
            modules.append(kernels.get_kernel("org/ltx-kernels", version=1))
        result = {"files": [m.__file__ for m in modules], "works": [works(m) for m in modules]}
        """,
        variant.parent.parent,
        variant.parent,
        variant,
    )
    assert set(result["files"]) == {str(variant / "__init__.py")}
    assert all(result["works"]) and len(result["works"]) == 6


def test_hub_cache_offline(variant, changed_variant, tmp_path):
    """The real Hub path, from a cache: two versions in one process, and what is not there."""
    hub_cache(tmp_path, REPO_ID, {"v1": variant, "v2": changed_variant})
    other = tmp_path / "torch-stable-abi299-cpu-x86_64-linux"
    shutil.copytree(variant, other)
    hub_cache(tmp_path, "org/too-new", {"v1": other})
    result = scenario(
        """
        one = kernels.get_kernel("org/ltx-kernels", version=1)
        # On a CUDA torch version 2 has a CPU variant only.
        two = kernels.get_kernel("org/ltx-kernels", version=2, backend="cpu")
        result = {
            "works": [works(one), works(two), works(one)],
            "changed": [hasattr(one, "CHANGED"), hasattr(two, "CHANGED")],
            "names": [one.__name__, two.__name__],
            "has": [
                kernels.has_kernel("org/ltx-kernels", version=1),
                kernels.has_kernel("org/too-new", version=1),
            ],
            "absent": refused(lambda: kernels.has_kernel("org/ltx-kernels", version=3)),
            "no_variant": refused(lambda: kernels.get_kernel("org/too-new", version=1)),
        }
        """,
        HF_HOME=str(tmp_path),
        HF_HUB_OFFLINE="1",
    )
    assert result["works"] == [True, True, True]
    assert result["changed"] == [False, True]
    assert result["names"][0] != result["names"][1]
    assert result["has"] == [True, False]
    assert result["absent"].startswith("ValueError: Version 3 not found")
    assert "too new for environment Torch" in result["no_variant"]


@pytest.mark.parametrize(
    ("system", "said"),
    [
        ('torch.version.cuda, torch.version.hip = None, "7.0"', "does not match selected backend (rocm70)"),
        ('torch.version.cuda, torch.version.xpu = None, "202503"', "does not match selected backend (xpu"),
        ('platform.system = lambda: "Windows"', "windows"),
    ],
    ids=["rocm", "xpu", "windows"],
)
def test_a_system_without_a_variant_is_told_so(variant, system, said):
    """As the README's limits say. `kernels` asks torch and the platform what the system is."""
    result = scenario(
        f"""
        import platform
        {system}
        os.environ["LOCAL_KERNELS"] = f"org/ltx-kernels={{sys.argv[1]}}"
        result = {{
            "has": kernels.has_kernel("org/ltx-kernels", version=1),
            "error": refused(lambda: kernels.get_kernel("org/ltx-kernels", version=1)),
        }}
        """,
        variant.parent.parent,
    )
    assert result["has"] is False
    assert result["error"].startswith("FileNotFoundError: Cannot find a build variant")
    assert said in result["error"]


@contextlib.contextmanager
def hub_server(repo_id: str, variant: Path, trusted: bool):
    """The few pages of the Hub that a kernel download asks for, on a loopback port."""
    commit = hashlib.sha1(b"v1").hexdigest()
    organization = repo_id.split("/")[0]
    files = {f"build/{variant.name}/{p.relative_to(variant)}": p for p in sorted(variant.rglob("*")) if p.is_file()}
    files = {name: p for name, p in files.items() if "__pycache__" not in name}

    def tree(folder: str, recursive: bool) -> list[dict]:
        entries = {}
        for name, path in files.items():
            if folder and not name.startswith(folder + "/"):
                continue
            below = name[len(folder) + 1 if folder else 0 :]
            head = below.split("/")[0]
            if "/" in below and not recursive:
                entries[head] = {
                    "type": "directory",
                    "path": f"{folder}/{head}".lstrip("/"),
                    "oid": "0" * 40,
                    "size": 0,
                }
            else:
                entries[name] = {"type": "file", "path": name, "oid": "0" * 40, "size": path.stat().st_size}
        return list(entries.values())

    class Handler(BaseHTTPRequestHandler):
        def do_HEAD(self):
            self.do_GET()

        def do_GET(self):
            path, _, query = self.path.partition("?")
            if path == f"/api/organizations/{organization}/overview":
                page = {
                    "name": organization,
                    "fullname": organization,
                    "avatarUrl": "",
                    "trustedKernelPublisher": trusted,
                }
            elif path == f"/api/kernels/{repo_id}/refs":
                branch = {"name": "v1", "ref": "refs/heads/v1", "targetCommit": commit}
                page = {"branches": [branch], "converts": [], "tags": []}
            elif path == f"/api/kernels/{repo_id}/revision/{commit}":
                page = {"id": repo_id, "sha": commit, "siblings": [{"rfilename": name} for name in files]}
            elif path.startswith(f"/api/kernels/{repo_id}/tree/{commit}"):
                folder = path[len(f"/api/kernels/{repo_id}/tree/{commit}") :].strip("/")
                page = tree(folder, "recursive=true" in query.lower())
            elif path.startswith(f"/kernels/{repo_id}/resolve/{commit}/"):
                return self.answer(files.get(path.split(commit + "/", 1)[1]))
            else:
                return self.answer(None)
            self.answer(json.dumps(page).encode(), "application/json")

        def answer(self, body: bytes | Path | None, kind: str = "application/octet-stream"):
            if body is None:
                self.send_error(404)
                return
            content = body if isinstance(body, bytes) else body.read_bytes()
            self.send_response(200)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(content)))
            self.send_header("ETag", f'"{hashlib.sha256(content).hexdigest()}"')
            self.send_header("X-Repo-Commit", commit)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(content)

        def log_message(self, *args):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_download_from_an_untrusted_publisher(variant, tmp_path):
    """Refused as it is, accepted with trust_remote_code, and then offline from what was downloaded."""
    with hub_server(REPO_ID, variant, trusted=False) as url:
        result = scenario(
            """
            error = refused(lambda: kernels.get_kernel("org/ltx-kernels", version=1))
            other = refused(lambda: kernels.get_kernel("org/ltx-kernels", version=1, trust_remote_code=["org/another"]))
            module = kernels.get_kernel("org/ltx-kernels", version=1, trust_remote_code=["org/ltx-kernels"])
            loaded = kernels.get_loaded_kernels()[0]
            digest = loaded.metadata.digest
            from kernels._rust import Digest
            digest.validate(Digest.hash_variant(digest.algorithm, Path(module.__file__).parent))
            result = {"error": error, "other": other, "works": works(module), "file": module.__file__}
            """,
            HF_ENDPOINT=url,
            HF_HOME=str(tmp_path),
        )
    for key in ("error", "other"):
        assert result[key].startswith("ValueError") and "trusted publisher" in result[key]
    assert result["works"]
    assert Path(result["file"]).is_relative_to(tmp_path)


LOCKED_PROJECT = """\
[tool.kernels.dependencies]
"org/ltx-kernels" = 1
"""


def test_lock_and_load_from_a_trusted_publisher(variant, tmp_path):
    """`kernels lock`, get_locked_kernel, and load_kernel, which never downloads."""
    project = tmp_path / "project"
    project.mkdir()
    (project / "pyproject.toml").write_text(LOCKED_PROJECT)
    with hub_server(REPO_ID, variant, trusted=True) as url:
        result = scenario(
            """
            from argparse import Namespace
            from kernels.cli.lock import lock_kernels
            project = Path(sys.argv[1])
            lock_kernels(Namespace(project_dir=project))
            lockfile = project / "kernels.lock"
            before = refused(lambda: kernels.load_kernel("org/ltx-kernels", lockfile=lockfile))
            module = kernels.get_locked_kernel("org/ltx-kernels", lockfile=lockfile)
            again = kernels.load_kernel("org/ltx-kernels", lockfile=lockfile)
            result = {"before": before, "works": works(module), "same": again is module, "lock": lockfile.read_text()}
            """,
            project,
            HF_ENDPOINT=url,
            HF_HOME=str(tmp_path / "home"),
        )
    assert hashlib.sha1(b"v1").hexdigest() in result["lock"]
    assert result["before"].startswith("FileNotFoundError")
    assert result["works"] and result["same"]


def test_kernels_info(variant):
    if importlib.util.find_spec("sigstore") is None:
        pytest.skip("the `kernels` command needs sigstore")
    command = [
        sys.executable,
        "-c",
        "from kernels.cli import main; main()",
        "info",
        str(variant.parent.parent),
        "--json",
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    info = json.loads(done.stdout)
    assert (info["name"], info["version"], info["license"]) == ("ltx-kernels", VERSION, "Apache-2.0")
    assert build_variant.default_backend() in info["backends"]
