"""The report as Chromium shows it: wide and narrow, light and dark."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

from skyctl.compare.report_page import render_report

from ..helpers.browser_pages import CELLS, CONTRAST, EMPTY, OUTSIDE, SMALL, SMALLEST_PX


def test_wide_and_narrow_light_and_dark(three, reports: ModuleType, tmp_path: Path, chromium: Any) -> None:
    path = tmp_path / "report.html"
    path.write_text(render_report(reports.make_report(three, full=True)), encoding="utf-8")
    grounds = {}
    for width in (1280, 390):
        for dark in (False, True):
            at = f"{width} px, {'dark' if dark else 'light'}"
            chromium.show(path, width, dark=dark)
            assert chromium.complaints() == [], at
            assert chromium.requests() == [path.resolve().as_uri()], at
            assert chromium.value("document.documentElement.scrollWidth") <= width, at
            assert chromium.value(OUTSIDE) == [], at
            assert chromium.value(CELLS) == [], at
            assert chromium.value(EMPTY) == [], at
            assert chromium.value(SMALL) >= SMALLEST_PX, at
            assert chromium.value(CONTRAST) == [], at
            there = chromium.value("[...document.querySelectorAll('section')].map(e => e.id)")
            assert set(reports.IDS) <= set(there), at
            grounds[dark] = chromium.value("getComputedStyle(document.body).backgroundColor")
    assert grounds[False] != grounds[True]
    assert len(chromium.picture()) > 20_000
