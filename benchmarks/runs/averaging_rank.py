"""One of the processes that ``averaging.py`` has sum by skyctl's ``GradientSync`` and by Gloo. A program."""

from __future__ import annotations

import sys
import time
import warnings
from datetime import timedelta

warnings.filterwarnings("ignore", message="Failed to initialize NumPy")

import torch  # noqa: E402 — the filter must come first
from torch import distributed, nn  # noqa: E402

from skyctl.transport.peer_connection import PeerConnection  # noqa: E402
from skyctl.transport.process_group import SkyctlProcessGroup  # noqa: E402
from skyctl.worker.peer import Peer  # noqa: E402
from skyctl.worker.rank_order import RoutePlace, SumGroupOrder  # noqa: E402
from skyctl.worker.sums.gradient_sync import GradientSync  # noqa: E402

HOST = "127.0.0.1"
SECRET = "averaging benchmark"
TIMEOUT_S = 60.0
PARAMETERS = 8


def say(*words: object) -> None:
    """A line for the program that started this one."""
    print("bench", *words, flush=True)


def ring_routes(rank: int, count: int) -> list[RoutePlace]:
    """The rank's place on each of a ring's routes: route i is the path from i + 1 round to its root i."""
    before, after = (rank - 1) % count, (rank + 1) % count
    routes: list[RoutePlace] = []
    for root in range(count):
        first, last = rank == (root + 1) % count, rank == (root - 1) % count
        routes.append(
            RoutePlace(
                share=1.0 / count,
                up_children=() if first else (before,),
                up_parent=None if rank == root else after,
                down_parent=None if rank == root else before,
                down_children=() if last else (after,),
            )
        )
    return routes


def connect_ring(rank: int, count: int) -> dict[int, Peer]:
    """Connections to the rank before and the one after; Gloo tells the ports."""
    before, after = (rank - 1) % count, (rank + 1) % count
    peers = {other: PeerConnection(f"rank {other}", TIMEOUT_S, secret=SECRET) for other in (before, after)}
    ports = torch.zeros(count, dtype=torch.int64)
    ports[rank] = peers[after].listen(HOST)
    distributed.all_reduce(ports)
    if rank == 0:  # somebody must begin: the others connect and then accept
        peers[after].accept(TIMEOUT_S)
    peers[before].connect(HOST, int(ports[before]), HOST, TIMEOUT_S)
    if rank != 0:
        peers[after].accept(TIMEOUT_S)
    group = SkyctlProcessGroup(rank, count, peers)
    return {other: Peer(group, other) for other in peers}


class Parameters(nn.Module):
    """So many numbers to be summed."""

    def __init__(self, numbers: int) -> None:
        super().__init__()
        parts = torch.zeros(numbers).tensor_split(PARAMETERS)
        self.parts = nn.ParameterList(nn.Parameter(part.clone()) for part in parts)


def set_gradients(layer: Parameters, rank: int) -> None:
    """Sets the gradients that this rank sums."""
    for part in layer.parts:
        part.grad = torch.full_like(part, rank + 1.0)


def main() -> None:
    """Connects, says so, and sums whenever told to, until nothing is told any more."""
    rank, count, numbers, port = map(int, sys.argv[1:5])
    name = sys.argv[5]
    torch.set_num_threads(1)
    distributed.init_process_group(
        "gloo",
        init_method=f"tcp://{HOST}:{port}",
        rank=rank,
        world_size=count,
        timeout=timedelta(seconds=TIMEOUT_S),
    )
    layer = Parameters(numbers)
    peers = connect_ring(rank, count)
    group = SumGroupOrder(0, 0, tuple(ring_routes(rank, count)), start=0, stop=1)
    sync = GradientSync([layer], 0, [group], peers, format=name, share=1.0 / count, microbatches=count)
    expected = float(sum(range(1, count + 1)))
    values, step = torch.zeros(numbers), 0
    say("ready")
    for line in sys.stdin:
        word, _, rest = line.strip().partition(" ")
        if word == "prepare":
            what = rest
            if what == "skyctl":
                sync.start_step()
                set_gradients(layer, rank)
            else:
                values = torch.full((numbers,), rank + 1.0)
            say("prepared")
            continue
        begin = float(rest)
        time.sleep(max(0.0, begin - time.monotonic()))
        if what == "skyctl":
            sync.begin(step)
            while sync.finish(is_last=False).repeats:  # fixed32's first step
                set_gradients(layer, rank)
                sync.begin(step)
            step += 1
        else:
            distributed.all_reduce(values)
        ended = time.monotonic()
        found = [part.grad for part in layer.parts] if what == "skyctl" else [values]
        close = 0.02 * expected if name in ("bfloat16", "int8") and what == "skyctl" else 0.0
        if not all(part is not None and bool(((part - expected).abs() <= close).all()) for part in found):
            say("wrong", what)
            return
        say("done", repr(ended))
    for peer in peers.values():
        peer.close()
    sync.close()
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
