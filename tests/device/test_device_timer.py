"""Timing an action on a device, and stretching it to a slower one."""

from __future__ import annotations

import time

import torch

from skyctl.device.device_timer import DeviceTimer

CPU = torch.device("cpu")


def test_slowdown_stretches_work_and_not_idling() -> None:
    def work() -> int:
        end = time.thread_time() + 0.01
        while time.thread_time() < end:
            pass
        return 7

    timed = DeviceTimer(3.0, single_thread=True, device=CPU).run(work)
    assert timed.result == 7
    assert timed.wall_s >= 0.0299
    asleep = DeviceTimer(3.0, single_thread=False, device=CPU).run(lambda: time.sleep(0.01))
    assert asleep.wall_s >= 0.0299
    assert DeviceTimer(1.0, single_thread=True, device=CPU).run(work).wall_s >= 0.0099
