"""The launcher is killed: its agents hold, another process takes them over, or they end by themselves."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from skyctl.agent import process_tree
from skyctl.records.cluster import Node
from skyctl.remote.agent_session import Session
from skyctl.remote.session_factory import adopt_sessions

from .conftest import assert_nothing_left
from .resumable_helpers import MANUAL, Reader, assert_without_gap, until

PROGRAM = Path(__file__).with_name("launcher.py")
Start = Callable[..., tuple[subprocess.Popen[str], list[str]]]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts ``launcher.py``: the process, and the sessions' ids."""
    started: list[subprocess.Popen[str]] = []

    def begin(nodes: int, hold_s: float, *more: str) -> tuple[subprocess.Popen[str], list[str]]:
        argv = [sys.executable, str(PROGRAM), str(tmp_path), str(nodes), str(hold_s), *more]
        launcher = subprocess.Popen(argv, stdout=subprocess.PIPE, text=True)
        started.append(launcher)
        assert launcher.stdout is not None
        return launcher, [launcher.stdout.readline().strip() for _ in range(nodes)]

    yield begin
    for launcher in started:
        launcher.kill()
        launcher.wait()
        assert launcher.stdout is not None
        launcher.stdout.close()


def written(path: Path) -> list[dict[str, Any]]:
    """The whole lines of a file that its writer did not finish."""
    return [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]


@pytest.mark.parametrize("how", [[], ["forked"]], ids=["alone", "forked"])
def test_another_takes_over(home: Path, tmp_path: Path, start: Start, how: list[str]) -> None:
    launcher, ids = start(2, 60, *how)
    logs = {f"n{index}": tmp_path / f"n{index}.jsonl" for index in range(2)}
    until(lambda: all(path.exists() and len(written(path)) > 500 for path in logs.values()))
    launcher.kill()
    launcher.wait()
    earlier = {name: written(path) for name, path in logs.items()}
    earlier_sessions = {name: (ids[index], earlier[name][-1]["seq"]) for index, name in enumerate(logs)}
    nodes = [Node(name=name, transport="local") for name in logs]
    outcomes = adopt_sessions(nodes, MANUAL, earlier_sessions)
    sessions = [outcome for outcome in outcomes.values() if isinstance(outcome, Session)]
    try:
        assert len(sessions) == 2
        for session in sessions:
            (task,) = session.tasks()
            task.send({"op": "stop"})
            assert_without_gap([*earlier[session.node.name], *Reader(session, task).all()])
    finally:
        for session in sessions:
            session.close()


@pytest.mark.parametrize("how", [[], ["forked"]], ids=["alone", "forked"])
def test_nobody_takes_over(home: Path, start: Start, how: list[str]) -> None:
    launcher, ids = start(1, 5, *how)
    folder = home / ".cache/skyctl/sessions" / ids[0]
    launcher.send_signal(signal.SIGKILL)
    launcher.wait()
    assert folder.exists()
    until(lambda: not folder.exists())
    assert process_tree.find_tagged(process_tree.process_table(), process_tree.SESSION_TAG, ids[0]) == set()
    assert_nothing_left(home)
