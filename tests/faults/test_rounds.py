"""Rounds of owners on a small cluster of this machine's processes: owners that are killed or lost, a launcher
that is killed, a run that is stopped and goes on."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ..helpers.processes import left_of_state
from ..helpers.runs import Run, losses_of

SIZES = ("--batch-size", "8", "--microbatches", "4")
ROUNDS, EVERY = 18, 3
LAYERS = 7
PLANS = {
    "owners": ("--local-steps", "2,1,2", "--owners", "a,b,c+d", "--prox-mu", "0.1"),
    "int8": ("--local-steps", "2,1,2", "--owners", "a,b,c+d", "--sync-format", "int8", "--outer-lr", "0.7"),
    "few": ("--local-steps", "2", "--owners", "a,b,c+d", "--clients-per-round", "2"),
    "common": ("--local-steps", "2", "--limit", "a,b,c"),
}
TRAIN = '''\
import time
from contextlib import suppress
from pathlib import Path

import torch
from torch import nn

LIE = Path("LIE_FILE")


def lie():
    """Once, where that file is: says that the run ends with this round."""
    from skyctl.worker.rounds import weight_average

    honest = weight_average._GroupAverage.agree

    def agree(self, end):
        with suppress(FileNotFoundError):
            LIE.unlink()
            end = weight_average.ENDS
        return honest(self, end)

    weight_average._GroupAverage.agree = agree


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        time.sleep(0.004)
        return x + torch.tanh(self.linear(x))


def model():
    return [Layer() for _ in range(6)] + [nn.Linear(8, 3)]


def example(batch_size):
    return torch.zeros(batch_size, 8), torch.arange(batch_size) % 3


def data(batch_size, seed, OWNER):
    lie()
    generator = torch.Generator().manual_seed(100 * seed + MIX)
    while True:
        yield (
            torch.randn(batch_size, 8, generator=generator),
            torch.randint(3, (batch_size,), generator=generator),
        )


def optimizer(parameters):
    return torch.optim.SGD(parameters, lr=0.05)
'''


@pytest.fixture(scope="module")
def nodes(another: Callable[..., Any]) -> Any:
    """Four nodes, and plans of rounds."""
    made = another("a", "b", "c", "d")
    node = "  - {{name: {name}, transport: local, threads: 1, memory_gib: 2}}\n"
    lines = "".join(node.format(name=name) for name in "abcd")
    (made.folder / "cluster.yaml").write_text(f"name: here\nnodes:\n{lines}")
    text = TRAIN.replace("LIE_FILE", str(made.folder / "lie"))
    made.train(text.replace("OWNER", "owner").replace("MIX", "sum(map(ord, owner))"))
    (made.folder / "common.py").write_text(text.replace(", OWNER", "").replace("MIX", "0"))
    for source in ("train.py", "common.py"):
        made.probe_briefly(source, *SIZES, "--links", "none")
    for name, words in PLANS.items():
        source = "common.py" if name == "common" else "train.py"
        made.run_inside("plan", source, *SIZES, *words, "-o", f"{name}.json")
    return made


@pytest.fixture(scope="module")
def losses(nodes: Any) -> dict[str, list[float]]:
    """By plan, of a run that nothing happens to, and that writes no checkpoints.

    But with int8, where what rounding loses is dropped at each.
    """
    calm = {name: ("--checkpoint-every", str(EVERY if name == "int8" else 0)) for name in PLANS}
    words = ("--steps", str(ROUNDS), "--json")
    return {
        name: losses_of(nodes.run_inside("launch", f"{name}.json", *calm[name], *words, code=0))
        for name in PLANS
    }


@pytest.fixture(autouse=True)
def _ends(nodes: Any) -> Iterator[None]:
    """A test that fails half-way leaves no run behind."""
    yield
    nodes.end()


def launch(nodes: Any, plan: str, *words: str) -> Run:
    run: Run = nodes.launch(f"{plan}.json", "--steps", str(ROUNDS), "--checkpoint-every", str(EVERY), *words)
    return run


@pytest.mark.slow
def test_an_owners_machines_are_a_pipeline_and_figures_are_by_owner(
    nodes: Any, losses: dict[str, list[float]]
) -> None:
    plan = json.loads((nodes.folder / "owners.json").read_text())
    assert [len(pipeline["stages"]) for pipeline in plan["pipelines"]] == [1, 1, 2]
    nodes.run_inside("verify", "owners.json")
    told = nodes.run_inside("launch", "owners.json", "--dry-run", "--steps", "9", code=0).stdout
    assert "rank 3 on" in told
    assert "9 rounds" in told
    run = launch(nodes, "few")
    said = run.end()
    assert f"launch: round {ROUNDS} · loss" in said.stderr
    assert "launch: step" not in said.stderr
    run.is_as(losses["few"], 1)
    for line in run.steps:
        owners = line["owners"]
        assert set(owners) == {"a", "b", "c+d"}
        assert sorted(one["local_steps"] for one in owners.values()) == [0, 2, 2]
        total = sum(one["samples"] for one in owners.values())
        mean = sum(one["samples"] * one.get("loss", 0.0) for one in owners.values()) / total
        assert line["loss"] == pytest.approx(mean)
        assert line["loss_variance"] >= 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("plan", "node"),
    [
        ("int8", "d"),
        pytest.param("owners", "d", marks=pytest.mark.matrix),
        pytest.param("owners", "a", marks=pytest.mark.matrix),
        pytest.param("few", "b", marks=pytest.mark.matrix),
        pytest.param("common", "b", marks=pytest.mark.matrix),
    ],
)
def test_a_rank_is_killed_and_the_round_is_made_again(
    nodes: Any, losses: dict[str, list[float]], plan: str, node: str
) -> None:
    run = launch(nodes, plan).wait_for(2 * EVERY + 1)
    os.kill(run.rank(node), signal.SIGKILL)
    run.end()
    first, second = run.state["attempts"]
    assert second["devices"] == first["devices"]
    assert second["from_step"] >= 2 * EVERY
    run.is_as(losses[plan], 2)
    assert left_of_state(nodes.state) == []


@pytest.mark.matrix
def test_owners_are_killed_at_ten_random_moments(nodes: Any, losses: dict[str, list[float]]) -> None:
    run = launch(nodes, "few", "--max-restarts", "12")
    attempts = run.kill_at_random("abcd", 25)
    assert attempts > 1
    run.is_as(losses["few"], attempts)
    assert left_of_state(nodes.state) == []


@pytest.mark.slow
@pytest.mark.parametrize("node", [*(pytest.param(node, marks=pytest.mark.matrix) for node in "ab"), "d"])
def test_an_owner_that_is_lost_leaves_with_its_data(
    nodes: Any, losses: dict[str, list[float]], node: str
) -> None:
    """The others go on from the newest checkpoint; of c and d both leave."""
    run = launch(nodes, "owners")
    runs = Path(run.skyctl.env["XDG_CACHE_HOME"]) / "skyctl" / "runs"
    run.until(
        lambda: any(
            len(list(step.glob("layer-*.safetensors"))) == LAYERS
            for other in "bcd"
            for step in runs.glob(f"{run.id}@{other}/step-*")
        )
    )
    os.kill(run.agent(node), signal.SIGKILL)
    assert f"node {node} was lost" in run.end().stderr
    second = run.state["attempts"][1]
    left = {"a", "b", "c+d"} - {next(name for name in ("a", "b", "c+d") if node in name)}
    assert set(run.steps[-1]["owners"]) == left
    assert second["from_step"] >= EVERY
    assert (run.state["status"], len(run.steps)) == ("done", ROUNDS), run.told()
    run.loses(run.steps[: second["from_step"]], losses["owners"])
    assert left_of_state(nodes.state) == []


@pytest.mark.slow
def test_the_last_device_of_common_rounds_goes_on_alone(nodes: Any) -> None:
    run = launch(nodes, "common", "--max-restarts", "9").wait_for(EVERY + 1)
    for node in "bc":
        os.kill(run.agent(node), signal.SIGKILL)
    err = " ".join(run.end().stderr.split())
    assert "a/cpu:0 alone is left that can hold the whole model: it goes on with rounds of 2 local" in err
    assert run.state["attempts"][-1]["devices"] == ["a/cpu:0"]
    assert (run.state["status"], len(run.steps)) == ("done", ROUNDS), run.told()
    assert left_of_state(nodes.state) == []


@pytest.mark.slow
def test_an_end_that_nobody_has_asked_for_is_no_end(nodes: Any, losses: dict[str, list[float]]) -> None:
    """Told by a rank to the others; the run's supervisor can't know what the one before has asked for."""
    steps = 150
    run: Run = nodes.launch("common.json", "--steps", str(steps), "--checkpoint-every", "1000").wait_for(4)
    run.child.kill()
    run.attach()
    run.more(1)
    (nodes.folder / "lie").touch()
    run.end()
    assert (run.state["status"], len(run.state["attempts"]), len(run.steps)) == ("done", 2, steps), run.told()
    run.loses(run.steps, losses["common"])
    assert "all ranks ended before the run's last step" in run.state["attempts"][1]["why"]
    assert left_of_state(nodes.state) == []


@pytest.mark.slow
def test_a_stopped_run_goes_on_with_the_rounds_that_it_would_have_made(
    nodes: Any, losses: dict[str, list[float]]
) -> None:
    long = ("--steps", "1000", "--checkpoint-every", "1000")
    run = nodes.launch("owners.json", *long).wait_for(4)
    run.child.kill()
    [stopped] = json.loads(nodes.run_inside("stop", run.id, "--json", code=0).stdout)["runs"]
    assert stopped["status"] == "stopped"
    run.is_stopped()
    run.loses(run.steps, losses["owners"])
    more = max(1, ROUNDS - len(run.steps))
    words = ("--resume", run.id, "--steps", str(more))
    refused = " ".join(nodes.run_inside("launch", "few.json", *words, code=2).stderr.split())
    assert f"run {run.id} has 2 of a, 1 of b, 2 of c+d, and goes on as it has begun" in refused
    assert "--trace draws single steps" in nodes.run_inside("launch", *words, "--trace", code=2).stderr
    done = nodes.run_inside("launch", "--resume", run.id, "--steps", str(more), "--json", code=0)
    assert "going on after round " in done.stderr
    found = losses_of(done)
    assert found[:ROUNDS] == pytest.approx(losses["owners"][: len(found)], rel=1e-5)
    assert left_of_state(nodes.state) == []
