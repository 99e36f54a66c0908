"""A member of an elastic run lies to the others over its real lines: it is named, and left out.

The run goes on in its attempt, with the losses of a run without the lie.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from ..helpers.commands import Skyctl
from .backends import SKYCTL, Over
from .liars import honest_losses, lie_in_a_run, nothing_is_left, three_nodes
from .test_lying_rank import TRAIN as LYING_TRAIN

LIES = """\
def elastic_steps():
    frame = sys._getframe()
    while frame is not None:
        for one in frame.f_locals.values():
            if type(one).__name__ == "ElasticSteps":
                return one
        frame = frame.f_back


def lie(count):
    from skyctl.worker import member_messages as m

    members = elastic_steps()._members
    lines, now = members._lines, members.generation
    if LIE == "garbage" and count == 17:
        for rank in (0, 1):
            lines._put(rank, b'{"kind": "vote", "number": "x"}')
    elif LIE == "shares" and count == 17:
        nobody = m.Generation(1, now.members, dict.fromkeys(now.members, (0, 1)), step=99)
        for rank in (0, 1):
            lines.send(rank, m.Chosen(nobody))
"""
BEFORE, REST = LYING_TRAIN.split("def channel()")
TRAIN = BEFORE + LIES + "\n\n" + REST[REST.index("class Stage") :]
TRAIN = TRAIN.replace("self.count == 17 and LIE:\n            lie()", "LIE:\n            lie(self.count)")
PLAN = ("--parallel", "data", "--sync-format", "fixed32", "--assign", "a=2,b=1,c=1")

pytestmark = pytest.mark.attack


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Skyctl]:
    """Three nodes with a replica each."""
    yield from three_nodes(tmp_path_factory, TRAIN, PLAN)


@pytest.fixture(scope="module")
def losses(three: Skyctl) -> list[float]:
    return honest_losses(three)


@pytest.fixture
def over() -> Over:
    return Over(SKYCTL, "a member of an elastic run lies to the others")


@pytest.mark.parametrize(
    ("lie", "words"),
    [
        ("garbage", "sent what is no message of a member"),
        ("shares", "rank 2 proposes a generation, but its shares are not of 4 microbatches"),
    ],
)
def test_the_others_leave_it_out_in_that_step(
    three: Skyctl, losses: list[float], over: Over, lie: str, words: str
) -> None:
    run, err = lie_in_a_run(three, over, lie, "plan.json", "--elastic")
    run.is_as(losses, 1)
    assert "rank 2 on c/cpu:0 (node c)" in err
    said = (run.folder / "attempts/1/logs/rank-000.log").read_text()
    assert words in said
    assert ": it is left out" in said
    nothing_is_left(three)
