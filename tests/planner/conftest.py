"""Time limits of the planner's tests are of a processor: what is found does not depend on what else runs."""

from __future__ import annotations

import time

import pytest


@pytest.fixture(autouse=True)
def processor_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "perf_counter", time.process_time)
