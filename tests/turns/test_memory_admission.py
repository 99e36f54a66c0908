"""Who is let onto a shared device by memory: never more than there is, and nobody waits without need."""

from __future__ import annotations

import random

import pytest

from skyctl.errors import MismatchError
from skyctl.turns.memory_admission import MemoryAdmission, MemoryNeed

CAPACITY = 1000.0


def bytes_of(needs: list[MemoryNeed], *, lanes_are_shared: bool) -> float:
    """As the paper has it, written anew."""
    kept, lanes = sum(need.persistent_bytes for need in needs), [need.ephemeral_bytes for need in needs]
    return kept + (max(lanes, default=0.0) if lanes_are_shared else sum(lanes))


@pytest.mark.parametrize("lanes_are_shared", [True, False])
@pytest.mark.parametrize("seed", range(10))
def test_random_jobs_fit_and_none_waits_that_could_run(seed: int, lanes_are_shared: bool) -> None:
    draw = random.Random(seed)
    admission = MemoryAdmission(CAPACITY, lanes_are_shared=lanes_are_shared)
    needs: dict[str, MemoryNeed] = {}
    gone: set[str] = set()
    came_once: list[str] = []
    for number in range(300):
        if draw.random() < 0.55 or len(gone) == len(needs):
            job = f"job {number}"
            needs[job] = MemoryNeed(float(draw.randrange(1, 600)), float(draw.randrange(400)))
            place = admission.ask(job, needs[job])
            assert (place == 0) == (job in admission.there)
        else:
            job = draw.choice(sorted(set(needs) - gone))
            gone.add(job)
            came_once.extend(admission.leave(job))
        there = list(admission.there)
        assert bytes_of([needs[j] for j in there], lanes_are_shared=lanes_are_shared) <= CAPACITY
        waiting = [j for j in needs if j not in gone and j not in there]
        assert [admission.place(j) for j in waiting] == list(range(1, len(waiting) + 1))
        for job in waiting:
            with_it = [needs[j] for j in [*there, job]]
            assert bytes_of(with_it, lanes_are_shared=lanes_are_shared) > CAPACITY, f"{job} waits in vain"
    assert came_once
    assert len(came_once) == len(set(came_once))


def test_what_takes_turns_shares_the_room_of_a_turn() -> None:
    by_turns, at_once = MemoryAdmission(CAPACITY), MemoryAdmission(CAPACITY, lanes_are_shared=False)
    need = MemoryNeed(300.0, 400.0)
    assert [admission.ask("a", need) for admission in (by_turns, at_once)] == [0, 0]
    assert [admission.ask("b", need) for admission in (by_turns, at_once)] == [0, 1]
    assert at_once.leave("a") == ("b",)


def test_a_job_that_waits_keeps_its_place_and_asks_again() -> None:
    admission = MemoryAdmission(CAPACITY)
    assert [admission.ask(job, MemoryNeed(900.0)) for job in "abcb"] == [0, 1, 2, 1]
    assert admission.leave("b") == ()
    assert admission.place("c") == 1
    assert admission.leave("a") == ("c",)


def test_a_job_too_large_for_the_device_is_refused() -> None:
    admission = MemoryAdmission(2.0 * 2**30)
    with pytest.raises(MismatchError, match=r"run/0 needs 3 GiB, and the device has 2"):
        admission.ask("run/0", MemoryNeed(2.5 * 2**30, 0.5 * 2**30))
    assert admission.there == ()
