"""The record of a run's experts, beyond its plan: masks, calls that failed, experts that moved. Pure.

With the record of each of its ranks a run is made again as it was, to the same losses.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from skyctl.agent.message_fields import FieldError, Index, read_fields, write_fields
from skyctl.errors import InputError
from skyctl.experts.answers import MaskRecord


@dataclass(frozen=True)
class ExpertMove:
    """An expert has another host: the one before was lost, or too slow for its load.

    Attributes:
        step: the first one that it is there in again.
        copied: so many steps were done when its copy was made.
        host: the place of its new host; None: the rank computes it itself.
    """

    step: Index
    layer: Index
    expert: Index
    copied: Index
    host: Index | None = None

    @property
    def is_whole(self) -> bool:
        """Whether another host took it over with all its training, as it does where no host was lost."""
        return self.host is not None and self.copied == self.step


@dataclass(frozen=True)
class _Written:
    masks: Mapping[str, Any]
    forwards: Mapping[int, tuple[Index, ...]]
    backwards: Mapping[int, tuple[Index, ...]]
    moves: tuple[ExpertMove, ...]


class StepRecord:
    """The record of one rank. A call has a number in its step, in the order in which the rank makes them.

    Attributes:
        forwards, backwards: by step, the calls that brought nothing back.
        moves: in the order in which they were made.
    """

    def __init__(self) -> None:
        self._masks: dict[str, MaskRecord] = {}
        self.forwards: dict[int, list[int]] = {}
        self.backwards: dict[int, list[int]] = {}
        self.moves: list[ExpertMove] = []

    def note_mask(self, name: str, step: int, alive: Sequence[bool]) -> None:
        """The mask of a layer of experts in a step. Raises InputError where the step had another."""
        self._masks.setdefault(name, MaskRecord(len(alive))).note(step, alive)

    def mask(self, name: str, step: int) -> tuple[bool, ...]:
        """That mask. Raises InputError where none is recorded."""
        if name not in self._masks:
            raise InputError(f"no mask is recorded of the experts {name}")
        return self._masks[name].mask(step)

    def handed_over(self, done: int) -> dict[tuple[int, int], int]:
        """By (layer, expert) that another host took over whole after so many steps, that host's place."""
        return {
            (move.layer, move.expert): move.host
            for move in self.moves
            if move.is_whole and move.step == done and move.host is not None
        }

    def brought_back(self, step: int) -> list[ExpertMove]:
        """The other moves: experts that came back in that step, from a last copy."""
        return [move for move in self.moves if move.step == step and not move.is_whole]

    def copied(self, done: int) -> list[tuple[int, int]]:
        """The (layer, expert) that came back later, from copies made after so many steps."""
        moves = [move for move in self.moves if move.copied == done and not move.is_whole]
        return sorted({(move.layer, move.expert) for move in moves})

    @property
    def masked_steps(self) -> set[int]:
        """The steps in which some expert could not be chosen."""
        return {step for record in self._masks.values() for step in record.masked_steps}

    def to_dict(self) -> dict[str, Any]:
        """As JSON values, for ``from_dict``."""
        return {
            "masks": {name: record.to_dict() for name, record in self._masks.items()},
            "forwards": {str(step): calls for step, calls in self.forwards.items()},
            "backwards": {str(step): calls for step, calls in self.backwards.items()},
            "moves": [write_fields(move) for move in self.moves],
        }

    @classmethod
    def from_dict(cls, values: Any) -> StepRecord:
        """Reads what ``to_dict`` gave.

        Raises:
            InputError: it is nothing that ``to_dict`` gives.
        """
        try:
            if not isinstance(values, dict):
                raise FieldError(f"{type(values).__name__} is no record")
            written = _Written(**read_fields(_Written, values, exact=True))
        except FieldError as exc:
            raise InputError(f"a record of experts can't be read: {exc}") from None
        record = cls()
        for name, masks in written.masks.items():
            record._masks[name] = MaskRecord.from_dict(masks if isinstance(masks, dict) else {})
        record.forwards = {step: list(calls) for step, calls in written.forwards.items()}
        record.backwards = {step: list(calls) for step, calls in written.backwards.items()}
        record.moves = list(written.moves)
        return record
