"""Who is alive: what the launcher heard of each rank and node, and what follows from it. Pure.

**Unreachable is not dead.** A node that the launcher does not hear may train on: as long as the ranks that
are heard get on, it is only redialled. It is lost when it is not heard *and* all of those wait. A rank that
is silent though its agent answers, while others wait for it, has stalled.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Deadlines:
    """Seconds of patience.

    ``start_s``: for a rank's first word (its Python must import torch). ``silence_s``: between two words of a
    rank that nobody is seen to wait for. ``stall_s``: for ranks that all wait for each other and get nowhere,
    or ``stall_steps`` predicted steps if that is more. A rank that computes may take as long as it needs.
    ``warn_s``: a rank or node not heard for so long is named. ``node_timeout_s``: not heard for so long while
    all that are heard wait, it is given up. ``stop_s``: for a last checkpoint, when the run is to end.
    """

    start_s: float = 180.0
    silence_s: float = 45.0
    stall_s: float = 60.0
    stall_steps: float = 5.0
    warn_s: float = 8.0
    node_timeout_s: float = 10.0
    stop_s: float = 60.0


@dataclass(frozen=True)
class Sign:
    """A rank that has not ended, as it looks now. Times in seconds ago.

    ``heard_s``: its last word (None: none yet, ``started_s`` counts). ``node_heard_s``: anything at all from
    its node. ``away``: the connection is known to be gone. ``still_s``: since its phase changed.
    """

    rank: int
    node: str
    name: str
    phase: str
    waiting: bool
    still_s: float
    started_s: float
    heard_s: float | None
    node_heard_s: float = 0.0
    away: bool = False


@dataclass(frozen=True)
class Verdict:
    """What is wrong, and with which ranks.

    ``lost``: their nodes are given up. ``stalled``: silent, others wait, the agent answers. ``silent``: no
    sign of life in all that time. ``deadlock``: every one waits for another.
    """

    kind: Literal["lost", "stalled", "silent", "deadlock"]
    ranks: tuple[int, ...]
    quiet_s: float


WAITING_SHARE = 0.5
"""Ranks that are heard stand still because a node is gone, if they have waited for half of the time at which
it is given up (they had some microbatches left when it went), and for this part of a step."""


def suspects(signs: Sequence[Sign], limits: Deadlines) -> dict[str, tuple[float, list[Sign]]]:
    """Who has not been heard for ``warn_s``: by node, or by rank's name where its node is heard."""
    found: dict[str, tuple[float, list[Sign]]] = {}
    for sign in signs:
        if sign.heard_s is None:
            continue
        if sign.away or sign.node_heard_s >= limits.warn_s:
            quiet_s = max(sign.node_heard_s, 0.0)
            known = found.setdefault(f"node {sign.node}", (quiet_s, []))
            known[1].append(sign)
        elif sign.heard_s >= limits.warn_s:
            found[sign.name] = (sign.heard_s, [sign])
    return found


def judge(
    signs: Sequence[Sign], limits: Deadlines, stall_s: float, iteration_s: float = 0.0
) -> Verdict | None:
    """The first thing that is wrong, or None.

    Args:
        signs: of all ranks that have not ended.
        stall_s: patience with ranks that all wait for each other.
        iteration_s: a step's predicted time: with slow microbatches, waiting for long is nothing special.
    """
    for sign in signs:
        if sign.heard_s is None and sign.started_s > limits.start_s:
            return Verdict("silent", (sign.rank,), sign.started_s)
    unheard = [sign for sign in signs if _unheard(sign, limits)]
    heard = [sign for sign in signs if not _unheard(sign, limits)]
    gone = [sign for sign in unheard if _quiet_s(sign) >= limits.node_timeout_s]
    still_s = max(limits.node_timeout_s / 2, iteration_s * WAITING_SHARE)
    if gone and heard and all(sign.waiting and sign.still_s >= still_s for sign in heard):
        lost = [sign for sign in gone if sign.away or sign.node_heard_s >= limits.warn_s]
        named = lost or gone
        return Verdict(
            "lost" if lost else "stalled",
            tuple(sign.rank for sign in named),
            max(_quiet_s(sign) for sign in named),
        )
    for sign in signs:
        if not sign.away and sign.heard_s is not None and sign.heard_s > limits.silence_s:
            return Verdict("silent", (sign.rank,), sign.heard_s)
    if signs and all(sign.waiting and sign.still_s > stall_s and not sign.away for sign in signs):
        return Verdict("deadlock", tuple(sign.rank for sign in signs), stall_s)
    return None


def _unheard(sign: Sign, limits: Deadlines) -> bool:
    """It must have spoken once: one that is starting imports torch, and says nothing meanwhile."""
    return sign.heard_s is not None and (sign.away or _quiet_s(sign) >= limits.warn_s)


def _quiet_s(sign: Sign) -> float:
    return sign.heard_s or 0.0
