"""Helpers, roots and owners that lie: the launcher names nobody but them, and no rank ends with a bug.

Each number is a seed of its own: ``play_one(N)`` tells lie N again.
"""

from __future__ import annotations

import random

import pytest

from skyctl.errors import ProtocolError, RunError, SkyctlError, WorkloadError

from . import lies
from .lying_roles import KINDS, ROLES, Liar, _play, blame, events_of, health_of, make_attempt, play, say, tell

LIES, SAMPLE, PART = 500, 10, 49
SUM_OF_SAMPLES = "the samples that holders say their weights are of add up to"


def play_one(number: int) -> str:
    """The outcome of one lie, in a word; fails if an honest node is blamed."""
    rng = random.Random(20261126 + number)
    role = list(ROLES)[number // 2 % len(ROLES)]
    return _to_ranks(rng, role) if number % 2 else _to_launcher(rng, role)


def _to_ranks(rng: random.Random, role: str) -> str:
    kind = rng.choice(KINDS)
    outcome = play(ROLES[role], rng, kind)
    for _, exc in outcome.errors:
        assert isinstance(exc, SkyctlError), (role, kind, exc)
    if not outcome.errors and not outcome.stuck:
        return "nothing"
    found = blame(ROLES[role], outcome)
    if found is None:
        verdict = health_of(ROLES[role], outcome, liar_is_heard=rng.random() < 0.5)
        assert verdict is None or verdict.kind == "deadlock" or verdict.ranks == (ROLES[role].liar,)
        return "waits"
    error, report = found
    assert len(error.message) < 2000
    if report.cause == "raised":  # a sum does not tell whose part of it was false
        assert report.nodes == (lies.LIAR,) or SUM_OF_SAMPLES in error.message, (role, kind, error.message)
    elif report.cause == "peer":  # nothing tells which end has closed a connection
        assert lies.LIAR in report.nodes, (role, kind, error.message)
    else:
        assert report.nodes == (lies.LIAR,), (role, kind, error.message)
        assert lies.LIAR in error.message
    return f"{report.cause} {role} {kind}: {error.message}"


def _to_launcher(rng: random.Random, role: str) -> str:
    try:
        state = tell(role, rng)
    except (RunError, WorkloadError):  # a loss that is no number: not told from bad luck
        return "ends"
    for rank in state.ranks:
        if isinstance(rank.failure, SkyctlError):
            assert isinstance(rank.failure, ProtocolError)
            assert rank.failure.node == lies.LIAR == rank.spec.node
            assert len(rank.failure.message) < 1000
            return "refused"
    return "nothing"


@pytest.mark.parametrize("number", range(SAMPLE))
def test_a_sample_of_lies(number: int) -> None:
    play_one(number)


@pytest.mark.parametrize("role", ["helper", "owner"])
@pytest.mark.parametrize("at", range(1, 8))
def test_who_sends_numbers_that_are_none_is_named_alone(role: str, at: int) -> None:
    """No matter who notices, and how far they were passed on: gradients, weights or counts of samples."""
    outcome = _play(ROLES[role], Liar(random.Random(0), "nan", at))
    found = blame(ROLES[role], outcome)
    assert found is not None, outcome
    error, report = found
    assert (report.cause, report.nodes) == ("lost", (lies.LIAR,)), error.message


@pytest.mark.attack
@pytest.mark.parametrize("first", range(SAMPLE, LIES, PART))
def test_lies(first: int) -> None:
    for number in range(first, min(LIES, first + PART)):
        try:
            play_one(number)
        except Exception as exc:
            raise AssertionError(f"lie {number}: {exc}") from exc


def test_the_stories_are_true() -> None:
    """The launcher takes the messages that the lies are made of as they are."""
    for role in ROLES:
        state, liar = make_attempt(ROLES[role]), ROLES[role].liar
        for message in events_of(role)[:-2]:
            say(state, liar, message)
            assert state.ranks[liar].failure is None, state.ranks[liar].failure
        assert state.ranks[liar].result is not None
