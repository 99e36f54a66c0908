"""Pipelines side by side in a comparison: who takes how many samples, and the sum at a step's end."""

from __future__ import annotations

from dataclasses import replace
from types import ModuleType

import pytest
from tests.planner.hybrid_plans import hybrid_plan

from skyctl.compare.charts.step_charts import layer_times_s, share_charts
from skyctl.compare.charts.svg_file import write_svg
from skyctl.compare.charts.timeline_charts import timeline_charts
from skyctl.compare.conclusion import is_same_plan
from skyctl.compare.outcome import StrategyOutcome, summarize_outcomes
from skyctl.compare.report_page import render_report
from skyctl.compare.sync_summary import SyncChoice, sync_choice, sync_rows, sync_table
from skyctl.compare.timeline import IDLE, plan_timeline
from skyctl.planner.plan_record import pipeline_simulations
from skyctl.records.pipeline import Pipeline, PlacedStage
from skyctl.records.plan import (
    Certificate,
    ParallelismOutcome,
    Plan,
    Prediction,
    ReplicaPrediction,
    WorkloadRef,
)
from skyctl.records.problem import Device, Layer, LayerTimes, Problem
from skyctl.records.sync import Route, Sync, SyncGroup

A, B = "a/cpu:0", "b/cpu:0"


def data_plan(*, recompute: bool = False) -> Plan:
    """a takes 5 and b 3 of 8 microbatches, of 0.3 and 0.6 s; the sum takes 0.2 s, the optimizer 0.1 s."""
    seconds = {A: 0.1, B: 0.2}
    problem = Problem(
        layers=[
            Layer(name=f"layer.{i}", flops=1.0, state_bytes=1.0, activation_bytes=1.0, output_bytes=1.0)
            for i in range(2)
        ],
        devices=[Device(id=name, flops_per_s=1.0, memory_bytes=None) for name in (A, B)],
        times={
            name: LayerTimes(forward_s=(s / 2,) * 2, backward_s=(s,) * 2, optimizer_s=(0.05,) * 2)
            for name, s in seconds.items()
        },
        microbatches=8,
        parallel="data",
    )
    route = Route(share=1.0, root=A, up=[[B, A]], down=[[A, B]])
    stage = {"start": 0, "stop": 2, "in_flight": 1}
    return Plan(
        form="pipelines",
        strategy="optimal",
        problem=problem,
        workload=WorkloadRef(source="train.py", digest="d", batch_size=18, dtype="float32", seed=0),
        pipelines=[
            Pipeline(stages=[PlacedStage(device=A, recompute=recompute, **stage)], microbatches=5),
            Pipeline(stages=[PlacedStage(device=B, **stage)], microbatches=3),
        ],
        predicted=Prediction(
            iteration_s=2.1,
            bottleneck_s=0.6,
            sync_s=0.2,
            replicas=[
                ReplicaPrediction(device=A, compute_s=1.6, idle_s=0.5, memory_bytes=1.0),
                ReplicaPrediction(device=B, compute_s=1.9, idle_s=0.2, memory_bytes=1.0),
            ],
            stale=None,
        ),
        certificate=Certificate(
            status="optimal", value_s=2.1, lower_bound_s=2.1, gap=0.0, method="by hand", wall_s=0.0
        ),
        sync=Sync(groups=[SyncGroup(start=0, stop=2, routes=[route])]),
    )


def test_a_row_says_who_takes_how_many_samples(outcome) -> None:
    rows = summarize_outcomes([outcome(), StrategyOutcome("optimal", data_plan())])
    even, data = rows
    assert data.layers == "a 5 · b 3 of 8 microbatches, all layers"
    assert data.predicted_sync_s == 0.2
    # 18 samples in 8 microbatches: two of three samples, then six of two
    assert [(share.microbatches, share.samples) for share in data.shares] == [(5, 12), (3, 6)]
    assert {(share.microbatches, share.samples) for share in even.shares} == {(None, None)}


def test_a_devices_layers_take_its_own_microbatches() -> None:
    plan = data_plan()
    assert layer_times_s(plan, A, 0, 2) == pytest.approx([5 * 0.15 + 0.05] * 2)
    assert layer_times_s(plan, B, 0, 2) == pytest.approx([3 * 0.3 + 0.05] * 2)


def test_a_step_is_drawn_with_its_sum() -> None:
    plan = data_plan()
    (step,) = plan_timeline(plan, pipeline_simulations(plan)).steps
    assert step.seconds == 2.1
    numbers = [[s.microbatch for s in step.spans if (s.stage, s.kind) == (n, "B")] for n in (0, 1)]
    assert numbers == [[0, 1, 2, 3, 4], [5, 6, 7]]
    others = [(s.stage, s.kind, s.start_s, s.end_s) for s in step.spans if s.kind not in ("F", "B")]
    assert [span[:2] for span in others] == [(0, IDLE), (0, "R"), (0, "O"), (1, "R"), (1, "O")]
    assert [time for span in others for time in span[2:]] == pytest.approx(
        [1.5, 1.8, 1.8, 2.0, 2.0, 2.1, 1.8, 2.0, 2.0, 2.1]
    )


