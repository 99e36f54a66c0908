"""Steps as ranks tell of them: when one has ended, and what is known of those that have not."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from tests.planner.data_problems import data_problem
from tests.planner.planner_problems import problem

from skyctl.planner.api import plan
from skyctl.planner.plan_record import pipeline_simulations
from skyctl.records.interval import Interval
from skyctl.records.measurement import ValidationMeasurement
from skyctl.records.rhythm import Rhythm
from skyctl.run import step_collector
from skyctl.run.journal import metrics_line
from skyctl.run.owner_figures import measured_owners
from skyctl.run.step_collector import StepCollector
from skyctl.run.step_metrics import build_measurement, layers_spread
from skyctl.worker.rank_events import BatchSketch, CheckpointEvent, ValidationEvent

from ..helpers.events import step_event


def test_a_step_has_ended_when_its_validation_has() -> None:
    collected = StepCollector(ranks=2, steps=3)
    collected.add(0, step_event(0, learning_rate=None, grad_norm=2.0, validates=True))
    collected.add(1, step_event(0, learning_rate=0.3, validates=True))
    collected.add(0, step_event(1))
    collected.add(1, step_event(1))
    assert collected.complete() == []
    collected.add_validation(0, ValidationEvent(0, 0.7, 0.1, {"accuracy": 0.5, "odd": None}))
    first, second = collected.complete()
    found = ValidationMeasurement(step=0, loss=0.7, metrics={"accuracy": 0.5, "odd": None})
    assert (first.validation, first.learning_rate, first.grad_norm) == (found, 0.3, 2.0)
    assert (second.validation, second.learning_rate, second.grad_norm) == (None, None, None)


def test_what_is_known_of_steps_that_a_silent_rank_has_not_told_of() -> None:
    collected = StepCollector(ranks=3, steps=9)
    for step in range(6):
        for rank in (0, 2) if step else (0, 1, 2):
            collected.add(rank, step_event(step, loss=float(step)))
    assert [one.step for one in collected.complete()] == [0]
    assert [(one.step, one.loss) for one in collected.heard(5)] == [(n, float(n)) for n in range(1, 5)]
    assert [one.step for one in collected.heard(9)] == [1, 2, 3, 4, 5]
    del collected.by_rank[2][3]
    assert [one.step for one in collected.heard(9)] == [1, 2]
    collected.add(2, step_event(2, loss=float("nan")))  # the next attempt ends with it, and says why
    assert [one.step for one in collected.heard(9)] == [1]


def test_memory_does_not_grow_with_the_number_of_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """And whatever is dropped, the measurement has every step's loss and time."""
    monkeypatch.setattr(step_collector, "KEPT_STEPS", 50)
    monkeypatch.setattr(step_collector, "PACE_STEPS", 10)
    collected = StepCollector(ranks=2, steps=1_000, first=100)
    left = []
    for step in range(100, 1_000):
        for rank in range(2):
            event = step_event(step, loss=float(step), iteration_s=step / 10)
            collected.add(rank, replace(event, batch=BatchSketch()))
        [progress] = collected.complete()
        left.append(progress.left_s)
        assert sum(map(len, collected.by_rank.values())) <= 2 * 52
        kept = [event for events in collected.by_rank.values() for event in events.values()]
        assert sum(event.batch is not None for event in kept) == 2, "only of the step that is to be compared"
    assert left[200] == pytest.approx(29.55 * 699), "at the pace of the last ten steps"
    assert [len(events) for events in collected.settled_events()] == [
        collected.reported - collected.oldest
    ] * 2
    rank: Any = SimpleNamespace(joins=False, rank=0, device="n0/cpu:0")
    made = plan(problem(speeds=[1.0]))
    done = build_measurement("r", made, [rank], collected, None, pipeline_simulations(made))
    assert [(one.step, one.loss, one.iteration_s) for one in done.steps] == [
        (step, float(step), step / 10) for step in range(100, 1_000)
    ]
    assert done.iteration_s.median == pytest.approx(55.0)


def test_old_checkpoints_sketches_are_dropped() -> None:
    collected = StepCollector(ranks=2, steps=1_000)
    for step in range(1, 100):
        for rank in range(2):
            collected.add_checkpoint(rank, CheckpointEvent(step, {}, 0.0))
    assert set(collected.checkpoint_events(99)) == {0, 1}
    assert collected.checkpoint_events(98) == {}


def test_a_measurement_has_the_interval_of_its_plan() -> None:
    made = plan(problem(speeds=[1.0]))
    sure = made.predicted.model_copy(update={"interval": Interval(low_s=17.0, high_s=20.0)})
    collected = StepCollector(ranks=1, steps=3)
    for step in range(3):
        collected.add(0, step_event(step))
    collected.complete()
    rank: Any = SimpleNamespace(joins=False, rank=0, device="n0/cpu:0")
    for given in (made, made.model_copy(update={"predicted": sure})):
        done = build_measurement("r", given, [rank], collected, None, pipeline_simulations(given))
        assert done.predicted_interval == given.predicted.interval


