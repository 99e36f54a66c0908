"""A parameter server: what one process computes in the same order, bounds of staleness, meetings, lies."""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from tests.worker import reference
from tests.worker.sums import connected, places, star, together
from tests.worker.test_resume import BATCH_NORM, NORM, keeping, resuming
from tests.worker.workloads import DROPOUT, VALIDATION, edit_workload
from torch import nn

from skyctl.checkpoint.node import safetensors
from skyctl.checkpoint.node.shards import ShardStamp, StageState
from skyctl.errors import RunError
from skyctl.transport.transfer_errors import PeerProtocolError
from skyctl.worker.peer import FIRST_SUM_TAG
from skyctl.worker.rank_order import Staleness, SumGroupOrder, SumOrder
from skyctl.worker.updates.lr_scheduler import LearningRateScheduler
from skyctl.worker.updates.parameter_root import Grant, ParameterRoot, RootWeights
from skyctl.worker.updates.push_pull import Push, PushPull
from skyctl.worker.updates.stale_sync import StaleSync
from skyctl.workload.recipe import Recipe

Workloads = Callable[..., dict[str, Any]]
LAYERS, STEPS = 7, 8
PLAIN = ("torch.optim.AdamW(parameters, lr=0.01)", "torch.optim.SGD(parameters, lr=0.1)")
RATES = Recipe(total_steps=4, lr_schedule="linear")
RECIPE = Recipe(lr_schedule="cosine", warmup_steps=2, validate_every=3, total_steps=STEPS)


def stale(most: int | None) -> dict[str, Any]:
    """The part of an order's ``sync`` that is of a parameter server."""
    return {"staleness": {"most": most}}


@pytest.mark.parametrize(("most", "dtype"), [(1, "float32"), (3, "bfloat16"), (None, "float32")])
def test_runs_to_the_end_and_no_worker_is_too_far_ahead(
    workload: Workloads, pool: Any, driver: ModuleType, most: int | None, dtype: str
) -> None:
    spec = {**workload("adamw"), "dtype": dtype}
    recipe = {"total_steps": STEPS, "clip_norm": 0.1}
    orders = driver.side_by_side(spec, LAYERS, [1, 2, 1], star(3), STEPS, sync=stale(most), recipe=recipe)
    done = pool.run(orders)
    assert not done.errors, done.errors
    assert {result["steps"] for result in done.results.values()} == {STEPS}
    ahead = [event["ahead"] for events in done.steps.values() for event in events]
    assert len(ahead) == 3 * STEPS
    assert min(ahead) >= 0
    assert max(ahead) <= (STEPS if most is None else most)
    assert all(event["grad_norm"] > 0.1 for events in done.steps.values() for event in events)


def test_pushes_of_a_step_add_up_to_one_synchronous_step(
    workload: Workloads, pool: Any, driver: ModuleType
) -> None:
    """With plain gradient descent and everybody waiting for everybody (a bound of 0)."""
    spec = edit_workload(workload(replace=PLAIN), DROPOUT, text=VALIDATION)
    expected = reference.train(spec, 4, RECIPE)
    orders = driver.side_by_side(
        spec, LAYERS, [1, 2, 1], star(3), STEPS, sync=stale(0), recipe=RECIPE.to_dict(), weights=True
    )
    done = pool.run(orders)
    assert not done.errors, done.errors
    assert done.losses == pytest.approx(expected.losses, rel=1e-5)
    assert done.validation == pytest.approx(expected.validation, rel=1e-5)
    assert [event["learning_rate"] for event in done.steps[1]] == pytest.approx(expected.rates)
    weights = safetensors.load(Path(done.results[0]["weights"]))
    for key, tensor in expected.weights.items():
        torch.testing.assert_close(weights[key], tensor, rtol=1e-4, atol=1e-5)


