"""A whole run with everything that can be asked of training, through the command."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ..helpers.commands import brief_probes

GPT = "gpt:layers=1,hidden=16,heads=2,context=16"


@pytest.mark.slow
def test_a_bfloat16_run_with_clipping_schedule_and_validation(here) -> None:
    options = ("--batch-size", "8", "--microbatches", "4", "--strategy", "even", "--dtype", "bfloat16")
    recipe = ("--clip-norm", "0.5", "--lr-schedule", "cosine", "--warmup-steps", "1", "--validate-every", "2")
    asked = (*options, *recipe, "--validate-batches", "2", "--steps", "5")
    with brief_probes():
        done = here.run_inside("launch", GPT, *asked, "--json")
    measured = json.loads(done.stdout)
    assert [v["step"] for v in measured["validation"]] == [1, 3, 4]
    assert " · validation " in done.stderr
    folder = Path(measured["weights"]).parent
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [0, 1, 2, 3, 4]
    assert [line["loss"] for line in lines] == [step["loss"] for step in measured["steps"]]
    told = {line["step"]: line["validation_loss"] for line in lines if "validation_loss" in line}
    assert told == {v["step"]: v["loss"] for v in measured["validation"]}
    rates = [line["learning_rate"] for line in lines]
    assert rates[0] == rates[1] / 2
    assert rates[1] > rates[2] > rates[3] > rates[4] > 0
    assert all(line["grad_norm"] > 0 for line in lines)
    header = (folder / "weights.safetensors").read_bytes()[8:4000]
    assert b'"F32"' in header
    assert b'"BF16"' not in header


def test_bad_recipes_are_bad_usage(here) -> None:
    for words, options in (
        ("defines no validation()", ("train.py", "--validate-every", "2")),
        ("'steps' is not one of constant, linear, cosine", ("train.py", "--lr-schedule", "steps")),
    ):
        done = here.run_inside("launch", *options, code=None)
        assert done.returncode == 2, done.stderr
        assert words in done.stderr


OWN = """
import torch
from torch import nn


def model(width: int, depth=2):
    return [nn.Linear(8, width), *(nn.Linear(width, width) for _ in range(depth)), nn.Linear(width, 3)]


def data(batch_size, seed, width=0):
    assert width == 16
    generator = torch.Generator().manual_seed(seed)
    while True:
        inputs = torch.randn(batch_size, 8, generator=generator)
        yield inputs, inputs[:, :3].argmax(1)


def validation(batch_size, seed):
    return (batch for _, batch in zip(range(2), data(batch_size, seed + 1, 16)))


def optimizer(parameters, named):
    biases = [p for name, p in named if name.endswith("bias")]
    weights = [p for name, p in named if not name.endswith("bias")]
    return torch.optim.AdamW([{"params": weights}, {"params": biases, "weight_decay": 0.0}], lr=0.1)


def lr_scheduler(optimizer, steps):
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / steps)


def metrics(outputs, targets):
    return {"accuracy": (outputs.argmax(1) == targets).float().mean()}
"""


@pytest.mark.slow
def test_a_script_with_arguments_groups_its_own_rates_and_metrics(here) -> None:
    here.train(OWN)
    options = ("--batch-size", "8", "--microbatches", "4", "--strategy", "even")
    done = here.run_inside("launch", "train.py", *options, "--steps", "4", "--dry-run", code=None)
    assert (done.returncode, "model() needs width" in done.stderr) == (2, True), done.stderr
    asked = ("launch", "train.py,width=16", *options, "--steps", "4", "--validate-every", "2")
    refused = here.run_inside(*asked, "--warmup-steps", "1", code=None)
    assert (refused.returncode, "defines lr_scheduler(), and --warmup-steps 1" in refused.stderr) == (2, True)
    with brief_probes():
        done = here.run_inside(*asked, "--json")
    measured = json.loads(done.stdout)
    assert (measured["version"], len(measured["replicas"])) == (7, 2)
    assert [one["step"] for one in measured["validation"]] == [1, 3]
    folder = Path(measured["weights"]).parent
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [line["learning_rate"] for line in lines] == pytest.approx([0.1, 0.075, 0.05, 0.025])
    told = {line["step"]: line["validation_metrics"] for line in lines if "validation_metrics" in line}
    assert told == {one["step"]: one["metrics"] for one in measured["validation"]}
    assert all(0 <= one["accuracy"] <= 1 for one in told.values())
    assert " · accuracy " in done.stderr
    plan = json.loads((folder / "plan.json").read_text())
    assert plan["workload"]["source"] == "train.py,width=16"
    more = here.run_inside("launch", "--resume", folder.name, "--steps", "2", "--dry-run", code=0)
    assert "lr_scheduler() is told that the run has 6 steps now, it was told 4" in more.stderr
