"""Which numbers of microbatches are measured: those that the model can take."""

from __future__ import annotations

from pathlib import Path

import pytest

from skyctl.errors import WorkloadError
from skyctl.jobs.training_request import TrainingRequest
from skyctl.workload.workload import Workload, load_workload
from skyctl.workload.workload_spec import make_spec

NORMED = "[nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Linear(16, 4)]"
PAIRS = "[nn.Linear(6, 16), Pairs(), nn.Linear(16, 4)]"


def loaded(folder: Path, layers: str, batch_size: int) -> Workload:
    """A model of those layers, on six numbers and four classes."""
    path = folder / "train.py"
    path.write_text(
        "import torch\nfrom torch import nn\n"
        "class Pairs(nn.Module):\n"
        "    def forward(self, x): return x.view(x.shape[0] // 2, 2, -1).flip(1).reshape(x.shape)\n"
        f"def model(): return {layers}\n"
        "def data(batch_size, seed):\n"
        "    while True: yield torch.randn(batch_size, 6), torch.randint(0, 4, (batch_size,))\n"
    )
    return load_workload(make_spec(str(path), batch_size=batch_size))


def test_a_count_that_leaves_one_sample_to_a_batch_norm_is_left_out(tmp_path: Path) -> None:
    workload = loaded(tmp_path, NORMED, 32)
    counts, left_out = TrainingRequest(workload.spec).choices(workload)
    assert counts == [4, 8, 16]
    (refused,) = left_out
    assert (refused.microbatches, refused.samples) == (32, 1)
    for words in ("BatchNorm1d", "float32[1, 16]", "Expected more than 1 value per channel"):
        assert words in refused.reason


def test_a_given_count_that_leaves_one_sample_names_those_that_work(tmp_path: Path) -> None:
    workload = loaded(tmp_path, NORMED, 32)
    for given in (TrainingRequest(workload.spec, 32), TrainingRequest(workload.spec, sweep=(8, 32))):
        with pytest.raises(WorkloadError, match="32 microbatches: some would have 1 sample: ") as caught:
            given.choices(workload)
        assert caught.value.hint == "these work: --microbatches 1, 2, 4, 8, 16"
    assert TrainingRequest(workload.spec, 5).choices(workload) == ([5], [])


def test_the_smaller_of_two_sizes_counts_too(tmp_path: Path) -> None:
    """Seven samples are 3, 2, 2 in three microbatches and 2, 2, 2, 1 in four."""
    workload = loaded(tmp_path, NORMED, 7)
    assert TrainingRequest(workload.spec, 3).choices(workload) == ([3], [])
    counts, left_out = TrainingRequest(workload.spec).choices(workload)
    assert counts == [1, 2]
    assert [(one.microbatches, one.samples) for one in left_out] == [(4, 1)]


def test_a_model_that_takes_even_numbers_only(tmp_path: Path) -> None:
    workload = loaded(tmp_path, PAIRS, 8)
    assert TrainingRequest(workload.spec).choices(workload)[0] == [1, 2, 4]
    again = load_workload(workload.spec)  # as a node does: from what the launcher has found of the shapes
    assert [spec.shape for spec in again.boundary(2, 4)] == [(4, 16)]


def test_more_microbatches_are_tried_until_each_has_one_sample(tmp_path: Path) -> None:
    workload = loaded(tmp_path, PAIRS, 512)
    request = TrainingRequest(workload.spec)
    more = request.with_more_microbatches(workload)
    assert more is not None
    assert more.sweep == (64, 128, 256)
    assert more.with_more_microbatches(workload) is None, "512 have one sample, which is no even number"
    assert TrainingRequest(workload.spec, 8).with_more_microbatches(workload) is None, "the user has said 8"
