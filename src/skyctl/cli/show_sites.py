"""What ``skyctl probe`` says of links beside the tables: which were measured, and the map as a picture."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from skyctl.errors import InputError

if TYPE_CHECKING:
    from skyctl.cli.common import Output
    from skyctl.compare.heatmap import Square
    from skyctl.probe.heat import Cell
    from skyctl.records.profile import Profile

LINKS = ("all", "sites", "none")


def check_plot(path: Path | None) -> None:
    """Raises InputError, before any work is done, where the picture could not be written."""
    if path is not None and path.suffix.lower() != ".png":
        raise InputError(f"--plot {path}: the picture is a PNG; give a file that ends in .png")
    if path is not None and not path.absolute().parent.is_dir():
        raise InputError(f"--plot {path}: the folder {path.absolute().parent} does not exist")


def say_links(out: Output, profile: Profile, how: str | None, plot: Path | None) -> None:
    """Which links were filled in and why, and the picture where one is asked for."""
    from skyctl.probe.links import default_how

    filled = sum(link.estimated for link in profile.links)
    if how is None and default_how(len(profile.nodes)) == "sites":
        out.note(
            f"{len(profile.nodes)} nodes: all links within a site were measured, and one between every two "
            "sites (--links all measures every pair)"
        )
    if filled:
        out.note(
            f"{filled} of {len(profile.links)} links are filled in from one measured between their sites"
        )
    if how == "none":
        out.note("no link was measured: a plan from this profile takes every transfer as free")
    if plot is not None:
        out.note(f"picture: {draw(profile, plot)}")


def draw(profile: Profile, path: Path) -> Path:
    """Writes the map of the links as a PNG."""
    from skyctl.compare.heatmap import plot_heat
    from skyctl.probe.heat import MOST_NODES, grid

    found = grid(profile)
    if len(found.names) == 1:  # one square would hide a slow pair; by colour alone all nodes fit
        found = grid(profile, len(profile.nodes))
    low, high = found.span()
    written = len(found.names) <= MOST_NODES
    rows = [[_square(cell, low, high, written=written) for cell in row] for row in found.cells]
    what = "site" if found.by_site else "node"
    key = "Mbit/s, below it ms one way; yellow is fast, violet slow; ~ filled in; ✗ no connection"
    names = found.names if profile.links else ()
    return plot_heat(names, rows, f"Links of {profile.cluster}, from row to column, by {what}", key, path)


def _square(cell: Cell | None, low: float, high: float, *, written: bool) -> Square:
    from skyctl.compare.heatmap import Square
    from skyctl.probe.heat import colour, ink, latency_words, rate_words

    if cell is None:
        return Square(None, "black", ())
    if cell.mbit is None or cell.latency_ms is None:
        return Square(None, "red", ("✗",))
    shade = colour(cell.mbit, low, high)
    words = ("~" if cell.estimated else "") + rate_words(cell.mbit)
    return Square(shade, ink(shade), (words, latency_words(cell.latency_ms)) if written else ())
