"""``skyctl launch hf:DIR --lora …`` on three unequal nodes, against transformers and peft in a plain loop."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.helpers.commands import run_hub_briefly, run_inside
from tests.workload.hf import hub_folders

from skyctl.checkpoint.node import safetensors
from skyctl.files import run_folder
from skyctl.workload.recipe import microbatch_sizes
from skyctl.workload.workload import Workload, load_workload
from skyctl.workload.workload_spec import make_spec

peft = pytest.importorskip("peft")

pytestmark = pytest.mark.filterwarnings(  # peft asks for it
    "ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"
)

STEPS, BATCH, MICROBATCHES, RATE = 30, 6, 3, 3e-3
LORA = "r=4,alpha=16"
CLUSTER = """nodes:
  - {name: a, transport: local, threads: 1}
  - {name: b, transport: local, threads: 1, slowdown: 1.5}
  - {name: c, transport: local, threads: 1, slowdown: 2.5}
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind",
    [
        "llama",
        *(
            pytest.param(kind, marks=pytest.mark.matrix)
            for kind in ("qwen2", "qwen3", "mistral-sliding", "gpt2")
        ),
    ],
)
def test_three_unequal_nodes_train_the_adapters_that_peft_trains(kind: str, tmp_path: Path) -> None:
    """One kind in CI: ``test_lora.py`` holds each kind's layers against peft without a launch."""
    import transformers

    hub = a_folder(tmp_path, kind)
    done = launch(tmp_path, "--strategy", "even", "--steps", str(STEPS))
    found = json.loads(done.stdout)
    assert [r["device"] for r in found["replicas"]] == ["a/cpu:0", "b/cpu:0", "c/cpu:0"]
    assert "full training would hold weights, gradients and optimizer state of" in done.stderr
    plan = json.loads((run_folder(found["run_id"]) / "plan.json").read_text())
    assert plan["workload"]["lora"] == LORA
    losses, model = reference(hub, tmp_path / "story.txt")
    assert [step["loss"] for step in found["steps"]] == pytest.approx(losses, abs=1e-4)
    assert losses[-1] < losses[0]

    for out, more in (("out", ()), ("merged", ("--merge",))):
        exported = run_inside(tmp_path, "checkpoint", "export", "-o", out, *more)
        assert exported.returncode == 0, exported.stderr
    adapters = safetensors.load(tmp_path / "out" / "adapter_model.safetensors")
    expected = peft.get_peft_model_state_dict(model)
    assert adapters.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(adapters[name], tensor, rtol=0, atol=1e-4)
    auto = transformers.AutoModelForCausalLM
    loaded = peft.PeftModel.from_pretrained(auto.from_pretrained(str(hub)), str(tmp_path / "out")).eval()
    merged = auto.from_pretrained(str(tmp_path / "merged")).eval()
    ids = torch.arange(24).reshape(2, 12)
    scores = model.eval()(input_ids=ids).logits
    torch.testing.assert_close(loaded(input_ids=ids).logits, scores, rtol=0, atol=1e-3)
    torch.testing.assert_close(merged(input_ids=ids).logits, scores, rtol=0, atol=1e-3)


@pytest.mark.slow
def test_devices_with_all_layers_sum_and_checkpoint_adapters_alone(tmp_path: Path) -> None:
    """And a run that is resumed has its frozen weights from the folder again."""
    hub = a_folder(tmp_path, "llama")
    first = launch(tmp_path, "--parallel", "data", "--steps", "20", "--checkpoint-every", "10")
    run_id = json.loads(first.stdout)["run_id"]
    plan = json.loads((run_folder(run_id) / "plan.json").read_text())
    loaded = load_workload(make_spec(f"hf:{hub},context=12", batch_size=BATCH, lora=LORA))
    trained = sum(p.numel() for x in loaded.model.layers for p in x.parameters() if p.requires_grad)
    assert sum(layer["gradient_bytes"] for layer in plan["problem"]["layers"]) == 4 * trained
    held = safetensors.read_header(run_folder(run_id) / "weights.safetensors").tensors
    assert all(".lora_" in name for name in held)
    listed = run_inside(tmp_path, "checkpoint", "ls", run_id, "--json")
    (newest, *_) = json.loads(listed.stdout)["steps"]
    assert newest["whole"]
    full = sum(p.numel() for x in loaded.model.layers for p in x.parameters()) * 4
    assert newest["bytes"] < full + 3 * 4 * trained
    again = run_hub_briefly(tmp_path, "launch", "--resume", run_id, "--steps", "10", "--json")
    assert again.returncode == 0, again.stderr
    losses, _ = reference(hub, tmp_path / "story.txt")
    found = [step["loss"] for step in json.loads(again.stdout)["steps"]]
    assert found[-10:] == pytest.approx(losses[-10:], abs=1e-4)


def a_folder(tmp_path: Path, kind: str) -> Path:
    """A cluster of three nodes, a text, and a folder with a model's weights and tokenizer."""
    hub = hub_folders.write(tmp_path / "tiny", hub_folders.CONFIGS[kind])
    hub_folders.uncut(hub).save_pretrained(str(hub))
    hub_folders.tokenizer(hub)
    (tmp_path / "story.txt").write_text(" ".join(f"w{i * i % 40}" for i in range(500)))
    (tmp_path / "cluster.yaml").write_text(CLUSTER)
    return hub


def launch(folder: Path, *words: str) -> Any:
    sized = ("--batch-size", str(BATCH), "--microbatches", str(MICROBATCHES), "--data", "story.txt")
    asked = ("hf:tiny,context=12", "--lora", LORA, *sized, "--learning-rate", str(RATE), *words, "--json")
    done = run_hub_briefly(folder, "launch", *asked)
    assert done.returncode == 0, done.stderr
    return done


def reference(hub: Path, text: Path) -> tuple[list[float], Any]:
    """The plain loop: the losses of every step, and the trained model of peft."""
    import transformers

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    spec = make_spec(f"hf:{hub},context=12", batch_size=BATCH, data_path=str(text), lora=LORA)
    loaded = load_workload(spec)
    base = transformers.AutoModelForCausalLM.from_pretrained(str(hub), attn_implementation="sdpa")
    config = peft.LoraConfig(
        r=4,
        lora_alpha=16,
        target_modules="all-linear",
        task_type="CAUSAL_LM",
        fan_in_fan_out=base.config.model_type == "gpt2",
    )
    model = peft.get_peft_model(base, config).train()
    model.load_state_dict(first_values(loaded), strict=False)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=RATE)
    batches, losses = loaded.batches(), []
    for _ in range(STEPS):
        ids, _ = next(batches)
        assert isinstance(ids, torch.Tensor)
        total = 0.0
        for part in ids.split(microbatch_sizes(BATCH, MICROBATCHES)):
            loss = model(input_ids=part, labels=part).loss * (len(part) / BATCH)
            loss.backward()
            total += loss.item()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    torch.set_num_threads(threads)
    return losses, model


def first_values(loaded: Workload) -> dict[str, torch.Tensor]:
    """By name in a PeftModel, the adapters' values that a run begins with."""
    assert loaded.model.hub is not None
    return {
        f"base_model.model.{names[own]}": parameter.detach()
        for names, layer in zip(loaded.model.hub.names, loaded.build(0, loaded.layers), strict=True)
        for own, parameter in layer.named_parameters()
        if parameter.requires_grad
    }
