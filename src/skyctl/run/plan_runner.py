"""The one way to run a plan: from its first attempt to its end, with or without restarts and checkpoints.

An attempt is one set of ranks. When it ends before the run does, its fault is named, nodes that are gone are
left out, the rest is planned anew, the newest whole checkpoint is brought to where its layers are needed, and
the next attempt goes on from there. Sessions of nodes that live are used again. ``run_plan`` is a run of one
attempt and without checkpoints, as comparisons want it.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace

from skyctl.checkpoint.launcher.policy import shard_limits
from skyctl.errors import NodeError, SkyctlError
from skyctl.files import RunPaths, write_atomic
from skyctl.jobs.training_request import TrainingRequest
from skyctl.planning.backend_choice import (
    check_backend_of_plan,
    choice_at_addresses,
    with_asked_backend,
)
from skyctl.records.backend import GLOO, SKYCTL
from skyctl.records.base import timestamp
from skyctl.records.cluster import Cluster
from skyctl.records.measurement import Measurement
from skyctl.records.plan import Plan
from skyctl.records.run_state import RunState
from skyctl.remote.agent_session import Session
from skyctl.remote.base import ConnectOptions
from skyctl.run.attempt import AdoptedRanks, Attempt
from skyctl.run.callbacks import Detached, RunCallbacks, StepProgress
from skyctl.run.change_notes import backend_note, change_notes
from skyctl.run.event_sink import EventSink, RunFolderSink, begin_attempt, update_attempt
from skyctl.run.first_steps import KeepPart
from skyctl.run.operator_requests import JoinRequest, StopRequested, StopRunRequest, take_requests
from skyctl.run.plan_update import nodes_in, replan_without
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
from skyctl.run.run_context import RunContext, RunOptions
from skyctl.run.run_nodes import RunNodes
from skyctl.run.step_metrics import StepCollector, StepHistory

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
    sink = RunFolderSink(paths, state, callbacks.note, mine)
    return PlanRunner(plan, cluster, request, mine, once, callbacks, sink).run()


@dataclass
class _CurrentAttempt:
    """The attempt that is about to be played. ``why``: what it is begun for."""

    plan: Plan
    why: str = "launched"
    planned: bool = False
    number: int = 1


class PlanRunner:
    """One run; ``run`` may be called once.

    Args:
        sessions: by node, those that can be used; changed in place as nodes are lost and come. Whoever opened
            them closes them.
        sink: writes everything down.
        connect: how nodes are connected to that come later; None: none do.
        resume: go on from the newest checkpoint that the nodes of ``sessions`` hold of the sink's run.
        replaced: gets earlier sessions of nodes that are back; whoever opened the others closes them, too.
        keep_part: as ``RunContext`` has it.
    """

    def __init__(
        self,
        plan: Plan,
        cluster: Cluster,
        request: TrainingRequest,
        sessions: dict[str, Session],
        options: RunOptions,
        callbacks: RunCallbacks,
        sink: EventSink,
        *,
        connect: ConnectOptions | None = None,
        resume: bool = False,
        replaced: list[Session] | None = None,
        keep_part: KeepPart | None = None,
    ) -> None:
        self._sessions, self._options, self._sink, self._callbacks = sessions, options, sink, callbacks
        before = sink.state.attempts
        plan = with_asked_backend(plan, options.backend, encrypt=options.encrypt)
        self._now = _CurrentAttempt(plan, "resumed" if resume else "launched", number=len(before) + 1)
        self._history = StepHistory.read(sink.paths.metrics) if before else StepHistory()
        self._from_checkpoint = resume
        self._restart_policy = RestartPolicy(options.max_restarts)
        self._stop: StopRunRequest | None = None
        self._stop_asked_at = 0.0
        self._attempt: Attempt | None = None
        self._last_collected: StepCollector | None = None
        self._restart_began: float | None = None
        self._context = RunContext(
            cluster=cluster,
            request=request,
            sessions=sessions,
            options=options,
            callbacks=replace(callbacks, step=self._on_step),
            sink=sink,
            on_checkpoint=self._on_checkpoint,
            on_tick=self._tick,
            shard_limits=shard_limits(plan.problem),
            keep_part=keep_part,
        )
        file = sink.state.cluster_file
        self._replanner = Replanner(cluster, request, sessions, connect, plan, callbacks, file, replaced)
        self._nodes = RunNodes(sessions, sink, self._replanner, plan, self._context.drop)

    def run(self, adopted: AdoptedRanks | None = None) -> tuple[Measurement, RunPaths]:
        """Plays attempts until the run has ended.

        Args:
            adopted: ranks that another process had started, of the sink's last attempt.

        Raises:
            SkyctlError: the first cause of the last fault, when another attempt would not help.
            InfeasibleError: nothing fits on the nodes that are left.
            KeyboardInterrupt: it was stopped (``Detached``: it goes on without this process).
        """
        before = self._sink.state.attempts
        work = self._now.plan.workload
        if adopted is None and work is not None and work.uncompared is not None:
            self._callbacks.note(
                f"it is not known whether {work.source}, cut into layers, trains as in plain torch "
                f"({work.uncompared})"
            )
        if adopted is not None and before:
            last = before[-1]
            self._now = _CurrentAttempt(self._now.plan, last.why, last.planned, last.number)
        try:
            if self._from_checkpoint:
                self._now.plan = self._replanned({})
            done = self._play_attempts(adopted)
        except Detached:
            raise
        except KeyboardInterrupt as exc:
            exc.add_note(self._stopped_text())
            if type(exc) in (KeyboardInterrupt, StopRequested):  # not a signal that is to end it at once
                self._keep_last_checkpoint()
            self._close("stopped")
            raise
        except SkyctlError as exc:
            if exc.log is None:
                exc.log = str(self._sink.paths.folder)
            self._close("failed", detail=exc.message)
            raise
        except BaseException as exc:
            self._close("failed", detail=f"{type(exc).__name__}: {exc}")
            raise
        self._close("done")
        return done, self._sink.paths

    @property
    def _unit(self) -> str:
        return self._now.plan.problem.rhythm.unit

    @property
    def _resume_hint(self) -> str | None:
        return resume_hint(self._sink.state, self._unit)

    def _play_attempts(self, adopted: AdoptedRanks | None) -> Measurement:
        while True:
            try:
                found = self._play_attempt(adopted)
            except SkyctlError as exc:
                self._recover(exc)
            else:
                if isinstance(found, Measurement):
                    return found
                self._change_plan(found)
            adopted = None

    def _play_attempt(self, adopted: AdoptedRanks | None) -> Measurement | PlanChange:
        """Plays one attempt: the run's measurement, or what to go on with instead."""
        if adopted is None:
            self._settle_backend()
        plan = self._now.plan
        self._context.cluster = self._replanner.cluster
        check_plan_fits(plan, self._context.cluster)
        check_backend_of_plan(plan, encrypt=self._context.options.encrypt)
        refuse_trace(plan.problem.rhythm, trace=self._context.options.trace)
        if adopted is None:  # else a request to stop waits until the ranks can write a last checkpoint
            self._look_for_requests()
            now = self._now
            begin_attempt(self._sink, plan, number=now.number, why=now.why, planned=now.planned)
        attempt = self._attempt = Attempt(self._context, plan, self._now.number)
        if adopted is not None:
            attempt.adopt(adopted)
        else:
            self._start(attempt)
        was_stopping = adopted is not None and self._sink.state.status == "stopping"  # its request is taken
        self._sink.update(status="running", detail=None)
        attempt.watch()
        change, self._replanner.decided = self._replanner.decided, None
        if attempt.done_steps < self._options.steps:
            if self._stop is not None or was_stopping:
                raise StopRequested
            return change or PlanChange(plan, ENDED_EARLY)
        done = attempt.finish(self._history)
        write_atomic(self._sink.paths.measurement, done.to_json())
        if self._options.trace:  # whatever becomes of it, the figures are kept
            done = attempt.with_trace(done)
            write_atomic(self._sink.paths.measurement, done.to_json())
        attempt.end()
        self._keep_for_later()
        return done

    def _settle_backend(self) -> None:
        """A backend chosen for private addresses gives way to ours where a node is reached elsewhere.

        So it is looked at before each attempt: a name may lead somewhere else than when it was planned.
        """
        had = self._now.plan
        if had.backend is None or had.backend.is_asked or had.backend.backend == SKYCTL:
            return
        with suppress(SkyctlError):  # whoever needs them next says what is wrong
            there = self._context.addresses(nodes_in(had))
            chosen = choice_at_addresses(had.backend, {name: there[name] for name in nodes_in(had)})
            self._now.plan = had.model_copy(update={"backend": chosen})
        if (note := backend_note(had, self._now.plan)) is not None:
            self._callbacks.warn(note)

    def _keep_for_later(self) -> None:
        """The run has ended well: its last checkpoint stays on its nodes, and it is said what that is for."""
        state = self._sink.state
        with suppress(KeyboardInterrupt):  # all is done: who does not wait has the run nevertheless
            self._context.keep_last_checkpoint(state.checkpoint, self._now.plan)
        if (hint := resume_hint(state, self._unit, done=True)) is not None:
            self._callbacks.note(
                f"its last checkpoint stays on its nodes until `skyctl checkpoint rm {state.run_id}`; {hint}"
            )

    def _start(self, attempt: Attempt) -> None:
        """Starts the ranks, from the newest checkpoint where the run has begun before."""
        self._nodes.note()
        if self._now.number == 1 and not self._from_checkpoint:
            attempt.start(None)
            return
        origin = attempt.restore(self._history.count)
        self._give_up_untrusted()
        if origin is None and self._from_checkpoint and self._sink.state.checkpoint is not None:
            raise no_checkpoint_error(self._sink.state, self._sessions)
        what = f"{self._unit} {origin.step}" if origin else "the start: no checkpoint is there in full"
        self._callbacks.note(f"going on from {what}")
        step = origin.step if origin else 0
        update_attempt(self._sink, from_step=step)
        # Where it goes on from beyond what all nodes have told of: what is known of those steps.
        before, self._last_collected = self._last_collected, None
        for progress in before.heard(step) if before is not None else ():
            self._on_step(progress, now=False)
        attempt.start(origin)

    # --- while an attempt is watched

    def _on_step(self, progress: StepProgress, *, now: bool = True) -> None:
        """A step that has ended (``now``: in this attempt): written down before anybody is told."""
        self._sink.step(progress)
        self._history.add(progress)
        self._sink.update(step=progress.step + 1, loss=progress.loss, iteration_s=progress.iteration_s)
        if now and self._restart_began is not None:
            restart_s = self._replanner.restart_s = time.monotonic() - self._restart_began
            self._callbacks.note(
                f"the next {self._unit} came {restart_s:.1f} s after the attempt before ended"
            )
            self._restart_began = None
        self._callbacks.step(progress)

    def _on_checkpoint(self, step: int) -> None:
        """Every rank has written its layers after so many steps."""
        self._sink.update(checkpoint=step)
        if self._attempt is not None and self._stop is None:
            self._replanner.check_stages(self._now.plan, self._attempt.collected, self._options.steps)

    def _tick(self) -> None:
        """Twice a second while an attempt is watched."""
        self._look_for_requests()
        self._give_up_untrusted()
        self._nodes.update()
        if self._attempt is None or self._stop is not None:
            return
        self._replanner.update(self._now.plan, self._attempt.collected, self._options.steps, self._nodes.lost)
        decided = self._replanner.decided
        if decided is not None and not self._attempt.ending and self._attempt.end_early():
            self._callbacks.note(f"{decided.why}: going on with another plan")

    def _give_up_untrusted(self) -> None:
        """A node's replicator has sent what none would send. Raises that where the plan needs the node."""
        for error in self._context.take_protocol_errors():
            if error.node in nodes_in(self._now.plan):
                raise error
            self._nodes.give_up(error.node, error.message, self._now.plan, trusted=False)

    def _look_for_requests(self) -> None:
        for request in take_requests(self._sink.paths):
            if isinstance(request, JoinRequest):
                self._replanner.request_nodes(list(request.nodes))
                continue
            if self._stop is None:
                self._stop_asked_at = time.monotonic()
                self._sink.update(status="stopping")
            if self._stop is None or not request.checkpoint:
                self._stop = request
        if self._stop is None:
            return
        if self._attempt is None or not self._stop.checkpoint or not self._attempt.end_early():
            raise StopRequested
        if time.monotonic() - self._stop_asked_at > self._attempt.last_checkpoint_s:
            self._attempt.warn_no_last_checkpoint()
            raise StopRequested

    # --- after an attempt

    def _recover(self, error: SkyctlError) -> None:
        """After a fault: the next attempt's plan; raises the error where there is to be none."""
        self._restart_began = self._restart_began or time.monotonic()
        attempt, self._attempt = self._attempt, None
        error, report = self._restart_policy.believe(error, attempt.failure if attempt is not None else None)
        fault = classify(error, report)
        if fault.kind == "node" and self._is_hopeless(error):
            fault = Fault("final")
        slowdowns = attempt.slowdowns() if attempt is not None else {}
        self._nodes.give_up_lost(fault.lost, error, self._now.plan)
        if attempt is not None:
            attempt.end(RANKS_END_S)
            self._last_collected = attempt.collected
        update_attempt(self._sink, ended=timestamp(), error=error.message)
        wait_s = self._restart_policy.wait_s(fault, self._sink.state.checkpoint)
        if wait_s is None:
            raise final_error(error, fault, self._restart_policy, self._resume_hint) from None
        plan = self._replanned(slowdowns, fault.apart if self._history.count else None)
        if fault.kind in ("failed", "network") and (attempt is None or not attempt.has_begun):
            plan = self._without_gloo(plan)
        next_one = restart_text(error, self._restart_policy, wait_s, nodes_in(plan), self._sink.state)
        self._callbacks.warn(f"attempt {self._now.number} of run {self._sink.paths.run_id} ended: {next_one}")
        self._now = _CurrentAttempt(plan, restart_reason(fault, error), number=self._now.number + 1)
        self._sink.update(status="restarting", detail=self._now.why)
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
        made = replan_without(had, self._sessions, self._nodes.lost, slowdowns, hint, apart)
        for note in change_notes(had, made):
            self._callbacks.note(note)
        return made

    def _without_gloo(self, plan: Plan) -> Plan:
        """The plan over ours where Gloo was chosen, and ranks came to no step: not every network suits it."""
        had = plan.backend
        if had is None or had.is_asked or had.backend != GLOO:
            return plan
        made = plan.model_copy(
            update={"backend": had.model_copy(update={"backend": SKYCTL, "reason": "failed", "about": ()})}
        )
        self._callbacks.note(str(backend_note(plan, made)))
        return made

    def _change_plan(self, change: PlanChange) -> None:
        """The attempt has ended because there is a better plan."""
        self._restart_began = time.monotonic()
        for note in change_notes(self._now.plan, change.plan):
            self._callbacks.note(note)
        attempt, self._attempt = self._attempt, None
        if attempt is not None:
            attempt.end(RANKS_END_S)
        update_attempt(self._sink, ended=timestamp())
        self._nodes.keep_lost(nodes_in(change.plan))
        self._now = _CurrentAttempt(change.plan, change.why, True, self._now.number + 1)

    # --- the end

    def _stopped_text(self) -> str:
        text = f"stopped after {self._history.count} {self._unit}s"
        if (hint := self._resume_hint) is not None:
            text += f"; {hint}"
        return f"{text}, no weights were kept; the run's folder: {self._sink.paths.folder}"

    def _keep_last_checkpoint(self) -> None:
        """After a stop that was to keep everything: the last checkpoint gets its copies, too."""
        if self._attempt is None or (self._stop is not None and not self._stop.checkpoint):
            return
        self._attempt.end()
        if self._sink.state.checkpoint == self._history.count:
            with suppress(KeyboardInterrupt):
                self._context.wait_replicated(self._history.count)

    def _close(self, status: str, detail: str | None = None) -> None:
        """The last word of the state; nothing of the run is left on any node but its checkpoints."""
        if self._attempt is not None:
            self._attempt.end()
            self._attempt = None
        self._context.close()
        self._replanner.close()
        with suppress(SkyctlError):
            update_attempt(self._sink, ended=timestamp(), error=detail)
            self._sink.update(status=status, detail=detail)
            self._sink.close()
