"""The choices that would be faster but change training: found by planning them, never made."""

from __future__ import annotations

import pytest
from tests.planner.data_problems import data_problem

from skyctl.cli.command_output import Output
from skyctl.cli.show_plan import show_training_changes
from skyctl.planning.plan_creation import plan_best
from skyctl.planning.plan_options import PlanOptions
from skyctl.planning.training_changes import find_training_changes
from skyctl.records.plan import WorkloadRef
from skyctl.records.rhythm import Rhythm


def test_fewer_bytes_and_a_larger_batch_where_sums_bind(capsys: pytest.CaptureFixture[str]) -> None:
    problem = data_problem(speeds=(1.0, 1.0), rate=100.0, gradient=500.0)
    plan = plan_best([problem], PlanOptions())
    changes = {change.kind: change for change in find_training_changes(plan)}
    halved, larger = changes["sync format"], changes["batch"]
    rounded = plan_best([problem.model_copy(update={"sync_format": "bfloat16"})], PlanOptions())
    assert halved.iteration_s == pytest.approx(rounded.predicted.iteration_s)
    assert halved.gain == pytest.approx(plan.predicted.iteration_s / rounded.predicted.iteration_s)
    late = plan_best([problem.model_copy(update={"rhythm": Rhythm(delay=1)})], PlanOptions())
    assert changes["sync delay"].iteration_s == pytest.approx(late.predicted.iteration_s)
    assert (larger.microbatches, larger.name) == (16, "2")
    assert larger.gain == pytest.approx(2 * plan.predicted.iteration_s / larger.iteration_s)
    assert plan.problem.sync_format == "float32"
    workload = WorkloadRef(source="x", digest="0", batch_size=32, dtype="float32", seed=0)
    show_training_changes(Output(), plan.model_copy(update={"workload": workload}), list(changes.values()))
    printed = capsys.readouterr().out
    assert "changes training: --sync-format bfloat16 would be " in printed
    assert "changes training: --sync-delay 1 would be " in printed
    assert "changes training: a batch of 64 in 16 microbatches would give " in printed


def test_nothing_where_sums_are_hidden_or_nobody_sums() -> None:
    free = plan_best([data_problem(speeds=(1.0, 1.0), rate=1e9)], PlanOptions())
    assert find_training_changes(free) == []
    pipeline = plan_best([data_problem(speeds=(1.0, 1.0), rate=100.0, parallel="pipeline")], PlanOptions())
    assert find_training_changes(pipeline) == []


def test_a_parallelism_that_was_not_chosen_may_gain_by_it() -> None:
    problem = data_problem(speeds=(1.0, 1.0), rate=100.0, gradient=300.0, parallel="pipeline")
    plan = plan_best([problem], PlanOptions(parallel="auto"))
    assert plan.problem.parallel == "pipeline"
    (halved,) = [change for change in find_training_changes(plan) if change.kind == "sync format"]
    assert halved.parallel in ("data", "hybrid")
    assert halved.iteration_s < plan.predicted.iteration_s
