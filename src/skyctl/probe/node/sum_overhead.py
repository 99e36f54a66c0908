"""The cost to a processor of summing gradients, beside the adding: sending and receiving them.

Measured by the real thing: this process and a child sum over one loopback connection, on several routes and
in chunks as a run does. All of this process's CPU time counts, whichever thread's: messages are handled,
Python runs, numbers are gathered from the gradients and put back. A plain stream takes a third of that.

Two ends in one process would share Python's lock and its caches: the same sum then took 0.5 to 2.0 times as
long, by how its threads met and how many cores were free for them.
"""

from __future__ import annotations

import secrets
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any, cast

import torch
import torch.distributed as dist

from skyctl.probe.node.forks import fork_beside
from skyctl.probe.node.loopback_ranks import LoopbackRanks
from skyctl.probe.node.message_overhead import TIMEOUT_S
from skyctl.transport import BACKEND
from skyctl.transport.tls_identity import TlsIdentity
from skyctl.worker.peer import Peer
from skyctl.worker.rank_order import RoutePlace
from skyctl.worker.sums.pass_layouts import buckets_of
from skyctl.worker.sums.route_sum import RouteSum
from skyctl.worker.sums.sum_layout import make_layout
from skyctl.worker.sums.sum_messages import GRADIENTS
from skyctl.worker.sums.sum_work import SumWork

CHUNK_NUMEL = 65536
"""Of a sum's messages (``records.sync.Sync.chunk_bytes``, in float32)."""
ROUTES = 4
"""Each end is the root of every other one: threads as in a ring of four."""
LAYERS = 5
LEAST_NUMEL, MOST_NUMEL = 20_000, 2_000_000
"""Of a sum. A small one is measured as small as it is: beginning, agreeing and waking up are most of it."""
LEAST_SUMS, MOST_SUMS = 8, 40
"""The first is warm-up. Small ones are made more often."""


def measure_message_byte_s(
    ratio: float,
    reduce_byte_s: float,
    identity: TlsIdentity | None = None,
    backend: str = BACKEND,
    numel: int = MOST_NUMEL,
    *,
    ring: bool = False,
) -> float:
    """Seconds of the node to send, or to receive, one byte of gradients in a sum.

    Each of the two ends passes every byte twice, once out and once in, and adds half of them.

    Args:
        ratio: seconds of the node for one of its processors'.
        reduce_byte_s: of the node's seconds, what adding a byte takes.
        identity: the TLS certificate that messages will go under, None: none.
        backend: what carries them: ``skyctl`` or ``gloo``.
        numel: how many numbers the workload sums in a step; ``MOST_NUMEL`` stand for more.
        ring: whether Gloo's own collective sums, in a ring, and not skyctl's routes.

    Raises:
        RunError: this node can't connect to itself, or its child is gone.
    """
    ranks = LoopbackRanks(2, secrets.token_hex(16), backend, identity, TIMEOUT_S)
    with tempfile.TemporaryDirectory(prefix="skyctl-sum-") as folder:
        store = Path(folder) / "store"
        layer_numel = max(LEAST_NUMEL, min(MOST_NUMEL, numel)) // LAYERS
        with fork_beside(lambda: _sum_as_child(ranks, store, layer_numel, ring)):
            sum_s = median(_sum_often(0, ranks, store, layer_numel, ring)[1:])
    per_byte_s = sum_s / (4 * layer_numel * LAYERS) * ratio
    return max(0.0, per_byte_s - reduce_byte_s / 2) / 2


def _sum_as_child(ranks: LoopbackRanks, store: Path, layer_numel: int, ring: bool) -> None:
    _sum_often(1, ranks, store, layer_numel, ring)


def _sum_often(
    end: int,
    ranks: LoopbackRanks,
    file: Path,
    layer_numel: int,
    ring: bool,
) -> list[float]:
    """Sums as one of the two ends; CPU seconds of this process, by sum.

    Args:
        file: in which the two ends find each other.
    """
    layout = make_layout([[layer_numel]] * LAYERS, [1 / ROUTES] * ROUTES, CHUNK_NUMEL)
    gradients = [torch.ones(layer_numel, dtype=torch.float32) for _ in range(LAYERS)]
    store: Any = dist.FileStore(str(file), 2)  # type: ignore[attr-defined] # not in torch's stubs
    group = ranks.connect(store, {end: [1 - end]})[end]
    add_up = cast("Any", group).sum_in_ring if ring else None
    sums = RouteSum(0, _places(end), {1 - end: Peer(group, 1 - end)}, add_up=add_up)
    taken_s = []
    try:
        for step in range(max(LEAST_SUMS, min(MOST_SUMS, 2 * MOST_NUMEL // (layer_numel * LAYERS)))):
            begun_s = time.process_time()
            sum_work = SumWork(layout, step, kind=GRADIENTS)
            sums.begin(sum_work)
            for bucket in buckets_of(layout, [[layer] for layer in gradients]):
                sum_work.add_bucket(bucket)
            sum_work.wait()
            taken_s.append(time.process_time() - begun_s)
    finally:
        group.close()
        sums.close()
    return taken_s


def _places(end: int) -> list[RoutePlace]:
    """An end's places on the routes, of which each end is the root of every other one."""
    other, share = 1 - end, 1 / ROUTES
    root, leaf = RoutePlace(share, (other,), None, None, (other,)), RoutePlace(share, (), other, other, ())
    return [root if route % 2 == end else leaf for route in range(ROUTES)]
