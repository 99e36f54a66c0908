"""The figures of a run: what its ranks report step by step, gathered into the measurement of all attempts."""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, median
from typing import TypedDict

from skyctl.checkpoint.node.replicator_events import ShardDigest
from skyctl.compare.deviation import find_differences
from skyctl.learning.observations import tells_layer_times
from skyctl.records.measurement import (
    Measurement,
    ReplicaMeasurement,
    ReplicaPredicted,
    StepMeasurement,
    ValidationMeasurement,
    middle_steps,
    quantile,
    quantiles,
)
from skyctl.records.plan import Plan
from skyctl.run.callbacks import StepProgress
from skyctl.run.event_sink import read_validation
from skyctl.run.owner_figures import OwnerFigures, joined_validation, measured_owners, owner_figures
from skyctl.run.rank_spec import RankSpec
from skyctl.schedule.simulation_input import SimulationInput
from skyctl.schedule.step_times import MessageTimes
from skyctl.worker.rank_events import CheckpointEvent, StepEvent, ValidationEvent

KEPT_STEPS = 5_000
"""Of so many steps that have ended each rank's figures are kept; of those before, loss and time alone. So the
memory and time that a launcher needs for a step do not grow with their number."""
PACE_STEPS = 1_000
"""The pace is that of so many last steps."""


class TimeParts(TypedDict):
    """The parts of a stage's time, as its rank measures them and as the plan's prediction has them."""

    forward_s: float
    backward_s: float
    optimizer_s: float
    input_message_s: float | None
    gradient_message_s: float | None


