"""Runs of several pipelines that survive on a small cluster of this machine's processes: ranks that are
killed, stop or drift, a launcher that is killed, and checkpoints that plans of any form go on from."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from skyctl.compare.chrome_trace import MEASURED_PID, SIMULATED_PID

from ..helpers.hybrid_plans import Stages, hybrid_plan, summed_at
from ..helpers.processes import left_of_state
from ..helpers.runs import Run, losses_of
from ..helpers.sockets import cut_connections

SIZES = ("--batch-size", "8", "--microbatches", "4")
STEPS, EVERY = 42, 5
LAYERS = 7
PLANS = {
    "four": ("--parallel", "data", "--assign", "a=1,b=1,c=1,d=1"),
    "ring": ("--parallel", "data", "--sync", "ring", "--assign", "a=1,b=1,c=1,d=1"),
    "compressed": (
        *("--parallel", "data", "--assign", "a=1,b=1,c=1,d=1"),
        *("--sync-format", "powersgd:2", "--uncompressed-steps", "3"),
    ),
    "pipeline": ("--assign", "b=0:2,c=2:4,d=4:7"),
    "three": ("--parallel", "data", "--assign", "a=2,b=1,c=1", "--helper", "d"),
    "two": ("--parallel", "data", "--assign", "c=3,d=1"),
}
HYBRIDS: dict[str, list[tuple[Stages, int]]] = {
    "hybrid": [([("a/cpu:0", 0, 3), ("b/cpu:0", 3, 7)], 3), ([("c/cpu:0", 0, 5), ("d/cpu:0", 5, 7)], 1)],
    "mixed": [([("a/cpu:0", 0, 7)], 1), ([("c/cpu:0", 0, 2), ("b/cpu:0", 2, 7)], 3)],
}
TRAIN = """\
import json
import os
import signal
import time
from pathlib import Path

import torch
from torch import nn

FAULT, STATE = Path(os.environ["FAULT"]), Path(os.environ["SKYCTL_HOME"])
FAULT_STEP = 12
"Of the process, counted from 0."


def own_node():
    "As the runs' states tell of this session. (With an environment of their own, nodes could not be forked.)"
    for state in STATE.glob("runs/*/state.json"):
        for told in json.loads(state.read_text())["sessions"]:
            if told["session"] == os.environ.get("SKYCTL_SESSION"):
                return told["node"]


def told():
    "What the test wants, and of which node; another node may have done it meanwhile."
    try:
        return FAULT.read_text()
    except FileNotFoundError:
        return ""


def act():
    "What the test wants of this node, once."
    fault, _, node = told().partition(" ")
    if not node:
        return None
    if node != own_node():
        return None
    FAULT.unlink()
    return fault


def die_in_a_sum():
    from skyctl.worker.sums.gradient_sync import GradientSync

    finish, steps = GradientSync.finish, []

    def finish_or_die(self, **words):
        steps.append(0)
        if len(steps) > FAULT_STEP and act() == "sum":
            os.kill(os.getpid(), signal.SIGKILL)
        return finish(self, **words)

    GradientSync.finish = finish_or_die


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        if self.training and told().startswith("drift") and act():
            with torch.no_grad():
                self.linear.weight.mul_(1.5)
        time.sleep(0.01)
        return x + torch.tanh(self.linear(x))


def model():
    return [Layer() for _ in range(6)] + [nn.Linear(8, 3)]


def data(batch_size, seed):
    die_in_a_sum()
    generator = torch.Generator().manual_seed(seed)
    while True:
        yield (
            torch.randn(batch_size, 8, generator=generator),
            torch.randint(3, (batch_size,), generator=generator),
        )
