"""What is to be measured of a workload."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class LayerTask:
    """One distinct layer, the first of its kind, at the microbatch sizes to measure.

    ``signatures`` and ``needs_bytes`` (what running it takes) are by microbatch size. ``known``: sizes at
    which it is only run as company for others.
    """

    index: int
    name: str
    signatures: dict[int, str]
    needs_bytes: dict[int, float]
    known: frozenset[int] = frozenset()

    @classmethod
    def from_dict(cls, raw: dict[str, Any]) -> LayerTask:
        """From the launcher's JSON, whose keys are strings."""
        signatures = {int(size): str(signature) for size, signature in raw["signatures"].items()}
        needs = {int(size): float(needed) for size, needed in raw["needs_bytes"].items()}
        known = frozenset(int(size) for size in raw.get("known", ()))
        return cls(int(raw["index"]), str(raw["name"]), signatures, needs, known)
