"""Differences from the prediction, and which explain the step: the plan is simulated with measured times.

One cause at a time: with one device's layers, its overhead, or one link as measured and all else as
predicted, the simulator says how long a step would take; then with all of them together. The rest of the
measured step is what the model of time does not know.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from skyctl.compare.number_format import UNKNOWN, format_percent, format_ratio, format_seconds
from skyctl.records.measurement import Difference, Measurement, ReplicaMeasurement, ReplicaPredicted
from skyctl.schedule.simulation_input import SimulationInput
from skyctl.schedule.step_times import BoundaryTimes, MessageTimes, StageTimes

MAX_CAUSES = 12
"""So many causes are simulated, the largest first."""
LEAST_SIMULATED_SHARE = 0.003
"""A cause that can change a step by less than this part of it is left out."""
LEAST_REPORTED_SHARE = 0.01
"""A cause that changes a step by less than this part of it gets no sentence."""
LEAST_RATIO_S = 1e-6
"""A ratio to a prediction shorter than this says nothing."""
ROUNDING = 1e-9
"""Sums may be off by this part of a stage's computing."""


@dataclass(frozen=True)
class _Cause:
    """Something that took another time than predicted.

    ``size_s``: at most about so much of a step. ``stages``, ``boundaries``: by index, their times with it.
    """

    kind: str
    device: str
    target: str | None
    predicted_s: float
    measured_s: float
    size_s: float
    stages: dict[int, StageTimes]
    boundaries: dict[int, BoundaryTimes]


def find_differences(play: SimulationInput, done: Measurement) -> tuple[Difference, ...]:
    """Causes by how much they change the step, the largest first; ``all`` of them together comes last.

    None where no part is off by ``LEAST_SIMULATED_SHARE`` of a step.
    """
    planned_s = play.simulate().iteration_s
    every = [
        cause for stage in range(len(play.stages)) for cause in _stage_causes(play, done.replicas, stage)
    ]
    causes = [cause for cause in every if cause.size_s > LEAST_SIMULATED_SHARE * planned_s]
    causes = sorted(causes, key=lambda cause: -cause.size_s)[:MAX_CAUSES]
    if not causes:
        return ()
    differences = [
        Difference(
            cause=cause.kind,  # type: ignore[arg-type]
            device=cause.device,
            target=cause.target,
            predicted_s=cause.predicted_s,
            measured_s=cause.measured_s,
            step_s=_with(play, [cause]).simulate().iteration_s,
        )
        for cause in causes
    ]
    differences.sort(key=lambda difference: -abs(difference.step_s - planned_s))
    together = Difference(
        cause="all",
        predicted_s=planned_s,
        measured_s=done.iteration_s.median,
        step_s=_with(play, every).simulate().iteration_s,
    )
    return (*differences, together)


def _stage_causes(play: SimulationInput, replicas: Sequence[ReplicaMeasurement], stage: int) -> list[_Cause]:
    """The causes that were measured at one stage: its layers, its overhead, the messages it waited for.

    Messages that share a line with others are left out: their times hold the others', which the simulator
    adds by itself.
    """
    replica, count = replicas[stage], play.microbatches
    out = _device_causes(play, replica, stage)
    before = play.boundaries[stage - 1] if stage else None
    after = play.boundaries[stage] if stage + 1 < len(play.stages) else None
    took_s, expected_s = replica.input_message_s, replica.predicted.input_message_s or 0.0
    if before is not None and not before.forward.shared and took_s is not None:
        changed = replace(before, forward=_with_total(before.forward, took_s))
        out.append(_message_cause(replicas, stage - 1, stage, expected_s, took_s, count, changed))
    took_s, expected_s = replica.gradient_message_s, replica.predicted.gradient_message_s or 0.0
    if after is not None and not after.backward.shared and took_s is not None:
        changed = replace(after, backward=_with_total(after.backward, took_s))
        out.append(_message_cause(replicas, stage + 1, stage, expected_s, took_s, count, changed))
    return out


