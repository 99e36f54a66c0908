"""A whole run with everything that can be asked of training, through the command."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

GPT = "gpt:layers=1,hidden=16,heads=2,context=16"


@pytest.mark.slow
def test_a_bfloat16_run_with_clipping_schedule_and_validation(here) -> None:
    options = ("--batch-size", "8", "--microbatches", "4", "--strategy", "even", "--dtype", "bfloat16")
    recipe = ("--clip-norm", "0.5", "--lr-schedule", "cosine", "--warmup-steps", "1", "--validate-every", "2")
    done = here.run("launch", GPT, *options, *recipe, "--validate-batches", "2", "--steps", "5", "--json")
    assert done.returncode == 0, done.stderr
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
        done = here.run("launch", *options)
        assert done.returncode == 2, done.stderr
        assert words in done.stderr
