"""Connections that break, and nodes that behave oddly: every wait ends, and the node is named."""

from __future__ import annotations

import re
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

import pytest

from skyctl.agent.node_package import node_package_files
from skyctl.errors import ProtocolError, SkyctlError, UnfitError, UnreachableError
from skyctl.records.cluster import Node
from skyctl.remote.agent_session import Session
from skyctl.remote.base import ConnectOptions
from skyctl.remote.bootstrap import (
    LOADER_PROGRAM,
    loader_command,
    start_agent,
)
from skyctl.remote.local import LocalConnection
from skyctl.remote.node_archive import boot_program_line
from skyctl.remote.session_factory import open_session

from .answers import run_node_task
from .fake_connection import FakeConnection, FaultyConnection
from .resumable_helpers import until

Env = Callable[[Session], dict[str, str]]
NODE = Node(name="n2", transport="local")


@pytest.mark.parametrize("fault", ["cut", "garbage", "silence"])
def test_faults_wake_every_wait(home: Path, task_env: Env, fault: str) -> None:
    remotes: list[FaultyConnection] = []

    def connector(node: Node, _: ConnectOptions) -> FaultyConnection:
        remotes.append(FaultyConnection(LocalConnection(node)))
        return remotes[0]

    with open_session(NODE, ConnectOptions(grace_s=0.3, lease_s=10), connector) as session:
        env = task_env(session)
        path = run_node_task(session, {"do": "write", "mib": 3}, 20, env)["path"]
        task = session.start_task("node_tasks", {"do": "orphan", "stay": True}, env=env)
        while (event := task.recv(20)) and event[0]["event"] != "up":
            pass
        failures: list[BaseException] = []
        expected = ProtocolError if fault == "garbage" else UnreachableError

        def wait(work: Callable[[], object]) -> None:
            try:
                work()
            except SkyctlError as exc:
                failures.append(exc)

        works: list[Callable[[], object]] = [task.recv, lambda: session.fetch(path, home / "out", 1 << 30)]
        works.append(lambda: run_node_task(session, {"do": "sleep"}, 60, env))
        remotes[0].fault = fault
        threads = [threading.Thread(target=wait, args=(work,), daemon=True) for work in works]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        expected = ProtocolError if fault == "garbage" else UnreachableError
        assert [type(failure) for failure in failures] == [expected] * 3
        assert all("node n2 was lost" in str(failure) for failure in failures)
        with pytest.raises(expected):
            task.send({})
    assert not list(home.glob("*out*"))


def start(
    serve: Callable[[str, BinaryIO, BinaryIO], int], stderr: str = "", timeout_s: float = 10
) -> SkyctlError:
    remote = FakeConnection(Node(name="n2"), serve, stderr)
    try:
        with pytest.raises(SkyctlError) as caught:
            start_agent(remote, ConnectOptions(start_timeout_s=timeout_s))
        return caught.value
    finally:
        remote.close()


@pytest.mark.parametrize(
    ("status", "stderr", "words"),
    [
        (127, "sh: 1: python3: not found", "node n2 has no python3: sh: 1: python3: not found"),
        (
            1,
            "python3: Command not found.",
            "status 1 before python3 had run: python3: Command not found.",
        ),  # csh
        (7, ".zshenv:1: command not found: module", "ended with status 7 before python3 had run"),
        (126, "sh: python3: Permission denied", "node n2 may not run python3"),
        (1, "Traceback\nImportError: bad", "ended with status 1 before python3 had run"),
        (0, "", "ended with status 0 before python3 had run"),
    ],
)
def test_no_python(status: int, stderr: str, words: str) -> None:
    failure = start(lambda *_: status, stderr)
    assert type(failure) is UnfitError
    assert words in failure.message
    assert "python: /path/to/python3" in str(failure.hint)


def test_shell_that_waits() -> None:
    def serve(_: str, stdin: BinaryIO, stdout: BinaryIO) -> int:
        stdin.read()
        return 0

    failure = start(serve, timeout_s=0.2)
    assert type(failure) is UnreachableError
    assert "no agent had started after 0.2 s" in failure.message


def test_shell_that_never_stops_talking() -> None:
    def serve(_: str, stdin: BinaryIO, stdout: BinaryIO) -> int:
        while True:
            stdout.write(b"spam " * 100_000)

    failure = start(serve)
    assert type(failure) is UnfitError
    assert "prints without end" in failure.message