"""


@pytest.fixture(scope="module")
def nodes(another: Callable[..., Any]) -> Any:
    """Four nodes, and plans of every form for two to four of them."""
    made = another("a", "b", "c", "d")
    node = "  - {{name: {name}, transport: local, threads: 1, memory_gib: 2}}\n"
    lines = "".join(node.format(name=name) for name in "abcd")
    (made.folder / "cluster.yaml").write_text(f"name: here\nnodes:\n{lines}")
    made.train(TRAIN)
    made.probe_briefly("train.py", *SIZES, "--links", "none")
    for name, form in PLANS.items():
        made.run_inside("plan", "train.py", *SIZES, *form, "-o", f"{name}.json")
    for name, pipelines in HYBRIDS.items():
        hybrid = hybrid_plan(json.loads((made.folder / "four.json").read_text()), pipelines, name == "mixed")
        (made.folder / f"{name}.json").write_text(json.dumps(hybrid))
    helped = summed_at(json.loads((made.folder / "three.json").read_text()), "d/cpu:0")
    (made.folder / "three.json").write_text(json.dumps(helped))
    return made


@pytest.fixture(scope="module")
def losses(nodes: Any) -> list[float]:
    """Of a run that nothing happens to, and that writes no checkpoints."""
    calm = ("--steps", str(STEPS), "--checkpoint-every", "0", "--json")
    return losses_of(nodes.run_inside("launch", "four.json", *calm, code=0))


@pytest.fixture(autouse=True)
def _ends(nodes: Any) -> Iterator[None]:
    """A test that fails half-way leaves no run behind, and no fault."""
    yield
    nodes.end()
    nodes.fault.unlink(missing_ok=True)


def launch(nodes: Any, plan: str = "four", *words: str) -> Run:
    run: Run = nodes.launch(f"{plan}.json", "--steps", str(STEPS), "--checkpoint-every", str(EVERY), *words)
    return run


def wait_for_copies(run: Run) -> None:
    """Until another node than the first, which writes them, has all layers of a checkpoint."""
    runs = Path(run.skyctl.env["XDG_CACHE_HOME"]) / "skyctl" / "runs"
    run.until(
        lambda: any(
            len(list(step.glob("layer-*.safetensors"))) == LAYERS
            for node in "bcd"
            for step in runs.glob(f"{run.id}@{node}/step-*")
        )
    )


@pytest.mark.slow
def test_a_holder_is_killed_in_the_sum(nodes: Any, losses: list[float]) -> None:
    nodes.fault.write_text("sum b")
    run = launch(nodes)
    err = run.end().stderr
    run.is_as(losses, 2)
    assert "rank 1 on b/cpu:0 (node b, 127.0.0.1) failed" in err
    assert "ended by SIGKILL" in err
    first, second = run.state["attempts"]
    assert second["devices"] == first["devices"]
    assert second["from_step"] >= 2 * EVERY
    assert left_of_state(nodes.state) == []


@pytest.mark.slow
@pytest.mark.parametrize("what", ["a rank in the sum", pytest.param("a node", marks=pytest.mark.matrix)])
def test_compressed_sums_go_on_as_a_run_that_nothing_happened_to(nodes: Any, what: str) -> None:
    """Residuals are in no checkpoint, and begin anew in both runs wherever one is written."""
    calm = ("--steps", str(STEPS), "--checkpoint-every", str(EVERY), "--json")
    expected = losses_of(nodes.run_inside("launch", "compressed.json", *calm, code=0))
    if what == "a node":
        run = launch(nodes, "compressed")
        wait_for_copies(run)
        os.kill(run.agent("c"), signal.SIGKILL)
    else:
        nodes.fault.write_text("sum b")
        run = launch(nodes, "compressed")
    run.end()
    run.is_as(expected, 2)
    assert left_of_state(nodes.state) == []


@pytest.mark.matrix
def test_connections_are_cut_as_sums_go_over_them(nodes: Any, losses: list[float]) -> None:
    """Of a ring's four routes; tests/lab/test_cut_sums.py cuts trees' over links that take a while."""
    run = launch(nodes, "ring")
    for attempts, (one, other) in enumerate([("b", "c"), ("a", "d")], start=1):
        run.more(EVERY + 1)
        assert cut_connections(run.rank(one), run.rank(other))
        run.begins(attempts + 1)
    run.end()
    run.is_as(losses, 3)
    assert left_of_state(nodes.state) == []


@pytest.mark.matrix
@pytest.mark.parametrize(("fault", "node"), [("SIGKILL", "c"), ("SIGSTOP", "b")])
def test_a_holder_is_killed_or_stopped_as_it_computes(
    nodes: Any, losses: list[float], fault: str, node: str
) -> None:
    run = launch(nodes).wait_for(13)
    os.kill(run.rank(node), getattr(signal, fault))
    err = run.end().stderr
    run.is_as(losses, 2)
    assert f"on {node}/cpu:0 (node {node}" in err
    assert ("ended by SIGKILL" if fault == "SIGKILL" else "has stalled: its node answers") in err
    assert left_of_state(nodes.state) == []


@pytest.mark.matrix
@pytest.mark.parametrize("node", ["a", "c"])
def test_a_node_is_lost_also_the_one_that_writes(nodes: Any, losses: list[float], node: str) -> None:
    """The first holder alone writes checkpoints; the run goes on from the others' copies, as holders."""
    run = launch(nodes)
    wait_for_copies(run)
    os.kill(run.agent(node), signal.SIGKILL)
    assert f"node {node} was lost" in run.end().stderr
    run.is_as(losses, 2)
    second = run.state["attempts"][1]
    assert second["why"] == f"node {node} was lost"
    assert f"{node}/cpu:0" not in second["devices"]
    assert second["from_step"] >= EVERY
    assert left_of_state(nodes.state) == []


