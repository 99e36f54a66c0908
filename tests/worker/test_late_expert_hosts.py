"""All hosts of experts are late, without an end: stopped, or there without answering."""

from __future__ import annotations

import signal
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from tests.worker.expert_hosts import HostPool, Hosts
from tests.worker.test_expert_hosts import HOLDERS, STEPS, pipeline, workload

HANGS = "SKYCTL_TEST_HANGS"
HANGING = f"""import os, time

class Hanging(nn.Linear):
    def __init__(self):
        super().__init__(8, 8)
        self.calls = 0
    def forward(self, x):
        self.calls += 1
        if self.calls > 20 and "{HANGS}" in os.environ:
            time.sleep(1000)
        return super().forward(x)

class Mixture"""


@pytest.mark.parametrize("way", ["stopped", "hanging"])
def test_a_rank_says_that_it_waits_and_takes_the_experts_back(
    way: str, pool: Any, driver: ModuleType, tmp_path: Path
) -> None:
    spec = workload(tmp_path, ("lambda: nn.Linear(8, 8)", "Hanging"), ("class Mixture", HANGING))
    lost = HostPool(tmp_path, 2, lambda _place: {HANGS: "yes"} if way == "hanging" else {})
    try:
        taken = lost.take(2)

        def stop(_pool: Any, _rank: int, event: dict[str, Any]) -> None:
            if way == "stopped" and event["event"] == "step" and event["step"] == 8:
                for host in taken:
                    host.popen.send_signal(signal.SIGSTOP)

        with Hosts(pipeline(driver, spec, [0, 4]), HOLDERS, taken, least_wait_s=0.3) as hosts:
            outcome = pool.run(hosts.orders, stop)
            for host in taken:
                host.kill()
    finally:
        lost.close()
    assert not outcome.errors, outcome.errors
    assert len(outcome.steps[0]) == STEPS
    seen = outcome.results[0]["experts"]
    assert {host["why"].split(" for ")[0] for host in seen["lost"].values()} == {"it has not answered"}
    assert {move.get("host") for move in seen["record"]["moves"]} == {None}
    waits = {event["phase"] for event in outcome.alive[0] if event["waiting"]}
    assert any("host-0" in phase and "host-1" in phase for phase in waits), waits
    others = HostPool(tmp_path, 2)
    try:
        told = {"record": seen["record"]}
        with Hosts(pipeline(driver, spec, [0, 4]), HOLDERS, others.take(2), **told) as hosts:
            assert pool.run(hosts.orders).losses == outcome.losses
    finally:
        others.close()
