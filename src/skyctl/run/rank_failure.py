"""Why a run's attempt ended: which of several failures came first, who it was, and in words."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from skyctl.errors import NodeError, ProtocolError, RunError, SkyctlError
from skyctl.remote.agent_session import Session
from skyctl.remote.awake_clock import awake_s
from skyctl.remote.remote_task import TaskError, TaskExit, TaskFailure, task_failure_error
from skyctl.run.rank_spec import RankSpec
from skyctl.worker.rank_events import RankResult

_END = "end"
_PASSED_ON: Mapping[str, Collection[str]] = {
    _END: {_END},
    "SpoiltPartError": {"SpoiltPartError"},
    "SpoiltSumError": {"SpoiltPartError", "SpoiltSumError"},
    "PeerLostError": {"PeerLostError"},
}
"""The failures that a rank may have from a peer; by each, those that the peer then has been sent itself."""
LOG_TAIL_LINES = 6
"""A failed rank's last lines that go into the message."""

FailureCause = Literal["lost", "stalled", "died", "raised", "peer", "silent", "deadlock", "launcher"]


@dataclass(frozen=True)
class FailureReport:
    """The facts known of the end of an attempt, beside its error.

    ``cause``: ``lost``, the nodes in ``nodes`` are gone; ``stalled``, silent while others waited; ``died``, a
    signal, or an end without a word; ``raised``, an error event; ``peer``, a connection between two living
    ranks broke; ``silent``, nothing was heard for long; ``deadlock``; ``launcher``, something on this side.
    ``step``: steps that every rank had finished. ``final``: it would come again, whatever is changed.
    ``accuser``: the node whose rank says that the lost one sent it what skyctl never sends. ``apart``: two
    nodes whose ranks could not connect with each other.
    """

    cause: FailureCause
    nodes: tuple[str, ...] = ()
    ranks: tuple[int, ...] = ()
    step: int = 0
    phase: str = ""
    final: bool = False
    accuser: str | None = None
    apart: tuple[str, str] | None = None


@dataclass(frozen=True)
class EarlyEnd:
    """A rank has ended after ``steps`` steps, as the rank ``told_by`` told it; nobody had asked for that."""

    steps: int
    told_by: int


@dataclass
class RankState:
    """A rank as the launcher knows it; ``heard_at``, ``phase_since``: by ``remote.awake_clock``, in seconds.

    ``waiting``: it only waits for another rank. ``is_joining``: it has yet to become one of those that make
    steps, so nobody waits for it. ``is_out``: the others go on without it. ``failure``: what ended it.
    ``tail``: its last lines.
    """

    spec: RankSpec
    phase: str = "starting"
    waiting: bool = False
    heard_at: float | None = None
    phase_since: float = field(default_factory=awake_s)
    result: RankResult | None = None
    is_joining: bool = False
    is_out: bool = False
    failure: TaskFailure | SkyctlError | EarlyEnd | None = None
    tail: list[str] = field(default_factory=list)

    @property
    def name(self) -> str:
        """The rank with its device and node, as messages name it."""
        return f"rank {self.spec.rank} on {self.spec.device} (node {self.spec.node})"

    def enter_phase(self, phase: str, *, waiting: bool = False) -> None:
        """Notes what it is at; ``phase_since`` is when that last changed."""
        if (phase, waiting) != (self.phase, self.waiting):
            self.phase, self.waiting, self.phase_since = phase, waiting, awake_s()


def as_skyctl_error(error: BaseException) -> SkyctlError:
    """The error that ended a connection, as one that names its cause."""
    return error if isinstance(error, SkyctlError) else SkyctlError(str(error))


def is_consequence(rank: RankState) -> bool:
    """Whether its failure follows from another: a neighbour is gone, or the agent was ending its tasks."""
    return _lost_its_peer(rank) or _ended_by_agent(rank)


def _lost_its_peer(rank: RankState) -> bool:
    return isinstance(rank.failure, TaskError) and rank.failure.type == "PeerLostError"


def _ended_by_agent(rank: RankState) -> bool:
    return isinstance(rank.failure, TaskExit) and rank.failure.agent_ended is not None