@pytest.mark.slow
@pytest.mark.parametrize("node", ["d", pytest.param("a", marks=pytest.mark.matrix)])
def test_a_rank_of_a_hybrid_is_killed(nodes: Any, losses: list[float], node: str) -> None:
    """Its pipeline's other stage and those that it sums with have lost it; all go on, and are traced."""
    run = launch(nodes, "hybrid", "--trace", "--ignore-changes", "--json").wait_for(2 * EVERY + 1)
    os.kill(run.rank(node), signal.SIGKILL)
    done = run.end()
    run.is_as(losses, 2)
    assert f"rank {'abcd'.index(node)} on {node}/cpu:0 (node {node}, 127.0.0.1) failed" in done.stderr
    first, second = run.state["attempts"]
    assert second["devices"] == first["devices"] == [f"{name}/cpu:0" for name in "abcd"]
    assert second["from_step"] >= 2 * EVERY
    trace = json.loads((run.folder / "trace.json").read_text())
    slices = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    for pid in (MEASURED_PID, SIMULATED_PID):
        own = [event for event in slices if event["pid"] == pid]
        forwards = {(e["tid"], e["args"]["microbatch"]) for e in own if e["name"].startswith("forward")}
        assert forwards == {(tid, m) for tid in (1, 2) for m in (0, 1, 2)} | {(3, 3), (4, 3)}
        assert {e["tid"] for e in own if e["name"] == "summing gradients"} == (
            {1, 2, 3, 4} if pid == MEASURED_PID else set()
        )
    assert max(trace["otherData"]["clock_error_s"].values()) < 1.0  # half of the shortest way there and back
    assert left_of_state(nodes.state) == []


@pytest.mark.slow
def test_a_dry_run_of_a_hybrid_says_who_takes_what(nodes: Any) -> None:
    told = nodes.run_inside("launch", "hybrid.json", "--dry-run", "--steps", "9", code=0).stdout
    assert (
        "rank 1 on b/cpu:0: pipeline 0, layers 3–7, 3 of 4 microbatches (1f1b, 1 in flight), 9 steps" in told
    )
    assert (
        "rank 2 on c/cpu:0: pipeline 1, layers 0–5, 1 of 4 microbatches (1f1b, 1 in flight), 9 steps" in told
    )


@pytest.mark.matrix
@pytest.mark.parametrize("node", ["a", "d"])
def test_a_node_of_a_hybrid_is_lost(nodes: Any, losses: list[float], node: str) -> None:
    """Those that are left go on, in any form; a is the only one that writes its layers."""
    run = launch(nodes, "hybrid", "--ignore-changes")
    wait_for_copies(run)
    os.kill(run.agent(node), signal.SIGKILL)
    assert f"node {node} was lost" in run.end().stderr
    run.is_as(losses, 2)
    second = run.state["attempts"][1]
    assert f"{node}/cpu:0" not in second["devices"]
    assert second["from_step"] >= EVERY
    assert left_of_state(nodes.state) == []


@pytest.mark.slow
def test_a_helper_is_killed_and_then_its_node_is_lost(nodes: Any, losses: list[float]) -> None:
    """It holds no layers, so nothing is lost with it: it is started again, then left out."""
    run = launch(nodes, "three").wait_for(2 * EVERY + 1)
    os.kill(run.rank("d"), signal.SIGKILL)
    run.until(lambda: len(run.state["attempts"]) == 2 and run.state["step"] > 3 * EVERY)
    os.kill(run.agent("d"), signal.SIGKILL)
    err = run.end().stderr
    run.is_as(losses, 3)
    assert "rank 3 on d/cpu:0 (node d, 127.0.0.1) failed" in err
    first, second, third = run.state["attempts"]
    assert first["devices"] == second["devices"] == [f"{name}/cpu:0" for name in "abcd"]
    assert third["why"] == "node d was lost"
    assert "d/cpu:0" not in third["devices"]
    assert second["from_step"] >= 2 * EVERY
    assert third["from_step"] >= 3 * EVERY
    assert left_of_state(nodes.state) == []


