"""Ranks that sum over routes, as threads of this process, each with connections of its own to its peers."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

from skyctl.transport.peer_connection import PeerConnection
from skyctl.transport.process_group import SkyctlProcessGroup
from skyctl.worker.peer import Peer
from skyctl.worker.rank_order import RoutePlace

Edges = Sequence[tuple[int, int]]
RouteEdges = tuple[float, int, Edges, Edges]
"""(share, root, up: child → parent, down: parent → child)."""


def ring(count: int) -> list[RouteEdges]:
    """A route a member: the path that starts after its root."""
    routes: list[RouteEdges] = []
    for root in range(count):
        path = [(root + 1 + i) % count for i in range(count)]
        up = list(itertools.pairwise(path))
        down = list(itertools.pairwise([root, *path[:-1]]))
        routes.append((1 / count, root, up, down))
    return routes


def star(count: int, root: int = 0) -> list[RouteEdges]:
    """One route: everybody to the root and back."""
    others = [rank for rank in range(count) if rank != root]
    return [(1.0, root, [(rank, root) for rank in others], [(root, rank) for rank in others])]


def places(routes: Sequence[RouteEdges], rank: int) -> list[RoutePlace]:
    """A rank's place on each route."""
    places = []
    for share, _, up, down in routes:
        up_parent = [parent for child, parent in up if child == rank]
        down_parent = [parent for parent, child in down if child == rank]
        places.append(
            RoutePlace(
                share=share,
                up_children=tuple(child for child, parent in up if parent == rank),
                up_parent=up_parent[0] if up_parent else None,
                down_parent=down_parent[0] if down_parent else None,
                down_children=tuple(child for parent, child in down if parent == rank),
            )
        )
    return places


@contextmanager
def connected(routes: Sequence[RouteEdges], count: int) -> Iterator[list[dict[int, Peer]]]:
    """By rank, those that a route joins it with, each reached over a connection of its own."""
    pairs = {(min(edge), max(edge)) for _, _, up, down in routes for edge in (*up, *down)}
    ends: list[dict[int, PeerConnection]] = [{} for _ in range(count)]
    with ThreadPoolExecutor(1) as pool:
        for low, high in sorted(pairs):
            listening = PeerConnection(f"rank {high}", 20.0, secret=f"{low} {high}", peer_rank=high)
            calling = PeerConnection(f"rank {low}", 20.0, secret=f"{low} {high}", peer_rank=low)
            port = listening.listen("127.0.0.1")
            accepted = pool.submit(listening.accept, 20.0)
            calling.connect("127.0.0.1", port, timeout_s=20.0)
            accepted.result()
            ends[low][high], ends[high][low] = listening, calling
    groups = [SkyctlProcessGroup(rank, count, pairs) for rank, pairs in enumerate(ends)]
    try:
        yield [{rank: Peer(group, rank) for rank in pairs} for group, pairs in zip(groups, ends, strict=True)]
    finally:
        for group in groups:
            group.close()


def together(count: int, act: Callable[[int], Any]) -> list[Any]:
    """Every rank's part at the same time; by rank, what came of it, an error as well."""

    def attempt(rank: int) -> Any:
        try:
            return act(rank)
        except Exception as exc:
            return exc

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(attempt, range(count)))
