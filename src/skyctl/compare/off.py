"""What was not as predicted, and which of it explains the step: the plan played again with measured times.

One cause at a time: with one device's layers, its time beside them, or one link as measured and all else as
predicted, the simulator says how long a step would take; then with all of them together. What remains to the
measured step the model of time does not know.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from skyctl.compare.words import UNKNOWN, percent, seconds, times
from skyctl.records.measurement import Difference, Measurement, ReplicaMeasurement, ReplicaPredicted
from skyctl.schedule.playing import Play
from skyctl.schedule.simulate import Boundary, Hop, StageTimes

MOST = 12
"""So many causes are played, the largest first."""
LEAST = 0.003
"""Of a step: what can change it by less is left out."""
SAID = 0.01
"""Of a step: what changes it by less gets no sentence."""
NOTHING_S = 1e-6
"""Of what was predicted to take less no ratio says anything."""
ROUNDING = 1e-9
"""Of a stage's computing: what sums may be off by."""


@dataclass(frozen=True)
class _Cause:
    """``size_s``: about so much of a step at most; ``stages``, ``boundaries``: what is not as planned."""

    kind: str
    device: str
    target: str | None
    predicted_s: float
    measured_s: float
    size_s: float
    stages: dict[int, StageTimes]
    boundaries: dict[int, Boundary]