@pytest.mark.matrix
def test_where_no_node_left_holds_the_model_a_pipeline_goes_on(nodes: Any, losses: list[float]) -> None:
    """The first node is lost, and by the plan's figures no other has the memory for all layers."""
    plan = json.loads((nodes.folder / "four.json").read_text())
    state_bytes = sum(layer["state_bytes"] for layer in plan["problem"]["layers"])
    for device in plan["problem"]["devices"]:
        if device["id"] != "a/cpu:0":
            device["memory_bytes"] = device["reserved_bytes"] + 0.95 * state_bytes
    (nodes.folder / "tight.json").write_text(json.dumps(plan))
    run = launch(nodes, "tight", "--ignore-changes")
    wait_for_copies(run)
    os.kill(run.agent("a"), signal.SIGKILL)
    err = run.end().stderr
    run.is_as(losses, 2)
    assert "no node that is left holds the whole model: going on with a pipeline" in err
    assert left_of_state(nodes.state) == []


@pytest.mark.matrix
@pytest.mark.parametrize("plan", ["four", "hybrid"])
def test_the_launcher_is_killed_and_attach_goes_on(nodes: Any, losses: list[float], plan: str) -> None:
    run = launch(nodes, plan, "--ignore-changes").wait_for(9)
    run.child.kill()
    run.attach()
    run.end()
    run.is_as(losses, 1)
    assert left_of_state(nodes.state) == []


@pytest.mark.slow
def test_a_run_with_a_helper_is_taken_over_and_stopped(nodes: Any, losses: list[float]) -> None:
    long = ("--steps", "1000", "--checkpoint-every", "1000")  # it would end by itself before it is stopped
    run = nodes.launch("three.json", *long).wait_for(9)
    run.child.kill()
    [stopped] = json.loads(nodes.run_inside("stop", run.id, "--json", code=0).stdout)["runs"]
    assert stopped["status"] == "stopped"
    run.is_stopped()
    run.loses(run.steps, losses)
    assert left_of_state(nodes.state) == []


@pytest.mark.matrix
def test_a_stopped_run_goes_on_in_any_form_from_its_last_checkpoint(nodes: Any) -> None:
    """Four holders until they are stopped, then a pipeline until it is, then four holders to the end."""
    long = ("--steps", "2000", "--checkpoint-every", "9000")  # a stop takes a while, in which steps go on
    run = nodes.launch("four.json", *long, "--detach")
    kept = [0]
    for plan, steps in (("pipeline", "2000"), ("four", "10")):
        run.more(7)
        [stopped] = json.loads(nodes.run_inside("stop", run.id, "--json", code=0).stdout)["runs"]
        assert stopped["status"] == "stopped"
        run.is_stopped()
        kept.append(run.state["checkpoint"])
        words = ("--resume", run.id, "--steps", steps, "--ignore-changes", "--detach")
        nodes.run_inside("launch", f"{plan}.json", *words, code=0)
    run.attach()
    run.end()
    calm = ("--steps", str(kept[-1] + 10), "--checkpoint-every", "0", "--json")
    losses = losses_of(nodes.run_inside("launch", "four.json", *calm, code=0))
    run.is_as(losses, 3)
    assert len(run.steps) == len(losses)
    assert [attempt["from_step"] for attempt in run.state["attempts"]] == kept
    assert left_of_state(nodes.state) == []


@pytest.mark.slow
def test_any_form_goes_on_from_any_others_checkpoint(nodes: Any, losses: list[float]) -> None:
    """Four holders, a pipeline of three nodes, two hybrids, two holders: each some steps of one run."""
    part = STEPS // 5
    words = ("--checkpoint-every", str(EVERY), "--ignore-changes", "--json")
    done = nodes.run_inside("launch", "four.json", "--steps", str(part), *words, code=0)
    run_id = Path(json.loads(done.stdout)["weights"]).parent.name
    for plan in ("pipeline", "hybrid", "mixed", "two"):
        done = nodes.run_inside(
            "launch", f"{plan}.json", "--resume", run_id, "--steps", str(part), *words, code=0
        )
    assert losses_of(done) == pytest.approx(losses[: 5 * part], rel=1e-5)
    assert left_of_state(nodes.state) == []


@pytest.mark.matrix
def test_a_holder_that_drifts_is_named(nodes: Any) -> None:
    nodes.fault.write_text("drift c")
    run = launch(nodes)
    err = run.end().stderr
    assert f"after {EVERY} steps layer 0 on c/cpu:0 has drifted from that on a/cpu:0, which is kept" in err
    assert err.count("has drifted from") == 1
    assert run.state["status"] == "done"
    assert left_of_state(nodes.state) == []
