"""The backend ``skyctl`` of torch.distributed: who is connected, what goes through, and what is refused."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Callable
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from skyctl.errors import RunError
from skyctl.transport.planned_process_group import PairOptions
from skyctl.transport.torch_backend import make_group
from skyctl.transport.transfer_errors import PeerLostError, PeerProtocolError

from ..helpers.processes import PATIENCE_S

PAIRS = {0: (1,), 1: (0, 2), 2: (1,)}
"""By rank of three, its peers."""


@pytest.fixture
def groups() -> Any:
    store = dist.HashStore()  # type: ignore[attr-defined]
    pairs = []
    for rank, peers in PAIRS.items():
        options = PairOptions(dict.fromkeys(peers, "127.0.0.1"), {p: f"{sorted((p, rank))}" for p in peers})
        limit = timedelta(seconds=20)
        asked = SimpleNamespace(store=store, group_rank=rank, group_size=3, timeout=limit)
        pairs.append((make_group(asked, options), options))
    at_once([lambda group=group, options=options: group.connect(store, options) for group, options in pairs])
    yield [group for group, _ in pairs]
    for group, _ in pairs:
        group.close()


def at_once(actions: list[Callable[[], None]]) -> None:
    threads = [threading.Thread(target=action) for action in actions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20.0)
        assert not thread.is_alive()


def test_tensors_reach_their_peer_by_tag(groups: Any) -> None:
    floats, other = torch.zeros(3), torch.zeros(2, dtype=torch.int64)
    received = [groups[1].recv([other], 0, 7), groups[1].recv([floats], 2, 0)]
    sent = [groups[0].send([torch.tensor([4, 5])], 1, 7), groups[2].send([torch.full((3,), 2.0)], 1, 0)]
    assert [work.wait() for work in (*received, *sent)] == [True] * 4
    assert (floats.tolist(), other.tolist()) == ([2.0] * 3, [4, 5])


def test_who_is_no_peer_is_reached_by_nobody(groups: Any) -> None:
    with pytest.raises(RunError, match="rank 0 exchanges nothing with rank 2; it does with 1"):
        groups[0].send([torch.zeros(1)], 2, 0)


def test_a_peer_that_closes_is_named(groups: Any) -> None:
    waiting = groups[0].recv([torch.zeros(1)], 1, 0)
    groups[1].close_pair(0)
    with pytest.raises(PeerLostError, match="rank 1"):
        waiting.wait()
    still = groups[2].recv([torch.zeros(1)], 1, 0)
    groups[1].send([torch.ones(1)], 2, 0).wait()
    assert still.wait(timedelta(seconds=10)), "the other pair goes on"


@pytest.mark.parametrize(
    "address", [b"", b"1", b"evil.example:1", b"127.0.0.1:0", b"127.0.0.1:-1", b"1:2:3", b"[" * 4096, b"\xff"]
)
def test_a_peer_that_says_no_address_is_named(address: bytes) -> None:
    store = dist.HashStore()  # type: ignore[attr-defined]
    store.set("listening/0/1", address)
    options = PairOptions({0: "127.0.0.1"}, {0: "s"})
    asked = SimpleNamespace(store=store, group_rank=1, group_size=2, timeout=timedelta(seconds=5))
    with pytest.raises(PeerProtocolError, match="rank 0 says that it listens at"):
        make_group(asked, options).connect(store, options)


PROGRAM = """
import json
import torch, torch.distributed as dist
from skyctl.errors import RunError
from skyctl.transport.torch_backend import join_alone

join_alone()
join_alone()
refused = {}
tensor = torch.zeros(2)
for name, call in {
    "all_reduce": lambda: dist.all_reduce(tensor),
    "broadcast": lambda: dist.broadcast(tensor, 0),
    "all_gather": lambda: dist.all_gather([tensor], tensor),
    "all_gather_into_tensor": lambda: dist.all_gather_into_tensor(tensor, tensor),
    "reduce_scatter_tensor": lambda: dist.reduce_scatter_tensor(tensor, tensor),
    "all_to_all_single": lambda: dist.all_to_all_single(tensor, tensor),
    "reduce": lambda: dist.reduce(tensor, 0),
    "gather": lambda: dist.gather(tensor, [tensor]),
    "scatter": lambda: dist.scatter(tensor, [tensor]),
    "barrier": lambda: dist.barrier(),
    "all_gather_object": lambda: dist.all_gather_object([None], "x"),
}.items():
    try:
        call()
        refused[name] = ""
    except RunError as exc:
        refused[name] = exc.message
print(json.dumps([dist.get_rank(), dist.get_world_size(), dist.get_backend(), refused]))
dist.destroy_process_group()
"""


def test_collectives_over_all_ranks_are_refused_and_not_waited_for() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )
    assert not done.returncode, done.stderr
    rank, size, backend, refused = json.loads(done.stdout)
    assert (rank, size, backend) == (0, 1, "skyctl")
    assert [
        name for name, error in refused.items() if "is refused: they hold other layers" not in error
    ] == []
