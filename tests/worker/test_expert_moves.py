"""Experts move as loads drift: what pays, losses as on one device, all ranks agree, a record is followed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from tests.worker.expert_hosts import ASKED, GIVEN, HostPool, Hosts, recipe, spec_of
from tests.worker.reference import train
from tests.worker.sums import star
from tests.worker.test_experts import SOURCE

from skyctl.device.device_timer import DeviceTimer
from skyctl.experts.host_messages import BeginStep, EndStep, HandOver, HostAnswer, NotDone, StateWanted
from skyctl.worker.expert_orders import HostAddress
from skyctl.worker.experts.expert_host import ExpertHost
from skyctl.worker.experts.expert_loads import WINDOW_STEPS, moves_that_pay
from skyctl.workload.workload import load_workload
from skyctl.workload.workload_spec import WorkloadSpec

STEPS = 40
HOLDERS = {1: [0, 1, 0, 1, 0, 1], 2: [1, 1, 1, 0, 0, 0]}
POPULAR = (
    "class First(nn.Linear):\n",
    "class First(nn.Linear):\n    def __init__(self, *sizes):\n"
    "        super().__init__(*sizes)\n        nn.init.constant_(self.bias, 3.0)\n",
)
"""All tokens are much alike, so that the gate prefers some experts."""


@pytest.fixture(scope="module")
def host_pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HostPool]:
    pool = HostPool(tmp_path_factory.mktemp("hosts"), 2)
    try:
        yield pool
    finally:
        pool.close()


@pytest.fixture
def spec(tmp_path: Path) -> dict[str, Any]:
    path = tmp_path / "train.py"
    source = SOURCE.replace(*POPULAR)
    assert source != SOURCE
    path.write_text(source)
    return spec_of(path)


def moved(holders: Mapping[int, Sequence[int]], moves: Sequence[Mapping[str, Any]]) -> dict[int, list[int]]:
    """The hosts of experts after these moves, by layer."""
    after = {layer: [*places] for layer, places in holders.items()}
    for move in moves:
        after[move["layer"]][move["expert"]] = move["host"]
    return after


def slowest(counts: Sequence[int], holders: Sequence[int]) -> int:
    """The tokens of the host that has most; all are as fast."""
    sums = [0, 0]
    for count, place in zip(counts, holders, strict=True):
        sums[place] += count
    return max(sums)


def check_moves(seen: Mapping[str, Any]) -> None:
    """By the loads of the whole run, the slowest hosts are faster after the moves; no training was lost."""
    moves = seen["record"]["moves"]
    assert moves
    assert all(move["copied"] == move["step"] and move["step"] % WINDOW_STEPS == 0 for move in moves)
    after = moved(HOLDERS, moves)
    counts = {layer: seen["tokens"][str(layer)] for layer in HOLDERS}
    before_s, after_s = (
        sum(slowest(counts[layer], holders[layer]) for layer in HOLDERS) for holders in (HOLDERS, after)
    )
    assert after_s < before_s, (moves, counts)


def test_experts_move_where_loads_are_skewed_and_the_record_makes_the_same_losses(
    pool: Any, host_pool: HostPool, driver: ModuleType, spec: dict[str, Any]
) -> None:
    wanted = train(spec, 4, recipe(STEPS))
    orders = driver.orders(spec, [0, 4], 4, "1f1b", STEPS, recipe=recipe(STEPS))
    with Hosts(orders, HOLDERS, host_pool.take(2), room=6) as hosts:
        outcome = pool.run(hosts.orders)
    assert not outcome.errors, outcome.errors
    assert outcome.losses == pytest.approx(wanted.losses, rel=1e-5)
    seen = outcome.results[0]["experts"]
    check_moves(seen)
    assert not seen["record"]["forwards"]
    with Hosts(orders, HOLDERS, host_pool.take(2), record=seen["record"]) as hosts:
        again = pool.run(hosts.orders)
    assert not again.errors, again.errors
    assert again.losses == outcome.losses
    assert again.results[0]["experts"] == seen


@pytest.mark.parametrize("dies", [ASKED, GIVEN])
def test_a_host_dies_while_an_expert_moves(
    pool: Any, host_pool: HostPool, mortals: HostPool, driver: ModuleType, spec: dict[str, Any], dies: str
) -> None:
    wanted = train(spec, 4, recipe(STEPS))
    orders = driver.orders(spec, [0, 4], 4, "1f1b", STEPS, recipe=recipe(STEPS))
    with Hosts(orders, HOLDERS, mortals.take(2), room=6, dies={0: dies}) as hosts:
        outcome = pool.run(hosts.orders)
    assert not outcome.errors, outcome.errors
    seen = outcome.results[0]["experts"]
    assert seen["lost"]["host-0"]["step"] == WINDOW_STEPS
    assert outcome.losses[:WINDOW_STEPS] == pytest.approx(wanted.losses[:WINDOW_STEPS], rel=1e-5)
    with Hosts(orders, HOLDERS, host_pool.take(2), record=seen["record"]) as hosts:
        again = pool.run(hosts.orders)
    assert not again.errors, again.errors
    assert again.losses == outcome.losses


def test_data_parallel_ranks_agree_on_moves(
    pool: Any, host_pool: HostPool, driver: ModuleType, spec: dict[str, Any]
) -> None:
    wanted = train(spec, 4, recipe(STEPS))
    orders = driver.side_by_side(spec, 4, [3, 1], star(2), STEPS, recipe=recipe(STEPS))
    with Hosts(orders, HOLDERS, host_pool.take(2), room=6) as hosts:
        outcome = pool.run(hosts.orders)
    assert not outcome.errors, outcome.errors
    assert outcome.losses == pytest.approx(wanted.losses, rel=1e-5)
    seen = {rank: result["experts"] for rank, result in outcome.results.items()}
    check_moves(seen[0])
    assert not seen[1]["record"]["moves"]
    assert not any(figures["record"]["forwards"] for figures in seen.values())
    with Hosts(orders, HOLDERS, host_pool.take(2)) as hosts:
        told = [
            replace(order, experts=replace(order.experts, record=seen[rank]["record"]))
            for rank, order in enumerate(hosts.orders)
        ]
        again = pool.run(told)
    assert not again.errors, again.errors
    assert again.losses == outcome.losses
    assert {rank: result["experts"] for rank, result in again.results.items()} == seen


def hosts(*layer_s: float, room: int = 9, byte_s: float = 0.0) -> dict[int, HostAddress]:
    return {
        place: HostAddress(f"h{place}", "127.0.0.1", 1, "", {1: seconds}, {1: room}, byte_s)
        for place, seconds in enumerate(layer_s)
    }


def test_experts_go_to_where_the_slowest_host_is_fastest() -> None:
    assert moves_that_pay(1, [400, 400, 400, 400], [0, 0, 0, 0], hosts(1.0, 1.0), [1] * 4, 10) == {0: 1, 1: 1}
    assert moves_that_pay(1, [400, 400, 400, 400], [0, 0, 1, 1], hosts(4.0, 1.0), [1] * 4, 10) == {0: 1}
    assert moves_that_pay(1, [400, 400, 400, 400], [0, 0, 1, 1], hosts(1.0, 1.0), [1] * 4, 10) == {}


def test_experts_stay_where_there_is_no_room_no_other_host_no_load_or_nothing_sure() -> None:
    assert moves_that_pay(1, [400, 400, 9], [0, 0, 1], hosts(1.0, 1.0, room=1), [1] * 3, 10) == {}
    assert moves_that_pay(1, [400, 400, 9], [0, 0, 1], hosts(1.0), [1] * 3, 10) == {}
    assert moves_that_pay(1, [0, 0, 0], [0, 0, 1], hosts(1.0, 1.0), [1] * 3, 10) == {}
    assert moves_that_pay(1, [4, 4, 1], [0, 0, 1], hosts(1.0, 1.0), [1] * 3, 10) == {}


def test_a_move_is_made_only_if_the_steps_left_pay_for_it() -> None:
    # One of two experts leaves: the slowest host takes 0.5 s a step less, 0.07 s of which may be chance.
    args = (1, [400, 400], [0, 0], hosts(1.0, 1.0, byte_s=0.01), [100, 100])
    assert moves_that_pay(*args, 4) == {}  # 2 s on both lines
    assert moves_that_pay(*args, 6) == {0: 1}


def test_ranks_wait_for_an_expert_until_it_comes_or_is_called_off(spec: dict[str, Any]) -> None:
    told: list[tuple[int, HostAnswer]] = []
    refused: list[tuple[int, str]] = []
    host = ExpertHost(
        load_workload(WorkloadSpec.from_dict(spec)),
        recipe(STEPS),
        STEPS,
        torch.device("cpu"),
        DeviceTimer(1.0, single_thread=True, device=torch.device("cpu")),
        {0: (1,), 1: (1,), 2: (1,)},
        lambda rank, answer, _tensors: told.append((rank, answer)),
        lambda rank, why: refused.append((rank, why)),
    )
    host.handle(0, HandOver(0, 1, 4, epoch=1, arrives=True), [])
    for rank in range(3):
        host.handle(rank, EndStep(1, 0), [])
    assert [answer.held for _, answer in told] == [((1, 4, 1),)] * 3  # type: ignore[union-attr]
    told.clear()
    host.handle(1, StateWanted(2, 1, 4), [])
    assert not told
    host.handle(0, BeginStep(2, 1), [])
    assert [(rank, type(answer)) for rank, answer in told] == [(1, NotDone)]
    host.handle(2, HandOver(2, 1, 4, epoch=2, arrives=False), [])
    assert [rank for rank, _ in refused] == [2]
    assert "which this host does not hold" in refused[0][1]
