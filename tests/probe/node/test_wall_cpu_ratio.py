"""How much wall time a CPU second takes, whatever else the thread waited for meanwhile."""

import time

import pytest

from skyctl.probe.node import wall_cpu_ratio
from skyctl.probe.node.repetition_timer import RepetitionTimer
from skyctl.probe.node.wall_cpu_ratio import CpuSlice, WallCpuRatio, thread_schedstat


def test_time_at_a_disk_is_left_out() -> None:
    ratio = WallCpuRatio()
    calm = [CpuSlice(0.2, 0.07, 0.001)] * 10
    ratio.slices = [CpuSlice(1.0, 0.07, 0.8), *calm]
    assert ratio.ratio() == pytest.approx(0.2 / 0.07)
    assert ratio.left_out_s() == pytest.approx(0.8)
    assert ratio.interval() == pytest.approx(0.0, abs=1e-6)


def test_short_waits_everywhere_are_kept_as_they_are() -> None:
    ratio = WallCpuRatio()
    ratio.slices = [CpuSlice(0.2, 0.1, 0.02)] * 8
    assert ratio.ratio() == pytest.approx(2.0)


def test_nothing_measured() -> None:
    assert WallCpuRatio().ratio() is None
    assert WallCpuRatio().interval() == 0.0


@pytest.mark.alone
@pytest.mark.skipif(thread_schedstat() is None, reason="this kernel does not tell")
def test_sleep_is_told_from_waiting_for_a_processor() -> None:
    ratio = WallCpuRatio()
    start, cpu = time.perf_counter(), time.thread_time()
    time.sleep(0.25)
    ratio.add(time.perf_counter() - start, time.thread_time() - cpu)
    start, cpu = time.perf_counter(), time.thread_time()
    while time.thread_time() - cpu < 0.22:
        pass
    ratio.add(time.perf_counter() - start, time.thread_time() - cpu)
    slept, ran = ratio.slices
    assert slept.blocked_s > 0.2
    assert ran.blocked_s < 0.05
    assert ratio.quiet_slices() == [ran]


def test_a_saved_up_burst_is_not_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wall_cpu_ratio, "thread_schedstat", lambda: None)
    timer = RepetitionTimer("cpu", quota_cpus=0.25)
    timer.wall_s, timer.cpu_s = 1.0, 0.6
    assert timer.wall_cpu_ratio() == 4.0
    timer.cpu_s = 0.1
    assert timer.wall_cpu_ratio() == 10.0, "a processor that is short is real"
