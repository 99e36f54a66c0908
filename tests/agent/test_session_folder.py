"""Session folders, and sweeping up after agents that are gone."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from skyctl.agent import process_tree
from skyctl.agent.session_folder import SessionFolder


def sleeper(tag: str) -> subprocess.Popen[bytes]:
    """A process with that tag, in a session of its own."""
    return subprocess.Popen(
        [sys.executable, "-c", "import time; print(flush=True); time.sleep(600)"],
        env={**os.environ, process_tree.SESSION_TAG: tag},
        stdout=subprocess.PIPE,
        start_new_session=True,
    )


def test_create_and_remove(tmp_path: Path) -> None:
    folder = SessionFolder.create(tmp_path)
    other = SessionFolder.create(tmp_path)
    assert folder.path.stat().st_mode & 0o777 == 0o700
    assert folder.path.is_dir(), "a living agent's folder is not swept"
    folder.remove()
    other.remove()
    assert [path.name for path in tmp_path.iterdir()] == [".lock"]


def test_where_nothing_can_be_written_no_folder_stays(tmp_path: Path) -> None:
    """As on a full disk: folders can be made, and nothing put into files."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))
    try:
        with pytest.raises(OSError, match="File too large"):
            SessionFolder.create(tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert [path.name for path in tmp_path.iterdir()] == [".lock"]


def test_what_a_dead_agent_left_is_swept(tmp_path: Path) -> None:
    dead = SessionFolder.create(tmp_path)
    owner = json.loads((dead.path / "owner.json").read_text())
    left = sleeper(dead.id)
    assert left.stdout is not None
    left.stdout.readline()
    (dead.path / "owner.json").write_text(json.dumps({**owner, "start": owner["start"] - 1}))
    locked = SessionFolder.create(tmp_path)
    assert dead.path.is_dir(), "its lock is still held"
    os.close(dead._lock_fd)
    foreign = tmp_path / "s-foreign"
    foreign.mkdir()
    (foreign / "owner.json").write_text(json.dumps({**owner, "host": "another"}))
    (tmp_path / "s-young").mkdir()
    for name, shift_s in (("s-old", -7200), ("s-ahead", 7200)):
        (tmp_path / name).mkdir()
        os.utime(tmp_path / name, (time.time() + shift_s,) * 2)
    fresh = SessionFolder.create(tmp_path)
    assert not dead.path.exists()
    assert left.wait(10) == -signal.SIGKILL
    left.stdout.close()
    assert foreign.is_dir(), "a home shared between hosts: another's folder"
    assert (tmp_path / "s-young").is_dir(), "perhaps being made just now"
    assert not (tmp_path / "s-old").exists()
    assert not (tmp_path / "s-ahead").exists(), "the clock was set since"
    fresh.remove()
    locked.remove()


def test_guardian(tmp_path: Path) -> None:
    """It outlives an agent that is killed hard, and ends what that had started."""
    code = (
        "import sys, time, pathlib\n"
        "from skyctl.agent.session_folder import SessionFolder\n"
        "folder = SessionFolder.create(pathlib.Path(sys.argv[1]))\n"
        "folder.start_guardian()\n"
        "print(folder.id, folder.guardian, flush=True)\n"
        "time.sleep(600)\n"
    )
    agent = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE)
    assert agent.stdout is not None
    name, guardian = agent.stdout.readline().decode().split()
    left = sleeper(name)
    assert left.stdout is not None
    left.stdout.readline()
    agent.kill()
    agent.wait()
    assert left.wait(10) == -signal.SIGKILL
    left.stdout.close()
    agent.stdout.close()
    deadline = time.monotonic() + 10
    while (
        (row := process_tree.process_entry(int(guardian)))
        and row.state != "Z"
        and time.monotonic() < deadline
    ):
        time.sleep(0.02)
    assert not (tmp_path / name).exists()


def test_descendants_and_tags() -> None:
    child = sleeper("a b")
    assert child.stdout is not None
    child.stdout.readline()
    try:
        rows = process_tree.process_table()
        assert child.pid in process_tree.find_descendants(rows, os.getpid())
        assert process_tree.find_tagged(rows, process_tree.SESSION_TAG, "a b") == {child.pid}
        assert process_tree.find_tagged(rows, process_tree.SESSION_TAG, "a") == set()
        assert process_tree.filter_running(rows, {child.pid, 2**22 + 1}) == {child.pid}
    finally:
        child.kill()
        child.wait()
        child.stdout.close()
    process_tree.send_signal({0, 1, os.getpid(), 2**22 + 1}, signal.SIGKILL)  # none of these
