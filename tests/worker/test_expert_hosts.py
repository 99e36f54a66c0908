"""Experts on hosts: training is that of one device; hosts are killed, do not answer, or send garbage."""

from __future__ import annotations

import signal
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from tests.worker.expert_hosts import HostPool, Hosts, recipe, spec_of
from tests.worker.reference import train
from tests.worker.sums import star
from tests.worker.test_experts import SOURCE
from tests.worker.workloads import edit_workload
from torch import nn

import skyctl
from skyctl.checkpoint.node import safetensors
from skyctl.errors import RunError, WorkloadError
from skyctl.experts.host_gate import HostGate
from skyctl.experts.host_messages import (
    TRUNK_REQUESTS,
    Adopt,
    Adopted,
    EndStep,
    Forward,
    Result,
    StepEnded,
    read_message,
    to_header,
)
from skyctl.experts.message_link import MessageLink
from skyctl.remote.credentials import make_tls_certificate
from skyctl.worker.expert_orders import ExpertsOrder
from skyctl.worker.experts.expert_check import check_expert_modules, check_expert_order
from skyctl.workload.recipe import Recipe

STEPS = 30
HOLDERS = {1: [0, 1, 0, 1, 0, 1], 2: [1, 1, 1, 0, 0, 0]}
HELD_OUT = """
def validation(batch_size, seed):
    generator = torch.Generator().manual_seed(seed + 99)
    x = torch.randn(batch_size, 5, generator=generator)
    yield x, x[:, :3].argmax(1)
"""
TIRED = """class Tired(nn.Linear):
    def __init__(self):
        super().__init__(8, 8)
        self.calls = 0
    def forward(self, x):
        if not hasattr(x, "fake_mode"):
            self.calls += 1
        if self.calls > 20:
            raise ValueError("enough")
        return super().forward(x)

class Mixture"""
SGD = ("torch.optim.AdamW(parameters, lr=0.01)", "torch.optim.SGD(parameters, lr=0.1, momentum=0.9)")


@pytest.fixture(scope="module")
def host_pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HostPool]:
    """Three hosts, for all tests."""
    pool = HostPool(tmp_path_factory.mktemp("hosts"), 3)
    try:
        yield pool
    finally:
        pool.close()


def workload(folder: Path, *edits: tuple[str, str]) -> dict[str, Any]:
    source = SOURCE
    for old, new in edits:
        assert old in source
        source = source.replace(old, new)
    path = folder / "train.py"
    path.write_text(source)
    return spec_of(path)


def pipeline(driver: ModuleType, spec: dict[str, Any], cuts: Sequence[int], **options: Any) -> Any:
    return driver.orders(spec, list(cuts), 4, "1f1b", STEPS, recipe=recipe(STEPS), **options)


def test_a_pipeline_trains_as_one_device_and_twice_the_same(
    pool: Any, host_pool: HostPool, driver: ModuleType, tmp_path: Path
) -> None:
    spec = workload(tmp_path)
    wanted = train(spec, 4, recipe(STEPS))
    seen = []
    for cuts in ([0, 4], [0, 2, 4], [0, 2, 4]):
        with Hosts(pipeline(driver, spec, cuts), HOLDERS, host_pool.take(2)) as hosts:
            outcome = pool.run(hosts.orders)
        assert not outcome.errors, outcome.errors
        assert outcome.losses == pytest.approx(wanted.losses, rel=1e-5)
        seen.append(outcome.losses)
    assert seen[1] == seen[2]


def test_data_parallel_ranks_use_the_same_hosts(
    pool: Any, host_pool: HostPool, driver: ModuleType, tmp_path: Path
) -> None:
    spec = workload(tmp_path, SGD)
    wanted = train(spec, 4, recipe(STEPS))
    seen, repeats = [], 0
    for form in ("float32", "float32", "fixed32"):  # the last one makes a step again where numbers do not fit
        orders = driver.side_by_side(
            spec, 4, [3, 1], star(2), STEPS, recipe=recipe(STEPS), sync={"format": form}
        )
        with Hosts(orders, HOLDERS, host_pool.take(3)) as hosts:
            outcome = pool.run(hosts.orders)
        assert not outcome.errors, outcome.errors
        assert outcome.losses == pytest.approx(wanted.losses, rel=1e-5)
        seen.append(outcome.losses)
        repeats = sum(event.get("repeats", 0) for event in outcome.steps[0])
    assert seen[0] == seen[1]
    assert repeats


