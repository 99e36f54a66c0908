"""Ranks that are killed in a step, as real processes: the others end that step, with the same sum."""

from __future__ import annotations

import contextlib
import random
import signal
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from tests.helpers.orders import with_fields
from tests.worker.elastic_pipelines import pipelines, trees_of
from tests.worker.sums import RouteEdges, ring, star
from tests.worker.test_early_stop import GIVEN_LOSSES, VALIDATION
from tests.worker.workloads import edit_workload

from skyctl.agent.task_orders import write_request
from skyctl.checkpoint.node import safetensors
from skyctl.worker.rank_order import (
    ElasticOrder,
    JoinOrder,
    RankOrder,
    RoutePlace,
)
from skyctl.worker.rank_requests import AdmitRequest
from skyctl.workload.recipe import Recipe
from skyctl.workload.workload_spec import WorkloadSpec

Workloads = Callable[..., dict[str, Any]]
LAYERS = 7


def elastic(
    orders: Sequence[RankOrder], routes: Sequence[RouteEdges], *, witness: bool = False, least: int = 1
) -> list[RankOrder]:
    """The same orders, for ranks that may leave: all know all routes, and reach each other."""
    shares = {rank: order.microbatch_range for rank, order in enumerate(orders)}
    elastic_order = ElasticOrder(
        {rank: rank for rank in shares}, shares, {0: trees_of(routes)}, least, witness
    )
    return [
        with_fields(
            replace(order, elastic=elastic_order, weights=True),
            hosts={str(peer): "127.0.0.1" for peer in range(len(orders)) if peer != rank},
        )
        for rank, order in enumerate(orders)
    ]


def joining(orders: Sequence[RankOrder], routes: Sequence[RouteEdges], folder: Path) -> RankOrder:
    """The order of one rank more, which joins those; of them all."""
    rank = len(orders)
    members = elastic(orders, routes)
    first = members[0]
    assert first.elastic is not None
    assert first.sync is not None
    [group] = first.sync.groups
    nowhere = tuple(RoutePlace(share, (), None, None, ()) for share, *_ in routes)
    return replace(
        first,
        pipeline=rank,
        microbatch_range=(0, 1),
        compare_batches=False,
        sync=replace(first.sync, groups=(replace(group, routes=nowhere),)),
        elastic=replace(
            first.elastic,
            pipelines={number: number for number in range(rank + 1)},
            join=JoinOrder(folder, 0.01, dict.fromkeys(range(LAYERS), 1 << 20)),
        ),
        world=replace(first.world, rank=rank, ranks=rank + 1, hosts=dict.fromkeys(range(rank), "127.0.0.1")),
    )


class Killer:
    """Kills a rank's process a while after it has told of a step."""

    def __init__(self, victims: Sequence[int], step: int, delay_s: float, sig: int = signal.SIGKILL) -> None:
        self.victims, self.step, self.delay_s, self.sig = victims, step, delay_s, sig
        self.at: float | None = None
        self.steps: list[tuple[float, int, int]] = []

    def __call__(self, pool: Any, rank: int, event: dict[str, Any]) -> None:
        if event["event"] != "step":
            return
        self.steps.append((time.monotonic(), rank, event["step"]))
        if event["step"] == self.step and self.at is None:
            self.at = time.monotonic() + self.delay_s
            threading.Timer(self.delay_s, self._strike, (pool,)).start()

    def _strike(self, pool: Any) -> None:
        self.at = time.monotonic()
        for victim in self.victims:
            pool.processes[victim].popen.send_signal(self.sig)


def weights_of(result: dict[str, Any]) -> dict[str, torch.Tensor]:
    return safetensors.load(Path(result["weights"]))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("format_", "victims"),
    [
        pytest.param("fixed32", [2], id="one"),
        pytest.param("fixed32", [0], id="the arbiter", marks=pytest.mark.matrix),
        pytest.param("float32", [1, 3], id="two at once, with a witness"),
    ],
)
def test_the_others_end_the_step_and_the_run(
    workload: Workloads, driver: ModuleType, tmp_path: Path, format_: str, victims: list[int]
) -> None:
    spec = workload(batch_size=8)
    routes = ring(4) if format_ == "fixed32" else star(4)
    orders = driver.side_by_side(spec, LAYERS, [1, 3, 2, 2], routes, 40, sync={"format": format_})
    witness = len(victims) == 2
    whole = driver.Pool(4, tmp_path)
    try:
        undisturbed = whole.run(elastic(orders, routes))
        assert not undisturbed.errors
        killer = Killer(victims, 5, random.Random(format_ + str(victims)).random() * 0.02)
        done = whole.run(elastic(orders, routes, witness=witness), killer)
    finally:
        whole.close()
    left = sorted(set(range(4)) - set(victims))
    assert sorted(done.results) == left, done.errors
    expected = weights_of(undisturbed.results[0])
    for rank in left:
        assert [event["step"] for event in done.steps[rank]] == list(range(40))
        for name, tensor in weights_of(done.results[rank]).items():
            if format_ == "fixed32":
                assert torch.equal(tensor, expected[name]), name
            else:
                torch.testing.assert_close(tensor, expected[name], rtol=1e-4, atol=1e-5)


