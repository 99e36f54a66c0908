"""The experiment as one picture: what balance saves by how unequal devices are, and the largest size."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from skyctl.compare import canvas
from skyctl.compare.canvas import FAINT, INK, MUTED, SERIES
from skyctl.compare.paper.closed import Factors, most_balanced_chain, most_pipeline
from skyctl.compare.paper.records import PUBLISHED, Paper
from skyctl.compare.words import seconds

_DASHES = (0, (4, 2))
_SPREADS = [1 + 9 * i / 180 for i in range(181)]
_CHAIN, _FASTEST, _PIPELINE = SERIES[0], SERIES[1], SERIES[2]


def plot_paper(paper: Paper, path: str | Path) -> Path:
    """Draws both panels to a PNG file.

    Raises:
        SkyctlError: matplotlib is missing, or the file can't be written.
    """
    with canvas.style():
        figure = canvas.figure(4.1)
        _saved(canvas.place(figure, 0.5, 0.42, 3.85, 3.1), paper)
        _largest(canvas.place(figure, 7.3, 0.42, 2.0, 3.1), paper)
        return canvas.save(figure, path)


def _saved(axes: Any, paper: Paper) -> None:
    """Reduction against even over slowest ÷ fastest: formulas as lines, the experiment's sizes as points."""
    canvas.bare(axes, keep=("bottom",))
    uniform = [Factors.uniform(r) for r in _SPREADS]
    lines = (
        ([d.balanced_chain for d in uniform], _CHAIN, "-", "chain, balanced"),
        ([most_balanced_chain(r) for r in _SPREADS], _CHAIN, _DASHES, "chain, balanced, any factors"),
        ([d.fastest_chain for d in uniform], _FASTEST, "-", "chain, fastest alone"),
        ([d.pipeline for d in uniform], _PIPELINE, "-", "pipeline, balanced"),
        ([most_pipeline(r) for r in _SPREADS], _PIPELINE, _DASHES, "pipeline, any factors"),
    )
    for values, colour, dashes, label in lines:
        axes.plot(_SPREADS, values, color=colour, linestyle=dashes, linewidth=1.8)
        axes.text(_SPREADS[-1] + 0.15, values[-1], label, color=colour, fontsize=8.5, va="center")
    axes.axhline(PUBLISHED, color=INK, linewidth=0.9, linestyle=(0, (1, 2)))
    axes.text(9.9, PUBLISHED - 0.015, "published: 55%", fontsize=8.5, color=INK, ha="right", va="top")
    for execution, colour in (("chain", _CHAIN), ("chain-sum", _FASTEST), ("steady", _PIPELINE)):
        found = [c for c in paper.cases if c.execution == execution]
        at = [Factors.of(paper.factors[f"{c.workers} workers"]).spread for c in found]
        saved = [c.entry("optimal").reduction for c in found]
        axes.plot(at, saved, "o", color=colour, markersize=4.5, markeredgecolor="white", markeredgewidth=0.6)
    axes.set_xlim(1, 10)
    axes.set_ylim(0, 0.92)
    axes.set_yticks([0, 0.2, 0.4, 0.6, 0.8], ["0", "20%", "40%", "60%", "80%"])
    axes.set_xlabel("slowest ÷ fastest (lines: uniform between; points: the experiment)")
    axes.set_title("Saved against an even split, at most", loc="left", fontsize=11, fontweight="bold")
    axes.grid(axis="y", color=FAINT, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(length=0)


def _largest(axes: Any, paper: Paper) -> None:
    """Seconds a batch at the largest size, on a logarithmic scale."""
    canvas.bare(axes, keep=("bottom",))
    largest = max((c.nodes, c.encoders) for c in paper.cases)
    bars = []
    words = (
        ("chain", "even", "chain, even", MUTED),
        ("chain", "dynamic", "chain, dynamic", _CHAIN),
        ("chain", "optimal", "chain, optimal", _CHAIN),
        ("chain-sum", "optimal", "chain, least sum", _FASTEST),
        ("step", "even", "step, even", MUTED),
        ("step", "optimal", "step, optimal", _PIPELINE),
        ("steady", "even", "steady, even", MUTED),
        ("steady", "optimal", "steady, optimal", _PIPELINE),
    )
    for case in paper.cases:
        if (case.nodes, case.encoders) == largest:
            bars += [
                (words.index(word), word[2], case.entry(word[1]).time_s, word[3])
                for word in words
                if word[0] == case.execution
            ]
    values = [value for _, _, value, _ in bars]
    for i, (_, _, value, colour) in enumerate(sorted(bars)):
        axes.axhline(i, color=FAINT, linewidth=0.8, zorder=0)
        axes.plot([value], [i], "o", color=colour, markersize=7)
        axes.text(max(values) * 1.9, i, seconds(value), va="center", fontsize=8.5, color=INK)
    axes.set_yticks(range(len(bars)), [name for _, name, _, _ in sorted(bars)])
    axes.set_ylim(len(bars) - 0.4, -0.6)
    axes.set_xscale("log")
    axes.set_xlim(min(values) / 1.7, max(values) * 1.7)
    axes.set_xticks([1, 10], ["1 s", "10 s"])
    axes.minorticks_off()
    axes.tick_params(length=0)
    nodes, encoders = largest
    title = f"A batch at {nodes} nodes × {encoders} encoders"
    axes.set_title(title, loc="right", fontsize=11, fontweight="bold", x=1.3)
