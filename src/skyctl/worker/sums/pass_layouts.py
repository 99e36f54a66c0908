"""The passes of one step's sum of gradients, as replicas and helpers cut them alike.

Every format has one pass but ``powersgd:R``, which has two (``low_rank_gradients``), both in float32; a run's
first steps may be summed whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import TypeVar

from skyctl.worker.sums.sum_codecs import chunk_numel
from skyctl.worker.sums.sum_layout import SumLayout, make_layout

POWERSGD = "powersgd:"
"""Before the rank in a format's name."""
Numels = Sequence[Sequence[int]]
T = TypeVar("T")


def rank_of(format: str) -> int | None:  # noqa: A002 — as the plan calls it
    """The rank that gradients are compressed to; None: they are not."""
    return int(format.removeprefix(POWERSGD)) if format.startswith(POWERSGD) else None


class PassLayouts:
    """How a group's gradients are cut, pass by pass.

    Attributes:
        format: of messages (``sum_codecs``).

    Args:
        format: of the plan.
        shares: by route.
        whole: numbers of each tensor, by layer, in the order in which layers become ready.
        first, second: with ``powersgd:R`` the same of each pass of a compressed step.
        uncompressed_steps: at the run's start, summed whole.
    """

    def __init__(
        self,
        format: str,  # noqa: A002
        chunk_bytes: int,
        shares: Sequence[float],
        whole: Numels,
        first: Numels = (),
        second: Numels = (),
        uncompressed_steps: int = 0,
    ) -> None:
        compresses = rank_of(format) is not None
        self.format = "float32" if compresses else format
        numel = chunk_numel(self.format, chunk_bytes)
        self._uncompressed_steps = uncompressed_steps if compresses else None
        self._whole = make_layout(whole, shares, numel)
        self._first = make_layout(first, shares, numel)
        has_second = any(map(sum, second))
        self._second = make_layout(second, shares, numel) if has_second else None

    def first(self, step: int) -> SumLayout:
        """The layout of what is summed while backwards may still run."""
        return self._first if self._compresses(step) else self._whole

    def second(self, step: int) -> SumLayout | None:
        """The layout of what is summed after that; None: nothing."""
        return self._second if self._compresses(step) else None

    def _compresses(self, step: int) -> bool:
        return self._uncompressed_steps is not None and step >= self._uncompressed_steps


def buckets_of(layout: SumLayout, layers: Sequence[Sequence[T]]) -> list[list[T]]:
    """The items that each bucket holds, of the layers that the layout was made for."""
    ends = [-1, *layout.last_layer_of]
    return [
        [item for layer in layers[before + 1 : last + 1] for item in layer] for before, last in pairwise(ends)
    ]