def _device_causes(play: SimulationInput, replica: ReplicaMeasurement, stage: int) -> list[_Cause]:
    """The layers' times with the overhead as planned, and the overhead with the layers as planned."""
    forward_s, backward_s, optimizer_s = replica.forward_s, replica.backward_s, replica.optimizer_s
    planned, layers, count = play.stages[stage], play.layer_times(stage), play.microbatches
    more = (
        forward_s / count - layers.forward_s,
        backward_s / count - layers.backward_s,
        optimizer_s - layers.optimizer_s,
    )
    scale = backward_s / (count * layers.backward_s) if layers.backward_s > 0 else 1.0
    real = StageTimes(
        planned.forward_s + more[0], planned.backward_s + more[1], optimizer_s, planned.weight_s * scale
    )
    layers_s = forward_s + backward_s + optimizer_s
    expected_s = count * (layers.forward_s + layers.backward_s) + layers.optimizer_s
    size_s = count * (abs(more[0]) + abs(more[1])) + abs(more[2])
    overhead_s, planned_s = max(0.0, replica.compute_s - layers_s), 2 * count * play.stage_overhead_s(stage)
    each_s = (overhead_s - planned_s) / (2 * count)  # spread evenly: it is not known where it was spent
    other = replace(planned, forward_s=planned.forward_s + each_s, backward_s=planned.backward_s + each_s)
    change_s, device = abs(overhead_s - planned_s), replica.device
    return [
        _Cause("compute", device, None, expected_s, layers_s, size_s, {stage: real}, {}),
        _Cause("overhead", device, None, planned_s, overhead_s, change_s, {stage: other}, {}),
    ]


def _message_cause(
    replicas: Sequence[ReplicaMeasurement],
    source: int,
    target: int,
    expected_s: float,
    took_s: float,
    count: int,
    changed: BoundaryTimes,
) -> _Cause:
    size_s = count * abs(took_s - expected_s)
    names = replicas[source].device, replicas[target].device
    return _Cause("message", *names, expected_s, took_s, size_s, {}, {min(source, target): changed})


def _with_total(planned: MessageTimes, took_s: float) -> MessageTimes:
    """The planned message scaled to a total of ``took_s``; one that was free takes it all on its link."""
    total_s = max([planned.link_s, *(seconds for _, seconds in planned.shared)]) + planned.latency_s
    if total_s <= 0:
        return MessageTimes(link_s=took_s)
    scale = took_s / total_s
    shared = tuple((name, seconds * scale) for name, seconds in planned.shared)
    return MessageTimes(planned.link_s * scale, planned.latency_s * scale, shared)


def _with(play: SimulationInput, causes: Sequence[_Cause]) -> SimulationInput:
    """The plan with these parts as measured. Changes to one stage or boundary add up."""
    stages, boundaries = list(play.stages), list(play.boundaries)
    for cause in causes:
        for at, real in cause.stages.items():
            planned, now = play.stages[at], stages[at]
            stages[at] = StageTimes(
                max(0.0, now.forward_s + real.forward_s - planned.forward_s),
                max(0.0, now.backward_s + real.backward_s - planned.backward_s),
                max(0.0, now.optimizer_s + real.optimizer_s - planned.optimizer_s),
                max(0.0, now.weight_s + real.weight_s - planned.weight_s),
            )
        for at, changed in cause.boundaries.items():
            boundary = play.boundaries[at]
            if changed.forward is not boundary.forward:
                boundaries[at] = replace(boundaries[at], forward=changed.forward)
            if changed.backward is not boundary.backward:
                boundaries[at] = replace(boundaries[at], backward=changed.backward)
    return replace(play, stages=tuple(stages), boundaries=tuple(boundaries))


DEVIATION_COLUMNS = (
    "rank", "device", "forward", "backward", "optimizer", "overhead", "message in", "message back", "waits",
)  # fmt: skip
"""Headings of ``deviation_rows``."""


