"""A helper whose process really lies in the sums of the gradients, in whole runs."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from ..helpers.commands import Skyctl
from ..helpers.forms import Form
from .backends import Over
from .liars import LIAR, honest_losses, lie_in_a_run, nothing_is_left, three_nodes, went_on_without_it
from .test_lying_holder import FROM_STEP, TRAIN

pytestmark = pytest.mark.attack
PLACED = ("--parallel", "data", "--assign", "a=3,b=1", "--helper", LIAR)

LIES = f"""\
import os
import sys

if os.environ.get("LIE") == "end" and sys.orig_argv[-1] == "skyctl.worker.rank":
    from skyctl.worker.sums.route_sum import RouteSum

    honest = RouteSum.agree

    def agree(self, own, largest=1):
        ends = self._sum_work.step >= {FROM_STEP}
        return bytes([0]) + honest(self, bytes([ends]) + own[1:], largest)[1:]

    RouteSum.agree = agree

if os.environ.get("LIE") == "nan" and sys.orig_argv[-1] == "skyctl.worker.rank":
    from skyctl.worker.sums import sum_messages
    from skyctl.worker.sums.sum_messages import HEADER, GRADIENTS, SumStamp

    honest = sum_messages.OutgoingMessages.send

    def send(self, message):
        stamp = SumStamp(*HEADER.unpack_from(message._memory)[:-1])
        if stamp.kind == GRADIENTS and stamp.step >= {FROM_STEP}:
            message.payload.fill_(0xFF)
        honest(self, message)

    sum_messages.OutgoingMessages.send = send
"""
"""A helper is told no workload, so this is what its Python begins with."""


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Skyctl]:
    """Two holders, and one that helps them: all that they sum goes over it."""
    for made in three_nodes(tmp_path_factory, TRAIN, PLACED):
        Form(PLACED, helper=LIAR).finish(made.folder / "plan.json")
        (made.folder / "begins").mkdir()
        (made.folder / "begins/sitecustomize.py").write_text(LIES)
        made.env["PYTHONPATH"] = str(made.folder / "begins")
        yield made


@pytest.mark.parametrize(
    ("lie", "words"),
    [
        (
            "end",
            (" told rank ", f"that the run ends with step {FROM_STEP + 1}, and nobody has asked for that"),
        ),
        ("nan", (" sent rank ", "with NaN or infinity, and what ranks add up is finite")),
    ],
)
def test_one_that_lies_is_left_out_alone(three: Skyctl, over: Over, lie: str, words: tuple[str, str]) -> None:
    over.attempt = f"a helper lies in a sum: {lie}"
    losses = honest_losses(three)
    run, err = lie_in_a_run(three, over, lie)
    assert f"node {LIAR}{words[0]}" in err
    assert words[1] in err
    went_on_without_it(run, err, losses)
    nothing_is_left(three)
