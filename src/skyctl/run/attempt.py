"""One attempt of a run: its ranks are started or taken over, watched, and ended.

Every rank says every few seconds that it is alive and what it is at; who falls silent is named
(``health_monitor``), and so are all of them when each only waits for another. ``AttemptState`` has what they
have said; this is what starts them, hears them, and does what follows from it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Protocol

from skyctl.agent.task_events import LogEvent
from skyctl.checkpoint.launcher.run_checkpoints import RunCheckpoints
from skyctl.errors import MismatchError, RunError, SkyctlError
from skyctl.learning.cluster_changes import (
    ClusterChange,
    change_table,
    entering_changes,
    plan_changes,
    refuse_changes,
)
from skyctl.records.plan_nodes import nodes_in
from skyctl.remote.awake_clock import awake_s
from skyctl.remote.credentials import make_admission, make_credentials
from skyctl.remote.remote_task import RemoteTask
from skyctl.remote.task_group import GroupEvent
from skyctl.run.attempt_orders import AttemptOrders, refuses_changes
from skyctl.run.attempt_results import AttemptResults
from skyctl.run.attempt_state import (
    AttemptState,
    CheckpointWritten,
    MembersChanged,
    News,
    NodeEnters,
    NodesSeen,
    Tell,
)
from skyctl.run.callbacks import StepProgress
from skyctl.run.elastic_spec import memory_to_enter
from skyctl.run.expert_hosts import ExpertHosts
from skyctl.run.first_steps_check import FirstStepsCheck, KeepPart
from skyctl.run.health_monitor import HealthMonitor
from skyctl.run.journal import update_attempt
from skyctl.run.live_run import LiveRun
from skyctl.run.rank_failure import RankState, as_skyctl_error
from skyctl.run.rank_spec import RankSpec, peer_pairs, rank_task_name, replica_sets
from skyctl.run.rank_tasks import RankTasks
from skyctl.run.run_options import RunOptions
from skyctl.run.slow_owner import SlowOwners
from skyctl.transport.tls_identity import TlsIdentity
from skyctl.worker.rank_events import EnvironmentEvent, HeartbeatEvent, RankEvent
from skyctl.worker.rank_requests import AdmitRequest, BuildRequest, StopTrainingRequest

RANK_MODULE = "skyctl.worker.rank"
TICK_S = 0.5
LAST_CHECKPOINT_STEPS = 3.0
"""How many steps' time the ranks have to end after the one under way: all are to finish it, and to write."""


class AttemptListener(Protocol):
    """The player of the run (``plan_runner``), which decides what it goes on with."""

    def step(self, progress: StepProgress) -> None:
        """Every rank has finished that step."""

    def checkpoint(self, step: int) -> None:
        """Every rank has written its layers after so many steps."""

    def tick(self) -> None:
        """Called twice a second while the ranks start and train."""


