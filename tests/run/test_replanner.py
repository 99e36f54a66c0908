"""When a run that goes well goes on with another plan: slow nodes, plans on trial, nodes that come back."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from tests.learning.profiles import device as measured_device
from tests.learning.profiles import profile as measured_profile

from skyctl.errors import UnreachableError
from skyctl.files import save_profile
from skyctl.learning.problem_from_profile import build_problem
from skyctl.planner.api import plan
from skyctl.planner.plan_record import pipeline_simulations
from skyctl.planning.parallelism_choice import with_parallelism
from skyctl.records.cluster import Cluster, Node
from skyctl.records.plan import Plan, WorkloadRef
from skyctl.records.plan_nodes import nodes_in
from skyctl.records.problem import Device, Layer, LayerTimes, Link, Problem
from skyctl.records.profile import Observation
from skyctl.records.rhythm import Rhythm
from skyctl.remote.awake_clock import awake_s
from skyctl.remote.base import ConnectOptions
from skyctl.run import replanner, run_nodes
from skyctl.run.callbacks import RunCallbacks
from skyctl.run.live_run import LiveRun
from skyctl.run.plan_update import replan, with_observed_times, without_nodes
from skyctl.run.replanner import Replanner
from skyctl.run.run_nodes import RunNodes
from skyctl.run.step_collector import StepCollector

from ..helpers.events import step_event

NODES = ("a", "b", "c")
CLUSTER = Cluster(name="here", nodes=tuple(Node(name=name, transport="local") for name in NODES))
STEPS = 10_000


def problem() -> Problem:
    ids = [f"{name}/cpu:0" for name in NODES]
    cost = (0.1,) * 6
    return Problem(
        layers=tuple(
            Layer(name=f"l{i}", flops=1e9, state_bytes=1e6, activation_bytes=1e3, output_bytes=1e3)
            for i in range(6)
        ),
        devices=tuple(Device(id=i, flops_per_s=1e9, memory_bytes=None) for i in ids),
        times={i: LayerTimes(forward_s=cost, backward_s=cost, optimizer_s=(0.0,) * 6) for i in ids},
        links=tuple(
            Link(source=s, target=t, latency_s=1e-4, bandwidth_bytes_per_s=1e7)
            for s, t in itertools.permutations(ids, 2)
        ),
        microbatches=4,
    )


def collected(made: Plan, factors: dict[str, float], step_s: float, steps: int = 12, first: int = 0) -> Any:
    """Steps of a plan whose stages took so many times what it predicts."""
    (play,) = pipeline_simulations(made)
    done = StepCollector(len(made.stages), STEPS, first=first)
    for rank, stage in enumerate(made.stages):
        times = play.layer_times(rank)
        took_s = play.microbatches * (times.forward_s + times.backward_s)
        took_s *= factors.get(stage.replicas[0].device, 1.0)
        for step in range(first, first + steps):
            done.add(rank, step_event(step, iteration_s=step_s, forward_s=took_s))
    assert len(done.complete()) == steps
    return done


def most_layers(made: Plan) -> str:
    return max(made.stages, key=lambda stage: stage.stop - stage.start).replicas[0].device


class QuietSession:
    """A session that was last heard ``silent_s`` ago, and is not lost."""

    lost = None
    hello = SimpleNamespace(cache="/c")

    def __init__(self) -> None:
        self.id = "s"
        self.silent_s = 0.0
        self.ended = threading.Event()

    @property
    def closed(self) -> bool:
        return self.ended.is_set()

    def has_answered(self, within_s: float) -> bool:
        return self.silent_s < within_s

    def close(self) -> None:
        self.ended.set()


class Desk:
    """A replanner, and what it said."""

    def __init__(self, made: Plan) -> None:
        self.said: list[str] = []
        self.sessions: dict[str, Any] = {name: QuietSession() for name in NODES}
        watcher = RunCallbacks(note=self.said.append, warn=self.said.append)
        state = SimpleNamespace(state=SimpleNamespace(lost={}, untrusted=(), cluster_file=None))
        journal: Any = SimpleNamespace(**vars(state), update=lambda **_changes: None)
        self.run = LiveRun(journal, CLUSTER, self.sessions, watcher)
        self.replaced = self.run.replaced
        checkpoints: Any = SimpleNamespace(drop=lambda _name: None)
        self.nodes = RunNodes(self.run, checkpoints, made)
        request: Any = None
        self.replanner = Replanner(self.run, self.nodes, request, None, made)

    def lose(self, name: str, session: Any, made: Plan, *, trusted: bool = True) -> None:
        """The node is given up; that session of it is left."""
        self.sessions[name] = session
        self.nodes.give_up(name, "it was lost", made, trusted=trusted)

    def look(self, made: Plan, done: Any) -> None:
        """Until no job is under way."""
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            self.replanner.update(made, done, STEPS)
            if self.replanner._job is None or self.replanner.decided is not None:
                return
            time.sleep(0.01)


@pytest.fixture
def desk() -> Callable[[Plan], Desk]:
    return Desk


def test_a_slow_stage_gets_less(desk: Callable[[Plan], Desk]) -> None:
    made = plan(problem(), "optimal")
    slow = most_layers(made)
    here = desk(made)
    here.replanner.check_stages(made, collected(made, {slow: 1.2}, 5.0), STEPS)
    here.look(made, collected(made, {}, 5.0))
    assert here.replanner.decided is None, "within what is usual"
    here.replanner.check_stages(made, collected(made, {slow: 2.5}, 5.0), STEPS)
    here.look(made, collected(made, {slow: 2.5}, 5.0))
    move = here.replanner.decided
    assert move is not None
    assert move.why.startswith(f"{slow} takes 2.50 ×")
    had = next(s.stop - s.start for s in made.stages if s.replicas[0].device == slow)
    has = [s.stop - s.start for s in move.plan.stages if s.replicas[0].device == slow]
    assert sum(has) < had


@pytest.mark.parametrize("steps", [0, 1])
def test_a_plan_for_a_slow_stage_comes_when_another_attempt_has_just_begun(
    desk: Callable[[Plan], Desk], steps: int
) -> None:
    """A rank was killed while it was looked for: no step tells yet whether it is better."""
    made = plan(problem(), "optimal")
    slow = most_layers(made)
    here = desk(made)
    here.replanner.check_stages(made, collected(made, {slow: 2.5}, 5.0), STEPS)
    here.look(made, collected(made, {}, 5.0, steps=steps, first=10))
    assert here.replanner.decided is None


def test_a_node_that_gets_slower_still_is_looked_at_again(desk: Callable[[Plan], Desk]) -> None:
    """A little slowness that no plan does better with says nothing of what comes a few steps later."""
    made = plan(problem(), "optimal")
    slow = min(made.stages, key=lambda stage: stage.stop - stage.start).replicas[0].device
    here = desk(made)
    for factor in (1.3, 1.4):
        here.replanner.check_stages(made, collected(made, {slow: factor}, 5.0), STEPS)
        here.look(made, collected(made, {slow: factor}, 5.0))
        assert here.replanner.decided is None, "layers are too coarse for that"
    later = collected(made, {slow: 10.0}, 5.0, first=5)
    here.replanner.check_stages(made, later, STEPS)
    here.look(made, later)
    assert here.replanner.decided is not None


def test_only_nodes_of_the_run_get_another_plan(desk: Callable[[Plan], Desk]) -> None:
    """A plan's problem knows every node that was probed; which of them the run has was its owner's choice."""
    whole = problem()
    made = replan(plan(whole, "optimal"), without_nodes(whole, {"c": ""})).model_copy(
        update={"problem": whole}
    )
    slow = most_layers(made)
    here = desk(made)
    del here.sessions["c"]
    done = collected(made, {slow: 2.5}, 5.0)
    here.replanner.check_stages(made, done, STEPS)
    here.look(made, done)
    move = here.replanner.decided
    assert move is not None
    assert set(nodes_in(move.plan)) == {"a", "b"}
    here.lose("b", here.sessions["b"], made)
    assert here.replanner.decided is None, "it had a node that is lost now"


def test_near_the_end_nothing_is_moved(desk: Callable[[Plan], Desk]) -> None:
    made = plan(problem(), "optimal")
    slow = most_layers(made)
    here = desk(made)
    done = collected(made, {slow: 2.5}, 5.0)
    here.replanner.check_stages(made, done, 22)
    deadline = time.monotonic() + 60
    while here.replanner._job is not None and time.monotonic() < deadline:
        here.replanner.update(made, done, 22)
        time.sleep(0.01)
    assert here.replanner.decided is None
    assert here.said == []


@pytest.mark.parametrize(("step_s", "back"), [(6.0, True), (3.0, False)])
def test_a_new_plan_must_be_better_as_measured(
    desk: Callable[[Plan], Desk], step_s: float, back: bool
) -> None:
    made = plan(problem(), "optimal")
    slow = most_layers(made)
    here = desk(made)
    here.replanner.check_stages(made, collected(made, {slow: 2.5}, 5.0), STEPS)
    here.look(made, collected(made, {slow: 2.5}, 5.0))
    move = here.replanner.take_decided()
    assert move is not None
    here.look(move.plan, collected(move.plan, {}, step_s, steps=3, first=12))
    assert here.replanner.decided is None, "too early"
    done = collected(move.plan, {}, step_s, steps=8, first=12)
    here.look(move.plan, done)
    again = here.replanner.decided
    assert (again is not None) == back
    if again is not None:
        assert again.plan is made
        assert "back to that" in again.why
        here.replanner.take_decided()
    here.replanner.check_stages(made, collected(made, {slow: 2.5}, 5.0, first=20), STEPS)
    here.look(made, collected(made, {slow: 2.5}, 5.0, first=20))
    assert here.replanner.decided is None, "one try in so many steps"


def test_a_lost_node_that_is_heard_again_is_taken_back(desk: Callable[[Plan], Desk]) -> None:
    first = plan(problem(), "optimal")
    here = desk(first)
    session = here.sessions.pop("b")
    session.silent_s = 20.0
    here.lose("b", session, first)
    made = replan(first, without_nodes(first.problem, {"b": ""}))
    done = collected(made, {}, 5.0)
    here.look(made, done)
    assert here.replanner.decided is None
    session.silent_s = 0.0
    here.look(made, done)
    here.look(made, done)
    move = here.replanner.decided
    assert move is not None
    assert move.why == "node b is back"
    assert "b" in nodes_in(move.plan)
    assert here.sessions["b"] is session


def test_a_lost_node_is_back_only_once_it_has_answered(
    desk: Callable[[Plan], Desk], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its session is silent and not yet known as lost, and it is time to try to connect to it again."""
    first = plan(problem(), "optimal")
    here = desk(first)
    session = here.sessions.pop("b")
    made = replan(first, without_nodes(first.problem, {"b": ""}))
    done = collected(made, {}, 5.0)
    now = awake_s()
    session.silent_s = 4.0
    here.lose("b", session, first)
    here.look(made, done)
    assert here.replanner.decided is None, "what was heard came before it was lost"
    session.silent_s = 16.0
    here.nodes.lost["b"].next_try = 0.0
    dialled: list[str] = []

    def dial(node: Node, _options: Any) -> None:
        dialled.append(node.name)
        raise UnreachableError(f"node {node.name}: no route", node=node.name)

    monkeypatch.setattr(replanner, "open_session", dial)
    here.replanner._connect = ConnectOptions()
    here.look(made, done)
    here.look(made, done)
    assert dialled == ["b"]
    assert (here.replanner.decided, "b" in here.sessions) == (None, False)
    monkeypatch.setattr(run_nodes, "awake_s", lambda: now + 20.0)
    session.silent_s = 1.0
    here.look(made, done)
    here.look(made, done)
    assert here.replanner.decided is not None
    assert here.sessions["b"] is session


