"""Files as people bring them: each of ``workloads/`` trains as in plain torch, or is refused by its line."""

import logging
import random
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from porting import plain_torch
from tests.brought import bringing
from tests.brought.cases import CASES, FOLDER, TRAINS
from torch.nn.modules import module as hooks_of_all

from skyctl.errors import WorkloadError
from skyctl.worker.cut_check.comparison import compare_cut

pytestmark = pytest.mark.filterwarnings("ignore")  # what the files' own code warns of


@pytest.fixture(autouse=True)
def as_before(monkeypatch):
    """Shows a user's file this process as a command's, and puts back what the file may change."""
    monkeypatch.setattr(sys, "argv", ["skyctl", "probe", "train.py", "--batch-size", "8"])
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()
    with warnings.catch_warnings():
        yield
    torch.set_rng_state(states[0])
    random.setstate(states[1])
    np.random.set_state(states[2])
    torch.set_default_dtype(torch.float32)
    torch.set_grad_enabled(True)
    hooks_of_all._global_forward_hooks.clear()
    logging.captureWarnings(False)


SAMPLE = 6
"""Of the files that must train, one in so many is compared in CI: it is the same comparison each time."""


def _cases() -> list[Any]:
    """All that may be refused or that draw, and a sample of the others; ``make matrix`` takes all."""
    plain = [name for name, case in CASES.items() if case == TRAINS]
    left_out = {name for i, name in enumerate(plain) if i % SAMPLE}
    return [pytest.param(name, marks=pytest.mark.matrix if name in left_out else ()) for name in CASES]


@pytest.fixture(params=_cases())
def path(request: pytest.FixtureRequest) -> Path:
    if request.param.startswith("hf_"):
        pytest.importorskip("transformers")
    return FOLDER / f"{request.param}.py"


def test_every_file_has_its_case():
    assert sorted(CASES) == sorted(file.stem for file in FOLDER.glob("*.py"))
    for name, case in CASES.items():
        for line in case.lines:
            assert bringing.lines_with(FOLDER / f"{name}.py", [line]), (name, line)


@pytest.mark.slow
def test_a_file_is_compared_or_refused(path):
    case = CASES[path.stem]
    refused = _refusal(path)
    if refused is None:
        assert case.may_train
        return
    assert case.may_be_refused, refused
    assert refused.hint, refused
    assert not bringing.wrong_refusal(str(refused), case, path)


def _refusal(path: Path) -> WorkloadError | None:
    """The error that is raised when it is loaded and compared; None: none is."""
    try:
        compare_cut(plain_torch.load(path, bringing.BATCH))
    except WorkloadError as exc:
        return exc
    return None


@pytest.mark.matrix
@pytest.mark.parametrize("schedule", ["1f1b", "zero-bubble"])
def test_two_ranks_train_it_as_plain_torch(path, schedule, two_ranks, record_property):
    case = CASES[path.stem]
    outcome = bringing.bring_to_ranks(two_ranks, path, case, schedule)
    record_property("outcome", f"{outcome.how}: {outcome.text}")
    assert not bringing.is_right(outcome, case, path)


@pytest.mark.matrix
def test_two_nodes_train_it_as_plain_torch(path, two_nodes, record_property):
    case = CASES[path.stem]
    outcome = bringing.bring_to_nodes(two_nodes, path, case)
    record_property("outcome", f"{outcome.how}: {outcome.text}")
    assert not bringing.is_right(outcome, case, path)
