"""One supervisor a run, and never two: told by a lock, whoever was killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from skyctl.agent.process_tree import process_start_ticks
from skyctl.errors import SkyctlError
from skyctl.files import RunPaths
from skyctl.run.run_lock import (
    acquire_run_lock,
    end_supervisor,
    supervisor_status,
    this_process,
)

HOLDER = """
import sys, time
from skyctl.run.run_lock import acquire_run_lock
from skyctl.files import RunPaths
with acquire_run_lock(RunPaths(sys.argv[1]), attached=False):
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def holder():
    """Starts processes that hold a run's claim until they are told to end."""
    begun = []

    def start(paths: RunPaths) -> subprocess.Popen[str]:
        child = subprocess.Popen(
            [sys.executable, "-c", HOLDER, paths.run_id],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        begun.append(child)
        assert child.stdout is not None
        assert child.stdout.readline() == "held\n"
        return child

    yield start
    for child in begun:
        child.kill()
        child.communicate()


def test_a_claim_is_one_process_alone(holder) -> None:
    paths = RunPaths.new()
    assert supervisor_status(paths) == ("gone", None)
    child = holder(paths)
    how, who = supervisor_status(paths)
    assert (how, who and who.pid) == ("alive", child.pid)
    with pytest.raises(SkyctlError, match=f"supervised by process {child.pid}") as caught:
        acquire_run_lock(paths, attached=True)
    assert "skyctl attach" in str(caught.value.hint)
    child.kill()
    with acquire_run_lock(paths, attached=True, wait_s=10) as ours:
        assert ours.supervisor.pid == os.getpid()
        assert supervisor_status(paths)[0] == "alive"
    assert supervisor_status(paths) == ("gone", None)


def test_one_that_was_killed_is_gone_though_its_name_stands_there(holder) -> None:
    paths = RunPaths.new()
    child = holder(paths)
    child.kill()
    child.wait()
    how, who = supervisor_status(paths)
    assert (how, who and who.pid) == ("gone", child.pid)


def test_another_machines_claim_is_left_alone() -> None:
    paths = RunPaths.new()
    other = this_process(attached=False).model_copy(update={"host": "elsewhere.example"})
    paths.lock.write_text(other.model_dump_json())
    assert supervisor_status(paths)[0] == "elsewhere"
    with pytest.raises(SkyctlError, match=r"supervised on elsewhere\.example") as caught:
        acquire_run_lock(paths, attached=True)
    assert str(paths.lock) in str(caught.value.hint)
    paths.lock.unlink()
    acquire_run_lock(paths, attached=True).release()


def test_only_the_very_process_is_ended(holder) -> None:
    paths = RunPaths.new()
    child = holder(paths)
    who = supervisor_status(paths)[1]
    assert who is not None
    assert end_supervisor(
        who.model_copy(update={"started": who.started + 1}), 0.1
    )  # that one has ended long ago
    assert child.poll() is None
    assert end_supervisor(who, 10)
    assert child.wait() in (-signal.SIGTERM, -signal.SIGKILL)
    assert process_start_ticks(who.pid) != who.started
    assert end_supervisor(who, 0.1)
