"""Jobs of one process that wait for room on a device, given by a real arbiter."""

from __future__ import annotations

import os
import queue
import signal
import threading
from pathlib import Path

import pytest
from tests.helpers.processes import until
from tests.turns.jobs import DEVICE
from tests.turns.test_turn_client import arbiters

from skyctl.errors import MismatchError
from skyctl.turns.memory_admission import MemoryNeed
from skyctl.turns.turn_client import DeviceTurns, list_shared_devices, open_turns

CAPACITY = 1000.0


def opened(cache: Path, name: str) -> DeviceTurns:
    turns = open_turns("fair", device=DEVICE, job_id=name, cache=cache)
    assert isinstance(turns, DeviceTurns)
    return turns


def test_who_waits_is_told_its_place_and_comes_in_even_after_an_arbiters_death(tmp_path: Path) -> None:
    first, second = opened(tmp_path, "first"), opened(tmp_path, "second")
    places: queue.Queue[int] = queue.Queue()
    waits = threading.Thread(
        target=lambda: [second.enter(MemoryNeed(600.0), CAPACITY, places.put), places.put(0)]
    )
    try:
        first.enter(MemoryNeed(600.0), CAPACITY, places.put)
        waits.start()
        assert places.get(timeout=30) == 1
        [shared] = list_shared_devices(tmp_path)
        assert [(job.job, job.place) for job in shared.jobs] == [("first", 0), ("second", 1)]
        [arbiter] = arbiters(tmp_path)
        os.kill(arbiter, signal.SIGKILL)
        until(lambda: [pid for pid in arbiters(tmp_path) if pid != arbiter], lambda: "no other arbiter")
        with first.turn():
            pass  # both are with the next one, or will be
        with pytest.raises(queue.Empty):
            places.get(timeout=1.0)
        first.close()
        assert places.get(timeout=30) == 0
    finally:
        for job in (first, second):
            job.close()
        waits.join()
    until(lambda: not arbiters(tmp_path), lambda: "the arbiter has not ended")


def test_what_fits_on_no_device_is_refused(tmp_path: Path) -> None:
    job = opened(tmp_path, "run/0")
    try:
        with pytest.raises(MismatchError, match="run/0 needs"):
            job.enter(MemoryNeed(900.0, 200.0), CAPACITY, lambda _: None)
    finally:
        job.close()


def test_memory_is_freed_before_anothers_turn_only_where_that_needs_it(tmp_path: Path) -> None:
    jobs = {name: opened(tmp_path, name) for name in "abc"}
    freed: queue.Queue[str] = queue.Queue()
    try:
        for name, need in (("a", MemoryNeed(200.0, 300.0)), ("b", MemoryNeed(200.0, 300.0))):
            jobs[name].enter(need, CAPACITY, lambda _: None, lambda name=name: freed.put(name))
        for _ in range(2):
            for name in "ab":
                with jobs[name].turn():
                    pass
        assert freed.empty(), "all of both fits"
        jobs["c"].enter(MemoryNeed(200.0, 100.0), CAPACITY, lambda _: None, lambda: freed.put("c"))
        for name in "ab":
            with jobs[name].turn():
                pass
        assert freed.get(timeout=30) in "ab"
    finally:
        for job in jobs.values():
            job.close()
    until(lambda: not arbiters(tmp_path), lambda: "the arbiter has not ended")


def test_nobody_goes_on_beside_a_late_job_without_room_for_the_memory_that_it_keeps(tmp_path: Path) -> None:
    late, other = opened(tmp_path, "late"), opened(tmp_path, "other")
    took = threading.Event()

    def take() -> None:
        with other.turn():
            took.set()

    taker = threading.Thread(target=take)
    try:
        for job in (late, other):
            job.enter(MemoryNeed(200.0, 500.0), CAPACITY, lambda _: None)
        with late.turn():
            taker.start()
            until(
                lambda: any(job.is_late for job in list_shared_devices(tmp_path)[0].jobs), lambda: "not late"
            )
            [waits] = [job for job in list_shared_devices(tmp_path)[0].jobs if job.job == "other"]
            assert waits.waits_s is not None
            assert not took.is_set()
        assert took.wait(timeout=30)
    finally:
        taker.join()
        for job in (late, other):
            job.close()
    until(lambda: not arbiters(tmp_path), lambda: "the arbiter has not ended")
