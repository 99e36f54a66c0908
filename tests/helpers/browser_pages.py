"""The checks of every page that skyctl makes, in a real browser."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

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


def browser_driver() -> ModuleType:
    """``scripts/browser.py``, as a module."""
    spec = importlib.util.spec_from_file_location("report_browser", ROOT / "scripts" / "browser.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
