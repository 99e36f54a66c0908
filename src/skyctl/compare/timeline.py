"""The timeline of every stage, on one clock: as measured by the ranks, or as simulated for a plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from skyctl.records.measurement import median
from skyctl.records.plan import Plan
from skyctl.schedule.simulation_input import SimulationInput, find_waits


@dataclass(frozen=True)
class RankClock:
    """A rank's clock, against the first rank's. ``error_s``: how far a converted time may be off.

    ``points``: for each rank on the way to the first, (own time, how far that rank's clock is ahead) at the
    start and at the end of the run.
    """

    points: tuple[tuple[tuple[float, float], ...], ...] = ()
    error_s: float = 0.0

    def to_first(self, at_s: float) -> float:
        """A moment on this clock as one on the first rank's. Clocks are taken to drift apart steadily."""
        for point in self.points:
            at_s += _between(point, at_s)
        return at_s


def align_clocks(
    readings: Sequence[Mapping[str, Mapping[str, Any]]], references: Sequence[int | None] | None = None
) -> list[RankClock]:
    """A clock for each rank: what ranks found out about each other, chained.

    Args:
        readings: by rank, what ``measure_clock_offset`` gave for its reference: ``start`` and ``end``,
            each with ``at_s``, ``offset_s`` and ``error_s``; empty on the first rank.
        references: by rank, the one whose clock it was compared with, all chains ending at the first, which
            has None; left out: the rank before it.
    """
    reference_of = [rank - 1 if rank else None for rank in range(len(readings))]
    reference_of = reference_of if references is None else list(references)
    clocks: dict[int, RankClock] = {}

    def clock(rank: int) -> RankClock:
        reference = reference_of[rank]
        if rank not in clocks:
            clocks[rank] = RankClock() if reference is None else _chained(readings[rank], clock(reference))
        return clocks[rank]

    return [clock(rank) for rank in range(len(readings))]


def _chained(comparisons: Mapping[str, Mapping[str, Any]], before: RankClock) -> RankClock:
    """The clock of a rank that was compared with one whose clock is known."""
    points = tuple(sorted((float(r["at_s"]), float(r["offset_s"])) for r in comparisons.values()))
    error_s = max((float(r["error_s"]) for r in comparisons.values()), default=0.0)
    return RankClock((points, *before.points), before.error_s + error_s)


def _between(points: tuple[tuple[float, float], ...], at_s: float) -> float:
    """The offset at a time, on the line through the first and the last point."""
    if not points:
        return 0.0
    (first_s, first), (last_s, last) = points[0], points[-1]
    if last_s <= first_s:
        return first
    return first + (last - first) * (at_s - first_s) / (last_s - first_s)


IDLE = "idle"
TRANSFER = "transfer"
KIND_LABELS = {
    "F": "forward",
    "B": "backward",
    "W": "weight gradients",
    "O": "optimizer",
    "C": "clipping",
    "R": "summing gradients",
    "S": "send",
    IDLE: "waits for another device",
    TRANSFER: "waits for the network",
}
"""The kinds of spans there are, as people read them."""


class TimelineSpan(NamedTuple):
    """One action or wait of a ``stage``, of a kind of ``KIND_LABELS``. Seconds from the timeline's zero."""

    stage: int
    kind: str
    microbatch: int
    start_s: float
    end_s: float

    @property
    def seconds(self) -> float:
        """How long the action or wait takes."""
        return self.end_s - self.start_s


@dataclass(frozen=True)
class TimelineStep:
    """A training step, from the moment the first stage starts it to the moment it starts the next one.

    Later stages end it earlier, and already wait for the next one then.
    """

    number: int
    start_s: float
    end_s: float
    spans: tuple[TimelineSpan, ...]

    @property
    def seconds(self) -> float:
        """How long the step takes on the first stage."""
        return self.end_s - self.start_s


@dataclass(frozen=True)
class Timeline:
    """The spans of every stage, over some steps. ``errors_s``: by stage, how far its clock may be off."""

    devices: tuple[str, ...]
    steps: tuple[TimelineStep, ...]
    errors_s: tuple[float, ...]

    def typical(self) -> TimelineStep:
        """The step nearest to the median time; the run's first one, warm-up, only if there is no other."""
        settled = [step for step in self.steps if step.number] or list(self.steps)
        middle_s = median(step.seconds for step in settled)
        return min(settled, key=lambda step: abs(step.seconds - middle_s))

    def within(self, step: TimelineStep) -> list[TimelineSpan]:
        """All spans that overlap with a step, cut off at its ends, counted from its start."""
        out = []
        for span in (span for each in self.steps for span in each.spans):
            start_s, end_s = max(span.start_s, step.start_s), min(span.end_s, step.end_s)
            if end_s > start_s:
                out.append(span._replace(start_s=start_s - step.start_s, end_s=end_s - step.start_s))
        return out


def measured_timeline(
    documents: Sequence[Mapping[str, Any]],
    devices: Sequence[str],
    clock_references: Sequence[int | None] | None = None,
) -> Timeline:
    """From the ranks' traces (``worker.trace_recorder``), in order; zero is the first kept step's start.

    Steps that not every rank has kept are left out. ``clock_references``: as in ``align_clocks``. Documents
    beyond the ``devices`` (of ranks that only help to sum) are asked for their clocks alone.
    """
    clocks = align_clocks([document["clocks"] for document in documents], clock_references)
    kept = [{int(step["step"]): step for step in document["steps"]} for document in documents[: len(devices)]]
    numbers = sorted(set.intersection(*(set(steps) for steps in kept)))
    zero_s = float(kept[0][numbers[0]]["start_s"]) if numbers else 0.0
    steps = []
    for number in numbers:
        spans = [
            TimelineSpan(
                stage,
                kind,
                int(microbatch),
                clocks[stage].to_first(start_s) - zero_s,
                clocks[stage].to_first(end_s) - zero_s,
            )
            for stage, by_number in enumerate(kept)
            for kind, microbatch, start_s, end_s in by_number[number]["spans"]
        ]
        own = kept[0][number]
        steps.append(TimelineStep(number, own["start_s"] - zero_s, own["end_s"] - zero_s, tuple(spans)))
    errors_s = tuple(clock.error_s for clock in clocks[: len(devices)])
    return Timeline(tuple(devices), tuple(steps), errors_s)


def simulated_timeline(play: SimulationInput, devices: Sequence[str]) -> Timeline:
    """One step as the simulator plays it, with its waits."""
    done = play.simulate(trace=True)
    spans = [TimelineSpan(*span) for span in done.trace]
    for wait in find_waits(done):
        spans.append(TimelineSpan(wait.stage, IDLE, wait.microbatch, wait.start_s, wait.sent_s))
        spans.append(TimelineSpan(wait.stage, TRANSFER, wait.microbatch, wait.sent_s, wait.end_s))
    for stage in range(len(devices)):
        end_s = max((span.end_s for span in spans if span.stage == stage), default=0.0)
        spans.append(TimelineSpan(stage, IDLE, 0, end_s, done.iteration_s))
    step = TimelineStep(0, 0.0, done.iteration_s, tuple(span for span in spans if span.end_s > span.start_s))
    return Timeline(tuple(devices), (step,), (0.0,) * len(devices))


def plan_timeline(plan: Plan, plays: Sequence[SimulationInput]) -> Timeline:
    """One step of a plan; ``plays``: by pipeline, what the simulator plays."""
    if len(plan.pipelines) > 1:
        return side_by_side_timeline(plan, plays)
    return simulated_timeline(plays[0], [stage.device for stage in plan.placed_stages])


def side_by_side_timeline(plan: Plan, plays: Sequence[SimulationInput]) -> Timeline:
    """One step of several pipelines, as predicted: each plays its microbatches, then all sum.

    Of the sums only what nothing hides is drawn: from the last of all backwards to the sum; with a delay, the
    wait for the sums of the step before.
    """
    spans: list[TimelineSpan] = []
    first = 0
    ended_s: list[float] = []
    optimizers_s: list[float] = []
    for play in plays:
        before, done = len(ended_s), play.simulate(trace=True)
        played = [span for span in done.trace if span.kind != "O"]
        spans += [
            TimelineSpan(before + span.stage, span.kind, first + span.microbatch, span.start_s, span.end_s)
            for span in played
        ]
        for wait in find_waits(done):
            stage, microbatch = before + wait.stage, first + wait.microbatch
            spans.append(TimelineSpan(stage, IDLE, microbatch, wait.start_s, wait.sent_s))
            spans.append(TimelineSpan(stage, TRANSFER, microbatch, wait.sent_s, wait.end_s))
        for number, times in enumerate(play.stages):
            ended_s.append(max(span.end_s for span in played if span.stage == number))
            optimizers_s.append(times.optimizer_s)
        first += play.microbatches
    last_s, step_s = max(ended_s), plan.predicted.iteration_s
    delayed = bool(plan.problem.rhythm.delay)
    summed_s = last_s + plan.predicted.sync_s
    for stage, (end_s, optimizer_s) in enumerate(zip(ended_s, optimizers_s, strict=True)):
        if delayed:  # each by itself, so that the step ends with the optimizer
            summed_s = step_s - optimizer_s
            last_s = summed_s - plan.predicted.sync_s
        updated_s = summed_s + optimizer_s
        spans.append(TimelineSpan(stage, IDLE, 0, end_s, last_s))
        spans.append(TimelineSpan(stage, "R", 0, last_s, summed_s))
        spans.append(TimelineSpan(stage, "O", 0, summed_s, updated_s))
        spans.append(TimelineSpan(stage, IDLE, 0, updated_s, step_s))
    step = TimelineStep(0, 0.0, step_s, tuple(span for span in spans if span.end_s > span.start_s))
    devices = tuple(stage.device for stage in plan.placed_stages)
    return Timeline(devices, (step,), (0.0,) * len(devices))
