"""A helper whose process really lies in the sums of the gradients, in whole runs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from ..helpers.commands import Skyctl
from .liars import LIAR, honest_losses, launch, nothing_is_left, three_nodes, went_on_without_it
from .test_lying_holder import FROM_STEP, TRAIN

pytestmark = pytest.mark.attack
PLACED = ("--parallel", "data", "--assign", "a=3,b=1", "--helper", LIAR)

LIES = f"""\
import os
import sys

if os.environ.get("LIE") == "end" and sys.orig_argv[-1] == "skyctl.worker.rank":
    from skyctl.worker.route_sum import RouteSum

    honest = RouteSum.agree

    def agree(self, own, largest=1):
        ends = self._ongoing.step >= {FROM_STEP}
        return bytes([0]) + honest(self, bytes([ends]) + own[1:], largest)[1:]

    RouteSum.agree = agree
"""
"""A helper is told no workload, so this is what its Python begins with."""


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Skyctl]:
    """Two holders, and one that helps them: all that they sum goes over it."""
    for made in three_nodes(tmp_path_factory, TRAIN, PLACED):
        plan = Path(made.folder / "plan.json")
        values = json.loads(plan.read_text())
        hub, holders = f"{LIAR}/cpu:0", ("a/cpu:0", "b/cpu:0")
        star = {
            "share": 1.0,
            "root": hub,
            "up": [[one, hub] for one in holders],
            "down": [[hub, one] for one in holders],
        }
        values["sync"]["groups"][0]["routes"] = [star]
        values["unused"] = []
        plan.write_text(json.dumps(values))
        (made.folder / "begins").mkdir()
        (made.folder / "begins/sitecustomize.py").write_text(LIES)
        made.env["PYTHONPATH"] = str(made.folder / "begins")
        yield made


def test_one_that_says_that_the_run_ends_is_left_out_alone(three: Skyctl) -> None:
    losses = honest_losses(three)
    run = launch(three, "end")
    err = run.end().stderr
    assert f"node {LIAR} told rank " in err
    assert f"that the run ends with step {FROM_STEP + 1}, and nobody has asked for that" in err
    went_on_without_it(run, err, losses)
    nothing_is_left(three)
