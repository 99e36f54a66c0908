"""How a run trains, as opposed to what: microbatches, clipping, learning rate, validation. No torch here."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from skyctl.errors import InputError, WorkloadError

LR_SCHEDULES = ("constant", "linear", "cosine")
VALIDATE_BATCHES = 4


@dataclass(frozen=True)
class Recipe:
    """A run's training recipe, as launcher and nodes exchange it in JSON.

    Attributes:
        clip_norm: the largest global norm that a step's gradients may have; None: no clipping.
        lr_schedule: how the learning rate falls after the warm-up, one of ``LR_SCHEDULES``.
        warmup_steps: steps in which the learning rate rises to its full value.
        min_learning_rate: where ``linear`` and ``cosine`` end.
        validate_every: steps from one validation to the next; None: no validation.
        validate_batches: how many held-out batches a validation takes.
        patience: the run ends once so many validations in a row were no better; None: it does not.
        patience_from: steps after which the run was resumed: only later validations count.
        total_steps: the run's steps, over which the learning rate falls.

    Raises:
        InputError: a value is out of range; named by its flag.
    """

    clip_norm: float | None = None
    lr_schedule: str = "constant"
    warmup_steps: int = 0
    min_learning_rate: float = 0.0
    validate_every: int | None = None
    validate_batches: int = VALIDATE_BATCHES
    total_steps: int = 1
    patience: int | None = None
    patience_from: int = 0

    def __post_init__(self) -> None:
        if self.clip_norm is not None and not 0 < self.clip_norm < math.inf:
            raise InputError(f"--clip-norm must be a positive number, not {self.clip_norm}")
        if self.lr_schedule not in LR_SCHEDULES:
            raise InputError(f"--lr-schedule {self.lr_schedule!r} is not one of {', '.join(LR_SCHEDULES)}")
        if self.total_steps < 1:
            raise InputError(f"a run has at least 1 step, not {self.total_steps}")
        if not 0 <= self.warmup_steps <= self.total_steps:
            raise InputError(
                f"--warmup-steps {self.warmup_steps} does not fit into the run's {self.total_steps} steps",
                hint="use fewer, or more --steps",
            )
        if not 0 <= self.min_learning_rate < math.inf:
            raise InputError(f"--min-learning-rate must not be negative, it is {self.min_learning_rate}")
        if self.min_learning_rate and self.lr_schedule == "constant":
            raise InputError(
                "--min-learning-rate is where a falling rate ends, and --lr-schedule constant does not fall",
                hint="add --lr-schedule linear or --lr-schedule cosine",
            )
        if self.validate_every is not None and self.validate_every < 1:
            raise InputError(f"--validate-every must be at least 1, not {self.validate_every}")
        if self.validate_batches < 1:
            raise InputError(f"--validate-batches must be at least 1, not {self.validate_batches}")
        if self.patience is not None and self.patience < 1:
            raise InputError(f"--patience must be at least 1, not {self.patience}")
        if self.patience is not None and self.validate_every is None:
            raise InputError(
                f"--patience {self.patience} counts validations, and the run makes none",
                hint="add --validate-every N",
            )

    @property
    def changes_learning_rate(self) -> bool:
        """Whether the learning rate is ever other than the optimizer's own."""
        return self.lr_schedule != "constant" or self.warmup_steps > 0

    def learning_rate_factor(self, step: int, floor: float = 0.0) -> float:
        """The factor of the learning rate in that step, counted from 0.

        It rises in equal parts from 1 / (warm-up + 1) to 1 in step ``warmup_steps``, then falls towards
        ``floor``, which it would reach in step ``total_steps``: no step has a rate of 0.
        """
        if step < self.warmup_steps:
            return (step + 1) / (self.warmup_steps + 1)
        if self.lr_schedule == "constant":
            return 1.0
        passed = min(1.0, (step - self.warmup_steps) / max(1, self.total_steps - self.warmup_steps))
        shape = 1 - passed if self.lr_schedule == "linear" else (1 + math.cos(math.pi * passed)) / 2
        return floor + (1 - floor) * shape

    def validates(self, step: int, *, last: bool) -> bool:
        """Whether a validation follows that step: after every ``validate_every``, and after the last."""
        return self.validate_every is not None and (last or (step + 1) % self.validate_every == 0)

    def loses_patience(self, done: int, best: int) -> bool:
        """Whether the run has been validated ``patience`` times without a better loss.

        Args:
            done: steps that are done.
            best: after so many of them the loss was best; 0: there was no validation.
        """
        if self.patience is None or self.validate_every is None:
            return False
        since = max(best, self.patience_from)
        return done // self.validate_every - since // self.validate_every >= self.patience

    def to_dict(self) -> dict[str, Any]:
        """The recipe as JSON values."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Recipe:
        """The recipe that ``to_dict`` described; {} means the defaults."""
        return cls(**dict(values))


def microbatch_sizes(batch: int, microbatches: int) -> list[int]:
    """Samples of each microbatch: larger ones first, differing by at most one.

    Raises:
        WorkloadError: there are more microbatches than samples, or either is below one.
    """
    if batch < 1 or microbatches < 1:
        raise WorkloadError(
            f"a batch and its microbatches are at least 1: {batch} samples, {microbatches} microbatches"
        )
    if microbatches > batch:
        raise WorkloadError(
            f"{microbatches} microbatches need at least {microbatches} samples, the batch has {batch}",
            hint=f"--microbatches {batch} or fewer, or a larger --batch-size",
        )
    base, more = divmod(batch, microbatches)
    return [base + 1] * more + [base] * (microbatches - more)
