"""The clients that take part in each round: the same everywhere, by the seed alone."""

from __future__ import annotations

import random

import pytest

from skyctl.errors import InputError
from skyctl.schedule.rounds import clients_of_round


def test_clients_follow_from_seed_and_round_alone() -> None:
    for number in range(20):
        clients = clients_of_round(30, 10, 7, number)
        assert clients == tuple(sorted(random.Random(f"7/{number}").sample(range(30), 10)))
        assert len(set(clients)) == 10
    assert clients_of_round(30, 10, 7, 0) != clients_of_round(30, 10, 7, 1)
    assert clients_of_round(30, 10, 7, 0) != clients_of_round(30, 10, 8, 0)


def test_all_take_part_where_no_number_is_asked_for() -> None:
    assert clients_of_round(3, None, 0, 5) == (0, 1, 2)
    assert clients_of_round(3, 3, 0, 5) == (0, 1, 2)


@pytest.mark.parametrize("per_round", [0, 4])
def test_as_many_as_there_are(per_round: int) -> None:
    with pytest.raises(InputError, match="of 3 owners"):
        clients_of_round(3, per_round, 0, 0)
