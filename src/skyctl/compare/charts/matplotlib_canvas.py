"""What all PNG files share: matplotlib where it is installed, its style, names that fit, writing the file."""

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

_STYLE: Any = {
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],
    "font.size": 9.5,
    "text.parse_math": False,  # a device's name may hold a dollar sign
    "hatch.linewidth": 0.6,
    "figure.facecolor": "white",
}


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


def figure(height_in: float) -> Any:
    """An empty matplotlib Figure on the Agg canvas (no display, no global state), within ``style``."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    made = Figure(figsize=(WIDTH_IN, height_in), dpi=DOTS_PER_INCH)
    FigureCanvasAgg(made)
    return made


def save(drawn: Any, path: str | Path) -> Path:
    """Writes the PNG, whole or not at all (SkyctlError where the system refuses)."""
    held = io.BytesIO()
    drawn.savefig(held, format="png", dpi=DOTS_PER_INCH, metadata={"Software": "skyctl"})
    return write_atomic(path, held.getvalue(), mode=None)


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
    """At most ``limit`` characters, the middle left out; control characters become dots."""
    clean = "".join(c if unicodedata.category(c)[0] != "C" else "·" for c in text)
    if len(clean) <= limit:
        return clean
    tail = (limit - 1) // 2
    return f"{clean[: limit - 1 - tail]}…{clean[-tail:]}"
