"""Runs whose sums are applied a step later, on this machine's processes: killed ranks, and stopped runs.

Their losses are those of a run that nothing happens to, with checkpoints after the same steps.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from ..helpers.commands import run_here
from ..helpers.hybrid_plans import hybrid_plan, summed_at
from ..helpers.processes import left_of_state
from ..helpers.runs import Run, losses_of
from .test_data_plans import EVERY, HYBRIDS, SIZES, STEPS, TRAIN, launch

DELAYED = ("--parallel", "data", "--sync-delay", "1", "--undelayed-steps", "2")
SUM = """\
    from skyctl.worker.updates.delayed_sync import DelayedSync
    from skyctl.worker.sums.sum_work import SumWork

    finish, scatter, steps = DelayedSync.change_over, SumWork.scatter, []

    def finish_or_die(self, *words, **more):
        steps.append(0)
        die_if_asked("sum", len(steps) + 4)
        return finish(self, *words, **more)

    def scatter_or_die(self, *words):
        "The sum of a step, as the next one computes."
        die_if_asked("flight", len(steps) + 4)
        return scatter(self, *words)

    DelayedSync.change_over, SumWork.scatter = finish_or_die, scatter_or_die


def die_if_asked(fault, count):
    try:
        asked = count > FAULT_STEP and FAULT.read_text() == f"{fault} {own_node()}"
    except FileNotFoundError:
        return
    if asked:
        FAULT.unlink()
        os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture(scope="module")
def nodes(another: Callable[..., Any]) -> Any:
    """Four nodes, and plans with a delay: four holders, three and a helper, two pipelines of two stages."""
    made = another("a", "b", "c", "d")
    node = "  - {{name: {name}, transport: local, threads: 1, memory_gib: 2}}\n"
    lines = "".join(node.format(name=name) for name in "abcd")
    (made.folder / "cluster.yaml").write_text(f"name: here\nnodes:\n{lines}")
    start, stop = TRAIN.index("    from skyctl"), TRAIN.index("class Layer")
    text = f"{TRAIN[:start]}{SUM}\n\n{TRAIN[stop:]}"
    counted = "        self.count = getattr(self, 'count', 0) + 1\n        die_if_asked('die', self.count)\n"
    made.train(text.replace("        time.sleep(0.01)\n", f"        time.sleep(0.01)\n{counted}"))
    made.probe_briefly("train.py", *SIZES, "--links", "none")
    for name, shares in {"four": ("a=1,b=1,c=1,d=1",), "three": ("a=2,b=1,c=1", "--helper", "d")}.items():
        words = ("plan", "train.py", *SIZES, *DELAYED, "--assign", *shares, "-o", f"{name}.json")
        made.run_inside(*words)
    four = json.loads((made.folder / "four.json").read_text())
    rhythm = four["problem"]["rhythm"]
    assert (rhythm["delay"], rhythm["undelayed_steps"]) == (1, 2)
    hybrid = hybrid_plan(four, HYBRIDS["hybrid"])
    (made.folder / "hybrid.json").write_text(json.dumps(hybrid))
    helped = summed_at(json.loads((made.folder / "three.json").read_text()), "d/cpu:0")
    (made.folder / "three.json").write_text(json.dumps(helped))
    return made


@pytest.fixture(scope="module")
def losses(nodes: Any) -> list[float]:
    calm = ("--steps", str(STEPS), "--checkpoint-every", str(EVERY), "--json")
    return losses_of(nodes.run_inside("launch", "four.json", *calm, code=0))


@pytest.fixture(autouse=True)
def _ends(nodes: Any) -> Iterator[None]:
    """A test that fails half-way leaves no run behind, and no fault."""
    yield
    nodes.end()
    nodes.fault.unlink(missing_ok=True)


@pytest.mark.slow
def test_a_delay_changes_what_is_trained(nodes: Any, losses: list[float]) -> None:
    """Forms do not: those that are killed below are held against the same losses."""
    words = ("--steps", str(STEPS), "--checkpoint-every", str(EVERY), "--json")
    run = nodes.launch("four.json", *words[:-1])
    assert "(a delay of one step: changes training; without it" in run.end().stdout
    measured = json.loads((run.folder / "measurement.json").read_text())
    assert [step["loss"] for step in measured["steps"]] == losses, "to the last bit"
    assert measured["sync_s"] is not None
    plain = json.loads((nodes.folder / "four.json").read_text())
    del plain["problem"]["rhythm"]
    (nodes.folder / "plain.json").write_text(json.dumps(plain))
    undelayed = losses_of(nodes.run_inside("launch", "plain.json", *words, code=0))
    assert undelayed[:3] == losses[:3], "the fourth step is the first without the gradients of the third"
    assert undelayed != pytest.approx(losses, rel=1e-4)
    assert left_of_state(nodes.state) == []


@pytest.mark.matrix
@pytest.mark.parametrize("plan", ["four", "hybrid"])
def test_a_holder_is_killed(nodes: Any, losses: list[float], plan: str) -> None:
    nodes.fault.write_text("die c")
    run = launch(nodes, plan, "--ignore-changes")
    err = run.end().stderr
    run.is_as(losses, 2)
    assert "on c/cpu:0 (node c" in err
    first, second = run.state["attempts"]
    assert second["devices"] == first["devices"]
    assert second["from_step"] >= 2 * EVERY
    assert left_of_state(nodes.state) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("plan", "faults"),
    [
        pytest.param("four", ["sum b"], marks=pytest.mark.matrix),
        pytest.param("four", ["flight c", "sum a", "flight d"], marks=pytest.mark.matrix),
        ("hybrid", ["flight d", "flight a", "sum b"]),
    ],
    ids=["once", "one attempt after another", "of a hybrid"],
)
def test_holders_are_killed_as_they_change_over_or_a_sum_is_in_flight(
    nodes: Any, losses: list[float], plan: str, faults: list[str]
) -> None:
    run = launch(nodes, plan, "--ignore-changes")
    for attempt, fault in enumerate(faults, start=1):
        run.begins(attempt)
        nodes.fault.write_text(fault)
        run.until(lambda: not nodes.fault.exists())
    run.end()
    run.is_as(losses, len(faults) + 1)
    assert left_of_state(nodes.state) == []