def test_resumes_with_the_roots_optimizer_and_ends_early_together(
    workload: Workloads, pool: Any, driver: ModuleType, tmp_path: Path
) -> None:
    spec = edit_workload(workload("sgd", batch_size=8), BATCH_NORM, text=NORM)
    kept = tmp_path / "r"
    shares, routes = [1, 2, 1], star(3)
    whole = pool.run(
        driver.side_by_side(spec, LAYERS, shares, routes, STEPS, sync=stale(2), checkpoint=keeping(kept))
    )
    assert not whole.errors, whole.errors
    sketches = [whole.checkpoints[rank][-1]["sketches"] for rank in range(3)]
    assert sketches[0] == sketches[1] == sketches[2], "all have pulled the same"
    assert whole.checkpoints[0][-1]["layers"]
    rest = pool.run(
        driver.side_by_side(
            spec, LAYERS, shares, routes, 500, sync=stale(2), resume=resuming(whole, kept, step=6),
            checkpoint=keeping(tmp_path / "s", every=0),
        ),
        _stop_after(8),
    )  # fmt: skip
    assert not rest.errors, rest.errors
    [steps] = {result["steps"] for result in rest.results.values()}
    assert 8 < steps < 500, "all end after the same step"
    [sketch, *others] = [rest.checkpoints[rank][-1]["sketches"] for rank in range(3)]
    assert all(other == sketch for other in others)


def _stop_after(step: int) -> Callable[[Any, int, dict[str, Any]], None]:
    def stop(pool: Any, rank: int, event: dict[str, Any]) -> None:
        if event["event"] == "step" and event["step"] == step and rank == 0:
            pool.processes[0].send({"op": "stop"})

    return stop


def test_a_resumed_run_is_the_one_that_was_not_cut(
    workload: Workloads, pool: Any, driver: ModuleType, tmp_path: Path
) -> None:
    """By plain gradient descent, where the order of a step's pushes does not matter; the rates move."""
    kept, options = tmp_path / "r", {"sync": stale(0), "recipe": RECIPE.to_dict()}
    spec = edit_workload(workload(replace=PLAIN), DROPOUT, text=VALIDATION)
    whole = pool.run(
        driver.side_by_side(spec, LAYERS, [2, 2], star(2), STEPS, checkpoint=keeping(kept), **options)
    )
    resume = resuming(whole, kept, step=3)
    rest = pool.run(driver.side_by_side(spec, LAYERS, [2, 2], star(2), STEPS, resume=resume, **options))
    assert not rest.errors, rest.errors
    assert rest.losses == pytest.approx(whole.losses[3:], rel=1e-5)


def test_the_roots_optimizer_and_weights_are_what_checkpoints_hold(tmp_path: Path) -> None:
    layers, back = _layers(), _layers()
    held, restored = _root_weights(layers), _root_weights(back)
    for parameter in held.parameters:
        parameter.grad = torch.ones_like(parameter)
    held.optimizer.step()
    stamp = ShardStamp("r", 1, 0, "one", 3, "w", "float32", 0)
    StageState(layers, held.optimizer, held.stands_for).write(0, tmp_path / "shard", stamp)
    StageState(back, restored.optimizer, restored.stands_for).read(0, tmp_path / "shard", stamp)
    for mine, theirs in zip(held.parameters[:2], restored.parameters[:2], strict=True):
        assert torch.equal(mine, theirs)
        assert torch.equal(held.optimizer.state[mine]["exp_avg"], restored.optimizer.state[theirs]["exp_avg"])


def _layers() -> list[nn.Module]:
    torch.manual_seed(0)
    return [nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)]


def _backward(layers: list[nn.Module], rank: int, clock: int) -> None:
    x = torch.randn(2, 3, generator=torch.Generator().manual_seed(10 * clock + rank))
    nn.Sequential(*layers)(x).square().mean().mul(0.5).backward()


def _root_weights(layers: list[nn.Module]) -> RootWeights:
    return RootWeights(
        layers,
        lambda parameters: torch.optim.Adam(parameters, lr=0.1),
        lambda _parameters, optimizer: LearningRateScheduler(optimizer, RATES),
    )


def _sync(
    rank: int, layers: list[nn.Module], peers: Any, root: ParameterRoot | None, most: int, count: int = 2
) -> StaleSync:
    group = SumGroupOrder(0, 0, tuple(places(star(count), rank)), start=0, stop=3)
    sync = SumOrder("float32", 16, (group,), staleness=Staleness(most))
    return StaleSync(layers, rank, sync, peers, share=0.5, first=0, steps=4, root=root)


