"""The ranks of one attempt at a script: started together, watched, and ended together."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from skyctl.agent.task_events import AliveEvent, LogEvent
from skyctl.errors import NodeError, ProtocolError, RunError, SkyctlError
from skyctl.remote.awake_clock import awake_s
from skyctl.remote.remote_task import (
    RemoteTask,
    TaskError,
    TaskExit,
    read_task_message,
)
from skyctl.remote.task_group import GroupEvent
from skyctl.run.live_run import LiveRun
from skyctl.run.rank_failure import as_skyctl_error
from skyctl.run.rank_spec import rank_task_name
from skyctl.run.rank_tasks import RankTasks
from skyctl.run.scripts.script_failure import ScriptRankState, rank_error, stall_error
from skyctl.run.scripts.script_ranks import ScriptRank
from skyctl.script.script_events import (
    SCRIPT_EVENTS,
    ScriptIdle,
    ScriptReady,
    ScriptResult,
    ScriptStarted,
    ScriptStep,
)
from skyctl.script.script_orders import AbortScript, BeginScript, ScriptOrder

SCRIPT_MODULE = "skyctl.script.script_task"
SCRIPT_KINDS: Mapping[str, type] = {cls.kind: cls for cls in (LogEvent, AliveEvent, *SCRIPT_EVENTS)}
TICK_S = 0.25
FIRST_CAUSE_GRACE_S = 1.5
"""How long after the first failure others may still report one that came earlier or says more."""
START_S = 120.0
ABORT_S = 5.0
"""For ranks that hang to print where they are."""
TAIL_LINES = 20


class ScriptAttempt:
    """One attempt: ``start`` or ``adopt``, then ``watch``; ``end`` in any case.

    Args:
        tick: called several times a second while ranks are watched; what it raises ends the attempt.
        stall_s: ranks that have all neither printed nor used a processor for so long hang; None: never.
    """

    def __init__(
        self,
        run: LiveRun,
        ranks: Sequence[ScriptRank],
        tick: Callable[[], None],
        stall_s: float | None = None,
    ) -> None:
        self._run, self._callbacks, self._tick, self._stall_s = run, run.callbacks, tick, stall_s
        self._states = [ScriptRankState(rank) for rank in ranks]
        self._tasks = RankTasks("script", run.sessions, run.callbacks.interrupted)
        self._is_timed = False
        self._ticked_at = 0.0

    # --- from the start to the end

    def start(self, orders: Sequence[ScriptOrder], begin: Callable[[int | None], BeginScript]) -> None:
        """Starts all ranks together, once each is ready.

        Args:
            orders: by rank.
            begin: what all are told when they start, of the port that was found for the rendezvous.

        Raises:
            SkyctlError: a rank can't be started.
        """
        for state, order in zip(self._states, orders, strict=True):
            self._tasks.start(state.rank.node, SCRIPT_MODULE, order)
        port: int | None = None
        waiting = {state.rank.rank for state in self._states}
        deadline = time.monotonic() + START_S
        while waiting:
            state, event = self._next(deadline)
            if isinstance(event, ScriptReady):
                waiting.discard(state.rank.rank)
                port = event.port if event.port is not None else port
        request = begin(port)
        for state in self._states:
            self._tasks.send(state.rank.rank, request)
        while not all(state.started or state.has_ended for state in self._states):
            self._take(*self._next(deadline))

    def adopt(self, tasks: Mapping[int, RemoteTask]) -> None:
        """In place of ``start``: ranks that another process has started.

        Args:
            tasks: by rank.
        """
        for state in self._states:
            self._tasks.adopt(state.rank.rank, state.rank.node, tasks[state.rank.rank])
        for number, message in self._run.journal.past():
            state = self._states[number]
            with suppress(ProtocolError):
                event = read_task_message(SCRIPT_KINDS, self._node(state), message).event
                if isinstance(event, TaskError | TaskExit):
                    state.failure = event
                else:
                    self._take(state, event)

    def watch_steps(self, enough: Callable[[], bool]) -> None:
        """As ``watch``, of ranks that only are timed, until ``enough`` is so or every one has ended well.

        Lines printed after that are not passed on: the ranks are ended, and would say that others are gone.
        """
        with self._tasks.interrupts_as_events():
            self._until(enough)
        self._is_timed = True

    def watch(self) -> None:
        """Handles what ranks say until every one has ended well; whoever wants may leave them from now on.

        Raises:
            SkyctlError: a rank failed; the first cause. All ranks may still run.
            KeyboardInterrupt: the user, or a signal, ends it (``Detached``: it goes on without this process).
        """
        with self._tasks.interrupts_as_events():
            self._callbacks.begun()
            self._until(lambda: False)

    def _until(self, enough: Callable[[], bool]) -> None:
        while True:
            if (failed := next((s for s in self._states if s.has_failed), None)) is not None:
                raise self._first_cause(failed)
            if enough() or all(state.result is not None for state in self._states):
                return
            self._take(*self._next())

    @property
    def steps_s(self) -> list[list[float]]:
        """By rank, the seconds of its own that each of its steps has taken, where they are timed."""
        return [state.steps_s for state in self._states]

    @property
    def batch(self) -> int | None:
        """Samples of a step that all ranks have asked their share of; None: not all the same, or none."""
        batches = {state.batch for state in self._states}
        return batches.pop() if len(batches) == 1 else None

    def end(self, limit_s: float = 0.0, lost: Sequence[str] = ()) -> None:
        """Ends every rank that still runs; waits so long for them to be gone, those on ``lost`` nodes not.

        A script gets SIGTERM first. Idempotent; errors of dead connections don't matter here.
        """
        self._tasks.kill()
        self._tasks.wait_gone(limit_s, lost, self._read_late)

    @property
    def returncodes(self) -> list[int | None]:
        """By rank, its exit status (negative: a signal); None: it has not ended by itself."""
        return [None if state.result is None else state.result.returncode for state in self._states]

    @property
    def without_turns(self) -> list[int]:
        """The ranks that ended well and were to take turns, and never had one."""
        ended = [state for state in self._states if state.result is not None and not state.has_failed]
        return [state.rank.rank for state in ended if state.result and state.result.took_turns is False]

    # --- what ranks say

    def _next(self, deadline: float | None = None) -> tuple[ScriptRankState, Any]:
        """The next event that a rank has sent of its own. Raises what has ended a rank that is starting."""
        while True:
            now = time.monotonic()
            if now - self._ticked_at >= TICK_S:
                self._ticked_at = now
                self._tick()
                self._refuse_stall()
            came = self._tasks.receive(TICK_S)
            if came is None:
                if deadline is not None and time.monotonic() > deadline:
                    late = ", ".join(s.name for s in self._states if not (s.started or s.has_ended))
                    raise RunError(f"{late} could not be started within {START_S:.0f} s")
                continue
            state = self._states[came.key]
            event = self._read(came)
            if deadline is not None and state.failure is not None:
                raise self._first_cause(state)
            if event is not None or state.has_failed:
                return state, event

    def _read(self, came: GroupEvent[int]) -> Any:
        """Takes in what came of a rank; its record, or None where nothing more has to be done about it."""
        state = self._states[came.key]
        if came.error is not None:
            state.failure = state.failure or as_skyctl_error(came.error)
            return None
        if came.value is None:
            return None
        try:
            read = read_task_message(SCRIPT_KINDS, self._node(state), came.value)
        except ProtocolError as exc:
            state.failure = state.failure or exc
            return None
        rank = state.rank
        if not self._run.journal.heard(rank.node, rank_task_name(rank.rank), read.plain):
            return None
        event = read.event
        if isinstance(event, TaskError | TaskExit):
            state.failure = state.failure or event
            return None
        if isinstance(event, ScriptStep):
            state.steps_s.append(event.compute_s)
            state.batch = event.batch
        if isinstance(event, ScriptIdle):
            state.idle_since = None if event.idle_s == 0 else awake_s() - event.idle_s
            return None
        if isinstance(event, LogEvent):
            state.printed_at = awake_s()
            lines = event.text.splitlines()
            state.tail = (state.tail + lines)[-TAIL_LINES:]
            for line in lines if not self._is_timed else ():
                self._callbacks.log(state.rank, line)
            return None
        if isinstance(event, ScriptResult):
            state.result = event
        return event

    def _read_late(self, came: GroupEvent[int]) -> None:
        """Something came of a rank that is being ended."""
        with suppress(SkyctlError):
            self._read(came)

    def _take(self, state: ScriptRankState, event: Any) -> None:
        if isinstance(event, ScriptStarted):
            state.started = True
        elif isinstance(event, ScriptResult):
            state.result = event

    def _refuse_stall(self) -> None:
        """Raises RunError where no rank does anything any more, once each has said where it is."""
        running = [state for state in self._states if not state.has_ended]
        idle_s = {state.rank.rank: state.stalled_s() for state in running}
        if self._stall_s is None or not running or min(idle_s.values()) < self._stall_s:
            return
        self._callbacks.phase("no rank does anything any more: each is asked where it is")
        for state in running:
            with suppress(SkyctlError):
                self._tasks.send(state.rank.rank, AbortScript())
        deadline = time.monotonic() + ABORT_S
        while time.monotonic() < deadline and not all(state.has_ended for state in running):
            came = self._tasks.receive(0.1, asks=False)
            if came is not None:
                self._read_late(came)
        raise stall_error(running, idle_s, self._run.log_of)

    def _node(self, state: ScriptRankState) -> Any:
        return self._tasks.sessions[state.rank.node].node

    # --- failures

    def _first_cause(self, first: ScriptRankState) -> SkyctlError:
        """The error of the first rank that failed, once what the others still say has come.

        A lost node goes first: what ranks say of a peer that is gone follows from it.
        """
        failed = [first]
        deadline = time.monotonic() + FIRST_CAUSE_GRACE_S
        while time.monotonic() < deadline and len(failed) < len(self._states):
            came = self._tasks.receive(0.05, asks=False)
            if came is None:
                continue
            state = self._states[came.key]
            self._read_late(came)
            if state.has_failed and state not in failed:
                failed.append(state)
        lost = [state for state in failed if isinstance(state.failure, NodeError)]
        first = (lost or failed)[0]
        return rank_error(first, self._tasks.sessions[first.rank.node], self._run.log_of(first.rank.rank))
