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

from skyctl.control.request import Request
from skyctl.errors import SessionGoneError, SkyctlError
from skyctl.launch.events import Collected, Watcher
from skyctl.records.cluster import Cluster, Node
from skyctl.records.plan import Plan
from skyctl.records.problem import Problem
from skyctl.remote.base import ConnectOptions
from skyctl.remote.session import Session, open_session
from skyctl.supervise.attempts.joining import known_problem
from skyctl.supervise.attempts.replanning import (
    RESTART_S,
    WINDOW,
    as_seen,
    node_of,
    nodes_in,
    nodes_of,
    replan,
    same_stages,
    seen_times,
    slow_devices,
    step_s,
    with_node,
    without,
    worth_moving,
)

BACK_S = 5.0
"""A node that has been heard so shortly ago is there again."""
RETRY_S, LONGEST_RETRY_S = 15.0, 120.0
"""Between two tries to connect to a lost node again."""
RETURNS = 3
"""So often a node that was lost is taken back by itself."""
APART = 50
"""Steps between two tries to do better than a slow node."""
TRIAL = 5
"""Steps of a new plan before it is compared with the one before."""


@dataclass(frozen=True)
class Move:
    """Another plan, and why. ``gain``: for the user."""

    plan: Plan
    why: str


@dataclass(frozen=True)
class _Found:
    """What a job found. ``now_s``, ``then_s``: a step under the plan there is, and under the new one."""

    why: str
    node: str | None
    session: Session | None
    plan: Plan | None
    now_s: float = 0.0
    then_s: float = 0.0
    failure: str | None = None
    trial: bool = False


@dataclass
class _Lost:
    session: Session | None
    problem: Problem
    tries: int = 0
    next_try: float = 0.0


@dataclass(frozen=True)
class _Trial:
    before: Plan
    now: Plan
    median_s: float


