"""Ranks that hold the same layers begin with the same weights, or the run ends before its first step."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from skyctl.errors import WorkloadError
from skyctl.run.rank_reports import RankReports
from skyctl.worker.batches.batch_sketch import sketch_layers


def reports(devices: int) -> RankReports:
    specs: Any = [SimpleNamespace(device=f"n{rank}/cpu:0") for rank in range(devices)]
    unused: Any = None
    return RankReports(specs, unused, unused, unused, lambda error: error)


def layers(seed: int, count: int = 2) -> list[nn.Module]:
    torch.manual_seed(seed)
    return [nn.Linear(6, 6) for _ in range(count)]


def test_copies_of_a_layer_are_equal() -> None:
    one, two = sketch_layers(layers(1), 0, 7), sketch_layers(layers(1), 0, 7)
    reports(3).check_beginnings({0: one, 1: two, 2: {}})


def test_another_processors_last_bits_make_no_difference() -> None:
    mine = layers(1)
    with torch.no_grad():
        for layer in mine:
            for parameter in layer.parameters():
                parameter.mul_(1 + 1e-6)
    reports(2).check_beginnings({0: sketch_layers(layers(1), 0, 7), 1: sketch_layers(mine, 0, 7)})


def test_other_weights_are_named() -> None:
    one, two = layers(1, 3), layers(1, 3)
    nn.init.normal_(two[1].weight)  # type: ignore[arg-type]
    with pytest.raises(
        WorkloadError, match=r"layer 1 begins with other weights on n1/cpu:0 than on n0/cpu:0"
    ):
        reports(2).check_beginnings({0: sketch_layers(one, 0, 7), 1: sketch_layers(two, 0, 7)})
