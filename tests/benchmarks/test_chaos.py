"""Which forms are struck, and how far a struck run's losses have to be an undisturbed one's."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from chaos import _undisturbed_steps, backend_of, form_of, noticed
from tests.helpers.forms import FORMS


def test_every_form_is_struck_here_and_in_a_lab() -> None:
    seeds = range(1, 2 * len(FORMS) + 1)
    assert {(form_of(seed), backend_of(seed)) for seed in seeds} == set(
        itertools.product(FORMS, ("lab", "local"))
    )


@pytest.mark.parametrize(("needs", "held"), [(None, 0), (1, 40), (2, 20), (3, 10)])
def test_losses_are_held_against_an_undisturbed_runs_as_far_as_they_can_be_those(
    needs: int | None, held: int
) -> None:
    attempts: list[dict[str, Any]] = [
        {"from_step": step, "devices": ["d"] * count}
        for step, count in ((0, 3), (5, 3), (10, 2), (20, 1), (30, 3))
    ]
    assert _undisturbed_steps(needs, attempts, 40) == held


def test_what_ended_an_attempt_is_timed_from_the_last_strike_before() -> None:
    strikes: list[dict[str, Any]] = [
        {"kind": "killed", "part": "rank", "at": 100.0},
        {"kind": "clock jump", "at": 104.0},
        {"kind": "slow", "missed": True},
        {"kind": "killed", "part": "rank", "at": 200.0},
    ]
    attempts: list[dict[str, Any]] = [
        {"number": 1, "error": "node n2 was lost"},
        {"number": 2, "error": None},
        {"number": 3, "error": "it was stopped"},
    ]
    assert noticed(strikes, attempts, {1: 106.0, 2: 120.0}) == [
        {"kind": "clock jump", "after_s": 2.0, "error": "node n2 was lost"}
    ]
