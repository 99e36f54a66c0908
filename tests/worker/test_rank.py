"""The protocol of one rank: accounts, an early end, and what goes wrong."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from tests.helpers.orders import with_fields
from tests.worker.workloads import RAISING

Workloads = Callable[..., dict[str, Any]]


def test_a_steps_accounts_add_up(workload: Workloads, pool: Any, driver: ModuleType) -> None:
    outcome = pool.run(driver.orders(workload(), [0, 3, 7], 4, "1f1b", 3))
    assert sorted(outcome.steps) == [0, 1]
    for rank, events in outcome.steps.items():
        assert [event["step"] for event in events] == [0, 1, 2]
        for event in events:
            parts = event["compute_s"] + event["transfer_s"] + event["idle_s"]
            assert parts == pytest.approx(event["iteration_s"])
            layers = event["forward_s"] + event["backward_s"] + event["optimizer_s"]
            assert 0 < layers <= event["compute_s"] * 1.000001
            assert (event["loss"] is None) == (rank == 0)
            assert event["samples"] == 7
            assert event["peak_memory_bytes"] > 10_000_000


def test_told_to_stop_all_ranks_end_after_the_same_step(
    workload: Workloads, pool: Any, driver: ModuleType
) -> None:
    def stop_after_two(pool: Any, rank: int, event: dict[str, Any]) -> None:
        if rank == 0 and event.get("step") == 1:
            for process in pool.processes:
                process.send({"op": "stop"})

    outcome = pool.run(driver.orders(workload(), [0, 2, 5, 7], 4, "1f1b", 100_000), stop_after_two)
    assert not outcome.errors, outcome.errors
    ends = {event["steps"] for event in outcome.results.values()}
    assert len(ends) == 1
    assert 3 <= ends.pop() < 100_000
    assert {len(events) for events in outcome.steps.values()} == {outcome.results[0]["steps"]}


def test_a_layer_that_raises_is_told_with_its_phase_and_the_others_lost_it(
    workload: Workloads, pool: Any, driver: ModuleType
) -> None:
    outcome = pool.run(driver.orders(workload(replace=RAISING), [0, 3, 5, 7], 4, "1f1b", 5))
    assert sorted(outcome.errors) == [0, 1, 2]
    cause = outcome.errors[1]
    assert cause["type"] == "RunError"
    assert cause["message"] == "step 1, forward of microbatch 2: ValueError: bad sample"
    assert "in forward" in cause["traceback"]
    for rank in (0, 2):
        assert outcome.errors[rank]["type"] == "PeerLostError"
        assert "the connection to rank 1 (127.0.0.1) is gone" in outcome.errors[rank]["message"]
        assert outcome.errors[rank]["message"].startswith("step ")


def test_a_rank_that_is_killed_is_missed_by_its_neighbour(
    workload: Workloads, driver: ModuleType, tmp_path: Path
) -> None:
    def kill(pool: Any, rank: int, event: dict[str, Any]) -> None:
        if rank == 1 and event.get("step") == 2:
            pool.processes[1].popen.kill()

    pool = driver.Pool(2, tmp_path)
    try:
        outcome = pool.run(driver.orders(workload(), [0, 3, 7], 4, "1f1b", 100_000), kill)
    finally:
        pool.close()
    assert outcome.errors[1]["event"] == "exit"
    assert outcome.errors[0]["type"] == "PeerLostError"
    assert "rank 1 (127.0.0.1)" in outcome.errors[0]["message"]


def test_errors_before_the_start_name_their_phase(workload: Workloads, pool: Any, driver: ModuleType) -> None:
    spec = workload()
    wrong = [
        ({"interface": "wg7"}, [0, 3, 7], "RunError", "connect: there is no network interface 'wg7'"),
        ({"device": "cuda:0"}, [0, 7], "MismatchError", "device cuda:0 of the plan can't be used"),
        ({"workload": {**spec, "path": "/no/such/train.py"}}, [0, 7], "WorkloadError", "train.py"),
        ({"microbatches": 9}, [0, 7], "WorkloadError", "9 microbatches"),
    ]
    for options, cuts, kind, words in wrong:
        order = with_fields(driver.orders(spec, cuts, 4, "1f1b", 2)[0], **{"ranks": 2, **options})
        event = pool.run([order]).errors[0]
        assert event["type"] == kind, event
        assert words in event["message"]


def test_output_of_another_shape_than_tried_is_an_error(
    workload: Workloads, pool: Any, driver: ModuleType
) -> None:
    ragged = (
        "return x.relu(), ids, skip",
        "self.calls = getattr(self, 'calls', 0) + (not hasattr(x, 'fake_mode'))\n"
        "        return (x.relu() if self.calls < 5 else x[:, :3]), ids, skip",
    )
    outcome = pool.run(driver.orders(workload(replace=ragged), [0, 3, 7], 4, "1f1b", 5))
    assert "step 1, forward of microbatch" in outcome.errors[0]["message"]
    assert "its output is [2, 3, 8] float32" in outcome.errors[0]["message"]
