"""``skyctl generate``, from a folder and from a run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from tests.helpers.commands import run_briefly
from tests.workload.hf import hub_folders

TEMPLATE = "{% for m in messages %}{{ m.content }} {% endfor %}{% if add_generation_prompt %}w9{% endif %}"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A tiny Llama with a word-level tokenizer, and a cluster of this machine."""
    folder = hub_folders.write(tmp_path / "m", hub_folders.CONFIGS["llama"])
    hub_folders.tokenizer(folder)
    hub_folders.uncut(folder).save_pretrained(str(folder))
    (tmp_path / "cluster.yaml").write_text("nodes:\n  - {name: a, transport: local, threads: 1}\n")
    return folder


@pytest.mark.slow
def test_text_appears_and_ends_with_the_models_end(model: Path, tmp_path: Path) -> None:
    config = json.loads((model / "tokenizer_config.json").read_text())
    (model / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": TEMPLATE}))
    library = hub_folders.uncut(model).eval()
    ids = torch.tensor([[4 + 1, 4 + 13, 4 + 9]])  # "w1", "w13" and what the template adds
    wanted = library.generate(ids, do_sample=False, max_new_tokens=10, eos_token_id=None, pad_token_id=0)
    tokens = wanted[0, 3:].tolist()
    done = run_briefly(tmp_path, "generate", "hf:m", "w13", "--system", "w1", "--max-tokens", "10", "--json")
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert document["tokens"] == tokens
    assert document["prompt_tokens"] == 3
    assert document["stages"] == [{"device": "a/cpu:0", "layers": [0, 7]}]
    (model / "generation_config.json").write_text(json.dumps({"eos_token_id": [tokens[4]]}))
    first = tokens.index(tokens[4])
    plain = run_briefly(tmp_path, "generate", "m", "w1 w13 w9", "--raw", "--max-tokens", "10")
    assert plain.returncode == 0, plain.stderr
    shown = [f"w{token - 4}" for token in tokens[:first] if 4 <= token < 44]
    assert plain.stdout.split() == shown
    assert f"{first} tokens" in plain.stderr


@pytest.mark.slow
def test_a_run_speaks_with_the_weights_that_it_has_ended_with(model: Path, tmp_path: Path) -> None:
    (tmp_path / "story.txt").write_text(" ".join(f"w{i * i % 40}" for i in range(500)))
    words = ("--batch-size", "4", "--steps", "2", "--data", "story.txt", "--json")
    launched = run_briefly(tmp_path, "launch", f"hf:{model.name},context=12", *words)
    assert launched.returncode == 0, launched.stderr
    run = json.loads(launched.stdout)["run_id"]
    exported = run_briefly(tmp_path, "checkpoint", "export", run, "-o", "out")
    assert exported.returncode == 0, exported.stderr
    answers = []
    for source in (run, "out"):
        done = run_briefly(tmp_path, "generate", source, "w1 w2", "--max-tokens", "6", "--json")
        assert done.returncode == 0, done.stderr
        answers.append(json.loads(done.stdout)["tokens"])
    assert answers[0] == answers[1]
    assert len(answers[0]) == 6


def test_a_folder_without_weights_is_refused(model: Path, tmp_path: Path) -> None:
    (model / "model.safetensors").unlink()
    done = run_briefly(tmp_path, "generate", "hf:m", "w1")
    assert done.returncode == 2
    assert "has a config and no weights" in done.stderr


def test_a_model_that_predicts_no_next_token_is_refused(tmp_path: Path, model: Path) -> None:
    hub_folders.write(model, hub_folders.CONFIGS["bert-classes"])
    hub_folders.uncut(model).save_pretrained(str(model))
    done = run_briefly(tmp_path, "generate", "hf:m", "w1")
    assert done.returncode == 2
    assert "its task is 'classes'" in done.stderr