@dataclass
class StepCollector:
    """Step events of one attempt, by rank and step: of those that have ended the last ``KEPT_STEPS``.

    Attributes:
        last_ranks: of each pipeline, the rank of its last stage, in the pipelines' order; the first one
            validates. Empty: there is one pipeline.
        owners: what the pipelines' owners are called, in the same order; each of them validates. Empty:
            data is nobody's alone.
        unit: what people call a step (``Rhythm.unit``).
        validation: the validations, by the step before.
        first: the step that this attempt begins with.
        reported: steps that are done, those before the attempt included.
        oldest: the first step whose events are still here.
    """

    ranks: int
    steps: int
    by_rank: dict[int, dict[int, StepEvent]] = field(default_factory=dict)
    validation: dict[int, ValidationMeasurement] = field(default_factory=dict)
    reported: int = 0
    first: int = 0
    oldest: int = 0
    last_ranks: tuple[int, ...] = ()
    owners: tuple[str, ...] = ()
    unit: str = "step"
    _validations: dict[int, dict[int, ValidationEvent]] = field(default_factory=dict)
    _checkpoints: dict[int, dict[int, CheckpointEvent]] = field(default_factory=dict)
    _old_losses: array[float] = field(default_factory=lambda: array("d"))
    _old_seconds: array[float] = field(default_factory=lambda: array("d"))

    def __post_init__(self) -> None:
        self.reported = max(self.reported, self.first)
        self.oldest = self.first
        self.last_ranks = self.last_ranks or (self.ranks - 1,)

    def add_checkpoint(self, rank: int, event: CheckpointEvent) -> dict[int, ShardDigest] | None:
        """A rank has written its layers; by layer its file, once every rank has written."""
        events = self._checkpoints.setdefault(event.step, {})
        events[rank] = event
        if len(events) < self.ranks or any(one.error for one in events.values()):
            return None
        for step in [step for step in self._checkpoints if step < event.step]:
            del self._checkpoints[step]
        return {layer: shard for one in events.values() for layer, shard in one.layers.items()}

    def checkpoint_events(self, step: int) -> Mapping[int, CheckpointEvent]:
        """By rank, what has been told of the checkpoint after so many steps."""
        return self._checkpoints.get(step, {})

    def add(self, rank: int, event: StepEvent) -> None:
        """Keeps one rank's figures of one step."""
        self.by_rank.setdefault(rank, {})[event.step] = event

    def add_validation(self, rank: int, event: ValidationEvent) -> None:
        """Keeps what a pipeline's last rank found in a validation, whose loss is finite."""
        found = self._validations.setdefault(event.step, {})
        found[rank] = event
        if len(found) == (len(self.last_ranks) if self.owners else 1):
            self.validation[event.step] = joined_validation(event.step, list(found.values()))

    def complete(self) -> list[StepProgress]:
        """The steps that every rank has finished and that were not handed out yet, in order.

        A step that is validated has ended when the validation has.
        """
        out = []
        while self.reported < self.steps and self._has_ended(self.reported):
            out.append(self._progress(self.reported))
            self.reported += 1
            while self.reported - self.oldest > KEPT_STEPS + len(out):  # these are to be looked at yet
                self._drop_oldest()
        return out

    @property
    def settled_steps(self) -> range:
        """The steps that have ended and whose events are here, without the attempt's first, a warm-up."""
        return range(max(self.first + 1, self.oldest), self.reported)

    def _drop_oldest(self) -> None:
        step = self.oldest
        loss, iteration_s = self.loss(step), self.iteration_s(step)
        self._old_losses.append(loss)
        self._old_seconds.append(iteration_s)
        self.oldest += 1
        for events in self.by_rank.values():
            events.pop(step, None)
        self._validations.pop(step, None)

    def heard(self, until: int) -> list[StepProgress]:
        """What is known of steps before ``until`` that were not handed out: not every rank has told of them.

        As far as the first has, and those that know the loss.
        """
        out = []
        for step in range(self.reported, until):
            if any(step not in self.by_rank.get(rank, {}) for rank in (0, *self.last_ranks)):
                break
            out.append(self._progress(step))
        return out

    def events_of(self, step: int) -> list[StepEvent]:
        """Every rank's event of a step that all have finished, by rank."""
        return [self.by_rank[rank][step] for rank in range(self.ranks)]

    def settled_events(self) -> list[list[StepEvent]]:
        """By rank, its events of ``settled_steps``."""
        return [[self.by_rank[rank][step] for step in self.settled_steps] for rank in range(self.ranks)]

    def _has_ended(self, step: int) -> bool:
        events = [self.by_rank.get(rank, {}).get(step) for rank in range(self.ranks)]
        last = events[self.last_ranks[0]]
        if last is None or None in events:
            return False
        return not last.validates or step in self.validation

    def _progress(self, step: int) -> StepProgress:
        first = self.by_rank[0][step]
        paced = range(max(self.first + 1, self.oldest, step + 1 - PACE_STEPS), step + 1)
        times = [self.by_rank[0][i].iteration_s for i in paced]
        pace_s = median(times) if times else None
        known = [self.by_rank[rank][step] for rank in range(self.ranks) if step in self.by_rank.get(rank, {})]
        samples = sum(self.by_rank[rank][step].samples for rank in self.last_ranks)
        rates = [event.learning_rate for event in known if event.learning_rate is not None]
        return StepProgress(
            step=step,
            steps=self.steps,
            loss=self.loss(step),
            iteration_s=first.iteration_s,
            samples_per_s=samples / first.iteration_s if first.iteration_s else 0.0,
            left_s=pace_s * (self.steps - step - 1) if pace_s is not None else None,
            learning_rate=rates[0] if rates else None,
            grad_norm=first.grad_norm,
            repeats=first.repeats,
            ahead=max((event.ahead for event in known if event.ahead is not None), default=None),
            validation=self.validation.get(step),
            owners=self.owner_figures(step),
            unit=self.unit,
        )

    def owner_figures(self, step: int) -> dict[str, OwnerFigures]:
        """By owner, what it did in a round; empty where data is nobody's alone."""
        validations = self._validations.get(step, {})
        found = {}
        for name, rank in zip(self.owners, self.last_ranks, strict=False):
            event = self.by_rank.get(rank, {}).get(step)
            if event is not None:
                found[name] = owner_figures(event, validations.get(rank))
        return found

    def loss(self, step: int) -> float:
        """The training loss of a step: the sum of the parts that the pipelines' last ranks have told."""
        if step < self.oldest:
            return self._old_losses[step - self.first]
        losses = [self.by_rank[rank][step].loss for rank in self.last_ranks]
        return sum(float("nan") if loss is None else loss for loss in losses)

    def iteration_s(self, step: int) -> float:
        """Seconds of a step that has ended, on the first rank."""
        if step < self.oldest:
            return self._old_seconds[step - self.first]
        return self.by_rank[0][step].iteration_s

    def sync_s(self, steps: Sequence[int]) -> float | None:
        """The median over steps of the last pipeline's wait for the sum; None where there is one pipeline.

        A pipeline's first stage ends its backwards last, so it is the first stages that are looked at.
        """
        first_ranks = (0, *(rank + 1 for rank in self.last_ranks[:-1]))
        told = [[self.by_rank[rank][step].sync_s for rank in first_ranks] for step in steps]
        waits = [min(known) for waited in told if (known := [s for s in waited if s is not None])]
        return median(waits) if waits else None


