"""The launcher's view of ranks that may leave: which steps have ended, and whom it waits for."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from skyctl.agent.task_events import to_message
from skyctl.checkpoint.node.replicator_events import ShardDigest
from skyctl.records.cluster import Node
from skyctl.remote.remote_task import TaskError, TaskExit
from skyctl.run.attempt_state import (
    AttemptState,
    CheckpointWritten,
    MembersChanged,
    News,
    NodeEnters,
    Remark,
    Tell,
)
from skyctl.run.callbacks import StepProgress
from skyctl.run.rank_messages import admission_keys
from skyctl.worker.member_messages import Accept, Generation, Prepare
from skyctl.worker.rank_events import (
    CheckpointEvent,
    EnvironmentEvent,
    KeyWantedEvent,
    MembersEvent,
    RankResult,
    StoredEvent,
    WitnessAskedEvent,
)
from skyctl.worker.rank_order import ElasticOrder, JoinOrder, RankOrder, RouteTree
from skyctl.worker.rank_requests import StoredRequest, WitnessRequest

from ..helpers.events import step_message
from ..helpers.orders import beside, rank_order, rank_spec

RANKS = 3


def started(steps: int = 4, least: int = 1) -> AttemptState:
    """Three ranks that hold all layers each, and have started."""
    shares = {rank: (rank, rank + 1) for rank in range(RANKS)}
    route = RouteTree(1.0, 0, ((1, 0), (2, 0)), ((0, 1), (0, 2)))
    elastic = ElasticOrder({rank: rank for rank in range(RANKS)}, shares, {0: (route,)}, least)
    specs = [
        rank_spec(
            rank,
            f"n{rank}",
            beside(
                rank_order(steps=steps, microbatches=RANKS),
                rank,
                [other for other in range(RANKS) if other != rank],
                ranks=RANKS,
                elastic=elastic,
            ),
        )
        for rank in range(RANKS)
    ]
    state = AttemptState(specs, {f"n{r}": Node(name=f"n{r}", transport="local") for r in range(RANKS)})
    for rank in range(RANKS):
        say(state, rank, {"event": "ready"})
    return state


def say(state: AttemptState, rank: int, message: dict[str, Any]) -> list[News]:
    read = state.read(rank, message)
    event = None if read is None else state.accept(rank, read.event)
    if event is None:
        return []
    return list(state.come_together(rank, event) if state.is_starting else state.report(rank, event))


def leaves(state: AttemptState, rank: int) -> None:
    state.ranks[rank].failure = TaskExit(event="exit", signal="SIGKILL")


def test_a_step_that_a_lost_rank_had_not_told_of_ends_when_that_is_known() -> None:
    """Every rank tells the whole loss, so the others' words are enough."""
    state = started()
    for rank in (1, 2):
        assert say(state, rank, step_message(0, loss=2.5)) == []
    leaves(state, 0)
    assert state.goes_on_without(state.ranks[0])
    news = say(state, 1, to_message(MembersEvent(1, (1, 2), 0)))
    changed, remark, ended = news
    assert changed == MembersChanged((1, 2))
    assert isinstance(remark, Remark)
    assert remark.is_warning
    assert "rank 0" in remark.text
    assert isinstance(ended, StepProgress)
    assert (ended.step, ended.loss) == (0, 2.5)
    assert say(state, 2, to_message(MembersEvent(1, (1, 2), 0))) == []
    for step in (1, 2, 3):
        say(state, 1, step_message(step, loss=1.0))
        (ended,) = say(state, 2, step_message(step, loss=1.0))
        assert isinstance(ended, StepProgress)
    for rank in (1, 2):
        assert not state.has_returned
        say(state, rank, {"event": "result", "steps": 4})
    assert state.has_returned


def test_who_takes_the_run_over_goes_on_without_whom_was_lost_before() -> None:
    state = started()
    past = [(1, to_message(MembersEvent(1, (1, 2), 0)))]
    adopted = AttemptState(
        state.specs, {f"n{r}": Node(name=f"n{r}", transport="local") for r in range(RANKS)}
    )
    changed, *_ = adopted.replay([(r, {"event": "ready"}) for r in range(RANKS)] + past, 0)
    assert changed == MembersChanged((1, 2))
    leaves(adopted, 0)
    assert adopted.goes_on_without(adopted.ranks[0])