class Attempt:
    """The ranks of one attempt: ``start`` or ``adopt``, then ``watch``; ``end`` in any case.

    Attributes:
        state: what its ranks have said.
        results: what it has come to.
        is_ending: they were told to end soon.

    Args:
        keep_part: for what its first steps see; None: these are not compared with the plan.
    """

    def __init__(
        self,
        run: LiveRun,
        orders: AttemptOrders,
        options: RunOptions,
        checkpoints: RunCheckpoints,
        listener: AttemptListener,
        keep_part: KeepPart | None = None,
    ) -> None:
        self._run, self._orders, self._options = run, orders, options
        self._checkpoints, self._listener = checkpoints, listener
        nodes = {spec.node: run.cluster.node(spec.node) for spec in orders.specs}
        self.state = AttemptState(orders.specs, nodes, first=orders.first)
        self.is_ending = self._is_started = False
        self._tasks = RankTasks("rank", run.sessions, run.callbacks.interrupted)
        self._monitor = HealthMonitor(
            self.state.ranks, self._tasks.sessions, options.deadlines, run.callbacks
        )
        self._ticked_at = 0.0
        self._identity: TlsIdentity | None = None
        self._facts: Mapping[int, EnvironmentEvent] = {}
        self._admissions: dict[int, list[tuple[int, AdmitRequest]]] = {}
        self.results = AttemptResults(run, orders, self.state)
        self._slow_owners = SlowOwners(self.state.collected)
        self._first_steps = FirstStepsCheck.of(orders.plan, orders.first, keep_part)
        self._hosts = None if orders.experts is None else ExpertHosts(run, orders, orders.experts)

    # --- from the start to the end

    def start(self) -> None:
        """Starts the ranks and brings the pairs together; returns when all are ready and told to go.

        Raises:
            MismatchError: what the ranks found is not what the plan was made for.
            RunError: a rank failed or fell silent.
            WorkloadError: two ranks that hold a layer begin with other weights.
        """
        specs = self._orders.specs
        self._checkpoints.change_writers(())
        credentials = make_credentials(
            len(specs),
            peer_pairs(specs),
            replica_sets(specs),
            encrypt=self._options.encrypt or self._orders.plan.encrypted,
        )
        self._identity = credentials[0].tls
        if self._hosts is not None:
            self._hosts.start(self._identity)
        self._run.callbacks.phase(f"starting {len(specs)} ranks")
        self._monitor.begin()
        for spec, own in zip(specs, credentials, strict=True):  # they go over the sessions only
            order = spec.with_credentials(own)
            if self._hosts is not None:
                order = self._hosts.order_of(spec, order)
            self._tasks.start(spec.node, RANK_MODULE, order)
        while self.state.is_starting:
            self._follow(self.state.come_together(*self._next()))
        self._begin()

    def adopt(self, tasks: Mapping[int, RemoteTask], hosts: Mapping[int, RemoteTask]) -> None:
        """In place of ``start``: ranks that another process has started.

        Args:
            tasks: by rank; those that are not in it have left, or were still to enter.
            hosts: of experts, by their places; those that are not in it have ended.
        """
        journal = self._run.journal
        if self._hosts is not None:
            self._hosts.adopt(hosts)
        for spec in self._orders.specs:
            if spec.rank in tasks:
                self._tasks.adopt(spec.rank, spec.node, tasks[spec.rank])
        self.state.let_end_early()
        self._follow(self.state.replay(journal.past(), journal.reported))
        for rank in self.state.ranks:
            rank.heard_at = awake_s()
            if rank.spec.rank not in tasks:
                self.state.leave_out(rank.spec.rank)
        self._begin()

    def watch(self) -> None:
        """Handles events until every rank has returned; after Ctrl-C a last checkpoint.

        Raises:
            RunError: the first cause, by time, where a rank failed, fell silent or all stalled.
            KeyboardInterrupt: the user, or a signal, ends it (``Detached``: it goes on without this process).
        """
        run, iteration_s = self._run, self._orders.plan.predicted.iteration_s
        try:
            run.callbacks.phase("training")
            self._monitor.expect(iteration_s)
            if failed := [rank for rank in self.state.ranks if self._has_ended_all(rank)]:
                raise self._first_cause(failed[0])
            with self._tasks.interrupts_as_events():
                self._until_all_returned()
        except KeyboardInterrupt as exc:
            if type(exc) is KeyboardInterrupt and self.end_early():
                run.journal.update(status="stopping")
                run.callbacks.phase("stopping after a last checkpoint; Ctrl-C again stops at once")
                if not self._all_end_within(self.last_checkpoint_s):
                    self.warn_no_last_checkpoint()
            raise

    @property
    def last_checkpoint_s(self) -> float:
        """How long the step under way and a last checkpoint may take."""
        seen_s = self._run.journal.state.iteration_s or 0.0
        step_s = max(self._orders.plan.predicted.iteration_s, seen_s)
        return max(self._options.deadlines.stop_s, LAST_CHECKPOINT_STEPS * step_s)

    def warn_no_last_checkpoint(self) -> None:
        """Says that the run has ended without the checkpoint that was to be its last."""
        self._run.callbacks.warn(
            "there is no last checkpoint: the ranks did not come to the end of a step within "
            f"{self.last_checkpoint_s:.0f} s"
        )

    def end_early(self) -> bool:
        """Has the ranks end, with a checkpoint, after the step under way or the next; False: they can't."""
        if not (self._is_started and self._options.writes_checkpoints):
            return False
        if not self.is_ending:
            self.is_ending = True
            self.state.let_end_early()
            for spec in self._orders.specs:
                is_there = not self.state.ranks[spec.rank].is_out
                # the first one may leave before the others hear it
                if is_there and (spec.rank == 0 or spec.is_elastic):
                    with suppress(SkyctlError):
                        self._tasks.send(spec.rank, StopTrainingRequest())
        return True

    # --- ranks that enter

    @property
    def may_grow(self) -> bool:
        """Whether ranks may enter: not with certificates that only the process before this one had."""
        return self._identity is not None or not (self._options.encrypt or self._orders.plan.encrypted)

    def admit(self, spec: RankSpec, address: str, limit_s: float) -> None:
        """Starts a rank that is to enter. The others let it in once its node has proved to be fit.

        If it can't be started, it has failed.

        Args:
            address: where they reach it.
            limit_s: how long they wait for it.
        """
        run, attempts = self._run, self._run.journal.state.attempts
        session = self._tasks.sessions[spec.node] = run.sessions[spec.node]
        own = make_admission(spec.order.world.hosts, self._identity)
        self._admissions[spec.rank] = [
            (member, AdmitRequest(spec.rank, address, secret, limit_s))
            for member, secret in own.secrets.items()
        ]
        self.state.admit(spec, session.node)
        if attempts:  # before it is there: whoever takes the run over looks for it
            update_attempt(run.journal, devices=(*attempts[-1].devices, spec.device))
        try:
            self._tasks.start_rank(spec.rank, spec.node, RANK_MODULE, spec.with_credentials(own))
        except SkyctlError as exc:
            self.state.leave_out(spec.rank, exc)

    def leave_out(self, rank: int, why: SkyctlError | None = None) -> None:
        """Ends a rank that is to enter, or has failed; ``why``: it is given up."""
        self.state.leave_out(rank, why)
        self.end_rank(rank)

    def end_rank(self, rank: int) -> None:
        """Ends the process of a rank that the others go on without."""
        self._tasks.kill_rank(rank)

    def _judge_entering(self, news: NodeEnters) -> None:
        """Has a rank build, and the others let it in, unless its node is not what it should be."""
        spec, plan = self._orders.specs[news.rank], self._orders.plan
        beside = next(iter(self._facts.values()), None)
        changes = entering_changes(plan, spec.device, news.facts, beside, memory_to_enter(plan))
        if changes and not self._options.ignore_changes:
            self.leave_out(news.rank, _unfit(spec.device, changes))
            return
        for member, request in self._admissions.pop(news.rank, []):
            if not self.state.ranks[member].is_out:
                self._tell(Tell(member, request))
        self._tell(Tell(news.rank, BuildRequest()))

    def end(self, limit_s: float = 0.0) -> None:
        """Kills every rank that still runs; waits so long for them to be gone, on lost nodes excepted.

        Their last messages until then are taken in: steps and checkpoints that were done are done.
        """
        self._tasks.kill()
        if self._hosts is not None:
            self._hosts.kill()
        if limit_s:
            lost = [spec.node for spec in self._orders.specs if spec.node not in self._run.sessions]
            self._tasks.wait_gone(limit_s, lost, self._take_last)
            if self._hosts is not None:
                self._hosts.wait_gone(limit_s)

    def _begin(self) -> None:
        self._is_started = True
        if self._options.writes_checkpoints:
            self._checkpoints.start_replicators(nodes_in(self._orders.plan), wait=False)

    # --- what ranks say

    def _until_all_returned(self, deadline: float = math.inf) -> None:
        while not self.state.has_returned and time.monotonic() < deadline:
            self._tick()
            self._follow(self.state.report(*self._next(deadline)))

    def _all_end_within(self, limit_s: float) -> bool:
        """After an interrupt: whether every rank ends by itself. A further interrupt is raised again."""
        try:
            self._until_all_returned(time.monotonic() + limit_s)
        except SkyctlError:
            return False
        return self.state.has_returned

    def _next(self, deadline: float = math.inf) -> tuple[int, RankEvent | LogEvent]:
        """The next event that is more than a sign of life; a failure becomes the error of its first cause."""
        while True:
            came = self._tasks.receive(TICK_S)
            if came is None:
                self._check_health()
                self._tick()
                if time.monotonic() > deadline:
                    raise RunError("the ranks did not end in time")
                continue
            event = self._take(came)
            rank = self.state.ranks[came.key]
            if rank.failure is not None:
                if self._has_ended_all(rank):
                    raise self._first_cause(rank)
                return came.key, LogEvent("")  # the others go on, or have ended
            if isinstance(event, HeartbeatEvent):
                self.state.note_phase(came.key, event)
                self._check_health()
                self._tick()
            elif event is not None:
                return came.key, event

    def _take(self, came: GroupEvent[int]) -> RankEvent | LogEvent | None:
        """Takes in what came of a rank, written down before anything else; its end becomes its ``failure``.

        None: it needs no handling.
        """
        rank = self.state.ranks[came.key]
        if self._tasks.is_of_old_session(came.key):
            return None
        if came.error is not None:
            rank.failure = rank.failure or as_skyctl_error(came.error)
            return None
        message = None if came.value is None else self.state.read(came.key, came.value)
        spec = rank.spec
        if message is None or not self._run.journal.heard(
            spec.node, rank_task_name(spec.rank), message.plain
        ):
            return None
        event = self.state.accept(came.key, message.event)
        if not isinstance(event, LogEvent):
            return event
        for line in event.text.splitlines():
            self._run.callbacks.log(spec, line)
        return None

    def _take_late(self, came: GroupEvent[int]) -> RankEvent | LogEvent | None:
        """Something came when the attempt was over already."""
        with suppress(SkyctlError):
            if (event := self._take(came)) is not None:
                self._follow(self.state.report(came.key, event))
                return event
        return None

    def _take_last(self, came: GroupEvent[int]) -> None:
        if came.error is None:
            self._take_late(came)

    def _follow(self, news: Iterable[News]) -> None:
        """Does what follows from what ranks have said."""
        for item in news:
            if isinstance(item, Tell):
                self._tell(item)
            elif isinstance(item, MembersChanged):
                members = [self._orders.specs[rank] for rank in item.members]
                first = [spec.node for spec in members if spec.pipeline == members[0].pipeline]
                self._checkpoints.change_writers(tuple(first))
            elif isinstance(item, NodesSeen):
                self._judge_nodes(item.facts)
            elif isinstance(item, NodeEnters):
                self._judge_entering(item)
            elif isinstance(item, StepProgress):
                self._end_step(item)
            elif isinstance(item, CheckpointWritten):
                self._note_checkpoint(item)
            elif item.is_warning:
                self._run.callbacks.warn(item.text)
            else:
                self._run.callbacks.note(item.text)

    def _tell(self, item: Tell) -> None:
        """Raises SkyctlError where a rank can't be told whom the others do not go on without."""
        try:
            self._tasks.send(item.rank, item.request)
        except SkyctlError:
            if not (self.state.has_started and self._orders.specs[item.rank].is_elastic):
                raise

    def _judge_nodes(self, facts: Mapping[int, EnvironmentEvent]) -> None:
        """Raises MismatchError where nodes are not what the plan was made for, or says it."""
        self._facts = dict(facts)
        changes = plan_changes(self._orders.plan, facts, shares=self._options.turns is not None)
        if refuses_changes(self._options, self._orders.number):
            refuse_changes(self._orders.plan, changes)
        elif changes:
            lines = "\n".join(change_table(changes))
            self._run.callbacks.warn(f"the cluster is not what the plan was made for:\n{lines}")

    def _end_step(self, progress: StepProgress) -> None:
        """A step has ended. It is said early which part of it is not as predicted.

        And which owner rounds have come to wait for, where there is no deadline for that.
        """
        self._listener.step(progress)
        callbacks, first_steps = self._run.callbacks, self._first_steps
        if self._orders.plan.problem.rhythm.round_deadline_s is None:
            note = self._slow_owners.note(progress.step)
            if note is not None:
                callbacks.note(note)
        if first_steps is not None and first_steps.are_over(progress):
            first_steps.compare(self.results.measurement(), self._run)

    def _note_checkpoint(self, written: CheckpointWritten) -> None:
        validation = self.state.collected.validation.get(written.step - 1)
        self._checkpoints.written(written.step, validation.loss if validation is not None else None)
        self._listener.checkpoint(written.step)
        if self._options.keep_here:
            events = self.state.collected.checkpoint_events(written.step)
            specs = self._orders.specs
            places = {layer: specs[rank].node for rank, event in events.items() for layer in event.layers}
            self._checkpoints.copy_here(written.step, places, written.shards)

    # --- deadlines and failures

    def _has_ended_all(self, rank: RankState) -> bool:
        """Whether a rank has failed, and the others can't go on without it."""
        return rank.failure is not None and not self.state.goes_on_without(rank)

    def _tick(self) -> None:
        now = time.monotonic()
        if now - self._ticked_at >= TICK_S:
            self._ticked_at = now
            if self._hosts is not None:
                self._hosts.take_events()
            self._checkpoints.replicate(self._orders.plan)
            self._listener.tick()

    def _check_health(self) -> None:
        """Says who has not been heard for a while; raises where that means that the attempt is over."""
        detected = self._monitor.check(self.state.collected.reported, self._log_of)
        if detected is not None:
            error, self.state.failure = detected
            raise error

    def _log_of(self, rank: RankState) -> str | None:
        return self._run.log_of(rank.spec.rank)

    def _first_cause(self, first: RankState) -> SkyctlError:
        """Waits a moment for other failures, then picks the earliest that is not just a lost peer.

        If there are only lost peers and some rank is not heard, it waits until that one is, or is lost.
        """
        failed = [first]
        if first.spec.is_elastic:  # others had failed before, and those that were left could not go on
            earlier = [
                r for r in self.state.ranks if r.failure is not None and not (r.is_out or r.is_joining)
            ]
            failed = [*(rank for rank in earlier if rank is not first), first]
        alive: set[int] = set()
        began = time.monotonic()
        while len(failed) < len(self.state.ranks):
            left_s = began + self._monitor.grace_s(failed, alive) - time.monotonic()
            came = self._tasks.receive(max(0.0, min(left_s, TICK_S)))
            if came is None:
                if left_s <= 0:
                    break
                continue
            rank = self.state.ranks[came.key]
            event = self._take_late(came)
            if isinstance(event, HeartbeatEvent):
                alive.add(came.key)
                self.state.note_phase(came.key, event)
            if rank.failure is not None and rank not in failed:
                failed.append(rank)
        reported = self.state.collected.reported
        error, self.state.failure = self._monitor.first_cause(failed, reported, self._log_of)
        return error


def _unfit(device: str, changes: Sequence[ClusterChange]) -> MismatchError:
    """The error where a device is not what it should be to enter."""
    table = "".join(f"\n  {line}" for line in change_table(changes))
    return MismatchError(f"{device} is not as it was measured, or as the others are:{table}")
