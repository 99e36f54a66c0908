"""Going on the next day: with a run that has ended well, on the same cut or others, or from weights alone."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from skyctl.checkpoint.node import safetensors

from ..helpers.commands import brief_probes
from ..helpers.processes import left_of_state
from ..helpers.runs import losses_of

GPT = "gpt:layers=2,hidden=16,heads=2,context=16"
SIZES = ("--batch-size", "8", "--microbatches", "4")
FIRST, MORE = 6, 4


@pytest.fixture(scope="module")
def three(another: Callable[..., Any]) -> Any:
    """Three nodes: plan.json uses the first two, other.json the last two with another cut."""
    made = another("a", "b", "c")
    made.probe_briefly(GPT, *SIZES, "--links", "none")
    for name, assigned in (("plan", "a=0:3,b=3:6"), ("other", "b=0:2,c=2:6")):
        made.run_inside("plan", GPT, *SIZES, "--assign", assigned, "-o", f"{name}.json")
    return made


@pytest.fixture(autouse=True)
def _briefly() -> Iterator[None]:
    """A run from weights alone is probed and planned anew."""
    with brief_probes():
        yield


@pytest.fixture(scope="module")
def at_once(three: Any) -> dict[str, Any]:
    """The measurement of a run of all the steps."""
    words = ("launch", "plan.json", "--steps", str(FIRST + MORE), "--ignore-changes", "--json")
    found: dict[str, Any] = json.loads(three.run_inside(*words, code=0).stdout)
    return found


def first_day(three: Any, *words: str) -> tuple[str, Path]:
    """The id and the folder of a run that has ended well after its first steps."""
    said = ("launch", "plan.json", "--steps", str(FIRST), "--ignore-changes", "--json", *words)
    folder = Path(json.loads(three.run_inside(*said, code=0).stdout)["weights"]).parent
    return folder.name, folder


def resume(three: Any, *words: str) -> Any:
    done = three.run_inside("launch", *words, "--steps", str(MORE), "--ignore-changes", "--json", code=0)
    assert f"going on after step {FIRST}: {MORE} more, to {FIRST + MORE}" in done.stderr
    return done


@pytest.mark.slow
def test_on_the_same_cut_bit_for_bit_until_its_checkpoint_is_removed(
    three: Any, at_once: dict[str, Any], complains: Callable[..., None]
) -> None:
    run_id, folder = first_day(three)
    assert json.loads((folder / "state.json").read_text())["checkpoint"] == FIRST
    assert left_of_state(three.state) == []
    done = resume(three, "--resume", run_id)
    assert losses_of(done) == [step["loss"] for step in at_once["steps"]]
    assert (folder / "weights.safetensors").read_bytes() == Path(at_once["weights"]).read_bytes()
    assert f"skyctl launch --resume {run_id} --steps MORE" in done.stderr

    # without RUN the newest is meant, and it is said which
    listed = three.run_inside("checkpoint", "ls", "--json", code=0)
    assert f"run {run_id}" in listed.stderr
    assert [(one["step"], one["whole"]) for one in json.loads(listed.stdout)["steps"]] == [
        (FIRST + MORE, True)
    ]

    more = ("--resume", run_id, "--steps", str(MORE))
    for given in (("--batch-size", "16"), ("--lr-schedule", "cosine")):
        refused = three.run_inside("launch", *more, *given, code=None)
        complains(refused, 2, " ".join(given), f"skyctl launch {GPT} --init-from {run_id}")
    complains(
        three.run_inside("launch", "--resume", run_id, code=None),
        2,
        f"skyctl launch --resume {run_id} --steps MORE",
    )
    three.run_inside("checkpoint", "rm", run_id, "-y", code=0)
    complains(
        three.run_inside("launch", *more, code=None),
        2,
        "has no checkpoint",
        f"skyctl launch {GPT} --init-from {run_id}",
    )
    assert left_of_state(three.state) == []


@pytest.mark.slow
def test_on_other_nodes_with_another_cut(three: Any, at_once: dict[str, Any]) -> None:
    run_id, folder = first_day(three, "--replicas", "0")
    done = resume(three, "other.json", "--resume", run_id)
    assert losses_of(done) == pytest.approx([step["loss"] for step in at_once["steps"]], rel=1e-5)
    second = json.loads((folder / "state.json").read_text())["attempts"][1]
    assert (second["from_step"], second["devices"]) == (FIRST, ["b/cpu:0", "c/cpu:0"])
    again = three.run_inside(
        "launch", "--resume", run_id, "--steps", "1", "--ignore-changes", "--json", code=0
    )
    assert [one["device"] for one in json.loads(again.stdout)["replicas"]] == ["b/cpu:0", "c/cpu:0"]
    assert left_of_state(three.state) == []


@pytest.mark.slow
def test_without_the_nodes_that_have_it_nothing_is_begun_anew(
    three: Any, complains: Callable[..., None]
) -> None:
    run_id, folder = first_day(three, "--replicas", "0")
    text = (three.folder / "cluster.yaml").read_text()
    left = [line for line in text.splitlines(keepends=True) if '"a"' not in line]
    (three.folder / "left.yaml").write_text("".join(left))
    words = ("launch", "other.json", "--resume", run_id, "--steps", str(MORE), "--ignore-changes")
    done = three.run_inside(*words, "-c", "left.yaml", code=None)
    complains(done, 1, "no checkpoint of run", "its nodes a are not connected", "skyctl checkpoint ls")
    done = three.run_inside("launch", "--resume", run_id, "--ignore-changes", "-c", "cluster.yaml", code=0)
    assert json.loads((folder / "state.json").read_text())["status"] == "done"


@pytest.mark.slow
def test_from_weights_alone_with_twice_the_batch(three: Any, complains: Callable[..., None]) -> None:
    run_id, folder = first_day(three)
    twice = ("launch", GPT, "--batch-size", "16", "--microbatches", "4", "--strategy", "even", "--json")
    still = ("--steps", "1", "--learning-rate", "1e-12", "--checkpoint-every", "0")
    done = three.run_inside(*twice, *still, "--init-from", run_id, code=0)
    weights = Path(json.loads(done.stdout)["weights"])
    known = json.loads((weights.parent / "state.json").read_text())["init_from"]
    assert (known["path"], known["run"]) == (str(folder / "weights.safetensors"), run_id)
    trained = safetensors.load(folder / "weights.safetensors")
    for name, tensor in safetensors.load(weights).items():
        torch.testing.assert_close(tensor, trained[name], rtol=0, atol=1e-9)

    # as a plain state dict of torch's, there and back
    three.run_inside("checkpoint", "export", run_id, "-o", "w.pt", code=0)
    plain = torch.load(three.folder / "w.pt", weights_only=True)
    assert all(torch.equal(plain[name], tensor) for name, tensor in trained.items())
    again = three.run_inside(*twice, *still, "--init-from", "w.pt", code=0)
    assert losses_of(again) == losses_of(done)

    smaller = ("launch", GPT.replace("layers=2", "layers=1"), "--steps", "1", "--init-from")
    for given, said in {
        "w.pt": ("it lacks 3.scores.weight", "it has what the model has not: 3."),
        "nowhere": ("neither a file nor a folder", "no run 'nowhere'"),
        "cluster.yaml": ("ends in .safetensors, .pt",),
    }.items():
        complains(three.run_inside(*smaller, given, code=None), 2, *said)
    assert left_of_state(three.state) == []


@pytest.mark.slow
def test_a_run_that_was_stopped_gives_its_newest_checkpoint(three: Any) -> None:
    run = three.launch("plan.json", "--steps", "100000", "--ignore-changes", "--checkpoint-every", "5")
    run.wait_for(8).child.interrupt()
    run.end(130)
    at = run.state["checkpoint"]
    words = ("launch", "plan.json", "--steps", "1", "--ignore-changes", "--init-from", run.id, "--json")
    done = three.run_inside(*words, code=0)
    state = json.loads((Path(json.loads(done.stdout)["weights"]).parent / "state.json").read_text())
    assert (state["init_from"]["run"], state["init_from"]["step"]) == (run.id, at)
    three.run_inside("checkpoint", "export", run.id, "-o", "stopped.safetensors", code=0)
    assert (three.folder / "stopped.safetensors").read_bytes() == Path(
        state["init_from"]["path"]
    ).read_bytes()
    assert left_of_state(three.state) == []
