"""``skyctl launch hf:DIR --data`` with chats on two nodes, against the library's model in one process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.helpers.commands import run_hub_briefly
from tests.workload.datasets.record_folders import chats, load, model_folder, write_lines

pytest.importorskip("transformers")

STEPS, BATCH, RATE = 5, 6, 3e-3


@pytest.mark.slow
@pytest.mark.parametrize(
    "packing", [pytest.param(True, id="packed", marks=pytest.mark.matrix), pytest.param(False, id="apart")]
)
def test_two_nodes_train_chats_as_the_library_does(tmp_path: Path, packing: bool) -> None:
    """Tied embeddings, microbatches of 2 2 1 1; packed rows from a JSON array, padded ones from lines."""
    import transformers

    hub = model_folder(tmp_path / "tiny llama", config="llama", tie_word_embeddings=True)
    torch.manual_seed(0)
    config = transformers.AutoConfig.from_pretrained(str(hub))
    model = transformers.AutoModelForCausalLM.from_config(config).train()
    model.save_pretrained(str(hub))
    data = write_lines(tmp_path / "chats.jsonl", chats(120))
    if packing:
        data = tmp_path / "chats.json"
        data.write_text(json.dumps(chats(120)))
    (tmp_path / "cluster.yaml").write_text(
        "nodes:\n  - {name: a, transport: local, threads: 1}\n  - {name: b, transport: local, threads: 1}\n"
    )
    words = ["launch", f"hf:{hub.name},context=48", "--data", data.name, "--batch-size", str(BATCH)]
    words += [
        "--microbatches",
        "4",
        "--strategy",
        "even",
        "--learning-rate",
        str(RATE),
        "--steps",
        str(STEPS),
    ]
    words += [] if packing else ["--no-packing"]
    done = run_hub_briefly(tmp_path, *words, "--json")
    assert done.returncode == 0, done.stderr
    assert "data: 120 records, " in done.stderr
    assert "⟦say 0 <|im_end|>⟧" in done.stderr
    found = json.loads(done.stdout)
    assert [r["device"] for r in found["replicas"]] == ["a/cpu:0", "b/cpu:0"]
    workload = load(hub, data, batch_size=BATCH, learning_rate=RATE)
    if not packing:
        from skyctl.workload.datasets.checked_options import RecordChoices

        workload = load(hub, data, choices=RecordChoices(False), batch_size=BATCH, learning_rate=RATE)
    assert [step["loss"] for step in found["steps"]] == pytest.approx(reference(model, workload), rel=1e-5)


def reference(model: Any, workload: Any) -> list[float]:
    """The plain loop on the uncut model: losses of every step, each of the whole batch at once."""
    optimizer = workload.optimizer(model.parameters())
    batches = workload.batches()
    losses = []
    for _ in range(STEPS):
        inputs, targets = next(batches)
        ids, positions = inputs if isinstance(inputs, tuple) else (inputs, None)
        loss = model(input_ids=ids, position_ids=positions, labels=targets["labels"], use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses
