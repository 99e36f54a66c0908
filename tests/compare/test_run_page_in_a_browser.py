"""A run's page as Chromium shows it, while the run trains and to its end."""

from __future__ import annotations

import time
from typing import Any

from skyctl.compare.run_page import render_run
from skyctl.run.run_lock import acquire_run_lock
from skyctl.supervision.run_page_server import RunPageServer
from skyctl.supervision.run_status import resolve_run
from skyctl.supervision.run_watcher import RunWatcher

from ..helpers.browser_pages import CONTRAST, OUTSIDE, SMALL, SMALLEST_PX
from ..helpers.watched_runs import add_events, add_steps, attempt, write_state

HOSTILE = "<img src=x onerror=document.title='taken'>"
PATIENCE_S = 60.0


def wait_for(chromium: Any, expression: str) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not chromium.value(expression):
        assert time.monotonic() < deadline, expression
        time.sleep(0.1)


def test_the_page_follows_the_run_to_its_end(chromium: Any) -> None:
    devices = ("a/cpu:0", f"{HOSTILE}/cpu:0")
    attempts = (attempt(devices=devices),)
    paths = write_state(attempts=attempts, step=4)
    add_steps(paths, range(4))
    add_events(paths, range(4))
    paths.supervisor_log.write_text(f"2026-11-21T04:04:05.000+00:00 warning: {HOSTILE}\n")
    watcher = RunWatcher(resolve_run(None))
    server = RunPageServer(lambda: render_run(watcher.figures()))
    with acquire_run_lock(paths, attached=True), server.serving():
        for width, dark in ((400, False), (1280, True)):
            at = f"{width} px, {'dark' if dark else 'light'}"
            chromium.show(server.url, width, dark=dark)
            wait_for(chromium, "document.body.dataset.updated > 0")
            assert chromium.complaints() == [], at
            assert chromium.value("document.documentElement.scrollWidth") <= width, at
            assert chromium.value(OUTSIDE) == [], at
            assert chromium.value(SMALL) >= SMALLEST_PX, at
            assert chromium.value(CONTRAST) == [], at
            assert chromium.value("document.querySelectorAll('img').length") == 0, at
            assert chromium.value("document.querySelectorAll('.lane').length") == 2, at
        assert chromium.value("document.querySelector('h1').textContent") == "Training: step 4 of 20"
        before = chromium.value("document.querySelector('#loss path').getAttribute('d')")
        add_steps(paths, range(4, 6))
        write_state(attempts=attempts, step=6)
        wait_for(chromium, "document.title.startsWith('Training: step 6')")
        assert chromium.value("document.querySelector('#loss path').getAttribute('d')") != before
        add_steps(paths, range(6, 20))
        write_state(attempts=attempts, step=20, status="done")
        wait_for(chromium, "document.title.startsWith('Done: step 20')")
        assert server.end_served.wait(PATIENCE_S)
        asked = chromium.requests()
        assert chromium.complaints() == []
        assert all(url.startswith(server.url.partition("?")[0]) for url in asked)
    time.sleep(1.5)  # it asks once a second until it has seen the end
    assert chromium.requests() == asked


def test_a_page_whose_server_has_gone_says_so(chromium: Any) -> None:
    write_state()
    watcher = RunWatcher(resolve_run(None))
    server = RunPageServer(lambda: render_run(watcher.figures()))
    with server.serving():
        chromium.show(server.url, 400, dark=False)
    wait_for(chromium, "!document.getElementById('connection').hidden")
    assert "does not answer" in chromium.value("document.getElementById('connection').textContent")
