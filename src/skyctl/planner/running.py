"""How a plan's stages run: what is decided beside who holds which layers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Running(NamedTuple):
    """One entry a stage: microbatches in flight; by how many weight gradients follow the backward
    (``zero-bubble``); whether it keeps only its layers' inputs and computes the rest again."""

    flying: tuple[int, ...]
    behind: tuple[int, ...]
    recompute: tuple[bool, ...]

    @classmethod
    def plain(cls, flying: Sequence[int]) -> Running:
        """With these numbers in flight, nothing put off, nothing recomputed."""
        return cls(tuple(flying), (0,) * len(flying), (False,) * len(flying))
