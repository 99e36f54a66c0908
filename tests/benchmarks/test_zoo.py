"""The zoo: its models are sound torch by themselves, the docs list all of them, and its command runs one."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import zoo
from porting import plain_torch
from torch import nn

BATCH = 4


def _models():
    """One in five in CI; ``make matrix`` takes all."""
    names = enumerate(zoo.model_names())
    return [pytest.param(name, marks=pytest.mark.matrix if i % 5 else ()) for i, name in names]


@pytest.mark.parametrize("name", _models())
def test_a_model_trains_in_plain_torch(name):
    if name.startswith("hf_"):
        pytest.importorskip("transformers")
    file = plain_torch.ModelFile.load(zoo.FOLDER / f"{name}.py")
    model = file.make().train()
    inputs, targets = next(iter(file.data(BATCH, 0)))
    loss = file.loss(plain_torch.call(model, inputs), targets)
    loss.backward()
    assert loss.shape == ()
    assert torch.isfinite(loss)
    assert all(torch.isfinite(p.grad).all() for p in model.parameters() if p.grad is not None)
    assert file.about.endswith(".")


def test_data_is_the_same_for_the_same_seed():
    for name in zoo.model_names():
        if not name.startswith("hf_"):
            file = plain_torch.ModelFile.load(zoo.FOLDER / f"{name}.py")
            one, same, other = (next(iter(file.data(BATCH, seed))) for seed in (0, 0, 1))
            torch.testing.assert_close(one, same, rtol=0, atol=0)
            with pytest.raises(AssertionError):
                torch.testing.assert_close(one, other)


def test_the_document_lists_the_folder():
    text = zoo.DOCUMENT.read_text(encoding="utf-8")
    section = text[text.index("<!-- zoo: generated -->") : text.index("<!-- zoo: end -->")]
    listed = re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE)
    assert sorted(listed) == zoo.model_names()
    assert len(listed) == 25


class _Two(nn.Module):
    def forward(self, x, t=None):
        return x if t is None else x + t


def test_inputs_are_given_as_forward_takes_them():
    one = torch.ones(1)
    assert plain_torch.arguments_of(_Two(), one) == ((one,), {})
    assert plain_torch.arguments_of(_Two(), (one, one)) == ((one, one), {})
    assert plain_torch.arguments_of(_Two(), (one, one, one)) == (((one, one, one),), {})
    assert plain_torch.arguments_of(_Two(), {"t": one, "x": one}) == ((), {"t": one, "x": one})
    assert plain_torch.arguments_of(_Two(), {"other": one}) == (({"other": one},), {})


def test_the_table_says_what_ran_and_why_the_others_did_not():
    ran = {
        "benchmark": "zoo", "model": "a", "about": "A.", "parameters": 1200, "layers": 9, "distinct": 3,
        "largest_layer": 0.2, "strategy": "even", "stages": [["n1/cpu:0", 6], ["n2/cpu:0", 3]],
        "beside": "plain torch", "loss_difference": 0.0, "reload_difference": 2e-7,
    }  # fmt: skip
    refused = {
        "benchmark": "zoo", "model": "b", "about": "B.", "parameters": 1, "refused": "b.py, line 7: a | b",
        "hint": None, "exit_code": 2, "names_line": True,
    }  # fmt: skip
    assert [zoo.is_good(row) for row in (ran, {**ran, "loss_difference": 2e-5})] == [True, False]
    assert [zoo.is_good(row) for row in (refused, {**refused, "exit_code": 1})] == [True, False]
    peers = {"benchmark": "zoo-peers", "model": "a", "fx": None, "export": "no"}
    text = zoo.table([ran, refused, peers])
    assert "1 of 2 run" in text
    assert "| `a` | A | 1,200 | 9 (3) | 20% | 6 + 3 ² | 0 | 2e-07 | yes | no |" in text
    assert "| `b` | B | b.py, line 7: a \\| b |  |  |" in text


@pytest.mark.slow
def test_the_command_runs_a_model(tmp_path: Path):
    record = tmp_path / "zoo.jsonl"
    command = [sys.executable, zoo.__file__, "--only", "gan_generator", "--peers", "--record", str(record)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    ran, traced = (json.loads(line) for line in record.read_text().splitlines())
    assert len(ran["stages"]) == 3
    assert ran["loss_difference"] <= 1e-5
    assert ran["reload_difference"] <= 1e-5
    assert traced["fx"] is None