class Mover:
    """Looks out for something better. ``decided``: what it is, once there is something.

    Args:
        sessions: the run's; nodes that come are put there.
        connect: None: nobody is connected to.
        plan: the first one: its problem knows devices that later ones may not.
    """

    def __init__(
        self,
        cluster: Cluster,
        request: Request,
        sessions: dict[str, Session],
        connect: ConnectOptions | None,
        plan: Plan,
        watcher: Watcher,
        cluster_file: str | None = None,
    ) -> None:
        self.cluster = cluster
        self.decided: Move | None = None
        self.restart_s = RESTART_S
        self._request, self._sessions, self._connect = request, sessions, connect
        self._first, self._watcher, self._cluster_file = plan.problem, watcher, cluster_file
        self._asked: list[str] = []
        self._lost: dict[str, _Lost] = {}
        self._returns: dict[str, int] = {}
        self._slow_at: dict[str, int] = {}
        self._trial: _Trial | None = None
        self._job: threading.Thread | None = None
        self._found: _Found | None = None
        self._over = False

    def ask(self, nodes: list[str]) -> None:
        """Somebody wants these to be used (``skyctl join``)."""
        self._asked += [name for name in nodes if name not in self._asked]

    def gave_up(self, name: str, session: Session | None, plan: Plan) -> None:
        """A node was lost; it is taken back when it answers again."""
        self._lost[name] = _Lost(session, plan.problem, next_try=time.monotonic() + RETRY_S)
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

    def checkpointed(self, plan: Plan, collected: Collected | None, steps: int) -> None:
        """After a checkpoint: has a stage become slow?"""
        if collected is None or self._job is not None or self.decided is not None:
            return
        events = [
            [collected.by_rank[rank][i] for i in range(collected.first + 1, collected.reported)]
            for rank in range(collected.ranks)
        ]
        factors = seen_times(plan, events)
        done = collected.reported
        slow = [
            device
            for device in slow_devices(factors)
            if done - self._slow_at.get(node_of(device), -APART) >= APART
        ]
        if not slow or steps - done <= TRIAL:
            return
        for device in slow:
            self._slow_at[node_of(device)] = done
        problem = self._there(as_seen(plan.problem, factors))
        why = f"{slow[0]} takes {factors[slow[0]]:.2f} × the predicted time"
        self._begin(lambda: _better(plan, problem, why))

    def look(self, plan: Plan, collected: Collected | None, steps: int, lost: Mapping[str, str]) -> None:
        """Takes what the job has found, compares a plan on trial, begins the next job."""
        left = steps - (collected.reported if collected is not None else 0)
        if self.decided is not None:
            return
        self._compare(plan, collected)
        if self._job is not None and not self._job.is_alive():
            self._job = None
            found, self._found = self._found, None
            if found is not None:
                self._take(found, plan, collected, left)
        if self._job is None and self.decided is None:
            self._next_job(plan, lost)

    def close(self) -> None:
        """Closes the sessions of nodes that were given up, and of those that were not taken."""
        self._over = True
        if self._job is not None:
            self._job.join(5.0)
        found = self._found
        if found is not None and found.session is not None and found.node not in self._sessions:
            found.session.close()
        for name, known in self._lost.items():
            if known.session is not None:
                known.session.close()
                if known.session.unended is not None:  # whoever has the sessions says so, and keeps its name
                    self._sessions.setdefault(name, known.session)

    # --- deciding

    def _take(self, found: _Found, plan: Plan, collected: Collected | None, left: int) -> None:
        node = found.node
        if node is not None and found.session is not None:
            known = self._lost.pop(node, None)
            if known is not None and known.session is not None and known.session is not found.session:
                threading.Thread(target=known.session.close, daemon=True).start()  # may take its time
            self._sessions[node] = found.session
        if found.failure is not None:
            if node is None or node not in self._lost:
                self._watcher.warn(found.failure)
            return
        if found.plan is None or same_stages(found.plan, plan) or not self._has(found.plan):
            return
        if not worth_moving(found.now_s, found.then_s, left, self.restart_s):
            if node is not None:  # somebody waits for an answer
                saved_s = max(0.0, found.now_s - found.then_s) * left
                self._watcher.note(
                    f"{found.why}: a plan with it would save {saved_s:.0f} s of what is left, a restart "
                    f"takes about {self.restart_s:.0f} s; it is kept as a spare, for copies of checkpoints"
                )
            return
        if found.trial and collected is not None:
            self._trial = _Trial(plan, found.plan, _median_s(collected))
        self.decided = Move(found.plan, found.why)

    def _compare(self, plan: Plan, collected: Collected | None) -> None:
        """A plan made for a slow node must be better as measured, too; else it is back to the one before."""
        trial = self._trial
        if trial is None or collected is None or plan is not trial.now:
            return
        if collected.reported - collected.first <= TRIAL:
            return
        self._trial = None
        took_s = _median_s(collected)
        if took_s >= trial.median_s and self._has(trial.before):
            why = f"a step takes {took_s:.3f} s, {trial.median_s:.3f} s under the plan before: back to that"
            self.decided = Move(trial.before, why)

    def _has(self, plan: Plan) -> bool:
        """Whether the run has all of the plan's nodes."""
        return all(name in self._sessions for name in nodes_in(plan))

    def _there(self, problem: Problem, coming: str | None = None) -> Problem:
        """The problem without nodes that the run does not have.

        A plan's problem knows every node of its profile; which of them are used is its owner's choice.
        """
        mine = {*self._sessions, coming}
        return without(problem, {name: "not in the run" for name in nodes_of(problem) if name not in mine})

    # --- jobs

    def _next_job(self, plan: Plan, lost: Mapping[str, str]) -> None:
        if self._asked:
            name = self._asked.pop(0)
            self._begin(lambda: self._join(plan, name, f"node {name} has joined"))
            return
        now = time.monotonic()
        for name, known in self._lost.items():
            if name not in lost or self._returns.get(name, 0) >= RETURNS:
                continue
            session = known.session
            back = (
                session is not None and session.lost is None and not session.away_s
            ) and session.silent_s < BACK_S
            if not back and (now < known.next_try or self._connect is None):
                continue
            known.tries += 1
            known.next_try = now + min(LONGEST_RETRY_S, RETRY_S * 2.0**known.tries)
            if back:
                self._returns[name] = self._returns.get(name, 0) + 1
            self._begin(partial(self._join, plan, name, f"node {name} is back"))
            return

    def _begin(self, work: Callable[[], _Found | None]) -> None:
        def run() -> None:
            try:
                self._found = work()
            except SkyctlError as exc:
                self._found = _Found("", None, None, None, failure=f"no other plan: {exc.message}")

        self._job = threading.Thread(target=run, name="looks for a better plan", daemon=True)
        self._job.start()

    def _join(self, plan: Plan, name: str, why: str) -> _Found:
        """Connects to the node where that is needed, and plans with it."""
        known = self._lost.get(name)
        session = self._sessions.get(name) or (known.session if known is not None else None)
        if session is not None and (session.lost is not None or session.away_s):
            session = None
        opened = session is None
        try:
            node = self._node(name)
            if session is None:
                if self._connect is None:
                    raise SkyctlError(f"node {name} is not connected to")
                session = open_session(node, self._connect)
            problems = [known.problem] if known is not None else []
            other = known_problem(
                name, [*problems, plan.problem, self._first], plan, self.cluster, session, self._request
            )
            problem = plan.problem if name in nodes_of(plan.problem) else with_node(plan.problem, other, name)
            better = _better(plan, self._there(problem, name), why)
        except SkyctlError as exc:
            if opened and session is not None:
                with suppress(SkyctlError):
                    session.close()
            return _Found(why, name, None, None, failure=f"node {name} can't be used: {exc.message}")
        return _Found(why, name, session, better.plan, better.now_s, better.then_s)

    def _node(self, name: str) -> Node:
        """From the inventory, read again where it did not have the node when the run began."""
        try:
            return self.cluster.node(name)
        except KeyError:
            pass
        if self._cluster_file is not None and Path(self._cluster_file).is_file():
            from skyctl.inventory.read import read_cluster

            with suppress(KeyError):
                node = read_cluster(self._cluster_file).node(name)
                self.cluster = self.cluster.model_copy(update={"nodes": (*self.cluster.nodes, node)})
                return node
        raise SkyctlError(f"the cluster file has no node {name}")


def _better(plan: Plan, problem: Problem, why: str) -> _Found:
    made = replan(plan, problem)
    trial = "takes" in why
    return _Found(why, None, None, made, step_s(problem, plan), made.predicted.iteration_s, trial=trial)


def _median_s(collected: Collected) -> float:
    """Of the last steps, the attempt's first left out."""
    steps = range(max(collected.first + 1, collected.reported - WINDOW), collected.reported)
    return median(float(collected.by_rank[0][i]["iteration_s"]) for i in steps)
