"""Advice on plans: every claim holds when the changed problem is planned anew; why devices stay unused."""

from __future__ import annotations

import math
import re

import pytest
from tests.planner.planner_problems import problem, random_problem

from skyctl.errors import InfeasibleError
from skyctl.planner.api import assigned, plan
from skyctl.planner.explanation.advice import LINES, WORTH, advise
from skyctl.planner.explanation.plan_reasons import find_binding_constraint
from skyctl.records.problem import Link

UNITS = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}


def changed(p, advice):
    """The problem with the change the advice's text names."""
    if advice.kind == "memory":
        number, unit, device = re.match(r"([\d.]+) (\w+) more on (\S+) would save", advice.text).groups()
        devices = tuple(
            d.model_copy(update={"memory_bytes": d.memory_bytes + float(number) * UNITS[unit]})
            if d.id == device
            else d
            for d in p.devices
        )
        return p.model_copy(update={"devices": devices})
    if advice.kind in ("link", "shared"):
        name = re.match(r"twice the bandwidth of (.+) would save", advice.text)[1]
        ends = set(name.split(" ↔ "))
        twice = [
            x.model_copy(update={"bandwidth_bytes_per_s": 2 * x.bandwidth_bytes_per_s})
            if (
                getattr(x, "name", None) == name or {getattr(x, "source", 0), getattr(x, "target", 0)} == ends
            )
            else x
            for x in (*p.links, *p.shared)
        ]
        return p.model_copy(
            update={"links": tuple(twice[: len(p.links)]), "shared": tuple(twice[len(p.links) :])}
        )
    if advice.kind == "schedule":
        return p.model_copy(update={"schedule": re.match(r"--schedule (\S+) would save", advice.text)[1]})
    if advice.kind == "pin":
        return p.model_copy(update={advice.name: None})
    if advice.kind == "recompute":
        return p.model_copy(update={"recompute": True})
    if advice.kind == "link dtype":
        dtype = re.match(r"--link-dtype (\S+)@slow ", advice.text)[1]
        share = {"bfloat16": 0.5, "int8": 33 / 128}[dtype]
        links = (
            k.model_copy(update={"dtype": dtype, "sent_share": share})
            if k.bandwidth_bytes_per_s < 25e6
            else k
            for k in p.links
        )
        return p.model_copy(update={"links": tuple(links)})
    gone = re.match(r"(\S+) \(", advice.text)[1]
    return p.model_copy(
        update={
            "devices": tuple(d for d in p.devices if d.id != gone),
            "times": {d: t for d, t in p.times.items() if d != gone},
            "links": tuple(k for k in p.links if gone not in (k.source, k.target)),
            "shared": tuple(
                s.model_copy(update={"links": tuple(x for x in s.links if gone not in x)}) for s in p.shared
            ),
            "first_stage": p.first_stage and tuple(d for d in p.first_stage if d != gone),
            "last_stage": p.last_stage and tuple(d for d in p.last_stage if d != gone),
        }
    )


@pytest.mark.parametrize("strategy", ["optimal", pytest.param("heuristic", marks=pytest.mark.slow)])
def test_every_claim_holds(strategy):
    kinds = set()
    for seed in range(20):
        p = random_problem(seed)
        try:
            planned = plan(p, strategy)
        except InfeasibleError:
            continue
        given = advise(planned, budget_s=5.0)
        helps = [a for a in given if a.kind != "device"]
        assert len(helps) <= LINES
        assert sum(a.kind == "schedule" for a in given) <= 1
        for sort in (("schedule", "pin"), ("memory", "link", "shared"), ("device",)):
            saves = [a.saves for a in given if a.kind in sort]
            assert saves == sorted(saves, reverse=True)
        free = [a.kind in ("schedule", "pin") for a in helps]
        assert free == sorted(free, reverse=True)
        for advice in given:
            kinds.add(advice.kind)
            best = plan(changed(p, advice)).certificate.value_s
            assert best <= advice.plan_value_s * (1 + 1e-9), (seed, advice)
            if advice.kind == "device":
                assert "nothing is lost" in advice.text or "at most" in advice.text
            else:
                assert advice.saves >= WORTH
                assert 1 - advice.plan_value_s / planned.certificate.value_s >= advice.saves - 1e-9
                assert f"would save {math.floor(100 * advice.saves + 1e-9)}%" in advice.text
    assert kinds >= {"schedule", "pin", "memory", "device"}


def test_more_memory_on_the_fast_device():
    """It is four times as fast and holds two of six layers."""
    planned = plan(problem(speeds=[1, 4], memory=[None, 2.0]))
    first = advise(planned)[0]
    assert first.kind == "memory"
    assert first.name == "n1/cpu:0"
    assert first.saves == pytest.approx(0.70, abs=0.06)
    assert find_binding_constraint(planned).kind == "memory"
    assert "no further layer fits" in find_binding_constraint(planned).detail


def test_a_faster_link():
    ids = ["n0/cpu:0", "n1/cpu:0"]
    links = tuple(
        Link(source=a, target=b, latency_s=0.0, bandwidth_bytes_per_s=0.2) for a, b in (ids, ids[::-1])
    )
    base = problem(flops=[3.0] * 8, speeds=[1, 1], objective="iteration", microbatches=16, links=links)
    layers = tuple(x.model_copy(update={"output_bytes": 1.5}) for x in base.layers)
    link = next(x for x in advise(plan(base.model_copy(update={"layers": layers}))) if x.kind == "link")
    assert link.saves > 0.02


