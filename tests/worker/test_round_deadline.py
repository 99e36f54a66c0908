"""Whether another local step is begun, as a stage hears it from the one before."""

from __future__ import annotations

from typing import Any

import pytest

from skyctl.worker.rounds.round_deadline import RoundDeadline


class LiarError(Exception):
    """What the connection makes of an answer that can not be."""


class Relay:
    """Hears what it is given; keeps what is told."""

    def __init__(self, *heard: list[int]) -> None:
        self._heard = list(heard)
        self.told: list[list[int]] = []

    @property
    def source(self) -> Any:
        return self if self._heard else None

    def protocol_error(self, text: str) -> LiarError:
        return LiarError(text)

    def hear(self) -> list[int]:
        return self._heard.pop(0)

    def tell(self, numbers: list[int]) -> None:
        self.told.append(numbers)


def test_the_first_stage_goes_by_its_clock() -> None:
    times = iter([100.0, 101.0, 102.0, 200.0, 201.0])
    relay: Any = Relay()
    deadline = RoundDeadline(2.0, relay, clock=lambda: next(times))
    deadline.begin()
    assert [deadline.is_over(4, made) for made in (1, 2)] == [False, True]
    deadline.begin()
    assert not deadline.is_over(5, 1)
    assert relay.told == [[4, 1, 0], [4, 2, 1], [5, 1, 0]]


def test_the_others_go_by_what_they_hear_and_pass_it_on() -> None:
    relay: Any = Relay([4, 1, 0], [4, 2, 1])
    deadline = RoundDeadline(1e-9, relay)
    deadline.begin()
    assert [deadline.is_over(4, made) for made in (1, 2)] == [False, True]
    assert relay.told == [[4, 1, 0], [4, 2, 1]]


@pytest.mark.parametrize("heard", [[3, 1, 0], [4, 2, 0], [4, 1, 2], [4, 1, -1]])
def test_a_stage_that_speaks_of_another_step_is_not_believed(heard: list[int]) -> None:
    relay: Any = Relay(heard)
    with pytest.raises(LiarError, match="round 4 is over after 1 local steps"):
        RoundDeadline(1.0, relay).is_over(4, 1)
    assert not relay.told
