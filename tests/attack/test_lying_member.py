"""A member that says over its own lines what no member says: it is left out and named, or it is not heeded.

Nothing checks what a node computes (docs/security.md), so it can spoil a sum; what it says of votes and
generations is checked as far as it can be seen from outside.
"""

from __future__ import annotations

import pytest

from skyctl.worker.member_messages import (
    Accept,
    Accepted,
    Chosen,
    Commit,
    Generation,
    Promise,
    Refused,
    Trouble,
    Vote,
)

from .lying_members import LIE_AT, STEPS, Lie, Outcome, play

LIAR = 2
ALL = list(range(STEPS))
HOLED = {0: (0, 1), 1: (0, 1), 2: (5, 6)}
"""Shares of the batch that make some microbatches twice, and others not at all."""


def says(*messages: object) -> Lie:
    return lambda teller: teller.says(*messages)  # type: ignore[arg-type]


def generation(members: tuple[int, ...] = (0, 1, 2), **fields: object) -> Generation:
    shares = {0: (0, 2), 1: (2, 4), 2: (4, 6)}
    held = {rank: (share,) for rank, share in shares.items()}
    told = {"shares": shares, "step": LIE_AT, "held": held, **fields}
    return Generation(1, members, **told)  # type: ignore[arg-type]


def honest_end(outcome: Outcome) -> None:
    """The honest ranks have ended all steps, each in its turn, and none before all had voted."""
    assert (outcome.stuck, outcome.early) == ([], [])
    assert not {0, 1} & outcome.errors.keys(), outcome.errors
    assert outcome.applied[0] == outcome.applied[1] == ALL


NOT_HEEDED = {
    "a commit from one who is not the arbiter": says(Commit(0, LIE_AT), Commit(0, 99)),
    "a promise that nobody asked for, twice": says(*[Promise(0, (1, 0), step=LIE_AT)] * 2),
    "an acceptance of what nobody proposed": says(Accepted(0, (1, 0))),
    "a refusal": says(Refused(0, (99_999_999, 2))),
    "messages of later generations": says(*[Vote(7, LIE_AT, {0: "0" * 32})] * 50),
    "a vote for a step that isn't, taken back": says(Vote(0, 99, {0: "0" * 32})),
    "another digest, taken back": says(Vote(0, LIE_AT, {0: "f" * 32})),
    "a vote for a step that is over": says(Vote(0, 0, {0: "0" * 32})),
}
REFUSED = {
    "a generation with itself twice": says(Chosen(generation((0, 1, 2, 2)))),
    "a generation with a rank that is none": says(Chosen(generation((0, 1, 7)))),
    "shares beyond the batch": says(Chosen(generation(shares={0: (0, 2), 1: (2, 4), 2: (4, 9)}))),
    "held beyond the batch": says(Accept(0, (1, 2), generation(held={2: ((0, 99_999_999),)}))),
    "what is no message": lambda teller: teller.writes(b'{"kind": "vote", "number": "x"}'),
    "a text that is none": lambda teller: teller.writes(b"\xff\x00"),
    "a huge message": lambda teller: teller.announces(1 << 40),
    "a length that is none": lambda teller: teller.announces(-1),
}


@pytest.mark.parametrize("lie", NOT_HEEDED.values(), ids=NOT_HEEDED)
def test_it_is_not_heeded(lie: Lie) -> None:
    outcome = play(LIAR, lie)
    honest_end(outcome)
    assert outcome.members[0] == outcome.members[1] == (0, 1, 2)


@pytest.mark.parametrize("lie", REFUSED.values(), ids=REFUSED)
def test_it_is_left_out(lie: Lie, capfd: pytest.CaptureFixture[str]) -> None:
    outcome = play(LIAR, lie)
    honest_end(outcome)
    assert outcome.members[0] == outcome.members[1] == (0, 1)
    assert f"rank {LIAR} " in capfd.readouterr().err


def test_accused_ranks_leave_and_nobody_waits() -> None:
    """A member may say that two others don't reach each other: then one of them is left out, and says so."""
    outcome = play(LIAR, says(Trouble(0, ((0, 1),))))
    assert outcome.stuck == []
    assert outcome.applied[0] == ALL[: len(outcome.applied[0])]
    assert outcome.applied[1] == ALL[: len(outcome.applied[1])]
    assert any("go on without rank" in str(error) for error in outcome.errors.values()), outcome.errors


def test_a_commit_of_a_step_that_nobody_has_voted_for_is_not_heeded() -> None:
    """Of the step that it has voted for, a rank believes the arbiter: votes are not signed."""
    assert play(0, says(Commit(0, 99_999))).early == []


@pytest.mark.parametrize(
    "lie",
    [
        pytest.param(says(Chosen(generation(shares=HOLED))), id="shares that are not the batch"),
        pytest.param(says(Promise(0, (1, 0), step=1, held=((0, 10**6),))), id="held beyond the batch"),
    ],
)
def test_a_lie_that_can_be_seen_leaves_it_out(lie: Lie) -> None:
    outcome = play(LIAR, lie)
    honest_end(outcome)
    assert LIAR not in outcome.members[0]


def test_the_honest_make_all_steps() -> None:
    outcome = play(LIAR, lambda _teller: None)
    honest_end(outcome)
    assert outcome.applied[LIAR] == ALL
