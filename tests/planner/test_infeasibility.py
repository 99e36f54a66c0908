"""Nothing fits: the reason is named, and what is said to be enough is enough."""

from __future__ import annotations

import random
import re

import pytest
from tests.planner.planner_problems import problem, random_problem, undecided

from skyctl.errors import InfeasibleError, UndecidedError
from skyctl.planner.api import plan
from skyctl.planner.cost_model import CostModel
from skyctl.planner.infeasibility import _rounded_up, raise_infeasible
from skyctl.planner.stage_memory import human_bytes
from skyctl.records.problem import Problem

UNITS = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}


def reason(p, strategy="optimal"):
    with pytest.raises(InfeasibleError) as raised:
        plan(p, strategy)
    return str(raised.value)


def grown(p: Problem, device: str, more_bytes: float) -> Problem:
    devices = tuple(
        d.model_copy(update={"memory_bytes": d.memory_bytes + more_bytes}) if d.id == device else d
        for d in p.devices
    )
    return p.model_copy(update={"devices": devices})


def enough(text: str) -> tuple[float, str] | None:
    match = re.search(r"([\d.]+) ([KMGT]?i?B) more on (\S+) would be enough", text)
    return None if match is None else (float(match[1]) * UNITS[match[2]], match[3])


@pytest.mark.parametrize("strategy", ["optimal", "heuristic"])
@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"memory": [0.5, 0.5]}, "layer 'layer0' fits on no device: alone it needs 1 B"),
        ({"memory": [2.0, 2.0]}, "the model needs at least 6 B, all devices together have 4 B: 2 B short"),
        (
            {"memory": [0.5, 9.0], "first_stage": ["n0/cpu:0"]},
            "layer 'layer0' fits on no device that may be first",
        ),
        (
            {"memory": [0.5, 9.0], "last_stage": ["n0/cpu:0"]},
            "layer 'layer5' fits on no device that may be last",
        ),
        (
            {"memory": [4.0, 9.0], "first_stage": ["n0/cpu:0"], "last_stage": ["n0/cpu:0"]},
            "only n0/cpu:0 may hold the first stage and only it the last",
        ),
        ({"first_stage": []}, "first_stage is empty"),
        ({"last_stage": []}, "last_stage is empty"),
        (
            {"flops": [1.0], "first_stage": ["n0/cpu:0"], "last_stage": ["n1/cpu:0"]},
            "one layer makes one stage, first and last at once",
        ),
        ({"flops": [1.0] * 2, "speeds": [1] * 3, "memory": [1.0, 1.0, 0.9]}, None),
    ],
)
def test_the_reason(strategy, more, words):
    p = problem(**more)
    if words is None:
        assert plan(p, strategy).stages
    else:
        assert words in reason(p, strategy)


def test_only_as_many_devices_as_layers_count():
    base = problem(flops=[1.0] * 2, speeds=[1] * 3, memory=[6.0, 6.0, 6.0])
    layers = tuple(x.model_copy(update={"state_bytes": 6.5 if i else 5.0}) for i, x in enumerate(base.layers))
    p = base.model_copy(update={"layers": layers})
    assert "fits on no device" in reason(p)
    layers = tuple(x.model_copy(update={"state_bytes": 5.0, "activation_bytes": 0.5}) for x in base.layers)
    assert plan(base.model_copy(update={"layers": layers}))


def test_what_is_enough_is_enough_and_the_least():
    """Random problems that are too tight: with the bytes named it fits, with a hundredth less it does not."""
    checked = 0
    for seed in range(60):
        p = random_problem(seed)
        scale = random.Random(seed).uniform(0.3, 0.8)
        devices = tuple(
            d.model_copy(update={"memory_bytes": scale * (d.memory_bytes or 60.0)}) for d in p.devices
        )
        p = p.model_copy(update={"devices": devices})
        try:
            plan(p)
            continue
        except InfeasibleError as exc:
            needed = enough(str(exc))
        if needed is None:
            continue
        more, device = needed
        assert plan(grown(p, device, more)).stages
        with pytest.raises(InfeasibleError):
            plan(grown(p, device, 0.98 * more - 1))  # whole bytes are named, to three digits
        checked += 1
    assert checked >= 3


@pytest.mark.parametrize("devices", [2, 12])
def test_a_schedule_that_fits_is_named(devices):
    """GPipe keeps all 8 microbatches' activations, 1F1B at most as many as there are stages."""
    base = problem(flops=[1.0] * (2 * devices), speeds=[1.0 + i / 100 for i in range(devices)],
                   memory=[8.0 + devices] * devices, schedule="gpipe", microbatches=8 * devices)  # fmt: skip
    layers = tuple(x.model_copy(update={"activation_bytes": 0.25}) for x in base.layers)
    p = base.model_copy(update={"layers": layers})
    with pytest.raises(InfeasibleError) as raised:
        raise_infeasible(CostModel(p), proved=True)
    assert "--schedule 1f1b fits" in str(raised.value)
    assert plan(p.model_copy(update={"schedule": "1f1b"}), "heuristic").stages


def test_a_schedule_that_fits_where_one_device_must_hold_all():
    pins = {"first_stage": ["n0/cpu:0"], "last_stage": ["n0/cpu:0"]}
    base = problem(memory=[14.0, None], schedule="gpipe", **pins)
    layers = tuple(x.model_copy(update={"activation_bytes": 0.5}) for x in base.layers)
    p = base.model_copy(update={"layers": layers})
    assert "--schedule" not in reason(
        p.model_copy(
            update={
                "layers": base.layers,
                "devices": tuple(d.model_copy(update={"memory_bytes": 4.0}) for d in base.devices),
            }
        )
    )
    assert "--schedule 1f1b fits; or allow another device" in reason(p)


def test_many_equal_devices():
    """Twelve that each hold one and a half layers, for thirteen layers."""
    p = problem(flops=[1.0] * 13, speeds=[1.0] * 12, memory=[1.5] * 12, schedule="sequential")
    text = reason(p)
    more, device = enough(text)
    assert 0.5 <= more <= 1.0
    assert plan(grown(p, device, more)).stages


def test_many_different_devices_get_an_amount_that_was_tried():
    """Proved by the caller; the amount comes from filling good orders, and says so."""
    base = problem(flops=[1.0] * 21, speeds=[1.0] * 20, memory=[(1.9 + i / 1000) for i in range(20)])
    large = tuple(x.model_copy(update={"state_bytes": 2.0**20}) for x in base.layers)
    devices = tuple(d.model_copy(update={"memory_bytes": d.memory_bytes * 2**20}) for d in base.devices)
    p = base.model_copy(update={"layers": large, "devices": devices})
    with pytest.raises(InfeasibleError) as raised:
        raise_infeasible(CostModel(p), proved=True)
    assert "would be enough (less may do)" in str(raised.value)
    more, device = enough(str(raised.value))
    assert more < 0.2 * 2**20
    assert plan(grown(p, device, more), "heuristic").stages


def test_not_proved_says_so():
    p = undecided()
    with pytest.raises(UndecidedError, match="not proved"):
        plan(p, time_limit_s=0.0)
    with pytest.raises(UndecidedError, match="not proved"):
        plan(p, "heuristic")


@pytest.mark.parametrize("count", [0.3, 1.0, 999.0, 1023.5, 1500.2, 1.2345e6, 2.0**30, 3.3333e9, 7.7e12])
def test_rounding_up(count):
    number, unit = _rounded_up(count).split()
    assert count <= float(number) * UNITS[unit] <= max(count * 1.011, count + 1)
    assert human_bytes(float(number) * UNITS[unit]) == _rounded_up(count)
