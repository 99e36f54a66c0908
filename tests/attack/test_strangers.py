"""Somebody on the same network, at every port that a probe, a check and a run with checkpoints open."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any

import pytest
from tests.attack.backends import GLOO, LIMIT_S, SKYCTL, Over, unpromised
from tests.attack.strangers import Strangers
from tests.helpers import forms, runs
from tests.lab.workload import train_py

SIZES = ("--batch-size", "8", "--microbatches", "4")
OWN, OTHER = "127.0.0.1", "127.0.0.2"
"""The addresses that strangers come from: the peers' own, or another."""
BY_ADDRESS = unpromised("Gloo's listener takes what comes from a peer's own address")
EVERY = ("--steps", "30", "--json", "--checkpoint-every", "10", "--replicas", "1")


@pytest.mark.attack
@pytest.mark.parametrize("encrypt", [(), ("--encrypt",)], ids=["clear", "tls"])
def test_strangers_at_every_port_change_nothing(here: Any, encrypt: tuple[str, ...]) -> None:
    """Probe, plan, check and launch with them there: all as without them, in one attempt."""
    here.run("probe", "train.py", *SIZES, *encrypt, code=0)
    here.run("plan", "train.py", *SIZES, *encrypt, "--strategy", "even", "-o", "plan.json", code=0)
    expected = runs.losses_of(here.run("launch", "plan.json", *EVERY, *encrypt, code=0))
    with Strangers(hold=1100, seed=1) as strangers:
        here.run("probe", "train.py", *SIZES, *encrypt, "--refresh", "--links", "all", code=0)
        here.run("check", code=0)
        probed = len(strangers.ports)
        done = here.run("launch", "plan.json", *EVERY, *encrypt, code=0)
        launched = len(strangers.ports) - probed
    print(f"{strangers.connections} connections to {probed} + {launched} ports")
    assert probed >= 3  # a link, a node with itself, check's own
    assert launched >= 2  # each node's replicator; a pair's port may be open too briefly to be found
    assert runs.losses_of(done) == expected
    was_one_attempt(here)


@pytest.fixture(scope="module")
def three(another: Callable[..., Any]) -> Any:
    made = another(*forms.NODES)
    made.train(train_py(0.004, forms.LAYERS))
    for encrypt in ((), ("--encrypt",)):
        made.run("probe", "train.py", *forms.SIZES, "--links", "none", *encrypt, code=0)
    return made


@pytest.mark.attack
@pytest.mark.parametrize(
    ("over", "source"),
    [(SKYCTL, OWN), (GLOO, OTHER), pytest.param(GLOO, OWN, marks=BY_ADDRESS)],
    indirect=["over"],
    ids=["skyctl", "gloo", "gloo from a peer's address"],
)
@pytest.mark.parametrize("name", forms.FORMS)
def test_strangers_at_the_ports_of_a_run_of_any_form_change_nothing(
    three: Any, name: str, over: Over, source: str
) -> None:
    """Over skyctl under TLS, as Gloo can't be."""
    over.attempt = f"strangers at every port, from {'a peer' if source == OWN else 'another'}'s address"
    form, encrypt = forms.FORMS[name], ("--encrypt",) if over.backend == SKYCTL else ()
    three.run("plan", "train.py", *forms.SIZES, *encrypt, *form.plan, "-o", "plan.json", code=0)
    form.finish(three.folder / "plan.json")
    words = ("plan.json", *EVERY, *over.words)
    expected = runs.losses_of(three.run("launch", *words, code=0))
    with Strangers(hold=1100, seed=1, source=source) as strangers:
        run = runs.launch(three, *words)
        try:
            found = runs.losses_of(run.end(timeout_s=LIMIT_S))
        finally:
            over.note(run)
            if run.child.process.poll() is None:
                run.child.kill()
                three.run("stop", run.id, "--now")
    assert len(strangers.ports) >= 2
    assert len(found) == len(expected)
    assert all(map(math.isfinite, found))
    assert form.needs is None or found == expected
    was_one_attempt(three)


def was_one_attempt(here: Any) -> None:
    newest = max((here.state / "runs").glob("*/state.json"), key=lambda path: path.stat().st_mtime)
    assert len(json.loads(newest.read_text())["attempts"]) == 1
    assert runs.left_behind(here) == []
