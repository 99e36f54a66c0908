"""The processes of one attempt: starts the ranks, brings the pairs together, watches and stops them.

The launcher keeps the store over which ranks find each other (``rendezvous``). Every rank says every few
seconds that it is alive and what it is at; who falls silent is named (``health_monitor``), and so are all of
them when each only waits for another. However an attempt ends,
``stop`` kills its tasks, unless the run is to go on without this process.
"""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Mapping
from contextlib import suppress
from typing import Any

from skyctl.agent.task_events import LogEvent
from skyctl.agent.task_orders import write_order, write_request
from skyctl.errors import ProtocolError, RunError, SkyctlError
from skyctl.files import RunPaths
from skyctl.remote.agent_session import Session
from skyctl.remote.awake_clock import awake_s
from skyctl.remote.credentials import make_credentials
from skyctl.remote.remote_task import RemoteTask, TaskError, TaskExit
from skyctl.remote.task_group import TaskGroup
from skyctl.run.callbacks import EventHistory, RankGroupHooks, RunCallbacks
from skyctl.run.health_monitor import Deadlines, HealthMonitor
from skyctl.run.interrupts import INTERRUPT, Interrupts
from skyctl.run.rank_failure import LOG_TAIL_LINES, EarlyEnd, FailureReport, RankState, as_skyctl_error
from skyctl.run.rank_messages import RankMessageReader
from skyctl.run.rank_reports import RankReports
from skyctl.run.rank_spec import (
    RankSpec,
    holding_specs,
    last_ranks,
    owners_of,
    peer_pairs,
    rank_task_name,
    replica_sets,
)
from skyctl.run.rendezvous import Rendezvous
from skyctl.run.step_metrics import StepCollector
from skyctl.run.sum_claims import Claims, describe_claim, wrong_ranks
from skyctl.worker.rank_events import (
    CONNECT_PHASE,
    EnvironmentEvent,
    HeartbeatEvent,
    KeyWantedEvent,
    RankEvent,
    RankResult,
    ReadyEvent,
    StoredEvent,
    SumSizes,
)
from skyctl.worker.rank_requests import BuildRequest, StartRequest, StopTrainingRequest

RANK_MODULE = "skyctl.worker.rank"
TICK_S = 0.5


