"""What the attempts of a run share: the last checkpoint is copied, as far as anybody is there to do it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from skyctl.checkpoint.launcher.policy import RetentionPolicy
from skyctl.jobs.training_request import TrainingRequest
from skyctl.run import run_context
from skyctl.run.callbacks import RunCallbacks
from skyctl.run.run_context import RunContext, RunOptions
from skyctl.workload.shipped_files import digest_workload
from skyctl.workload.workload_spec import make_spec

STEP = 40


def context(nodes: set[str], heard: set[str], said: list[str]) -> RunContext:
    """Of a run whose first node writes, and whose last checkpoint no other node has yet."""
    fields: Any = dict.fromkeys(("cluster", "request", "sink", "on_checkpoint", "on_tick"))
    callbacks = RunCallbacks(warn=said.append)
    made = RunContext(**fields, sessions={}, options=RunOptions(), callbacks=callbacks, shard_limits={})
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
    monkeypatch.setattr(run_context, "REPLICATION_WAIT_S", 1.0)
    monkeypatch.setattr(run_context.time, "sleep", slept.append)
    context(nodes, nodes - {silent}, said).wait_replicated(STEP)
    assert said == [f"the checkpoint of step {STEP} is not on other nodes: {silent} not heard"]
    assert len(slept) <= 1


def test_copies_that_others_may_still_make_are_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    nodes = {"oak", "elm", "ash"}
    made = context(nodes, nodes - {"elm"}, said)
    assert made._retention is not None
    copied = made._retention.copied
    monkeypatch.setattr(run_context.time, "sleep", lambda _s: copied(STEP, [0, 1]))
    made.wait_replicated(STEP)
    assert said == []


def test_a_restart_sends_the_code_that_the_run_began_with(tmp_path: Path) -> None:
    """Whoever edits it meanwhile; only a process that takes the run over has none but what is there then."""
    script = tmp_path / "train.py"
    script.write_text("def model(): ...\n")
    spec = make_spec(str(script))
    said: list[str] = []

    def made(digest: str) -> RunContext:
        found = context({"oak"}, {"oak"}, said)
        found.request = TrainingRequest(spec)
        found.sink = SimpleNamespace(state=SimpleNamespace(order={"digest": digest}))  # type: ignore[assignment]
        return found

    began = digest_workload(spec)
    run = made(began)
    first = run.files_to_ship()
    script.write_text("def model(): return 'edited'\n")
    assert run.files_to_ship() == first == {"train.py": b"def model(): ...\n"}
    assert said == []
    assert made(began).files_to_ship() != first
    [warning] = said
    assert warning.startswith("the code of ")
    assert "train.py are not those that the run began with" in warning