def test_what_recomputes_takes_its_forward_again() -> None:
    plan = data_plan(recompute=True)
    plan = plan.model_copy(update={"problem": plan.problem.model_copy(update={"recompute": True})})
    spans = plan_timeline(plan, pipeline_simulations(plan)).steps[0].spans
    assert spans[1].seconds == pytest.approx(0.2 + 0.1)
    assert spans[0].seconds == pytest.approx(0.1)


def test_pipelines_with_cuts_of_their_own_are_drawn_and_reported(reports: ModuleType) -> None:
    forms = (
        ParallelismOutcome(parallel="pipeline", fits=True, iteration_s=12.0, lower_bound_s=9.0),
        ParallelismOutcome(
            parallel="data", fits=False, iteration_s=None, lower_bound_s=None, reason="n2 is small"
        ),
        ParallelismOutcome(parallel="hybrid", fits=True, iteration_s=10.0, lower_bound_s=8.0),
    )
    plan = hybrid_plan(forms=forms)
    (step,) = plan_timeline(plan, pipeline_simulations(plan)).steps
    assert {(s.stage, s.microbatch) for s in step.spans if s.kind == "F"} == {
        *((stage, number) for stage in (0, 1) for number in range(6)),
        (2, 6),
        (2, 7),
    }
    assert {s.stage for s in step.spans if s.kind == "R"} == {0, 1, 2}
    outcomes = [StrategyOutcome("optimal", plan)]
    (row,) = summarize_outcomes(outcomes)
    assert row.layers == "n0 0–2 · n1 2–4 (6) | n2 0–4 (2) of 8 microbatches"
    read = reports.Reader(render_report(reports.make_report(outcomes, full=True)))
    assert read.faults == []
    words = read.words.replace("\u00a0", " ")
    for text in ("Which form", "hybrid*", "1.20×", "data parallelism: does not fit: n2 is small",
                 "form: several pipelines, 1.20× as fast as the next best (pipeline)",
                 "no plan of any form can be faster than 8.00 s", "sync: 2 groups of layers"):  # fmt: skip
        assert text in words, text


def test_the_report_has_its_shares_and_its_sum(outcome, reports: ModuleType) -> None:
    done = outcome(steps_s=[9.0, 2.2, 2.3]).measurement.model_copy(update={"sync_s": 0.25, "replicas": ()})
    outcomes = [outcome(), StrategyOutcome("optimal", data_plan(), measurement=done)]
    report = reports.make_report(outcomes, full=True)
    read = reports.Reader(render_report(report))
    assert read.faults == []
    words = read.words.replace("\u00a0", " ")
    for text in ("5 of 8 microbatches · 12 samples", "summing gradients", "2 pipelines",
                 "no choice of the devices, of their shares", "who takes how many samples",
                 "sync: a star at a; ", "summed 200 ms after the last backward; 250 ms measured",
                 "optimal: the routes of its gradients", "100% at a"):  # fmt: skip
        assert text in words, text


def test_each_way_to_sum_has_a_row(outcome, reports: ModuleType) -> None:
    done = outcome(steps_s=[9.0, 2.2, 2.3]).measurement.model_copy(update={"sync_s": 0.25, "replicas": ()})
    own = StrategyOutcome("optimal", data_plan(), measurement=done)
    assert sync_choice(data_plan()) == "star"
    ring = data_plan()
    assert ring.sync is not None
    there, back = ring.sync.groups[0].routes[0], Route(share=0.5, root=B, up=[[A, B]], down=[[B, A]])
    halves = (there.model_copy(update={"share": 0.5}), back)
    ring = ring.model_copy(update={"sync": Sync(groups=[SyncGroup(start=0, stop=2, routes=halves)])})
    assert sync_choice(ring) == "ring"
    by_sync: dict[SyncChoice, StrategyOutcome] = {
        "ring": StrategyOutcome("optimal", ring),
        "star": own,
        "trees": StrategyOutcome("optimal", error="it does not fit"),
    }
    rows = sync_rows(by_sync, "star")
    assert [(row.sync, row.chosen, row.measured_sync_s) for row in rows] == [
        ("ring", False, None), ("star", True, 0.25), ("trees", False, None),
    ]  # fmt: skip
    _, table = sync_table(rows)
    assert [(line[0], line[-1]) for line in table] == [
        ("ring", "2"), ("star*", "one"), ("trees", "it does not fit"),
    ]  # fmt: skip
    page = reports.Reader(render_report(replace(reports.make_report([own]), syncs=rows)))
    assert page.faults == []
    assert "How gradients are summed" in page.words


def test_plans_that_sum_another_way_are_not_one_plan() -> None:
    """One run would have measured both."""
    plan = data_plan()
    route = Route(share=1.0, root=B, up=[[A, B]], down=[[B, A]])
    other = plan.model_copy(update={"sync": Sync(groups=[SyncGroup(start=0, stop=2, routes=[route])])})
    assert not is_same_plan(StrategyOutcome("even", plan), StrategyOutcome("optimal", other))
    assert is_same_plan(StrategyOutcome("even", plan), StrategyOutcome("optimal", data_plan()))


def test_the_pictures_can_be_drawn(outcome, reports: ModuleType, tmp_path) -> None:
    outcomes = [StrategyOutcome("optimal", data_plan())]
    report = reports.make_report(outcomes)
    assert write_svg(tmp_path / "steps.svg", share_charts(report), timeline_charts(report)).stat().st_size > 0