class RankGroup:
    """The ranks of one attempt: ``start`` (or ``adopt``) and ``watch`` once; ``stop`` at any time, often.

    ``failure``: what is known of its end, once ``start`` or ``watch`` has raised an error.

    Args:
        specs: in the ranks' order.
        sessions: by node; those of all nodes that have a rank.
        first: the first step that they make.
        encrypt: what they say to each other.
    """

    def __init__(
        self,
        paths: RunPaths,
        specs: list[RankSpec],
        sessions: Mapping[str, Session],
        callbacks: RunCallbacks,
        deadlines: Deadlines | None = None,
        hooks: RankGroupHooks | None = None,
        *,
        first: int = 0,
        encrypt: bool = False,
    ) -> None:
        self.paths, self.specs = paths, specs
        self._sessions, self._callbacks, self._encrypt = sessions, callbacks, encrypt
        self._hooks = hooks or RankGroupHooks()
        steps = specs[0].order.steps
        self.collected = StepCollector(
            len(holding_specs(specs)),
            steps,
            first=first,
            last_ranks=last_ranks(specs),
            owners=owners_of(specs),
            unit="round" if specs[0].rounds is not None else "step",
        )
        self._reports = RankReports(specs, self.collected, callbacks, self._hooks.checkpoint, self._final)
        self._readers = [RankMessageReader(s, sessions[s.node].node, len(specs), first, steps) for s in specs]
        self.failure: FailureReport | None = None
        self.ending = self._stopped = False
        self._ranks: list[RankState] = []
        self._tasks: TaskGroup[int] = TaskGroup("rank")
        self._interrupts = Interrupts(self._tasks, callbacks)
        self._monitor = HealthMonitor(self._ranks, sessions, deadlines or Deadlines(), callbacks)
        self._ticked_at = 0.0

    def start(self) -> None:
        """Starts every rank and brings the pairs together; returns when all are ready and told to go.

        Raises:
            MismatchError: what the ranks found is not what the plan was made for.
            RunError: a rank failed or fell silent.
            WorkloadError: two ranks that hold a layer begin with other weights.
        """
        self._callbacks.phase(f"starting {len(self.specs)} ranks")
        self._monitor.begin()
        told = make_credentials(
            len(self.specs), peer_pairs(self.specs), replica_sets(self.specs), encrypt=self._encrypt
        )
        for spec, credentials in zip(self.specs, told, strict=True):  # they go over the sessions only
            order, name = write_order(spec.with_credentials(credentials)), rank_task_name(spec.rank)
            task = self._sessions[spec.node].start_task(RANK_MODULE, order, name=name)
            self._ranks.append(RankState(spec, task))
            self._tasks.follow(spec.rank, task)
        unready = set(range(len(self._ranks)))
        facts: dict[int, EnvironmentEvent] = {}
        ready: dict[int, ReadyEvent] = {}
        rendezvous = Rendezvous()
        while unready:
            rank, event = self._next()
            if isinstance(event, EnvironmentEvent):
                facts[rank.spec.rank] = event
                rank.enter_phase("telling what is here", waiting=True)
                if len(facts) == len(self._ranks):
                    self._hooks.facts(facts)
                    for waiting in self._ranks:
                        waiting.task.send(write_request(BuildRequest()))
                        waiting.enter_phase("build")
            elif isinstance(event, StoredEvent | KeyWantedEvent):
                rendezvous.take(rank.task, event)
            elif isinstance(event, ReadyEvent):
                unready.discard(rank.spec.rank)
                ready[rank.spec.rank] = event
                rank.enter_phase(CONNECT_PHASE, waiting=True)
        self._reports.check_beginnings({rank: event.sketches for rank, event in ready.items()})
        self._start_all({rank: event.sums for rank, event in ready.items()})

    def _start_all(self, sums: Mapping[int, SumSizes | None]) -> None:
        """Tells all to start; helpers hear how many numbers the others sum, who must all say the same.

        Args:
            sums: by rank.
        """
        claims = {spec.rank: sums[spec.rank] for spec in holding_specs(self.specs)}
        agreed = claims[0]
        if len(claims) < len(self.specs) and (agreed is None or len(set(claims.values())) > 1):
            raise self._sums_error(claims)
        for rank in self._ranks:
            rank.task.send(write_request(StartRequest(agreed if rank.spec.helps else None)))
            rank.enter_phase(f"{self.collected.unit} {self.collected.first}")

    def _sums_error(self, claims: Claims) -> SkyctlError:
        """The error where ranks do not say the same of what they sum: who is wrong, if that can be known."""
        first = {claim: rank for rank, claim in reversed(list(claims.items()))}
        texts = [f"{self._ranks[rank].name} sums {describe_claim(claim)}" for claim, rank in first.items()]
        if wrong := wrong_ranks(claims, self.specs):
            liar = self._ranks[wrong[0]].spec
            self.failure = FailureReport("lost", (liar.node,), (liar.rank,), self.collected.reported)
            return ProtocolError(
                f"node {liar.node} says what is wrong of the gradients that it sums: {'; '.join(texts)}",
                node=liar.node,
            )
        nodes = ", ".join(dict.fromkeys(self._ranks[rank].spec.node for rank in claims))
        error = RunError(
            f"nodes {nodes} hold the same layers and do not say the same of what they sum, and nothing tells "
            f"which of them is wrong: {'; '.join(texts)}",
            hint="plan it without a helper, or leave one of these nodes out: --limit",
        )
        return self._final(error)

    def adopt(self, tasks: Mapping[int, RemoteTask], past: EventHistory, reported: int = 0) -> None:
        """In place of ``start``: ranks that another process has started.

        Args:
            tasks: by rank.
            past: what that process had heard and written down.
            reported: steps that it had told of.
        """
        self._reports.told = reported
        for spec in self.specs:
            self._ranks.append(RankState(spec, tasks[spec.rank]))
            self._readers[spec.rank].may_end_early = True
        for number, message in past:
            rank = self._ranks[number]
            event = self._readers[number].read_again(message)
            if isinstance(event, TaskError | TaskExit | ProtocolError):
                rank.failure = rank.failure or event
            elif event is not None:
                self._reports.take(rank, event, tell=False)
        for rank in self._ranks:
            rank.heard_at = awake_s()
            self._tasks.follow(rank.spec.rank, rank.task)

    def watch(self, predicted_iteration_s: float) -> None:
        """Handles events until every rank has returned.

        Raises:
            RunError: the first cause, by time, where a rank failed, fell silent or all stalled.
            KeyboardInterrupt: the user, or a signal, ends it.
        """
        self._callbacks.phase("training")
        self._monitor.expect(predicted_iteration_s)
        if failed := [rank for rank in self._ranks if rank.failure is not None]:
            raise self._first_cause(failed[0])
        with self._interrupts.as_events():
            self._until_all_returned()

    def finish(self, limit_s: float) -> bool:
        """After ``watch`` was interrupted: lets every rank end after the step under way, with a checkpoint.

        Returns:
            whether all did within ``limit_s``; an interrupt meanwhile is raised again.
        """
        self.end_early()
        try:
            self._until_all_returned(time.monotonic() + limit_s)
        except SkyctlError:
            return False
        return all(rank.result is not None for rank in self._ranks)

    def end_early(self) -> None:
        """Tells the first rank to end the run after the step under way, or the next one. Does not wait."""
        if not self.ending and self._ranks:
            self.ending = True
            for reader in self._readers:
                reader.may_end_early = True
            with suppress(SkyctlError):
                self._ranks[0].task.send(write_request(StopTrainingRequest()))

    def results(self) -> dict[int, RankResult]:
        """By rank, what it returned, as far as it has."""
        return {rank.spec.rank: rank.result for rank in self._ranks if rank.result}

    def stop(self) -> None:
        """Kills every rank that still runs. Idempotent; errors of dead connections don't matter here."""
        if self._stopped:
            return
        self._stopped = True
        for rank in self._ranks:
            if not rank.task.done:
                with suppress(SkyctlError, OSError):
                    rank.task.kill()

    def wait_gone(self, limit_s: float, lost: Collection[str] = ()) -> None:
        """After ``stop``: until every rank has ended on its node, those on ``lost`` nodes left out.

        What they had still said by then is taken in: steps and checkpoints that were done are done.
        """
        deadline = time.monotonic() + limit_s
        while time.monotonic() < deadline and any(
            not rank.task.done and rank.spec.node not in lost and self._sessions[rank.spec.node].is_waited_for
            for rank in self._ranks
        ):
            time.sleep(0.02)
        self._drain()
        for rank in self._ranks:
            self._sessions[rank.spec.node].discard(rank.task)
        self._drain()

    # --- what ranks say

    def _until_all_returned(self, deadline: float = math.inf) -> None:
        while any(rank.result is None for rank in self._ranks) and time.monotonic() < deadline:
            self._tick()
            self._reports.take(*self._next(deadline))

    def _final(self, error: SkyctlError) -> SkyctlError:
        """The error of what would come again however often it was tried."""
        self.failure = FailureReport("raised", step=self.collected.reported, final=True)
        return error

    def _next(self, deadline: float = math.inf) -> tuple[RankState, RankEvent]:
        """The next event that is more than a sign of life; a failure becomes the error of its first cause."""
        while True:
            came = self._tasks.receive(TICK_S)
            if came is None:
                self._check_health()
                self._tick()
                if time.monotonic() > deadline:
                    raise RunError("the ranks did not end in time")
                continue
            if came.key == INTERRUPT:
                self._interrupts.ask()
                continue
            rank = self._ranks[came.key]
            event = self._take(rank, came.value, came.error)
            if rank.failure is not None:
                raise self._first_cause(rank)
            if isinstance(event, HeartbeatEvent):
                _note_phase(rank, event)
                self._check_health()
                self._tick()
            elif event is not None:
                return rank, event

    def _take(
        self, rank: RankState, message: dict[str, Any] | None, error: BaseException | None = None
    ) -> RankEvent | None:
        """Takes in what came of a rank, written down before anything else; its end becomes its ``failure``.

        None: it needs no handling.
        """
        if error is not None:
            rank.failure = rank.failure or as_skyctl_error(error)
            return None
        if message is None or isinstance(rank.failure, ProtocolError):
            return None
        rank.heard_at = awake_s()
        reader = self._readers[rank.spec.rank]
        try:
            read = reader.read(message)
            if not self._hooks.message(rank.spec, read.plain):
                return None
            event: RankEvent | LogEvent | TaskError | TaskExit = read.event
            reader.accept(event)
        except ProtocolError as exc:
            rank.failure = exc
            return None
        if isinstance(event, RankResult) and event.ended_by is not None and reader.is_early(event):
            rank.failure = EarlyEnd(event.steps, event.ended_by)
            return None
        if isinstance(event, TaskError | TaskExit):
            rank.failure = rank.failure or event
            return None
        if isinstance(event, LogEvent):
            lines = event.text.splitlines()
            rank.tail = (rank.tail + lines)[-LOG_TAIL_LINES:]
            for line in lines:
                self._callbacks.log(rank.spec, line)
            return None
        return event

    def _take_late(
        self, rank: RankState, message: dict[str, Any] | None, error: BaseException | None
    ) -> RankEvent | None:
        """Something came when the attempt was over already."""
        with suppress(SkyctlError):
            if (event := self._take(rank, message, error)) is not None:
                self._reports.take(rank, event)
                return event
        return None

    def _drain(self) -> None:
        """Takes in all that has come, without waiting."""
        while (came := self._tasks.receive(0)) is not None:
            if came.key != INTERRUPT and came.error is None:
                self._take_late(self._ranks[came.key], came.value, None)

    # --- deadlines and failures

    def _tick(self) -> None:
        now = time.monotonic()
        if now - self._ticked_at >= TICK_S:
            self._ticked_at = now
            self._hooks.tick()

    def _check_health(self) -> None:
        """Says who has not been heard for a while; raises where that means that the attempt is over."""
        found = self._monitor.check(self.collected.reported, self._log_of)
        if found is not None:
            error, self.failure = found
            raise error

    def _log_of(self, rank: RankState) -> str | None:
        path = self.paths.log(rank.spec.rank)
        return str(path) if path.exists() else None

    def _first_cause(self, first: RankState) -> SkyctlError:
        """Waits a moment for other failures, then picks the earliest that is not just a lost peer.

        Where there are only lost peers and some rank is not heard, it waits until that one is, or is lost.
        """
        failed = [first]
        alive: set[int] = set()
        began = time.monotonic()
        while len(failed) < len(self._ranks):
            left_s = began + self._monitor.grace_s(failed, alive) - time.monotonic()
            came = self._tasks.receive(max(0.0, min(left_s, TICK_S)))
            if came is None:
                if left_s <= 0:
                    break
                continue
            if came.key == INTERRUPT:
                self._interrupts.ask()
                continue
            rank = self._ranks[came.key]
            event = self._take_late(rank, came.value, came.error)
            if isinstance(event, HeartbeatEvent):
                alive.add(rank.spec.rank)
                _note_phase(rank, event)
            if rank.failure is not None and rank not in failed:
                failed.append(rank)
        error, self.failure = self._monitor.first_cause(failed, self.collected.reported, self._log_of)
        return error


def _note_phase(rank: RankState, event: HeartbeatEvent) -> None:
    """A rank that waits for its peers to connect only waits, whatever it says."""
    rank.enter_phase(event.phase, waiting=event.waiting or event.phase == CONNECT_PHASE)
