"""Adapters trained on chats over real sshd: each node has a home of its own, and one of them is lost."""

from __future__ import annotations

import itertools
import json
import os
import random
import signal
import sys
from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from ..helpers.commands import Skyctl
from ..helpers.processes import left_of_state
from ..helpers.runs import Run, losses_of
from ..helpers.runs import launch as launch_run
from ..remote.conftest import Sshd, gone, processes_with, serve_sshd
from ..workload.datasets.record_folders import answers, load, model_folder, write_lines
from ..workload.hf import hub_folders

pytest.importorskip("peft")

pytestmark = pytest.mark.filterwarnings(  # peft asks for it
    "ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"
)

CHATS, BATCH, STEPS, EVERY, RATE = 240, 4, 200, 20, 2e-2
"""An epoch has some 31 steps; in the third one the answers are known by heart, and held-out losses grow."""
MODEL, CONTEXT, LORA = "tiny", "context=80", "r=16,alpha=32"
DATA = ("--data", "chats.jsonl")
SIZES = (*DATA, "--lora", LORA, "--batch-size", str(BATCH), "--microbatches", "2")
LENGTH = ("--learning-rate", str(RATE), "--eval-every", str(EVERY), "--steps", str(STEPS))
LAYERS = 7


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[Mapping[str, Sshd]]:
    """By name three servers, with homes and keys of their own."""
    with ExitStack() as stack:
        servers = {}
        for name in "abc":
            (tmp_path / name).mkdir()
            servers[name] = stack.enter_context(serve_sshd(tmp_path / name))
        yield servers


@pytest.fixture
def skyctl(tmp_path: Path, nodes: Mapping[str, Sshd]) -> Iterator[Skyctl]:
    """A folder with a cluster of these nodes, a tiny Llama, chats, and a plan for all three."""
    (tmp_path / "work").mkdir()
    made = Skyctl(tmp_path / "work", tmp_path / "state")
    told = [
        sshd.node(name=name, threads=1, python=sys.executable).model_dump(mode="json", exclude_unset=True)
        for name, sshd in nodes.items()
    ]
    keys = [f"[127.0.0.1]:{sshd.port} {sshd.public('ed25519')}\n" for sshd in nodes.values()]
    (made.folder / "cluster.yaml").write_text(json.dumps({"nodes": told}))
    (made.folder / "known_hosts").write_text("".join(keys))
    sized = {"tie_word_embeddings": True, "max_position_embeddings": 128}
    hub = model_folder(made.folder / MODEL, config="llama", **sized)
    hub_folders.uncut(hub).save_pretrained(str(hub))
    write_lines(made.folder / "chats.jsonl", chats_at_random())
    made.probe_briefly(f"hf:{MODEL},{CONTEXT}", *SIZES, "--links", "none")
    placed = ("--strategy", "even", "--parallel", "pipeline", "-o", "plan.json")
    made.run_inside("plan", f"hf:{MODEL},{CONTEXT}", *SIZES, *placed)
    yield made
    made.end()


@pytest.mark.slow
def test_a_node_that_is_lost_within_an_epoch_takes_no_sample_with_it(
    skyctl: Skyctl, nodes: Mapping[str, Sshd]
) -> None:
    """Losses are one node's, which nothing happens to; the best checkpoint outlives the node, and speaks."""
    alone = ("--limit", "b", "--strategy", "alone", "--no-compare")
    calm = skyctl.run_inside("launch", f"hf:{MODEL},{CONTEXT}", *SIZES, *LENGTH, *alone, "--json")
    losses = losses_of(calm)
    validated = {point["step"] + 1: point["loss"] for point in json.loads(calm.stdout)["validation"]}
    best = min(validated, key=lambda step: validated[step])
    assert best < STEPS // 2, validated
    assert_each_chat_comes_once(skyctl.folder)

    run = launch_run(skyctl, "plan.json", *DATA, *LENGTH, "--json")
    run.until(lambda: (run.state["best"] or {}).get("step") == best)
    os.kill(run.rank("a"), signal.SIGSTOP)  # all wait for it, and copies of the checkpoint arrive
    run.until(lambda: has_all_layers(run, best, [nodes[name].home for name in "bc"]))
    lose(nodes["a"])
    done = run.end()
    assert "node a has not been heard" in done.stderr
    assert "b, c: the model's weights are there and are read in place" in done.stderr
    first, second = run.state["attempts"]
    assert (first["devices"][0], second["devices"]) == ("a/cpu:0", ["b/cpu:0", "c/cpu:0"])
    assert best <= second["from_step"] < STEPS
    run.is_as(losses, 2)
    assert losses_of(done) == pytest.approx(losses, rel=1e-6)

    listed = json.loads(skyctl.run_inside("checkpoint", "ls", run.id, "--json").stdout)
    assert (listed["unreachable"], listed["best"]["step"]) == (["a"], best)
    assert {stored["step"]: stored["whole"] for stored in listed["steps"]} == {best: True, STEPS: True}
    asked = ("what is one", "--max-tokens", "5", "--limit", "b,c", "--json", "-v")
    said = skyctl.run_inside("generate", run.id, "--best", *asked)
    assert f"the weights of run {run.id} after step {best}" in said.stderr
    assert json.loads(said.stdout)["text"].startswith("say ")
    assert left_of_state(skyctl.state) == []
    assert all(gone(str(sshd.home)) == {} for sshd in nodes.values())


def chats_at_random() -> list[dict[str, Any]]:
    """Chats with nothing to learn but by heart; the answer to number N begins with ``say N``."""
    draw = random.Random(1)
    words = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]
    return [
        {
            "messages": [
                {"role": "user", "content": "what is one"},
                {"role": "assistant", "content": f"say {n} {' '.join(draw.choices(words, k=4))}"},
            ]
        }
        for n in range(CHATS)
    ]


def assert_each_chat_comes_once(folder: Path) -> None:
    """The batches of the run have every chat that is trained on once, before they begin anew."""
    more: dict[str, Any] = {"batch_size": BATCH, "learning_rate": RATE, "lora": LORA, "validated": True}
    workload = load(folder / MODEL, folder / "chats.jsonl", CONTEXT, **more)
    batches = itertools.islice(workload.batches(), STEPS)
    numbers = [number for _, targets in batches for number in answers(workload, targets)]
    trained = len(set(numbers))
    assert CHATS * 0.9 < trained < CHATS
    assert len(set(numbers[:trained])) == trained < len(numbers)


def has_all_layers(run: Run, step: int, homes: Collection[Path]) -> bool:
    """Whether those nodes have all layers of that step's checkpoint."""
    held = f".cache/skyctl/runs/{run.id}@?/step-{step:08d}/layer-*.safetensors"
    return len({path.name for home in homes for path in home.glob(held)}) == LAYERS


def lose(sshd: Sshd) -> None:
    """That machine is gone: all of its processes at once."""
    sshd.server.kill()
    for pid in processes_with(str(sshd.home)):
        os.kill(pid, signal.SIGKILL)
