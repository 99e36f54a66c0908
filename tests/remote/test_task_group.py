"""Tasks and work on many nodes, heard through one queue; and the clock that stands still meanwhile."""

from __future__ import annotations

import queue
from typing import Any

import pytest

from skyctl.errors import SkyctlError
from skyctl.remote.awake_clock import SUSPENDED_S, TICK_S, AwakeClock
from skyctl.remote.task_group import TaskGroup


class Scripted:
    """A task that says what it is told to."""

    def __init__(self) -> None:
        self.events: queue.SimpleQueue[dict[str, Any] | SkyctlError | None] = queue.SimpleQueue()
        self.killed = False

    def recv(self, timeout_s: float | None = None) -> tuple[dict[str, Any], bytes] | None:
        event = self.events.get()
        if isinstance(event, SkyctlError):
            raise event
        return None if event is None else (event, b"")

    def kill(self) -> None:
        self.killed = True


def test_all_that_tasks_say_comes_in_one_queue_with_their_ends() -> None:
    group: TaskGroup[str] = TaskGroup("test")
    first, second = Scripted(), Scripted()
    group.follow("one", first)
    first.events.put({"event": "ready"})
    first.events.put(None)
    received = [group.receive(5), group.receive(5)]
    assert [(came.key, came.value, came.ended) for came in received if came] == [
        ("one", {"event": "ready"}, False),
        ("one", None, True),
    ]
    group.follow("two", second)
    second.events.put(SkyctlError("its node is lost"))
    lost = group.receive(5)
    assert lost is not None
    assert (lost.key, str(lost.error), lost.ended) == ("two", "its node is lost", True)
    assert group.receive(0) is None
    group.kill_all()
    assert first.killed
    assert second.killed


def test_work_on_each_node_ends_with_its_result_or_its_error() -> None:
    group: TaskGroup[str] = TaskGroup("test")
    group.run("good", lambda: 7)
    assert group.wait_outcome() == ("good", 7)

    def fail() -> None:
        raise SkyctlError("no room")

    group.run("bad", fail)
    key, error = group.wait_outcome()
    assert (key, str(error)) == ("bad", "no room")
    group.run("broken", lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        group.wait_outcome()


def test_what_is_there_is_given_at_once() -> None:
    group: TaskGroup[int] = TaskGroup("test")
    for number in range(3):
        group.post(number)
    assert [came.key for came in group.receive_all(5)] == [0, 1, 2]
    assert list(group.receive_all(0.01)) == []


def test_a_clock_does_not_go_on_while_the_process_is_suspended() -> None:
    now = 100.0
    clock = AwakeClock(lambda: now, ticks=False)
    began = clock.now_s()
    now += SUSPENDED_S / 2
    assert clock.now_s() - began == pytest.approx(SUSPENDED_S / 2)
    now += 3600.0
    assert clock.now_s() - began == pytest.approx(SUSPENDED_S / 2 + TICK_S)
    now += 0.1
    assert clock.now_s() - began == pytest.approx(SUSPENDED_S / 2 + TICK_S + 0.1)
