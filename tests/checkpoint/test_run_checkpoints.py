"""The last checkpoint of a run is copied, as far as anybody is there to do it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from tests.planner.planner_problems import problem

from skyctl.checkpoint.launcher import run_checkpoints
from skyctl.checkpoint.launcher.policy import CheckpointRules, RetentionPolicy
from skyctl.checkpoint.launcher.run_checkpoints import RunCheckpoints
from skyctl.run.callbacks import RunCallbacks

STEP = 40


def checkpoints(nodes: set[str], heard: set[str], said: list[str]) -> RunCheckpoints:
    """Of a run whose first node writes, and whose last checkpoint no other node has yet."""
    run: Any = SimpleNamespace(callbacks=RunCallbacks(warn=said.append))
    made = RunCheckpoints(run, CheckpointRules(steps=STEP), problem())
    group: Any = SimpleNamespace(nodes=sorted(nodes), heard=heard, take_events=lambda: None)
    made._replicators = group
    made._followed = tuple(sorted(nodes)), ("oak",)
    made._retention = RetentionPolicy(2, unreplicated=False, newest=STEP, copying=STEP)
    return made


@pytest.mark.parametrize("silent", ["oak", "elm"])
def test_nobody_waits_for_copies_that_only_a_silent_node_could_make(
    silent: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The writer's link is cut, or that of the only node that copies."""
    said: list[str] = []
    nodes = {"oak", "elm"}
    slept: list[float] = []
    monkeypatch.setattr(run_checkpoints, "REPLICATION_WAIT_S", 1.0)
    monkeypatch.setattr(run_checkpoints.time, "sleep", slept.append)
    checkpoints(nodes, nodes - {silent}, said).wait_replicated(STEP)
    assert said == [f"the checkpoint of step {STEP} is not on other nodes: {silent} not heard"]
    assert len(slept) <= 1


def test_copies_that_others_may_still_make_are_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    nodes = {"oak", "elm", "ash"}
    made = checkpoints(nodes, nodes - {"elm"}, said)
    copied = made._retention.copied
    monkeypatch.setattr(run_checkpoints.time, "sleep", lambda _s: copied(STEP, [0, 1]))
    made.wait_replicated(STEP)
    assert said == []
