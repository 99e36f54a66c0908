"""The kind of fault that ended an attempt, whether another one is worth it, and how long to wait. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from skyctl.errors import (
    InfeasibleError,
    InputError,
    MismatchError,
    NodeError,
    ProtocolError,
    RunError,
    SkyctlError,
    UndecidedError,
    UnreachableError,
)
from skyctl.records.cluster import node_of
from skyctl.records.run_state import RunState
from skyctl.run.rank_failure import FailureReport
from skyctl.worker.rank_events import RESTORE_PHASE

MAX_BACKOFF_S = 30.0

FaultKind = Literal["node", "died", "stalled", "network", "failed", "checkpoint", "final"]


@dataclass(frozen=True)
class Fault:
    """``kind``: ``node``, those in ``lost`` are gone; ``died``, a rank was killed or ended without a word;
    ``stalled``, it hangs or is stopped; ``network``, a connection between living ranks broke; ``failed``, it
    raised; ``checkpoint``, what it was to go on from is damaged; ``final``, not worth another attempt.
    ``apart``: two nodes that could not connect with each other.
    """

    kind: FaultKind
    lost: tuple[str, ...] = ()
    rank: int | None = None
    step: int = 0
    apart: tuple[str, str] | None = None

    @property
    def may_recover(self) -> bool:
        """Whether another attempt may help: any kind of fault but ``final``."""
        return self.kind != "final"


_KIND_OF_CAUSE: Mapping[str, FaultKind] = {
    "died": "died",
    "stalled": "stalled",
    "silent": "stalled",
    "peer": "network",
    "deadlock": "network",
    "raised": "failed",
}


def classify(error: SkyctlError, report: FailureReport | None) -> Fault:
    """The kind of fault that an attempt's error is.

    Args:
        report: what the attempt knows of it; None: it failed before a rank was started.
    """
    if report is None:
        if isinstance(error, NodeError):  # shipping to it failed, or starting a task there
            return Fault("node", (error.node,))
        return Fault("final")
    rank = report.ranks[0] if report.ranks else None
    if report.cause == "lost":
        return Fault("node", report.nodes, rank, report.step)
    if report.cause == "raised" and report.phase == RESTORE_PHASE and isinstance(error, InputError):
        return Fault("checkpoint", (), rank, report.step)
    if report.final or isinstance(error, InputError | MismatchError | InfeasibleError | UndecidedError):
        return Fault("final", (), rank, report.step)
    if report.cause == "launcher":
        return Fault("final", (), rank, report.step)  # our own disk, say: no node can help that
    return Fault(_KIND_OF_CAUSE[report.cause], (), rank, report.step, report.apart)


@dataclass
class RestartPolicy:
    """Whether and when a failed attempt is followed by another.

    Attributes:
        max_restarts: attempts after a fault, counted anew after each checkpoint.
        failed: attempts that failed since the last new checkpoint.
        repeated: the last fault was one that had come before, and would for ever.
    """

    max_restarts: int
    failed: int = 0
    repeated: bool = False
    _checkpoint: int | None = None
    _raised: set[tuple[int | None, int]] = field(default_factory=set)
    _accused: dict[str, str] = field(default_factory=dict)

    def believe(
        self, error: SkyctlError, report: FailureReport | None
    ) -> tuple[SkyctlError, FailureReport | None]:
        """Which of two nodes is lost where one says that the other sent it what skyctl never sends.

        Nobody else has seen it, so a node is believed once: with a second accusation it is the lost one
        itself. So a liar drives no more than one honest node out of a run.
        """
        if report is None or report.accuser is None:
            return error, report
        accuser, accused = report.accuser, report.nodes[0]
        before = self._accused.setdefault(accuser, accused)
        if before == accused:
            return error, report
        doubt = ProtocolError(
            f"node {accuser} has now said of a second node that it sent what skyctl never sends (of {before} "
            f"before), and is not believed: {error.message}",
            node=accuser,
            log=error.log,
        )
        return doubt, replace(report, nodes=(accuser,))

    def wait_s(self, fault: Fault, checkpoint: int | None) -> float | None:
        """How long to wait before the next attempt; None: there is to be none.

        Args:
            checkpoint: the newest complete one's step (None: there is none yet).
        """
        if not fault.may_recover:
            return None
        if checkpoint is not None and (self._checkpoint is None or checkpoint > self._checkpoint):
            self._checkpoint, self.failed = checkpoint, 0
        self.failed += 1
        if fault.kind == "failed":
            self.repeated = (fault.rank, fault.step) in self._raised
            self._raised.add((fault.rank, fault.step))
        if self.failed > self.max_restarts or self.repeated:
            return None
        if fault.kind == "node" and self.failed == 1:
            return 0.0
        return min(MAX_BACKOFF_S, 2.0 ** (self.failed - 1))


def resume_hint(state: RunState, unit: str, *, done: bool = False) -> str | None:
    """How to go on with a run once it has ended, as hints say it; None where it has no checkpoint.

    Args:
        unit: what people call its steps (``Rhythm.unit``).
        done: it has ended well (or is about to): it goes on for as many steps as are given.
    """
    if state.checkpoint is None:
        return None
    more = " --steps MORE" if done else ""
    return f"go on from {unit} {state.checkpoint}: skyctl launch --resume {state.run_id}{more}"


def no_checkpoint_error(state: RunState, there: Collection[str]) -> RunError:
    """The error where a run was to be resumed, and no checkpoint of it is there in full.

    Nobody has asked for all its steps to be made again, so it is not begun anew.

    Args:
        there: the nodes that are connected.
    """
    devices = (device for attempt in state.attempts for device in attempt.devices)
    away = [name for name in dict.fromkeys(map(node_of, devices)) if name not in there]
    where = f"; its nodes {', '.join(away)} are not connected" if away else ""
    return RunError(
        f"no checkpoint of run {state.run_id} is there in full, not every layer of the newest (step "
        f"{state.checkpoint}) nor of an older one{where}",
        hint=f"bring back the nodes that have it (what is where: skyctl checkpoint ls {state.run_id})",
    )


def final_error(error: SkyctlError, fault: Fault, policy: RestartPolicy, resume: str | None) -> SkyctlError:
    """The error to end with: the first cause, how often it was tried, and how to resume.

    Args:
        resume: what ``resume_hint`` says of the run.
    """
    if policy.repeated:
        error.message += "\n  it is the same rank in the same step as before, so it was tried again once only"
    elif fault.may_recover and policy.failed > 1:
        tries = policy.failed - 1
        again = "once" if tries == 1 else f"{tries} times"
        error.message += (
            f"\n  tried again {again} since the last checkpoint (--max-restarts {policy.max_restarts})"
        )
    if resume is not None:
        error.hint = f"{error.hint}; then {resume}" if error.hint else resume
    return error


def node_is_gone(error: NodeError) -> bool:
    """Whether the error says that the node went away, or can't be trusted; else the node lacks something."""
    return isinstance(error, UnreachableError | ProtocolError) or type(error) is NodeError


def restart_reason(fault: Fault, error: SkyctlError) -> str:
    """The reason for the next attempt, as one line of the run's state."""
    if fault.lost:
        return f"node {', '.join(fault.lost)} was lost"
    first = error.message.splitlines()[0]
    return first if len(first) <= 200 else f"{first[:199]}…"


def restart_text(
    error: SkyctlError, policy: RestartPolicy, wait_s: float, nodes: Sequence[str], state: RunState
) -> str:
    """The error that an attempt has ended with, and what the next one is, for whoever watches.

    Args:
        wait_s: until then.
        nodes: of its plan.
    """
    soon = f" in {wait_s:.0f} s" if wait_s else ""
    text = (
        f"{error.message}\n  trying again{soon} on {', '.join(nodes)} "
        f"({policy.failed} of {policy.max_restarts} restarts)"
    )
    if isinstance(error, ProtocolError):
        command = f"skyctl join {state.run_id} {error.node}"
        text += f"\n  node {error.node} is not taken back unless asked for: {command}"
    return text