def test_nobody_goes_on_without_who_says_that_another_lies() -> None:
    """Whose sum is the right one is not known then."""
    state = started()
    said = {"event": "error", "message": "the sum of step 1 is not the same on rank 2 as on rank 0"}
    state.ranks[0].failure = TaskError(**said, type="PeerProtocolError", peer_rank=2)
    assert not state.goes_on_without(state.ranks[0])
    state.ranks[0].failure = TaskError(**said, type="PeerLostError", peer_rank=2)
    assert state.goes_on_without(state.ranks[0])


def test_with_fewer_than_are_asked_for_it_does_not_go_on() -> None:
    state = started(least=2)
    leaves(state, 0)
    assert state.goes_on_without(state.ranks[0])
    leaves(state, 1)
    assert not state.goes_on_without(state.ranks[1])


@pytest.mark.parametrize(
    ("event", "fault"),
    [
        (MembersEvent(1, (0, 2), 0), "its members are ranks 0, 2"),
        (MembersEvent(1, (1, 7), 0), "its members are ranks 1, 7"),
        (WitnessAskedEvent(), "it asks for nothing, or twice"),
    ],
)
def test_what_no_member_says_ends_the_rank(event: Any, fault: str) -> None:
    state = started()
    assert say(state, 1, to_message(event)) == []
    assert fault in str(state.ranks[1].failure)


def test_the_launcher_promises_to_the_first_half_that_asks_and_to_higher_ballots_alone() -> None:
    state = started()
    base = Generation(0, (0, 1, 2), {})
    following = Generation(1, (1,), {}, step=3)
    asks = to_message(WitnessAskedEvent(prepare=Prepare(base, (1, 1))))
    (told,) = say(state, 1, asks)
    assert isinstance(told, Tell)
    assert isinstance(told.request, WitnessRequest)
    assert told.request.promise is not None
    (told,) = say(state, 0, to_message(WitnessAskedEvent(prepare=Prepare(base, (1, 0)))))
    assert told.request.refused is not None
    (told,) = say(state, 1, to_message(WitnessAskedEvent(accept=Accept(0, (1, 1), following))))
    assert told.request.accepted is not None
    (told,) = say(state, 0, to_message(WitnessAskedEvent(prepare=Prepare(base, (2, 0)))))
    assert told.request.promise.accepted == following, "what was accepted is proposed again"


def entering(state: AttemptState, number: int = RANKS) -> None:
    """A fourth rank is started, to enter."""
    first = state.specs[0].order
    assert isinstance(first, RankOrder)
    assert first.elastic is not None
    join = JoinOrder(Path("/given"), 0.1, {0: 100})
    pipelines = {rank: rank for rank in (*range(RANKS), number)}
    order = beside(
        rank_order(steps=first.steps, microbatches=RANKS),
        number,
        range(RANKS),
        ranks=number + 1,
        elastic=replace(first.elastic, pipelines=pipelines, join=join),
    )
    state.admit(rank_spec(number, "new", order), Node(name="new", transport="local"))


def let_in(state: AttemptState, number: int = RANKS) -> None:
    for rank in range(RANKS):
        for key in admission_keys(rank, number):
            say(state, rank, to_message(StoredEvent(key, "00")))
    say(state, number, to_message(FACTS))
    say(state, number, {"event": "ready"})


FACTS = EnvironmentEvent("cpu", ("cpu:0",), "x", 1.0, 1, "3.11", "2.13", None, None, 0.0)


