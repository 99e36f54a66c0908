"""Local nodes forked by a fork server: the same promises as of those started one by one, and less memory.

The tests imported from ``test_session`` run here once more, with ``local`` an agent that was forked.
"""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from skyctl.agent import process_tree
from skyctl.errors import UnreachableError
from skyctl.records.cluster import Node
from skyctl.remote.agent_session import Session
from skyctl.remote.base import ConnectOptions, NodeConnection
from skyctl.remote.forkserver_client import ForkedConnection, ForkServerClient
from skyctl.remote.session_factory import forkable_nodes, make_connector, open_session, open_sessions

from .answers import run_node_task
from .test_session import (  # noqa: F401
    events,
    test_a_double_forked_grandchild_ends_with_its_task,
    test_a_flood_of_output_is_bounded,
    test_a_signal_is_never_status_zero,
    test_call_in_time_or_not_at_all,
    test_failures_are_translated,
    test_fetch_while_others_talk,
    test_hello,
    test_interrupts_are_for_the_launcher,
    test_kill,
    test_messages_both_ways,
    test_prints_never_touch_the_frames,
    up,
)

Env = Callable[[Session], dict[str, str]]
Born = Callable[[Node, ConnectOptions], NodeConnection]
LOCAL = Node(name="laptop", transport="local")
OPTIONS = ConnectOptions(grace_s=0.3)
LIGHT = ("skyctl.agent.task_runner",)


@pytest.fixture
def forkserver(home: Path) -> Iterator[ForkServerClient]:
    """One that has not imported torch, which takes seconds."""
    client = ForkServerClient(LIGHT)
    yield client
    client.release()
    assert process_tree.process_entry(client.pid) is None


@pytest.fixture
def local(forkserver: ForkServerClient) -> Iterator[Session]:
    """A session with a local node whose agent was forked."""
    with open_session(LOCAL, OPTIONS, lambda node, _: ForkedConnection(node, forkserver)) as session:
        yield session


def parent(pid: int) -> int:
    row = process_tree.process_entry(pid)
    assert row is not None
    return row.parent


def started_alone(session: Session) -> bool:
    return b"python" in Path(f"/proc/{session.hello.pid}/cmdline").read_bytes()


def test_agent_and_tasks_are_forked(forkserver: ForkServerClient, local: Session, task_env: Env) -> None:
    assert parent(local.hello.pid) == forkserver.pid
    pid = up(local.start_task("node_tasks", {"do": "sleep"}, env=task_env(local)))["pid"]
    proc = Path(f"/proc/{pid}")
    assert parent(pid) == local.hello.pid
    assert proc.joinpath("cmdline").read_bytes().rstrip(b"\0") == b"skyctl-task node_tasks"
    tag = f"{process_tree.SESSION_TAG}={local.hello.session}".encode()
    assert tag in proc.joinpath("environ").read_bytes().split(b"\0")
    assert os.getsid(pid) == pid
    assert proc.joinpath("fd/0").readlink() == Path(os.devnull)
    files = [fd.readlink().as_posix().partition(":")[0] for fd in proc.joinpath("fd").iterdir()]
    assert sorted(files) == ["/dev/null", "pipe", "pipe", "socket"]  # no lock, no guardian's pipe, no agent's
    status = dict(line.split(":\t", 1) for line in proc.joinpath("status").read_text().splitlines())
    caught = int(status["SigCgt"], 16)
    assert [n for n in range(1, 32) if caught >> (n - 1) & 1] == [signal.SIGINT]


def test_an_environment_of_its_own_needs_a_new_python(local: Session, task_env: Env) -> None:
    task = local.start_task("node_tasks", {"do": "sleep"}, env={**task_env(local), "OMP_NUM_THREADS": "3"})
    command = Path(f"/proc/{up(task)['pid']}/cmdline").read_bytes()
    assert b"\0skyctl.agent.task_runner\0node_tasks" in command


def test_killed_agent_leaves_nothing(local: Session, task_env: Env) -> None:
    """``kill -9``: the guardian finds task and grandchild by their tags, written after the fork."""
    task = local.start_task("node_tasks", {"do": "orphan", "stay": True}, env=task_env(local))
    orphan = up(task)["orphan"]
    rows = process_tree.process_table()
    tagged = process_tree.find_tagged(rows, process_tree.SESSION_TAG, local.hello.session)
    assert orphan in tagged
    assert len(tagged) >= 2
    os.kill(local.hello.pid, signal.SIGKILL)
    with pytest.raises(UnreachableError, match="node laptop was lost"):
        task.recv(20)
    deadline = time.monotonic() + 10
    while process_tree.filter_running(process_tree.process_table(), tagged) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert process_tree.filter_running(process_tree.process_table(), tagged) == set()


