"""The elastic benchmarks: how a pause and a ratio are counted, and a kill that a witness decides."""

import json
import subprocess
import sys
from pathlib import Path

import elastic
import elastic_quota
import pytest


def test_a_pause_counts_from_the_loss():
    assert elastic.longest_pause([-2.0, -0.1]) == 0.0
    assert elastic.longest_pause([-3.0, 0.5, 0.6, 2.0]) == 1.4
    assert elastic.longest_pause([5.0, -1.0]) == 5.0


def steps_of(seconds, samples=(1, 1, 1, 1)):
    told = elastic_quota.Steps(len(seconds))
    told.ends = [sum(seconds[: step + 1]) for step in range(len(seconds))]
    told.samples = [list(samples)] * len(seconds)
    return told


def test_steps_are_slow_until_one_is_near_that_of_the_plan_that_knew():
    known = steps_of([1.0] * 30)
    fell = elastic_quota.FALL_STEP
    dynamic = steps_of([0.5] * fell + [3.0, 3.0, 1.1] + [1.2] * (elastic_quota.STEPS - fell - 3))
    row = elastic_quota.compared(known, dynamic)
    assert (row["slow_steps"], row["ratio"]) == (2, 1.2)
    assert row["after_fall"][:4] == [3.0, 3.0, 1.1, 1.2]
    assert row["dealt_at"] == []


@pytest.mark.slow
def test_one_of_a_pair_is_killed():
    done = subprocess.run(
        [sys.executable, str(Path(elastic.__file__)), "1", "--pair"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    row = json.loads(done.stdout)
    assert (row["equal"], row["stalled"]) == (1, 0)
