"""Sessions with a local node: real agent, real processes."""

from __future__ import annotations

import hashlib
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from skyctl.agent import process_tree
from skyctl.agent.node_package import PACKAGE_FOLDER, node_package_files
from skyctl.agent.task_runner import make_error_event
from skyctl.errors import (
    InputError,
    NodeError,
    RunError,
    SkyctlError,
    UnfitError,
    UnreachableError,
    WorkloadError,
)
from skyctl.records.cluster import Node
from skyctl.remote.agent_connection import AgentConnection
from skyctl.remote.agent_session import Session
from skyctl.remote.base import ConnectOptions, NodeConnection
from skyctl.remote.bootstrap import MIN_PYTHON_TEXT
from skyctl.remote.remote_task import RemoteTask, translate_task_failure
from skyctl.remote.session_factory import connect_node, open_session, open_sessions
from skyctl.workload.user_code import user_errors

from .answers import run_node_task
from .conftest import TASKS

Env = Callable[[Session], dict[str, str]]
LOCAL = Node(name="laptop", transport="local")


def events(task: RemoteTask) -> list[dict[str, Any]]:
    """All of a task's events, to its end."""
    events = []
    while not task.done:
        if event := task.recv(20):
            events.append(event[0])
    return events


def up(task: RemoteTask) -> dict[str, Any]:
    """Waits for its ``up`` event."""
    while event := task.recv(20):
        if event[0].get("event") == "up":
            return event[0]
    raise AssertionError("it is not up")


def test_messages_both_ways(local: Session, task_env: Env) -> None:
    task = local.start_task("node_tasks", {"do": "echo"}, env={**task_env(local), "WHERE": "a b'c"})
    body = os.urandom(3 << 20)
    task.send({"n": 1, "x": float("inf")}, body)
    assert task.recv(20) == ({"event": "echo", "n": 1, "x": float("inf")}, body)
    assert task.recv(0.01) is None
    task.send({"op": "stop"})
    (result,) = events(task)
    assert result == {"event": "result", "stopped": True, "where": "a b'c", "folder": local.hello.folder}
    assert task.returncode == 0
    assert task.recv() is None


def test_hello(local: Session, home: Path) -> None:
    assert local.host == "127.0.0.1"
    assert local.hello.home == str(home)
    assert local.hello.cache == str(home / ".cache/skyctl")
    assert ("lo", "127.0.0.1") in local.hello.addresses
    assert Path(local.hello.folder).stat().st_mode & 0o777 == 0o700


def oldest_python() -> str:
    """The oldest Python that a node may have; skips where this machine has none."""
    pythons = [shutil.which(f"python{MIN_PYTHON_TEXT}")]
    if "PYENV_ROOT" in os.environ:  # its shims start one version only
        versions = Path(os.environ["PYENV_ROOT"], "versions")
        pythons = [str(path) for path in versions.glob(f"{MIN_PYTHON_TEXT}.*/bin/python")]
    if not pythons or pythons[0] is None:
        pytest.skip(f"there is no Python {MIN_PYTHON_TEXT} on this machine")
    return pythons[0]


IMPORT_ALL = """
import importlib, sys
for name in sys.argv[1:]:
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as exc:
        if (exc.name or "").partition(".")[0] != "torch":
            raise
"""


