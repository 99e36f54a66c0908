"""What a run tells whoever watches it, and the figures gathered from its ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from skyctl.launch.parts import measured_parts, predicted_parts
from skyctl.launch.spec import RankSpec
from skyctl.records.measurement import (
    Measurement,
    Quantiles,
    ReplicaMeasurement,
    ReplicaPredicted,
    StepMeasurement,
    ValidationMeasurement,
)
from skyctl.records.plan import Plan
from skyctl.schedule.playing import Play


class Detached(KeyboardInterrupt):
    """Whoever watches goes away, and the run is to go on without this process."""


@dataclass(frozen=True)
class Progress:
    """One finished step, with the validation that followed it where there was one.

    ``left_s``: the steps that remain at the pace so far (None on the first). ``learning_rate``: of the first
    rank that trains anything. ``grad_norm``: over all stages, before clipping; None without clipping.
    """

    step: int
    steps: int
    loss: float
    iteration_s: float
    samples_per_s: float
    left_s: float | None
    learning_rate: float | None = None
    grad_norm: float | None = None
    validation_loss: float | None = None


@dataclass
class Watcher:
    """Callbacks of a run; each may be left as it is. They are called from the launching thread."""

    phase: Callable[[str], None] = lambda _text: None
    step: Callable[[Progress], None] = lambda _progress: None
    log: Callable[[RankSpec, str], None] = lambda _rank, _text: None
    note: Callable[[str], None] = lambda _text: None
    warn: Callable[[str], None] = lambda _text: None
    interrupted: Callable[[], str] = lambda: "stop"


@dataclass
class Collected:
    """Step events by rank, in the order they came; ``validation``: the losses, by the step before.

    ``first``: the step that this attempt begins with. ``reported``: steps that are done, those before it
    included.
    """

    ranks: int
    steps: int
    by_rank: dict[int, dict[int, dict[str, Any]]] = field(default_factory=dict)
    validation: dict[int, float] = field(default_factory=dict)
    reported: int = 0
    first: int = 0
    _kept: dict[int, dict[int, dict[str, Any]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.reported = max(self.reported, self.first)

    def kept(self, rank: int, event: dict[str, Any]) -> dict[int, dict[str, Any]] | None:
        """A rank has written its layers; what all have written, by layer, once every rank has."""
        step = int(event["step"])
        self._kept.setdefault(step, {})[rank] = event
        events = self._kept[step]
        if len(events) < self.ranks or any(one.get("error") for one in events.values()):
            return None
        return {int(i): known for one in events.values() for i, known in one["layers"].items()}

    def add(self, rank: int, event: dict[str, Any]) -> None:
        """Keeps one rank's figures of one step."""
        self.by_rank.setdefault(rank, {})[int(event["step"])] = event

    def complete(self) -> list[Progress]:
        """The steps that every rank has finished and that were not handed out yet, in order.

        A step that is validated has ended when the validation has.
        """
        out = []
        while self.reported < self.steps and self._ended(self.reported):
            out.append(self._progress(self.reported))
            self.reported += 1
        return out

    def heard(self, until: int) -> list[Progress]:
        """What is known of steps before ``until`` that were not handed out: not every rank has told of them.

        As far as the first has, and the last, which knows the loss.
        """
        out = []
        for step in range(self.reported, until):
            if any(step not in self.by_rank.get(rank, {}) for rank in (0, self.ranks - 1)):
                break
            out.append(self._progress(step))
        return out

    def _ended(self, step: int) -> bool:
        events = [self.by_rank.get(rank, {}).get(step) for rank in range(self.ranks)]
        if None in events:
            return False
        last = events[-1] or {}
        return not last.get("validates") or step in self.validation

    def _progress(self, step: int) -> Progress:
        first = self.by_rank[0][step]
        last = self.by_rank[self.ranks - 1][step]
        times = [self.by_rank[0][i]["iteration_s"] for i in range(self.first + 1, step + 1)]
        pace = median(times) if times else None
        iteration_s = float(first["iteration_s"])
        known = (self.by_rank.get(rank, {}).get(step, {}) for rank in range(self.ranks))
        rates = (event.get("learning_rate") for event in known)
        return Progress(
            step=step,
            steps=self.steps,
            loss=float(last["loss"]),
            iteration_s=iteration_s,
            samples_per_s=float(first["samples"]) / iteration_s if iteration_s else 0.0,
            left_s=pace * (self.steps - step - 1) if pace is not None else None,
            learning_rate=next((rate for rate in rates if rate is not None), None),
            grad_norm=first.get("grad_norm"),
            validation_loss=self.validation.get(step),
        )


def measurement(
    run_id: str,
    plan: Plan,
    ranks: list[RankSpec],
    collected: Collected,
    quantiles: Callable[[list[float]], Quantiles],
    weights: str | None,
    play: Play | None = None,
) -> Measurement:
    """The record of one attempt. Its first step is warm-up and is left out of the medians where it can be.

    ``play``: what the plan's prediction comes from, for the predicted parts of a stage's time.
    """
    first, done = collected.first, collected.reported
    steps = tuple(
        StepMeasurement(
            step=i,
            loss=float(collected.by_rank[collected.ranks - 1][i]["loss"]),
            iteration_s=float(collected.by_rank[0][i]["iteration_s"]),
        )
        for i in range(first, done)
    )
    settled = list(range(first + 1, done)) or list(range(first, done))
    predicted = {replica.device: replica for replica in plan.predicted.replicas}
    replicas = []
    for rank in ranks:
        events = [collected.by_rank[rank.rank][i] for i in settled]
        peak = max((e["peak_memory_bytes"] or 0.0) for e in events)
        said = predicted[rank.device]
        replicas.append(
            ReplicaMeasurement(
                device=rank.device,
                compute_s=median(float(e["compute_s"]) for e in events),
                transfer_s=median(float(e["transfer_s"]) for e in events),
                idle_s=median(float(e["idle_s"]) for e in events),
                peak_memory_bytes=float(peak) or None,
                predicted=ReplicaPredicted(
                    compute_s=said.compute_s,
                    idle_s=said.idle_s,
                    memory_bytes=said.memory_bytes,
                    **predicted_parts(play, rank.rank),
                ),
                **measured_parts(events),
            )
        )
    return Measurement(
        run_id=run_id,
        strategy=plan.strategy,
        steps=steps,
        iteration_s=quantiles([steps[i - first].iteration_s for i in settled]),
        predicted_iteration_s=plan.predicted.iteration_s,
        replicas=tuple(replicas),
        final_loss=steps[-1].loss,
        attempts=1,
        weights=weights,
        validation=tuple(
            ValidationMeasurement(step=step, loss=loss)
            for step, loss in sorted(collected.validation.items())
            if step < done
        ),
    )