def differences(play: Play, done: Measurement) -> tuple[Difference, ...]:
    """Causes by how much they change the step, the largest first; ``all`` of them together comes last.

    Nothing where the ranks reported no parts, or no part is off by more than ``LEAST`` of a step.
    """
    planned_s = play.simulate().iteration_s
    causes = [cause for stage in range(len(play.stages)) for cause in _of_stage(play, done.replicas, stage)]
    causes = [cause for cause in causes if cause.size_s > LEAST * planned_s]
    causes = sorted(causes, key=lambda cause: -cause.size_s)[:MOST]
    if not causes:
        return ()
    found = [
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
    found.sort(key=lambda one: -abs(one.step_s - planned_s))
    together = Difference(
        cause="all",
        predicted_s=planned_s,
        measured_s=done.iteration_s.median,
        step_s=_as_measured(play, done).simulate().iteration_s,
    )
    return (*found, together)


def _as_measured(play: Play, done: Measurement) -> Play:
    """All parts as measured, small ones too."""
    return _with(
        play, [c for stage in range(len(play.stages)) for c in _of_stage(play, done.replicas, stage)]
    )


def _of_stage(play: Play, replicas: Sequence[ReplicaMeasurement], stage: int) -> list[_Cause]:
    """What was measured of one stage: its layers, the rest of its time, the messages it waited for.

    Not those that share a line with others: what they took has the others' time in it, which the simulator
    adds by itself.
    """
    replica, count = replicas[stage], play.microbatches
    out = _of_device(play, replica, stage)
    before = play.boundaries[stage - 1] if stage else None
    after = play.boundaries[stage] if stage + 1 < len(play.stages) else None
    took_s, expected_s = replica.input_message_s, replica.predicted.input_message_s or 0.0
    if before is not None and not before.forward.shared and took_s is not None:
        changed = replace(before, forward=_hop(before.forward, took_s))
        out.append(_message(replicas, stage - 1, stage, expected_s, took_s, count, changed))
    took_s, expected_s = replica.gradient_message_s, replica.predicted.gradient_message_s or 0.0
    if after is not None and not after.backward.shared and took_s is not None:
        changed = replace(after, backward=_hop(after.backward, took_s))
        out.append(_message(replicas, stage + 1, stage, expected_s, took_s, count, changed))
    return out


def _of_device(play: Play, replica: ReplicaMeasurement, stage: int) -> list[_Cause]:
    """Its layers with the rest as planned, and the rest with its layers as planned."""
    forward_s, backward_s, optimizer_s = replica.forward_s, replica.backward_s, replica.optimizer_s or 0.0
    if forward_s is None or backward_s is None:
        return []
    planned, layers, count = play.stages[stage], play.layers(stage), play.microbatches
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
    beside_s, planned_s = max(0.0, replica.compute_s - layers_s), 2 * count * play.beside(stage)
    each_s = (beside_s - planned_s) / (2 * count)  # spread evenly: it is not known where it was spent
    other = replace(planned, forward_s=planned.forward_s + each_s, backward_s=planned.backward_s + each_s)
    off_s, device = abs(beside_s - planned_s), replica.device
    return [
        _Cause("compute", device, None, expected_s, layers_s, size_s, {stage: real}, {}),
        _Cause("overhead", device, None, planned_s, beside_s, off_s, {stage: other}, {}),
    ]


def _message(
    replicas: Sequence[ReplicaMeasurement],
    source: int,
    target: int,
    expected_s: float,
    took_s: float,
    count: int,
    changed: Boundary,
) -> _Cause:
    size_s = count * abs(took_s - expected_s)
    names = replicas[source].device, replicas[target].device
    return _Cause("message", *names, expected_s, took_s, size_s, {}, {min(source, target): changed})


def _hop(planned: Hop, took_s: float) -> Hop:
    """The same way with another total, its parts in proportion; a way that was free becomes a link."""
    total_s = max([planned.link_s, *(seconds for _, seconds in planned.shared)]) + planned.latency_s
    if total_s <= 0:
        return Hop(link_s=took_s)
    scale = took_s / total_s
    shared = tuple((name, seconds * scale) for name, seconds in planned.shared)
    return Hop(planned.link_s * scale, planned.latency_s * scale, shared)


def _with(play: Play, causes: Sequence[_Cause]) -> Play:
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


COLUMNS = (
    "rank", "device", "forward", "backward", "optimizer", "beside", "message in", "message back", "waits",
)  # fmt: skip
"""Headings of ``rows``."""


def rows(done: Measurement) -> list[tuple[str, ...]]:
    """A row a stage: measured, and how many times the predicted that is.

    ``beside``: what it does a step beside its layers. ``waits``: for the network and for other stages.
    """
    return [
        (
            str(rank),
            r.device,
            _against(r.forward_s, r.predicted.forward_s),
            _against(r.backward_s, r.predicted.backward_s),
            _against(r.optimizer_s, r.predicted.optimizer_s),
            UNKNOWN if r.forward_s is None else _against(_beside_s(r), _beside_s(r.predicted)),
            _against(r.input_message_s, r.predicted.input_message_s),
            _against(r.gradient_message_s, r.predicted.gradient_message_s),
            _against(r.transfer_s + r.idle_s, r.predicted.idle_s),
        )
        for rank, r in enumerate(done.replicas)
    ]


def sentences(done: Measurement) -> list[str]:
    """Which of the differences explain the step, in words; empty where there is nothing to say."""
    if not done.differences:
        return []
    *causes, together = done.differences
    planned_s, measured_s = together.predicted_s, together.measured_s
    by_device = {replica.device: replica for replica in done.replicas}
    said = []
    for cause in causes:
        change = cause.step_s / planned_s - 1 if planned_s else 0.0
        if abs(change) >= SAID:
            effect = f"with that alone a step takes {seconds(cause.step_s)} ({percent(change)})"
            said.append(f"{_what(cause, by_device)}: {effect}")
    rest_s = measured_s - together.step_s
    whole = f"with all parts as measured a step takes {seconds(together.step_s)}"
    if abs(rest_s) < SAID * measured_s:
        whole += f", and {seconds(measured_s)} was measured"
        return [*said, whole] if said else []
    share = percent(abs(rest_s) / measured_s, sign=False)
    side = "more than" if rest_s > 0 else "less than"
    whole += (
        f"; {seconds(measured_s)} was measured, {seconds(abs(rest_s))} ({share}) {side} the parts explain"
    )
    return [*said, whole]


def _what(cause: Difference, by_device: dict[str, ReplicaMeasurement]) -> str:
    if cause.cause == "message":
        return (
            f"a message {cause.device} → {cause.target} takes {seconds(cause.measured_s)}, predicted "
            f"{seconds(cause.predicted_s)}"
        )
    if cause.cause == "overhead":
        planned = f", predicted {seconds(cause.predicted_s)}" if cause.predicted_s > 0 else ""
        return f"{cause.device} takes {seconds(cause.measured_s)} a step beside its layers{planned}"
    replica = by_device[str(cause.device)]
    parts = [
        f"{name} {_ratio(measured, planned)}"
        for name, measured, planned in (
            ("forward", replica.forward_s, replica.predicted.forward_s),
            ("backward", replica.backward_s, replica.predicted.backward_s),
            ("optimizer", replica.optimizer_s, replica.predicted.optimizer_s),
        )
        if measured and planned
    ]
    ratio = _ratio(cause.measured_s, cause.predicted_s)
    return f"{cause.device} computes {ratio} as long as predicted ({', '.join(parts)})"


def _beside_s(figures: ReplicaMeasurement | ReplicaPredicted) -> float:
    """Of a step's computing what is not the layers'; not what rounding leaves."""
    layers_s = (figures.forward_s or 0.0) + (figures.backward_s or 0.0) + (figures.optimizer_s or 0.0)
    beside_s = figures.compute_s - layers_s
    return beside_s if beside_s > ROUNDING * figures.compute_s else 0.0


def _ratio(measured_s: float | None, planned_s: float | None) -> str:
    if measured_s is None or planned_s is None or planned_s <= NOTHING_S:
        return UNKNOWN
    return times(measured_s / planned_s)


def _against(measured_s: float | None, planned_s: float | None) -> str:
    """``0.62 s 1.08×``; the ratio only where something was predicted."""
    if measured_s is None:
        return UNKNOWN
    ratio = _ratio(measured_s, planned_s)
    return seconds(measured_s) if ratio == UNKNOWN else f"{seconds(measured_s)} {ratio}"
