"""A plan's machines beside what the ranks found: every difference, and nothing that is none."""

from __future__ import annotations

from typing import Any

import pytest

from skyctl.learning.cluster_changes import (
    ClusterChangedError,
    change_table,
    local_memory_changes,
    machine_changes,
    plan_changes,
    refuse_changes,
)
from skyctl.planner.api import plan
from skyctl.records.plan import Machine, Plan
from skyctl.records.problem import Device, Layer, Problem
from skyctl.worker.rank_events import EnvironmentEvent

GIB = 2**30
BOX = Machine(
    device="a/cpu:0", name="a cpu", cpu_model="a cpu", cpus=0.4, threads=1, python="3.11.4", torch="2.6.0"
)


def layer(name: str) -> Layer:
    return Layer(name=name, flops=1e9, state_bytes=0.0, activation_bytes=0.5 * GIB, output_bytes=1e3)


def planned(*machines: Machine) -> Plan:
    """Two stages of 1 GiB and 0.5 GiB: two microbatches in flight, then one."""
    problem = Problem(
        layers=(layer("x"), layer("y")),
        devices=tuple(Device(id=f"{n}/cpu:0", flops_per_s=1e9, memory_bytes=4.0 * GIB) for n in "ab"),
        microbatches=4,
    )
    return plan(problem, "even").model_copy(update={"machines": machines})


def fact(**more: Any) -> EnvironmentEvent:
    defaults = {"device_name": "a cpu", "cpu_model": "a cpu", "cpus": 0.4, "threads": 1, "python": "3.11.9"}
    memory = {"memory_bytes": 2.0 * GIB, "memory_scope": None, "own_bytes": 0.0}
    return EnvironmentEvent(**{**defaults, **memory, "torch": "2.6.0", "devices": ("cpu:0",), **more})


def other(device: str, **more: Any) -> Machine:
    return BOX.model_copy(update={"device": device, **more})


def test_what_is_as_it_was_is_no_difference() -> None:
    the_plan = planned(BOX, other("b/cpu:0"))
    assert plan_changes(the_plan, {0: fact(), 1: fact(cpus=0.43)}) == []
    refuse_changes(the_plan, plan_changes(the_plan, {0: fact(), 1: fact()}))


def test_all_differences_of_all_ranks_come_in_one_table() -> None:
    the_plan = planned(BOX, other("b/cpu:0"))
    facts = {0: fact(torch="2.7.0", cpus=0.2), 1: fact(device_name=None, memory_bytes=None)}
    with pytest.raises(ClusterChangedError) as caught:
        refuse_changes(the_plan, plan_changes(the_plan, facts))
    assert caught.value.exit_code == 5
    assert [(change["where"], change["what"]) for change in caught.value.changes] == [
        ("a/cpu:0", "torch"),
        ("a/cpu:0", "cpus"),
        ("b/cpu:0", "device"),
    ]
    assert "-50%" in caught.value.message
    assert "not there" in caught.value.message
    assert "--ignore-changes" in (caught.value.hint or "")


@pytest.mark.parametrize(
    ("field", "value", "what"),
    [
        ("name", "another", "device"),
        ("cpu_model", "another", "processor"),
        ("threads", 2, "threads"),
        ("python", "3.12.1", "Python"),
    ],
)
def test_each_thing_that_counts(field: str, value: object, what: str) -> None:
    changes = machine_changes(BOX, BOX.model_copy(update={field: value}))
    assert [change.what for change in changes] == [what]


def test_devices_of_one_pot_need_its_memory_together() -> None:
    the_plan = planned(BOX, other("b/cpu:0"))
    need = sum(replica.memory_bytes for replica in the_plan.predicted.replicas)
    alone = {"memory_bytes": 0.7 * need}
    assert plan_changes(the_plan, {0: fact(**alone), 1: fact(**alone)}) == []
    # one pot: each sees what the other holds already as taken
    shared = {"memory_bytes": 0.7 * need, "memory_scope": "pot", "own_bytes": 0.1 * need}
    (change,) = plan_changes(the_plan, {0: fact(**shared), 1: fact(**shared)})
    assert (change.where, change.what, change.change) == ("a/cpu:0, b/cpu:0", "free memory", "-20%")


def test_ranks_on_this_machine_need_its_memory_together() -> None:
    the_plan = planned()
    needs = {replica.device: replica.memory_bytes for replica in the_plan.predicted.replicas}
    need = sum(needs.values())
    assert local_memory_changes(the_plan, "ab", need) == []
    assert local_memory_changes(the_plan, (), 0.0) == []
    assert local_memory_changes(the_plan, "b", needs["b/cpu:0"]) == []
    (change,) = local_memory_changes(the_plan, "ab", 0.8 * need)
    assert (change.where, change.what, change.change) == ("a/cpu:0, b/cpu:0", "free memory", "-20%")


def test_a_plan_without_machines_is_checked_between_its_ranks() -> None:
    the_plan = planned()
    assert plan_changes(the_plan, {0: fact(cpus=9.0), 1: fact(torch="2.6.1+cu124")}) == []
    (change,) = plan_changes(the_plan, {0: fact(), 1: fact(torch="2.7.0")})
    assert (change.where, change.then, change.now) == ("b/cpu:0", "2.6.0 on a/cpu:0", "2.7.0")


def test_the_table_is_aligned() -> None:
    changes = machine_changes(BOX, BOX.model_copy(update={"cpus": 0.2, "torch": "2.7.0"}))
    heading, *rows = change_table(changes)
    assert heading.index("what") == rows[0].index("torch") == rows[1].index("cpus")
