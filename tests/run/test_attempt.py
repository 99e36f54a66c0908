"""What an attempt refuses before it starts anything."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from tests.learning.profiles import nodes
from tests.planner.planner_problems import problem

from skyctl.device import node_environment
from skyctl.learning.cluster_changes import ClusterChangedError
from skyctl.planner.api import plan
from skyctl.records.cluster import Cluster
from skyctl.run.attempt import Attempt


class BeganError(Exception):
    """It got further than it should, or as far."""


def begin(number: int, *, ignore_changes: bool = False) -> None:
    """An attempt on local nodes, up to where it would ship the workload."""

    def ship(_nodes: object) -> None:
        raise BeganError

    made = plan(problem(), "even")
    names = {stage.device.split("/")[0] for stage in made.placed_stages}
    context: Any = SimpleNamespace(
        cluster=Cluster(name="here", nodes=nodes(*names)),
        options=SimpleNamespace(ignore_changes=ignore_changes),
        addresses=ship,
    )
    Attempt(context, made, number).start(None)


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
