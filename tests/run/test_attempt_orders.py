"""The attempts that are refused before anything is started, and which code ranks are sent."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.learning.profiles import nodes
from tests.planner.planner_problems import problem

from skyctl.device import node_environment
from skyctl.jobs.training_request import TrainingRequest
from skyctl.learning.cluster_changes import ClusterChangedError
from skyctl.planner.api import plan
from skyctl.records.cluster import Cluster
from skyctl.run.attempt_orders import OrderMaker
from skyctl.run.run_options import RunOptions
from skyctl.workload.shipped_files import digest_workload
from skyctl.workload.workload_spec import make_spec


class BeganError(Exception):
    """It got further than it should, or as far."""


def begin(number: int, *, ignore_changes: bool = False) -> None:
    """An attempt on local nodes, up to where it would ship the workload."""

    def ship(_nodes: object) -> None:
        raise BeganError

    made = plan(problem(), "even")
    names = {stage.device.split("/")[0] for stage in made.placed_stages}
    run: Any = SimpleNamespace(cluster=Cluster(name="here", nodes=nodes(*names)), addresses=ship)
    request: Any = None
    OrderMaker(run, request, RunOptions(ignore_changes=ignore_changes)).make(made, number, None)


def test_ranks_that_do_not_fit_this_machine_are_not_started(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many that fill the memory by starting could not say so any more."""
    with pytest.raises(BeganError):
        begin(1)
    monkeypatch.setattr(node_environment, "host_memory", lambda _limits: {"available_bytes": 0.0})
    with pytest.raises(ClusterChangedError, match="free memory") as refused:
        begin(1)
    assert refused.value.exit_code == 5
    assert "--ignore-changes" in str(refused.value.hint)
    with pytest.raises(BeganError):
        begin(1, ignore_changes=True)
    with pytest.raises(BeganError):
        begin(2)


def test_a_restart_sends_the_code_that_the_run_began_with(tmp_path: Path) -> None:
    """Edits meanwhile change nothing; only a process that takes the run over has just what is there then."""
    script = tmp_path / "train.py"
    script.write_text("def model(): ...\n")
    spec = make_spec(str(script))
    said: list[str] = []

    def made(digest: str) -> OrderMaker:
        run: Any = SimpleNamespace(
            journal=SimpleNamespace(state=SimpleNamespace(order={"digest": digest})),
            callbacks=SimpleNamespace(warn=said.append),
        )
        return OrderMaker(run, TrainingRequest(spec), RunOptions())

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
