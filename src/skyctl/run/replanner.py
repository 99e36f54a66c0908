"""Whether a run that goes well should go on with another plan: a node has come, or one has become slow.

Connecting, measuring and planning happen in a thread, one thing at a time; what comes of it is looked at, and
decided, in the supervising thread.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median

from skyctl.errors import SkyctlError
from skyctl.jobs.training_request import TrainingRequest
from skyctl.planning.parallelism_choice import with_parallelism
from skyctl.records.cluster import Node, node_of
from skyctl.records.plan import Plan
from skyctl.records.plan_nodes import nodes_in, nodes_of
from skyctl.records.problem import Problem
from skyctl.remote.agent_session import Session
from skyctl.remote.base import ConnectOptions
from skyctl.remote.session_factory import open_session
from skyctl.run.elastic_join import ElasticJoins
from skyctl.run.joined_node import missing_figures, problem_with_node, with_node
from skyctl.run.live_run import LiveRun
from skyctl.run.plan_update import (
    DEFAULT_RESTART_S,
    OBSERVED_STEPS,
    SLOW_FACTOR,
    observed_slowdowns,
    plan_step_s,
    replan,
    same_stages,
    slow_devices,
    with_observed_times,
    without_nodes,
    worth_moving,
)
from skyctl.run.run_nodes import HEARD_AGAIN_S, RunNodes
from skyctl.run.step_collector import StepCollector

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
    """The result of a job.

    Attributes:
        session: of the node that has come, where one has.
        now_s: seconds a step takes under the plan there is.
        then_s: seconds it would take under the new one.
        is_trial: the plan is made for what was seen, so it must prove better by what is seen, too.
        unknown: what the plan reckons with and nobody knows of the node, in words.
        problem: that has the node's devices, to enter the attempt under way.
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
    problem: Problem | None = None


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
    """Looks out for something better than the plan under way.

    Args:
        nodes: the run's; those that come are put there.
        connect: None: nobody is connected to.
        plan: the first one: its problem knows devices that later ones may not.
    """

    def __init__(
        self,
        run: LiveRun,
        nodes: RunNodes,
        request: TrainingRequest,
        connect: ConnectOptions | None,
        plan: Plan,
    ) -> None:
        self._run, self._nodes, self._request, self._connect = run, nodes, request, connect
        self._first_problem = plan.problem
        self.restart_s = DEFAULT_RESTART_S
        self._decided: PlanChange | None = None
        self._closing: list[Session] = []
        self._requested: list[str] = []
        self._returns: dict[str, int] = {}
        self._slowness: dict[str, _SeenSlowness] = {}
        self._trial: _PlanTrial | None = None
        self._job: threading.Thread | None = None
        self._job_result: _JobResult | None = None
        self.request_nodes(nodes.returned)

    def request_nodes(self, nodes: Iterable[str]) -> None:
        """Notes nodes that the user wants used (``skyctl join``); later updates connect to and judge them."""
        self._requested += [name for name in nodes if name not in self._requested]

    @property
    def decided(self) -> PlanChange | None:
        """The plan that the run is to go on with, once there is one; None if a node of it was lost since."""
        if self._decided is not None and not self._has_nodes_of(self._decided.plan):
            self._decided = None
        return self._decided

    def take_decided(self) -> PlanChange | None:
        """Takes the plan that the run is to go on with; from then on something better is looked for anew."""
        decided, self._decided = self.decided, None
        return decided

    def check_stages(self, plan: Plan, collected: StepCollector, steps: int) -> None:
        """Looks, after a checkpoint, for a stage that has become slow, and begins a search for a better plan.

        The result comes with a later ``update``; nothing is done while another search or decision is open.

        Args:
            plan: the one under way.
            collected: the figures of its steps.
            steps: of the whole run.
        """
        if self._job is not None or self.decided is not None:
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
        self, plan: Plan, collected: StepCollector, steps: int, joins: ElasticJoins | None = None
    ) -> None:
        """Takes what the last search has found, judges a plan on trial, begins the next search.

        Call it regularly while an attempt is watched; it does not wait. See ``decided`` for what comes of it.

        Args:
            plan: the one under way.
            collected: the figures of its steps.
            steps: of the whole run.
            joins: nodes that come may enter the attempt under way; None: they are planned with.
        """
        self._close_replaced()
        left = steps - collected.reported
        if self.decided is not None:
            return
        self._judge_trial(plan, collected)
        if self._job is not None and not self._job.is_alive():
            self._job = None
            result, self._job_result = self._job_result, None
            if result is not None:
                self._take_result(result, plan, collected, left, joins)
        if self._job is None and self.decided is None:
            self._begin_next_job(plan, enters=joins is not None)

    def close(self) -> None:
        """Closes the session of a node that was not taken in."""
        if self._job is not None:
            self._job.join(5.0)
        result = self._job_result
        if result is not None and result.session is not None and result.node not in self._run.sessions:
            result.session.close()

    # --- deciding

    def _take_result(
        self,
        result: _JobResult,
        plan: Plan,
        collected: StepCollector,
        left: int,
        joins: ElasticJoins | None,
    ) -> None:
        node, callbacks = result.node, self._run.callbacks
        if node is not None and result.session is not None and not self._nodes.take_in(node, result.session):
            return
        if result.failure is not None:
            if node is None or node not in self._nodes.lost:
                callbacks.warn(result.failure)
            return
        if result.unknown is not None:
            callbacks.note(f"node {node}: {result.unknown}")
        if result.problem is not None and node is not None:
            if joins is not None:
                joins.offer(node, result.problem, result.why)
            else:  # that attempt has ended
                self.request_nodes([node])
            return
        if result.plan is None or same_stages(result.plan, plan) or not self._has_nodes_of(result.plan):
            return
        if not worth_moving(result.now_s, result.then_s, left, self.restart_s):
            if node is not None:  # somebody waits for an answer
                saved_s = max(0.0, result.now_s - result.then_s) * left
                callbacks.note(
                    f"{result.why}: a plan with it would save {saved_s:.0f} s of what is left, a restart "
                    f"takes about {self.restart_s:.0f} s; it stays on standby, for copies of checkpoints"
                )
            return
        if result.is_trial:
            if collected.reported - collected.first < 2:
                return  # the attempt that it was seen in has ended: nothing to compare the new plan with
            self._trial = _PlanTrial(plan, result.plan, _median_step_s(plan, collected))
        self._decided = PlanChange(result.plan, result.why)

    def _close_replaced(self) -> None:
        """Closes those that can be told, or dialled once more. One that is only silent may be heard later."""
        for session in self._run.replaced:
            ready = session.lost is not None or session.has_answered(HEARD_AGAIN_S)
            if ready and session not in self._closing:
                self._closing.append(session)
                threading.Thread(target=session.close, daemon=True).start()  # may take its time

    def _judge_trial(self, plan: Plan, collected: StepCollector) -> None:
        """A plan made for a slow node must be better as measured, too; else it is back to the one before."""
        trial = self._trial
        if trial is None or plan is not trial.now:
            return
        if collected.reported - collected.first <= TRIAL_STEPS:
            return
        self._trial = None
        took_s = _median_step_s(plan, collected)
        if took_s >= trial.median_s and self._has_nodes_of(trial.before):
            why = f"a step takes {took_s:.3f} s, {trial.median_s:.3f} s under the plan before: back to that"
            self._decided = PlanChange(trial.before, why)

    def _has_nodes_of(self, plan: Plan) -> bool:
        """Whether the run has all of the plan's nodes."""
        return all(name in self._run.sessions for name in nodes_in(plan))

    def _problem_of_run(self, problem: Problem, coming: str | None = None) -> Problem:
        """The problem without nodes that the run does not have.

        A plan's problem knows every node of its profile; which of them are used is its owner's choice. Form
        and rhythm are the run's own: it may be a pipeline only because nodes are missing.
        """
        mine = {*self._run.sessions, coming}
        problem = with_parallelism(problem, self._first_problem.parallel)
        if not problem.rhythm.is_rounds:  # of rounds the owners that are left have numbers of their own
            problem = problem.model_copy(update={"rhythm": self._first_problem.rhythm})
        return without_nodes(
            problem, {name: "not in the run" for name in nodes_of(problem) if name not in mine}
        )

    # --- jobs

    def _begin_next_job(self, plan: Plan, *, enters: bool) -> None:
        if self._requested:
            name = self._requested.pop(0)
            why = f"node {name} has joined"
            self._begin_job(lambda: self._plan_with_node(plan, name, why, enters=enters))
            return
        for name, node in self._nodes.lost.items():
            if not node.trusted or self._returns.get(name, 0) >= MAX_RETURNS:
                continue
            back = node.has_answered()
            if not back and (time.monotonic() < node.next_try or self._connect is None):
                continue
            node.note_try()
            if back:
                self._returns[name] = self._returns.get(name, 0) + 1
            why = f"node {name} is back"
            self._begin_job(partial(self._plan_with_node, plan, name, why, enters=enters))
            return

    def _begin_job(self, work: Callable[[], _JobResult | None]) -> None:
        def run() -> None:
            try:
                self._job_result = work()
            except SkyctlError as exc:
                self._job_result = _JobResult("", None, None, None, failure=f"no other plan: {exc.message}")

        self._job = threading.Thread(target=run, name="looks for a better plan", daemon=True)
        self._job.start()

    def _plan_with_node(self, plan: Plan, name: str, why: str, *, enters: bool) -> _JobResult:
        """Connects to the node where that is needed, and plans with it, unless it ``enters`` an attempt."""
        lost = self._nodes.lost.get(name)
        session = self._run.sessions.get(name)
        if session is None and lost is not None and lost.has_answered():
            session = lost.session
        opened = session is None
        try:
            node = self._find_node(name)
            if session is None:
                if self._connect is None:
                    raise SkyctlError(f"node {name} is not connected to")
                session = open_session(node, self._connect)
            if not session.has_answered(HEARD_AGAIN_S):
                raise SkyctlError(f"it has not been heard for {session.silent_s:.0f} s")
            problems = [lost.problem] if lost is not None else []
            other = problem_with_node(
                name,
                [*problems, plan.problem, self._first_problem],
                plan,
                self._first_problem,
                self._run.cluster,
                session,
                self._request,
            )
            problem = plan.problem if name in nodes_of(plan.problem) else with_node(plan.problem, other, name)
            if enters:
                return _JobResult(why, name, session, None, problem=problem)
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
        run = self._run
        with suppress(KeyError):
            return run.cluster.node(name)
        cluster_file = run.journal.state.cluster_file
        if cluster_file is not None and Path(cluster_file).is_file():
            from skyctl.inventory.cluster_file import read_cluster

            with suppress(KeyError):
                node = read_cluster(cluster_file).node(name)
                run.cluster = run.cluster.model_copy(update={"nodes": (*run.cluster.nodes, node)})
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
    return median(collected.iteration_s(i) for i in steps) / plan.steps_per_iteration