def first_failure(failed: Sequence[RankState]) -> RankState:
    """The earliest that is not just a lost peer; a lost node goes before what its ranks still said."""
    primary = [rank for rank in failed if rank.failure is not None and not is_consequence(rank)]
    ended = [rank for rank in failed if _ended_by_agent(rank)]
    return (primary or ended or list(failed))[0]


def failure_error(rank: RankState, session: Session, log: str | None) -> SkyctlError:
    """The error to show for a rank's failure: which rank, where, in which phase, and its last lines.

    Args:
        rank: one whose ``failure`` is an error or its process's end; not an ``EarlyEnd``.
        session: with its node.
        log: the path of what it has printed, which the error names; None: there is none.
    """
    spec, failure = rank.spec, rank.failure
    assert failure is not None
    assert not isinstance(failure, EarlyEnd), "that names another"
    if isinstance(failure, SkyctlError):
        return failure
    who = f"rank {spec.rank} on {spec.device} (node {spec.node}, {session.host})"
    printed = "".join(f"\n    {line}" for line in rank.tail[-LOG_TAIL_LINES:])
    cause = task_failure_error(session.node, failure, place="", workload=spec.source)
    names_phase = isinstance(failure, TaskError) and failure.skyctl
    where = "" if names_phase else f" in {rank.phase}"
    cause.message = f"{who} failed{where}: {cause.message}{printed}"
    cause.log = log
    return cause


def accused_rank(rank: RankState) -> int | None:
    """The peer that has sent it what skyctl never sends, as it says; None: its failure is another."""
    if not isinstance(rank.failure, TaskError) or _can_not_connect(rank) or _lost_its_peer(rank):
        return None
    return rank.failure.peer_rank


def unreachable_rank(rank: RankState) -> int | None:
    """The peer that it could not connect with; None: its failure is another."""
    return rank.failure.peer_rank if isinstance(rank.failure, TaskError) and _can_not_connect(rank) else None


def _can_not_connect(rank: RankState) -> bool:
    return isinstance(rank.failure, TaskError) and rank.failure.type == "PeerUnreachableError"


def passed_on_by(rank: RankState) -> tuple[str, int] | None:
    """The failure that a peer passed on to it and that ended it, and the peer; None: it failed otherwise."""
    failure = rank.failure
    if isinstance(failure, EarlyEnd):
        return _END, failure.told_by
    if isinstance(failure, TaskError) and failure.peer_rank is not None and failure.type in _PASSED_ON:
        return failure.type, failure.peer_rank
    return None


def first_of_chain(first: RankState, ranks: Sequence[RankState]) -> tuple[list[RankState], bool]:
    """The ranks where the failure that reached ``first`` began, and whether they form a circle.

    Without a circle the last two: to whom it was passed on, and by whom, who is not known to have it from
    anybody. In a circle all of it: they contradict each other.

    Args:
        first: one for whom ``passed_on_by`` is not None.
        ranks: all, by rank.
    """
    chain, origin = [first], passed_on_by(first)
    assert origin is not None
    may_be = _PASSED_ON[origin[0]]
    while origin is not None and origin[0] in may_be:
        if chain[-1] in chain[:-1]:
            return chain[chain.index(chain[-1]) : -1], True
        may_be = _PASSED_ON[origin[0]]
        chain.append(ranks[origin[1]])
        origin = passed_on_by(chain[-1])
    return chain[-2:], False


def contradiction(members: Sequence[RankState], step: int) -> tuple[RunError, FailureReport]:
    """The failure of ranks that each say that what ended the run came from the next one.

    Args:
        step: steps that every rank had finished.
    """
    what = (
        "have ended early, which nobody has asked for. Each of them says that another one told it to"
        if isinstance(members[0].failure, EarlyEnd)
        else "have summed finite numbers, and the sum is not finite. Each of them says that it was spoilt by "
        "another one"
    )
    error = RunError(
        f"{_names(members)} {what}, and nothing tells which of them is wrong",
        hint="if it comes again, plan without one of them: --limit",
    )
    return error, _report_of_all(members, step)


def broken_connection(
    members: Sequence[RankState], error: SkyctlError, step: int
) -> tuple[SkyctlError, FailureReport]:
    """The failure of a rank that has lost a connection: any end of it may have closed it.

    Args:
        members: that rank, and who else has to do with it.
        error: to show for the rank's failure.
        step: steps that every rank had finished.
    """
    error.message += f"\n    its other end is of {_names(members[1:])}: either may have closed it"
    return error, _report_of_all(members, step)


