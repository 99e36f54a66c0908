"""A map as data: nodes at their places and lines between them, in pixels of a field that keeps its shape.

It stands apart from charts with an axis: nothing in it is to a scale. ``look`` names a colour of
``charts.css``, as everywhere.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Anchor = Literal["start", "middle", "end"]
HEAD = 7.0
"""Pixels from an arrow's tip to the end of its shaft."""
HEAD_WIDTH = 3.2
"""Pixels to each side of the shaft."""


@dataclass(frozen=True)
class NetworkLine:
    """A straight line. ``arrow``: with a head at its end; ``dashed``: in pieces, as what comes back."""

    x1: float
    y1: float
    x2: float
    y2: float
    look: str
    width: float = 1.0
    arrow: bool = False
    dashed: bool = False
    tooltip: str = ""

    @property
    def shaft_end(self) -> tuple[float, float]:
        """The point where the line itself ends: at the back of its head, if it has one."""
        if not self.arrow:
            return self.x2, self.y2
        _, left, right = self.head
        return (left[0] + right[0]) / 2, (left[1] + right[1]) / 2

    @property
    def head(self) -> tuple[tuple[float, float], ...]:
        """The head's three corners, the tip first."""
        length = ((self.x2 - self.x1) ** 2 + (self.y2 - self.y1) ** 2) ** 0.5 or 1.0
        along = (self.x2 - self.x1) / length, (self.y2 - self.y1) / length
        back = self.x2 - HEAD * along[0], self.y2 - HEAD * along[1]
        across = HEAD_WIDTH * along[1], -HEAD_WIDTH * along[0]
        return (
            (self.x2, self.y2),
            (back[0] + across[0], back[1] + across[1]),
            (back[0] - across[0], back[1] - across[1]),
        )


@dataclass(frozen=True)
class NetworkNode:
    """A circle. An empty ``look`` is that of a node that is nothing special."""

    x: float
    y: float
    radius: float
    look: str
    tooltip: str = ""


@dataclass(frozen=True)
class NetworkText:
    """Words whose middle is at that height. ``muted``: small and grey; ``backed``: on a ground of its own."""

    x: float
    y: float
    text: str
    anchor: Anchor = "middle"
    muted: bool = False
    backed: bool = False


@dataclass(frozen=True)
class NetworkChart:
    """Lines, then nodes over them, then words. ``width``, ``height``: of the field, in pixels."""

    title: str
    lines: tuple[NetworkLine, ...]
    nodes: tuple[NetworkNode, ...]
    texts: tuple[NetworkText, ...]
    alt_text: str
    width: float
    height: float
    summary: str = ""
