"""Why a run's attempt ended: which of several failures came first, who it was, and in words."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from skyctl.errors import NodeError, RunError, SkyctlError
from skyctl.launch.spec import RankSpec
from skyctl.remote.session import Session, Task, translate

TAIL_LINES = 6
"""A failed rank's last lines that go into the message."""

Why = Literal["lost", "stalled", "died", "raised", "peer", "silent", "deadlock", "launcher"]


@dataclass(frozen=True)
class Evidence:
    """What is known of the end of an attempt, beside its error.

    ``why``: ``lost``, the nodes in ``nodes`` are gone; ``stalled``, silent while others waited; ``died``, a
    signal, or an end without a word; ``raised``, an error event; ``peer``, a connection between two living
    ranks broke; ``silent``, nothing was heard for long; ``deadlock``; ``launcher``, something on this side.
    ``step``: steps that every rank had finished. ``final``: it would come again, whatever is changed.
    """

    why: Why
    nodes: tuple[str, ...] = ()
    ranks: tuple[int, ...] = ()
    step: int = 0
    phase: str = ""
    final: bool = False


@dataclass
class RankState:
    """A rank as the launcher knows it. ``heard``, ``moved``: on this machine's monotonic clock."""

    spec: RankSpec
    task: Task
    phase: str = "starting"
    waiting: bool = False
    heard: float | None = None
    moved: float = field(default_factory=time.monotonic)
    result: dict[str, Any] | None = None
    failure: dict[str, Any] | None = None
    tail: list[str] = field(default_factory=list)

    @property
    def name(self) -> str:
        return f"rank {self.spec.rank} on {self.spec.device} (node {self.spec.node})"

    def at(self, phase: str, *, waiting: bool = False) -> None:
        """Notes what it is at; ``moved`` is when that last changed."""
        if (phase, waiting) != (self.phase, self.waiting):
            self.phase, self.waiting, self.moved = phase, waiting, time.monotonic()


def follows(failure: Mapping[str, Any]) -> bool:
    """Whether a failure only follows from another: a neighbour is gone, or the agent was ending its tasks."""
    return failure.get("type") == "PeerLostError" or bool(failure.get("agent_ended"))


def first_of(failed: Sequence[RankState]) -> RankState:
    """The earliest that is not just a lost peer; a lost node goes before what its ranks still said."""
    primary = [rank for rank in failed if rank.failure is not None and not follows(rank.failure)]
    ended = [rank for rank in failed if rank.failure is not None and rank.failure.get("agent_ended")]
    return (primary or ended or list(failed))[0]


def explain(rank: RankState, session: Session, log: str | None) -> SkyctlError:
    """The error to show for a rank's failure."""
    spec, failure = rank.spec, rank.failure or {}
    who = f"rank {spec.rank} on {spec.device} (node {spec.node}, {session.host})"
    raised = failure.get("raised")
    if isinstance(raised, SkyctlError):
        return raised
    printed = "".join(f"\n    {line}" for line in rank.tail[-TAIL_LINES:])
    cause = translate(session.node, dict(failure))
    where = "" if failure.get("skyctl") else f" in {rank.phase}"  # ours say it themselves
    message = cause.message.removeprefix(f"on node {spec.node}: ")
    cause.message = f"{who} failed{where}: {message}{printed}"
    cause.log = log
    return cause


def evidence_of(rank: RankState, step: int) -> Evidence:
    """What a rank's failure says of the kind of fault."""
    failure = rank.failure or {}
    node, number = rank.spec.node, rank.spec.rank
    raised = failure.get("raised")
    if raised is not None:
        lost = isinstance(raised, NodeError)
        return Evidence("lost" if lost else "launcher", (node,), (number,), step, rank.phase)
    if failure.get("agent_ended"):
        return Evidence("lost", (node,), (number,), step, rank.phase)
    if failure.get("event") == "exit":
        return Evidence("died", (node,), (number,), step, rank.phase)
    if failure.get("type") == "PeerLostError":
        return Evidence("peer", (node,), (number,), step, rank.phase)
    # What our own code says of its input or of the cluster stays so; the user's code may have had bad luck.
    final = bool(failure.get("skyctl")) and int(failure.get("exit_code") or 1) in (2, 3, 5)
    final = final or bool(failure.get("module"))
    return Evidence("raised", (node,), (number,), step, rank.phase, final)


def silent(rank: RankState, quiet_s: float, log: str | None) -> RunError:
    """Nothing at all was heard of it."""
    return RunError(
        f"no sign of life from {rank.name} for {quiet_s:.0f} s, last heard in {rank.phase}",
        hint="see whether the node sleeps, swaps or lost its network; then launch again",
        log=log,
    )


def stalled(rank: RankState, quiet_s: float, log: str | None) -> RunError:
    """Its node answers and it does not, while others wait for it."""
    return RunError(
        f"{rank.name} has stalled: its node answers, but nothing has come from it for {quiet_s:.0f} s and "
        f"all others wait; it was in {rank.phase}",
        hint="it may have been stopped (SIGSTOP), or hang in a call that never returns",
        log=log,
    )


def lost(ranks: Sequence[RankState], quiet_s: float) -> NodeError:
    """Nodes that are not heard, while all ranks that are heard wait."""
    nodes = sorted({rank.spec.node for rank in ranks})
    which = f"node {nodes[0]} has" if len(nodes) == 1 else f"nodes {', '.join(nodes)} have"
    were = "; ".join(f"rank {rank.spec.rank} on {rank.spec.device} was in {rank.phase}" for rank in ranks)
    return NodeError(
        f"{which} not been heard for {quiet_s:.0f} s and all other ranks wait; {were}",
        node=nodes[0],
        hint=f"see whether it is up: `skyctl check --limit {nodes[0]}`",
    )


def deadlock(ranks: Sequence[RankState], stall_s: float) -> RunError:
    """Every rank waits for another one."""
    lines = "".join(f"\n  {rank.name} waits in {rank.phase}" for rank in ranks)
    return RunError(
        f"every rank has waited for another for {stall_s:.0f} s:{lines}",
        hint="a network that drops packets without a word looks like this: skyctl check",
    )
