"""Jobs that need more memory together than there is, in a cgroup that ends whoever takes too much."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from skyctl.lab import cgroup_quotas

from ..helpers.processes import PATIENCE_S

pytestmark = pytest.mark.lab

JOBS, MIB = 20, 2**20
CAPACITY_MIB, PROCESS_MIB, ARBITER_MIB = 300, 30, 60
"""The memory that the device has for all jobs, and that a process takes before it asks."""
JOB = """
import sys, time
from pathlib import Path
from skyctl.turns.memory_admission import MemoryNeed
from skyctl.turns.turn_client import open_turns

name, cache, kept, taken, capacity, turns = sys.argv[1:]
MIB = 2**20
print("here", flush=True)
sys.stdin.readline()  # until all are
job = open_turns(turns, device="here/cpu:0", job_id=name, cache=Path(cache))
places = []
job.enter(MemoryNeed(int(kept) * MIB, int(taken) * MIB), int(capacity) * MIB, places.append)
model = bytearray(int(kept) * MIB)
model[:: 4096] = b"x" * len(model[:: 4096])
for _ in range(3):
    with job.turn():
        activations = bytearray(int(taken) * MIB)
        activations[:: 4096] = b"x" * len(activations[:: 4096])
        time.sleep(0.02)
        del activations
job.close()
print(len(places))
"""


@pytest.fixture
def memory_cgroup() -> Iterator[list[Path]]:
    """Folders of a cgroup with too little memory for all jobs at once."""
    layout, token = cgroup_quotas.find_cgroups(), f"room-{os.getpid()}"
    limit = CAPACITY_MIB + ARBITER_MIB + JOBS * PROCESS_MIB
    folders = cgroup_quotas.make_node_cgroups(layout, token, 0, limit / 1024)
    yield folders
    for folder in cgroup_quotas.lab_cgroups(layout, token):
        for pid in cgroup_quotas.list_processes(folder):
            os.kill(pid, 9)
        assert cgroup_quotas.remove_cgroups(folder)


@pytest.mark.parametrize("turns", ["fair", "pack"])
def test_twenty_jobs_have_room_one_after_another(
    memory_cgroup: list[Path], tmp_path: Path, turns: str
) -> None:
    draw = random.Random(turns)
    needs = [(draw.randrange(20, 160), draw.randrange(20, 120)) for _ in range(JOBS)]
    assert sum(kept + taken for kept, taken in needs) > 2 * (CAPACITY_MIB + JOBS * PROCESS_MIB)
    enter = "".join(f"echo $$ > '{folder}/cgroup.procs' && " for folder in memory_cgroup)
    jobs = [
        subprocess.Popen(
            [
                *("sh", "-c", f'{enter}exec "$@"', "sh", sys.executable, "-c", JOB),
                *(f"job {number}", str(tmp_path), str(kept), str(taken), str(CAPACITY_MIB), turns),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for number, (kept, taken) in enumerate(needs)
    ]
    try:
        for job in jobs:
            assert job.stdout is not None
            assert job.stdout.readline() == "here\n"
        for job in jobs:
            assert job.stdin is not None
            job.stdin.write("\n")
            job.stdin.flush()
        ended = [job.communicate(timeout=PATIENCE_S) for job in jobs]
    finally:
        for job in jobs:
            job.kill()
            job.communicate()
    assert [job.returncode for job in jobs] == [0] * JOBS, [error for _, error in ended if error]
    assert sum(int(places) > 0 for places, _ in ended) > JOBS / 3, "there was room for all"
