"""The ranks of one attempt at a script: started together, watched, and ended together."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from skyctl.agent.task_events import AliveEvent, LogEvent
from skyctl.agent.task_orders import write_order, write_request
from skyctl.errors import NodeError, ProtocolError, RunError, SkyctlError
from skyctl.remote.agent_session import Session
from skyctl.remote.awake_clock import awake_s
from skyctl.remote.remote_task import (
    RemoteTask,
    TaskError,
    TaskExit,
    read_task_message,
)
from skyctl.remote.task_group import GroupEvent, TaskGroup
from skyctl.run.callbacks import RunCallbacks
from skyctl.run.interrupts import INTERRUPT, Interrupts
from skyctl.run.rank_spec import rank_task_name
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


class ScriptGroup:
    """One attempt: ``start`` or ``adopt``, then ``watch``; ``end`` in any case.

    Args:
        sessions: by node.
        heard: told every message of a rank before anything is done about it; False: it was heard before.
        tick: called several times a second while ranks are watched; what it raises ends the attempt.
        stall_s: ranks that have all neither printed nor used a processor for so long hang; None: never.
    """

    def __init__(
        self,
        ranks: Sequence[ScriptRank],
        sessions: Mapping[str, Session],
        callbacks: RunCallbacks,
        heard: Callable[[ScriptRank, Mapping[str, Any]], bool],
        tick: Callable[[], None],
        log_of: Callable[[int], str | None],
        stall_s: float | None = None,
    ) -> None:
        self._ranks, self._sessions, self._callbacks = list(ranks), dict(sessions), callbacks
        self._heard, self._tick, self._log_of, self._stall_s = heard, tick, log_of, stall_s
        self._states: list[ScriptRankState] = []
        self._tasks: TaskGroup[int] = TaskGroup("script")
        self._interrupts = Interrupts(self._tasks, callbacks)
        self._ended = self._is_timed = False
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
        for rank, order in zip(self._ranks, orders, strict=True):
            name = rank_task_name(rank.rank)
            task = self._sessions[rank.node].start_task(SCRIPT_MODULE, write_order(order), name=name)
            self._follow(rank, task)
        port: int | None = None
        waiting = {state.rank.rank for state in self._states}
        deadline = time.monotonic() + START_S
        while waiting:
            state, event = self._next(deadline)
            if isinstance(event, ScriptReady):
                waiting.discard(state.rank.rank)
                port = event.port if event.port is not None else port
        request = write_request(begin(port))
        for state in self._states:
            state.task.send(request)
        while not all(state.started or state.has_ended for state in self._states):
            state, event = self._next(deadline)
            self._take(state, event)

    def adopt(self, tasks: Mapping[int, RemoteTask], past: Sequence[tuple[int, dict[str, Any]]]) -> None:
        """In place of ``start``: ranks that another process has started.

        Args:
            tasks: by rank.
            past: (rank, message), what that process had written down.
        """
        for rank in self._ranks:
            self._follow(rank, tasks[rank.rank])
        for number, message in past:
            state = self._states[number]
            with suppress(ProtocolError):
                event = read_task_message(SCRIPT_KINDS, self._node(state), message).event
                if isinstance(event, TaskError | TaskExit):
                    state.failure = event
                else:
                    self._take(state, event)

    def watch_steps(self, enough: Callable[[], bool]) -> None:
        """As ``watch``, of ranks that only are timed, until ``enough`` is so or every one has ended well.

        What they print after that is not passed on: they are ended, and would say that others are gone.
        """
        with self._interrupts.as_events():
            self._until(enough)
        self._is_timed = True

    def watch(self) -> None:
        """Handles what ranks say until every one has ended well; whoever wants may leave them from now on.

        Raises:
            SkyctlError: a rank failed; the first cause. All ranks may still run.
            KeyboardInterrupt: the user, or a signal, ends it (``Detached``: it goes on without this process).
        """
        with self._interrupts.as_events():
            self._callbacks.begun()
            self._until(lambda: False)

    def _until(self, enough: Callable[[], bool]) -> None:
        while True:
            if (failed := next((s for s in self._states if s.has_failed), None)) is not None:
                raise self._first_cause(failed)
            if enough() or all(state.result is not None for state in self._states):
                return
            state, event = self._next()
            self._take(state, event)

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
        if not self._ended:
            self._ended = True
            for state in self._states:
                if not state.task.ended:
                    with suppress(SkyctlError, OSError):
                        state.task.kill()
        deadline = time.monotonic() + limit_s
        while time.monotonic() < deadline and any(
            not state.task.ended
            and state.rank.node not in lost
            and self._sessions[state.rank.node].is_waited_for
            for state in self._states
        ):
            came = self._tasks.receive(0.05)
            if came is not None and came.key != INTERRUPT:
                with suppress(SkyctlError):
                    self._read(self._states[came.key], came)
        while (came := self._tasks.receive(0)) is not None:
            if came.key != INTERRUPT:
                with suppress(SkyctlError):
                    self._read(self._states[came.key], came)
        for state in self._states:
            self._sessions[state.rank.node].discard(state.task)

    @property
    def returncodes(self) -> list[int | None]:
        """By rank, its exit status (negative: a signal); None: it has not ended by itself."""
        return [None if state.result is None else state.result.returncode for state in self._states]

    # --- what ranks say

    def _follow(self, rank: ScriptRank, task: RemoteTask) -> None:
        self._states.append(ScriptRankState(rank, task))
        self._tasks.follow(rank.rank, task)

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
            if came.key == INTERRUPT:
                self._interrupts.ask()
                continue
            state = self._states[came.key]
            event = self._read(state, came)
            if deadline is not None and state.failure is not None:
                raise self._first_cause(state)
            if event is not None or state.has_failed:
                return state, event

    def _read(self, state: ScriptRankState, came: GroupEvent[int]) -> Any:
        """Takes in what came of a rank; its record, or None where nothing more has to be done about it."""
        if came.error is not None:
            error = came.error
            state.failure = state.failure or (
                error if isinstance(error, SkyctlError) else SkyctlError(str(error))
            )
            return None
        if came.value is None:
            return None
        try:
            read = read_task_message(SCRIPT_KINDS, self._node(state), came.value)
        except ProtocolError as exc:
            state.failure = state.failure or exc
            return None
        if not self._heard(state.rank, read.plain):
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
                state.task.send(write_request(AbortScript()))
        deadline = time.monotonic() + ABORT_S
        while time.monotonic() < deadline and not all(state.has_ended for state in running):
            came = self._tasks.receive(0.1)
            if came is not None and came.key != INTERRUPT:
                with suppress(SkyctlError):
                    self._read(self._states[came.key], came)
        raise stall_error(running, idle_s, self._log_of)

    def _node(self, state: ScriptRankState) -> Any:
        return self._sessions[state.rank.node].node

    # --- failures

    def _first_cause(self, first: ScriptRankState) -> SkyctlError:
        """The error of the first rank that failed, once what the others still say has come.

        A lost node goes first: what ranks say of a peer that is gone follows from it.
        """
        failed = [first]
        deadline = time.monotonic() + FIRST_CAUSE_GRACE_S
        while time.monotonic() < deadline and len(failed) < len(self._states):
            came = self._tasks.receive(0.05)
            if came is None or came.key == INTERRUPT:
                continue
            state = self._states[came.key]
            with suppress(SkyctlError):
                self._read(state, came)
            if state.has_failed and state not in failed:
                failed.append(state)
        lost = [state for state in failed if isinstance(state.failure, NodeError)]
        first = (lost or failed)[0]
        return rank_error(first, self._sessions[first.rank.node], self._log_of(first.rank.rank))
