"""Ranks over torch's own Gloo and over ours: the same losses, and a peer that is gone is named soon."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from tests.attack.rank_forms import FORMS, orders
from tests.helpers.orders import with_fields

Workloads = Callable[..., dict[str, Any]]
STEPS = 3


def over(backend: str, rank_orders: list[Any]) -> list[Any]:
    return [replace(order, world=replace(order.world, backend=backend)) for order in rank_orders]


@pytest.mark.parametrize("form", FORMS)
def test_what_carries_the_tensors_changes_no_loss(form: str, workload: Workloads, pool: Any) -> None:
    """To the last bit; with staleness what workers see of each other depends on when they push."""
    rank_orders = orders(form, workload(), STEPS, encrypt=False)
    done = {name: pool.run(over(name, rank_orders)) for name in ("skyctl", "gloo")}
    for outcome in done.values():
        assert not outcome.errors, outcome.errors
    ours, gloo = done["skyctl"].steps, done["gloo"].steps
    assert ours.keys() == gloo.keys()
    if form != "staleness":
        assert [[event["loss"] for event in ours[rank]] for rank in ours] == [
            [event["loss"] for event in gloo[rank]] for rank in ours
        ]


def test_equal_shares_of_a_ring_are_summed_by_gloo_itself(workload: Workloads, pool: Any) -> None:
    """It adds in an order of its own, so losses are equal but for rounding; and all ranks go on alike."""
    spec = workload()
    rank_orders = orders("data", spec, STEPS, encrypt=False, backend="gloo")
    assert [group.ring for order in rank_orders for group in order.sync.groups] == [(0, 1, 2, 3)] * 4
    done, planned = pool.run(rank_orders), pool.run(orders("data", spec, STEPS, encrypt=False))
    assert {**done.errors, **planned.errors} == {}
    for rank, events in done.steps.items():
        losses = [event["loss"] for event in events]
        assert losses == pytest.approx([event["loss"] for event in planned.steps[rank]], rel=1e-5)


@pytest.mark.parametrize("form", ["pipeline", "data"])
def test_over_gloo_a_rank_that_dies_is_named_at_once(
    form: str, workload: Workloads, driver: ModuleType, tmp_path: Path
) -> None:
    """By one that it exchanged anything with: neighbours in a pipeline, or on the ring of a sum."""
    killed: list[float] = []

    def kill(running: Any, rank: int, event: dict[str, Any]) -> None:
        if event["event"] == "step" and event["step"] == 1 and rank == 1 and not killed:
            killed.append(time.monotonic())
            os.kill(running.processes[1].popen.pid, signal.SIGKILL)

    ranks = driver.Pool(4, tmp_path)
    try:
        ended = ranks.run(orders(form, workload(), 1000, encrypt=False, backend="gloo"), kill)
    finally:
        ranks.close()
    assert sorted(ended.errors) == [0, 1, 2, 3]
    assert ended.errors[1]["event"] == "exit"
    assert [ended.errors[rank]["type"] for rank in (0, 2)] == ["PeerLostError"] * 2
    messages = {rank: ended.errors[rank]["message"] for rank in (0, 2)}
    # the first to know names it; that one's own end may reach the other sooner than the dead rank's
    assert any("rank 1" in message for message in messages.values()), messages


def test_over_gloo_a_pair_with_another_secret_is_refused(
    workload: Workloads, pool: Any, driver: ModuleType
) -> None:
    rank_orders = over("gloo", driver.orders(workload(), [0, 3, 7], 4, "1f1b", 2))
    rank_orders = [
        with_fields(order, secrets={str(1 - n): f"the secret of {n}"}) for n, order in enumerate(rank_orders)
    ]
    ended = pool.run(rank_orders)
    assert {error["type"] for error in ended.errors.values()} <= {"PeerUnreachableError", "PeerLostError"}
    assert "does not know the secret of their pair" in " ".join(e["message"] for e in ended.errors.values())


def test_a_users_functions_know_their_rank_and_collectives_are_refused(
    workload: Workloads, pool: Any, driver: ModuleType
) -> None:
    asks = "import torch.distributed as dist\n\n\ndef loss(outputs, targets):\n"
    body = (
        f"{asks}    assert (dist.get_rank(), dist.get_world_size()) in [(0, 1), (1, 2)], 'who is this'\n"
        "    dist.all_reduce(targets) if dist.get_world_size() > 1 else None\n"
    )
    spec = workload(replace=("def loss(outputs, targets):\n", body))
    ended = pool.run(driver.orders(spec, [0, 3, 7], 4, "1f1b", 2))
    assert "allreduce over all ranks of a run is refused" in ended.errors[1]["message"], ended.errors
