"""How much wall time a CPU second takes, whatever else the thread waited for meanwhile."""

import time

import pytest

from skyctl.probe.node import stretches
from skyctl.probe.node.clock import Meter
from skyctl.probe.node.stretches import Piece, Stretches, scheduled


def test_time_at_a_disk_is_left_out() -> None:
    found = Stretches()
    calm = [Piece(0.2, 0.07, 0.001)] * 10
    found.pieces = [Piece(1.0, 0.07, 0.8), *calm]
    assert found.stretch() == pytest.approx(0.2 / 0.07)
    assert found.left_out_s() == pytest.approx(0.8)
    assert found.interval() == pytest.approx(0.0, abs=1e-6)


def test_short_waits_everywhere_are_kept_as_they_are() -> None:
    found = Stretches()
    found.pieces = [Piece(0.2, 0.1, 0.02)] * 8
    assert found.stretch() == pytest.approx(2.0)


def test_nothing_measured() -> None:
    assert Stretches().stretch() is None
    assert Stretches().interval() == 0.0


@pytest.mark.skipif(scheduled() is None, reason="this kernel does not tell")
def test_sleep_is_told_from_waiting_for_a_processor() -> None:
    found = Stretches()
    start, cpu = time.perf_counter(), time.thread_time()
    time.sleep(0.25)
    found.add(time.perf_counter() - start, time.thread_time() - cpu)
    start, cpu = time.perf_counter(), time.thread_time()
    while time.thread_time() - cpu < 0.22:
        pass
    found.add(time.perf_counter() - start, time.thread_time() - cpu)
    slept, ran = found.pieces
    assert slept.blocked_s > 0.2
    assert ran.blocked_s < 0.05
    assert found.kept() == [ran]


def test_a_saved_up_burst_is_not_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stretches, "scheduled", lambda: None)
    meter = Meter("cpu", quota_cpus=0.25)
    meter.wall_s, meter.cpu_s = 1.0, 0.6
    assert meter.stretch() == 4.0
    meter.cpu_s = 0.1
    assert meter.stretch() == 10.0, "a processor that is short is real"
