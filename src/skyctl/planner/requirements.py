"""The requests of a problem that do not go together: one table, from which every refusal is made."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from skyctl.errors import InputError
from skyctl.records.problem import Problem

SCHEDULES = ("1f1b", "sequential")
"""Schedules in which one stage alone computes one microbatch after the other, as a replica does."""


class Conflict(NamedTuple):
    """Two things that a problem asks for and that can't be had together.

    Attributes:
        applies: whether a problem asks for both.
        words: says so, and why it can't be; formatted with the problem (``p``).
        hint: what to do next.
    """

    applies: Callable[[Problem], object]
    words: str
    hint: str


def _sums_gradients(problem: Problem) -> bool:
    return problem.parallel != "pipeline" and not problem.rhythm.is_rounds


def _replicas(problem: Problem) -> bool:
    """Whether every device that takes part holds all layers, or rounds are made."""
    return problem.parallel == "data" or problem.rhythm.is_rounds


def _hybrid(problem: Problem) -> bool:
    return problem.parallel == "hybrid" and not problem.rhythm.is_rounds


CONFLICTS = (
    Conflict(
        lambda p: p.rhythm.is_stale and p.parallel != "data",
        "with staleness one device holds the weights for others that hold all layers as well; parallel is "
        "{p.parallel}",
        "--parallel data",
    ),
    Conflict(
        lambda p: p.rhythm.delay and p.parallel == "pipeline",
        "a rhythm says when the gradients that several pipelines sum take effect, and one pipeline sums none",
        "--parallel data or hybrid; or leave --sync-delay out",
    ),
    Conflict(
        lambda p: p.parallel == "pipeline" and p.helpers,
        "{p.helpers[0]} is to help others to sum gradients, and one pipeline sums none",
        "--parallel data; or leave the device out of the problem",
    ),
    Conflict(
        lambda p: p.rhythm.is_stale and p.sync not in ("auto", "star"),
        "with --staleness one device that computes holds the weights for all: a star, and not --sync "
        "{p.sync}",
        "leave --sync out",
    ),
    Conflict(
        lambda p: p.rhythm.is_stale and p.helpers,
        "with --staleness the device that holds the weights computes as well, so {p.helpers[0]} can't help",
        "leave --helper out",
    ),
    Conflict(
        lambda p: p.rhythm.is_stale and p.sync_format != "float32",
        "with --staleness gradients and weights travel as float32, not as {p.sync_format}",
        "leave --sync-format out",
    ),
    Conflict(
        lambda p: _replicas(p) and p.schedule not in SCHEDULES,
        "schedule {p.schedule!r} is an order for the stages of a pipeline; where every device holds all "
        "layers, each computes one microbatch after the other",
        "--schedule 1f1b goes with --parallel data (or leave it out)",
    ),
    Conflict(
        lambda p: _replicas(p) and p.objective != "iteration",
        "objective {p.objective!r} looks at a pipeline's slowest stage; --parallel data has none",
        "--objective iteration",
    ),
    Conflict(
        lambda p: p.parallel == "data" and p.helpers and p.sync in ("ring", "star"),
        "a {p.sync} joins devices that hold the layers, so {p.helpers[0]} can't help there",
        "--sync auto or trees; server: a star whose root may be a helper",
    ),
    Conflict(
        lambda p: _hybrid(p) and p.schedule not in SCHEDULES,
        "schedule {p.schedule!r} is not played with several pipelines, whose stages run as in 1f1b",
        "--schedule 1f1b goes with --parallel hybrid (or leave it out)",
    ),
    Conflict(
        lambda p: _hybrid(p) and p.objective != "iteration",
        "objective {p.objective!r} looks at one pipeline's slowest stage; --parallel hybrid has several "
        "pipelines",
        "--objective iteration",
    ),
    Conflict(
        lambda p: _hybrid(p) and p.sync in ("trees", "server"),
        "sync {p.sync!r} is for devices that hold all layers; pipelines sum in rings and stars",
        "--sync auto, ring or star goes with --parallel hybrid",
    ),
    Conflict(
        lambda p: _hybrid(p) and p.helpers,
        "pipelines sum over the devices that hold the layers, so {p.helpers[0]} can't help there",
        "leave --helper out, or --parallel data",
    ),
    Conflict(
        lambda p: _sums_gradients(p) and p.rhythm.delay and p.sync_format == "fixed32",
        "sync format fixed32 may have to make a step again, and with a delay the next one is done by then",
        "--sync-format float32, or leave --sync-delay out",
    ),
)


def require_consistent(problem: Problem) -> None:
    """Raises InputError for the first of ``CONFLICTS`` that a problem has."""
    for conflict in CONFLICTS:
        if conflict.applies(problem):
            raise InputError(conflict.words.format(p=problem), hint=conflict.hint)


def as_planned(problem: Problem) -> Problem:
    """The problem as it is planned: with a parameter server, over a star.

    Raises:
        InputError: it asks for what does not go together.
    """
    require_consistent(problem)
    return problem.model_copy(update={"sync": "star"}) if problem.rhythm.is_stale else problem
