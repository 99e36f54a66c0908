"""Nodes of this machine whose Python has nothing, small wheels that stand for torch, and an index of them."""

from __future__ import annotations

import base64
import hashlib
import html
import http.server
import json
import os
import platform
import signal
import subprocess
import sys
import tarfile
import threading
import zipfile
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path

import pytest
from tests.helpers.commands import COMMAND_S
from tests.helpers.processes import PATIENCE_S

TORCH = version("torch").partition("+")[0]
STUB = f"""\
__version__ = {TORCH + "+stub"!r}
"""
DISTRIBUTED = "def is_available():\n    return True\n"


def make_wheel(
    folder: Path, name: str, number: str, files: dict[str, bytes], requires: tuple[str, ...] = ()
) -> Path:
    """A wheel for any Python and system."""
    info = f"{name}-{number}.dist-info"
    lines = [
        f"Metadata-Version: 2.1\nName: {name}\nVersion: {number}",
        *(f"Requires-Dist: {r}" for r in requires),
    ]
    content = {
        **files,
        f"{info}/METADATA": ("\n".join(lines) + "\n").encode(),
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = "".join(
        f"{path},sha256={base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b'=').decode()},{len(data)}\n"
        for path, data in content.items()
    )
    path = folder / f"{name}-{number}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as wheel:
        for inner, data in content.items():
            wheel.writestr(inner, data)
        wheel.writestr(f"{info}/RECORD", record + f"{info}/RECORD,,\n")
    return path


def make_torch(folder: Path, number: str = TORCH, padding_bytes: int = 0) -> Path:
    """A stand-in for torch: it has a version and ``distributed``. ``padding_bytes``: of noise in it."""
    files = {"torch/__init__.py": STUB.encode(), "torch/distributed/__init__.py": DISTRIBUTED.encode()}
    if padding_bytes:
        files["torch/noise.bin"] = os.urandom(padding_bytes)
    return make_wheel(folder, "torch", number, files, ("stubdep>=1",))


class Index:
    """A package index over HTTP: PEP 503 pages of a folder of wheels.

    ``password``: asked of ``ada``, where given. ``stall``: while set, wheels are not sent. ``on_request``:
    called at each request, in the server's thread. ``wheel_asked``: set once a wheel has been asked for.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.password: str | None = None
        self.on_request: Callable[[], None] = lambda: None
        self.wheel_asked = threading.Event()
        self.go_on = threading.Event()
        self.go_on.set()
        outer = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def log_message(self, *_: object) -> None:
                pass

            def do_HEAD(self) -> None:
                self.do_GET()

            def do_GET(self) -> None:
                outer.on_request()
                expected = base64.b64encode(f"ada:{outer.password}".encode()).decode()
                if outer.password and self.headers.get("Authorization") != f"Basic {expected}":
                    self.send_response(401)
                    self.send_header("WWW-Authenticate", 'Basic realm="test"')
                    self.send_header("Content-Length", "0")
                    self.end_headers()
                    return
                body, kind = outer.answer(self.path)
                self.send_response(200 if body is not None else 404)
                self.send_header("Content-Type", kind)
                self.send_header("Content-Length", str(len(body or b"")))
                self.end_headers()
                if self.command == "GET":
                    self.wfile.write(body or b"")

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._server.handle_error = lambda *_: None  # type: ignore[method-assign]  # a client that was killed
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)
        self._thread.start()

    @property
    def port(self) -> int:
        return int(self._server.server_address[1])

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/simple"

    def file_url(self, name: str) -> str:
        """The URL of a file of the folder."""
        return f"http://127.0.0.1:{self.port}/files/{name}"

    def answer(self, path: str) -> tuple[bytes | None, str]:
        parts = [part for part in path.split("/") if part]
        if parts[:1] == ["files"]:
            self.wheel_asked.set()
            self.go_on.wait(PATIENCE_S)
            wheel = self.folder / parts[1].replace("%2B", "+")
            return (wheel.read_bytes() if wheel.is_file() else None), "application/octet-stream"
        names = [
            w.name
            for w in self.folder.glob("*.whl")
            if w.name.partition("-")[0] == parts[-1].replace("-", "_")
        ]
        if not names:
            return None, "text/html"
        links = "".join(f'<a href="/files/{html.escape(name)}">{html.escape(name)}</a>\n' for name in names)
        return f"<!DOCTYPE html><html><body>{links}</body></html>".encode(), "text/html"

    def close(self) -> None:
        self.go_on.set()
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


class Site:
    """A folder with a cluster of local nodes, each with a Python of its own that has nothing."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.state = folder / "state"
        self.data = folder / "data"
        self.wheels = folder / "wheels"
        self.wheels.mkdir()
        pip = {key: "" for key in os.environ if key.startswith("PIP_")}
        self.env = {k: v for k, v in os.environ.items() if k not in pip} | {
            "PIP_CONFIG_FILE": os.devnull,
            "SKYCTL_HOME": str(self.state),
            "XDG_DATA_HOME": str(self.data),
            "NO_COLOR": "1",
            "PYTHONFAULTHANDLER": "1",
        }
        self.started: list[subprocess.Popen[str]] = []

    @property
    def environments(self) -> list[Path]:
        """The contents of the folder in which setup makes environments, but for the lock."""
        root = self.data / "skyctl" / "env"
        return [path for path in root.iterdir() if path.name != "lock"] if root.is_dir() else []

    @property
    def kept(self) -> dict[str, dict]:
        """The records of them that are kept here, by node."""
        path = self.state / "setups" / "site.json"
        return json.loads(path.read_text())["nodes"] if path.exists() else {}

    def bare(self, name: str, extra: str = "") -> Path:
        """A Python without anything; ``extra`` runs whenever it starts."""
        folder = self.folder / name
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
        if extra:
            packages = next(folder.glob("lib/python3*/site-packages"))
            (packages / "sitecustomize.py").write_text(extra)
        return folder / "bin" / "python"

    def cluster(self, **nodes: Path | str | dict) -> None:
        """Local nodes: name → Python, or a mapping of a node's keys."""
        lines = []
        for name, given in nodes.items():
            keys = given if isinstance(given, dict) else {"python": str(given)}
            lines.append(json.dumps({"name": name, "transport": "local", **keys}))
        (self.folder / "cluster.yaml").write_text(
            "name: site\nnodes:\n" + "".join(f"  - {line}\n" for line in lines)
        )

    def torch(self, **options: int) -> None:
        make_torch(self.wheels, **options)
        make_wheel(self.wheels, "stubdep", "1.5", {"stubdep.py": b"here = True\n"})

    def make_python_archive(self, index: Index) -> None:
        """As uv gets them: ``pythons.json`` and what it names; this machine's Python stands for it."""
        major, minor, patch = sys.version_info[:3]
        folder = self.folder / "archive" / "python"
        (folder / "bin").mkdir(parents=True)
        library = folder / "lib" / f"python{major}.{minor}"
        library.mkdir(parents=True)
        (library / f"_sysconfigdata__linux_{platform.machine()}-linux-gnu.py").write_text(
            "# system configuration generated and used by the sysconfig module\nbuild_time_vars = {}\n"
        )
        program = folder / "bin" / f"python{major}.{minor}"
        program.write_text(f'#!/bin/sh\nexec {self.bare("brought")} "$@"\n')
        program.chmod(0o755)
        with tarfile.open(index.folder / "python.tar.gz", "w:gz") as archive:
            archive.add(folder, "python")
        digest = hashlib.sha256((index.folder / "python.tar.gz").read_bytes()).hexdigest()
        machine = platform.machine()
        one = {
            "name": "cpython",
            "arch": {"family": machine, "variant": None},
            "os": "linux",
            "libc": "gnu",
            "major": major,
            "minor": minor,
            "patch": patch,
            "prerelease": "",
            "url": index.file_url("python.tar.gz"),
            "sha256": digest,
            "variant": None,
            "build": "20260101",
        }
        listed = {f"cpython-{major}.{minor}.{patch}-linux-{machine}-gnu": one}
        (index.folder / "pythons.json").write_text(json.dumps(listed))

    def start(self, *words: str, **env: str) -> subprocess.Popen[str]:
        child = subprocess.Popen(
            [sys.executable, "-m", "skyctl", *words],
            cwd=self.folder,
            env={**self.env, **env},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.started.append(child)
        return child

    def wait_end(self, child: subprocess.Popen[str]) -> None:
        """Waits for its end; one that does not come says where all its threads are."""
        try:
            child.communicate(timeout=PATIENCE_S)
        except subprocess.TimeoutExpired:
            child.send_signal(signal.SIGABRT)
            pytest.fail(f"it goes on: {child.communicate(timeout=20)[1]}")

    def run(self, *words: str, **env: str) -> subprocess.CompletedProcess[str]:
        child = self.start(*words, **env)
        out, err = child.communicate(timeout=COMMAND_S)
        return subprocess.CompletedProcess(words, child.returncode, out, err)

    def setup(self, *words: str, code: int = 0, **env: str) -> dict:
        """``skyctl setup … --json``: the nodes of its report, by name, and ``stderr``."""
        done = self.run("setup", *words, "--json", **env)
        assert done.returncode == code, done.stderr + done.stdout
        assert "Traceback" not in done.stderr
        report = json.loads(done.stdout)
        return {**{node["node"]: node for node in report["nodes"]}, "stderr": done.stderr}

    def end(self) -> None:
        for child in self.started:
            if child.poll() is None:
                child.kill()
            child.communicate()


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    made = Site(tmp_path)
    yield made
    made.end()


@pytest.fixture
def index(site: Site) -> Iterator[Index]:
    """An index of the site's wheels."""
    made = Index(site.wheels)
    yield made
    made.close()


@pytest.fixture
def wheel() -> Callable[..., Path]:
    """``wheel(folder, name, version, files)``."""
    return make_wheel
