"""What every stage does when, on one clock: as measured by the ranks, or as simulated for a plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from skyctl.compare.aligning import align
from skyctl.compare.stats import median
from skyctl.schedule.playing import Play, waits

IDLE = "idle"
TRANSFER = "transfer"
WORDS = {
    "F": "forward",
    "B": "backward",
    "W": "weight gradients",
    "O": "optimizer",
    "C": "clipping",
    "S": "send",
    IDLE: "waits for another stage",
    TRANSFER: "waits for the network",
}
"""The kinds of bars there are, as people read them."""


class Bar(NamedTuple):
    """``row``: the stage. Seconds from the timeline's zero."""

    row: int
    kind: str
    microbatch: int
    start_s: float
    end_s: float

    @property
    def seconds(self) -> float:
        """How long."""
        return self.end_s - self.start_s


@dataclass(frozen=True)
class Step:
    """One training step, from the first stage's start of it to its start of the next.

    Later stages are done with it earlier, and wait for the next one already then.
    """

    number: int
    start_s: float
    end_s: float
    bars: tuple[Bar, ...]

    @property
    def seconds(self) -> float:
        """How long."""
        return self.end_s - self.start_s


@dataclass(frozen=True)
class Timeline:
    """``errors_s``: by row, how far its clock may be off from the first one's."""

    devices: tuple[str, ...]
    steps: tuple[Step, ...]
    errors_s: tuple[float, ...]

    def typical(self) -> Step:
        """The step that took the median time, or next to it; the run's first one, warm-up, only if alone."""
        settled = [step for step in self.steps if step.number] or list(self.steps)
        middle_s = median(step.seconds for step in settled)
        return min(settled, key=lambda step: abs(step.seconds - middle_s))

    def within(self, step: Step) -> list[Bar]:
        """All bars that show while that step runs, cut off at its ends, counted from its start."""
        out = []
        for bar in (bar for each in self.steps for bar in each.bars):
            start_s, end_s = max(bar.start_s, step.start_s), min(bar.end_s, step.end_s)
            if end_s > start_s:
                out.append(bar._replace(start_s=start_s - step.start_s, end_s=end_s - step.start_s))
        return out


def measured(documents: Sequence[Mapping[str, Any]], devices: Sequence[str]) -> Timeline:
    """From what the ranks recorded (``worker.recorder``), in order; zero is the first kept step's start.

    Steps that not every rank has kept are left out.
    """
    clocks = align([document["clocks"] for document in documents])
    kept = [{int(step["step"]): step for step in document["steps"]} for document in documents]
    numbers = sorted(set.intersection(*(set(steps) for steps in kept)))
    zero_s = float(kept[0][numbers[0]]["start_s"]) if numbers else 0.0
    steps = []
    for number in numbers:
        bars = [
            Bar(
                row,
                kind,
                int(microbatch),
                clocks[row].to_first(start_s) - zero_s,
                clocks[row].to_first(end_s) - zero_s,
            )
            for row, by_number in enumerate(kept)
            for kind, microbatch, start_s, end_s in by_number[number]["spans"]
        ]
        own = kept[0][number]
        steps.append(Step(number, own["start_s"] - zero_s, own["end_s"] - zero_s, tuple(bars)))
    return Timeline(tuple(devices), tuple(steps), tuple(clock.error_s for clock in clocks))


def simulated(play: Play, devices: Sequence[str]) -> Timeline:
    """One step by the model of time, with what it waits for."""
    done = play.simulate(trace=True)
    bars = [Bar(*span) for span in done.trace]
    for wait in waits(done):
        bars.append(Bar(wait.stage, IDLE, wait.microbatch, wait.start_s, wait.sent_s))
        bars.append(Bar(wait.stage, TRANSFER, wait.microbatch, wait.sent_s, wait.end_s))
    for row in range(len(devices)):
        end_s = max((bar.end_s for bar in bars if bar.row == row), default=0.0)
        bars.append(Bar(row, IDLE, 0, end_s, done.iteration_s))
    step = Step(0, 0.0, done.iteration_s, tuple(bar for bar in bars if bar.end_s > bar.start_s))
    return Timeline(tuple(devices), (step,), (0.0,) * len(devices))
