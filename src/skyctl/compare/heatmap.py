"""The links between nodes (or sites) as a picture: a square, rows send, columns receive."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from skyctl.compare import canvas
from skyctl.compare.canvas import INK, MUTED
from skyctl.errors import SkyctlError

_CELL_IN = 0.62
_LEFT_IN = 0.9
_TOP_IN = 1.25
_BOTTOM_IN = 0.3


@dataclass(frozen=True)
class Square:
    """One cell: its colour (0 to 255 each), the ink on it, and what stands in it, line by line."""

    shade: tuple[int, int, int] | None
    ink: str
    lines: tuple[str, ...]


def plot_heat(
    names: Sequence[str], rows: Sequence[Sequence[Square]], title: str, key: str, path: str | Path
) -> Path:
    """Draws it.

    Returns:
        The path written.

    Raises:
        SkyctlError: matplotlib is missing, there is nothing to draw, or the file can't be written.
    """
    if not names:
        raise SkyctlError("there are no links to draw", hint="skyctl probe --links all measures them")
    count = len(names)
    called = canvas.device_names(names, 12)
    cell_in = min(_CELL_IN * 1.6, (canvas.WIDTH_IN - _LEFT_IN - 0.3) / count)
    high_in = min(cell_in, _CELL_IN)
    with canvas.style():
        figure = canvas.figure(_TOP_IN + high_in * count + _BOTTOM_IN)
        axes = canvas.place(figure, _LEFT_IN, _TOP_IN, cell_in * count, high_in * count)
        canvas.bare(axes)
        axes.set_xlim(0, count)
        axes.set_ylim(count, 0)
        size = max(4.0, min(9.0, 14.5 * cell_in))
        for y, row in enumerate(rows):
            for x, square in enumerate(row):
                if square.shade is not None:
                    shade = tuple(part / 255 for part in square.shade)
                    axes.fill([x, x + 1, x + 1, x], [y, y, y + 1, y + 1], color=shade, edgecolor="white")
                axes.text(
                    x + 0.5,
                    y + 0.5,
                    "\n".join(square.lines),
                    ha="center",
                    va="center",
                    fontsize=size,
                    color=square.ink,
                )
        places = [number + 0.5 for number in range(count)]
        axes.xaxis.tick_top()
        turned = 0 if cell_in > 0.5 else 60
        axes.set_xticks(places, [called[name] for name in names], rotation=turned, color=INK)
        axes.set_yticks(places, [called[name] for name in names])
        axes.tick_params(length=0, labelsize=max(6.0, size))
        figure.text(
            0.02, 1 - 0.22 / figure.get_size_inches()[1], title, fontsize=12, weight="bold", va="center"
        )
        figure.text(0.02, 1 - 0.48 / figure.get_size_inches()[1], key, fontsize=9, color=MUTED, va="center")
        return canvas.save(figure, path)