def test_all_that_nodes_are_sent_can_be_imported_by_the_oldest_python() -> None:
    """Modules that import torch are only looked at if that Python has one."""
    modules = [path.removesuffix(".py").replace("/", ".") for path in node_package_files()]
    done = subprocess.run(
        [oldest_python(), "-B", "-c", IMPORT_ALL, *modules],
        env={"PYTHONPATH": str(PACKAGE_FOLDER.parent)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("find", [lambda: sys.executable, oldest_python])
def test_a_task_runs_on_any_python_and_imports_nothing_from_where_it_is_started(
    home: Path, task_env: Env, monkeypatch: pytest.MonkeyPatch, find: Callable[[], str]
) -> None:
    monkeypatch.chdir(home)
    for name in ("runpy", "select", "socket", "traceback"):
        Path(f"{name}.py").write_text("raise SystemExit('it was imported')\n")
    node = Node(name="laptop", transport="local", python=find())
    with open_session(node, ConnectOptions(grace_s=0.3)) as session:
        for _ in range(2):  # the second time the node looks whether what it has is whole
            pushed = session.push(TASKS, hashlib.sha256(TASKS).hexdigest())
            assert Path(pushed).read_bytes() == TASKS
        task = session.start_task("node_tasks", {"do": "echo"}, env=task_env(session))
        task.send({"op": "stop"})
        (result,) = events(task)
        assert result["event"] == "result"


def test_prints_never_touch_the_frames(local: Session, task_env: Env) -> None:
    task = local.start_task("node_tasks", {"do": "noisy"}, name="a 'name'/..", env=task_env(local))
    all_events = events(task)
    lines = [event["text"] for event in all_events if event["event"] == "log"]
    assert lines[0] == "a line"
    assert "raw bytes on fd 1" in lines[1]
    assert lines[2:] == ["from a shell", "on stderr", "no end of line"]
    assert [event["event"] for event in all_events if event["event"] != "log"] == ["result"]
    log = Path(local.hello.folder, "a_name_.._.log".replace(".._", ".."))
    assert log.read_text().startswith("a line\n")


def test_a_flood_of_output_is_bounded(local: Session, task_env: Env) -> None:
    task = local.start_task("node_tasks", {"do": "flood", "lines": 60_000}, env=task_env(local))
    with local._connection.changed:  # nobody reads meanwhile
        local._connection.changed.wait_for(lambda: task.ended, 30)
    all_events = events(task)
    assert len(all_events) < 20_000
    assert any(event["event"] == "result" for event in all_events)


def test_a_package_that_a_node_lacks_points_to_setup() -> None:
    """Whether the import was in the user's file, and came as skyctl's own error, or in skyctl's code."""
    node = Node(name="oldbox", host="oldbox")
    with pytest.raises(WorkloadError) as caught, user_errors(Path("train.py"), "importing it"):
        import_module("package_that_is_not_there")
    assert "which `skyctl setup train.py` brings to the nodes" in str(caught.value.hint)
    error_event = make_error_event(caught.value)
    for event in (error_event, {**error_event, "type": "ModuleNotFoundError", "skyctl": False, "hint": None}):
        error = translate_task_failure(node, event, "my models/train.py")
        assert "oldbox" in error.message
        assert "package_that_is_not_there" in error.message
        assert "skyctl setup 'my models/train.py' --limit oldbox" in str(error.hint)
    torch = {**error_event, "type": "ModuleNotFoundError", "skyctl": False, "module": "torch"}
    assert str(translate_task_failure(node, torch).hint).startswith("`skyctl setup --limit oldbox` brings it")


@pytest.mark.parametrize(
    ("kind", "cls", "words"),
    [
        ("value", RunError, "on node laptop: ValueError: a b"),
        ("workload", WorkloadError, "on node laptop: layer 3 does not fit"),
        ("unfit", UnfitError, "no room"),
        ("memory", UnfitError, "node laptop has too little memory"),
        ("disk", UnfitError, "a disk of node laptop is full"),
        ("module", UnfitError, "node laptop has no torch_that_is_not_there in /"),
        ("exit", RunError, "ended with status 3 and gave no result"),
        ("SIGSEGV", RunError, "ended by SIGSEGV"),
        ("SIGKILL", RunError, "ended by SIGKILL"),
    ],
)
def test_failures_are_translated(
    local: Session, task_env: Env, kind: str, cls: type[SkyctlError], words: str
) -> None:
    with pytest.raises(cls) as caught:
        run_node_task(local, {"do": "fail", "kind": kind}, 20, task_env(local))
    assert type(caught.value) is cls
    assert words in caught.value.message
    assert "before it" in caught.value.__notes__[0] or "Traceback" in caught.value.__notes__[0]


def test_a_signal_is_never_status_zero(local: Session, task_env: Env) -> None:
    task = local.start_task("node_tasks", {"do": "fail", "kind": "SIGKILL"}, env=task_env(local))
    last = events(task)[-1]
    assert last == {"event": "exit", "returncode": -9, "signal": "SIGKILL", "tail": ["before it"]}
    assert task.signal == "SIGKILL"


def test_call_in_time_or_not_at_all(local: Session, task_env: Env) -> None:
    with pytest.raises(NodeError, match="gave no result"):
        run_node_task(local, {"do": "sleep"}, 0.5, task_env(local))


@pytest.mark.parametrize("stubborn", [False, True])
def test_kill(local: Session, task_env: Env, stubborn: bool) -> None:
    task = local.start_task("node_tasks", {"do": "sleep", "stubborn": stubborn}, env=task_env(local))
    up(task)
    task.kill()
    last = events(task)[-1]
    assert last["signal"] == ("SIGKILL" if stubborn else "SIGTERM")


def test_a_double_forked_grandchild_ends_with_its_task(local: Session, task_env: Env) -> None:
    task = local.start_task("node_tasks", {"do": "orphan"}, env=task_env(local))
    orphan = up(task)["orphan"]
    assert [event["event"] for event in events(task)] == ["result"]
    with pytest.raises(ProcessLookupError):
        os.kill(orphan, 0)


def test_close_ends_everything_and_says_so(home: Path, task_env: Env) -> None:
    session = open_session(LOCAL, ConnectOptions(grace_s=0.3))
    tasks = [
        session.start_task("node_tasks", {"do": "orphan", "stay": True}, env=task_env(session))
        for _ in range(2)
    ]
    orphans = [up(task)["orphan"] for task in tasks]
    folder = Path(session.hello.folder)
    session.close()
    session.close()
    assert session.surviving_pids == []
    assert not folder.exists()
    for pid in [*orphans, session.hello.pid, session.hello.guardian]:
        assert process_tree.process_entry(pid) is None, f"{pid} of {orphans}, {session.hello}"
    assert events(tasks[0])[-1]["signal"] == "SIGTERM"
    with pytest.raises(SkyctlError, match="closed"):
        session.start_task("node_tasks", {})


def test_agent_killed_hard(home: Path, task_env: Env) -> None:
    """PDEATHSIG and the guardian end what it had started; every wait wakes with the node's name."""
    with open_session(LOCAL, ConnectOptions(grace_s=0.3)) as session:
        waiting = session.start_task("node_tasks", {"do": "orphan", "stay": True}, env=task_env(session))
        up(waiting)
        session.start_task("node_tasks", {"do": "kill_agent"}, env=task_env(session))
        with pytest.raises(UnreachableError, match="node laptop was lost"):
            waiting.recv(20)
        with pytest.raises(UnreachableError):
            session.fetch("/etc/hostname", home / "x", 1 << 30)
        assert not (home / "x").exists()


def test_input_ends_without_goodbye(home: Path, task_env: Env) -> None:
    """As when the launcher is killed: the agent ends everything by itself."""
    session = open_session(LOCAL, ConnectOptions(grace_s=0.3))
    up(session.start_task("node_tasks", {"do": "orphan", "stay": True}, env=task_env(session)))
    session._connection.drop()
    session.close()


def test_lease(home: Path, task_env: Env, monkeypatch: pytest.MonkeyPatch) -> None:
    """A launcher that says nothing for the lease is gone for the agent."""
    with open_session(LOCAL, ConnectOptions(grace_s=0.3, lease_s=5)) as session:
        env = task_env(session)
        assert run_node_task(session, {"do": "flood", "lines": 1}, 20, env) == {"lines": 1}
    monkeypatch.setattr(AgentConnection, "_watch", lambda _: None)
    with open_session(LOCAL, ConnectOptions(grace_s=0.3, lease_s=5)) as session:
        task = session.start_task("node_tasks", {"do": "sleep"}, env=env)
        last = events(task)[-1]
        assert last["signal"] == "SIGTERM"
        assert "had not heard from the launcher for 5 s" in translate_task_failure(session.node, last).message
        with pytest.raises(UnreachableError, match="agent has ended: it had not heard"):
            [session.push(b"", hashlib.sha256(b"").hexdigest()) for _ in range(100_000)]


def test_interrupts_are_for_the_launcher(local: Session, task_env: Env) -> None:
    task = local.start_task("node_tasks", {"do": "echo"}, env=task_env(local))
    for number in (signal.SIGINT, signal.SIGHUP):
        os.kill(local.hello.pid, number)
    task.send({"op": "stop"})
    assert events(task)[-1]["event"] == "result"


def test_sigterm_to_the_agent_is_an_orderly_end(home: Path, task_env: Env) -> None:
    with open_session(LOCAL, ConnectOptions(grace_s=0.3)) as session:
        task = session.start_task("node_tasks", {"do": "sleep"}, env=task_env(session))
        up(task)
        os.kill(session.hello.pid, signal.SIGTERM)
        last = events(task)[-1]
        assert (last["signal"], last["agent_ended"]) == ("SIGTERM", "somebody sent it SIGTERM")


def test_push_once(local: Session, tmp_path: Path) -> None:
    data = os.urandom(5 << 20)
    digest = hashlib.sha256(data).hexdigest()
    path = Path(local.push(data, digest))
    assert path.read_bytes() == data
    before = path.stat().st_mtime_ns
    (tmp_path / "f").write_bytes(data)
    assert local.push(tmp_path / "f", digest) == str(path)
    assert path.stat().st_mtime_ns == before
    path.write_bytes(b"x" * len(data))  # damaged in the cache: sent again
    assert Path(local.push(data, digest)).read_bytes() == data
    assert Path(local.push(b"", hashlib.sha256(b"").hexdigest())).read_bytes() == b""
    with pytest.raises(UnfitError, match="damaged on the way"):
        local.push(data, "0" * 64)
    with pytest.raises(UnfitError, match="no such place"):
        local.push(data, "../../etc/x")


def test_push_tree(local: Session) -> None:
    files = {"a.py": b"1", "sub/b 'x.py": b"2"}
    path = Path(local.push_tree(files))
    assert {str(p.relative_to(path)): p.read_bytes() for p in path.rglob("*.py")} == files
    (path / "a.py").write_bytes(b"changed")
    (path / "sub" / "planted.py").touch()
    assert Path(local.push_tree(files), "a.py").read_bytes() == b"1"
    assert not (path / "sub" / "planted.py").exists()
    with pytest.raises(UnfitError, match="not a path within"):
        local.push_tree({"../evil.py": b""})


def test_fetch_while_others_talk(local: Session, task_env: Env, tmp_path: Path) -> None:
    path = run_node_task(local, {"do": "write", "mib": 20}, 30, task_env(local))["path"]
    task = local.start_task("node_tasks", {"do": "echo"}, env=task_env(local))
    thread = threading.Thread(target=local.fetch, args=(path, tmp_path / "got", 1 << 30))
    thread.start()
    for number in range(20):
        task.send({"n": number})
        assert task.recv(20) == ({"event": "echo", "n": number}, b"")
    thread.join()
    assert (tmp_path / "got").read_bytes() == Path(path).read_bytes()
    with pytest.raises(UnfitError, match="no such file"):
        local.fetch("/no/such/file", tmp_path / "none", 1 << 30)
    with pytest.raises(SkyctlError, match="can't write"):
        local.fetch(path, tmp_path / "no" / "folder", 1 << 30)
    assert sorted(p.name for p in tmp_path.iterdir() if p.is_file()) == ["got"]


def test_open_sessions_keeps_outcomes_apart(home: Path) -> None:
    nodes = [Node(name=f"n {i}", transport="local") for i in range(5)]
    nodes[2] = Node(name="bad'", transport="local", python="/no/such/python")
    seen: list[str] = []
    outcomes = open_sessions(nodes, ConnectOptions(grace_s=0.3), lambda name, _: seen.append(name), limit=2)
    try:
        assert list(outcomes) == [node.name for node in nodes]
        assert sorted(seen) == sorted(outcomes)
        assert isinstance(outcomes["bad'"], UnfitError)
        assert sum(isinstance(outcome, Session) for outcome in outcomes.values()) == 4
    finally:
        for outcome in outcomes.values():
            if isinstance(outcome, Session):
                outcome.close()


def test_open_sessions_interrupted(home: Path) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    nodes = [Node(name=f"n{i}", transport="local") for i in range(6)]
    with pytest.raises(KeyboardInterrupt):
        open_sessions(nodes, ConnectOptions(grace_s=0.3), interrupt, limit=3)


def test_open_sessions_does_something_else_while_nodes_are_dialled(home: Path) -> None:
    """``meanwhile`` runs before the first session is there, as its node waits for it; its error ends all."""
    dialled, done = threading.Event(), threading.Event()

    def connector(node: Node, options: ConnectOptions) -> NodeConnection:
        dialled.set()
        assert done.wait(20)
        return connect_node(node, options)

    def meanwhile() -> None:
        assert dialled.wait(20)
        done.set()

    outcomes = open_sessions([LOCAL], ConnectOptions(grace_s=0.3), connector=connector, meanwhile=meanwhile)
    session = outcomes["laptop"]
    assert isinstance(session, Session)
    session.close()

    def fail() -> None:
        raise InputError("no such workload")

    with pytest.raises(InputError, match="no such workload"):
        open_sessions([LOCAL], ConnectOptions(grace_s=0.3), meanwhile=fail)
