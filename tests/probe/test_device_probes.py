"""The probes that count as silent or late: not those that nobody listened to."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from skyctl.probe import device_probes as module
from skyctl.probe.device_probes import POLL_S, DeviceProbe, DeviceProbes, TaskLike
from skyctl.records.cluster import Node


class Clock:
    """A clock that is set by hand."""

    def __init__(self) -> None:
        self.now = 0.0

    def awake_s(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    fake = Clock()
    monkeypatch.setattr(module, "awake_s", fake.awake_s)
    return fake


def member(probes: DeviceProbes, name: str) -> DeviceProbe:
    task = cast(TaskLike, SimpleNamespace(kill=lambda: None))
    probe = DeviceProbe(Node(name=name, transport="local"), "127.0.0.1", task, heard_at=0.0)
    probes.members.append(probe)
    return probe


@pytest.mark.parametrize(("deadline_s", "words"), [(1000.0, "has said nothing"), (10.0, "no result within")])
def test_who_is_silent_or_late_while_others_speak_has_failed(
    clock: Clock, deadline_s: float, words: str
) -> None:
    probes = DeviceProbes()
    silent, other = member(probes, "silent"), member(probes, "other")

    def heard(speaker: DeviceProbe, event: dict[str, Any]) -> None:
        clock.now += POLL_S
        probes._events.post(speaker, event)

    probes._events.post(other, {"event": "progress", "done": 1, "of": 2, "what": "x"})
    probes.wait([silent], "measured", deadline_s, heard)
    assert list(probes.failures) == ["silent"]
    assert words in probes.failures["silent"].error
