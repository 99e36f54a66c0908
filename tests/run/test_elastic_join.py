"""Which devices enter an elastic attempt, when, and what becomes of those that fail to."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest
from tests.planner.data_problems import data_problem

from skyctl.errors import NodeError, ProtocolError
from skyctl.planner.api import plan as plan_problem
from skyctl.records.cluster import node_of
from skyctl.records.plan import Plan
from skyctl.run import elastic_join
from skyctl.run.attempt_orders import NodeToEnter
from skyctl.run.callbacks import RunCallbacks
from skyctl.run.elastic_join import ElasticJoins, entry_gain
from skyctl.run.rank_failure import RankState
from skyctl.run.run_options import RunOptions
from skyctl.workload.workload_spec import WorkloadSpec

SPEEDS = (2.0, 1.0, 1.0, 1.0)
DEVICES = tuple(f"n{n}/cpu:0" for n in range(4))
STEPS = 1000


def made(**more: Any) -> Plan:
    """Of three devices; the fourth stands by."""
    three = plan_problem(data_problem(speeds=SPEEDS[:3], microbatches=20, rate=1e4), "optimal")
    return three.model_copy(
        update={"problem": data_problem(speeds=SPEEDS, microbatches=20, rate=1e4, **more)}
    )


class Session:
    lost: Any = None
    silent_s = 0.0

    def has_answered(self, within_s: float) -> bool:
        return self.silent_s < within_s


class Desk:
    """Joins of an attempt whose ranks do as they are told to, and what was said."""

    def __init__(self, plan: Plan, steps: int = STEPS) -> None:
        self.said: list[str] = []
        self.given_up: list[tuple[str, bool]] = []
        self.ended: list[int] = []
        self.trouble: Exception | None = None
        self.is_ending, self.may_grow = False, True
        self.ranks = [self.rank(number, device) for number, device in enumerate(DEVICES[:3])]
        self.missing: set[int] = set()
        self.sessions = {node_of(device): Session() for device in DEVICES}
        callbacks = RunCallbacks(note=self.said.append, warn=self.said.append)
        run: Any = SimpleNamespace(sessions=self.sessions, callbacks=callbacks)
        self.orders: Any = SimpleNamespace(plan=plan, specs=[])
        nodes: Any = SimpleNamespace(give_up=self.give_up)
        attempt, maker = self.as_attempt(), self.as_maker()
        self.joins = ElasticJoins(run, nodes, attempt, self.orders, maker, RunOptions(steps=steps))

    @staticmethod
    def rank(number: int, device: str) -> RankState:
        spec: Any = SimpleNamespace(rank=number, device=device, node=node_of(device))
        return RankState(spec)

    def as_attempt(self) -> Any:
        desk = self

        class State:
            collected: Any = SimpleNamespace(
                unit="step", reported=10, oldest=0, members_since=0, iteration_s=lambda _step: 20.0
            )
            ranks = desk.ranks

            @property
            def members(self) -> list[RankState]:
                return [r for r in desk.ranks if r.failure is None and not (r.is_out or r.is_joining)]

            def lacks_keys(self, _number: int) -> set[int]:
                return desk.missing

        desk.state = State()  # type: ignore[attr-defined]
        return SimpleNamespace(
            state=desk.state,  # type: ignore[attr-defined]
            is_ending=False,
            may_grow=True,
            admit=self.admit,
            leave_out=self.leave_out,
            end_rank=self.ended.append,
        )

    def as_maker(self) -> Any:
        def prepare(_plan: Plan, _node: str, sessions: Any) -> NodeToEnter:
            if self.trouble is not None:
                raise self.trouble
            return NodeToEnter(WorkloadSpec("gpt:"), dict.fromkeys(sessions, "127.0.0.1"))

        def entering(_orders: Any, device: str, *_more: Any) -> Any:
            return SimpleNamespace(rank=len(self.ranks), device=device, node=node_of(device))

        return SimpleNamespace(prepare=prepare, entering=entering, files_to_ship=dict)

    def admit(self, spec: Any, _address: str, limit_s: float) -> None:
        assert limit_s > 0
        self.ranks.append(RankState(spec, is_joining=True))

    def leave_out(self, number: int, why: Any = None) -> None:
        rank = self.ranks[number]
        rank.is_joining, rank.is_out, rank.failure = False, True, rank.failure or why

    def give_up(self, name: str, _why: str, _plan: Plan, *, trusted: bool = True) -> None:
        self.given_up.append((name, trusted))
        del self.sessions[name]

    def look(self, times: int = 4) -> None:
        for _ in range(times):
            self.joins.update()
            if self.joins._preparing is not None:
                self.joins._preparing.join()


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(elastic_join, "PAUSE_S", 0.0)


def test_what_is_gained_follows_from_the_steps_that_are_left() -> None:
    plan = made()
    few, many = (
        entry_gain(
            plan,
            plan.problem,
            DEVICES[:3],
            DEVICES[3],
            seen_s=20.0,
            done=10,
            steps=steps,
            start_s=40.0,
        )
        for steps in (13, STEPS)
    )
    assert not few.pays
    assert many.pays
    assert (many.step, many.left) == (12, STEPS - 12)
    assert many.now_s == 20.0
    assert many.then_s < 20.0
    assert many.transfer_s > 0.0
    assert "instead of 20 s" in many.text


def test_nothing_enters_before_somebody_is_lost_or_comes() -> None:
    desk = Desk(made())
    desk.look()
    assert desk.said == []
    assert len(desk.ranks) == 3


def test_who_has_come_enters_and_it_is_said_why() -> None:
    desk = Desk(made())
    desk.joins.offer("n3", desk.orders.plan.problem, "node n3 has joined")
    desk.look()
    (said,) = desk.said
    assert said.startswith("node n3 has joined: it enters at step ~")
    assert "which saves" in said
    assert desk.ranks[3].spec.device == DEVICES[3]
    desk.ranks[3].is_joining = False
    desk.look()
    assert desk.joins._entering is None
    assert len(desk.ranks) == 4


def test_where_it_does_not_pay_that_is_said_once() -> None:
    desk = Desk(made(), steps=12)
    desk.joins.offer("n3", desk.orders.plan.problem, "node n3 has joined")
    desk.look()
    (said,) = desk.said
    assert "it stays on standby, as entering would not pay" in said
    assert len(desk.ranks) == 3


def test_once_one_is_lost_others_take_its_place_and_it_comes_again() -> None:
    desk = Desk(made())
    desk.ranks[2].is_out = True
    desk.look()
    assert desk.ended == [2]
    entered = []
    for number in (3, 4):
        assert len(desk.ranks) == number + 1
        entered.append(desk.ranks[number].spec.device)
        desk.ranks[number].is_joining = False
        desk.look()
    assert sorted(entered) == [DEVICES[2], DEVICES[3]]


def test_who_fails_to_enter_is_tried_a_few_times() -> None:
    desk = Desk(made())
    desk.joins.offer("n3", desk.orders.plan.problem, "node n3 has joined")
    for _ in range(10):
        desk.look()
        if desk.ranks[-1].is_joining:
            desk.ranks[-1].failure = NodeError("it broke", node="n3")
    failed = [said for said in desk.said if "could not enter: it broke" in said]
    assert len(failed) == elastic_join.MAX_TRIES + 1
    assert [said.endswith("it is tried again") for said in failed] == [True, True, True, False]


def test_a_node_that_can_not_be_prepared_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    desk = Desk(made())
    desk.trouble = NodeError("its disk is full", node="n3")
    desk.joins.offer("n3", desk.orders.plan.problem, "node n3 has joined")
    monkeypatch.setattr(elastic_join, "PAUSE_S", 1000.0)
    desk.look()
    assert [said for said in desk.said if "its disk is full" in said] == [
        f"{DEVICES[3]} could not enter: its disk is full; it is tried again"
    ]
    candidate = desk.joins._candidates[DEVICES[3]]
    assert candidate.next_try > time.monotonic() + 900
    desk.joins.offer("n3", desk.orders.plan.problem, "node n3 is back")
    assert candidate.next_try == 0.0


def test_nodes_that_are_lost_are_given_up_and_those_that_lie_not_trusted() -> None:
    desk = Desk(made())
    desk.ranks[1].is_out = True
    desk.sessions["n1"].lost = NodeError("its connection broke", node="n1")
    desk.ranks[2].failure = ProtocolError("it sent nonsense", node="n2")
    desk.look(1)
    assert sorted(desk.given_up) == [("n1", True), ("n2", False)]
    assert [said for said in desk.said if DEVICES[2] in said] == []


def test_a_rank_that_waits_for_one_that_is_lost_begins_again() -> None:
    desk = Desk(made())
    desk.joins.offer("n3", desk.orders.plan.problem, "node n3 has joined")
    desk.look()
    entering = desk.ranks[3]
    entering.enter_phase("connect")
    desk.missing = {1}
    desk.look(1)
    assert entering.is_joining, "it may yet hear of it"
    desk.ranks[1].is_out = True
    desk.look(1)
    assert entering.is_out
    assert "a rank was lost that it was to connect to" in str(entering.failure)


def test_without_room_for_all_layers_it_stands_by() -> None:
    plan = made()
    devices = [
        d.model_copy(update={"memory_bytes": 10.0}) if d.id == DEVICES[3] else d for d in plan.problem.devices
    ]
    problem = plan.problem.model_copy(update={"devices": tuple(devices)})
    desk = Desk(plan.model_copy(update={"problem": problem}))
    desk.joins.offer("n3", problem, "node n3 has joined")
    desk.look()
    assert desk.said == [f"{DEVICES[3]} stays on standby: it has no room for all layers"]