@pytest.mark.parametrize(
    ("rhythm", "steps", "kept"),
    [(Rhythm(), 20, 20), (Rhythm(), 19, 0), (Rhythm(delay=1), 25, 0), (Rhythm(local_steps=2), 25, 0)],
)
def test_a_devices_steps_are_kept_where_they_are_of_its_layers_alone(
    rhythm: Rhythm, steps: int, kept: int
) -> None:
    """A run of 20 steps is enough, its warm-up step among them."""
    made = plan(data_problem(rate=1e6, rhythm=rhythm))
    collected = StepCollector(ranks=2, steps=steps, last_ranks=(0, 1))
    for step in range(steps):
        for rank in range(2):
            collected.add(rank, step_event(step, forward_s=0.1, backward_s=0.2))
    collected.complete()
    ranks: Any = [SimpleNamespace(joins=False, rank=rank, device=f"n{rank}/cpu:0") for rank in range(2)]
    done = build_measurement("r", made, ranks, collected, None, pipeline_simulations(made))
    assert [len(replica.layer_steps_s) for replica in done.replicas] == [kept, kept]


def test_how_even_a_ranks_seconds_in_its_layers_were() -> None:
    even = [step_event(step, forward_s=0.1, backward_s=0.2, optimizer_s=0.0) for step in range(11)]
    assert layers_spread(even) == 1.0
    slowed = [replace(event, backward_s=0.8) for event in even[:2]]
    assert layers_spread([*slowed, *even[2:]]) == pytest.approx(3.0)
    assert layers_spread([replace(even[0], forward_s=0.0, backward_s=0.0)]) is None


def test_pipelines_side_by_side_have_one_loss_and_one_sum() -> None:
    collected = StepCollector(ranks=3, steps=2, last_ranks=(0, 1, 2))
    for step in range(2):
        for rank, sync_s in enumerate((0.3, 0.1, 0.2)):
            validates = rank == 0 and step == 0
            event = step_event(step, loss=0.5, samples=rank + 1, sync_s=sync_s, validates=validates)
            collected.add(rank, event)
    assert collected.complete() == [], "the first pipeline validates"
    collected.add_validation(0, ValidationEvent(0, 0.7, 0.1))
    first, second = collected.complete()
    assert (first.loss, second.loss) == (1.5, 1.5)
    assert second.samples_per_s == pytest.approx(6 / 0.1)
    assert collected.sync_s([0, 1]) == 0.1, "whoever came last has only the sum itself to wait for"


def test_of_several_stages_the_first_one_of_each_pipeline_says_what_the_sum_took() -> None:
    """The last stages end their backwards first, and their sum may be over before anybody else's begins."""
    collected = StepCollector(ranks=4, steps=1, last_ranks=(1, 3))
    for rank, sync_s in enumerate((0.3, 0.01, 0.2, 0.02)):
        collected.add(rank, step_event(0, loss=0.5 if rank % 2 else None, sync_s=sync_s))
    assert collected.sync_s([0]) == 0.2
    assert collected.loss(0) == 1.0


def test_progress_says_what_people_call_a_step() -> None:
    for unit in ("step", "round"):
        collected = StepCollector(ranks=1, steps=1, unit=unit)
        collected.add(0, step_event(0, loss=0.5))
        (found,) = collected.complete()
        assert found.unit == unit
        assert "unit" not in metrics_line(found)


def test_figures_of_owners_that_are_no_numbers_do_not_end_a_run() -> None:
    """Nobody looks at the loss of work that was dropped, and a node may say anything."""
    collected = StepCollector(ranks=2, steps=1, last_ranks=(0, 1), owners=("a", "b"))
    for rank, loss in enumerate((float("nan"), 0.5)):
        event = step_event(0, loss=0.5, own_loss=loss, local_steps=2, samples=rank, validates=True)
        collected.add(rank, event)
        told = ValidationEvent(0, 1e308, 0.1, {"accuracy": 1e308}, samples=10**7)
        collected.add_validation(rank, told)
    (found,) = collected.complete()
    assert [one.loss for one in found.owners.values()] == [None, 0.5]
    assert found.validation is not None
    assert (found.validation.loss, found.validation.metrics) == (1e308, {"accuracy": 1e308})
    assert [one.loss for one in measured_owners([found.owners])] == [None, 0.5]
    owners = {name: replace(one, loss=sign * 1e308) for sign, (name, one) in enumerate(found.owners.items())}
    assert metrics_line(replace(found, owners=owners)).get("loss_variance") is None
