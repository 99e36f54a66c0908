"""Runs struck by faults, as ``benchmarks/chaos.py`` strikes them: samples, and a link that stays down."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
from chaos import play
from surviving.backends import Backend, backend
from surviving.strikes import Strike

pytestmark = pytest.mark.lab
STEPS, LONG = 24, 130
KEEPER_START_S = 60.0
"""For so long a checkpoint replicator's start is waited for on a node that is heard."""


@pytest.fixture(scope="module")
def where() -> Iterator[Backend]:
    with backend("lab") as lab_backend:
        lab_backend.losses = lab_backend.cluster.losses(STEPS)
        yield lab_backend


@pytest.mark.slow
@pytest.mark.parametrize("carrier", ["skyctl", pytest.param("gloo", marks=pytest.mark.matrix)])
def test_two_faults_and_the_run_ends_as_if_there_had_been_none(where: Backend, carrier: str) -> None:
    """A node's link is down for as long as it is believed in, and meanwhile another's rank is killed."""
    strikes = [Strike("link down", "whole", "n2", 5, 0.0, 10.0), Strike("killed", "rank", "n1", 15, 0.0, 0.0)]
    figures = play(where, STEPS, strikes, "--backend", carrier)
    assert figures["ok"], figures
    assert figures["attempts"] > 1
    assert not any(strike.get("missed") for strike in figures["strikes"])


@pytest.mark.matrix
def test_a_node_whose_link_stays_down_is_not_back_and_not_waited_for(where: Backend) -> None:
    """Another try to connect to it is due 15 s after it was given up: the run lasts longer than that."""
    where.losses = where.cluster.losses(LONG)
    figures = play(where, LONG, [Strike("link down", "whole", "n2", 7, 0.0, None)])
    assert figures["ok"], figures
    assert figures["why"] == ["node n2 was lost"]
    assert figures["end_s"] < KEEPER_START_S / 2


@pytest.mark.matrix
def test_replicas_of_the_whole_model_are_struck_in_the_sum() -> None:
    """The link of the one that writes checkpoints goes down as gradients are summed; then one is killed."""
    with backend("lab", "data") as replicas:
        replicas.losses = replicas.cluster.losses(LONG)
        strikes = [
            Strike("link down", "whole", "n1", 40, 0.0, 20.0),
            Strike("killed", "rank", "n2", 60, 0.0, 0.0),
        ]
        figures = play(replicas, LONG, strikes)
    assert figures["ok"], figures
    assert figures["outcome"] == "equal"
    assert figures["why"][0] == "node n1 was lost"
    assert not any(strike.get("missed") for strike in figures["strikes"])
