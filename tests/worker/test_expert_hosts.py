"""Experts on hosts: training is that of one device; hosts are killed, late, or send garbage."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from tests.worker.expert_hosts import FAIL_EVERY, Hosts, recipe, spec_of
from tests.worker.reference import train
from tests.worker.sums import star
from tests.worker.test_experts import SOURCE

STEPS = 30
HOLDERS = {1: [0, 1, 0, 1, 0, 1], 2: [1, 1, 1, 0, 0, 0]}
SGD = ("torch.optim.AdamW(parameters, lr=0.01)", "torch.optim.SGD(parameters, lr=0.1, momentum=0.9)")


def workload(folder: Path, *edits: tuple[str, str]) -> dict[str, Any]:
    source = SOURCE
    for old, new in edits:
        assert old in source
        source = source.replace(old, new)
    path = folder / "train.py"
    path.write_text(source)
    return spec_of(path)


def one_pipeline(driver: ModuleType, spec: dict[str, Any], cuts: Sequence[int], **options: Any) -> Any:
    return driver.orders(spec, list(cuts), 4, "1f1b", STEPS, recipe=recipe(STEPS), **options)


@pytest.mark.parametrize(("cuts", "edits"), [([0, 4], []), ([0, 2, 4], [SGD])])
def test_a_pipeline_trains_as_one_device_and_twice_the_same(
    cuts: list[int], edits: list[tuple[str, str]], pool: Any, driver: ModuleType, tmp_path: Path
) -> None:
    spec = workload(tmp_path, *edits)
    wanted = train(spec, 4, recipe(STEPS))
    seen = []
    for _ in range(2):
        with Hosts(one_pipeline(driver, spec, cuts), HOLDERS, 2, tmp_path) as hosts:
            outcome = pool.run(hosts.orders)
        assert not outcome.errors, outcome.errors
        seen.append(outcome.losses)
    assert seen[0] == pytest.approx(wanted.losses, rel=1e-5)
    assert seen[1] == seen[0]
