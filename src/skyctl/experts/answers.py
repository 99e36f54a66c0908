"""Which experts answer in each step: the deadline of their answers, and the record of masks. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from skyctl.errors import InputError
from skyctl.schedule.unusual_times import SPREADS, unusual_after_s

KEPT_TIMES = 256
LEAST_TIMES = 8
"""Before so many answers were timed there is no deadline."""


class AnswerDeadline:
    """How long a step waits for its experts: what is unusual by the answers before, and two medians at least.

    The floor is there because answers that took equally long say nothing of their spread.
    """

    def __init__(self) -> None:
        self._times: deque[float] = deque(maxlen=KEPT_TIMES)

    def note(self, answer_s: float) -> None:
        """An expert has answered, in time or late, after so many seconds."""
        self._times.append(answer_s)

    @property
    def limit_s(self) -> float | None:
        """Seconds from the dispatch on; None: not known yet, all are waited for."""
        if len(self._times) < LEAST_TIMES:
            return None
        return unusual_after_s(self._times, median(self._times) / SPREADS)


class MaskRecord:
    """The mask of each step, so that the steps can be made again as they were.

    Args:
        experts: how many there are.
    """

    def __init__(self, experts: int) -> None:
        self.experts = experts
        self._missing: dict[int, tuple[int, ...]] = {}

    def note(self, step: int, alive: Sequence[bool]) -> None:
        """Records the mask of a step; again only if it is the same one.

        Raises:
            InputError: it is of another number of experts, or not the one that the step had.
        """
        if len(alive) != self.experts:
            raise InputError(f"step {step} has a mask of {len(alive)} experts, the record {self.experts}")
        missing = tuple(number for number, lives in enumerate(alive) if not lives)
        if self._missing.setdefault(step, missing) != missing:
            raise InputError(
                f"step {step} was made without experts {list(self._missing[step])}, and now without "
                f"{list(missing)}",
                hint="a step that is made again takes its mask from the record",
            )

    def mask(self, step: int) -> tuple[bool, ...]:
        """The mask of a step.

        Raises:
            InputError: the record has no such step.
        """
        if step not in self._missing:
            raise InputError(f"no mask is recorded of step {step}")
        missing = set(self._missing[step])
        return tuple(number not in missing for number in range(self.experts))

    @property
    def masked_steps(self) -> list[int]:
        """The steps whose mask leaves an expert out."""
        return [step for step, missing in self._missing.items() if missing]

    def to_dict(self) -> dict[str, Any]:
        """As JSON values: ``experts``, and ``missing``, by step the numbers of those that did not answer."""
        return {
            "experts": self.experts,
            "missing": {str(step): list(numbers) for step, numbers in self._missing.items()},
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> MaskRecord:
        """Reads what ``to_dict`` gave.

        Raises:
            InputError: it is nothing that ``to_dict`` gives.
        """
        experts, missing = values.get("experts"), values.get("missing")
        if type(experts) is not int or experts < 1 or not isinstance(missing, dict):
            raise InputError("a record of masks needs experts, a number of at least 1, and missing, by step")
        record = cls(experts)
        for step, numbers in missing.items():
            given = numbers if isinstance(numbers, list) else [None]
            is_sound = all(type(number) is int and 0 <= number < experts for number in given)
            is_step = isinstance(step, str) and step.isascii() and step.isdigit() and len(step) <= 12
            if not (is_step and is_sound):
                raise InputError(
                    f"the record of masks has {numbers!r} for step {step!r}, not numbers below {experts}"
                )
            record.note(int(step), [number not in given for number in range(experts)])
        return record
