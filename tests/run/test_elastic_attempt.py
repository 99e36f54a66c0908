"""What the launcher makes of ranks that may leave: which steps have ended, and whom it waits for."""

from __future__ import annotations

from typing import Any

import pytest

from skyctl.agent.task_events import to_message
from skyctl.records.cluster import Node
from skyctl.remote.remote_task import TaskExit
from skyctl.run.attempt_state import AttemptState, MembersChanged, News, Remark, Tell
from skyctl.run.callbacks import StepProgress
from skyctl.worker.member_messages import Accept, Generation, Prepare
from skyctl.worker.rank_events import MembersEvent, WitnessAskedEvent
from skyctl.worker.rank_order import ElasticOrder, RouteTree
from skyctl.worker.rank_requests import WitnessRequest

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
