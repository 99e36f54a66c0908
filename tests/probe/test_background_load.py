"""The verdicts on background load: made-up counts to conditions, and real counts of a real busy neighbour."""

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, cast

import pytest

from skyctl.probe.background_load import (
    CpuUse,
    LoadReading,
    judge_load,
    numa_note,
)
from skyctl.probe.device_probes import DeviceProbe, TaskLike
from skyctl.probe.node import load_counters as node
from skyctl.probe.resource_shares import assign_threads, divide_threads
from skyctl.records.cluster import Node


def watched(**more: Any) -> LoadReading:
    """A device of one thread under a quota of half a cpu, alone and busy for ten seconds."""
    counts = {
        "wall_s": 10.0,
        "own_s": 5.0,
        "scope_s": 5.05,
        "machine_s": 5.2,
        "machine_cpus": 2,
        "steal_s": 0.0,
        "ran_s": 4.9,
        "waited_s": 5.1,
        "overheated": None,
        "left_out_s": 0.0,
        "gpu": None,
    }
    given = {"scope": "m/1", "machine": "m", "cpus": 0.5, "bound": True, "threads": 1}
    given |= {"on_cpu": True, "slowdown": 1.0, "allowed": frozenset()}
    given |= {name: more.pop(name) for name in list(more) if name in given}
    return LoadReading(**given, counts=counts | more)


def notes(device: LoadReading, *others: LoadReading) -> str:
    judged = judge_load({"it": device, **{f"o{i}": other for i, other in enumerate(others)}})
    return " | ".join(judged["it"].notes)


def test_alone_nobody_is_accused() -> None:
    judged = judge_load({"it": watched()})["it"]
    assert judged.notes == ()
    assert judged.share == pytest.approx(1.0, abs=0.02)
    assert judged.own_cpus == 0.5
    assert judged.others_cpus == pytest.approx(0.005)


def test_half_a_quota_eaten() -> None:
    judged = judge_load({"it": watched(own_s=2.5, ran_s=2.5, waited_s=7.5)})["it"]
    assert judged.share == pytest.approx(0.5, abs=0.02)
    assert "other processes used 0.26 of this node's 0.5 cpus" in judged.notes[0]
    assert len(judged.notes) == 1


def test_the_probe_s_other_processes_are_no_strangers() -> None:
    half = watched(own_s=2.5, ran_s=2.5, waited_s=7.5)
    assert notes(half, half) == "", "two devices of one node"
    free = {"scope": "m", "bound": False, "cpus": 2.0, "scope_s": None}
    local = watched(**free, own_s=9.9, machine_s=20.0, ran_s=9.9, waited_s=0.1)
    assert notes(local, local) == ""
    assert "other processes used 1.01 of this node's 2 cpus" in notes(local)
    assert judge_load({"it": local})["it"].share == pytest.approx(0.99), "one thread has a cpu to itself"
    assert judge_load({"it": local}, {"m": CpuUse(1.0)})["it"].notes == (), "the launcher is one of us"


def test_one_cpu_by_affinity_of_which_half_is_eaten() -> None:
    judged = judge_load(
        {"it": watched(scope="m", bound=False, cpus=1.0, own_s=5.0, machine_s=10.0, machine_cpus=1)}
    )["it"]
    assert judged.share == pytest.approx(0.5)
    assert "0.50 of this node's 1 cpu " in judged.notes[0]


def test_what_runs_on_other_processors_is_neither_ours_nor_anothers() -> None:
    """Two nodes of one machine, each on two processors of its own; a stranger takes one of the first's."""
    free = {"bound": False, "cpus": 2.0, "scope_s": None, "threads": 2}
    disturbed = watched(
        **free, scope="m/cpus 0,1", allowed=frozenset({0, 1}), own_s=10.0, machine_s=20.0, ran_s=10.0
    )
    alone = watched(**free, scope="m/cpus 2,3", allowed=frozenset({2, 3}), own_s=20.0, machine_s=20.0)
    judged = judge_load({"a": disturbed, "b": alone}, {"m": CpuUse(1.0, frozenset({2, 3}))})
    assert "other processes used 1.00 of this node's 2 cpus" in judged["a"].notes[0]
    assert (judged["b"].notes, judged["b"].share) == ((), 1.0)
    assert CpuUse(1.0, frozenset(range(4))).of(frozenset({0, 9})) == 0.25


