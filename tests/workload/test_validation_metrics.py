"""The figures that ``metrics()`` may give, and their means over samples."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from skyctl.errors import WorkloadError
from skyctl.workload.validation_metrics import MAX_METRICS, MetricMeans, read_metrics


def test_numbers_and_tensors_of_one_element() -> None:
    given = {"accuracy": torch.tensor([0.5]), "top-5": torch.tensor(1), "f1/macro": 0.25, "any": True}
    assert read_metrics(given, "metrics()") == {"accuracy": 0.5, "top-5": 1.0, "f1/macro": 0.25, "any": 1.0}


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (torch.tensor(0.5), "must give a dict of numbers, not Tensor"),
        ({3: 0.5}, "calls a figure 3"),
        ({"a b": 0.5}, "calls a figure 'a b'"),
        ({"[bold]": 0.5}, "calls a figure"),
        ({"a\n": 0.5}, "calls a figure"),
        ({"a" * 41: 0.5}, "at most 40 letters"),
        ({f"m{n}": 0.5 for n in range(MAX_METRICS + 1)}, "17 figures; 16 are the most"),
        ({"accuracy": torch.zeros(2)}, r"accuracy must be one number, not Tensor of shape \[2\]"),
        ({"accuracy": "0.5"}, "accuracy must be one number, not str"),
        ({"accuracy": None}, "accuracy must be one number, not NoneType"),
    ],
)
def test_anything_else_is_refused(given: Any, words: str) -> None:
    with pytest.raises(WorkloadError, match=words):
        read_metrics(given, "train.py: metrics()")


def test_means_are_over_samples() -> None:
    means = MetricMeans()
    assert means.means() is None
    means.add({"accuracy": 1.0, "odd": float("nan")}, 3)
    means.add({"accuracy": 0.0, "odd": 1.0}, 1)
    assert means.means() == {"accuracy": 0.75, "odd": None}
    with pytest.raises(WorkloadError, match="gives odd for some microbatches and not for others"):
        means.add({"accuracy": 0.0}, 1)
    empty = MetricMeans()
    empty.add({}, 4)
    assert empty.means() is None