def build_measurement(
    run_id: str,
    plan: Plan,
    ranks: Sequence[RankSpec],
    collected: StepCollector,
    weights: str | None,
    simulations: Sequence[SimulationInput],
) -> Measurement:
    """The record of one attempt. Its first step is warm-up and is left out of the medians where it can be.

    Args:
        weights: path of the trained weights, or None.
        simulations: by pipeline, what the plan's prediction comes from, for the predicted parts of a stage's
            time.
    """
    first, done = collected.first, collected.reported
    steps = tuple(
        StepMeasurement(step=i, loss=collected.loss(i), iteration_s=collected.iteration_s(i))
        for i in range(first, done)
    )
    settled = list(collected.settled_steps) or list(range(first, done))
    stale = plan.problem.rhythm.is_stale
    predicted = {replica.device: replica for replica in plan.predicted.replicas}
    stages = [
        predicted_time_parts(simulation, stage, pipeline.local_steps or 1)
        for simulation, pipeline in zip(simulations, plan.pipelines, strict=True)
        for stage in range(len(simulation.stages))
    ]
    replicas = []
    for rank in ranks:
        events = [collected.by_rank[rank.rank][i] for i in settled]
        promised = predicted[rank.device]
        replicas.append(
            ReplicaMeasurement(
                device=rank.device,
                compute_s=median(event.compute_s for event in events),
                transfer_s=median(event.transfer_s for event in events),
                idle_s=median(event.idle_s for event in events),
                peak_memory_bytes=max(event.peak_memory_bytes or 0.0 for event in events) or None,
                predicted=ReplicaPredicted(
                    compute_s=promised.compute_s,
                    idle_s=promised.idle_s,
                    memory_bytes=promised.memory_bytes,
                    **stages[rank.rank],
                ),
                **measured_time_parts(events),
                layers_spread=layers_spread(events),
                layer_steps_s=_layer_steps(events) if _all_hold_all(plan) and tells_layer_times(plan) else (),
                sync_s=_median_or_none(event.sync_s for event in events),
            )
        )
    return Measurement(
        run_id=run_id,
        strategy=plan.strategy,
        steps=steps,
        iteration_s=quantiles([step.iteration_s for step in steps[1:] or steps]),
        predicted_iteration_s=plan.predicted.iteration_s,
        predicted_interval=plan.predicted.interval,
        replicas=tuple(replicas),
        final_loss=steps[-1].loss,
        attempts=1,
        weights=weights,
        sync_s=collected.sync_s(settled),
        predicted_sync_s=plan.predicted.sync_s if len(plan.pipelines) > 1 and not stale else None,
        mean_iteration_s=_mean_iteration_s(collected, settled) if stale else None,
        validation=tuple(one for step, one in sorted(collected.validation.items()) if step < done),
        owners=measured_owners([collected.owner_figures(i) for i in range(collected.oldest, done)]),
        backend=None if plan.backend is None else plan.backend.backend,
    )


def measured_time_parts(events: Sequence[StepEvent]) -> TimeParts:
    """The medians over one rank's steps; of a message None where no step waited for one."""
    return {
        "forward_s": median(event.forward_s for event in events),
        "backward_s": median(event.backward_s for event in events),
        "optimizer_s": median(event.optimizer_s for event in events),
        "input_message_s": _median_or_none(event.input_message_s for event in events),
        "gradient_message_s": _median_or_none(event.gradient_message_s for event in events),
    }


