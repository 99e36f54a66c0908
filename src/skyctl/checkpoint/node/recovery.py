"""Recovery from checkpoints: the step to resume from, who fetches which shards, who holds copies. Pure."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from skyctl.checkpoint.node.layout import HeldShard

ShardHoldings = Mapping[str, Mapping[int, Mapping[int, HeldShard]]]
"""By node, step and layer: the shards that each node's replicator lists."""


@dataclass(frozen=True)
class ShardSource:
    """The valid shard of one layer of the restore point, and the nodes that hold it."""

    sha256: str
    size_bytes: int
    nodes: tuple[str, ...]


@dataclass(frozen=True)
class RestorePoint:
    """A step of which every layer's shard is on some node.

    Attributes:
        layers: by layer, its shard.
        disagreeing: a sentence for each node that holds another shard than the valid one.
    """

    step: int
    attempt: int
    layers: Mapping[int, ShardSource]
    disagreeing: tuple[str, ...] = field(default=())

    def sha256s(self, start: int, stop: int) -> dict[int, str]:
        """The SHA-256 of layers [start, stop), by layer."""
        return {layer: self.layers[layer].sha256 for layer in range(start, stop)}


@dataclass(frozen=True)
class ShardTransfer:
    """A shard that a node needs, and the node ``source`` to fetch it from."""

    source: str
    layer: int
    sha256: str
    size_bytes: int


def newest_restore_point(
    holdings: ShardHoldings, layers: int, *, at_most: int | None = None
) -> RestorePoint | None:
    """The newest complete step of the latest attempt that has one; None where no step is complete.

    A step is complete where every layer's shard is on some node, all of one attempt. If nodes hold different
    shards of one layer, step and attempt, one that a rank wrote counts before copies, then one on more nodes.

    Args:
        layers: how many layers the model has.
        at_most: the newest step to consider, say because a later one was found damaged.
    """
    there: dict[tuple[int, int], dict[int, dict[str, HeldShard]]] = {}
    for node, steps in sorted(holdings.items()):
        for step, files in steps.items():
            for layer, file in files.items():
                by_layer = there.setdefault((file.attempt, step), {})
                by_layer.setdefault(layer, {})[node] = file
    for attempt, step in sorted(there, reverse=True):
        by_layer = there[attempt, step]
        if (at_most is None or step <= at_most) and all(layer in by_layer for layer in range(layers)):
            return _make_restore_point(step, attempt, {layer: by_layer[layer] for layer in range(layers)})
    return None


def whole_steps(holdings: ShardHoldings, layers: int) -> set[int]:
    """The complete steps, as ``newest_restore_point`` counts them."""
    steps = {step for by_step in holdings.values() for step in by_step}
    only = {
        step: {node: {step: by_step.get(step, {})} for node, by_step in holdings.items()} for step in steps
    }
    return {step for step in steps if newest_restore_point(only[step], layers) is not None}


def _make_restore_point(
    step: int, attempt: int, by_layer: Mapping[int, Mapping[str, HeldShard]]
) -> RestorePoint:
    sources, disagreeing = {}, []
    for layer, files in by_layer.items():
        votes = Counter(file.sha256 for file in files.values())
        owned = {file.sha256 for file in files.values() if file.own}
        right = max(votes, key=lambda sha256: (sha256 in owned, votes[sha256], sha256))
        nodes = tuple(node for node, file in files.items() if file.sha256 == right)
        sources[layer] = ShardSource(right, files[nodes[0]].size_bytes, nodes)
        for node, file in files.items():
            if file.sha256 != right:
                disagreeing.append(
                    f"layer {layer} of step {step}: {node} has {file.sha256[:12]}…, "
                    f"{', '.join(nodes)} {right[:12]}…, which counts"
                )
    return RestorePoint(step, attempt, sources, tuple(disagreeing))


def plan_transfers(
    point: RestorePoint,
    wanted: Mapping[str, Collection[int]],
    rates: Mapping[tuple[str, str], float] | None = None,
) -> dict[str, list[ShardTransfer]]:
    """By node, the shards it must fetch and from where, so that the slowest node is ready soon.

    A greedy assignment: the largest shards first, each from the node that would deliver it first. So a slow
    link is used only for what would take longer over a fast one that is already busy.

    Args:
        point: the step to restore.
        wanted: by node, the layers that its ranks will hold.
        rates: bytes per second by (source, target) node; a missing pair is as fast as the others on average.
    """
    rated = [rate for rate in (rates or {}).values() if rate > 0]
    average = sum(rated) / len(rated) if rated else 1.0
    busy_s: dict[tuple[str, str], float] = defaultdict(float)
    sent_bytes: dict[str, int] = defaultdict(int)
    transfers: dict[str, list[ShardTransfer]] = {node: [] for node in wanted}
    needs = [
        (point.layers[layer], layer, node)
        for node, layers in wanted.items()
        for layer in layers
        if node not in point.layers[layer].nodes
    ]
    for source, layer, node in sorted(needs, key=lambda need: (-need[0].size_bytes, need[1], need[2])):

        def ready_s(giver: str, need: tuple[ShardSource, str] = (source, node)) -> tuple[float, int, str]:
            rate = (rates or {}).get((giver, need[1]), average) or average
            seconds = busy_s[giver, need[1]] + need[0].size_bytes / rate
            return seconds, sent_bytes[giver], giver

        giver = min(source.nodes, key=ready_s)
        busy_s[giver, node] = ready_s(giver)[0]
        sent_bytes[giver] += source.size_bytes
        transfers[node].append(ShardTransfer(giver, layer, source.sha256, source.size_bytes))
    return transfers


def place_replicas(
    nodes: Sequence[str], replicas: int = 2, writers: Collection[str] | None = None
) -> dict[str, list[str]]:
    """By node, the nodes whose checkpoints it copies (its replicator's ``follow``).

    Every writer's shards are then on ``replicas`` nodes, as far as there are that many. A copy is placed on
    the node with the fewest copies, then on the next one in the pipeline.

    Args:
        nodes: in the pipeline's order, each once; nodes without ranks may follow at the end, to copy only.
        writers: those that write checkpoints; None: all.
    """
    order = list(dict.fromkeys(nodes))
    copies: dict[str, list[str]] = {node: [] for node in order}
    for place, owner in enumerate(order):
        if writers is not None and owner not in writers:
            continue
        following = order[place + 1 :] + order[:place]
        for _ in range(min(replicas, len(order)) - 1):
            keeper = min(
                (node for node in following if owner not in copies[node]), key=lambda n: len(copies[n])
            )
            copies[keeper].append(owner)
    return copies
