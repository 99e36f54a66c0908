"""The ranks of a script: where each is, and the variables that ``torchrun`` would give it. Pure.

The names and values are those of PyTorch's *Torchrun (Elastic Launch)*, "Environment Variables", with every
node as an agent of its own and one role, ``default``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from skyctl.errors import InputError
from skyctl.records.script_request import ScriptRequest
from skyctl.schedule.batch_shares import best_shares, proportional_shares

ROLE = "default"
_SHARE = "share:"
_TOKEN = re.compile(r"\{\{|\}\}|\{([a-z_]+(?::[^{}]*)?)\}")


@dataclass(frozen=True)
class ScriptRank:
    """One rank and its place.

    Attributes:
        local_rank: its number among the ranks of its node.
        node_rank: the number of its node among all nodes.
    """

    rank: int
    node: str
    local_rank: int
    local_world_size: int
    node_rank: int
    nodes: int
    world_size: int


def place_ranks(counts: Mapping[str, int]) -> list[ScriptRank]:
    """The ranks, node by node.

    Args:
        counts: by node, in the order of ranks, how many it has.
    """
    world_size, made = sum(counts.values()), list[ScriptRank]()
    for node_rank, (node, count) in enumerate(counts.items()):
        made += [
            ScriptRank(len(made) + local, node, local, count, node_rank, len(counts), world_size)
            for local in range(count)
        ]
    return made


def torchrun_environment(
    rank: ScriptRank, *, run_id: str, restarts: int, max_restarts: int
) -> dict[str, str]:
    """The variables that torchrun gives a rank, but ``MASTER_ADDR``, ``MASTER_PORT`` and the error file.

    ``TORCHELASTIC_USE_AGENT_STORE`` is False: rank 0 itself opens the store.
    """
    return {
        "RANK": str(rank.rank),
        "LOCAL_RANK": str(rank.local_rank),
        "WORLD_SIZE": str(rank.world_size),
        "LOCAL_WORLD_SIZE": str(rank.local_world_size),
        "GROUP_RANK": str(rank.node_rank),
        "GROUP_WORLD_SIZE": str(rank.nodes),
        "ROLE_NAME": ROLE,
        "ROLE_RANK": str(rank.rank),
        "ROLE_WORLD_SIZE": str(rank.world_size),
        "TORCHELASTIC_RUN_ID": run_id,
        "TORCHELASTIC_RESTART_COUNT": str(restarts),
        "TORCHELASTIC_MAX_RESTARTS": str(max_restarts),
        "TORCHELASTIC_USE_AGENT_STORE": "False",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
    }


def find_batch_size(words: Sequence[str]) -> int | None:
    """The samples of a step that ``{share:N}`` in a command line divides; None: nothing is divided.

    Raises:
        InputError: N is no number, or there are several.
    """
    sizes: dict[int, None] = {}
    for word in words:
        for match in _TOKEN.finditer(word):
            name = match.group(1) or ""
            if not name.startswith(_SHARE):
                continue
            text = name.removeprefix(_SHARE)
            if not text.isdecimal() or int(text) == 0:
                raise InputError(
                    f"{match.group()} does not say how many samples a step has",
                    hint="{share:64} is this rank's part of 64 samples",
                )
            sizes[int(text)] = None
    if len(sizes) > 1:
        several = " and ".join(f"{{share:{size}}}" for size in sizes)
        raise InputError(
            f"{several} divide different batches; a run divides one",
            hint="give the same number wherever it stands",
        )
    return next(iter(sizes), None)


def fill_placeholders(word: str, rank: ScriptRank, share: int | None) -> str:
    """A word of a command line as one rank gets it. Only known placeholders in braces are replaced.

    ``{rank}``, ``{local_rank}``, ``{world_size}``, ``{node}``, ``{node_rank}`` and ``{share:N}`` are;
    ``{{`` and ``}}`` stand for single braces.

    Args:
        share: the rank's samples of a step, where there are shares.
    """
    values = {
        "rank": rank.rank,
        "local_rank": rank.local_rank,
        "world_size": rank.world_size,
        "node": rank.node,
        "node_rank": rank.node_rank,
    }

    def one(match: re.Match[str]) -> str:
        if match.group() in ("{{", "}}"):
            return match.group()[0]
        name = match.group(1)
        if name.startswith(_SHARE) and share is not None:
            return str(share)
        return str(values.get(name, match.group()))

    return _TOKEN.sub(one, word)


def divide_batch(request: ScriptRequest, ranks: Sequence[ScriptRank]) -> list[int] | None:
    """By rank, its samples of a step; None: nobody has said how many a step has.

    Args:
        ranks: perhaps fewer than were asked for: then the shares that were named are a proportion.

    Raises:
        InputError: the shares that were named are not what ``{share:N}`` divides, or too small.
    """
    total = find_batch_size(request.words)
    nodes = dict.fromkeys(rank.node for rank in ranks)
    if request.shares is not None:
        shares = {node: request.shares[node] for node in nodes}
        if len(shares) < len(request.shares):
            whole = total or sum(request.shares.values())
            weights = [shares[rank.node] / rank.local_world_size for rank in ranks]
            return list(proportional_shares(whole, weights))
        if total is not None and sum(shares.values()) != total:
            raise InputError(
                f"the shares add up to {sum(shares.values())}, and {{share:{total}}} divides {total}",
                hint="let both be the same batch",
            )
        return divide_by_node(shares, ranks)
    if total is None:
        return None
    speeds = request.speeds or {}
    sample_s = [1.0 / speeds.get(rank.node, 1.0) for rank in ranks]
    return list(best_shares(total, [0.0] * len(sample_s), sample_s))


def relative_speeds(request: ScriptRequest, ranks: Sequence[ScriptRank]) -> list[float] | None:
    """By rank, how fast it is, the fastest one being 1.0; None: it is not known, or shares were named."""
    if request.speeds is None or request.shares is not None:
        return None
    speeds = [request.speeds[rank.node] for rank in ranks]
    return [speed / max(speeds) for speed in speeds]


def sum_by_node(shares: Sequence[int], ranks: Sequence[ScriptRank]) -> dict[str, int]:
    """By node, what its ranks have together, of shares by rank."""
    sums = {rank.node: 0 for rank in ranks}
    for rank, share in zip(ranks, shares, strict=True):
        sums[rank.node] += share
    return sums


def describe_shares(ranks: Sequence[ScriptRank], shares: Sequence[int]) -> str:
    """``a 40, b 12+12``: the shares of each node's ranks."""
    nodes = dict.fromkeys(rank.node for rank in ranks)
    parts = {
        node: [str(share) for rank, share in zip(ranks, shares, strict=True) if rank.node == node]
        for node in nodes
    }
    return ", ".join(f"{node} {'+'.join(part)}" for node, part in parts.items())


def divide_by_node(shares: Mapping[str, int], ranks: Sequence[ScriptRank]) -> list[int]:
    """By rank, its part of its node's share: as equal as whole numbers are, the first ranks have one more.

    Raises:
        InputError: a node has fewer samples than ranks, or has none.
    """
    made = []
    for rank in ranks:
        share = shares.get(rank.node, 0)
        if share < rank.local_world_size:
            raise InputError(
                f"node {rank.node} has {rank.local_world_size} ranks and a share of {share} samples",
                hint="each rank needs a sample at least",
            )
        least, more = divmod(share, rank.local_world_size)
        made.append(least + (rank.local_rank < more))
    return made
