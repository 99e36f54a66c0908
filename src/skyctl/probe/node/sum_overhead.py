"""What summing gradients costs a processor beside the adding: sending and receiving them.

Measured by the real thing: two ends of a ring in this process sum over one loopback connection, in chunks as
a run's. All of the process's CPU time counts, whichever thread's: messages are handled, Python runs, numbers
are gathered from the gradients and put back. A plain stream of the same messages takes a third of that.
"""

from __future__ import annotations

import time
from statistics import median

import torch

from skyctl.probe.node.message_overhead import connect_to_itself, loopback_pair, quota_ratio
from skyctl.transport.tls_identity import TlsIdentity
from skyctl.worker.route_sum import RoutePlace, RouteSum, SumRound
from skyctl.worker.sum_layout import make_layout
from skyctl.worker.sum_messages import GRADIENTS

CHUNK_NUMEL = 65536
"""Of a sum's messages (``records.sync.Sync.chunk_bytes``, in float32)."""
LAYER_NUMEL, LAYERS = 200_000, 10
"""No multiple of chunks, as in a model."""
ROUNDS = 6
"""The first is warm-up. One round takes up to four times as much as another: how threads meet is chance."""
ENDS = 2


def measure_message_byte_s(
    cpus: float | None, reduce_byte_s: float, identity: TlsIdentity | None = None
) -> float:
    """Processor seconds to send, or to receive, one byte of gradients in a sum.

    In a ring of two each end passes every byte twice out and in, and adds half of them.

    Args:
        cpus: the CPU quota that all of this process is held to, None: none; then seconds of the node.
        reduce_byte_s: of those seconds, what adding a byte takes.
        identity: the TLS certificate that messages will go under, None: none.

    Raises:
        RunError: this node can't connect to itself.
    """
    connections = loopback_pair(identity)
    sums: list[RouteSum] = []
    layout = make_layout([[LAYER_NUMEL]] * LAYERS, [0.5] * ENDS, CHUNK_NUMEL)
    gradients = [[torch.ones(LAYER_NUMEL) for _ in range(LAYERS)] for _ in range(ENDS)]
    taken_s = []
    try:
        connect_to_itself(*connections)
        for end, connection in enumerate(connections):
            sums.append(RouteSum(0, _places(end), {1 - end: connection}))
        for step in range(ROUNDS):
            begun_s = time.process_time()
            rounds = [SumRound(layout, step, kind=GRADIENTS, dtype=torch.float32) for _ in range(ENDS)]
            for one, round_, layers in zip(sums, rounds, gradients, strict=True):
                one.begin(round_)
                for layer in layers:
                    round_.add_bucket([layer])
            for round_ in rounds:
                round_.wait()
            taken_s.append(time.process_time() - begun_s)
    finally:
        for connection in connections:
            connection.close()
        for one in sums:
            one.close()
    per_byte_s = median(taken_s[1:]) / (ENDS * 4 * LAYER_NUMEL * LAYERS) * (quota_ratio(cpus) or 1.0)
    return max(0.0, per_byte_s - reduce_byte_s / 2) / 2


def _places(end: int) -> list[RoutePlace]:
    """An end's places on the two routes of a ring: it is the root of one of them."""
    other = 1 - end
    root, leaf = RoutePlace(0.5, (other,), None, None, (other,)), RoutePlace(0.5, (), other, other, ())
    return [root if route == end else leaf for route in range(ENDS)]
