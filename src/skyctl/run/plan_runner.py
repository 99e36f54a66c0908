"""The one way to run a plan: from its first attempt to its end, with or without restarts and checkpoints.

An attempt is one set of ranks. When it ends before the run does, its fault is named, nodes that are gone are
left out, the rest is planned anew, the newest whole checkpoint is brought to where its layers are needed, and
the next attempt goes on from there. Sessions of nodes that live are used again. ``run_plan`` is a run of one
attempt and without checkpoints, as comparisons want it.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace

from skyctl.checkpoint.launcher.run_checkpoints import RunCheckpoints
from skyctl.errors import NodeError, SkyctlError
from skyctl.files import RunPaths, write_atomic
from skyctl.jobs.training_request import TrainingRequest
from skyctl.planning.backend_choice import check_backend_of_plan, with_asked_backend
from skyctl.records.base import timestamp
from skyctl.records.cluster import Cluster
from skyctl.records.measurement import Measurement
from skyctl.records.plan import Plan
from skyctl.records.plan_nodes import nodes_in
from skyctl.records.run_state import RunState
from skyctl.remote.agent_session import Session
from skyctl.remote.base import ConnectOptions
from skyctl.remote.remote_task import RemoteTask
from skyctl.run.attempt import Attempt
from skyctl.run.attempt_orders import AttemptOrders, OrderMaker
from skyctl.run.backend_change import backend_at_addresses, without_gloo
from skyctl.run.callbacks import RunCallbacks, StepProgress
from skyctl.run.change_notes import backend_note, change_notes
from skyctl.run.elastic_join import ElasticJoins
from skyctl.run.elastic_spec import may_grow
from skyctl.run.expert_figures import describe_figures, figures_record
from skyctl.run.first_steps_check import KeepPart
from skyctl.run.journal import FolderJournal, begin_attempt, update_attempt
from skyctl.run.live_run import LiveRun
from skyctl.run.operator_requests import OperatorRequests, StopRequested
from skyctl.run.plan_update import replan_without
from skyctl.run.rank_spec import check_plan_fits, used_nodes
from skyctl.run.replanner import PlanChange, Replanner
from skyctl.run.restart_policy import (
    Fault,
    RestartPolicy,
    classify,
    final_error,
    no_checkpoint_error,
    node_is_gone,
    restart_reason,
    restart_text,
    resume_hint,
)
from skyctl.run.round_spec import refuse_trace
from skyctl.run.run_nodes import RunNodes
from skyctl.run.run_options import RunOptions
from skyctl.run.step_collector import StepCollector
from skyctl.run.step_history import StepHistory

RANKS_END_S = 15.0
"""For an attempt's ranks to be gone before the next one's begin."""
ENDED_EARLY = "all ranks ended before the run's last step, and nobody waits for that now"
REQUEST_INTERVAL_S = 0.25
"""Between two looks for requests while nothing else happens."""


def run_plan(
    plan: Plan,
    cluster: Cluster,
    request: TrainingRequest,
    sessions: Mapping[str, Session],
    options: RunOptions,
    callbacks: RunCallbacks,
) -> tuple[Measurement, RunPaths]:
    """Trains ``options.steps`` steps in one attempt, without checkpoints, and writes the run's folder.

    Raises:
        InputError: the plan's stages don't fit its problem.
        MismatchError: the plan names devices that the cluster does not have, or the cluster has changed.
        RunError: a rank failed; its logs stay in the run's folder.
    """
    check_plan_fits(plan, cluster)
    plan = with_asked_backend(plan, options.backend, encrypt=options.encrypt)
    check_backend_of_plan(plan, encrypt=options.encrypt)
    paths = RunPaths.new()
    state = RunState(
        run_id=paths.run_id,
        created=timestamp(),
        written=timestamp(),
        workload=request.spec.source,
        cluster=cluster.name,
        steps=options.steps,
    )
    mine = {node.name: sessions[node.name] for node in used_nodes(plan, cluster)}
    once = replace(options, checkpoint_every=0, max_restarts=0)
    journal = FolderJournal(paths, state, callbacks.note, mine)
    return PlanRunner(LiveRun(journal, cluster, mine, callbacks), plan, request, once).run()


@dataclass
class _CurrentAttempt:
    """The attempt that is about to be played. ``why``: what it is begun for."""

    plan: Plan
    why: str = "launched"
    planned: bool = False
    number: int = 1


class PlanRunner:
    """One run of a plan; ``run`` may be called once.

    Args:
        connect: how nodes are connected to that come later; None: none do.
        resume: go on from the newest checkpoint that the run's nodes hold.
        keep_part: for what first steps see; None: no attempt's first steps are compared.
    """

    def __init__(
        self,
        run: LiveRun,
        plan: Plan,
        request: TrainingRequest,
        options: RunOptions,
        *,
        connect: ConnectOptions | None = None,
        resume: bool = False,
        keep_part: KeepPart | None = None,
    ) -> None:
        self._run, self._journal, self._callbacks = run, run.journal, run.callbacks
        self._options, self._keep_part = options, keep_part
        attempts = run.journal.state.attempts
        plan = with_asked_backend(plan, options.backend, encrypt=options.encrypt)
        self._now = _CurrentAttempt(plan, "resumed" if resume else "launched", number=len(attempts) + 1)
        self._history = StepHistory.read(run.journal.paths.metrics) if attempts else StepHistory()
        self._from_checkpoint = resume
        self._restart_policy = RestartPolicy(options.max_restarts)
        self._requests = OperatorRequests(run.journal)
        self._attempt: Attempt | None = None
        self._joins: ElasticJoins | None = None
        self._is_under_way = False
        self._left_hosts: Mapping[int, RemoteTask] = {}
        self._last_collected: StepCollector | None = None
        self._restart_began: float | None = None
        self._orders = OrderMaker(run, request, options)
        self._checkpoints = RunCheckpoints(run, options.checkpoints, plan.problem, run.journal.state.best)
        self._nodes = RunNodes(run, self._checkpoints, plan)
        self._replanner = Replanner(run, self._nodes, request, connect, plan)

    def run(
        self,
        tasks: Mapping[int, RemoteTask] | None = None,
        hosts: Mapping[int, RemoteTask] | None = None,
    ) -> tuple[Measurement, RunPaths]:
        """Plays attempts until the run has ended.

        Args:
            tasks: by rank, those of the last attempt, which another process had started.
            hosts: of its experts, by their places.

        Raises:
            SkyctlError: the first cause of the last fault, when another attempt would not help.
            InfeasibleError: nothing fits on the nodes that are left.
            KeyboardInterrupt: it was stopped (``Detached``: it goes on without this process).
        """
        work = self._now.plan.workload
        if tasks is None and work is not None and work.uncompared is not None:
            self._callbacks.note(
                f"it is not known whether {work.source}, cut into layers, trains as in plain torch "
                f"({work.uncompared})"
            )
        self._left_hosts = hosts or {}
        attempts = self._journal.state.attempts
        if tasks is not None and attempts:
            last = attempts[-1]
            self._now = _CurrentAttempt(self._now.plan, last.why, last.planned, last.number)
        with self._run.until_it_ends(self._end, self._stop):
            if self._from_checkpoint:
                self._now.plan = self._replanned({})
            done = self._play_attempts(tasks)
        return done, self._journal.paths

    @property
    def _unit(self) -> str:
        return self._now.plan.problem.rhythm.unit

    @property
    def _resume_hint(self) -> str | None:
        return resume_hint(self._journal.state, self._unit)

    def _play_attempts(self, tasks: Mapping[int, RemoteTask] | None) -> Measurement:
        while True:
            try:
                outcome = self._play_attempt(tasks)
            except SkyctlError as exc:
                self._recover(exc)
            else:
                if isinstance(outcome, Measurement):
                    return outcome
                self._change_plan(outcome)
            tasks = None

    def _play_attempt(self, tasks: Mapping[int, RemoteTask] | None) -> Measurement | PlanChange:
        """Plays one attempt: the run's measurement, or what to go on with instead."""
        options, journal = self._options, self._journal
        if tasks is None:
            had = self._now.plan
            self._now.plan = backend_at_addresses(had, self._run.addresses)
            if (note := backend_note(had, self._now.plan)) is not None:
                self._callbacks.warn(note)
        plan = self._now.plan
        check_plan_fits(plan, self._run.cluster)
        check_backend_of_plan(plan, encrypt=options.encrypt)
        refuse_trace(plan.problem.rhythm, trace=options.trace)
        if tasks is None:  # else a request to stop waits until the ranks can write a last checkpoint
            self._look_for_requests()
            now = self._now
            begin_attempt(journal, plan, number=now.number, why=now.why, planned=now.planned)
        self._is_under_way = True
        attempt = self._start() if tasks is None else self._adopt(tasks)
        was_stopping = tasks is not None and journal.state.status == "stopping"  # its request is taken
        journal.update(status="running", detail=None)
        attempt.watch()
        change = self._replanner.take_decided()
        stopped_early = attempt.state.has_stopped_early
        if attempt.state.collected.reported < options.steps and not stopped_early:
            if self._requests.stop is not None or was_stopping:
                raise StopRequested
            return change or PlanChange(plan, ENDED_EARLY)
        done = attempt.results.of_all_attempts(self._history, weights=options.weights)
        write_atomic(journal.paths.measurement, done.to_json())
        if experts := attempt.results.experts():
            step_s = attempt.results.hosted_step_s(options.experts)
            record = figures_record(experts, step_s)
            write_atomic(journal.paths.experts, json.dumps(record, indent=1) + "\n")
            self._callbacks.note(describe_figures(experts, step_s))
        if options.trace:  # whatever becomes of it, the figures are kept
            done = attempt.results.with_trace(done)
            write_atomic(journal.paths.measurement, done.to_json())
        attempt.end()
        if stopped_early:
            self._note_early_stop()
        self._keep_for_later()
        return done

    def _note_early_stop(self) -> None:
        self._journal.update(stopped_early=True)
        best = min(self._history.validation.values(), key=lambda validation: validation.loss, default=None)
        if best is not None:
            self._callbacks.note(
                f"stopped early, after {self._history.count} of {self._options.steps} {self._unit}s: no "
                f"validation since {self._unit} {best.step + 1} has a lower loss than {best.loss:.4f}"
            )

    def _keep_for_later(self) -> None:
        """The run has ended well: its last checkpoint stays on its nodes, and it is said what that is for."""
        state = self._journal.state
        with suppress(KeyboardInterrupt):  # all is done: who does not wait has the run nevertheless
            self._checkpoints.keep_last(state.checkpoint, self._now.plan)
        if (hint := resume_hint(state, self._unit, done=True)) is not None:
            self._callbacks.note(
                f"its last checkpoint stays on its nodes until `skyctl checkpoint rm {state.run_id}`; {hint}"
            )

    def _start(self) -> Attempt:
        """Starts the ranks, from the newest checkpoint where the run has begun before."""
        self._nodes.note()
        plan, number, origin = self._now.plan, self._now.number, None
        if number > 1 or self._from_checkpoint:
            state = self._journal.state
            origin = self._checkpoints.restore(plan, self._history.count)
            self._journal.update(best=self._checkpoints.best)
            self._give_up_untrusted()
            if origin is None and self._from_checkpoint and state.checkpoint is not None:
                raise no_checkpoint_error(state, self._run.sessions)
            where = f"{self._unit} {origin.step}" if origin else "the start: no checkpoint is there in full"
            self._callbacks.note(f"going on from {where}")
            step = origin.step if origin else 0
            update_attempt(self._journal, from_step=step)
            # If it goes on from beyond what all nodes have told of: what is known of those steps.
            before, self._last_collected = self._last_collected, None
            for progress in before.heard(step) if before is not None else ():
                self._keep_step(progress)
                self._callbacks.step(progress)
        orders = self._orders.make(plan, number, origin)
        attempt = self._attempt = self._new_attempt(orders)
        attempt.start()
        return attempt

    def _adopt(self, tasks: Mapping[int, RemoteTask]) -> Attempt:
        orders = self._orders.make_again(self._now.plan, self._now.number)
        attempt = self._attempt = self._new_attempt(orders)
        attempt.adopt(tasks, self._left_hosts)
        return attempt

    def _new_attempt(self, orders: AttemptOrders) -> Attempt:
        attempt = Attempt(self._run, orders, self._options, self._checkpoints, self, self._keep_part)
        known, self._joins = self._joins, None
        if orders.specs[0].is_elastic and may_grow(orders.plan):
            problem = None if known is None else known.plan.problem
            self._joins = ElasticJoins(
                self._run, self._nodes, attempt, orders, self._orders, self._options, problem
            )
        return attempt

    # --- while an attempt is watched

    def step(self, progress: StepProgress) -> None:
        """A step has ended: it is written down before anybody is told."""
        self._keep_step(progress)
        if self._restart_began is not None:
            restart_s = self._replanner.restart_s = time.monotonic() - self._restart_began
            self._callbacks.note(
                f"the next {self._unit} came {restart_s:.1f} s after the attempt before ended"
            )
            self._restart_began = None
        self._callbacks.step(progress)

    def checkpoint(self, step: int) -> None:
        """Every rank has written its layers after so many steps."""
        self._journal.update(checkpoint=step, best=self._checkpoints.best)
        knows_times = self._options.experts is None  # else layers take other times than the plan has
        if self._attempt is not None and self._requests.stop is None and knows_times:
            self._replanner.check_stages(self._now.plan, self._attempt.state.collected, self._options.steps)

    def tick(self) -> None:
        """Called twice a second while an attempt is watched: takes requests, nodes that came, better plans.

        Raises:
            StopRequested: the run is to end now.
            ProtocolError: a node that the plan needs can't be trusted any more.
        """
        self._look_for_requests()
        self._give_up_untrusted()
        self._nodes.update()
        attempt = self._attempt
        if attempt is None or self._requests.stop is not None:
            return
        plan, joins = self._now.plan, self._joins
        if joins is not None and attempt.state.has_begun:
            joins.update()
            plan = joins.plan
        self._replanner.update(plan, attempt.state.collected, self._options.steps, joins)
        decided = self._replanner.decided
        if decided is not None and not attempt.is_ending and attempt.end_early():
            self._callbacks.note(f"{decided.why}: going on with another plan")

    def _keep_step(self, progress: StepProgress) -> None:
        self._journal.step(progress)
        self._history.add(progress)
        self._journal.update(step=progress.step + 1, loss=progress.loss, iteration_s=progress.iteration_s)

    def _give_up_untrusted(self) -> None:
        """A node's replicator has sent what none would send. Raises that where the plan needs the node."""
        for error in self._checkpoints.take_protocol_errors():
            if error.node in nodes_in(self._now.plan):
                raise error
            self._nodes.give_up(error.node, error.message, self._now.plan, trusted=False)

    def _look_for_requests(self) -> None:
        """Takes what other commands ask. Raises StopRequested once the run can't be ended more gently."""
        for request in self._requests.take():
            self._replanner.request_nodes(request.nodes)
        stop, attempt = self._requests.stop, self._attempt
        if stop is None:
            return
        if attempt is None or not stop.checkpoint or not attempt.end_early():
            raise StopRequested
        if self._requests.stopping_s > attempt.last_checkpoint_s:
            attempt.warn_no_last_checkpoint()
            raise StopRequested

    # --- after an attempt

    def _recover(self, error: SkyctlError) -> None:
        """After a fault: the next attempt's plan; raises the error where there is to be none."""
        self._restart_began = self._restart_began or time.monotonic()
        attempt = self._leave_attempt()
        error, report = self._restart_policy.believe(
            error, attempt.state.failure if attempt is not None else None
        )
        fault = classify(error, report)
        if fault.kind == "node" and self._is_hopeless(error):
            fault = Fault("final")
        slowdowns: Mapping[str, float] = {}
        if attempt is not None and self._options.experts is None:
            slowdowns = attempt.results.slowdowns()
        self._nodes.give_up_lost(fault.lost, error, self._now.plan)
        if attempt is not None:
            attempt.end(RANKS_END_S)
            self._last_collected = attempt.state.collected
        update_attempt(self._journal, ended=timestamp(), error=error.message)
        wait_s = self._restart_policy.wait_s(fault, self._journal.state.checkpoint)
        if wait_s is None:
            raise final_error(error, fault, self._restart_policy, self._resume_hint) from None
        plan = self._replanned(slowdowns, fault.apart if self._history.count else None)
        if fault.kind in ("failed", "network") and not (attempt is not None and attempt.state.has_begun):
            had, plan = plan, without_gloo(plan)
            if (note := backend_note(had, plan)) is not None:
                self._callbacks.note(note)
        text = restart_text(error, self._restart_policy, wait_s, nodes_in(plan), self._journal.state)
        self._callbacks.warn(f"attempt {self._now.number} of run {self._run.run_id} ended: {text}")
        self._now = _CurrentAttempt(plan, restart_reason(fault, error), number=self._now.number + 1)
        self._journal.update(status="restarting", detail=self._now.why)
        until = time.monotonic() + wait_s
        while time.monotonic() < until:
            self._look_for_requests()
            time.sleep(min(REQUEST_INTERVAL_S, max(0.0, until - time.monotonic())))

    def _is_hopeless(self, error: SkyctlError) -> bool:
        """Nothing was done yet, and what a node lacks is for its owner to mend."""
        begun = self._history.count > 0 or self._from_checkpoint
        return not begun and isinstance(error, NodeError) and not node_is_gone(error)

    def _replanned(self, slowdowns: Mapping[str, float], apart: tuple[str, str] | None = None) -> Plan:
        """The same plan while all of its nodes are there and connect, else the best one on those that are."""
        had, hint = self._now.plan, self._resume_hint
        made = replan_without(had, self._run.sessions, self._nodes.reasons, slowdowns, hint, apart)
        for note in change_notes(had, made):
            self._callbacks.note(note)
        return made

    def _change_plan(self, change: PlanChange) -> None:
        """The attempt has ended because there is a better plan."""
        self._restart_began = time.monotonic()
        for note in change_notes(self._now.plan, change.plan):
            self._callbacks.note(note)
        attempt = self._leave_attempt()
        if attempt is not None:
            attempt.end(RANKS_END_S)
        update_attempt(self._journal, ended=timestamp())
        self._now = _CurrentAttempt(change.plan, change.why, True, self._now.number + 1)

    def _leave_attempt(self) -> Attempt | None:
        """No attempt is under way any more; the last one, where its ranks were started."""
        attempt, self._attempt, self._is_under_way = self._attempt, None, False
        return attempt

    # --- the end

    def _stop(self, exc: KeyboardInterrupt) -> None:
        """The run was stopped: what there is to go on with is said, and is kept where that was asked for."""
        text = f"stopped after {self._history.count} {self._unit}s"
        if (hint := self._resume_hint) is not None:
            text += f"; {hint}"
        exc.add_note(f"{text}, no weights were kept; the run's folder: {self._journal.paths.folder}")
        if type(exc) in (KeyboardInterrupt, StopRequested):  # not a signal that is to end it at once
            self._keep_last_checkpoint()

    def _keep_last_checkpoint(self) -> None:
        """After a stop that was to keep everything: the last checkpoint gets its copies, too."""
        stop = self._requests.stop
        if not self._is_under_way or (stop is not None and not stop.checkpoint):
            return
        if self._attempt is not None:
            self._attempt.end()
        if self._journal.state.checkpoint == self._history.count:
            with suppress(KeyboardInterrupt):
                self._checkpoints.wait_replicated(self._history.count)

    def _end(self) -> None:
        """Nothing of the run is left on any node but its checkpoints."""
        attempt = self._leave_attempt()
        if attempt is not None:
            attempt.end()
        self._checkpoints.close()
        self._replanner.close()
        self._nodes.give_back()
