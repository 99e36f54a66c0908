"""Which forms are struck, and how far a struck run's losses have to be an undisturbed one's."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from chaos import ELASTIC_FORMS, _undisturbed_steps, backend_of, elastic, form_of, noticed
from tests.helpers.forms import FORMS


def test_every_form_is_struck_here_and_in_a_lab() -> None:
    seeds = range(1, 2 * len(FORMS) + 1)
    assert {(form_of(seed), backend_of(seed)) for seed in seeds} == set(
        itertools.product(FORMS, ("lab", "local"))
    )


def test_what_sums_each_step_is_struck_with_and_without_elastic_here_and_in_a_lab() -> None:
    drawn = {
        (form, backend_of(seed), elastic(seed, form, "skyctl"))
        for seed in range(1, 101)
        if (form := form_of(seed)) in ELASTIC_FORMS
    }
    assert drawn == set(itertools.product(ELASTIC_FORMS, ("lab", "local"), (False, True)))
    assert not any(elastic(seed, "data", "gloo") or elastic(seed, "rounds", "skyctl") for seed in range(100))


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
