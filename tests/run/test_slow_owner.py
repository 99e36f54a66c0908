"""Rounds that wait for one owner: it is named, once, and not those that wait."""

from __future__ import annotations

import pytest

from skyctl.run.slow_owner import SLOW_ROUNDS, SlowOwners
from skyctl.run.step_collector import StepCollector

from ..helpers.events import step_event

ROUNDS = 20
LOCAL_STEPS = 4


def notes_of(computed_s: dict[str, list[float]], local_steps: int = LOCAL_STEPS, skips: int = 0) -> list[str]:
    """The notes on rounds in which each owner computed for so long, ``elm`` on two ranks.

    Args:
        skips: of each so many rounds ``oak`` takes part in one; 0: in all.
    """
    said: list[str] = []
    collected = StepCollector(3, ROUNDS, last_ranks=(0, 2), owners=("oak", "elm"), unit="round")
    slow_owners = SlowOwners(collected)
    for number in range(len(computed_s["oak"])):
        round_s = max(each[number] for each in computed_s.values())
        for rank, owner in enumerate(("oak", "elm", "elm")):
            made = local_steps if owner == "elm" or not skips or number % skips == 0 else 0
            collected.add(
                rank,
                step_event(
                    number,
                    iteration_s=round_s,
                    compute_s=computed_s[owner][number] if made else 0.0,
                    local_steps=made,
                ),
            )
        for progress in collected.complete():
            said += filter(None, [slow_owners.note(progress.step)])
    return said


@pytest.mark.parametrize("owner", ["oak", "elm"])
def test_an_owner_that_becomes_slow_is_named_once(owner: str) -> None:
    steady, slows = [0.8] * ROUNDS, [0.8] * 8 + [3.0] * 12
    other = "elm" if owner == "oak" else "oak"
    (said,) = notes_of({owner: slows, other: steady})
    assert said.startswith(f"owner {owner} has become slow: 0.75 s a local step, 0.20 s before")
    assert "a round takes 3.00 s, 0.80 s before" in said
    assert "--round-deadline" in said


def test_one_that_rounds_do_not_wait_for_is_not_named() -> None:
    assert notes_of({"oak": [0.2] * 8 + [0.6] * 12, "elm": [0.8] * ROUNDS}) == []
    assert notes_of({"oak": [0.8] * ROUNDS, "elm": [0.8] * ROUNDS}) == []
    assert notes_of({"oak": [0.8] * 8 + [3.0] * (SLOW_ROUNDS - 1) + [0.8] * 4, "elm": [0.8] * 14}) == []


def test_an_owner_that_takes_part_now_and_then() -> None:
    (said,) = notes_of({"oak": [0.8] * 10 + [3.0] * 10, "elm": [0.8] * ROUNDS}, skips=2)
    assert said.startswith("owner oak has become slow")