def test_a_forked_grandchild_carries_the_tags(local: Session, task_env: Env) -> None:
    """One that only forks, as multiprocessing does, shows the environment of the task."""
    task = local.start_task("node_tasks", {"do": "forked"}, env=task_env(local))
    child = up(task)["child"]
    assert child in process_tree.find_tagged(
        process_tree.process_table(), process_tree.SESSION_TAG, local.hello.session
    )
    task.kill()
    assert events(task)[-1]["signal"] == "SIGTERM"
    assert (
        process_tree.filter_running(process_tree.process_table(), {child}) == set()
    )  # it may still wait to be reaped


def test_forkserver_killed(forkserver: ForkServerClient, task_env: Env) -> None:
    """The agents that it has forked go on and end as they should; later nodes are started one by one."""
    options = ConnectOptions(grace_s=0.3)
    with open_session(LOCAL, options, lambda node, _: ForkedConnection(node, forkserver)) as before:
        os.kill(forkserver.pid, signal.SIGKILL)
        with open_session(LOCAL, options, lambda node, _: ForkedConnection(node, forkserver)) as after:
            for session in (before, after):
                task = session.start_task("node_tasks", {"do": "echo"}, env=task_env(session))
                task.send({"op": "stop"})
                assert events(task)[-1]["event"] == "result"
            assert started_alone(after)


def test_modules_that_cannot_be_imported(home: Path) -> None:
    forkserver = ForkServerClient(("torch_that_is_not_there",))
    try:
        with open_session(LOCAL, OPTIONS, lambda node, _: ForkedConnection(node, forkserver)) as session:
            assert started_alone(session)
    finally:
        forkserver.release()


def test_modules_that_start_threads(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fork would lose them, with whatever they hold locked."""
    source = "import threading, time\nthreading.Thread(target=time.sleep, args=(60,), daemon=True).start()\n"
    (tmp_path / "threaded.py").write_text(source)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    forkserver = ForkServerClient(("threaded",))
    try:
        with open_session(LOCAL, OPTIONS, lambda node, _: ForkedConnection(node, forkserver)) as session:
            assert started_alone(session)
    finally:
        forkserver.release()


def test_a_fork_that_has_lost_its_accelerator_starts_its_tasks_anew(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, task_env: Env
) -> None:
    """As torch tells it when its accelerator was touched before the fork."""
    (tmp_path / "torch.py").write_text(
        "from types import SimpleNamespace as Offers\n"
        "accelerator = Offers(current_accelerator=lambda: Offers(type='xpu'))\n"
        "xpu = Offers(_is_in_bad_fork=lambda: True)\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    forkserver = ForkServerClient((*LIGHT, "torch"))
    try:
        with open_session(LOCAL, OPTIONS, lambda node, _: ForkedConnection(node, forkserver)) as session:
            assert parent(session.hello.pid) == forkserver.pid
            pid = up(session.start_task("node_tasks", {"do": "sleep"}, env=task_env(session)))["pid"]
            assert b"\0skyctl.agent.task_runner\0node_tasks" in Path(f"/proc/{pid}/cmdline").read_bytes()
    finally:
        forkserver.release()


def test_who_waits_for_a_birth_is_told_that_there_will_be_none(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on Ctrl-C while torch is imported."""
    (tmp_path / "slow.py").write_text("import time\ntime.sleep(600)\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    forkserver = ForkServerClient(("slow",))
    ours, theirs = socket.socketpair()
    errors: list[OSError] = []

    def wait() -> None:
        try:
            forkserver.fork("", theirs)
        except OSError as exc:
            errors.append(exc)

    waiting = threading.Thread(target=wait)
    with ours, theirs:
        waiting.start()
        forkserver.release()
        waiting.join()
    assert len(errors) == 1
    assert process_tree.process_entry(forkserver.pid) is None


def test_one_node_of_several_alike_is_born_too(home: Path) -> None:
    nodes = [Node(name=name, transport="local") for name in ("a", "b")]
    for of, born in ((nodes, True), (None, False)):
        with make_connector(nodes[:1], of) as connector:
            remote = connector(nodes[0], OPTIONS)
            assert isinstance(remote, ForkedConnection) is born
            remote.close()


def test_which_nodes_are_alike() -> None:
    nodes = [
        Node(name="a", transport="local"),
        Node(name="b", transport="local", env={"X": "1"}),
        Node(name="c", transport="local", python="/opt/python3"),
        Node(name="d"),
        Node(name="e", transport="local"),
    ]
    assert forkable_nodes(nodes) == {"a", "e"}
    assert forkable_nodes(nodes[:-1]) == set()


def test_sessions_with_torch_share_it(home: Path, task_env: Env) -> None:
    """``open_sessions`` does this by itself: torch is there in one thread, and mostly not the task's own."""
    nodes = [Node(name=f"n{i}", transport="local") for i in range(2)]
    sessions = open_sessions(nodes, OPTIONS)
    try:
        for session in sessions.values():
            assert isinstance(session, Session)
            imports = run_node_task(session, {"do": "imported"}, 20, task_env(session))
            assert imports["torch"]
            assert imports["threads"] == 1
            assert imports["private_mib"] < 60
            assert imports["cuda"] is False
    finally:
        for session in sessions.values():
            if isinstance(session, Session):
                session.close()