def test_a_rank_enters_and_its_steps_are_waited_for_from_then_on() -> None:
    state = started(steps=6)
    for step in (0, 1):
        for rank in range(RANKS):
            say(state, rank, step_message(step, loss=1.0))
    entering(state)
    assert not state.is_starting
    assert say(state, RANKS, to_message(FACTS)) == [NodeEnters(RANKS, FACTS)]
    key = min(admission_keys(0, RANKS))
    assert say(state, RANKS, to_message(KeyWantedEvent(key))) == []
    assert state.lacks_keys(RANKS) == {0, 1, 2}
    (told,) = say(state, 0, to_message(StoredEvent(key, "ff")))
    assert told == Tell(RANKS, StoredRequest(key, "ff"))
    say(state, RANKS, {"event": "ready"})
    for rank in range(RANKS):  # of the step before, which it has no part in
        news = say(state, rank, step_message(2, loss=1.0))
    assert isinstance(news[-1], StepProgress)
    members = MembersEvent(1, (0, 1, 2, 3), 3)
    assert say(state, RANKS, to_message(members)) == [], "the others say so, too"
    changed, remark = say(state, 0, to_message(members))
    assert changed == MembersChanged((0, 1, 2, 3))
    assert isinstance(remark, Remark)
    assert "entered in step 4: rank 3" in remark.text
    for rank in range(RANKS):
        assert say(state, rank, step_message(3, loss=1.0)) == []
    (ended,) = say(state, RANKS, step_message(3, loss=1.0))
    assert isinstance(ended, StepProgress)
    assert ended.step == 3
    for step in (4, 5):
        for rank in range(RANKS + 1):
            say(state, rank, step_message(step, loss=1.0))
    for rank in range(RANKS + 1):
        assert not state.has_returned
        say(state, rank, {"event": "result", "steps": 6})
    assert state.has_returned


def test_a_checkpoint_is_whole_without_a_rank_that_entered_after_it() -> None:
    state = started(steps=6)
    entering(state)
    let_in(state)
    for rank in range(RANKS):
        say(state, rank, step_message(0, loss=1.0))
    say(state, 0, to_message(MembersEvent(1, (0, 1, 2, 3), 1)))
    shards = {0: ShardDigest(bytes=1, sha256="0" * 64)}
    for rank in range(RANKS):
        layers = shards if rank == 0 else {}
        news = say(state, rank, to_message(CheckpointEvent(1, layers, 0.1)))
    assert news == [CheckpointWritten(1, shards)]


def test_the_attempt_goes_on_and_ends_without_a_rank_that_fails_as_it_enters() -> None:
    state = started(steps=1, least=3)
    entering(state)
    state.ranks[RANKS].failure = TaskExit(event="exit", signal="SIGKILL")
    assert state.goes_on_without(state.ranks[RANKS])
    entering(state, RANKS + 1)
    for rank in range(RANKS):
        say(state, rank, step_message(0, loss=1.0))
        say(state, rank, {"event": "result", "steps": 1})
    state.leave_out(RANKS)
    assert state.has_returned


@pytest.mark.parametrize(
    ("rank", "event", "fault"),
    [
        (0, StoredEvent("sum-listening/0/4", "00"), "it is ready already"),
        (0, StoredEvent("sum-listening/1/3", "00"), "it is ready already"),
        (0, StoredEvent("sum-listening/0/3", "00"), "it is ready already"),
        (3, StoredEvent("sum-listening/0/3", "00"), "it is ready already"),
        (3, MembersEvent(1, (0, 1, 2, 3), 9), "it enters with step 9"),
        (3, MembersEvent(1, (0, 1, 2), 0), "its members are ranks 0, 1, 2"),
        (3, MembersEvent(1, (3, 4), 0), "its members are ranks 3, 4"),
        (3, WitnessAskedEvent(), "it has not entered yet"),
        (3, CheckpointEvent(0, {}, 0.1), "it has not entered yet"),
        (3, RankResult(0), "it has not entered yet"),
    ],
)
def test_what_nobody_says_while_a_rank_enters_ends_who_says_it(rank: int, event: Any, fault: str) -> None:
    """The keys that a rank is asked for have been set by then."""
    state = started()
    entering(state)
    let_in(state)
    assert say(state, rank, to_message(event)) == []
    assert fault in str(state.ranks[rank].failure)
