"""Faults of a run under way: the first cause is named, everything stops, nothing is left."""

from __future__ import annotations

import json
import re
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from ..helpers.processes import left_of_state

STEPS = ("--steps", "400")


def test_a_whole_run(planned) -> None:
    done = planned.run("launch", "plan.json", "--steps", "4", "--trace", "--json")
    assert done.returncode == 0, done.stderr
    measured = json.loads(done.stdout)
    assert [step["step"] for step in measured["steps"]] == [0, 1, 2, 3]
    assert Path(measured["weights"]).is_file()
    assert len(measured["replicas"]) == 2
    folder = Path(measured["weights"]).parent
    assert json.loads((folder / "measurement.json").read_text()) == measured
    for replica in measured["replicas"]:
        parts_s = sum(replica[name] for name in ("forward_s", "backward_s", "optimizer_s"))
        # Medians of three steps, one by one: they add up to twice where two steps each disturb other parts.
        assert 0 < parts_s <= 2.01 * replica["compute_s"]
        assert replica["predicted"]["forward_s"] > 0
    assert Path(measured["trace"]) == folder / "trace.json"
    slices = [e for e in json.loads((folder / "trace.json").read_text())["traceEvents"] if e["ph"] == "X"]
    assert {e["args"]["step"] for e in slices} == {0, 1, 2, 3}
    assert {(e["pid"], e["tid"]) for e in slices} == {(1, 1), (1, 2), (2, 1), (2, 2)}
    assert not list(folder.glob(".*"))
    assert left_of_state(planned.state) == []


def test_a_plan_for_other_devices(planned, complains: Callable[..., None]) -> None:
    planned.cluster("other", "names")
    complains(planned.run_inside("launch", "plan.json", code=None), 5, "fast/cpu:0", "other, names")


def test_a_device_that_is_not_there(planned, complains: Callable[..., None]) -> None:
    plan = (planned.folder / "plan.json").read_text()
    (planned.folder / "plan.json").write_text(plan.replace("slow/cpu:0", "slow/cuda:7"))
    complains(planned.run_inside("launch", "plan.json", code=None), 5, "slow/cuda:7", "cuda:7")
    assert left_of_state(planned.state) == []


def test_flags_that_the_plan_has_settled(planned, complains: Callable[..., None]) -> None:
    complains(
        planned.run_inside("launch", "plan.json", "--batch-size", "4", code=None),
        2,
        "--batch-size 4",
        "plan.json",
    )


def test_a_dry_run_shows_what_each_rank_is_told(planned) -> None:
    done = planned.run_inside("launch", "plan.json", "--dry-run", "--json", code=None)
    assert done.returncode == 0, done.stderr
    ranks = json.loads(done.stdout)["ranks"]
    assert [rank["device"] for rank in ranks] == ["fast/cpu:0", "slow/cpu:0"]
    assert ranks[0]["payload"]["world"]["secrets"] == {}


def test_a_plan_for_another_workload(planned, complains: Callable[..., None]) -> None:
    planned.train((planned.folder / "train.py").read_text().replace("nn.Linear(8, 3)", "nn.Linear(8, 4)"))
    complains(planned.run_inside("launch", "plan.json", code=None), 5, "train.py", "plan again")


@pytest.mark.slow
def test_a_rank_that_dies_by_a_signal_is_named(planned, complains: Callable[..., None]) -> None:
    """By itself; ``test_survival.py`` kills one."""
    planned.fault.write_text("SIGILL")
    done = planned.run_inside("launch", "plan.json", *STEPS, code=None)
    complains(done, 1, "rank 0 on fast/cpu:0", "node fast", "SIGILL")
    assert left_of_state(planned.state) == []


@pytest.mark.slow
def test_an_exception_in_a_rank_is_shown_and_logged(planned, complains: Callable[..., None]) -> None:
    planned.fault.write_text("raise")
    done = planned.run_inside("launch", "plan.json", *STEPS, code=None)
    complains(done, 1, "rank 0", "the thirtieth", "forward", "log:")
    log = re.search(r"log: +(.*)", done.stderr)
    assert log is not None
    assert "ValueError: the thirtieth" in Path(log[1]).read_text()
    assert left_of_state(planned.state) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("signum", "code"),
    [
        pytest.param(signal.SIGINT, 130, marks=pytest.mark.matrix),  # test_survival.py interrupts one
        (signal.SIGTERM, 143),
    ],
)
def test_an_interrupt_stops_everything(planned, signum: signal.Signals, code: int) -> None:
    run = planned.launch("plan.json", *STEPS).wait_for(1)
    run.child.process.send_signal(signum)
    run.end(code)
    assert left_of_state(planned.state) == []


@pytest.mark.slow
@pytest.mark.lab
def test_a_full_disk_in_the_runs_folder(planned, complains: Callable[..., None]) -> None:
    """A real full disk: a tiny file system, so this needs root."""
    runs = planned.state / "runs"
    runs.mkdir(exist_ok=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16k", "none", runs], check=True)
    try:
        (runs / "filler").write_bytes(b"x" * 4096)
        done = planned.run_inside("launch", "plan.json", "--steps", "2", code=None)
        complains(done, 1, "No space left on device", str(runs))
    finally:
        subprocess.run(["umount", runs], check=True)
    assert left_of_state(planned.state) == []


@pytest.mark.slow
def test_names_with_blanks_and_metacharacters(tmp_path: Path, here) -> None:
    odd = tmp_path / 'a b\'; echo "$(touch pwned)" &'
    here.folder.rename(odd)
    here.folder = odd
    here.cluster("fast $(touch pwned)", "slow; touch pwned")
    here.plan()
    done = here.run_inside("launch", "plan.json", "--steps", "2", "--json", code=None)
    assert done.returncode == 0, done.stderr
    assert {r["device"] for r in json.loads(done.stdout)["replicas"]} == {
        "fast $(touch pwned)/cpu:0",
        "slow; touch pwned/cpu:0",
    }
    assert not list(tmp_path.rglob("pwned"))
