"""Who counts as silent or late: not those that nobody listened to."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from skyctl.probe import fleet as module
from skyctl.probe.fleet import SILENCE_S, TURN_S, Fleet, Member, TaskLike
from skyctl.records.cluster import Node


class Clock:
    """A clock that is set by hand."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    found = Clock()
    monkeypatch.setattr(module, "time", found)
    return found


def member(fleet: Fleet, name: str) -> Member:
    task = cast(TaskLike, SimpleNamespace(kill=lambda: None))
    found = Member(Node(name=name, transport="local"), "127.0.0.1", task, heard=0.0)
    fleet.members.append(found)
    return found


def test_a_launcher_that_was_stopped_loses_no_node(clock: Clock) -> None:
    """Ctrl-Z and fg in the middle of a wait, and between two."""
    fleet = Fleet()
    it = member(fleet, "a")

    def stopped(_: Member, event: dict[str, Any]) -> None:
        if event["event"] == "progress":
            clock.now += 10 * SILENCE_S
            fleet._news.put((it, {"event": "measured"}))

    fleet._news.put((it, {"event": "progress"}))
    fleet.wait([it], "measured", SILENCE_S, stopped)
    clock.now += 10 * SILENCE_S
    fleet._news.put((it, {"event": "progress"}))
    fleet.wait([it], "measured", SILENCE_S, stopped)
    assert fleet.failures == {}


@pytest.mark.parametrize(("deadline_s", "words"), [(1000.0, "has said nothing"), (10.0, "no result within")])
def test_who_is_silent_or_late_while_others_speak_has_failed(
    clock: Clock, deadline_s: float, words: str
) -> None:
    fleet = Fleet()
    silent, other = member(fleet, "silent"), member(fleet, "other")

    def heard(speaker: Member, event: dict[str, Any]) -> None:
        clock.now += TURN_S
        fleet._news.put((speaker, event))

    fleet._news.put((other, {"event": "progress"}))
    fleet.wait([silent], "measured", deadline_s, heard)
    assert list(fleet.failures) == ["silent"]
    assert words in fleet.failures["silent"].error