def member(name: str, affinity: list[int] | None, **more: Any) -> DeviceProbe:
    facts = {"device": "cpu:0", "boot_id": "m", "threads": 8, "affinity": affinity}
    facts |= {"cpus": float(len(affinity or ())), "cpu_scope": f"m/{affinity}", "bound": False}
    return DeviceProbe(Node(name=name, transport="local"), "127.0.0.1", cast(TaskLike, None), facts | more)


def test_threads_are_shared_with_those_on_the_same_processors_only() -> None:
    left, right = member("a", [0, 1, 2, 3]), member("b", [4, 5, 6, 7])
    assert list(assign_threads([left, right]).values()) == [4, 4]
    assert list(assign_threads([left, member("b", [0, 1, 2, 3])]).values()) == [2, 2]
    assert list(assign_threads([left, member("all", list(range(8)))]).values()) == [2, 4], "a part of them"
    quota = member("q", [0, 1, 2, 3], cpu_scope="m/1:2", bound=True, cpus=2.0)
    assert list(assign_threads([left, quota]).values()) == [4, 2]
    elsewhere = member("e", [0, 1, 2, 3], boot_id="other", cpu_scope="other/[0, 1, 2, 3]")
    assert list(assign_threads([left, elsewhere]).values()) == [4, 4]


def test_less_than_the_quota_says_who() -> None:
    starved = watched(own_s=3.0, scope_s=3.0, machine_s=20.0, ran_s=3.0, waited_s=7.0)
    assert "used 1.70 processors of this machine" in notes(starved)
    neighbour = watched(scope="m/2", own_s=17.0, scope_s=17.0, cpus=1.7, threads=2)
    assert "want more processors than it has" in notes(starved, neighbour)
    waits = watched(own_s=3.0, scope_s=3.0, machine_s=3.0, ran_s=3.0, waited_s=3.0, left_out_s=4.0)
    assert (
        notes(waits) == "it waited 4.0 s for something else than a processor (a disk?): left out of its times"
    )
    assert notes(watched(own_s=3.0, scope_s=3.0, ran_s=3.0, waited_s=7.0, slowdown=2.0)) == ""


def test_heat_and_theft() -> None:
    assert "throttled for its heat" in notes(watched(overheated=3))
    assert "took 0.40 processors away" in notes(watched(steal_s=4.0))


def test_what_is_not_counted_is_not_judged() -> None:
    judged = judge_load(
        {"it": watched(scope_s=None, machine_s=None, steal_s=None, ran_s=None, waited_s=None)}
    )["it"]
    assert (judged.others_cpus, judged.share, judged.notes) == (None, None, ())


def test_a_card_that_others_use() -> None:
    gpu = {"index": 0, "uuid": "x", "busy": 0.6, "held_bytes": 3 * 2**30}
    judged = judge_load({"it": watched(on_cpu=False, gpu=gpu)})["it"]
    assert judged.share == pytest.approx(0.4)
    assert "busy 60% of the time" in judged.notes[0]
    assert "3.0 GiB of its memory" in judged.notes[1]
    assert judge_load({"it": watched(on_cpu=False)})["it"].share is None


def test_threads_are_shared() -> None:
    assert divide_threads([None], [8], 8.0) == [8]
    assert divide_threads([None, None, None], [8, 8, 8], 8.0) == [2, 2, 2]
    assert divide_threads([None, 6, None], [8, 8, 8], 8.0) == [1, 6, 1]
    assert divide_threads([None] * 3, [2] * 3, 2.0) == [1, 1, 1]
    assert divide_threads([None], [64], 2.5) == [2], "a quota in a container"
    assert divide_threads([None], [4], 0.4) == [1]
    assert divide_threads([], [], 4.0) == []


def test_numa() -> None:
    assert numa_note(8, 2) is not None
    assert numa_note(1, 2) is None
    assert numa_note(8, 1) is numa_note(8, None) is None


