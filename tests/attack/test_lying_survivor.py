"""A member of an elastic run lies to the others over its real lines: it is named, or nobody heeds it.

Its lie may also end the run's attempt; the losses are always those of a run without the lie.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from ..helpers.commands import Skyctl
from .backends import SKYCTL, Over
from .liars import STEPS, honest_losses, lie_in_a_run, nothing_is_left, three_nodes, went_on_without_it
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
    elif LIE == "digest" and count == 17:
        honest = members.vote
        members.vote = lambda number, step, digests, *rest: honest(
            number, step, dict.fromkeys(digests, "f" * 32), *rest
        )
    elif LIE == "old" and count >= 17:
        told = [m.Trouble(0)] if count == 17 else [
            m.Vote(0, members._agreement.step, {0: "f" * 32}),
            m.Commit(0, members._agreement.step),
            m.Accept(0, (99, 2), m.Generation(1, (2,), {2: (0, 4)}, held={2: ((0, 4),)})),
            m.Chosen(m.Generation(0, (2,), {2: (0, 4)})),
        ]
        for rank in (0, 1):
            for message in told:
                lines.send(rank, message)
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


def test_a_sum_that_it_votes_for_otherwise_takes_no_effect(
    three: Skyctl, losses: list[float], over: Over
) -> None:
    run, err = lie_in_a_run(three, over, "digest", "plan.json", "--elastic")
    assert "is not the same on rank 2 as on rank 0" in err
    went_on_without_it(run, err, losses)
    nothing_is_left(three)


def test_messages_of_an_old_generation_are_not_heeded(three: Skyctl, losses: list[float], over: Over) -> None:
    run, _ = lie_in_a_run(three, over, "old", "plan.json", "--elastic")
    run.is_as(losses, 1)
    events = (run.folder / "attempts/1/events.jsonl").read_text()
    assert '"number": 1' in events, "there was a newer one"
    assert len(run.steps) == STEPS
    nothing_is_left(three)