def test_a_device_that_is_not_missed():
    """The largest layer takes as long as it does; one device is enough for the others."""
    planned = plan(problem(flops=[5.0, 1.0, 1.0], speeds=[1, 1, 1]))
    assert any("nothing is lost without it" in advice.text for advice in advise(planned))


@pytest.mark.parametrize("strategy", ["even", "assigned"])
def test_a_plan_of_no_search_is_told_what_a_search_saves(strategy):
    p = problem(speeds=[1, 4], memory=[None, 5.0])
    planned = plan(p, "even") if strategy == "even" else assigned(p, [("n0/cpu:0", 0, 6)])
    (advice,) = advise(planned)
    assert advice.kind == "strategy"
    best = plan(p).certificate.value_s
    assert best <= advice.plan_value_s * (1 + 1e-9)
    assert advice.saves <= 1 - best / planned.certificate.value_s + 1e-9
    assert advice.text.startswith("--strategy optimal")
    assert ("in place of --assign" in advice.text) == (strategy == "assigned")
    assert advise(plan(problem(speeds=[1, 1]), "even")) == ()


def test_what_costs_nothing_comes_first():
    """GPipe's M in flight fill the fast device's memory; pins keep it from the place it should have."""
    base = problem(
        speeds=[1, 1, 4], memory=[None, None, 9.0], objective="iteration", microbatches=8, schedule="gpipe",
        first_stage=["n0/cpu:0"], last_stage=["n1/cpu:0"],
    )  # fmt: skip
    layers = tuple(x.model_copy(update={"activation_bytes": 0.5}) for x in base.layers)
    p = base.model_copy(update={"layers": layers})
    given = advise(plan(p))
    assert given[0].kind in ("schedule", "pin")
    for advice in given[:2]:
        assert advice.kind != "memory"
        assert plan(changed(p, advice)).certificate.value_s <= advice.plan_value_s * (1 + 1e-9)
    assert not any(
        x.kind == "schedule" for x in advise(plan(p.model_copy(update={"objective": "bottleneck"})))
    )


def test_quiet_where_nothing_helps_or_there_is_no_time():
    assert advise(plan(problem(flops=[1.0] * 6, speeds=[1.0]))) == ()
    assert advise(plan(problem(speeds=[1, 4], memory=[None, 2.0])), budget_s=0.0) == ()
    large = problem(flops=[1.0] * 2000, speeds=[1.0] * 60)
    planned = assigned(
        large, [(d.id, i * 30, i * 30 + (30 if i < 59 else 230)) for i, d in enumerate(large.devices)]
    )
    assert advise(planned.model_copy(update={"strategy": "heuristic"})) == ()


def reasons(p, strategy="optimal"):
    return {u.device: u.reason for u in plan(p, strategy).unused}


def test_unused_for_want_of_memory_or_of_layers():
    why = reasons(problem(speeds=[1, 1, 1], memory=[None, None, 0.5]))
    assert why == {"n2/cpu:0": "its memory is too small for any of the layers"}
    assert reasons(problem(flops=[1.0], speeds=[1, 1]))["n1/cpu:0"] == "only 1 layer"


def test_unused_because_all_of_its_memory_is_reserved():
    p = problem(speeds=[1, 1], memory=[None, 8.0])
    devices = (p.devices[0], p.devices[1].model_copy(update={"reserved_bytes": 9.0}))
    why = reasons(p.model_copy(update={"devices": devices}))
    assert why == {"n1/cpu:0": "it can hold nothing: 9 B of its 8 B are reserved"}


def test_unused_because_of_the_pins():
    why = reasons(problem(speeds=[1, 4], first_stage=["n0/cpu:0"], last_stage=["n0/cpu:0"]))
    assert "n0/cpu:0 must hold both the first and the last stage" in why["n1/cpu:0"]


@pytest.mark.parametrize("objective", ["iteration", "bottleneck"])
def test_unused_names_what_the_best_way_found_costs(objective):
    """One layer for a device twenty times as slow, which then takes 20 s a microbatch; the others 6 s."""
    p = problem(flops=[1.0] * 12, speeds=[1, 1, 0.05], objective=objective, microbatches=8)
    words = {"iteration": "is", "bottleneck": "makes the slowest stage"}
    start = "the plan is proved best without it; the best way found to add it "
    reason = reasons(p)["n2/cpu:0"]
    assert reason.startswith(start + words[objective])
    if objective == "bottleneck":
        assert reason.endswith("233% slower")
    unproved = reasons(p, "heuristic")["n2/cpu:0"]
    assert unproved == reason.replace(
        "the plan is proved best without it", "no faster plan with it was found"
    )


def test_reasons_stay_cheap_for_many():
    """A thousand unused devices: what is alike is looked at once, the rest as far as the tries go."""
    p = problem(flops=[1.0] * 12, speeds=[1.0, 1.0] + [0.01] * 1000, objective="bottleneck")
    planned = assigned(p, [("n0/cpu:0", 0, 6), ("n1/cpu:0", 6, 12)])
    assert {u.reason for u in planned.unused} == {"not assigned"}
    from skyctl.planner.cost_model import CostModel, StageAssignment
    from skyctl.planner.explanation.unused_devices import explain_unused

    for given in (p, p.model_copy(update={"objective": "iteration"})):
        model = CostModel(given)
        reasons = explain_unused(
            model,
            "optimal",
            (StageAssignment(0, 0, 6), StageAssignment(1, 6, 12)),
            planned.certificate,
        )
        assert len(reasons) == 1000
        assert len(set(reasons.values())) == 1
