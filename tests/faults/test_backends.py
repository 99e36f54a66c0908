"""Runs over both backends: whose each socket of a rank is, and what becomes of a kill and of a cut."""

from __future__ import annotations

import itertools
import json
import os
import signal
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from skyctl.records.cluster import node_of
from skyctl.records.plan import Plan
from skyctl.run.sum_spec import equal_ring

from ..helpers import forms
from ..helpers.processes import left_of_state
from ..helpers.runs import Run, launch, losses_of
from ..helpers.sockets import (
    ESTABLISHED,
    LISTENING,
    Socket,
    admitted,
    cut_connections,
    maker,
    sockets_of,
)
from ..lab.workload import train_py

matrix = pytest.mark.matrix
STEPS = 40


@pytest.fixture(scope="module")
def three(another: Callable[..., Any]) -> Any:
    made = another(*forms.NODES)
    made.train(train_py(0.004, forms.LAYERS))
    made.probe_briefly("train.py", *forms.SIZES, "--links", "none")
    return made


@pytest.mark.parametrize(
    ("form", "backend"),
    [
        *(
            pytest.param(form, over, marks=matrix)
            for form in ("pipeline", "data")
            for over in ("skyctl", "gloo")
        ),
        ("hybrid", "skyctl"),
        ("hybrid", "gloo"),
    ],
)
def test_each_is_of_a_planned_pair_or_the_session(three: Any, form: str, backend: str) -> None:
    plan = planned(three, form)
    long = ("--steps", "100000", "--checkpoint-every", "0")  # at a checkpoint it may take another plan
    run = launch(three, plan.name, *long, "--backend", backend, "--json").wait_for(3)
    try:
        found, unexplained = explained(run, backend)
        again, unexplained_later = explained(run.more(3), backend)
    finally:
        run.child.interrupt()
    run.end(130)
    assert not [*unexplained, *unexplained_later]
    pairs = neighbours(plan)
    ends = {(f"{one}: with {other}"): 1 for pair in pairs for one, other in (pair, pair[::-1])}
    expected = ends | {f"{node}: session": 1 for node in forms.NODES}
    if backend == "gloo":
        expected |= {f"{node}: listens, filtered": 1 for node in sorted(set(itertools.chain(*pairs)))}
    assert dict(found) == dict(again) == expected
    assert left_of_state(three.state) == []


def test_over_gloo_a_rank_is_killed_and_then_a_connection_cut(three: Any) -> None:
    """Each ends its attempt with both ends' nodes named, and the next goes on with the same losses."""
    plan = planned(three, "hybrid")
    words = (plan.name, "--backend", "gloo", "--json", "--checkpoint-every")
    losses = losses_of(three.run_inside("launch", *words, "0", "--steps", str(STEPS), code=0))
    run = launch(three, *words, "5", "--steps", str(3 * STEPS)).wait_for(8)  # it lasts for two strikes
    os.kill(run.rank("n2"), signal.SIGKILL)
    run.begins(2).wait_for(16)
    one, other = min(neighbours(plan))
    assert cut_connections(run.rank(one), run.rank(other)) == 1
    run.end()
    run.is_as(losses, 3)
    killed, cut, _ = (attempt["error"] or "" for attempt in run.state["attempts"])
    assert "node n2" in killed
    assert "SIGKILL" in killed
    assert f"node {one}" in cut or f"node {other}" in cut
    assert left_of_state(three.state) == []


def test_over_gloo_a_ring_goes_round_in_any_order(three: Any) -> None:
    """The best ring need not be in the order of ranks, and a rank still speaks for itself alone."""
    words = (*forms.SIZES, *forms.FORMS["data"].plan, "--sync", "ring", "-o", "ring.json")
    three.run_inside("plan", "train.py", *words)
    made = json.loads((three.folder / "ring.json").read_text())
    first, second, third = (pipeline["stages"][0]["device"] for pipeline in made["pipelines"])
    turned = {first: first, second: third, third: second}
    for route in made["sync"]["groups"][0]["routes"]:
        route["root"] = turned[route["root"]]
        for way in ("up", "down"):
            route[way] = [[turned[one] for one in edge] for edge in route[way]]
    assert equal_ring(Plan.model_validate(made)) is not None
    losses = []
    for name in ("ring.json", "turned.json"):
        (three.folder / "turned.json").write_text(json.dumps(made))
        done = three.run_inside(
            "launch", name, "--steps", "3", "--backend", "gloo", "--max-restarts", "0", "--json", code=0
        )
        losses.append(losses_of(done))
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)


def planned(three: Any, form: str) -> Path:
    """A plan of that form, made once."""
    plan: Path = three.folder / f"{form}.json"
    if not plan.exists():
        three.run_inside("plan", "train.py", *forms.SIZES, *forms.FORMS[form].plan, "-o", plan.name)
    return plan


def explained(run: Run, backend: str) -> tuple[Counter[str], list[Socket]]:
    """How many sockets of each purpose there are, and those that have none."""
    ranks = {run.rank(node): node for node in forms.NODES}
    held = {pid: sockets_of(pid) for pid in ranks}
    at = {one.here: ranks[one.pid] for row in held.values() for one in row if one.state == ESTABLISHED}
    purposes: Counter[str] = Counter()
    unexplained = []
    for pid, node in ranks.items():
        for one in held[pid]:
            if one.state == ESTABLISHED and one.there in at:
                purposes[f"{node}: with {at[one.there]}"] += 1
            elif one.state == LISTENING and backend == "gloo" and admitted(one) == {"127.0.0.1"}:
                purposes[f"{node}: listens, filtered"] += 1
            elif one.table == "unix" and maker(one) == run.agent(node):
                purposes[f"{node}: session"] += 1
            else:
                unexplained.append(one)
    return purposes, unexplained


def neighbours(plan: Path) -> set[tuple[str, str]]:
    """The pairs of nodes that the plan has a stage boundary or an edge of a sum's route between."""
    made = Plan.model_validate_json(plan.read_text())
    edges = [
        (one.device, other.device)
        for pipeline in made.pipelines
        for one, other in itertools.pairwise(pipeline.stages)
    ]
    for group in made.sync.groups if made.sync else ():
        edges += [(a, b) for route in group.routes for a, b in (*route.up, *route.down)]
    return {(min(map(node_of, edge)), max(map(node_of, edge))) for edge in edges}