def test_a_forced_order_gives_the_bits_of_one_process() -> None:
    """Worker 0 pushes two clocks before worker 1 its first, then they take turns."""
    order = [0, 0, 1, 1, 0, 1, 1, 0]
    turn = threading.Condition()
    left = list(order)
    ahead_by_rank: dict[int, list[int]] = {0: [], 1: []}
    with connected(star(2), 2) as ends:
        layers_by_rank = [_layers(), _layers()]
        root = ParameterRoot(_root_weights(layers_by_rank[0]), [0, 1], staleness=2, first=0, steps=4)

        def act(rank: int) -> None:
            sync = _sync(rank, layers_by_rank[rank], ends[rank], root if rank == 0 else None, 2)
            for clock in range(4):
                sync.start_step()
                sync.begin(clock)
                _backward(layers_by_rank[rank], rank, clock)
                if rank == 0 and clock == 3:  # both wait for each other after this: its push is the last
                    while root.finished[1] < 4:
                        time.sleep(0.001)
                else:
                    with turn:
                        turn.wait_for(lambda: left[0] == rank)
                report = sync.finish(is_last=False)
                ahead_by_rank[rank].append(report.ahead or 0)
                with turn:
                    left.pop(0)
                    turn.notify_all()

        assert together(2, act) == [None, None]
    expected = [_layers(), _layers()]
    held = _root_weights(_layers())
    clocks = [0, 0]
    for rank in order:
        own, clock = expected[rank], clocks[rank]
        _backward(own, rank, clock)
        mine = [p for layer in own for p in layer.parameters()]
        for copied, parameter in zip(held.parameters, mine, strict=True):
            copied.grad, parameter.grad = parameter.grad, None
        held.optimizer.param_groups[0]["lr"] = 0.1 * RATES.learning_rate_factor(clock, 0.0)
        held.optimizer.step()
        clocks[rank] += 1
        for copied, parameter in zip(held.parameters, mine, strict=True):
            parameter.data.copy_(copied.data)
    for layers in layers_by_rank:  # the last two have met, and have the same
        mine = [p for layer in layers for p in layer.parameters()]
        assert all(torch.equal(a, b) for a, b in zip(mine, held.parameters, strict=True))
    assert max(ahead_by_rank[0]) == 2


def test_the_slowest_is_waited_for_and_meetings_hold_everybody() -> None:
    layers = _layers()
    root = ParameterRoot(
        _root_weights(layers), [0, 1], staleness=1, first=0, steps=9, meets_after=lambda clock: clock == 2
    )
    out = torch.zeros(26)
    zeros = torch.zeros(26)

    def push(worker: int, clock: int, **more: bool) -> None:
        root.push(worker, clock, zeros, bytes([1, 1, 1, 1]), **({"wants_end": False} | more))

    push(0, 0)
    assert root.take_grant(0, out)[:2] == (None, 0)
    push(0, 1)
    waiting = threading.Thread(target=lambda: root.take_grant(0, out))
    waiting.start()
    waiting.join(0.1)
    assert waiting.is_alive(), "two ahead of one that has finished nothing"
    push(1, 0)
    waiting.join(10.0)
    root.take_grant(1, zeros)
    with pytest.raises(RunError, match="worker 1 has finished 1 clocks, not 3"):
        push(1, 3)
    push(0, 2)
    push(1, 1)
    root.take_grant(1, zeros)
    push(1, 2)
    for worker in (0, 1):
        assert root.take_grant(worker, out).slowest == 3
    held = threading.Thread(target=lambda: push(1, 3, wants_end=True))
    held.start()
    held.join(0.1)
    assert held.is_alive(), "the root's own worker looks at the weights"
    root.resume()
    held.join(10.0)
    assert root.is_last(3)
    failing = threading.Timer(0.1, root.fail, [RunError("lost")])
    failing.start()
    with pytest.raises(RunError, match="lost"):
        root.take_grant(1, out)
    failing.join(10.0)
    with pytest.raises(RunError, match="lost"):
        push(0, 3)


