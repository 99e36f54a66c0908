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

    result, seconds, _ = DeviceTimer(3.0, single_thread=True, device=CPU).run(work)
    assert result == 7
    assert seconds >= 0.0299
    _, seconds, _ = DeviceTimer(3.0, single_thread=False, device=CPU).run(lambda: time.sleep(0.01))
    assert seconds >= 0.0299
    _, seconds, _ = DeviceTimer(1.0, single_thread=True, device=CPU).run(work)
    assert seconds >= 0.0099
