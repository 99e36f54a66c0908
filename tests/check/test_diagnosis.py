"""From what a node is to outcomes of checks."""

from __future__ import annotations

from typing import Any

import pytest

from skyctl.check import diagnosis
from skyctl.check.check_report import DtypeReport, PairReport, Tick
from skyctl.errors import HostKeyError, InputError, LoginError, SkyctlError, UnfitError, UnreachableError
from skyctl.records.cluster import Node

NODE = Node(name="tower", host="192.0.2.10")
FACTS: dict[str, Any] = {
    "python": "3.11.7",
    "executable": "/usr/bin/python3",
    "cpus": 8,
    "cpu_quota": None,
    "memory_total_bytes": 16 << 30,
    "memory_available_bytes": 8 << 30,
    "memory_limit_bytes": None,
    "nofile": [1024, 1 << 20],
    "shm_bytes": 1 << 30,
    "cache": {"path": "/home/ada/.cache/skyctl", "free_bytes": 50 << 30},
    "tmp": {"path": "/tmp", "free_bytes": 50 << 30},
}
TORCH: dict[str, Any] = {
    "torch": "2.13.0+cu130",
    "distributed": True,
    "threads": 8,
    "devices": [
        {"id": "cuda:0", "name": "GTX", "memory_bytes": 8 << 30},
        {"id": "cpu:0", "name": "cpu", "memory_bytes": None},
    ],
    "missing": [],
    "faults": {},
}


@pytest.mark.parametrize(
    ("error", "problem", "hint"),
    [
        (UnreachableError("no route", node="tower"), "reach", "ssh 192.0.2.10"),
        (HostKeyError("unknown key", node="tower"), "host key", "--accept-new-host-keys"),
        (HostKeyError("changed key", node="tower", hint="own hint"), "host key", "own hint"),
        (LoginError("no key", node="tower"), "login", "ssh-copy-id"),
        (UnfitError("no python3", node="tower"), "python", "Python 3.10"),
        (InputError("can't read key file"), "reach", "cluster.yaml"),
        (SkyctlError("odd"), "reach", "cluster.yaml"),
    ],
)
def test_connection(error: SkyctlError, problem: str, hint: str) -> None:
    ticks = diagnosis.connection_ticks(NODE, error)
    assert [tick.name for tick in ticks] == list(diagnosis.CHECK_NAMES)
    at = diagnosis.CHECK_NAMES.index(problem)
    assert [tick.status for tick in ticks] == ["ok"] * at + ["failed"] + ["skipped"] * (9 - at)
    assert ticks[at].found == error.message
    assert hint in str(ticks[at].hint)


def test_local_nodes_have_no_login() -> None:
    local = Node(name="l", transport="local")
    ticks = diagnosis.connection_ticks(local, UnfitError("no python", node="l"))
    assert [tick.name for tick in ticks][:3] == ["reach", "python", "torch"]
    assert [tick.status for tick in ticks][:3] == ["ok", "failed", "skipped"]
    assert diagnosis.connection_ticks(local, LoginError("odd", node="l"))[0].status == "failed"


def statuses(ticks: list[Tick]) -> list[str]:
    return [tick.status for tick in ticks]


def test_torch_and_devices() -> None:
    ticks = diagnosis.torch_ticks(NODE, TORCH)
    assert [tick.found for tick in ticks] == ["2.13.0+cu130", "cuda:0 (GTX, 8.0 GiB), cpu:0"]
    assert statuses(ticks) == ["ok", "ok"]
    missing = UnfitError("node tower has no torch in /usr/bin/python3", node="tower")
    assert statuses(diagnosis.torch_ticks(NODE, missing)) == ["failed", "skipped"]
    for change, expected in [
        ({"torch": "2.5.1"}, ["failed", "ok"]),
        ({"torch": "2.6.0a0+git"}, ["ok", "ok"]),
        ({"distributed": False}, ["failed", "ok"]),
        ({"missing": ["cuda:1"]}, ["ok", "failed"]),
        ({"faults": {"cuda:0": "RuntimeError: no kernel image"}}, ["ok", "failed"]),
    ]:
        ticks = diagnosis.torch_ticks(NODE, {**TORCH, **change})
        assert statuses(ticks) == expected, change
        assert all(tick.hint for tick in ticks if tick.status == "failed")


def test_a_dtype_is_spoken_of_where_it_does_not_simply_work() -> None:
    works = DtypeReport(dtype="bfloat16", works=True, max_cpu_isa=None, died_by=None)
    assert diagnosis.dtype_ticks(NODE, [works]) == []
    kept_to = works.model_copy(update={"max_cpu_isa": "AVX2", "died_by": "SIGILL"})
    (capped,) = diagnosis.dtype_ticks(NODE, [kept_to])
    assert capped.status == "ok"
    assert "ONEDNN_MAX_CPU_ISA=AVX2 (SIGILL without" in str(capped.found)
    (broken,) = diagnosis.dtype_ticks(NODE, [works.model_copy(update={"works": False, "died_by": "SIGILL"})])
    assert broken.status == "warning"
    assert "--dtype float32" in str(broken.hint)