def _names(ranks: Sequence[RankState]) -> str:
    *others, last = [rank.name for rank in ranks]
    return f"{', '.join(others)} and {last}" if others else last


def _report_of_all(ranks: Sequence[RankState], step: int) -> FailureReport:
    nodes, numbers = zip(*((rank.spec.node, rank.spec.rank) for rank in ranks), strict=True)
    return FailureReport("peer", nodes, numbers, step, ranks[0].phase)


def accusation(
    accuser: RankState, accused: RankState, step: int, log: str | None
) -> tuple[ProtocolError, FailureReport]:
    """The failure of a rank that names one of its peers: that one's node counts as lost.

    Args:
        step: steps that every rank had finished.
        log: the accuser's.
    """
    failure, node = accuser.failure, accused.spec.node
    if isinstance(failure, EarlyEnd):
        said = (
            f"told {accuser.name} that the run ends with step {failure.steps}, and nobody has asked for that"
        )
    else:
        assert isinstance(failure, TaskError)
        said = f"sent {accuser.name} what skyctl never sends: {failure.message}"
    error = ProtocolError(f"node {node} {said}", node=node, log=log)
    report = FailureReport(
        "lost", (node,), (accused.spec.rank,), step, accuser.phase, accuser=accuser.spec.node
    )
    return error, report


def failure_report(rank: RankState, step: int) -> FailureReport:
    """The kind of fault that a rank's failure tells of."""

    def report(cause: FailureCause, *, final: bool = False) -> FailureReport:
        return FailureReport(cause, (rank.spec.node,), (rank.spec.rank,), step, rank.phase, final)

    failure = rank.failure
    assert not isinstance(failure, EarlyEnd), "that names another"
    if isinstance(failure, SkyctlError):
        return report("lost" if isinstance(failure, NodeError) else "launcher")
    if isinstance(failure, TaskExit):
        return report("lost" if _ended_by_agent(rank) else "died")
    if _lost_its_peer(rank):
        return report("peer")
    assert failure is not None
    # An error of our own code about its input or the cluster stays so; the user's code may have had bad luck.
    ours = failure.skyctl and failure.exit_code in (2, 3, 5)
    unsupported = failure.module is not None or failure.type == "UnsupportedDtypeError"
    return report("raised", final=ours or unsupported)


def silent_error(rank: RankState, quiet_s: float, log: str | None) -> RunError:
    """The error for a rank of which nothing at all was heard."""
    return RunError(
        f"no sign of life from {rank.name} for {quiet_s:.0f} s, last heard in {rank.phase}",
        hint="see whether the node sleeps, swaps or lost its network; then launch again",
        log=log,
    )


def stalled_error(rank: RankState, quiet_s: float, log: str | None) -> RunError:
    """The error for a rank that is silent while its node answers and others wait for it."""
    return RunError(
        f"{rank.name} has stalled: its node answers, but nothing has come from it for {quiet_s:.0f} s and "
        f"all others wait; it was in {rank.phase}",
        hint="it may have been stopped (SIGSTOP), or hang in a call that never returns",
        log=log,
    )


def lost_error(ranks: Sequence[RankState], quiet_s: float) -> NodeError:
    """The error for nodes that are not heard, while all ranks that are heard wait."""
    nodes = sorted({rank.spec.node for rank in ranks})
    which = f"node {nodes[0]} has" if len(nodes) == 1 else f"nodes {', '.join(nodes)} have"
    were = "; ".join(f"rank {rank.spec.rank} on {rank.spec.device} was in {rank.phase}" for rank in ranks)
    return NodeError(
        f"{which} not been heard for {quiet_s:.0f} s and all other ranks wait; {were}",
        node=nodes[0],
        hint=f"see whether it is up: `skyctl check --limit {nodes[0]}`",
    )


def deadlock_error(ranks: Sequence[RankState], stall_s: float) -> RunError:
    """The error where every rank has only waited for another one for ``stall_s`` seconds."""
    lines = "".join(f"\n  {rank.name} waits in {rank.phase}" for rank in ranks)
    return RunError(
        f"every rank has waited for another for {stall_s:.0f} s:{lines}",
        hint="a network that drops packets without a word looks like this: skyctl check",
    )
