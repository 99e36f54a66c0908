"""From which step a run goes on, which files a new plan needs where, and who keeps whose copies. Pure."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from skyctl.checkpoint.layout import Held

Holdings = Mapping[str, Mapping[int, Mapping[int, Held]]]
"""By node, step and layer: what the keepers' lists say."""


@dataclass(frozen=True)
class Source:
    """One layer of the chosen step: which file it is, and the nodes that have it."""

    sha256: str
    size_bytes: int
    nodes: tuple[str, ...]


@dataclass(frozen=True)
class Chosen:
    """A step that is there in full.

    ``disagreeing``: in words, layers of which nodes hold different files; the one that counts was taken.
    """

    step: int
    attempt: int
    layers: Mapping[int, Source]
    disagreeing: tuple[str, ...] = field(default=())

    def sha256s(self, start: int, stop: int) -> dict[str, str]:
        """For a rank's ``resume`` payload: the SHA-256 of layers [start, stop)."""
        return {str(layer): self.layers[layer].sha256 for layer in range(start, stop)}


@dataclass(frozen=True)
class Pull:
    """One file that a node needs, and the node that it is to be taken from."""

    source: str
    layer: int
    sha256: str
    size_bytes: int


def newest(holdings: Holdings, layers: int, *, at_most: int | None = None) -> Chosen | None:
    """The newest step of which every layer is on some node, all of one attempt: the latest that has any.

    Where nodes hold different files of one layer, step and attempt, what a rank has written there counts
    before copies, and then the one on more nodes.

    Args:
        layers: how many the model has.
        at_most: no newer step than this, say because a newer one was found damaged.
    """
    there: dict[tuple[int, int], dict[int, dict[str, Held]]] = {}
    for node, steps in sorted(holdings.items()):
        for step, files in steps.items():
            for layer, file in files.items():
                by_layer = there.setdefault((file.attempt, step), {})
                by_layer.setdefault(layer, {})[node] = file
    for attempt, step in sorted(there, reverse=True):
        by_layer = there[attempt, step]
        if (at_most is None or step <= at_most) and all(layer in by_layer for layer in range(layers)):
            return _chosen(step, attempt, {layer: by_layer[layer] for layer in range(layers)})
    return None


def _chosen(step: int, attempt: int, by_layer: Mapping[int, Mapping[str, Held]]) -> Chosen:
    sources, disagreeing = {}, []
    for layer, files in by_layer.items():
        votes = Counter(file.sha256 for file in files.values())
        owned = {file.sha256 for file in files.values() if file.own}
        right = max(votes, key=lambda sha256: (sha256 in owned, votes[sha256], sha256))
        nodes = tuple(node for node, file in files.items() if file.sha256 == right)
        sources[layer] = Source(right, files[nodes[0]].size_bytes, nodes)
        for node, file in files.items():
            if file.sha256 != right:
                disagreeing.append(
                    f"layer {layer} of step {step}: {node} has {file.sha256[:12]}…, "
                    f"{', '.join(nodes)} {right[:12]}…, which counts"
                )
    return Chosen(step, attempt, sources, tuple(disagreeing))


def pulls(
    chosen: Chosen,
    wanted: Mapping[str, Collection[int]],
    rates: Mapping[tuple[str, str], float] | None = None,
) -> dict[str, list[Pull]]:
    """What each node has to take from which other, so that the last one is ready soon.

    The largest files first, each from where it would be there first: over a slow link goes only what would
    take longer over a fast one that is already full.

    Args:
        wanted: by node, the layers that its ranks will hold.
        rates: bytes a second from one node to another; what is not named is as fast as the others on average.
    """
    known = [rate for rate in (rates or {}).values() if rate > 0]
    usual = sum(known) / len(known) if known else 1.0
    busy_s: dict[tuple[str, str], float] = defaultdict(float)
    sent_bytes: dict[str, int] = defaultdict(int)
    found: dict[str, list[Pull]] = {node: [] for node in wanted}
    needs = [
        (chosen.layers[layer], layer, node)
        for node, layers in wanted.items()
        for layer in layers
        if node not in chosen.layers[layer].nodes
    ]
    for source, layer, node in sorted(needs, key=lambda need: (-need[0].size_bytes, need[1], need[2])):

        def ready(giver: str, need: tuple[Source, str] = (source, node)) -> tuple[float, int, str]:
            rate = (rates or {}).get((giver, need[1]), usual) or usual
            seconds = busy_s[giver, need[1]] + need[0].size_bytes / rate
            return seconds, sent_bytes[giver], giver

        giver = min(source.nodes, key=ready)
        busy_s[giver, node] = ready(giver)[0]
        sent_bytes[giver] += source.size_bytes
        found[node].append(Pull(giver, layer, source.sha256, source.size_bytes))
    return found


def replica_peers(
    nodes: Sequence[str], replicas: int = 2, sites: Mapping[str, str] | None = None
) -> dict[str, list[str]]:
    """By node, the nodes whose checkpoints it copies, for its keeper's ``follow``.

    So every node's state is on ``replicas`` nodes, as far as there are so many. A copy goes to another site
    where there is one, so that losing a site loses nothing; then to who copies least; then to the next in
    line.

    Args:
        nodes: in the pipeline's order, each once; nodes without ranks may follow at the end, to copy only.
        sites: by node, its site; None: not known.
    """
    order = list(dict.fromkeys(nodes))
    copies: dict[str, list[str]] = {node: [] for node in order}
    for place, owner in enumerate(order):
        holders = {owner}
        for _ in range(min(replicas, len(order)) - 1):
            there = {(sites or {}).get(node) for node in holders}

            def worth(node: str, at: int = place, there: set[str | None] = there) -> tuple[bool, int, int]:
                site = (sites or {}).get(node)
                distance = (order.index(node) - at) % len(order)
                return site is None or site in there, len(copies[node]), distance

            holder = min((node for node in order if node not in holders), key=worth)
            copies[holder].append(owner)
            holders.add(holder)
    return copies