def _median_or_none(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return median(known) if known else None


def layers_spread(events: Sequence[StepEvent]) -> float | None:
    """p90 / p10 of one rank's seconds in its layers over its steps; None where they took no time."""
    seconds = [event.forward_s + event.backward_s + event.optimizer_s for event in events]
    low = quantile(seconds, 0.1)
    return quantile(seconds, 0.9) / low if low > 0 else None


def _all_hold_all(plan: Plan) -> bool:
    return len(plan.pipelines) > 1 and len(plan.placed_stages) == len(plan.pipelines)


def _layer_steps(events: Sequence[StepEvent]) -> tuple[float, ...]:
    return middle_steps([event.forward_s + event.backward_s for event in events])


def _mean_iteration_s(collected: StepCollector, steps: Sequence[int]) -> float:
    """Seconds of a step on average, over all ranks."""
    each = [[events[step].iteration_s for step in steps] for events in collected.by_rank.values()]
    return fmean(map(fmean, each))


def predicted_time_parts(simulation: SimulationInput, stage: int, local_steps: int = 1) -> TimeParts:
    """The same of the plan: the layers' forward and backward of a whole step, a message's way unqueued.

    ``local_steps``: where a step is a round, how many of them it is.
    """
    times, count = simulation.layer_times(stage), local_steps * simulation.microbatches
    return {
        "forward_s": count * times.forward_s,
        "backward_s": count * times.backward_s,
        "optimizer_s": local_steps * times.optimizer_s,
        "input_message_s": unqueued_message_s(simulation.boundaries[stage - 1].forward) if stage else None,
        "gradient_message_s": unqueued_message_s(simulation.boundaries[stage].backward)
        if stage + 1 < len(simulation.stages)
        else None,
    }


def unqueued_message_s(hop: MessageTimes) -> float:
    """Seconds from a message's start to its arrival where nothing else is on its way."""
    return max([hop.link_s, *(seconds for _, seconds in hop.shared)]) + hop.latency_s


def with_differences(simulation: SimulationInput, done: Measurement) -> Measurement:
    """The measurement with what made it differ from its prediction (``differences``)."""
    return done.model_copy(update={"differences": find_differences(simulation, done)})


@dataclass
class StepHistory:
    """``steps``: by number, (loss, seconds); ``validation``: by the step before."""

    steps: dict[int, tuple[float, float]] = field(default_factory=dict)
    validation: dict[int, ValidationMeasurement] = field(default_factory=dict)

    @classmethod
    def read(cls, metrics: Path) -> StepHistory:
        """From a run's metrics.jsonl; what can't be read of it is left out."""
        made = cls()
        with suppress(OSError):
            for text in metrics.read_text(encoding="utf-8").splitlines():
                with suppress(ValueError, KeyError, TypeError):
                    line = json.loads(text)
                    made.steps[int(line["step"])] = (float(line["loss"]), float(line["iteration_s"]))
                    if (validation := read_validation(line)) is not None:
                        made.validation[validation.step] = validation
        return made

    def add(self, progress: StepProgress) -> None:
        """A step that has ended, with its validation where there was one."""
        self.steps[progress.step] = (progress.loss, progress.iteration_s)
        if progress.validation is not None:
            self.validation[progress.step] = progress.validation

    @property
    def count(self) -> int:
        """Steps from the first on without a gap."""
        done = 0
        while done in self.steps:
            done += 1
        return done

    def alone(self, run_id: str, plan: Plan, weights: str | None, attempts: int) -> Measurement:
        """Where the last attempt had nothing left to train: all steps, and nothing of its ranks."""
        times = [iteration_s for _, (_, iteration_s) in sorted(self.steps.items())]
        loss, _ = self.steps[max(self.steps)]
        empty = Measurement(
            run_id=run_id,
            strategy=plan.strategy,
            steps=(),
            iteration_s=quantiles(times[1:] or times),
            predicted_iteration_s=plan.predicted.iteration_s,
            predicted_interval=plan.predicted.interval,
            replicas=(),
            final_loss=loss,
            attempts=attempts,
            weights=weights,
            backend=None if plan.backend is None else plan.backend.backend,
        )
        return self.of_all(empty, attempts)

    def of_all(self, done: Measurement, attempts: int) -> Measurement:
        """The last attempt's measurement with all steps there were."""
        steps = {one.step: one for one in done.steps}
        for step, (loss, iteration_s) in self.steps.items():
            steps.setdefault(step, StepMeasurement(step=step, loss=loss, iteration_s=iteration_s))
        validation = {**self.validation, **{one.step: one for one in done.validation}}
        return done.model_copy(
            update={
                "steps": tuple(steps[step] for step in sorted(steps)),
                "validation": tuple(one for step, one in sorted(validation.items()) if step in steps),
                "attempts": attempts,
            }
        )