def deviation_rows(done: Measurement) -> list[tuple[str, ...]]:
    """A row a stage: what was measured, and how many times the predicted that is.

    ``overhead``: computing that is not the layers'. ``waits``: for the network and for other stages.
    """
    return [
        (
            str(rank),
            r.device,
            _against(r.forward_s, r.predicted.forward_s),
            _against(r.backward_s, r.predicted.backward_s),
            _against(r.optimizer_s, r.predicted.optimizer_s),
            _against(_overhead_s(r), _overhead_s(r.predicted)),
            _against(r.input_message_s, r.predicted.input_message_s),
            _against(r.gradient_message_s, r.predicted.gradient_message_s),
            _against(r.transfer_s + r.idle_s, r.predicted.idle_s),
        )
        for rank, r in enumerate(done.replicas)
    ]


def describe_deviation(done: Measurement) -> list[str]:
    """Which of the differences explain the step, a sentence each; none where there is nothing to say."""
    if not done.differences:
        return []
    *causes, together = done.differences
    planned_s, measured_s = together.predicted_s, together.measured_s
    by_device = {replica.device: replica for replica in done.replicas}
    sentences = []
    for cause in causes:
        change = cause.step_s / planned_s - 1 if planned_s else 0.0
        if abs(change) >= LEAST_REPORTED_SHARE:
            step = f"with that alone a step takes {format_seconds(cause.step_s)} ({format_percent(change)})"
            sentences.append(f"{_describe_cause(cause, by_device)}: {step}")
    rest_s = measured_s - together.step_s
    whole = f"with all parts as measured a step takes {format_seconds(together.step_s)}"
    if abs(rest_s) < LEAST_REPORTED_SHARE * measured_s:
        return [*sentences, f"{whole}, and {format_seconds(measured_s)} was measured"] if sentences else []
    rest = f"{format_seconds(abs(rest_s))} ({format_percent(abs(rest_s) / measured_s, sign=False)})"
    rest += f" {'more' if rest_s > 0 else 'less'} than the parts explain"
    return [*sentences, f"{whole}; {format_seconds(measured_s)} was measured, {rest}"]


def _describe_cause(cause: Difference, by_device: dict[str, ReplicaMeasurement]) -> str:
    measured, predicted = format_seconds(cause.measured_s), format_seconds(cause.predicted_s)
    if cause.cause == "message":
        return f"a message {cause.device} → {cause.target} takes {measured}, predicted {predicted}"
    if cause.cause == "overhead":
        planned = f", predicted {predicted}" if cause.predicted_s > 0 else ""
        return f"{cause.device} has {measured} of overhead a step{planned}"
    replica = by_device[str(cause.device)]
    pairs = (
        ("forward", replica.forward_s, replica.predicted.forward_s),
        ("backward", replica.backward_s, replica.predicted.backward_s),
        ("optimizer", replica.optimizer_s, replica.predicted.optimizer_s),
    )
    parts = [
        f"{name} {_ratio(took, planned) or UNKNOWN}" for name, took, planned in pairs if took and planned
    ]
    ratio = _ratio(cause.measured_s, cause.predicted_s) or UNKNOWN
    return f"{cause.device} computes {ratio} as long as predicted ({', '.join(parts)})"


def _overhead_s(times: ReplicaMeasurement | ReplicaPredicted) -> float:
    """The part of a step's computing that is not the layers'; 0 where it is no more than rounding."""
    overhead_s = times.compute_s - (times.forward_s + times.backward_s + times.optimizer_s)
    return overhead_s if overhead_s > ROUNDING * times.compute_s else 0.0


def _ratio(measured_s: float | None, planned_s: float | None) -> str | None:
    if measured_s is None or planned_s is None or planned_s <= LEAST_RATIO_S:
        return None
    return format_ratio(measured_s / planned_s)


def _against(measured_s: float | None, planned_s: float | None) -> str:
    """``0.62 s 1.08×``; the ratio only where something was predicted."""
    if measured_s is None:
        return UNKNOWN
    ratio = _ratio(measured_s, planned_s)
    return f"{format_seconds(measured_s)} {ratio}" if ratio else format_seconds(measured_s)
