"""Whether a run that goes well should go on with another plan: a node has come, or one has become slow.

Connecting, measuring and planning happen in a thread, one thing at a time; what comes of it is looked at, and
decided, in the supervising thread.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median

from skyctl.errors import SessionGoneError, SkyctlError
from skyctl.jobs.training_request import TrainingRequest
from skyctl.planning.parallelism_choice import with_parallelism
from skyctl.records.cluster import Cluster, Node, node_of
from skyctl.records.plan import Plan
from skyctl.records.problem import Problem
from skyctl.remote.agent_session import Session
from skyctl.remote.awake_clock import awake_s
from skyctl.remote.base import ConnectOptions
from skyctl.remote.session_factory import open_session
from skyctl.run.callbacks import RunCallbacks
from skyctl.run.plan_update import (
    DEFAULT_RESTART_S,
    OBSERVED_STEPS,
    SLOW_FACTOR,
    missing_figures,
    nodes_in,
    nodes_of,
    observed_slowdowns,
    plan_step_s,
    problem_with_node,
    replan,
    same_stages,
    slow_devices,
    with_node,
    with_observed_times,
    without_nodes,
    worth_moving,
)
from skyctl.run.step_metrics import StepCollector

HEARD_AGAIN_S = 5.0
"""A node that was lost is there again once it has answered since, and so shortly ago."""
RETRY_S, LONGEST_RETRY_S = 15.0, 120.0
"""Between two tries to connect to a lost node again."""
MAX_RETURNS = 3
"""So often a node that was lost is taken back by itself."""
SLOW_NODE_INTERVAL_STEPS = 50
"""Steps between two tries to do better than a node that is as slow as before."""
TRIAL_STEPS = 5
"""Steps of a new plan before it is compared with the one before."""


@dataclass(frozen=True)
class PlanChange:
    """A plan to go on with, and why, in words for the user."""

    plan: Plan
    why: str


@dataclass(frozen=True)
class _JobResult:
    """What a job found.

    Attributes:
        session: of the node that has come, where one has.
        now_s: seconds a step takes under the plan there is.
        then_s: seconds it would take under the new one.
        is_trial: the plan is made for what was seen, so it must prove better by what is seen, too.
        unknown: what the plan reckons with and nobody knows of the node, in words.
    """

    why: str
    node: str | None
    session: Session | None
    plan: Plan | None
    now_s: float = 0.0
    then_s: float = 0.0
    failure: str | None = None
    is_trial: bool = False
    unknown: str | None = None


@dataclass
class _LostNode:
    """A node that was given up at ``lost_at`` (awake seconds).

    ``problem``: one that knows its devices. ``trusted``: it is taken back by itself when it answers again.
    ``next_try``: monotonic seconds.
    """

    session: Session | None
    problem: Problem
    lost_at: float
    trusted: bool = True
    tries: int = 0
    next_try: float = 0.0

    def has_answered(self) -> bool:
        """Whether its session has brought anything since the node was given up, and brings more."""
        return (
            self.session is not None
            and self.session.has_answered(HEARD_AGAIN_S)
            and self.session.silent_s < awake_s() - self.lost_at
        )


@dataclass(frozen=True)
class _SeenSlowness:
    """A node took ``factor`` × its predicted time when another plan was looked for, after ``step`` steps."""

    step: int
    factor: float

    def is_news(self, before: _SeenSlowness | None) -> bool:
        """Whether another plan may be better now, though there was none then."""
        return (
            before is None
            or self.step - before.step >= SLOW_NODE_INTERVAL_STEPS
            or self.factor > SLOW_FACTOR * before.factor
        )


@dataclass(frozen=True)
class _PlanTrial:
    """A plan made for a slow node, and how long a step took under the plan before."""

    before: Plan
    now: Plan
    median_s: float


class Replanner:
    """Looks out for something better. ``decided``: what it is, once there is something.

    Args:
        sessions: the run's; nodes that come are put there.
        connect: None: nobody is connected to.
        plan: the first one: its problem knows devices that later ones may not.
        replaced: gets sessions that a node's newer one has taken the place of. They are closed once their
            agents can be told; whoever opened the others closes those that could not be.
    """

    def __init__(
        self,
        cluster: Cluster,
        request: TrainingRequest,
        sessions: dict[str, Session],
        connect: ConnectOptions | None,
        plan: Plan,
        callbacks: RunCallbacks,
        cluster_file: str | None = None,
        replaced: list[Session] | None = None,
    ) -> None:
        self.cluster = cluster
        self._replaced = [] if replaced is None else replaced
        self._closing: list[Session] = []
        self.decided: PlanChange | None = None
        self.restart_s = DEFAULT_RESTART_S
        self._request, self._sessions, self._connect = request, sessions, connect
        self._first_problem, self._callbacks, self._cluster_file = plan.problem, callbacks, cluster_file
        self._requested: list[str] = []
        self._lost: dict[str, _LostNode] = {}
        self._returns: dict[str, int] = {}
        self._slowness: dict[str, _SeenSlowness] = {}
        self._trial: _PlanTrial | None = None
        self._job: threading.Thread | None = None
        self._job_result: _JobResult | None = None

    def request_nodes(self, nodes: list[str]) -> None:
        """Somebody wants these to be used (``skyctl join``)."""
        self._requested += [name for name in nodes if name not in self._requested]

    def note_lost(self, name: str, session: Session | None, plan: Plan, *, trusted: bool = True) -> None:
        """A node was lost; it is taken back when it answers again, or (``trusted``: False) when asked for."""
        self._lost[name] = _LostNode(
            session, plan.problem, awake_s(), trusted, next_try=time.monotonic() + RETRY_S
        )
        if self.decided is not None and name in nodes_in(self.decided.plan):
            self.decided = None

    @property
    def given_up(self) -> dict[str, Session]:
        """By node that was lost, its session, where that may still hold there."""
        known = {name: one.session for name, one in self._lost.items()}
        return {
            name: session
            for name, session in known.items()
            if session is not None and not isinstance(session.lost, SessionGoneError)
        }

    def check_stages(self, plan: Plan, collected: StepCollector | None, steps: int) -> None:
        """After a checkpoint: has a stage become slow?"""
        if collected is None or self._job is not None or self.decided is not None:
            return
        factors = observed_slowdowns(plan, collected.settled_events())
        done = collected.reported
        seen = {device: _SeenSlowness(done, factors[device]) for device in slow_devices(factors)}
        slow = [device for device, now in seen.items() if now.is_news(self._slowness.get(node_of(device)))]
        if not slow or steps - done <= TRIAL_STEPS:
            return
        for device in slow:
            self._slowness[node_of(device)] = seen[device]
        problem = self._problem_of_run(with_observed_times(plan.problem, factors))
        why = f"{slow[0]} takes {factors[slow[0]]:.2f} × the predicted time"
        self._begin_job(lambda: _better_plan(plan, problem, why, is_trial=True))

    def update(
        self, plan: Plan, collected: StepCollector | None, steps: int, lost: Mapping[str, str]
    ) -> None:
        """Takes what the job has found, compares a plan on trial, begins the next job."""
        self._close_replaced()
        left = steps - (collected.reported if collected is not None else 0)
        if self.decided is not None:
            return
        self._judge_trial(plan, collected)
        if self._job is not None and not self._job.is_alive():
            self._job = None
            found, self._job_result = self._job_result, None
            if found is not None:
                self._take_result(found, plan, collected, left)
        if self._job is None and self.decided is None:
            self._begin_next_job(plan, lost)

    def close(self) -> None:
        """Closes the session of a node that was not taken; lost nodes' sessions go back to their owner."""
        if self._job is not None:
            self._job.join(5.0)
        found = self._job_result
        if found is not None and found.session is not None and found.node not in self._sessions:
            found.session.close()
        for name, known in self._lost.items():
            if known.session is not None:
                self._sessions.setdefault(name, known.session)

    # --- deciding

    def _take_result(self, found: _JobResult, plan: Plan, collected: StepCollector | None, left: int) -> None:
        node = found.node
        if node is not None and found.session is not None and not self._take_session(node, found.session):
            return
        if found.failure is not None:
            if node is None or node not in self._lost:
                self._callbacks.warn(found.failure)
            return
        if found.unknown is not None:
            self._callbacks.note(f"node {node}: {found.unknown}")
        if found.plan is None or same_stages(found.plan, plan) or not self._has_nodes_of(found.plan):
            return
        if not worth_moving(found.now_s, found.then_s, left, self.restart_s):
            if node is not None:  # somebody waits for an answer
                saved_s = max(0.0, found.now_s - found.then_s) * left
                self._callbacks.note(
                    f"{found.why}: a plan with it would save {saved_s:.0f} s of what is left, a restart "
                    f"takes about {self.restart_s:.0f} s; it stays on standby, for copies of checkpoints"
                )
            return
        if found.is_trial:
            if collected is None or collected.reported - collected.first < 2:
                return  # the attempt that it was seen in has ended: nothing to compare the new plan with
            self._trial = _PlanTrial(plan, found.plan, _median_step_s(plan, collected))
        self.decided = PlanChange(found.plan, found.why)

    def _take_session(self, node: str, session: Session) -> bool:
        """Puts a node that has come among the run's; False where it has gone again meanwhile."""
        known = self._lost.get(node)
        if known is not None and known.session is not None and known.session is not session:
            self._replaced.append(known.session)
        if session.has_answered(HEARD_AGAIN_S):
            self._lost.pop(node, None)
            self._sessions[node] = session
            return True
        if known is not None:
            known.session, known.lost_at = session, awake_s()
        elif node not in self._sessions:
            self._callbacks.warn(f"node {node} can't be used: it is not heard any more")
            self._replaced.append(session)
        return False

    def _close_replaced(self) -> None:
        """Closes those that can be told, or dialled once more. One that is only silent may be heard later."""
        for session in self._replaced:
            ready = session.lost is not None or session.has_answered(HEARD_AGAIN_S)
            if ready and session not in self._closing:
                self._closing.append(session)
                threading.Thread(target=session.close, daemon=True).start()  # may take its time

    def _judge_trial(self, plan: Plan, collected: StepCollector | None) -> None:
        """A plan made for a slow node must be better as measured, too; else it is back to the one before."""
        trial = self._trial
        if trial is None or collected is None or plan is not trial.now:
            return
        if collected.reported - collected.first <= TRIAL_STEPS:
            return
        self._trial = None
        took_s = _median_step_s(plan, collected)
        if took_s >= trial.median_s and self._has_nodes_of(trial.before):
            why = f"a step takes {took_s:.3f} s, {trial.median_s:.3f} s under the plan before: back to that"
            self.decided = PlanChange(trial.before, why)

    def _has_nodes_of(self, plan: Plan) -> bool:
        """Whether the run has all of the plan's nodes."""
        return all(name in self._sessions for name in nodes_in(plan))

    def _problem_of_run(self, problem: Problem, coming: str | None = None) -> Problem:
        """The problem without nodes that the run does not have.

        A plan's problem knows every node of its profile; which of them are used is its owner's choice. Form
        and rhythm are the run's own: it may be a pipeline only because nodes are missing.
        """
        mine = {*self._sessions, coming}
        problem = with_parallelism(problem, self._first_problem.parallel)
        if not problem.rhythm.is_rounds:  # of rounds the owners that are left have numbers of their own
            problem = problem.model_copy(update={"rhythm": self._first_problem.rhythm})
        return without_nodes(
            problem, {name: "not in the run" for name in nodes_of(problem) if name not in mine}
        )

    # --- jobs

    def _begin_next_job(self, plan: Plan, lost: Mapping[str, str]) -> None:
        if self._requested:
            name = self._requested.pop(0)
            self._begin_job(lambda: self._plan_with_node(plan, name, f"node {name} has joined"))
            return
        now = time.monotonic()
        for name, known in self._lost.items():
            if name not in lost or not known.trusted or self._returns.get(name, 0) >= MAX_RETURNS:
                continue
            back = known.has_answered()
            if not back and (now < known.next_try or self._connect is None):
                continue
            known.tries += 1
            known.next_try = now + min(LONGEST_RETRY_S, RETRY_S * 2.0**known.tries)
            if back:
                self._returns[name] = self._returns.get(name, 0) + 1
            self._begin_job(partial(self._plan_with_node, plan, name, f"node {name} is back"))
            return

    def _begin_job(self, work: Callable[[], _JobResult | None]) -> None:
        def run() -> None:
            try:
                self._job_result = work()
            except SkyctlError as exc:
                self._job_result = _JobResult("", None, None, None, failure=f"no other plan: {exc.message}")

        self._job = threading.Thread(target=run, name="looks for a better plan", daemon=True)
        self._job.start()

    def _plan_with_node(self, plan: Plan, name: str, why: str) -> _JobResult:
        """Connects to the node where that is needed, and plans with it."""
        known = self._lost.get(name)
        session = self._sessions.get(name)
        if session is None and known is not None and known.has_answered():
            session = known.session
        opened = session is None
        try:
            node = self._find_node(name)
            if session is None:
                if self._connect is None:
                    raise SkyctlError(f"node {name} is not connected to")
                session = open_session(node, self._connect)
            if not session.has_answered(HEARD_AGAIN_S):
                raise SkyctlError(f"it has not been heard for {session.silent_s:.0f} s")
            problems = [known.problem] if known is not None else []
            other = problem_with_node(
                name,
                [*problems, plan.problem, self._first_problem],
                plan,
                self._first_problem,
                self.cluster,
                session,
                self._request,
            )
            problem = plan.problem if name in nodes_of(plan.problem) else with_node(plan.problem, other, name)
            unknown = missing_figures(problem, self._first_problem, name)
            better = _better_plan(plan, self._problem_of_run(problem, name), why)
        except SkyctlError as exc:
            if opened and session is not None:
                with suppress(SkyctlError):
                    session.close()
            return _JobResult(why, name, None, None, failure=f"node {name} can't be used: {exc.message}")
        return _JobResult(why, name, session, better.plan, better.now_s, better.then_s, unknown=unknown)

    def _find_node(self, name: str) -> Node:
        """From the inventory, read again where it did not have the node when the run began."""
        try:
            return self.cluster.node(name)
        except KeyError:
            pass
        if self._cluster_file is not None and Path(self._cluster_file).is_file():
            from skyctl.inventory.cluster_file import read_cluster

            with suppress(KeyError):
                node = read_cluster(self._cluster_file).node(name)
                self.cluster = self.cluster.model_copy(update={"nodes": (*self.cluster.nodes, node)})
                return node
        raise SkyctlError(f"the cluster file has no node {name}")


def _better_plan(plan: Plan, problem: Problem, why: str, *, is_trial: bool = False) -> _JobResult:
    """The best plan of that problem, beside what the plan there is would take on it."""
    made = replan(plan, problem)
    now_s, then_s = plan_step_s(problem, plan), made.step_s
    return _JobResult(why, None, None, made, now_s, then_s, is_trial=is_trial)


def _median_step_s(plan: Plan, collected: StepCollector) -> float:
    """Of the last steps, the attempt's first left out; of rounds, for the samples of a step."""
    steps = range(max(collected.first + 1, collected.reported - OBSERVED_STEPS), collected.reported)
    return median(collected.by_rank[0][i].iteration_s for i in steps) / plan.steps_per_iteration