def test_a_killed_host_is_gone_on_without_and_the_record_makes_the_same_losses(
    pool: Any, host_pool: HostPool, mortals: HostPool, driver: ModuleType, tmp_path: Path
) -> None:
    spec = workload(tmp_path)
    wanted = train(spec, 4, recipe(STEPS))
    taken = [*host_pool.take(1), *mortals.take(2)]
    holders = {1: [0, 1, 2, 0, 1, 2], 2: [2, 1, 0, 2, 1, 0]}

    def kill(_pool: Any, _rank: int, event: dict[str, Any]) -> None:
        if event["event"] == "step" and event["step"] in (8, 16):
            taken[event["step"] // 8].kill()

    with Hosts(pipeline(driver, spec, [0, 4]), holders, taken) as hosts:
        outcome = pool.run(hosts.orders, kill)
    assert not outcome.errors, outcome.errors
    assert outcome.losses[:8] == pytest.approx(wanted.losses[:8], rel=1e-5)
    record = outcome.results[0]["experts"]["record"]
    steps = sorted({move["step"] for move in record["moves"]})
    assert len(steps) == 2, record["moves"]
    assert [move["host"] for move in record["moves"] if move["step"] == steps[1]] == [0] * 6
    assert sum(outcome.losses[-3:]) < sum(outcome.losses[:3])
    with Hosts(pipeline(driver, spec, [0, 4]), holders, host_pool.take(3), record=record) as hosts:
        outcome_again = pool.run(hosts.orders)
    assert not outcome_again.errors, outcome_again.errors
    assert outcome_again.losses == outcome.losses
    assert outcome_again.results[0]["experts"]["record"] == record


def test_data_parallel_ranks_lose_a_host(
    pool: Any, host_pool: HostPool, mortals: HostPool, driver: ModuleType, tmp_path: Path
) -> None:
    spec = workload(tmp_path)
    taken = [*host_pool.take(2), *mortals.take(1)]
    holders = {1: [0, 1, 2, 0, 1, 2], 2: [2, 1, 0, 2, 1, 0]}

    def kill(_pool: Any, rank: int, event: dict[str, Any]) -> None:
        if event["event"] == "step" and (rank, event["step"]) == (0, 8):
            taken[2].kill()

    orders = driver.side_by_side(spec, 4, [2, 2], star(2), STEPS, recipe=recipe(STEPS))
    with Hosts(orders, holders, taken) as hosts:
        outcome = pool.run(hosts.orders, kill)
    assert not outcome.errors, outcome.errors
    records = {rank: result["experts"]["record"] for rank, result in outcome.results.items()}
    assert len(records[0]["moves"]) == 4
    assert not records[1]["moves"]
    for result in outcome.results.values():
        assert list(result["experts"]["lost"]) == ["host-2"]
        assert not result["experts"]["record"]["masks"]["1.0"]["missing"]["29"]
    with Hosts(orders, holders, host_pool.take(3)) as hosts:
        again = [
            replace(order, experts=replace(order.experts, record=records[rank]))
            for rank, order in enumerate(hosts.orders)
        ]
        assert pool.run(again).losses == outcome.losses


def test_the_last_host_is_killed_and_the_rank_computes_the_experts_itself(
    pool: Any, host_pool: HostPool, mortals: HostPool, driver: ModuleType, tmp_path: Path
) -> None:
    spec = workload(tmp_path)
    taken = mortals.take(1)

    def kill(_pool: Any, _rank: int, event: dict[str, Any]) -> None:
        if event["event"] == "step" and event["step"] == 8:
            taken[0].kill()

    holders = {1: [0] * 6, 2: [0] * 6}
    with Hosts(pipeline(driver, spec, [0, 4]), holders, taken) as hosts:
        outcome = pool.run(hosts.orders, kill)
    assert not outcome.errors, outcome.errors
    record = outcome.results[0]["experts"]["record"]
    assert {move.get("host") for move in record["moves"]} == {None}
    with Hosts(pipeline(driver, spec, [0, 4]), holders, host_pool.take(1), record=record) as hosts:
        assert pool.run(hosts.orders).losses == outcome.losses


def test_with_a_tenth_of_the_calls_failing_no_step_is_aborted_and_the_record_makes_the_same_losses(
    pool: Any, host_pool: HostPool, driver: ModuleType, tmp_path: Path
) -> None:
    spec = workload(tmp_path, SGD)
    losses = []
    record = None
    for fail_every in (10, 0):
        orders = pipeline(driver, spec, [0, 4])
        with Hosts(orders, HOLDERS, host_pool.take(2), fail_every, record=record) as hosts:
            outcome = pool.run(hosts.orders)
        assert not outcome.errors, outcome.errors
        losses.append(outcome.losses)
        record = outcome.results[0]["experts"]["record"]
        assert len(record["forwards"]) > STEPS // 2
        assert record["backwards"]
    assert losses[0] == losses[1]


def test_checkpoints_are_those_of_one_device_whoever_holds_the_experts(
    pool: Any, host_pool: HostPool, driver: ModuleType, tmp_path: Path
) -> None:
    spec = edit_workload(workload(tmp_path), text=HELD_OUT)
    plan = Recipe(total_steps=8, lr_schedule="cosine", warmup_steps=2, validate_every=4, validate_batches=1)
    wanted = train(spec, 4, plan)
    folder = tmp_path / "checkpoints"
    keeps = {"folder": str(folder), "every": 4, "keep": 2, "at_end": True}
    options = {"recipe": plan, "tls": make_tls_certificate()}

    def orders(cuts: Sequence[int], **more: Any) -> Any:
        return driver.orders(spec, list(cuts), 4, "1f1b", 8, **options, **more)

    with Hosts(orders([0, 2, 4], checkpoint=keeps, weights=True), HOLDERS, host_pool.take(2)) as hosts:
        outcome = pool.run(hosts.orders)
    assert not outcome.errors, outcome.errors
    assert outcome.losses == pytest.approx(wanted.losses, rel=1e-5)
    assert outcome.validation == pytest.approx(wanted.validation, rel=1e-5)
    for result in outcome.results.values():
        for name, tensor in safetensors.load(result["weights"]).items():
            assert torch.allclose(tensor, wanted.weights[name], rtol=1e-4, atol=1e-6), name
    layers = {
        layer: entry["sha256"]
        for events in outcome.checkpoints.values()
        for event in events
        if event["step"] == 4
        for layer, entry in event["layers"].items()
    }
    resume = {"step": 4, "folder": str(folder), "layers": layers}
    with Hosts(orders([0, 4], resume=resume), HOLDERS, host_pool.take(2)) as hosts:
        for told in (hosts.orders, orders([0, 4], resume=resume)):
            outcome = pool.run(told)
            assert not outcome.errors, outcome.errors
            assert outcome.losses == pytest.approx(wanted.losses[4:], rel=1e-5)


def test_a_late_host_is_masked_until_it_answers_and_the_record_makes_the_same_losses(
    pool: Any, host_pool: HostPool, mortals: HostPool, driver: ModuleType, tmp_path: Path
) -> None:
    spec = workload(tmp_path)
    taken = [*host_pool.take(1), *mortals.take(1)]
    signals = {8: signal.SIGSTOP, 12: signal.SIGCONT}

    def stop(_pool: Any, _rank: int, event: dict[str, Any]) -> None:
        if event["event"] == "step" and event["step"] in signals:
            taken[1].popen.send_signal(signals[event["step"]])

    with Hosts(pipeline(driver, spec, [0, 4]), HOLDERS, taken, least_wait_s=0.5) as hosts:
        outcome = pool.run(hosts.orders, stop)
    assert not outcome.errors, outcome.errors
    record = outcome.results[0]["experts"]["record"]
    assert not record["moves"]
    for first in ("1.0", "2.0"):
        late = [n for n, host in enumerate(HOLDERS[int(first[0])]) if host]
        assert late in record["masks"][first]["missing"].values()
    assert any(not record["masks"]["1.0"]["missing"][str(step)] for step in range(13, STEPS))
    with Hosts(pipeline(driver, spec, [0, 4]), HOLDERS, host_pool.take(2), record=record) as hosts:
        assert pool.run(hosts.orders).losses == outcome.losses


def test_an_expert_whose_own_code_fails_ends_the_run_and_is_named(
    pool: Any, host_pool: HostPool, driver: ModuleType, tmp_path: Path
) -> None:
    spec = workload(tmp_path, ("lambda: nn.Linear(8, 8)", "Tired"))
    edit_workload(spec, ("class Mixture", TIRED))
    with Hosts(pipeline(driver, spec, [0, 4]), HOLDERS, host_pool.take(2)) as hosts:
        outcome = pool.run(hosts.orders)
    assert "ValueError: enough" in outcome.errors[0]["message"], outcome.errors
    assert outcome.errors[0]["message"].startswith("the experts of host-")
    assert len(outcome.steps[0]) > 1


class Stranger:
    """A host that proves itself, and then answers with other tensors than were asked for."""

    def __init__(self, secret: str) -> None:
        self.links: list[MessageLink] = []
        self.gate = HostGate(
            "127.0.0.1", {0: secret}, purpose="experts test of host-2", identity=None, admit=self.admit
        )

    def admit(self, _rank: int, link: MessageLink) -> None:
        self.links.append(link)

        def answer(header: dict[str, Any], tensors: list[torch.Tensor]) -> None:
            message = read_message(TRUNK_REQUESTS, header)
            if isinstance(message, Adopt):
                link.send(to_header(Adopted(message.call)))
            elif isinstance(message, Forward):
                link.send(to_header(Result(message.call)), [tensors[0][:, :3]])
            elif isinstance(message, EndStep):
                link.send(to_header(StepEnded(message.call, ())))

        link.start(answer, lambda _reason: None)

    def close(self) -> None:
        self.gate.close()
        for link in self.links:
            link.close()


def test_a_host_that_sends_garbage_is_named_and_lost(
    pool: Any, host_pool: HostPool, driver: ModuleType, tmp_path: Path
) -> None:
    stranger = Stranger("2 of 0")
    try:
        with Hosts(pipeline(driver, workload(tmp_path), [0, 4]), HOLDERS, host_pool.take(2)) as hosts:
            (order,) = hosts.orders
            assert order.experts is not None
            address = replace(order.experts.hosts[0], node="host-2", port=stranger.gate.port, secret="2 of 0")
            holders = {1: (0, 1, 2, 0, 1, 2), 2: (2, 2, 0, 1, 0, 1)}
            told = replace(order.experts, hosts=(*order.experts.hosts, address), holders=holders)
            outcome = pool.run([replace(order, experts=told)])
    finally:
        stranger.close()
    assert not outcome.errors, outcome.errors
    record = outcome.results[0]["experts"]["record"]
    assert [move["step"] for move in record["moves"]] == [1] * 4
    lost = outcome.results[0]["experts"]["lost"]
    assert list(lost) == ["host-2"]
    assert lost["host-2"]["why"].startswith("it gave float32[")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"recompute": True}, "computed again"),
        ({"schedule": "zero-bubble"}, "the schedule zero-bubble"),
        ({"recipe": Recipe(total_steps=STEPS, clip_norm=1.0)}, "clipping by the norm"),
    ],
)
def test_steps_that_can_not_be_made_are_refused(
    fields: dict[str, Any], message: str, driver: ModuleType, tmp_path: Path
) -> None:
    (order,) = pipeline(driver, workload(tmp_path), [0, 4])
    told = replace(order, experts=ExpertsOrder((), {1: ()}, (), alone=True), **fields)
    with pytest.raises(RunError, match=message):
        check_expert_order(told)


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(1))


def test_experts_that_can_not_be_elsewhere_are_refused() -> None:
    with pytest.raises(WorkloadError, match=r"expert 0 of layer 3 has a buffer \(seen\)"):
        check_expert_modules([skyctl.Experts(Counting, 2, 1, features=2)], 3, ())
    one = nn.Linear(2, 2)
    with pytest.raises(WorkloadError, match="layer 3 has an expert twice"):
        check_expert_modules([skyctl.Experts(lambda: one, 2, 1, features=2)], 3, ())
    tied = skyctl.Experts(lambda: nn.Linear(2, 2), 2, 1, features=2)
    tied.experts[0].weight = tied.gate.weight
    with pytest.raises(WorkloadError, match="is used elsewhere, too"):
        check_expert_modules([tied], 3, ())
