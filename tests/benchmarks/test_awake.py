"""The loops that keep cores from halting: one a core, behind everything else, gone with who began them."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from runs.awake import Awake

if not hasattr(os, "SCHED_IDLE"):
    pytest.skip("no SCHED_IDLE here", allow_module_level=True)

CODE = """
import sys, time
sys.path.insert(0, sys.argv[1])
from runs.awake import Awake
with Awake():
    print("begun", flush=True)
    time.sleep(60)
"""


def idle_below(parent: int) -> list[int]:
    """Children of the process that run with ``SCHED_IDLE``."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            words = stat.read_text().rpartition(")")[2].split()
            pid = int(stat.parent.name)
            if int(words[1]) == parent and words[0] != "Z" and os.sched_getscheduler(pid) == os.SCHED_IDLE:
                found.append(pid)
        except OSError:
            continue
    return found


def soon(true: Callable[[], bool]) -> bool:
    end = time.monotonic() + 10
    while not true() and time.monotonic() < end:
        time.sleep(0.02)
    return true()


def test_every_core_has_one_of_its_own_until_it_is_left() -> None:
    cores = os.sched_getaffinity(0)
    with Awake():
        assert soon(lambda: len(idle_below(os.getpid())) == len(cores))
        assert {tuple(os.sched_getaffinity(pid)) for pid in idle_below(os.getpid())} == {(c,) for c in cores}
    assert idle_below(os.getpid()) == []


def test_they_end_with_a_benchmark_that_is_killed() -> None:
    folder = Path(__file__).parents[2] / "benchmarks"
    with subprocess.Popen([sys.executable, "-c", CODE, str(folder)], stdout=subprocess.PIPE) as benchmark:
        assert benchmark.stdout is not None
        benchmark.stdout.readline()
        assert soon(lambda: len(idle_below(benchmark.pid)) == len(os.sched_getaffinity(0)))
        loops = idle_below(benchmark.pid)
        benchmark.kill()
        assert soon(lambda: not any(Path(f"/proc/{pid}").exists() for pid in loops))
