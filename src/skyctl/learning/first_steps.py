"""A run's first steps beside what its plan predicts, and which part of a step makes the difference. Pure.

Parts overlap: a stage that waits anyway hides how slow it is, and of equal devices the slowest counts. So the
plan is played with one part as measured, and with all but that one: a part's difference is the mean of what
it changes in the two. The gradients' sum, and what none of that explains, are differences by themselves.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Literal, NamedTuple

from skyctl.compare.deviation import MAX_CAUSES
from skyctl.compare.number_format import format_estimate, format_seconds
from skyctl.learning.observations import message_times
from skyctl.planner.drawn_steps import TimeFactors, drawn_ratios
from skyctl.records.measurement import Measurement, ReplicaMeasurement, ReplicaPredicted
from skyctl.records.plan import Plan
from skyctl.records.problem import Device, Link
from skyctl.records.run_state import DeviatingPart, FirstSteps

PartKey = tuple[Literal["computing", "link"], str, "str | None"]


class _Part(NamedTuple):
    """Something that the plan can be played with as it was measured.

    ``factor``: its seconds as measured ÷ as predicted, of a message without its latency. ``size_s``: at most
    about so much of a step.
    """

    seen_s: float
    predicted_s: float
    factor: float
    size_s: float


def compare_first_steps(plan: Plan, done: Measurement) -> FirstSteps | None:
    """The first steps of a plan's run beside its interval; None where it has none.

    Args:
        done: of these steps, the first, a warm-up, among them; its layers' times hold no sums.
    """
    interval = plan.predicted.interval
    if interval is None:
        return None
    measured_s = done.iteration_s.median
    return FirstSteps(
        steps=max(1, len(done.steps) - 1),
        measured_s=measured_s,
        predicted_s=plan.predicted.iteration_s,
        interval=interval,
        part=None if interval.holds(measured_s) else find_deviating_part(plan, done),
    )


def find_deviating_part(plan: Plan, done: Measurement) -> DeviatingPart:
    """The part that changes a step the most in the direction in which it deviates from the prediction.

    Of devices and links the ``MAX_CAUSES`` that differ the most are tried.
    """
    parts = dict(_measured_parts(plan, done))
    tried = sorted(parts, key=lambda key: -parts[key].size_s)[:MAX_CAUSES]
    step_s = plan.predicted.iteration_s
    alone, together, without = _played_steps(plan, parts, tried)
    differences = {
        _record(key, parts[key]): (alone_s - step_s + together - without_s) / 2
        for key, alone_s, without_s in zip(tried, alone, without, strict=True)
    }
    deviation_s = done.iteration_s.median - step_s
    rest_s = deviation_s - (together - step_s)
    if done.sync_s is not None:
        predicted_s = plan.predicted.sync_s
        differences[DeviatingPart(kind="sum", seen_s=done.sync_s, predicted_s=predicted_s)] = (
            done.sync_s - predicted_s
        )
        rest_s -= done.sync_s - predicted_s
    differences[_waiting(plan, done)] = rest_s
    return max(differences, key=lambda part: differences[part] * (1.0 if deviation_s > 0 else -1.0))


def _record(key: PartKey, part: _Part) -> DeviatingPart:
    kind, device, target = key
    return DeviatingPart(
        kind=kind, device=device, target=target, seen_s=part.seen_s, predicted_s=part.predicted_s
    )


def _measured_parts(plan: Plan, done: Measurement) -> Iterator[tuple[PartKey, _Part]]:
    """The parts of devices and links, as they were measured."""
    for replica in done.replicas:
        took_s, planned_s = _layers_s(replica), _layers_s(replica.predicted)
        if planned_s > 0 and took_s > 0:
            part = _Part(took_s, planned_s, took_s / planned_s, abs(took_s - planned_s))
            yield ("computing", replica.device, None), part
    for link, size, took_s in message_times(plan, done):
        bytes_s = size / link.bandwidth_bytes_per_s
        if bytes_s > 0:
            planned_s = link.latency_s + bytes_s
            factor = max(0.0, took_s - link.latency_s) / bytes_s
            most_s = plan.problem.microbatches * abs(took_s - planned_s)
            yield ("link", link.source, link.target), _Part(took_s, planned_s, factor, most_s)


def _played_steps(
    plan: Plan, parts: Mapping[PartKey, _Part], tried: Sequence[PartKey]
) -> tuple[list[float], float, list[float]]:
    """Seconds of a step with each tried part alone as measured, with all parts, and with all but each."""
    count = len(tried)
    even = (1.0,) * (2 * count + 1)

    def of(key: PartKey) -> Sequence[float]:
        if key not in parts:
            return even
        alone = [key == tried_key for tried_key in tried]
        measured = (*alone, True, *(not is_alone for is_alone in alone))
        return [parts[key].factor if is_measured else 1.0 for is_measured in measured]

    def of_device(device: Device) -> Sequence[float]:
        return of(("computing", device.id, None))

    def of_link(link: Link | None) -> Sequence[float]:
        return even if link is None else of(("link", link.source, link.target))

    step_s = plan.predicted.iteration_s
    ratios = drawn_ratios(plan, TimeFactors(of_device, lambda _device: even, of_link), len(even))
    steps = [step_s * ratio for ratio in ratios]
    return steps[:count], steps[count], steps[count + 1 :]


def _waiting(plan: Plan, done: Measurement) -> DeviatingPart:
    """The time of a step beside the layers of the device that computes the longest, and beside the sum."""
    busiest = max(done.replicas, key=_layers_s)
    summed_s, planned_sum_s = (0.0, 0.0) if done.sync_s is None else (done.sync_s, plan.predicted.sync_s)
    return DeviatingPart(
        kind="waiting",
        device=busiest.device,
        seen_s=max(0.0, done.iteration_s.median - _layers_s(busiest) - summed_s),
        predicted_s=max(0.0, plan.predicted.iteration_s - _layers_s(busiest.predicted) - planned_sum_s),
    )


def _layers_s(times: ReplicaMeasurement | ReplicaPredicted) -> float:
    return times.forward_s + times.backward_s + times.optimizer_s


def first_steps_text(first_steps: FirstSteps, part: DeviatingPart) -> str:
    """First steps that are not as predicted, and the part that most makes them so, in a line."""
    seen, predicted = format_seconds(part.seen_s), format_seconds(part.predicted_s)
    words = {
        "computing": f"computing on {part.device} takes {seen} a step",
        "link": f"a message {part.device} → {part.target} takes {seen}",
        "sum": f"the gradients' sum takes {seen}",
        "waiting": f"beside its layers {part.device} spends {seen} a step, waiting for the most part",
    }[part.kind]
    estimate = format_estimate(first_steps.predicted_s, first_steps.interval)
    whole = f"steps take {format_seconds(first_steps.measured_s)}, predicted {estimate}"
    return f"{whole}: {words}, predicted {predicted}"