def test_limits() -> None:
    assert statuses(diagnosis.limits_ticks(NODE, FACTS)) == ["ok"]
    for change, status, words in [
        ({"tmp": {"path": "/tmp", "free_bytes": 1 << 20}}, "failed", "1.0 MiB free in /tmp"),
        ({"cache": {"path": "/c", "free_bytes": 500 << 20}}, "warning", "500.0 MiB free in /c"),
        ({"nofile": [256, 512]}, "warning", "512 open files"),
        ({"shm_bytes": 64 << 20}, "warning", "/dev/shm holds 64.0 MiB"),
        ({"memory_available_bytes": 100 << 20}, "warning", "100.0 MiB memory free"),
    ]:
        (tick,) = diagnosis.limits_ticks(NODE, {**FACTS, **change})
        assert (tick.status, tick.found) == (status, tick.found)
        assert words in str(tick.found)
        assert tick.hint
    unknown = {"nofile": None, "shm_bytes": None}
    unknown |= {"tmp": {"path": "/tmp", "free_bytes": None}, "cache": {"path": "/c", "free_bytes": None}}
    assert statuses(diagnosis.limits_ticks(NODE, {**FACTS, **unknown})) == ["ok"]
    held = {"memory_total_bytes": 24 << 30, "memory_available_bytes": 3 << 30, "memory_limit_bytes": 4 << 30}
    for node, change, words in [
        (NODE, {}, "8.0 GiB of 16.0 GiB memory (free)"),
        (NODE, held, "3.0 GiB of 24.0 GiB memory (cgroup limit)"),
        (NODE.model_copy(update={"memory_gib": 2.0}), held, "2.0 GiB of 24.0 GiB memory (memory_gib)"),
    ]:
        (tick,) = diagnosis.limits_ticks(node, {**FACTS, **change})
        assert words in str(tick.found)
    (over,) = diagnosis.limits_ticks(NODE.model_copy(update={"memory_gib": 6.0}), {**FACTS, **held})
    assert over.found == "memory_gib: 6, but it has 4.0 GiB"
    greedy = NODE.model_copy(update={"threads": 16, "memory_gib": 32.0})
    assert statuses(diagnosis.limits_ticks(greedy, FACTS)) == ["warning", "warning"]
    # memory_gib is of the cards where the node has some
    cards = greedy.model_copy(update={"threads": 1, "devices": ("cuda:0",)})
    assert statuses(diagnosis.limits_ticks(cards, FACTS)) == ["ok"]


@pytest.mark.parametrize(
    ("offset_s", "round_trip_s", "status"),
    [(0.0, 0.001, "ok"), (1.0, 0.01, "ok"), (-3.0, 0.01, "warning"), (5.0, 0.1, "warning"), (3.0, 9.0, "ok")],
)
def test_clock(offset_s: float, round_trip_s: float, status: str) -> None:
    tick = diagnosis.clock_tick(offset_s, round_trip_s)
    assert tick.status == status
    if status == "warning":
        assert ("behind" if offset_s < 0 else "ahead") in str(tick.found)


def test_a_clock_that_is_years_off_is_not_said_in_seconds() -> None:
    assert diagnosis.clock_tick(-1.795e9, 0.01).found == "56 years behind this machine"


def test_same_torch() -> None:
    assert diagnosis.torch_version_warnings({}) == {}
    assert diagnosis.torch_version_warnings({"a": "2.13.0+cpu", "b": "2.13.1+cu130"}) == {}
    odd = diagnosis.torch_version_warnings({"a": "2.13.0", "b": "2.12.0", "c": "2.13.0"})
    assert list(odd) == ["b"]
    assert odd["b"].found == "2.12.0, while others have 2.13"


def test_pair_hint_names_the_vpn() -> None:
    pair = PairReport(source="a", target="b", error="x")
    nodes = {"a": Node(name="a"), "b": Node(name="b", interface="wg0")}
    general = diagnosis.pair_hint(pair, nodes, {"a": {"eth0": "192.0.2.1"}, "b": {"wg0": "10.0.0.2"}})
    assert "from a to b" in general
    assert "`interface: tailscale0`" in general
    both = {"a": {"eth0": "192.0.2.1", "tailscale0": "100.64.0.1"}, "b": {"wg0": "10.0.0.2"}}
    assert "`interface: tailscale0` for node 'a' in cluster.yaml" in diagnosis.pair_hint(pair, nodes, both)