def test_nvidia_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert node.gpu_usage() == [], "none there"
    fake = tmp_path / "nvidia-smi"
    fake.write_text("#!/bin/sh\necho '0, GPU-aa, 35, 1024'\necho '1, GPU-bb, [N/A], [N/A]'\necho rubbish\n")
    fake.chmod(0o755)
    gpus = node.gpu_usage()
    assert gpus == [
        {"index": 0, "uuid": "aa", "busy": 0.35, "held_bytes": 2.0**30},
        {"index": 1, "uuid": "bb", "busy": None, "held_bytes": None},
    ]
    assert node.find_gpu(gpus, 0, "bb") == gpus[1], "torch may number them otherwise"
    assert node.find_gpu(gpus, 1, None) == gpus[1]
    assert node.find_gpu(gpus, 0, "cc") is None
    fake.write_text("#!/bin/sh\necho 'No devices were found'; exit 6\n")
    assert node.gpu_usage() == []


def test_guests_are_counted_once_and_steal_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stat = tmp_path / "stat"
    stat.write_text("cpu 9 9 9 9\ncpu0 100 10 20 5000 7 3 4 50 60 5\ncpu1 1000 0 0 0 0 0 0 0 0 0\nintr 5\n")
    monkeypatch.setattr(node, "cpu_affinity", lambda: [0])
    tick = os.sysconf("SC_CLK_TCK")
    assert node._busy_s(stat) == (137 / tick, 50 / tick)
    assert node._busy_s(tmp_path / "none") is None


def test_heat_counters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node, "THERMAL_FOLDER", tmp_path)
    monkeypatch.setattr(node, "cpu_affinity", lambda: [0, 1])
    assert node._overheat_count() is None
    for number in (0, 1):
        folder = tmp_path / f"cpu{number}" / "thermal_throttle"
        folder.mkdir(parents=True)
        (folder / "core_throttle_count").write_text(f"{number}\n")
        (folder / "package_throttle_count").write_text("7\n")
    assert node._overheat_count() == 8


@pytest.mark.alone
@pytest.mark.skipif(not Path("/proc/stat").exists(), reason="needs Linux")
def test_a_real_neighbour_is_seen() -> None:
    cpu = max(os.sched_getaffinity(0))
    spin = f"import os; os.sched_setaffinity(0, {{{cpu}}}); print(flush=True)\nwhile True: pass"
    mine = os.sched_getaffinity(0)
    neighbour = subprocess.Popen([sys.executable, "-c", spin], stdout=subprocess.PIPE)
    try:
        assert neighbour.stdout is not None
        neighbour.stdout.readline()
        os.sched_setaffinity(0, {cpu})
        watch = node.LoadCounters()
        end = time.monotonic() + 1.0
        while time.monotonic() < end:
            pass
        counts = watch.read()
    finally:
        os.sched_setaffinity(0, mine)
        neighbour.kill()
        neighbour.communicate()
    it = LoadReading("m", "m", 1.0, False, 1, True, 1.0, counts)
    judged = judge_load({"it": it})["it"]
    assert "other processes used" in judged.notes[0]
    assert judged.share is not None
    assert judged.share < 0.75


def test_a_virtual_machines_cores_that_halt_are_noticed(tmp_path: Path) -> None:
    cpuinfo, stat = tmp_path / "cpuinfo", tmp_path / "stat"
    lines = [f"cpu{number} 10 0 5 {{idle}} 0 0 0 0 0 0" for number in sorted(os.sched_getaffinity(0))]

    def write(idle: int) -> None:
        stat.write_text("\n".join(["cpu 10 0 5 7 0 0 0", *lines]).format(idle=idle))

    cpuinfo.write_text("flags : fpu vme\n")
    write(100)
    assert node.HaltWatch(stat, cpuinfo).share() is None
    cpuinfo.write_text("flags : fpu hypervisor vme\n")
    awake, halting = node.HaltWatch(stat, cpuinfo), node.HaltWatch(stat, cpuinfo)
    assert awake.share() == 0.0
    write(100_000)
    assert halting.share() == 1.0
