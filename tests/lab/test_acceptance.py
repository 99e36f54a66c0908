"""The measure of a run that survives: one of four nodes is lost at step 60 of 100."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from skyctl.lab.lab_state import LabState

pytestmark = pytest.mark.matrix

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "survival.py"


@pytest.mark.slow
@pytest.mark.parametrize("way", ["black", "off"])
def test_one_of_four_is_lost_at_step_60_of_100(lab: Callable[..., LabState], way: str) -> None:
    """The lab is the benchmark's own; ``lab`` is asked for so that this is left out where there is none."""
    argv = [sys.executable, str(BENCHMARK), "--only", way]
    done = subprocess.run(
        argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=500, check=False
    )
    assert done.returncode == 0, done.stderr
    measured = json.loads(done.stdout)
    print(measured)
    assert measured["steps"] == 100
    assert measured["loss_differs"] <= 1e-5
    assert measured["attempts"] == 2
    assert measured["why"] == "node n3 was lost"
    assert "n3/cpu:0" not in measured["devices"]
    assert measured["lost_steps"] <= 10
    assert measured["left"] == {}
