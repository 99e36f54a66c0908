"""``skyctl launch hf:DIR`` on two nodes, against the library's own model trained in one process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tests.helpers.commands import run_hub_briefly
from tests.workload.hf import hub_folders

from skyctl.workload.recipe import microbatch_sizes
from skyctl.workload.workload import load_workload
from skyctl.workload.workload_spec import make_spec

STEPS, BATCH, MICROBATCHES, RATE = 4, 6, 4, 3e-3


@pytest.mark.slow
def test_two_nodes_train_what_the_library_trains(tmp_path: Path) -> None:
    """Llama-like, tied embeddings, grouped heads, a tokenizer, stored weights, microbatches of 2 2 1 1."""
    config = {**hub_folders.CONFIGS["llama"], "tie_word_embeddings": True}
    hub = hub_folders.write(tmp_path / "tiny llama", config)
    hub_folders.tokenizer(hub)
    model = hub_folders.uncut(hub)
    model.save_pretrained(str(hub))
    (tmp_path / "story.txt").write_text(" ".join(f"w{i * i % 40}" for i in range(500)))
    (tmp_path / "cluster.yaml").write_text(
        "nodes:\n  - {name: a, transport: local, threads: 1}\n  - {name: b, transport: local, threads: 1}\n"
    )
    sized = ("--batch-size", str(BATCH), "--microbatches", str(MICROBATCHES), "--strategy", "even")
    training = ("--data", "story.txt", "--learning-rate", str(RATE), "--steps", str(STEPS), "--json")
    done = run_hub_briefly(tmp_path, "launch", f"hf:{hub.name},context=12", *sized, *training)
    assert done.returncode == 0, done.stderr
    measured = json.loads(done.stdout)
    assert [r["device"] for r in measured["replicas"]] == ["a/cpu:0", "b/cpu:0"]
    expected = reference(model, hub, tmp_path / "story.txt")
    assert [step["loss"] for step in measured["steps"]] == pytest.approx(expected, rel=1e-5)
    assert expected[-1] < expected[0]
    out = tmp_path / "out"
    exported = run_hub_briefly(tmp_path, "checkpoint", "export", "-o", "out")
    assert exported.returncode == 0, exported.stderr
    trained = type(model).from_pretrained(str(out), local_files_only=True)
    assert trained.config.tie_word_embeddings
    assert trained.lm_head.weight is trained.model.embed_tokens.weight
    for name, tensor in model.state_dict().items():
        torch.testing.assert_close(trained.state_dict()[name], tensor, rtol=1e-4, atol=1e-5)

    # and back: as a model of its own, and as the first one's weights, with twice as many samples a step
    larger = ("--batch-size", str(2 * BATCH), *sized[2:], *training)
    expected = reference(trained.train(), hub, tmp_path / "story.txt", 2 * BATCH)
    for source, more in (("out", ("--limit", "a")), (hub.name, ("--init-from", "out"))):
        again = run_hub_briefly(tmp_path, "launch", f"hf:{source},context=12", *larger, *more)
        assert again.returncode == 0, again.stderr
        losses = [step["loss"] for step in json.loads(again.stdout)["steps"]]
        assert losses == pytest.approx(expected, rel=1e-5)


@pytest.mark.slow
def test_a_tied_gpt2_of_two_nodes_is_exported_as_it_was_validated(tmp_path: Path) -> None:
    """Its embedding is on the first node, its head on the second: one tensor of the library's."""
    import transformers

    hub = hub_folders.write(
        tmp_path / "tiny gpt2", {**hub_folders.CONFIGS["gpt2"], "tie_word_embeddings": True}
    )
    hub_folders.uncut(hub).save_pretrained(str(hub))
    hub_folders.tokenizer(hub)
    (tmp_path / "story.txt").write_text(" ".join(f"w{i * i % 40}" for i in range(4000)))
    (tmp_path / "cluster.yaml").write_text(
        "nodes:\n  - {name: a, transport: local, threads: 1}\n  - {name: b, transport: local, threads: 1}\n"
    )
    workload = ("launch", f"hf:{hub.name},context=12", "--batch-size", str(BATCH), "--data", "story.txt")
    cut = ("--microbatches", str(MICROBATCHES), "--strategy", "even", "--learning-rate", str(RATE))
    validated = ("--steps", str(STEPS), "--validate-every", str(STEPS), "--validate-batches", "2")
    done = run_hub_briefly(tmp_path, *workload, *cut, *validated, "--json")
    assert done.returncode == 0, done.stderr
    measured = json.loads(done.stdout)
    assert [r["device"] for r in measured["replicas"]] == ["a/cpu:0", "b/cpu:0"]
    exported = run_hub_briefly(tmp_path, "checkpoint", "export", "-o", "out")
    assert exported.returncode == 0, exported.stderr

    model = transformers.AutoModelForCausalLM.from_pretrained(str(tmp_path / "out"), local_files_only=True)
    assert model.lm_head.weight is model.transformer.wte.weight
    model.eval()
    held_out = load_workload(
        make_spec(f"hf:{hub},context=12", batch_size=BATCH, data_path=str(tmp_path / "story.txt"))
    ).validation()
    with torch.no_grad():
        losses = [model(input_ids=ids, labels=ids).loss.item() for ids, _ in (next(held_out) for _ in "12")]
    assert measured["validation"][-1]["step"] == STEPS - 1
    assert measured["validation"][-1]["loss"] == pytest.approx(sum(losses) / 2, rel=1e-5)
    assert measured["validation"][-1]["loss"] < measured["steps"][0]["loss"]


