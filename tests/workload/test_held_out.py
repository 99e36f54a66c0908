"""Held-out data: the end of a text, or the user's validation()."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from skyctl.errors import WorkloadError
from skyctl.workload.data import training_or_held_out
from skyctl.workload.workload import Workload, load_workload
from skyctl.workload.workload_spec import make_spec

Make = Callable[..., Workload]
MODEL = "def model(): return [nn.Linear(6, 4)]\n"


def test_a_texts_end_is_held_out_only_where_it_is_asked_for(tmp_path: Path) -> None:
    text = bytes(range(1, 96)) * 20 + bytes([120]) * 100  # the last 5% is one byte that is nowhere else
    path = tmp_path / "text.txt"
    path.write_bytes(text)
    seen = {}
    for validated in (False, True):
        spec = make_spec(
            "gpt:layers=1,hidden=8,heads=1,context=8",
            batch_size=50,
            data_path=str(path),
            validated=validated,
        )
        batches = itertools.islice(load_workload(spec).batches(), 20)
        seen[validated] = {
            int(i) for inputs, targets in batches for i in torch.cat((inputs, targets)).unique()
        }
    assert 120 in seen[False]
    assert seen[True] == set(range(1, 96))
    held = list(itertools.islice(load_workload(spec).validation(), 3))
    assert all(inputs.unique().tolist() == targets.unique().tolist() == [120] for inputs, targets in held)
    again = list(itertools.islice(load_workload(spec).validation(), 3))
    assert all(torch.equal(a[0], b[0]) for a, b in zip(held, again, strict=True))
    assert training_or_held_out(text, held_out=False) + training_or_held_out(text, held_out=True) == text


def test_a_text_whose_end_is_too_short_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    path.write_bytes(b"x" * 100)
    spec = make_spec(
        "gpt:layers=1,hidden=8,heads=1,context=8", data_path=str(path), validated=True, batch_size=2
    )
    with pytest.raises(WorkloadError, match="held out for validation, has 5 bytes"):
        load_workload(spec).check_validation()


def test_the_users_validation_is_read_once_and_whole_batches_count(user: Make) -> None:
    body = MODEL + (
        "def validation(batch_size, seed):\n"
        "    for size in (batch_size, 3, batch_size):\n"
        "        yield torch.full((size, 6), float(seed)), torch.zeros(size, dtype=torch.int64)\n"
    )
    workload = user(body, seed=5)
    workload.check_validation()
    batches = list(workload.validation())
    assert len(batches) == 2
    assert batches[0][0][0, 0] == 5


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("", r"train\.py defines no validation\(\)"),
        ("def validation(batch_size, seed): return []\n", r"validation\(\) with seed 0 gives no batch of 8"),
        ("def validation(batch_size, seed): 1 / 0\n", r"train\.py, line \d+: validation\(\) failed: ZeroDiv"),
        (
            "def validation(batch_size, seed): yield torch.zeros(8, 5), torch.zeros(8, dtype=torch.int64)\n",
            r"validation\(\) gives inputs of float32\[5\] a sample",
        ),
    ],
)
def test_what_is_wrong_is_said(body: str, words: str, user: Make) -> None:
    with pytest.raises(WorkloadError, match=words):
        next(user(MODEL + body).validation())


def test_random_inputs_have_random_validation(user: Make) -> None:
    workload = user(MODEL, random_inputs=True)
    workload.check_validation()
    held, trained = next(workload.validation()), next(workload.batches())
    assert not torch.equal(held[0], trained[0])