def test_a_node_that_has_gone_again_while_it_was_planned_with_stays_lost(
    desk: Callable[[Plan], Desk], monkeypatch: pytest.MonkeyPatch
) -> None:
    first = plan(problem(), "optimal")
    here = desk(first)
    session = here.sessions.pop("b")
    session.silent_s = 20.0
    here.lose("b", session, first)
    made = replan(first, without_nodes(first.problem, {"b": ""}))
    session.silent_s = 0.0
    real = replanner._better_plan

    def goes(*arguments: Any) -> Any:
        session.silent_s = 6.0
        return real(*arguments)

    monkeypatch.setattr(replanner, "_better_plan", goes)
    for _ in range(2):
        here.look(made, collected(made, {}, 5.0))
    assert (here.replanner.decided, "b" in here.sessions) == (None, False)
    here.replanner.close()
    here.nodes.give_back()
    assert here.sessions["b"] is session, "its owner closes it"


def test_an_earlier_session_of_a_node_that_is_back_is_closed_once_it_is_heard(
    desk: Callable[[Plan], Desk], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its agent is frozen; the node is reached by another session meanwhile."""
    first = plan(problem(), "optimal")
    here = desk(first)
    frozen, other = here.sessions.pop("b"), QuietSession()
    frozen.silent_s = 20.0
    here.lose("b", frozen, first)
    here.nodes.lost["b"].next_try = 0.0
    here.replanner._connect = ConnectOptions()
    monkeypatch.setattr(replanner, "open_session", lambda *_: other)
    made = replan(first, without_nodes(first.problem, {"b": ""}))
    for _ in range(2):
        here.look(made, collected(made, {}, 5.0))
    assert here.sessions["b"] is other
    here.look(made, collected(made, {}, 5.0))
    assert (here.replaced, frozen.closed) == ([frozen], False)
    frozen.silent_s = 0.0
    here.replanner.take_decided()
    here.look(made, collected(made, {}, 5.0))
    assert frozen.ended.wait(10)
    assert here.replaced == [frozen], "its owner looks at what came of it"


@pytest.mark.parametrize(
    "asked",
    [
        {"sync": "star", "sync_format": "bfloat16", "rhythm": Rhythm(delay=1, undelayed_steps=3)},
        {"sync": "star", "rhythm": Rhythm(staleness=2)},
        {"sync": "ring", "rhythm": Rhythm(local_steps=2, prox_mu=0.1)},
    ],
)
def test_a_node_that_comes_changes_nothing_of_what_was_asked_for(
    desk: Callable[[Plan], Desk], monkeypatch: pytest.MonkeyPatch, asked: dict[str, Any]
) -> None:
    """Though what is known of it is from a profile, in which nothing of that stands."""
    whole = Problem.model_validate({**dict(problem()), "parallel": "data", "microbatches": 6})
    first = plan(Problem.model_validate({**dict(without_nodes(whole, {"c": ""})), **asked}))
    assert set(nodes_in(first)) == {"a", "b"}
    here = desk(first)
    monkeypatch.setattr(replanner, "problem_with_node", lambda *_: whole)
    here.replanner.request_nodes(["c"])
    done = StepCollector(2, STEPS, last_ranks=(0, 1))
    for step, rank in itertools.product(range(12), range(2)):
        done.add(rank, step_event(step, iteration_s=first.predicted.iteration_s))
    assert len(done.complete()) == 12
    for _ in range(2):
        here.look(first, done)
    move = here.replanner.decided
    assert move is not None, here.said
    assert "c" in nodes_in(move.plan)
    assert {name: getattr(move.plan.problem, name) for name in asked} == asked
    assert move.plan.sync is not None
    assert move.plan.sync.format == asked.get("sync_format", "float32")


@pytest.mark.parametrize("rhythm", [Rhythm(), Rhythm(staleness=2)])
@pytest.mark.parametrize("seen", [False, True])
def test_a_node_that_comes_while_a_pipeline_stands_in_brings_what_the_runs_form_needs(
    desk: Callable[[Plan], Desk], rhythm: Rhythm, seen: bool
) -> None:
    """Costs of sums, and with a parameter server how uneven its steps are; what is not known is said."""
    sums = {"message_byte_s": 3e-9, "reduce_byte_s": 2e-9}
    speeds = {"a": 1.0, "b": 1.0, "c": 0.4}
    probed = [measured_device(name, speed).model_copy(update=sums) for name, speed in speeds.items()]
    stalls = (0.5, 1.0, 4.0)
    observed = Observation(
        run_id="r", seen="2026-01-02T00:00:00Z", steps=40, spread=1.0, device="c/cpu:0", digest="w",
        microbatch_size=2, layers=(0, 6), probed_s=1.0, seen_s=1.0, step_factors=stalls,
    )  # fmt: skip
    known = {"cluster": CLUSTER.name, "observations": (observed,) if seen else ()}
    profile = measured_profile(*probed).model_copy(update=known)
    save_profile(profile)
    asked = build_problem(profile, 4, only_nodes=["a", "b"], parallel="data")
    ref = WorkloadRef(source="gpt:…", digest="w", batch_size=8, dtype="float32", seed=0)
    first = plan(Problem.model_validate({**dict(asked), "rhythm": rhythm})).model_copy(
        update={"workload": ref}
    )
    now = plan(with_parallelism(first.problem, "pipeline")).model_copy(update={"workload": ref})
    here = desk(first)
    here.replanner.request_nodes(["c"])
    for _ in range(2):
        here.look(now, collected(now, {}, now.predicted.iteration_s))
    move = here.replanner.decided
    assert move is not None, here.said
    assert "c" in nodes_in(move.plan)
    assert (move.plan.problem.parallel, move.plan.problem.rhythm) == ("data", rhythm)
    came = next(one for one in move.plan.problem.devices if one.id == "c/cpu:0")
    assert {name: getattr(came, name) for name in sums} == sums
    if rhythm.is_stale and seen:
        assert came.step_factors == stalls
    expected = "node c: no run has shown how uneven steps of c/cpu:0 are; they count as even"
    assert here.said == ([expected] if rhythm.is_stale and not seen else [])


def test_a_node_that_is_not_trusted_is_taken_back_only_when_asked_for(desk: Callable[[Plan], Desk]) -> None:
    first = plan(problem(), "optimal")
    here = desk(first)
    session = here.sessions.pop("b")
    here.lose("b", session, first, trusted=False)
    made = replan(first, without_nodes(first.problem, {"b": ""}))
    done = collected(made, {}, 5.0)
    for _ in range(3):
        here.look(made, done)
    assert here.replanner.decided is None
    assert "b" not in here.sessions
    here.replanner.request_nodes(["b"])
    here.look(made, done)
    here.look(made, done)
    move = here.replanner.decided
    assert move is not None
    assert here.sessions["b"] is session


def test_what_was_asked_for_and_can_not_be_had_is_said(desk: Callable[[Plan], Desk]) -> None:
    made = plan(problem(), "optimal")
    here = desk(made)
    here.replanner.request_nodes(["x"])
    done = collected(made, {}, 5.0)
    here.look(made, done)
    here.look(made, done)
    assert here.replanner.decided is None
    assert here.said == ["node x can't be used: the cluster file has no node x"]
    assert with_observed_times(made.problem, {}) == made.problem


def test_owners_that_are_left_keep_their_own_local_steps(desk: Callable[[Plan], Desk]) -> None:
    """A lost owner's node comes back without its data: the plan is the one there is."""
    rounds = {
        "parallel": "data",
        "rhythm": Rhythm(local_steps=(1, 2, 9)),
        "owners": tuple((name,) for name in NODES),
    }
    first = plan(Problem.model_validate({**dict(problem()), **rounds}))
    here = desk(first)
    session = here.sessions.pop("a")
    session.silent_s = 20.0
    here.lose("a", session, first)
    made = replan(first, without_nodes(first.problem, {"a": ""}))
    assert [pipeline.local_steps for pipeline in made.pipelines] == [2, 9]
    done = StepCollector(2, STEPS, last_ranks=(0, 1), owners=("b", "c"))
    for step, rank in itertools.product(range(12), range(2)):
        done.add(rank, step_event(step, iteration_s=made.predicted.iteration_s))
    assert len(done.complete()) == 12
    session.silent_s = 0.0
    for _ in range(3):
        here.look(made, done)
    assert here.sessions["a"] is session
    assert here.replanner.decided is None