def _pair(ends: Any, rank: int) -> PushPull:
    [peer] = ends[rank].values()
    return PushPull(peer, group=0, first_tag=FIRST_SUM_TAG + 4, numel=26, parameters=4, chunk_bytes=16)


@pytest.mark.parametrize(
    ("lie", "message"),
    [
        (lambda line: line.send_push(3, Push(False, bytes(4)), torch.zeros(26)), "of step 3"),
        (lambda line: line.send_push(0, Push(False, bytes([9, 0, 0, 0])), torch.zeros(26)), "marks above 1"),
        (lambda line: line.send_push(0, Push(False, bytes(5)), torch.zeros(26)), "bytes where"),
    ],
)
def test_a_lying_worker_ends_the_run_and_is_named(lie: Callable[[PushPull], None], message: str) -> None:
    layers = _layers()
    root = ParameterRoot(_root_weights(layers), [0, 1], staleness=1, first=0, steps=4)
    with connected(star(2), 2) as ends:

        def act(rank: int) -> Any:
            if rank:
                lie(_pair(ends, 1))
                return None
            sync = _sync(0, layers, ends[0], root, 1)
            try:
                for clock in range(2):
                    _backward(layers, 0, clock)
                    sync.begin(clock)
                    sync.finish(is_last=False)
            finally:
                for peer in ends[0].values():
                    peer.close()
                sync.close()

        error, _ = together(2, act)
    assert isinstance(error, RunError)
    assert "rank 1" in str(error)
    assert message in str(error)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("serves")]


@pytest.mark.parametrize(
    ("grant", "message"),
    [
        (Grant(None, 0, 0.0), "a grant to be 3 clocks ahead, 1 at most"),
        (Grant(None, 9, 0.0), "a slowest worker that has finished 9 clocks"),
        (Grant(1, 2, 0.0), "an end after clock 1"),
        (Grant(None, 2, float("nan")), "nan seconds"),
    ],
)
def test_a_lying_root_is_named(grant: Grant, message: str) -> None:
    with connected(star(2), 2) as ends:

        def act(rank: int) -> Any:
            line = _pair(ends, rank)
            if rank:
                return line.receive_answer(2, torch.zeros(26), staleness=1, steps=9)
            line.send_answer(2, grant, torch.zeros(26))
            return None

        _, error = together(2, act)
    assert isinstance(error, PeerProtocolError)
    assert message in error.message


@pytest.mark.parametrize(
    ("teller", "told_by"),
    [(0, [None, 0, 0]), (1, [1, None, 0]), (2, [2, 0, None]), (None, [None] * 3)],
)
def test_each_worker_knows_who_told_it_that_the_run_ends(
    teller: int | None, told_by: list[int | None]
) -> None:
    """So the launcher finds who began, where nobody had asked for that."""
    every = [_layers() for _ in range(3)]
    root = ParameterRoot(_root_weights(every[0]), range(3), staleness=0, first=0, steps=4)
    with connected(star(3), 3) as ends:

        def act(rank: int) -> int | None:
            sync = _sync(rank, every[rank], ends[rank], None if rank else root, 0, count=3)
            for clock in range(4):
                _backward(every[rank], rank, clock)
                sync.start_step()
                sync.begin(clock)
                if sync.finish(is_last=clock == 1 and rank == teller).is_last:
                    break
            assert clock == (3 if teller is None else 1)
            sync.close()
            return sync.ended_by

        assert together(3, act) == told_by


def test_root_weights_stand_for_what_is_trained_and_are_copies() -> None:
    layers = _layers()
    layers[0].weight.requires_grad_(False)
    held = _root_weights(layers)
    assert held.stands_for(layers[0].weight) is layers[0].weight
    copied = held.stands_for(layers[2].weight)
    assert torch.equal(copied, layers[2].weight)
    before = copy.deepcopy(layers[2].weight)
    copied.data.zero_()
    assert torch.equal(layers[2].weight, before)
