"""The loops that keep cores from halting: one a core, behind everything else, gone with who began them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from runs.awake import Awake
from tests.helpers.processes import after_a_moment, until

if not hasattr(os, "SCHED_IDLE"):
    pytest.skip("no SCHED_IDLE here", allow_module_level=True)

CODE = """
import sys, time
sys.path.insert(0, sys.argv[1])
from runs.awake import Awake
from tests.helpers.processes import MOMENT_S, after_a_moment, until
with Awake():
    print("begun", flush=True)
    time.sleep(600)
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


def test_every_core_has_one_of_its_own_until_it_is_left() -> None:
    cores = os.sched_getaffinity(0)
    with Awake():
        until(lambda: len(idle_below(os.getpid())) == len(cores))
        assert {tuple(os.sched_getaffinity(pid)) for pid in idle_below(os.getpid())} == {(c,) for c in cores}
    assert idle_below(os.getpid()) == []


def test_they_end_with_a_benchmark_that_is_killed() -> None:
    folder = Path(__file__).parents[2] / "benchmarks"
    with subprocess.Popen([sys.executable, "-c", CODE, str(folder)], stdout=subprocess.PIPE) as benchmark:
        assert benchmark.stdout is not None
        benchmark.stdout.readline()
        until(lambda: len(idle_below(benchmark.pid)) == len(os.sched_getaffinity(0)))
        loops = idle_below(benchmark.pid)
        benchmark.kill()
        assert not after_a_moment(lambda: [pid for pid in loops if Path(f"/proc/{pid}").exists()])
