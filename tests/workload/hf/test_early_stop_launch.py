"""A fine-tuning run that stops early, on two nodes: its best checkpoint, exported with a model card."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import yaml
from tests.helpers.commands import run_hub_briefly
from tests.workload.hf import hub_folders

from skyctl.checkpoint.node import safetensors

pytest.importorskip("peft")

CLUSTER = """nodes:
  - {name: node-a, transport: local, threads: 1}
  - {name: node-b, transport: local, threads: 1, slowdown: 1.5}
"""


@pytest.mark.slow
def test_a_run_that_learns_its_records_by_heart_stops_and_exports_its_best(tmp_path: Path) -> None:
    hub = hub_folders.write(tmp_path / "tiny", hub_folders.CONFIGS["llama"])
    hub_folders.uncut(hub).save_pretrained(str(hub))
    hub_folders.tokenizer(hub)
    draw = random.Random(1)
    texts = [" ".join(f"w{draw.randrange(40)}" for _ in range(10)) for _ in range(80)]
    (tmp_path / "notes.jsonl").write_text("".join(f"{json.dumps({'text': text})}\n" for text in texts))
    (tmp_path / "cluster.yaml").write_text(CLUSTER)
    sized = ("--batch-size", "8", "--microbatches", "2", "--steps", "400", "--learning-rate", "1e-2")
    trained = ("--lora", "r=8,alpha=32", "--data", "notes.jsonl", "--eval-every", "5", "--patience", "2")
    placed = ("--strategy", "even", "--parallel", "pipeline", "--no-compare", "--json")
    done = run_hub_briefly(tmp_path, "launch", "hf:tiny,context=12", *sized, *trained, *placed)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    losses = {point["step"] + 1: point["loss"] for point in found["validation"]}
    best = min(losses, key=lambda step: losses[step])
    assert max(losses) == best + 10
    assert len(found["steps"]) == best + 11
    assert f"stopped early, after {best + 11} of 400 steps" in done.stderr

    listed = json.loads(run_hub_briefly(tmp_path, "checkpoint", "ls", "--json").stdout)
    assert listed["best"] == {"step": best, "loss": losses[best]}
    assert [(stored["step"], stored["whole"]) for stored in listed["steps"]] == [
        (best + 11, True),
        (best, True),
    ]
    (run,) = json.loads(run_hub_briefly(tmp_path, "ps", "-a", "--offline", "--json").stdout)["runs"]
    assert (run["status"], run["stopped_early"], run["best"]) == ("done", True, listed["best"])

    exported = run_hub_briefly(tmp_path, "checkpoint", "export", "--best", "-o", "best", "--json")
    assert json.loads(exported.stdout)["step"] == best
    assert run_hub_briefly(tmp_path, "checkpoint", "export", "-o", "last").returncode == 0
    name = "adapter_model.safetensors"
    weights = [safetensors.load(tmp_path / folder / name) for folder in ("best", "last")]
    assert any(not tensor.equal(weights[1][key]) for key, tensor in weights[0].items())
    card = (tmp_path / "best" / "README.md").read_text()
    _, front, text = card.split("---\n", 2)
    assert yaml.safe_load(front) == {"library_name": "peft", "tags": ["skyctl", "lora"]}
    for words in (
        "`notes.jsonl`: 80 records (text)",
        "r=8, lora_alpha=32",
        f"| steps | {best} |",
        "| batch size | 8 |",
        "| learning rate | 0.01 |",
        f"| lowest validation loss | {losses[best]:.4f} after step {best} |",
    ):
        assert words in text
    assert str(tmp_path) not in card
    assert "node-a" not in card
    asked = ("w1 w2", "--raw", "--max-tokens", "6", "--json")
    of_run, of_folder = (
        run_hub_briefly(tmp_path, "generate", *words, *asked)
        for words in ((run["run_id"], "--best"), ("best",))
    )
    assert of_run.returncode == 0, of_run.stderr
    assert json.loads(of_run.stdout)["tokens"] == json.loads(of_folder.stdout)["tokens"]
    folder = run_hub_briefly(tmp_path, "generate", "best", "--best", *asked)
    assert folder.returncode == 2
    assert "--best names a checkpoint of a run, and best is a folder" in folder.stderr
    both = run_hub_briefly(tmp_path, "checkpoint", "export", "--best", "--step", "3")
    assert both.returncode == 2
    assert "--best and --step 3 each name a checkpoint" in both.stderr