@pytest.mark.matrix
@pytest.mark.parametrize("plan", ["four", "hybrid"])
def test_two_at_once_and_then_one_before_its_attempt_has_made_a_step(
    nodes: Any, losses: list[float], plan: str
) -> None:
    """CI has the attempts one after another above, and two at once in ``test_leaving_ranks.py``."""
    run = launch(nodes, plan, "--ignore-changes").wait_for(EVERY + 2)
    for rank in [run.rank(node) for node in "bd"]:
        os.kill(rank, signal.SIGKILL)
    run.begins(2)
    os.kill(run.rank("c"), signal.SIGKILL)
    run.begins(3).more()
    for rank in [run.rank(node) for node in "ac"]:
        os.kill(rank, signal.SIGKILL)
    run.end()
    run.is_as(losses, 4)
    assert left_of_state(nodes.state) == []


@pytest.mark.slow
def test_a_helper_is_killed(nodes: Any, losses: list[float]) -> None:
    run = launch(nodes, "three").wait_for(2 * EVERY + 1)
    os.kill(run.rank("d"), signal.SIGKILL)
    run.end()
    run.is_as(losses, 2)
    assert left_of_state(nodes.state) == []


@pytest.mark.matrix
@pytest.mark.parametrize("plan", ["four", "three", "hybrid"])
def test_ranks_are_killed_at_ten_random_moments(nodes: Any, losses: list[float], plan: str) -> None:
    run = launch(nodes, plan, "--max-restarts", "12")
    attempts = run.kill_at_random("abcd", 25)
    assert attempts > 1
    run.is_as(losses, attempts)
    assert left_of_state(nodes.state) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    "plan", [*(pytest.param(plan, marks=pytest.mark.matrix) for plan in ("four", "three")), "hybrid"]
)
def test_a_stopped_run_ends_with_one_step_for_all_and_goes_on(nodes: Any, plan: str) -> None:
    long = ("--steps", "1000", "--checkpoint-every", "1000", "--ignore-changes")
    run: Run = nodes.launch(f"{plan}.json", *long).wait_for(9)
    if plan == "four":
        run.child.interrupt()
        run.end(130)
    else:
        [stopped] = json.loads(nodes.run_inside("stop", run.id, "--json", code=0).stdout)["runs"]
        assert stopped["status"] == "stopped"
    run.is_stopped()
    done = run.state["step"]
    words = ("--resume", run.id, "--steps", "3", "--checkpoint-every", "1000", "--ignore-changes", "--json")
    again = json.loads(nodes.run_inside("launch", f"{plan}.json", *words, code=0).stdout)
    assert [one["step"] for one in again["steps"]][-1] == done + 2
    assert left_of_state(nodes.state) == []


@pytest.mark.slow
def test_what_does_not_go_with_a_delay_is_refused(
    nodes: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In this process: nothing is begun."""
    monkeypatch.chdir(nodes.folder)
    for name in ("SKYCTL_HOME", "XDG_CACHE_HOME", "NO_COLOR"):
        monkeypatch.setenv(name, nodes.env[name])

    def refused(*words: str) -> str:
        done = run_here(capsys, *words)
        assert done.returncode == 2, done.stderr
        return done.stderr

    plan = ("plan", "train.py", *SIZES, "--sync-delay", "1")
    for words, said in {
        ("--parallel", "pipeline"): "--sync-delay is about what several pipelines sum",
        ("--parallel", "data", "--sync-format", "fixed32"): "fixed32 may have to make a step again",
        ("--parallel", "hybrid", "--sync-format", "fixed32"): "fixed32 may have to make a step again",
    }.items():
        assert said in refused(*plan, *words)
    undelayed = refused("plan", "train.py", *SIZES, "--undelayed-steps", "3")
    assert "goes with --sync-delay 1" in undelayed
    asked = refused("launch", "four.json", "--sync-delay", "1")
    assert "--sync-delay 1 does not go with the plan" in asked
    rounded = json.loads((nodes.folder / "four.json").read_text())
    rounded["sync"]["format"] = rounded["problem"]["sync_format"] = "fixed32"
    (nodes.folder / "rounded.json").write_text(json.dumps(rounded))
    assert "the plan sums as fixed32" in refused("launch", "rounded.json")


@pytest.mark.slow
def test_auto_leaves_one_pipeline_out(nodes: Any) -> None:
    words = ("--parallel", "auto", "--sync-delay", "1", "--time-limit", "8", "-o", "auto.json")
    nodes.run_inside("plan", "train.py", *SIZES, *words)
    made = json.loads((nodes.folder / "auto.json").read_text())
    assert made["problem"]["rhythm"]["delay"] == 1
    [pipeline] = [one for one in made["forms"] if one["parallel"] == "pipeline"]
    assert pipeline["iteration_s"] is None
    assert "--sync-delay" in pipeline["reason"]
    nodes.run_inside("verify", "auto.json")