def reference(model: torch.nn.Module, hub: Path, text: Path, batch: int = BATCH) -> list[float]:
    """The plain loop on the uncut model, with the library's own loss: losses of every step."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    loaded = load_workload(
        make_spec(f"hf:{hub},context=12", batch_size=batch, data_path=str(text), learning_rate=RATE)
    )
    optimizer = loaded.optimizer(model.parameters())
    split = microbatch_sizes(batch, MICROBATCHES)
    batches = loaded.batches()
    losses = []
    for _ in range(STEPS):
        ids, _ = next(batches)
        assert isinstance(ids, torch.Tensor)
        total = 0.0
        for part in ids.split(split):
            loss = model(input_ids=part, labels=part).loss * (len(part) / batch)
            loss.backward()
            total += loss.item()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    torch.set_num_threads(threads)
    return losses


@pytest.mark.slow
def test_a_node_without_the_library_is_named(tmp_path: Path) -> None:
    """As the launcher is told it by a task there, and what to do about it."""
    from skyctl.records.cluster import Node
    from skyctl.remote.remote_task import translate_task_failure

    hub = hub_folders.write(tmp_path / "m", hub_folders.CONFIGS["llama"])
    spec_text = json.dumps(load_workload(make_spec(f"hf:{hub},context=12", batch_size=2)).spec.to_dict())
    script = (
        "import sys, json\n"
        "sys.modules['transformers'] = None\n"
        "from skyctl.agent.task_runner import make_error_event\n"
        "from skyctl.workload.workload import load_workload\n"
        "from skyctl.workload.workload_spec import WorkloadSpec\n"
        "try: load_workload(WorkloadSpec.from_dict(json.loads(sys.argv[1])))\n"
        "except Exception as exc: print(json.dumps(make_error_event(exc)))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, spec_text], capture_output=True, text=True, check=True, env=os.environ
    )
    error = translate_task_failure(Node(name="oldbox", transport="local"), json.loads(done.stdout))
    assert error.exit_code == 4
    assert "node oldbox has no transformers in" in str(error)
    assert "skyctl setup WORKLOAD --limit oldbox" in str(error)
    spec = "load_workload(WorkloadSpec.from_dict(json.loads(sys.argv[1])))"
    alone = subprocess.run(
        [
            sys.executable,
            "-c",
            script.replace(spec, "load_workload(WorkloadSpec(source=sys.argv[1]))"),
            f"hf:{hub}",
        ],
        capture_output=True,
        text=True,
        check=True,
        env=os.environ,
    )
    assert "pip install 'skyctl[hf]'" in alone.stdout
