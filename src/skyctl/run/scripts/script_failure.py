"""The ranks of a script as far as they got, and the errors of those that failed or hang."""

from __future__ import annotations

import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from skyctl.errors import RunError, SkyctlError
from skyctl.remote.agent_session import Session
from skyctl.remote.awake_clock import awake_s
from skyctl.remote.remote_task import TaskFailure, task_failure_error
from skyctl.run.scripts.script_ranks import ScriptRank
from skyctl.script.script_events import ScriptResult

TOLD_APART_S = 1.0
"""Ranks say within half a second when they stopped: the first one is known if it is earlier by more."""
SHOWN_LINES = 8
"""A failed rank's last lines that go into the message."""


@dataclass
class ScriptRankState:
    """The launcher's knowledge of a rank of a script.

    Attributes:
        failure: what ended it other than its process's own end.
        tail: the last lines that it printed.
        steps_s: the seconds of its own that each of its steps has taken, where they are timed.
        batch: samples of a step over all ranks that it has asked its share of, where steps are timed.
        idle_since: since when it has used no processor; None: it uses one.
    """

    rank: ScriptRank
    started: bool = False
    result: ScriptResult | None = None
    failure: TaskFailure | SkyctlError | None = None
    tail: list[str] = field(default_factory=list)
    steps_s: list[float] = field(default_factory=list)
    batch: int | None = None
    idle_since: float | None = None
    printed_at: float = field(default_factory=awake_s)

    def stalled_s(self) -> float:
        """For how long it has neither printed anything nor used a processor; 0.0 where it is at work."""
        if self.has_ended or self.idle_since is None:
            return 0.0
        return awake_s() - max(self.idle_since, self.printed_at)

    @property
    def has_ended(self) -> bool:
        """Whether the rank's process has ended, or its node is lost: it sends nothing more."""
        return self.result is not None or self.failure is not None

    @property
    def has_failed(self) -> bool:
        """Whether the rank has ended with an exit status other than 0, or with its node."""
        return self.failure is not None or (self.result is not None and self.result.returncode != 0)

    @property
    def name(self) -> str:
        """Its number and its node, as error messages name a rank."""
        return f"rank {self.rank.rank} (node {self.rank.node})"


def rank_error(state: ScriptRankState, session: Session, log: str | None) -> SkyctlError:
    """The error of a rank that has failed.

    Args:
        session: with its node.
        log: the path of what it printed.
    """
    who = f"rank {state.rank.rank} (node {state.rank.node}, {session.host})"
    failure, result = state.failure, state.result
    if isinstance(failure, SkyctlError):
        return failure
    if failure is not None:
        error = task_failure_error(session.node, failure, place="")
        error.message = f"{who} could not be started: {error.message}"
        error.log = log
        return error
    assert result is not None
    return _script_error(who, result, state.tail, log)


def _script_error(who: str, result: ScriptResult, tail: Sequence[str], log: str | None) -> RunError:
    """The error of a rank whose process has ended with another status than 0."""
    if result.returncode < 0:
        try:
            how = f"was ended by {signal.Signals(-result.returncode).name}"
        except ValueError:
            how = f"was ended by signal {-result.returncode}"
    else:
        how = f"ended with exit status {result.returncode}"
    if result.recorded is not None:
        lines = (result.recorded.traceback or result.recorded.message).rstrip().splitlines()
    else:
        lines = [line for line in tail if line.strip()]
    printed = "".join(f"\n    {line}" for line in lines[-SHOWN_LINES:])
    hint = (
        "SIGKILL often is the system short of memory: see its kernel log (dmesg)"
        if result.returncode == -signal.SIGKILL
        else None
    )
    return RunError(f"{who} {how}{printed}", hint=hint, log=log)


def stall_error(
    running: Sequence[ScriptRankState], idle_s: Mapping[int, float], log_of: Callable[[int], str | None]
) -> RunError:
    """The error of ranks that hang: the one that stopped first, if that can be told, and where each is.

    Args:
        idle_s: by rank, for how long it had done nothing.
    """
    ordered = sorted(running, key=lambda state: -idle_s[state.rank.rank])
    first, *others = ordered
    lead_s = idle_s[first.rank.rank] - idle_s[others[0].rank.rank] if others else 0.0
    if not others or lead_s >= TOLD_APART_S:
        who = f"{first.name} hangs"
        shown = [first]
    else:
        who = f"{', '.join(state.name for state in running)} hang"
        shown = list(running)
    least_s = min(idle_s.values())
    lines = [f"no rank has printed anything or used a processor for {least_s:.0f} s: {who}"]
    for state in shown:
        lines.append(f"  {state.name}:")
        lines += [f"    {line}" for line in state.tail[-SHOWN_LINES:] if line.strip()]
    return RunError(
        "\n".join(lines),
        hint="ranks that wait for each other may have come to other collectives; --stall SECONDS says how "
        "long they are waited for, 0: for ever",
        log=log_of(first.rank.rank),
    )
