"""A real sshd on loopback, a place for a node's files, and the assertion that nothing is left of a test."""

from __future__ import annotations

import contextlib
import getpass
import os
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from skyctl.records.cluster import Node
from skyctl.remote.agent_session import Session
from skyctl.remote.base import ConnectOptions
from skyctl.remote.session_factory import open_session

HOSTILE = "ho me;'$(touch x)&"
"""A folder's name that breaks whatever is not quoted."""

TASKS = (Path(__file__).parent / "node_tasks.py").read_bytes()


def processes_with(text: str) -> dict[int, str]:
    """Running processes whose environment holds that text."""
    processes = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                ours = text.encode() in (entry / "environ").read_bytes()
                if ours and (entry / "stat").read_text().rpartition(")")[2].split()[0] not in "ZX":
                    processes[int(entry.name)] = (entry / "cmdline").read_text()[:200]
            except OSError:
                continue
    return processes


def gone(text: str, timeout_s: float = 60) -> dict[int, str]:
    """Waits until no process holds that text; those that still do."""
    deadline = time.monotonic() + timeout_s
    while (left := processes_with(text)) and time.monotonic() < deadline:
        time.sleep(0.02)
    return left


def assert_nothing_left(home: Path) -> None:
    """No process of that home, no session's folder, nothing half-written."""
    assert gone(str(home)) == {}
    sessions = home / ".cache/skyctl/sessions"
    assert list(sessions.glob("s-*")) == []
    assert list(home.rglob(".new-*")) == []
    assert [t.name for t in threading.enumerate() if t is not threading.main_thread() and not t.daemon] == []


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The home of local nodes, with a hostile name; asserts that nothing is left there."""
    path = tmp_path / HOSTILE
    path.mkdir()
    monkeypatch.setenv("HOME", str(path))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.delenv("SSH_AUTH_SOCK", raising=False)
    yield path
    assert_nothing_left(path)


@pytest.fixture
def local(home: Path) -> Iterator[Session]:
    """A session with a local node."""
    with open_session(Node(name="laptop", transport="local"), ConnectOptions(grace_s=0.3)) as session:
        yield session


@pytest.fixture
def task_env() -> Callable[[Session], dict[str, str]]:
    """Ships the tests' tasks; the environment in which they can be imported."""
    return lambda session: {"PYTHONPATH": session.push_tree({"node_tasks.py": TASKS})}


@dataclass
class Sshd:
    """A running sshd: where it is and the files to log in with."""

    port: int
    folder: Path
    home: Path
    server: subprocess.Popen[bytes]

    @property
    def key(self) -> Path:
        return self.folder / "client"

    @property
    def known_hosts(self) -> Path:
        return self.folder / "known_hosts"

    def public(self, kind: str) -> str:
        """``TYPE BASE64`` of its host key."""
        return " ".join((self.folder / f"host_{kind}.pub").read_text().split()[:2])

    def trust(self, kind: str = "ed25519") -> None:
        """Makes its host key known."""
        self.known_hosts.write_text(f"[127.0.0.1]:{self.port} {self.public(kind)}\n")

    def config(self, text: str = "") -> str:
        """An ssh configuration; ``text`` comes first, so it wins."""
        path = self.folder / "ssh_config"
        path.write_text(
            f"{text}\nHost *\n  UserKnownHostsFile {self.known_hosts}\n  GlobalKnownHostsFile /dev/null\n"
            "  IdentityAgent none\n"
        )
        return str(path)

    def options(self, text: str = "", **changes: object) -> ConnectOptions:
        """Options that use it."""
        return ConnectOptions(ssh_config=self.config(text), **{"grace_s": 0.3, "timeout_s": 60, **changes})  # type: ignore[arg-type]

    def node(self, **changes: object) -> Node:
        """A node that it serves."""
        values = {"name": "n1", "host": "127.0.0.1", "port": self.port, "user": getpass.getuser()}
        return Node(**{**values, "identity_file": str(self.key), **changes})  # type: ignore[arg-type]


def free_port() -> int:
    """A port that nobody listens on just now."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def _keygen(path: Path, kind: str) -> None:
    argv = ["ssh-keygen", "-q", "-t", kind, "-N", "", "-f", str(path), "-C", "test"]
    subprocess.run(argv, check=True, stdin=subprocess.DEVNULL)


def _answers(port: int, server: subprocess.Popen[bytes]) -> bool:
    for _ in range(200):
        if server.poll() is not None:
            return False
        try:
            with socket.create_connection(("127.0.0.1", port), timeout=5) as sock:
                return sock.recv(4) == b"SSH-"
        except OSError:
            time.sleep(0.02)
    return False


@contextlib.contextmanager
def serve_sshd(folder: Path) -> Iterator[Sshd]:
    """OpenSSH's sshd as this user on a free port of 127.0.0.1; HOME there has a hostile name."""
    program = shutil.which("sshd") or "/usr/sbin/sshd"
    if not Path(program).exists():
        if os.environ.get("SKYCTL_REQUIRE_LAB") == "1":
            pytest.fail("SKYCTL_REQUIRE_LAB=1, and openssh-server is not installed", pytrace=False)
        pytest.skip("openssh-server is not installed")
    home = folder / HOSTILE
    home.mkdir()
    for kind in ("ed25519", "ecdsa"):
        _keygen(folder / f"host_{kind}", kind)
    for name in ("client", "other"):
        _keygen(folder / name, "ed25519")
    shutil.copy(folder / "client.pub", folder / "authorized_keys")
    if os.geteuid() == 0:
        Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)
    for _ in range(5):
        port = free_port()
        (folder / "sshd_config").write_text(
            f"Port {port}\nListenAddress 127.0.0.1\nPidFile none\nUsePAM no\nStrictModes no\n"
            f"HostKey {folder}/host_ed25519\nHostKey {folder}/host_ecdsa\n"
            f"AuthorizedKeysFile {folder}/authorized_keys\nPasswordAuthentication no\n"
            f'KbdInteractiveAuthentication no\nPermitRootLogin yes\nSetEnv HOME="{home}"\nPrintMotd no\n'
        )
        with (folder / "sshd.log").open("ab") as log:
            server = subprocess.Popen(
                [program, "-D", "-e", "-f", str(folder / "sshd_config")], stdin=subprocess.DEVNULL, stderr=log
            )
        try:
            if _answers(port, server):
                yield Sshd(port, folder, home, server)
                break
        finally:
            server.terminate()
            server.wait(10)
    else:
        pytest.fail(f"sshd does not start: {(folder / 'sshd.log').read_text()}")


@pytest.fixture(scope="session")
def sshd_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sshd]:
    """One for all tests."""
    with serve_sshd(tmp_path_factory.mktemp("sshd")) as server:
        yield server


@pytest.fixture
def sshd(sshd_server: Sshd, monkeypatch: pytest.MonkeyPatch) -> Iterator[Sshd]:
    """The server with its host key known, and a fresh home; asserts that nothing is left there."""
    monkeypatch.delenv("SSH_AUTH_SOCK", raising=False)
    sshd_server.trust()
    yield sshd_server
    try:
        assert_nothing_left(sshd_server.home)
    finally:
        shutil.rmtree(sshd_server.home)
        sshd_server.home.mkdir()
