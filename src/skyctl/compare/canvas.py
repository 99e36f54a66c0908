"""What the plots share: matplotlib behind one door, the colours, text that fits, and writing the file."""

from __future__ import annotations

import io
import unicodedata
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from skyctl.errors import SkyctlError
from skyctl.files import write_atomic

WIDTH_IN = 10.0
DOTS_PER_INCH = 200
"""Twice the 1000 pixels that a README shows, so that it is sharp on fine screens too."""

# Okabe and Ito's palette: told apart by colour-blind eyes, and in grey.
PREDICTED = "#56B4E9"
MEASURED = "#D55E00"
SERIES = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#D55E00", "#56B4E9", "#000000")
STRATEGIES = {"even": "#7B8088", "heuristic": "#B8588F", "optimal": "#00876C"}
"""Lines of one strategy each have these, in pictures and in the report."""
INK = "#222222"
MUTED = "#6B6B6B"
FAINT = "#E3E3E3"
IDLE = "#C9C9C9"

_STYLE: Any = {
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],
    "font.size": 9.5,
    "text.color": INK,
    "text.parse_math": False,  # a device's name may hold a dollar sign
    "axes.edgecolor": MUTED,
    "axes.labelcolor": MUTED,
    "axes.linewidth": 0.8,
    "xtick.color": MUTED,
    "ytick.color": INK,
    "hatch.linewidth": 0.6,
    "hatch.color": IDLE,
    "figure.facecolor": "white",
}


def figure(height_in: float) -> Any:
    """An empty matplotlib Figure on the Agg canvas (no display, no global state).

    Raises:
        SkyctlError: matplotlib is not installed.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as exc:
        raise SkyctlError(
            "plots need matplotlib, which is not installed here", hint="pip install 'skyctl[plots]'"
        ) from exc
    made = Figure(figsize=(WIDTH_IN, height_in), dpi=DOTS_PER_INCH)
    FigureCanvasAgg(made)
    return made


@contextmanager
def style() -> Iterator[None]:
    """The look, for this block only; a sign that the font lacks becomes a box, not a warning.

    Raises:
        SkyctlError: matplotlib is not installed.
    """
    try:
        from matplotlib import rc_context
    except ImportError as exc:
        raise SkyctlError(
            "plots need matplotlib, which is not installed here", hint="pip install 'skyctl[plots]'"
        ) from exc
    with rc_context(_STYLE), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*missing from font", category=UserWarning)
        yield


def save(drawn: Any, path: str | Path) -> Path:
    """Writes the PNG, whole or not at all (SkyctlError where the system refuses)."""
    held = io.BytesIO()
    drawn.savefig(held, format="png", dpi=DOTS_PER_INCH, metadata={"Software": "skyctl"})
    return write_atomic(path, held.getvalue(), mode=None)


def strategy_colour(strategy: str, number: int) -> str:
    """What a strategy's line is drawn in; ``number``: which one it is, where it has none of its own."""
    return STRATEGIES.get(strategy, SERIES[number % len(SERIES)])


def bare(axes: Any, *, keep: Sequence[str] = ()) -> None:
    """Takes away every frame line that is not named."""
    for side, spine in axes.spines.items():
        spine.set_visible(side in keep)


def place(figure: Any, left_in: float, top_in: float, width_in: float, height_in: float) -> Any:
    """Axes at a place given in inches from the figure's upper left corner."""
    wide, high = figure.get_size_inches()
    return figure.add_axes(
        (left_in / wide, 1 - (top_in + height_in) / high, width_in / wide, height_in / high)
    )


def device_names(labels: Sequence[str], limit: int = 22) -> dict[str, str]:
    """What to call devices where there is little room: without the domain if that tells them apart."""
    if any(len(label) > limit for label in labels):
        bare_names = [_without_domain(label) for label in labels]
        if len(set(bare_names)) == len(set(labels)):
            return {label: shortened(name, limit) for label, name in zip(labels, bare_names, strict=True)}
    return {label: shortened(label, limit) for label in labels}


def _without_domain(label: str) -> str:
    """``box.lab.example.org/cuda:1`` → ``box/cuda:1``; an address keeps its figures."""
    node, slash, device = label.rpartition("/") if "/" in label else (label, "", "")
    first = node.partition(".")[0]
    return node + slash + device if first.isdigit() or not first else first + slash + device


def shortened(text: str, limit: int = 22) -> str:
    """At most ``limit`` signs, the middle left out; control characters made visible."""
    clean = "".join(c if unicodedata.category(c)[0] != "C" else "·" for c in text)
    if len(clean) <= limit:
        return clean
    tail = (limit - 1) // 2
    return f"{clean[: limit - 1 - tail]}…{clean[-tail:]}"
