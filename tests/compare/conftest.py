"""Outcomes made by hand: small problems, figures that can be checked in the head."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from tests.helpers.bare_records import NO_PARTS, OF_REPLICA
from tests.helpers.browser_pages import browser_driver

from skyctl.compare.outcome import StrategyOutcome
from skyctl.records.interval import Interval
from skyctl.records.measurement import (
    Measurement,
    ReplicaMeasurement,
    ReplicaPredicted,
    StepMeasurement,
    quantiles,
)
from skyctl.records.pipeline import Pipeline, PlacedStage
from skyctl.records.plan import Certificate, Plan, Prediction, ReplicaPrediction, Unused
from skyctl.records.problem import Device, Layer, Problem

MakeOutcome = Callable[..., StrategyOutcome]


def _plan(strategy, devices, counts, compute_s, step_s, bound_s, status, interval_s, microbatches) -> Plan:
    problem = Problem(
        layers=[
            Layer(name=f"layer.{i}", flops=1.0, state_bytes=1.0, activation_bytes=1.0, output_bytes=1.0)
            for i in range(sum(counts))
        ],
        devices=[Device(id=device, flops_per_s=1.0, memory_bytes=None) for device in sorted(devices)],
        microbatches=microbatches,
    )
    stages, at = [], 0
    for device, count in zip(devices, counts, strict=False):
        if count:
            stages.append(PlacedStage(start=at, stop=at + count, device=device, in_flight=1))
            at += count
    used = {stage.device for stage in stages}
    return Plan(
        strategy=strategy,
        problem=problem,
        pipelines=[Pipeline(stages=stages, microbatches=microbatches)],
        unused=[Unused(device=device, reason="slower with it") for device in devices if device not in used],
        predicted=Prediction(
            iteration_s=step_s,
            bottleneck_s=step_s,
            interval=Interval(low_s=interval_s[0], high_s=interval_s[1]) if interval_s else None,
            replicas=[
                ReplicaPrediction(device=device, compute_s=busy, idle_s=step_s - busy, memory_bytes=1.0)
                for device, busy in zip(devices, compute_s, strict=False)
                if device in used
            ],
        ),
        certificate=Certificate(
            status=status,
            value_s=step_s,
            lower_bound_s=bound_s,
            gap=None if bound_s is None else step_s / bound_s - 1,
            method="by hand",
            wall_s=0.0,
        ),
    )


def _measurement(plan: Plan, steps_s: Sequence[float], losses: Sequence[float], off: float) -> Measurement:
    return Measurement(
        run_id="20261121-000000-abcd",
        strategy=plan.strategy,
        steps=[
            StepMeasurement(step=i, loss=loss, iteration_s=step_s)
            for i, (step_s, loss) in enumerate(zip(steps_s, losses, strict=True))
        ],
        iteration_s=quantiles(steps_s[1:]),
        predicted_iteration_s=plan.predicted.iteration_s,
        predicted_interval=plan.predicted.interval,
        replicas=[
            ReplicaMeasurement(
                device=replica.device,
                compute_s=replica.compute_s * off,
                transfer_s=0.0,
                idle_s=replica.idle_s,
                peak_memory_bytes=None,
                predicted=ReplicaPredicted(
                    compute_s=replica.compute_s,
                    idle_s=replica.idle_s,
                    memory_bytes=replica.memory_bytes,
                    **NO_PARTS,
                ),
                **NO_PARTS,
                **OF_REPLICA,
            )
            for replica in plan.predicted.replicas
        ],
        final_loss=losses[-1],
        attempts=1,
        weights=None,
        backend=None,
    )


@pytest.fixture
def outcome() -> MakeOutcome:
    """Makes one outcome; with ``steps_s`` (the first is warm-up) it has been run."""

    def make(
        strategy: str = "even",
        devices: Sequence[str] = ("tower/cpu:0", "laptop/cpu:0"),
        counts: Sequence[int] = (6, 6),
        compute_s: Sequence[float] = (1.0, 2.0),
        step_s: float = 2.5,
        bound_s: float | None = None,
        status: str = "feasible",
        steps_s: Sequence[float] | None = None,
        losses: Sequence[float] | None = None,
        off: float = 1.05,
        error: str | None = None,
        interval_s: tuple[float, float] | None = None,
        microbatches: int = 4,
    ) -> StrategyOutcome:
        plan = _plan(strategy, devices, counts, compute_s, step_s, bound_s, status, interval_s, microbatches)
        run = None
        if steps_s is not None:
            run = _measurement(plan, steps_s, losses or [3.0 - 0.1 * i for i in range(len(steps_s))], off)
        return StrategyOutcome(strategy, plan, error, run)

    return make


@pytest.fixture
def three(outcome: MakeOutcome) -> list[StrategyOutcome]:
    """Even, heuristic and optimal, all run; optimal proves 1.5 s."""
    return [
        outcome("even", steps_s=[9.0, 2.4, 2.5, 2.6]),
        outcome("heuristic", counts=(8, 4), compute_s=(1.4, 1.3), step_s=1.6, steps_s=[9.0, 1.7, 1.6, 1.8]),
        outcome(
            "optimal",
            counts=(8, 4),
            compute_s=(1.4, 1.3),
            step_s=1.5,
            bound_s=1.5,
            status="optimal",
            steps_s=[9.0, 1.6, 1.5, 1.7],
        ),
    ]


def _load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"compare_{name}", Path(__file__).with_name(f"{name}.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def traces() -> ModuleType:
    """The module ``traces.py`` in this folder."""
    return _load("traces")


@pytest.fixture(scope="session")
def reports() -> ModuleType:
    """The module ``reports.py`` in this folder."""
    return _load("reports")


@pytest.fixture
def chromium() -> Iterator[Any]:
    driver = browser_driver()
    if driver.find() is None:
        if os.environ.get("SKYCTL_REQUIRE_LAB") == "1":
            pytest.fail("there is no chromium, and here the report must be looked at")
        pytest.skip("there is no chromium on PATH")
    with driver.browser() as browser:
        yield browser
