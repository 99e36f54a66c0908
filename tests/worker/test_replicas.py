"""``skyctl.replicas()``: a user's own collectives between the ranks that hold the same layers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.attack.rank_forms import orders
from tests.helpers.orders import rank_order
from tests.worker.test_hybrids import HYBRIDS, rank_orders

import skyctl
from skyctl.errors import RunError
from skyctl.worker.rank_order import ReplicaOrder
from skyctl.worker.replicas import end_offer, offer_replicas

Workloads = Callable[..., dict[str, Any]]
STEPS = 3
MODEL = "def model():\n"
ASKS = """
import skyctl
import torch.distributed as dist

def model():
    global REPLICAS
    REPLICAS = skyctl.replicas()
    assert skyctl.replicas() is REPLICAS
"""
LOSS = "    return nn.functional.cross_entropy(outputs, targets)"
SUMS = """
    mean = outputs.detach().mean()
    everywhere = [torch.zeros(()) for _ in range(dist.get_world_size(REPLICAS))]
    dist.all_gather(everywhere, mean, group=REPLICAS)
    dist.all_reduce(mean, group=REPLICAS)
    assert torch.allclose(mean, torch.stack(everywhere).sum()), (mean, everywhere)
    members = dist.get_process_group_ranks(REPLICAS)
    assert members == MEMBERS, members
    return nn.functional.cross_entropy(outputs, targets)
"""


def asking(workload: Workloads, members: str) -> dict[str, Any]:
    """A workload whose loss sums over the ranks of its group, which are to be these (an expression)."""
    sums = SUMS.replace("MEMBERS", members)
    spec = workload(batch_size=8, replace=(LOSS, sums))
    return edited(spec, MODEL, ASKS)


def edited(spec: dict[str, Any], old: str, new: str) -> dict[str, Any]:
    with open(spec["path"], encoding="utf-8") as file:
        text = file.read()
    assert old in text
    with open(spec["path"], "w", encoding="utf-8") as file:
        file.write(text.replace(old, new, 1))
    return spec


@pytest.mark.parametrize(("backend", "encrypt"), [("skyctl", False), ("skyctl", True), ("gloo", False)])
def test_replicas_of_a_whole_model_sum_what_the_loss_gives_them(
    backend: Any, encrypt: bool, workload: Workloads, pool: Any
) -> None:
    """And the training is as without it."""
    without = pool.run(orders("data", workload(batch_size=8), STEPS, encrypt=False))
    spec = asking(workload, "[0, 1, 2, 3]")
    done = pool.run(orders("data", spec, STEPS, encrypt=encrypt, backend=backend))
    assert not done.errors, done.errors
    assert done.losses == pytest.approx(without.losses, rel=1e-6)


def test_each_stage_of_a_hybrid_has_a_group_of_its_own(workload: Workloads, pool: Any) -> None:
    """Of two stages each, so every other rank is a replica."""
    spec = asking(workload, "list(range(dist.get_rank() % 2, 4, 2))")
    done = pool.run(rank_orders(HYBRIDS["the same cuts"], spec, STEPS))
    assert not done.errors, done.errors


def test_one_pipeline_has_no_replicas(workload: Workloads, pool: Any) -> None:
    done = pool.run(orders("pipeline", asking(workload, "[dist.get_rank()]"), STEPS, encrypt=False))
    assert not done.errors, done.errors


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("crossed", "its pipelines are cut at different layers (0–3+3–7 and 0–5+5–7)"),
        ("unequal", "its replicas make unequal numbers of microbatches a step (4 and 2)"),
        ("rounds", "its replicas go on without each other"),
        ("validates", "one pipeline alone validates"),
    ],
)
def test_those_that_would_never_meet_are_refused(
    name: str, message: str, workload: Workloads, pool: Any
) -> None:
    spec = asking(workload, "[]")
    if name == "rounds":
        started = orders(name, spec, STEPS, encrypt=False)
    elif name == "validates":
        started = rank_orders(HYBRIDS["the same cuts"], spec, STEPS, recipe={"validate_every": 2})
    else:
        unequal = [([("a/cpu:0", 0, 7)], 4), ([("b/cpu:0", 0, 7)], 2)]
        started = rank_orders(unequal if name == "unequal" else HYBRIDS[name], spec, STEPS)
    done = pool.run(started)
    assert len(done.errors) == len(started)
    assert message in done.errors[0]["message"], done.errors[0]


def test_a_rank_that_dies_ends_the_others_collectives(
    workload: Workloads, driver: ModuleType, tmp_path: Path
) -> None:
    """Those that wait for it are told, and nobody hangs."""
    killed: list[int] = []

    def kill(running: Any, rank: int, event: dict[str, Any]) -> None:
        if event["event"] == "step" and event["step"] == 1 and rank == 1 and not killed:
            killed.append(rank)
            running.processes[1].popen.kill()

    ranks = driver.Pool(4, tmp_path)
    try:
        ended = ranks.run(orders("data", asking(workload, "[0, 1, 2, 3]"), 1000, encrypt=False), kill)
    finally:
        ranks.close()
    assert sorted(ended.errors) == [0, 1, 2, 3]
    assert any("rank 1" in ended.errors[rank]["message"] for rank in (0, 2, 3)), ended.errors


def test_it_is_too_late_once_training_has_begun() -> None:
    here = ReplicaOrder((0, 1), "127.0.0.1", secret="s" * 16)
    offer_replicas(None, replace(rank_order(), replicas=here))
    end_offer()
    try:
        with pytest.raises(RunError, match="once training had begun"):
            skyctl.replicas()
    finally:
        offer_replicas(None, None)


def test_a_collective_of_all_ranks_is_refused_and_says_which_is_not(workload: Workloads, pool: Any) -> None:
    mistaken = "    import torch.distributed as dist\n    dist.all_reduce(outputs.detach().mean())\n" + LOSS
    done = pool.run(orders("data", workload(batch_size=8, replace=(LOSS, mistaken)), STEPS, encrypt=False))
    assert any("skyctl.replicas()" in str(error) for error in done.errors.values()), done.errors


def test_outside_a_run_it_has_one_rank() -> None:
    was = dist.is_initialized()
    group = skyctl.replicas()
    try:
        value = torch.ones(2)
        dist.all_reduce(value, group=group)
        assert dist.get_world_size(group) == 1
        assert value.tolist() == [1.0, 1.0]
    finally:
        if not was:
            dist.destroy_process_group()
