"""The pictures beside the report."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest

from skyctl.compare import charts
from skyctl.compare.gantt import plot_steps
from skyctl.compare.rows import Outcome, rows
from skyctl.compare.sweeps import Sweep, point
from skyctl.control.reporting import plot_links

pytest.importorskip("matplotlib")


def test_each_is_drawn(three, reports: ModuleType, tmp_path: Path) -> None:
    report = reports.made(three, full=True)
    compared = list(report.rows)
    for path in (
        charts.plot_machines(report.machines, tmp_path / "cluster.png"),
        charts.plot_bound(compared, tmp_path / "bound.png"),
        charts.plot_prediction(compared, tmp_path / "prediction.png"),
        charts.plot_sweep(report.sweeps[0], tmp_path / "sweep.png"),
        plot_steps(report.panels(), tmp_path / "steps.png"),
        plot_links(report.links, tmp_path / "links.png"),
    ):
        assert path.read_bytes()[:4] == b"\x89PNG"
        assert path.stat().st_size > 8_000, path


def test_where_there_is_nothing_to_draw(tmp_path: Path) -> None:
    none = [Outcome("even", None, "too small")]
    charts.plot_machines([], tmp_path / "a.png")
    charts.plot_bound(rows(none), tmp_path / "b.png")
    charts.plot_prediction(rows(none), tmp_path / "c.png")
    charts.plot_sweep(Sweep(kind="nodes", points=(point(1, none),)), tmp_path / "d.png")
