"""Collectives of a pipeline's stages over real connections, and the local steps that stages agree on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from tests.worker.sums import connected, together

from skyctl.transport.transfer_errors import PeerProtocolError
from skyctl.worker.peer import Neighbours
from skyctl.worker.progress import Progress
from skyctl.worker.rank_order import RoundOptions
from skyctl.worker.rounds.step_budget import StepBudget
from skyctl.worker.stage_group import StageGroup
from skyctl.worker.updates.step_report import StepReport

COUNT, TAG = 4, 3


@contextmanager
def pipeline(count: int = COUNT) -> Iterator[list[StageGroup]]:
    """Groups of stages, each connected to its neighbours."""
    edges = [(rank + 1, rank) for rank in range(count - 1)]
    with connected([(1.0, 0, edges, [])], count) as peers:
        yield [
            StageGroup(Neighbours(mine.get(rank - 1), mine.get(rank + 1)), TAG, Progress())
            for rank, mine in enumerate(peers)
        ]


def number(value: float) -> torch.Tensor:
    return torch.tensor([value], dtype=torch.float64)


def test_sums_are_added_from_the_last_stage_on_and_known_to_all() -> None:
    def act(rank: int) -> list[float]:
        totals = []
        for turn in range(5):
            own = number(0.1 * 3**rank + turn)
            stages[rank].all_reduce(own)
            totals.append(own.item())
        stages[rank].drain()
        return totals

    with pipeline() as stages:
        done = together(COUNT, act)
    for turn in range(5):
        total = 0.1 * 27 + turn
        for rank in (2, 1, 0):
            total = (0.1 * 3**rank + turn) + total
        assert [totals[turn] for totals in done] == [total] * COUNT


def test_the_first_stages_number_reaches_all_between_sums() -> None:
    def act(rank: int) -> list[float]:
        first, second, third = number(rank + 7.0), number(1.0), number(-1.0 - rank)
        stages[rank].broadcast(first)
        stages[rank].all_reduce(second)
        stages[rank].broadcast(third)
        return [first.item(), second.item(), third.item()]

    with pipeline() as stages:
        assert together(COUNT, act) == [[7.0, float(COUNT), -1.0]] * COUNT


def test_a_stage_alone_waits_for_nobody() -> None:
    with pipeline(1) as stages:
        own = number(2.5)
        assert stages[0].all_reduce(own) == (0.0, 0.0)
        assert own.item() == 2.5


def test_a_stage_that_speaks_of_another_collective_is_named() -> None:
    def act(rank: int) -> Any:
        if rank == 0:
            stages[0]._count = 5
        try:
            stages[rank].broadcast(number(1.0))
        except PeerProtocolError as error:
            return error
        return None

    with pipeline(2) as stages:
        outcomes = together(2, act)
    assert outcomes[0] is None
    assert outcomes[1].peer_rank == 0
    assert "rank 0 sent a number of its collective 5" in outcomes[1].message
    assert "this one is at its collective 0" in outcomes[1].message


def budgets(
    stages: list[StageGroup], options: RoundOptions, clock: Callable[[int], Callable[[], float]]
) -> list[StepBudget]:
    return [StepBudget(options, 1, group, Progress(), clock=clock(rank)) for rank, group in enumerate(stages)]


def test_the_first_stages_clock_says_when_a_rounds_time_is_over() -> None:
    times = [[100.0, 101.0, 102.0, 200.0, 201.0], [0.0, 9.0, 9.0, 0.0, 9.0], [0.0] * 5]

    def act(rank: int) -> list[bool]:
        report, budget, spent = StepReport(), rank_budgets[rank], []
        for turn, asked in ((4, 2), (5, 1)):
            assert budget.begin(turn, report) == 3
            spent += [budget.is_spent(turn, report) for _ in range(asked)]
        return spent

    with pipeline(3) as stages:
        rank_budgets = budgets(
            stages, RoundOptions(3, deadline_s=2.0), lambda rank: iter(times[rank]).__next__
        )
        assert together(3, act) == [[False, True, False]] * 3


def test_without_a_deadline_stages_tell_each_other_nothing() -> None:
    with pipeline(2) as stages:
        budget = budgets(stages, RoundOptions(3), lambda _rank: lambda: 0.0)[1]
        report = StepReport()
        assert budget.begin(0, report) == 3
        assert not budget.is_spent(0, report)


def test_an_owner_that_is_no_client_of_a_round_makes_no_steps() -> None:
    with pipeline(1) as stages:
        options = [RoundOptions(3, owner=name, index=i, owners=3, clients=1) for i, name in enumerate("abc")]
        own_budgets = [StepBudget(option, 1, stages[0], Progress()) for option in options]
        for turn in range(5):
            assert sorted(budget.begin(turn, StepReport()) for budget in own_budgets) == [0, 0, 3]
