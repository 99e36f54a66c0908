"""The figures of an attempt's steps, as its ranks report them one by one."""

from __future__ import annotations

import math
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median

from skyctl.checkpoint.node.replicator_events import ShardDigest
from skyctl.records.measurement import ValidationMeasurement
from skyctl.run.callbacks import StepProgress
from skyctl.run.owner_figures import OwnerFigures, joined_validation, owner_figures
from skyctl.worker.rank_events import CheckpointEvent, StepEvent, ValidationEvent

KEPT_STEPS = 5_000
"""Of so many steps that have ended each rank's figures are kept; of those before, loss and time alone. So the
memory and time that a launcher needs for a step do not grow with their number."""
PACE_STEPS = 1_000
"""The pace is that of so many last steps."""


@dataclass
class StepCollector:
    """Step events of one attempt, by rank and step: of those that have ended the last ``KEPT_STEPS``.

    Attributes:
        last_ranks: of each pipeline, the rank of its last stage, in the pipelines' order; the first one
            validates. Empty: there is one pipeline.
        owners: what the pipelines' owners are called, in the same order; each of them validates. Empty:
            data is nobody's alone.
        unit: what people call a step (``Rhythm.unit``).
        is_elastic: ranks may leave, and the others go on; others may come.
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
    is_elastic: bool = False
    _changes: list[tuple[int, tuple[int, ...]]] = field(default_factory=list)
    _planned: int = 0
    _entered: dict[int, int] = field(default_factory=dict)
    _validations: dict[int, dict[int, ValidationEvent]] = field(default_factory=dict)
    _checkpoints: dict[int, dict[int, CheckpointEvent]] = field(default_factory=dict)
    _compared: int = 0
    _old_losses: array[float] = field(default_factory=lambda: array("d"))
    _old_seconds: array[float] = field(default_factory=lambda: array("d"))

    def __post_init__(self) -> None:
        self.reported = max(self.reported, self.first)
        self.oldest = self.first
        self.last_ranks = self.last_ranks or (self.ranks - 1,)
        self._planned = self.ranks
        self._changes.append((self.first, tuple(range(self.ranks))))

    def admit(self, rank: int) -> None:
        """A rank of the next number may come to make steps; it holds all layers."""
        self.ranks, self.last_ranks = rank + 1, (*self.last_ranks, rank)

    def change_members(self, members: Sequence[int], step: int) -> None:
        """From now on only these ranks make steps: the others are lost, and nothing is waited for of them.

        Of steps that have not ended yet they may have told or not.

        Args:
            step: the first that ranks make which were none of them before.
        """
        for rank in members:
            if rank >= self._planned:
                self._entered.setdefault(rank, step)
        self._changes.append((self.reported, tuple(members)))

    @property
    def members_since(self) -> int:
        """The step with which those began that make steps now."""
        return max(self._changes[-1][0], *self._entered.values(), self.first)

    def ranks_at(self, step: int) -> tuple[int, ...]:
        """The ranks that make that step, in order."""
        made = next(
            members for first, members in reversed(self._changes) if first <= step or first == self.first
        )
        return tuple(rank for rank in made if self._entered.get(rank, step) <= step)

    def add_checkpoint(self, rank: int, event: CheckpointEvent) -> dict[int, ShardDigest] | None:
        """A rank has written its layers; by layer its file, once every rank has written."""
        self._checkpoints.setdefault(event.step, {})[rank] = event
        return self._whole_checkpoint(event)

    def _whole_checkpoint(self, event: CheckpointEvent) -> dict[int, ShardDigest] | None:
        events = self._checkpoints[event.step]
        members = (rank for rank in self._changes[-1][1] if self._entered.get(rank, -1) < event.step)
        missing = set(members) - events.keys()
        if missing or any(written.error for written in events.values()):
            return None
        for step in [step for step in self._checkpoints if step < event.step]:
            del self._checkpoints[step]
        return {layer: shard for written in events.values() for layer, shard in written.layers.items()}

    def checkpoint_events(self, step: int) -> Mapping[int, CheckpointEvent]:
        """By rank, what has been told of the checkpoint after so many steps."""
        return self._checkpoints.get(step, {})

    def add(self, rank: int, event: StepEvent) -> None:
        """Keeps one rank's figures of one step."""
        self.by_rank.setdefault(rank, {})[event.step] = event

    def add_validation(self, rank: int, event: ValidationEvent) -> None:
        """Keeps what a pipeline's last rank found in a validation, whose loss is finite."""
        validations = self._validations.setdefault(event.step, {})
        validations[rank] = event
        if len(validations) == (len(self.last_ranks) if self.owners else 1):
            self.validation[event.step] = joined_validation(event.step, list(validations.values()))

    def complete(self) -> list[StepProgress]:
        """The steps that every rank has finished and that were not handed out yet, in order.

        A step that is validated has ended when the validation has.
        """
        self._forget_batches()
        out = []
        while self.reported < self.steps and self._has_ended(self.reported):
            out.append(self._progress(self.reported))
            self.reported += 1
            while self.reported - self.oldest > KEPT_STEPS + len(out):  # these are to be looked at yet
                self._drop_oldest()
        return out

    def _forget_batches(self) -> None:
        """Of steps that were handed out before: they were compared then, and are a third of what is kept."""
        for step in range(max(self._compared, self.oldest), self.reported):
            for events in self.by_rank.values():
                if step in events:
                    events[step] = replace(events[step], batch=None, validation_batch=None)
        self._compared = self.reported

    @property
    def settled_steps(self) -> range:
        """The steps that have ended and whose events are here, without the attempt's first, a warm-up.

        Nor those after a rank was lost: they are not of the plan any more.
        """
        whole = self._changes[1][0] if len(self._changes) > 1 else self.reported
        return range(max(self.first + 1, self.oldest), min(self.reported, whole))

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
        """The steps before ``until`` that were not handed out, for some ranks did not come to tell of them.

        Call it once a checkpoint of ``until`` steps was restored: that proves that every rank has finished
        them. It ends before the first step that the first rank, or one that knows the loss, has not told of;
        and before a loss that is no number, with which the next attempt ends.
        """
        out = []
        for step in range(self.reported, until):
            if any(step not in self.by_rank.get(rank, {}) for rank in self._tellers(step)):
                break
            if not math.isfinite(self.loss(step)):
                break
            out.append(self._progress(step))
        return out

    def events_of(self, step: int) -> list[StepEvent]:
        """The event of each rank that made a step that all have finished, by rank."""
        return [self.by_rank[rank][step] for rank in self.ranks_at(step)]

    def settled_events(self) -> list[list[StepEvent]]:
        """By rank of the plan, its events of ``settled_steps``."""
        return [[self.by_rank[rank][step] for step in self.settled_steps] for rank in range(self._planned)]

    def _has_ended(self, step: int) -> bool:
        members = self.ranks_at(step)
        if any(step not in self.by_rank.get(rank, {}) for rank in members):
            return False
        validating = next((rank for rank in self.last_ranks if rank in members), members[-1])
        return not self.by_rank[validating][step].validates or step in self.validation

    def _tellers(self, step: int) -> list[int]:
        """The first rank that makes a step, and those that know its loss, lost ones that have told it too."""
        members = self.ranks_at(step)
        told = [r for r in self.last_ranks if r in members or step in self.by_rank.get(r, {})]
        return [members[0], *told]

    def _progress(self, step: int) -> StepProgress:
        first_rank, *lasts = self._tellers(step)
        first = self.by_rank[first_rank][step]
        paced = range(max(self.first + 1, self.oldest, step + 1 - PACE_STEPS), step + 1)
        times = [self.iteration_s(i) for i in paced]
        pace_s = median(times) if times else None
        present = [
            self.by_rank[rank][step] for rank in range(self.ranks) if step in self.by_rank.get(rank, {})
        ]
        samples = sum(self.by_rank[rank][step].samples for rank in lasts)
        rates = [event.learning_rate for event in present if event.learning_rate is not None]
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
            ahead=max((event.ahead for event in present if event.ahead is not None), default=None),
            validation=self.validation.get(step),
            owners=self.owner_figures(step),
            unit=self.unit,
        )

    def owner_figures(self, step: int) -> dict[str, OwnerFigures]:
        """By owner, what it did in a round; empty where data is nobody's alone."""
        validations = self._validations.get(step, {})
        figures = {}
        for name, rank in zip(self.owners, self.last_ranks, strict=False):
            event = self.by_rank.get(rank, {}).get(step)
            if event is not None:
                figures[name] = owner_figures(event, validations.get(rank))
        return figures

    def loss(self, step: int) -> float:
        """The training loss of a step: the sum of the parts that the pipelines' last ranks have told.

        If ranks may leave, each of those tells the whole loss: one may be lost once its part has counted.
        """
        if step < self.oldest:
            return self._old_losses[step - self.first]
        _, *lasts = self._tellers(step)
        losses = [self.by_rank[rank][step].loss for rank in (lasts[:1] if self.is_elastic else lasts)]
        return sum(float("nan") if loss is None else loss for loss in losses)

    def iteration_s(self, step: int) -> float:
        """Seconds of a step that has ended, on the first rank that makes it."""
        if step < self.oldest:
            return self._old_seconds[step - self.first]
        return self.by_rank[self.ranks_at(step)[0]][step].iteration_s

    def sync_s(self, steps: Sequence[int]) -> float | None:
        """The median over steps of the last pipeline's wait for the sum; None where there is one pipeline.

        A pipeline's first stage ends its backwards last, so it is the first stages that are looked at.
        """
        first_ranks = (0, *(rank + 1 for rank in self.last_ranks[:-1]))
        waits_by_step = [
            [self.by_rank[rank][step].sync_s for rank in first_ranks if rank in self.ranks_at(step)]
            for step in steps
        ]
        waits = [
            min(present) for waited in waits_by_step if (present := [s for s in waited if s is not None])
        ]
        return median(waits) if waits else None
