"""A rank's place among all ranks, and where its peers are: for training and for generating text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from skyctl.records.cluster import Node
from skyctl.worker.rank_order import WorldOrder


def world_order(
    rank: int,
    nodes: Sequence[Node],
    addresses: Mapping[str, str],
    *,
    backend: str,
    before: int | None,
    after: int | None,
    timeout_s: float,
    sum_peers: Sequence[int] = (),
    clock_of: int | None = None,
    clock_for: Sequence[int] = (),
) -> WorldOrder:
    """The order of one rank, without secrets: they are added when it is sent.

    Args:
        nodes: by rank, its node.
        addresses: by node's name, where its peers reach it; of nodes that are no peers none is needed.
        before, after: the ranks of the neighbouring stages; None at the pipeline's ends.
        timeout_s: the longest that the rank waits for a peer.
        sum_peers: the ranks with which it sums gradients.
        clock_of, clock_for: as ``WorldOrder`` has them.
    """
    neighbours = [peer for peer in (before, after) if peer is not None]
    return WorldOrder(
        rank=rank,
        ranks=len(nodes),
        backend=backend,
        interface=nodes[rank].interface,
        hosts={peer: addresses[nodes[peer].name] for peer in (*neighbours, *sum_peers)},
        before=before,
        after=after,
        clock_of=clock_of,
        clock_for=tuple(clock_for),
        timeout_s=timeout_s,
    )