def said(text: str) -> Callable[[str, BinaryIO, BinaryIO], int]:
    """A node that says that after the nonce and its version, then ends."""

    def serve(command: str, stdin: BinaryIO, stdout: BinaryIO) -> int:
        nonce = re.search(r"[0-9a-f]{32}", command)
        assert nonce
        stdout.write(text.replace("NONCE", nonce[0]).encode())
        stdout.flush()
        stdin.readline()
        stdin.readline()
        return 0

    return serve


def test_faults_in_the_handshake() -> None:
    no_room = 'NONCE 3.11.2\nNONCE {"error": "No space left on device", "path": "/home/x/.cache"}\n'
    failure = start(said(no_room))
    assert type(failure) is UnfitError
    assert "/home/x/.cache: No space left on device" in failure.message
    assert type(start(said("NONCE 3.11.2\nNONCE {what\n"))) is UnreachableError
    assert type(start(said('NONCE 3.11.2\nNONCE {"ready": "x"}\n'))) is UnreachableError
    assert type(start(said('NONCE 3.11.2\nNONCE {"ready": "x"}\nno frame at all'))) is UnreachableError
    assert "has Python 2.7.18" in start(said("noise NONCE 3.12.1\nNONCE 2.7.18\n")).message


def test_command_line() -> None:
    """Nothing in it that sh, fish and csh would read differently, and nothing secret."""
    assert not set("'!\n") & set(LOADER_PROGRAM)
    assert "\\n" in LOADER_PROGRAM
    assert boot_program_line().count(b"\n") == 1
    for python, start_of in (
        ("python3", "python3 -u -c '"),
        ("~/my env/bin/python", "~/'my env/bin/python' -u -c '"),
        ("~ada/bin/python", "~ada/bin/python -u"),
        ("/a $(b)/python", "'/a $(b)/python' -u"),
        ("~$(x)/python", "'~$(x)/python' -u"),
    ):
        node = Node(name="n", python=python, env={"TOKEN": "secret"})
        assert loader_command(node, "0" * 32).startswith(start_of)
        assert "secret" not in loader_command(node, "0" * 32)


def test_package_needs_nothing_of_the_launcher() -> None:
    package = node_package_files()
    assert {"skyctl/__init__.py", "skyctl/errors.py", "skyctl/agent/node_agent.py"} <= set(package)
    for name, source in package.items():
        for line in source.decode().splitlines():
            assert not re.match(r"(from|import) (pydantic|numpy|yaml|paramiko|rich|ortools)", line), name
            assert not re.match(r"from skyctl\.(records|remote|planner)", line) or "__init__" in name, name


def test_node_env_reaches_the_agent(home: Path, tmp_path: Path, task_env: Env) -> None:
    cache = tmp_path / "ca che"
    node = Node(name="n", transport="local", env={"XDG_CACHE_HOME": str(cache), "WHERE": "x"})
    with open_session(node, ConnectOptions(grace_s=0.3)) as session:
        assert session.hello.cache == str(cache / "skyctl")
        task = session.start_task("node_tasks", {"do": "echo"}, env=task_env(session))
        task.send({"op": "stop"})
        event = task.recv(20)
        assert event is not None
        assert event[0]["where"] == "x"


def test_a_stopped_agent_is_noticed(home: Path) -> None:
    """SIGSTOP looks like a host that hangs; closing ends it all the same."""
    import os
    import signal

    with open_session(NODE, ConnectOptions(grace_s=0.3, lease_s=10)) as session:
        os.kill(session.hello.pid, signal.SIGSTOP)
        until(lambda: session.lost is not None)
        assert "nothing has come from it" in str(session.lost)
        os.kill(session.hello.pid, signal.SIGCONT)


def test_a_launcher_that_was_stopped_itself_loses_no_node(home: Path) -> None:
    """It has heard nothing because it was not running: suspended, or starved by its own nodes."""
    import os
    import signal
    import subprocess

    code = (
        "import sys, time\n"
        "from skyctl.records.cluster import Node\n"
        "from skyctl.remote.base import ConnectOptions\n"
        "from skyctl.remote.session_factory import open_session\n"
        "with open_session(Node(name='n', transport='local'), ConnectOptions(lease_s=12)) as session:\n"
        "    print('open', flush=True)\n"
        "    sys.stdin.readline()\n"
        "    time.sleep(0.7)\n"
        "    print(session.lost, flush=True)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as launcher:
        assert launcher.stdin
        assert launcher.stdout
        assert launcher.stdout.readline() == "open\n"
        os.kill(launcher.pid, signal.SIGSTOP)
        time.sleep(6.5)  # longer than its own patience, which is half of the lease
        os.kill(launcher.pid, signal.SIGCONT)
        launcher.stdin.write("\n")
        launcher.stdin.flush()
        assert launcher.stdout.readline() == "None\n"
    assert launcher.returncode == 0
