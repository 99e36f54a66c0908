"""The report as Chromium shows it: wide and narrow, light and dark."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from skyctl.compare.report_page import render_report

ROOT = Path(__file__).resolve().parents[2]
SMALLEST_PX = 9
CONTRAST = """(() => {
  const parse = c => (c.match(/[\\d.]+/g) || []).map(Number);
  const light = c => { const [r, g, b] = c.map(v => { v /= 255;
    return v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4; });
    return 0.2126 * r + 0.7152 * g + 0.0722 * b; };
  const ground = e => { for (; e; e = e.parentElement) { const c = parse(getComputedStyle(e).backgroundColor);
    if (c.length == 3 || c[3] > 0) return c.slice(0, 3); } return [255, 255, 255]; };
  const bad = [];
  const what = 'p, li, h1, h2, h3, td, th, dt, dd, small, b, a, figcaption, code';
  for (const e of document.querySelectorAll(what)) {
    if (e.closest('.heat')) continue;
    const a = light(parse(getComputedStyle(e).color).slice(0, 3)), b = light(ground(e));
    const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    if (ratio < 4.5) bad.push(e.tagName + ' ' + ratio.toFixed(2) + ' ' + e.textContent.slice(0, 40));
  }
  return bad; })()"""
"""Text with less contrast to its ground than WCAG 2 (level AA) asks for."""
OUTSIDE = """[...document.querySelectorAll('body *')].filter(e => !e.closest('.scroll, svg')
  && e.getBoundingClientRect().right > innerWidth + 0.5).map(e => e.tagName + '.' + e.className)"""
CELLS = """[...document.querySelectorAll('table:not(.heat) td')].filter(e => !e.getClientRects().length
  || e.getBoundingClientRect().right > innerWidth + 0.5).map(e => e.textContent)"""
"""Cells of tables that nobody sees without scrolling sideways."""
SMALL = """Math.min(...[...document.querySelectorAll('p, li, td, th, dt, dd, small, text')]
  .filter(e => e.getClientRects().length).map(e => parseFloat(getComputedStyle(e).fontSize)))"""
EMPTY = """[...document.querySelectorAll('section')]
  .filter(e => e.getBoundingClientRect().height < 40).map(e => e.id)"""


def driver() -> ModuleType:
    spec = importlib.util.spec_from_file_location("report_browser", ROOT / "scripts" / "browser.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def chromium() -> Iterator[Any]:
    found = driver()
    if found.find() is None:
        if os.environ.get("SKYCTL_REQUIRE_LAB") == "1":
            pytest.fail("there is no chromium, and here the report must be looked at")
        pytest.skip("there is no chromium on PATH")
    with found.browser() as browser:
        yield browser


def test_wide_and_narrow_light_and_dark(three, reports: ModuleType, tmp_path: Path, chromium: Any) -> None:
    path = tmp_path / "report.html"
    path.write_text(render_report(reports.made(three, full=True)), encoding="utf-8")
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
