"""The consequences of what ranks say: whom to tell what, what is told of steps, what ends the run."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from skyctl.errors import ProtocolError, WorkloadError
from skyctl.records.cluster import Node
from skyctl.run.attempt_state import (
    AttemptState,
    News,
    Remark,
    Tell,
)
from skyctl.run.callbacks import StepProgress
from skyctl.worker.batches.batch_sketch import sketch_layers
from skyctl.worker.rank_order import TurnsOrder
from skyctl.worker.rank_requests import BuildRequest, EnterRequest, StartRequest, StoredRequest

from ..helpers.events import step_message
from ..helpers.orders import rank_order, rank_spec

FACTS = {
    "event": "facts",
    "device_name": "cpu",
    "devices": ["cpu:0"],
    "cpu_model": "a processor",
    "cpus": 2.0,
    "threads": 1,
    "python": "3.12.1",
    "torch": "2.13.0",
    "memory_bytes": 1e9,
    "memory_scope": None,
    "own_bytes": 1e6,
}


def attempt(ranks: int, steps: int = 2) -> AttemptState:
    """Ranks 0 … n−1 of one pipeline, one a node."""
    specs = [rank_spec(rank, f"n{rank}", rank_order(rank, ranks, steps=steps)) for rank in range(ranks)]
    return AttemptState(specs, {f"n{r}": Node(name=f"n{r}", transport="local") for r in range(ranks)})


def say(state: AttemptState, rank: int, message: dict[str, Any]) -> list[News]:
    """The news that follows from a message; none if it ends the rank."""
    read = state.read(rank, message)
    event = None if read is None else state.accept(rank, read.event)
    if event is None:
        return []
    return list(state.come_together(rank, event) if state.is_starting else state.report(rank, event))


def started(ranks: int, steps: int = 2) -> AttemptState:
    state = attempt(ranks, steps)
    for rank in range(ranks):
        say(state, rank, {"event": "ready"})
    return state


def test_a_key_goes_to_those_that_wait_for_it_now_and_later() -> None:
    state = attempt(3)
    assert say(state, 1, {"event": "wanted", "key": "at/0/1"}) == []
    stored = StoredRequest("at/0/1", "00")
    assert say(state, 0, {"event": "stored", "key": "at/0/1", "value": "00"}) == [Tell(1, stored)]
    assert say(state, 2, {"event": "wanted", "key": "at/0/1"}) == [Tell(2, stored)]


def test_all_start_together_once_the_last_is_ready() -> None:
    state = attempt(2)
    assert say(state, 1, {"event": "ready"}) == []
    assert state.is_starting
    assert say(state, 0, {"event": "ready"}) == [Tell(0, StartRequest()), Tell(1, StartRequest())]
    assert not state.is_starting


def test_a_step_ends_with_its_last_rank_and_the_attempt_with_all() -> None:
    state = started(2)
    assert say(state, 0, step_message(0, loss=1.0)) == []
    (ended,) = say(state, 1, step_message(0, loss=1.0))
    assert isinstance(ended, StepProgress)
    assert (ended.step, state.has_begun, state.has_returned) == (0, True, False)
    for rank in range(2):
        say(state, rank, step_message(1, loss=1.0))
    for rank in range(2):
        say(state, rank, {"event": "result", "steps": 2})
    assert state.has_returned


def test_what_another_process_has_told_of_is_not_told_again() -> None:
    state = attempt(1, steps=4)
    past = [(0, {"event": "ready"}), *((0, step_message(step, loss=1.0)) for step in range(3))]
    told = list(state.replay(past, told=2))
    assert [item.step for item in told if isinstance(item, StepProgress)] == [2]
    assert len(told) == 1


def sharing(ranks: int) -> AttemptState:
    """As ``attempt``, by turns with other runs; rank 0 is on the last device by name."""
    nodes = [f"n{ranks - rank}" for rank in range(ranks)]
    specs = [
        rank_spec(
            rank,
            nodes[rank],
            replace(rank_order(rank, ranks), turns=TurnsOrder("fair", nodes[rank], capacity_bytes=1.0)),
        )
        for rank in range(ranks)
    ]
    return AttemptState(specs, {name: Node(name=name, transport="local") for name in nodes})


def test_ranks_that_share_devices_enter_them_one_by_one_and_build_together() -> None:
    state = sharing(2)
    assert say(state, 0, FACTS) == []
    _, *told = say(state, 1, FACTS)
    assert told == [Tell(1, EnterRequest())], "the first device by name"
    [remark] = say(state, 1, {"event": "room", "place": 2})
    assert isinstance(remark, Remark)
    assert "waits for memory that other runs hold, as number 2" in remark.text
    assert say(state, 1, {"event": "room", "place": 0}) == [Tell(0, EnterRequest())]
    assert say(state, 0, {"event": "room", "place": 0}) == [Tell(0, BuildRequest()), Tell(1, BuildRequest())]


@pytest.mark.parametrize("places", [(0,), (1, 1), (1, 2), (0, 0)])
def test_a_place_that_no_rank_can_have_is_a_lie(places: tuple[int, ...]) -> None:
    state = sharing(1) if len(places) > 1 else attempt(1)
    say(state, 0, FACTS)
    for place in places:
        say(state, 0, {"event": "room", "place": place})
    assert isinstance(state.ranks[0].failure, ProtocolError)


def test_a_rank_that_lies_is_not_heard_any_more() -> None:
    state = started(1)
    assert say(state, 0, {"event": "sing"}) == []
    failure = state.ranks[0].failure
    assert isinstance(failure, ProtocolError)
    assert say(state, 0, step_message(0, loss=1.0)) == []
    assert state.ranks[0].failure is failure


def layers(seed: int, count: int = 2) -> list[nn.Module]:
    torch.manual_seed(seed)
    return [nn.Linear(6, 6) for _ in range(count)]


def test_copies_of_a_layer_are_equal() -> None:
    one, two = sketch_layers(layers(1), 0, 7), sketch_layers(layers(1), 0, 7)
    attempt(3).check_beginnings({0: one, 1: two, 2: {}})


def test_another_processors_last_bits_make_no_difference() -> None:
    mine = layers(1)
    with torch.no_grad():
        for layer in mine:
            for parameter in layer.parameters():
                parameter.mul_(1 + 1e-6)
    attempt(2).check_beginnings({0: sketch_layers(layers(1), 0, 7), 1: sketch_layers(mine, 0, 7)})


def test_other_weights_are_named() -> None:
    one, two = layers(1, 3), layers(1, 3)
    nn.init.normal_(two[1].weight)  # type: ignore[arg-type]
    with pytest.raises(
        WorkloadError, match=r"layer 1 begins with other weights on n1/cpu:0 than on n0/cpu:0"
    ):
        attempt(2).check_beginnings({0: sketch_layers(one, 0, 7), 1: sketch_layers(two, 0, 7)})
