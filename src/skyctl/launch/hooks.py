"""Who else is told of what happens in a run, and what of it may be told again."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from skyctl.launch.spec import RankSpec

Check = Callable[[Mapping[int, Mapping[str, Any]]], None]
"""Told by rank what each found where it was sent; raises where the plan does not go with that."""

Past = Sequence[tuple[int, dict[str, Any]]]
"""Events of ranks, in order."""


@dataclass(frozen=True)
class Hooks:
    """Who else is told, in the launching thread.

    ``heard``: every event, before anything is done about it; False: it was heard before, and is nothing now
    (default: logs go to the run's folder).
    ``tick``: every half second or so while the run is watched. ``checkpoint``: every rank has written its
    layers after so many steps; by layer, what was written.
    """

    heard: Callable[[RankSpec, Mapping[str, Any]], bool] | None = None
    tick: Callable[[], None] = lambda: None
    checkpoint: Callable[[int, dict[int, dict[str, Any]]], None] = lambda _step, _layers: None
