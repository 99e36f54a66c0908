"""Rows of a comparison answer the same problem: one schedule, one number of microbatches."""

from __future__ import annotations

from skyctl.cli.show_comparison import _choice
from skyctl.control import comparing
from skyctl.control.planning import PlanOptions, plan_best
from skyctl.records.plan import WorkloadRef
from skyctl.records.problem import Device, Layer, Link, Problem

REF = WorkloadRef(source="x", digest="0", batch_size=8, dtype="float32", seed=0)


def test_all_rows_take_the_best_ones_choice(monkeypatch):
    ids = ("a/cpu:0", "b/cpu:0")
    given = Problem(
        layers=tuple(
            Layer(name=f"l{i}", flops=3.0, state_bytes=1.0, activation_bytes=1.0, output_bytes=1.0)
            for i in range(6)
        ),
        devices=tuple(Device(id=i, flops_per_s=1.0 + n, memory_bytes=None) for n, i in enumerate(ids)),
        links=tuple(
            Link(source=a, target=b, latency_s=0.0, bandwidth_bytes_per_s=0.15) for a, b in (ids, ids[::-1])
        ),
        microbatches=8,
    )
    asked = []

    def plan_profile(profile, options, ref):
        asked.append(options.schedule)
        if options.schedule in (None, "auto"):
            return plan_best([given], PlanOptions(options.strategy, schedule="auto", time_limit_s=5.0))
        fixed = given.model_copy(update={"schedule": options.schedule})
        return plan_best([fixed], PlanOptions(options.strategy, time_limit_s=5.0))

    monkeypatch.setattr(comparing, "plan_profile", plan_profile)
    outcomes = comparing.plan_all(None, PlanOptions(), REF)
    problems = [outcome.plan.problem for outcome in outcomes]
    assert problems[0] == problems[1] == problems[2]
    assert problems[0].schedule in asked or asked == [None] * 3
    assert _choice(outcomes) == [f"every row: {problems[0].schedule}, 8 microbatches"]