@pytest.mark.matrix  # tests/faults/test_elastic.py has one of these
@pytest.mark.parametrize("victim", [0, 1, 3])
def test_a_pipeline_that_loses_a_stage_leaves_and_the_other_makes_its_microbatches(
    workload: Workloads, driver: ModuleType, tmp_path: Path, victim: int
) -> None:
    spec = workload(batch_size=8)
    orders = pipelines(driver, spec, [0, 3, LAYERS], [5, 3], 40)
    pool = driver.Pool(4, tmp_path)
    try:
        undisturbed = pool.run(orders)
        assert not undisturbed.errors
        killer = Killer([victim], 5, random.Random(victim).random() * 0.03)
        done = pool.run(orders, killer)
    finally:
        pool.close()
    left = [2, 3] if victim < 2 else [0, 1]
    assert sorted(done.results) == left, done.errors
    for rank in left:
        assert [event["step"] for event in done.steps[rank]] == list(range(40))
        expected = weights_of(undisturbed.results[rank])
        for name, tensor in weights_of(done.results[rank]).items():
            torch.testing.assert_close(tensor, expected[name], rtol=1e-4, atol=1e-5)
    losses = [event["loss"] for event in done.steps[left[1]]]
    expected_losses = [event["loss"] for event in undisturbed.steps[left[1]]]
    assert losses == pytest.approx(expected_losses, rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("format_", ["fixed32", pytest.param("float32", marks=pytest.mark.matrix)])
def test_a_rank_joins_and_has_the_weights_of_all(driver: ModuleType, tmp_path: Path, format_: str) -> None:
    """It enters at a step's boundary, makes its share, and goes on as the others leave."""
    spec, steps = sleeping(tmp_path, batch_size=8), 150
    routes = ring(3)
    plain = driver.side_by_side(spec, 2, [3, 2, 3], routes, steps, sync={"format": format_})
    pool = driver.Pool(4, tmp_path)
    asked = []

    def watch(pool: Any, rank: int, event: dict[str, Any]) -> None:
        if event["event"] != "step" or rank != 1:
            return
        if event["step"] == 5:
            pool.admit(joining(plain, routes, tmp_path / "given"))
            slow_down(tmp_path, 1, 0.3)  # it comes before the last step, however long its start takes
        if pool.outcome.steps.get(3) and not asked:
            asked.append(event["step"])
            (tmp_path / "slow-1").unlink()
            pool.processes[0].popen.send_signal(signal.SIGKILL)

    try:
        undisturbed = pool.run(elastic(plain, routes))
        assert not undisturbed.errors
        done = pool.run(elastic(plain, routes), watch)
    finally:
        pool.close()
    assert sorted(done.results) == [1, 2, 3], done.errors
    made = [event["step"] for event in done.steps[3]]
    assert made == list(range(made[0], steps))
    assert any(event["samples"] for event in done.steps[3])
    expected = weights_of(undisturbed.results[0])
    for rank in (1, 2, 3):
        for name, tensor in weights_of(done.results[rank]).items():
            if format_ == "fixed32":
                assert torch.equal(tensor, expected[name]), (rank, name)
            else:
                torch.testing.assert_close(tensor, expected[name], rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_who_validates_after_the_first_rank_is_lost_knows_the_best_so_far(
    workload: Workloads, driver: ModuleType, tmp_path: Path
) -> None:
    """Every validation finds the same loss, so none but the first is the best, and patience goes on."""
    train, validate = GIVEN_LOSSES
    slow = validate.replace("        return", "        __import__('time').sleep(0.1)\n        return", 1)
    spec = edit_workload(
        workload(batch_size=8), (train, slow), text=VALIDATION.replace("GIVEN", str([2.0] * 8))
    )
    routes, folder = ring(3), tmp_path / "r"
    recipe = Recipe(validate_every=2, total_steps=16, patience=4).to_dict()
    kept = {"folder": str(folder), "every": 0, "keep": 2, "at_end": True}
    plain = driver.side_by_side(
        spec, LAYERS, [2, 1, 1], routes, 16, sync={"format": "fixed32"}, recipe=recipe, checkpoint=kept
    )
    pool = driver.Pool(3, tmp_path)
    try:
        done = pool.run(elastic(plain, routes), Killer([0], 4, 0.0))
    finally:
        pool.close()
    assert sorted(done.results) == [1, 2], done.errors
    validated = [(rank, event["step"]) for rank, event in done.order if event["event"] == "validation"]
    assert validated[0] == (0, 1)
    assert validated[-1] == (1, 9)
    assert [done.results[rank]["steps"] for rank in (1, 2)] == [11, 11]
    assert done.results[1]["stopped_early"]


@pytest.mark.slow
def test_a_rank_that_never_comes_is_waited_for_no_longer_than_was_said(
    driver: ModuleType, tmp_path: Path
) -> None:
    """The others make their steps; then nobody listens for it as a member."""
    plain = driver.side_by_side(sleeping(tmp_path, batch_size=8), 2, [4, 4], ring(2), 60)
    pool = driver.Pool(2, tmp_path)
    found: list[tuple[str, int]] = []
    refused: list[int] = []

    def watch(pool: Any, rank: int, event: dict[str, Any]) -> None:
        if event["event"] == "stored" and event["key"].endswith("/2"):
            found.append(driver.listening_at(event))
        if rank != 0 or event["event"] != "step":
            return
        if event["step"] == 5:
            pool.processes[0].send(write_request(AdmitRequest(2, "127.0.0.1", "nobody knows it", 0.3)))
        if len(found) == 2 and not refused:
            with contextlib.suppress(ConnectionRefusedError), socket.create_connection(found[1]):
                return
            refused.append(event["step"])

    try:
        done = pool.run(elastic(plain, ring(2)), watch)
    finally:
        pool.close()
    assert sorted(done.results) == [0, 1], done.errors
    assert len(found) == 2
    assert refused


SLEEPS = """
import os, time
from pathlib import Path

import torch
from torch import nn
import torch.distributed as dist


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        try:
            time.sleep(float(Path(__file__).with_name(f"slow-{dist.get_rank()}").read_text()))
        except FileNotFoundError:
            time.sleep(0.01)
        return x + torch.tanh(self.linear(x))


def model():
    return [Layer(), nn.Linear(8, 3)]


def data(batch_size, seed):
    generator = torch.Generator().manual_seed(seed)
    while True:
        yield torch.randn(batch_size, 8, generator=generator), torch.zeros(batch_size, dtype=torch.int64)
"""


def sleeping(folder: Path, *, batch_size: int) -> dict[str, Any]:
    """A workload whose first layer takes a while; as many seconds as a file ``slow-RANK`` next to it says."""
    path = folder / "train.py"
    path.write_text(SLEEPS)
    return WorkloadSpec(source=str(path), path=str(path), batch_size=batch_size, seed=3).to_dict()


def slow_down(folder: Path, rank: int, layer_s: float) -> None:
    """From now on that workload's first layer takes so long on that rank."""
    (folder / "slow").write_text(str(layer_s))
    (folder / "slow").rename(folder / f"slow-{rank}")


@pytest.mark.slow
def test_shares_follow_a_rank_that_becomes_slow(driver: ModuleType, tmp_path: Path) -> None:
    """It soon has few samples, and the weights are the same."""
    spec = sleeping(tmp_path, batch_size=24)
    routes = ring(3)
    plain = driver.side_by_side(spec, 2, [8, 8, 8], routes, 24, sync={"format": "fixed32"})
    orders = [
        replace(order, elastic=replace(order.elastic, dynamic=True)) for order in elastic(plain, routes)
    ]

    def watch(_pool: Any, rank: int, event: dict[str, Any]) -> None:
        if event["event"] == "step" and event["step"] == 11 and rank == 1:
            slow_down(tmp_path, 1, 0.1)

    pool = driver.Pool(3, tmp_path)
    try:
        undisturbed = pool.run(elastic(plain, routes))
        done = pool.run(orders, watch)
    finally:
        pool.close()
    assert not undisturbed.errors
    assert not done.errors
    samples = [event["samples"] for event in done.steps[1]]
    assert max(samples[-4:]) <= 5, samples
    for step, events in enumerate(zip(*done.steps.values(), strict=True)):
        assert sum(event["samples"] for event in events) == 24, step
    expected = weights_of(undisturbed.results[0])
    for name, tensor in weights_of(done.results[2]).items():
        assert torch.equal(tensor, expected[name]), name
