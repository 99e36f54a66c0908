"""The jobs let onto a shared device by memory: never more than there is, and none waits without need."""

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
            admission.ask(job, needs[job])
        else:
            job = draw.choice(sorted(set(needs) - gone))
            gone.add(job)
            admission.leave(job)
        came_once.extend(admission.let_in())
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
    for admission in (by_turns, at_once):
        admission.ask("a", need)
        admission.ask("b", need)
    assert [by_turns.let_in(), at_once.let_in()] == [("a", "b"), ("a",)]
    assert (by_turns.is_tight, at_once.is_tight) == (True, False)
    at_once.leave("a")
    assert at_once.let_in() == ("b",)


def test_a_job_that_waits_keeps_its_place_and_asks_again() -> None:
    admission = MemoryAdmission(CAPACITY)
    for job in "abcb":
        admission.ask(job, MemoryNeed(900.0))
    assert admission.let_in() == ("a",)
    assert [admission.place(job) for job in "abc"] == [0, 1, 2]
    admission.leave("b")
    assert admission.let_in() == ()
    assert admission.place("c") == 1
    admission.leave("a")
    assert admission.let_in() == ("c",)


def test_who_was_there_before_keeps_its_room_even_where_there_is_none() -> None:
    admission = MemoryAdmission(CAPACITY)
    admission.ask("late", MemoryNeed(600.0))
    for job in ("a", "b"):
        admission.keep(job, MemoryNeed(600.0))
    assert admission.let_in() == ()
    admission.leave("a")
    assert admission.let_in() == ()
    admission.leave("b")
    assert admission.let_in() == ("late",)


def test_a_job_too_large_for_the_device_is_refused() -> None:
    admission = MemoryAdmission(2.0 * 2**30)
    with pytest.raises(MismatchError, match=r"run/0 needs 3 GiB, and the device has 2"):
        admission.ask("run/0", MemoryNeed(2.5 * 2**30, 0.5 * 2**30))
    assert admission.there == ()


def test_what_keeps_its_memory_beyond_its_turn_has_a_lane_of_its_own() -> None:
    admission = MemoryAdmission(CAPACITY)
    for name in "abc":
        admission.ask(name, MemoryNeed(100.0, 300.0))
    assert admission.let_in() == ("a", "b", "c")
    assert admission.put_aside("a")
    assert admission.used_bytes == 900.0
    assert not admission.put_aside("b")
    admission.ask("d", MemoryNeed(200.0))
    assert admission.let_in() == ()
    admission.take_back("a")
    assert admission.let_in() == ("d",)
