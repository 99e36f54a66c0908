"""Runs on three local nodes of which one lies once it is told to: what has to come of them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from ..helpers import runs
from ..helpers.commands import Skyctl
from ..helpers.processes import left_of_state
from .backends import LIMIT_S, Over

SIZES = ("--batch-size", "8", "--microbatches", "4")
STEPS = 24
HONEST = ("a", "b")
LIAR = "c"


def write_cluster(folder: Path, lie: str) -> None:
    """The liar's environment has ``LIE``; the others' is empty."""
    node = "  - {{name: {name}, transport: local, threads: 1, memory_gib: 2, env: {{LIE: {lie!r}}}}}\n"
    lines = [node.format(name=name, lie=lie if name == LIAR else "") for name in (*HONEST, LIAR)]
    (folder / "cluster.yaml").write_text(f"name: here\nnodes:\n{''.join(lines)}")


def three_nodes(
    tmp_path_factory: pytest.TempPathFactory, train: str, placement: tuple[str, ...]
) -> Iterator[Skyctl]:
    """The nodes, probed, with ``plan.json`` for ``train``; all honest so far. To be a fixture's generator."""
    folder = tmp_path_factory.mktemp("lying")
    (folder / "work").mkdir()
    made = Skyctl(folder / "work", folder / "state")
    made.env["XDG_CACHE_HOME"] = str(folder / "cache")
    write_cluster(made.folder, "")
    (made.folder / "train.py").write_text(train)
    try:
        made.run("probe", "train.py", *SIZES, "--links", "none")
        made.run("plan", "train.py", *SIZES, *placement, "-o", "plan.json")
        yield made
    finally:
        made.end()


def honest_losses(three: Skyctl) -> list[float]:
    """Of a run in which nobody lies, and that writes no checkpoints."""
    calm = ("--steps", str(STEPS), "--checkpoint-every", "0", "--json")
    return runs.losses_of(three.run("launch", "plan.json", *calm))


def lie_in_a_run(
    three: Skyctl, over: Over, lie: str, plan: str = "plan.json", *more: str
) -> tuple[runs.Run, str]:
    """A run with checkpoints in which the liar tells that lie, to its end, and what its command said.

    One that does not end in time is stopped. ``more``: options of its ``launch``.
    """
    write_cluster(three.folder, lie)
    words = ("--steps", str(STEPS), "--checkpoint-every", "3", "--json", *over.words, *more)
    run = runs.launch(three, plan, *words)
    try:
        err = run.end(timeout_s=LIMIT_S).stderr
    finally:
        over.note(run)
        if run.child.process.poll() is None:
            run.child.kill()
            three.run("stop", run.id, "--now")
    return run, err


def went_on_without_it(run: runs.Run, err: str, losses: list[float]) -> None:
    """The run has ended well on the honest nodes, and says how the liar would be taken back."""
    assert f"node {LIAR} is not taken back unless asked for: skyctl join {run.id} {LIAR}" in err
    run.is_as(losses, 2)
    state = run.state
    assert state["untrusted"] == [LIAR]
    assert {device.partition("/")[0] for device in state["attempts"][1]["devices"]} <= set(HONEST)


def nothing_is_left(three: Skyctl) -> None:
    """No process, and nothing half written."""
    assert runs.left_behind(three) == []
    assert left_of_state(three.state) == []
