"""The resident memory that a sum adds to a helper and to roots: a pool of chunks, however large it is.

``SKYCTL_SUM_MIB`` sums so many MiB in place of 256.
"""

from __future__ import annotations

import multiprocessing
import os
import re
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
from tests.helpers.processes import PATIENCE_S
from tests.worker.sums import RouteEdges, places

MIB = 1 << 20
CHUNK_BYTES = 262144
ROUTES: list[RouteEdges] = [
    (0.5, 2, [(0, 2), (1, 2)], [(2, 0), (2, 1)]),
    (0.3, 0, [(1, 2), (2, 0)], [(0, 1)]),
    (0.2, 1, [(0, 1)], [(1, 2), (2, 0)]),
]
"""Ranks 0 and 1 hold numbers; 2 helps: as a root, upwards only, downwards only."""
COUNT, REPLICAS = 3, 2
SLACK_BYTES = 32 * MIB


def memory_bytes(name: str) -> int:
    match = re.search(rf"^{name}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert match is not None
    return 1024 * int(match[1])


def pool_bytes(rank: int) -> int:
    """Eight chunks (2 MiB) for each edge that arrives, nine for each way that sends."""
    chunks = 0
    for place in places(ROUTES, rank):
        chunks += 8 * len(place.up_children) + 8 * (place.down_parent is not None) + 9
    return chunks * (CHUNK_BYTES + 64)


def rank_process(rank: int, line: Connection, nbytes: int) -> None:
    """One rank: connects, sums once, and tells by how much its memory grew, and whether the sum is right."""
    import torch

    from skyctl.transport.peer_connection import PeerConnection
    from skyctl.transport.process_group import SkyctlProcessGroup
    from skyctl.worker.peer import Peer
    from skyctl.worker.rank_events import SumSizes
    from skyctl.worker.rank_order import SumGroupOrder, SumOrder
    from skyctl.worker.sum_helper import SumHelper
    from skyctl.worker.sums.route_sum import RouteSum
    from skyctl.worker.sums.sum_layout import make_layout
    from skyctl.worker.sums.sum_messages import GRADIENTS
    from skyctl.worker.sums.sum_work import SumWork
    from skyctl.worker.sums.summed_gradients import AGREED_FLAGS

    torch.set_num_threads(1)
    pairs = {}
    for low in range(COUNT):
        for high in range(low + 1, COUNT):
            if rank not in (low, high):
                continue
            other = low + high - rank
            peer = PeerConnection(f"rank {other}", 60.0, secret=f"{low} {high}", peer_rank=other)
            if rank == low:
                line.send(peer.listen("127.0.0.1"))
                peer.accept(PATIENCE_S)  # the other one imports torch first
            else:
                peer.connect("127.0.0.1", line.recv(), timeout_s=60.0)
            pairs[other] = peer
    group = SkyctlProcessGroup(rank, COUNT, pairs)
    peers = {other: Peer(group, other) for other in pairs}
    numels = [nbytes // 16] * 4
    given = [torch.full((numel,), float(rank + 1)) for numel in numels] if rank < REPLICAS else []
    routes = places(ROUTES, rank)
    Path("/proc/self/clear_refs").write_text("5")
    before = memory_bytes("VmRSS")
    if given:
        sums = RouteSum(0, routes, peers)
        layout = make_layout([[numel] for numel in numels], [r[0] for r in ROUTES], CHUNK_BYTES // 4)
        sum_work = SumWork(layout, 0, kind=GRADIENTS)
        sums.begin(sum_work, AGREED_FLAGS + 4)
        for tensor in given:
            sum_work.add_bucket([tensor])
        sums.agree(bytes(AGREED_FLAGS + 4))
        sum_work.wait()
    else:
        order = SumGroupOrder(0, 0, tuple(routes), agreement=routes[0])
        sync = SumOrder("float32", CHUNK_BYTES, (order,))
        sizes = SumSizes(tuple(numels), parameters=4, figures=0)
        helper = SumHelper(sync, sizes, peers)
        assert not helper.sum_gradients(0)
    grown = memory_bytes("VmHWM") - before
    line.send((grown, all(bool((tensor == 3.0).all()) for tensor in given)))
    line.recv()
    for peer in peers.values():
        peer.close()


@pytest.mark.slow
def test_memory_grows_by_a_pool_of_chunks_only() -> None:
    nbytes = int(os.environ.get("SKYCTL_SUM_MIB", "256")) * MIB
    start = multiprocessing.get_context("spawn")
    lines: list[Any] = [start.Pipe() for _ in range(COUNT)]
    ranks = [
        start.Process(target=rank_process, args=(rank, lines[rank][1], nbytes), daemon=True)
        for rank in range(COUNT)
    ]
    for rank in ranks:
        rank.start()
    try:
        for low in range(COUNT):
            for high in range(low + 1, COUNT):
                lines[high][0].send(lines[low][0].recv())
        answers = [line.recv() for line, _ in lines]
        for line, _ in lines:
            line.send("end")
        for number, (grown, is_right) in enumerate(answers):
            print(f"rank {number}: {grown / MIB:.1f} MiB more, a pool of {pool_bytes(number) / MIB:.1f}")
            assert is_right
            assert grown <= pool_bytes(number) + SLACK_BYTES, number
    finally:
        for rank in ranks:
            rank.join(20)
            rank.kill()
