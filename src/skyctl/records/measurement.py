"""The measurement of a run, next to what was predicted; the one definition of medians and quantiles."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal

from pydantic import model_validator

from skyctl.records.backend import Backend
from skyctl.records.base import Bytes, Count, FileRecord, Index, Name, Record, Seconds, Seq
from skyctl.records.interval import Interval

LEAST_UNEVEN_STEPS = 19
"""Of fewer steps, without the warm-up step, nothing is said of how uneven they are: a run makes 20."""
UNEVEN_PARTS = 20
"""Equally likely parts of the steps, each shown by the step in its middle."""


class StepMeasurement(Record):
    """The measurement of one training step; ``loss`` is the mean over the batch's samples."""

    step: Index
    loss: float
    iteration_s: Seconds


class Quantiles(Record):
    """Quantiles of the step time over all steps but the first, which is warm-up."""

    median: Seconds
    p10: Seconds
    p90: Seconds


class ReplicaPredicted(Record):
    """The plan's prediction for one device; forward and backward are of the whole step.

    ``input_message_s``, ``gradient_message_s``: transfer of one message from the stage before, or after.
    """

    compute_s: Seconds
    idle_s: Seconds
    memory_bytes: Bytes
    forward_s: Seconds
    backward_s: Seconds
    optimizer_s: Seconds
    input_message_s: Seconds | None
    gradient_message_s: Seconds | None


class ReplicaMeasurement(Record):
    """One device's median step. ``transfer_s``: waiting for the network; ``idle_s``: for other stages.

    ``forward_s``, ``backward_s`` and ``optimizer_s`` are the layers' own part of ``compute_s``.
    ``input_message_s``, ``gradient_message_s``: the median transfer of those messages that were waited for
    from before their start. ``layers_spread``: p90 / p10 of the three together, step by step. ``sync_s``: of
    ``transfer_s`` and ``idle_s``, from its last backward to the end of the gradients' sum over pipelines.
    ``layer_steps_s``: where every device holds all layers, how uneven its steps were: equally likely seconds
    of a step's forwards and backwards, ascending; empty for a run of fewer than 20 steps.
    """

    device: Name
    compute_s: Seconds
    transfer_s: Seconds
    idle_s: Seconds
    peak_memory_bytes: Bytes | None
    predicted: ReplicaPredicted
    forward_s: Seconds
    backward_s: Seconds
    optimizer_s: Seconds
    input_message_s: Seconds | None
    gradient_message_s: Seconds | None
    layers_spread: float | None
    sync_s: Seconds | None
    layer_steps_s: Seq[Seconds]


class Difference(Record):
    """A cause of deviation from the prediction, and what it adds to a step.

    ``cause``: ``compute`` (``device``'s layers, seconds a step), ``overhead`` (what ``device`` does beside
    its layers, seconds a step), ``message`` (one message from ``device`` to ``target``), ``all`` (all of it
    together: predicted and measured step). ``step_s``: the simulated step with only this as measured.
    """

    cause: Literal["compute", "overhead", "message", "all"]
    device: Name | None = None
    target: Name | None = None
    predicted_s: Seconds
    measured_s: Seconds
    step_s: Seconds


class ValidationMeasurement(Record):
    """A validation: the mean loss over held-out samples, after step ``step``.

    ``metrics``: by name, the means of the user's metrics (None: no number); None: there are none.
    """

    step: Index
    loss: float
    metrics: dict[Name, float | None] | None


class OwnerMeasurement(Record):
    """The work of an owner of data over the run's rounds, of the last attempt.

    Attributes:
        rounds: in which it made local steps.
        local_steps: of such a round, the median.
        samples: that count in averages, in all.
        loss: of its own local steps, in the last round that it made any in; None: there is none.
        validation_loss: on its own held-out data, the last; None: there is none.
    """

    owner: Name
    rounds: Index
    local_steps: float
    samples: Index
    loss: float | None
    validation_loss: float | None


class Measurement(FileRecord):
    """``measurement.json`` in a run's folder; ``launch --json`` prints the same.

    ``predicted_interval``: the plan's, of its step; None where it has none. ``sync_s``: from the last
    pipeline's last backward to the end of the gradients' sum, the median step; ``predicted_sync_s``: as the
    plan has it; None where there is one pipeline. ``owners``: where steps are rounds of several owners.
    ``mean_iteration_s``: with a parameter server, which is predicted in the long run, a step on average over
    all devices. ``backend``: what carried tensors between ranks, at the end of the run; None: the plan does
    not say.
    """

    kind: Literal["skyctl/measurement"] = "skyctl/measurement"
    version: Literal[7] = 7
    run_id: Name
    strategy: str
    steps: Seq[StepMeasurement]
    iteration_s: Quantiles
    predicted_iteration_s: Seconds
    replicas: Seq[ReplicaMeasurement]
    final_loss: float
    attempts: Count
    weights: str | None
    validation: Seq[ValidationMeasurement] = ()
    trace: str | None = None
    differences: Seq[Difference] = ()
    predicted_interval: Interval | None
    sync_s: Seconds | None = None
    predicted_sync_s: Seconds | None = None
    owners: Seq[OwnerMeasurement] = ()
    mean_iteration_s: Seconds | None = None
    backend: Backend | None

    @model_validator(mode="after")
    def _explains_its_replicas(self) -> Measurement:
        measured = {replica.device for replica in self.replicas}
        for cause in self.differences:
            named = {"all": (), "message": (cause.device, cause.target)}.get(cause.cause, (cause.device,))
            for device in named:
                if device not in measured:
                    raise ValueError(f"a difference names {device!r}, of which nothing was measured")
        if self.differences and self.differences[-1].cause != "all":
            raise ValueError("the last of the differences must be that of all causes together")
        return self


def quantile(values: Iterable[float], share: float) -> float:
    """The value below which the part ``share`` of them is, 0 ≤ share ≤ 1.

    Linear between the two nearest ranks, counted from the smallest at 0 to the largest at 1: definition 7
    of Hyndman and Fan (1996), numpy's default. ValueError where there are no values.
    """
    ordered = sorted(values)
    if not ordered:
        raise ValueError("a quantile of no values")
    if not 0 <= share <= 1:
        raise ValueError(f"a quantile's share is in [0, 1], not {share}")
    place = share * (len(ordered) - 1)
    below = min(int(place), max(0, len(ordered) - 2))
    above = min(below + 1, len(ordered) - 1)
    low, high = ordered[below], ordered[above]
    # The clamp: rounding must not take the figure out of the two values it lies between.
    return min(max(low + (high - low) * (place - below), low), high)


def median(values: Iterable[float]) -> float:
    """The middle value (the mean of the middle two)."""
    return quantile(values, 0.5)


def quantiles(steps: Iterable[float]) -> Quantiles:
    """Median, p10 and p90 of step times, in seconds.

    Args:
        steps: without the warm-up step; leaving it out is the caller's part.
    """
    values = list(steps)
    return Quantiles(median=median(values), p10=quantile(values, 0.1), p90=quantile(values, 0.9))


def middle_steps(steps: Sequence[float]) -> tuple[float, ...]:
    """``UNEVEN_PARTS`` equally likely steps, ascending; none of fewer than ``LEAST_UNEVEN_STEPS``."""
    if len(steps) < LEAST_UNEVEN_STEPS:
        return ()
    return tuple(quantile(steps, (part + 0.5) / UNEVEN_PARTS) for part in range(UNEVEN_PARTS))
