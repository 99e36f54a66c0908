"""``ps``, ``logs``, ``attach``, ``stop`` on what is written down; with nodes: ``faults/test_detached.py``."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path

import pytest
import torch
from tests.planner.data_problems import data_problem

from skyctl.checkpoint.node import safetensors
from skyctl.files import RunPaths, write_atomic
from skyctl.planner.api import plan
from skyctl.records.base import timestamp
from skyctl.records.plan import WorkloadRef
from skyctl.records.problem import Device, Layer, Problem
from skyctl.records.rhythm import Rhythm
from skyctl.records.run_state import NodeSession, RunAttempt, RunState
from skyctl.run.run_lock import acquire_run_lock, this_process
from skyctl.supervision.run_status import counted_unit
from skyctl.workload.shipped_files import digest_workload
from skyctl.workload.workload_spec import WorkloadSpec

from ..helpers.commands import Done, run_here

Skyctl = Callable[..., Done]
LONG_AGO = "2026-01-02T03:04:05.000+00:00"


@pytest.fixture
def skyctl(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Skyctl:
    """Runs it in this process."""
    monkeypatch.setenv("NO_COLOR", "1")
    return partial(run_here, capsys)


def make(run_id: str, **more: object) -> RunPaths:
    """A run's folder with a state."""
    paths = RunPaths(run_id).create()
    fields: dict[str, object] = {
        "run_id": run_id,
        "created": timestamp("milliseconds"),
        "written": timestamp("milliseconds"),
        "workload": "gpt:layers=2",
        "cluster": "here",
        "steps": 20,
        "attempts": (
            RunAttempt(
                number=1,
                began=timestamp("milliseconds"),
                why="launched",
                from_step=0,
                devices=("a/cpu:0", "b/cpu:0"),
            ),
        ),
        **more,
    }
    write_atomic(paths.state, RunState(**fields).to_json())
    return paths


def test_ps_lists_the_newest_first_and_leaves_old_ones_out(skyctl: Skyctl) -> None:
    assert "no run" in skyctl("ps").stdout
    make("20260102-030405-aaaa", status="done", created=LONG_AGO, written=LONG_AGO, step=20)
    make("20261121-030405-bbbb", status="failed", detail="rank 0 died", step=7, loss=1.5, iteration_s=0.25)
    running = make("20261121-040405-cccc", status="running", step=3, checkpoint=2, away=("b",))
    (running.folder / "supervisor.lock").touch()
    (RunPaths("20261121-050405-dddd").create()).folder.joinpath("state.json").write_text("{}")
    with acquire_run_lock(running, attached=True):
        done = skyctl("ps")
        assert done.returncode == 0, done.stderr
        rows = [line.split()[0] for line in done.stdout.splitlines() if "/20" in line]
        assert rows == ["20261121-040405-cccc", "20261121-030405-bbbb"]
        assert "20261121-040405-cccc: node b away" in done.stdout
        assert "20261121-030405-bbbb: rank 0 died" in done.stdout
        assert "state.json must be of kind" in done.stderr
        every = json.loads(skyctl("ps", "-a", "--json").stdout)["runs"]
    assert [(run["run_id"][-4:], run["status"], run["supervised"]) for run in every] == [
        ("cccc", "running", "alive"),
        ("bbbb", "failed", "gone"),
        ("aaaa", "done", "gone"),
    ]
    assert (every[1]["loss"], every[1]["iteration_s"], every[0]["checkpoint"]) == (1.5, 0.25, 2)
    assert "order" not in every[0]


def test_a_run_dated_ahead_of_the_clock_has_no_age_of_zero(skyctl: Skyctl) -> None:
    """It is from when the clock was wrong, and comes last."""
    ahead = (datetime.now(UTC) + timedelta(days=3652, hours=1)).isoformat(timespec="milliseconds")
    make("20361121-030405-aaaa", status="done", created=ahead, written=ahead, step=20)
    make("20261121-030405-bbbb", status="done", step=20)
    rows = [line.split() for line in skyctl("ps").stdout.splitlines() if "/20" in line]
    assert [row[0] for row in rows] == ["20261121-030405-bbbb", "20361121-030405-aaaa"]
    assert rows[0][-1] == "s"
    assert rows[1][-3:] == ["9", "years", "ahead"]


def test_ps_says_why_nodes_can_not_be_asked(skyctl: Skyctl) -> None:
    session = NodeSession(node="a", session="s-x", cache="/c")
    make("20261121-040405-cccc", status="running", sessions=(session,), cluster_file="/nowhere/cluster.yaml")
    done = skyctl("ps")
    assert done.returncode == 0
    assert "20261121-040405-cccc: node a did not answer" in done.stdout
    (run,) = json.loads(skyctl("ps", "--json").stdout)["runs"]
    assert (run["status"], run["nodes"][0]["node"]) == ("unsupervised", "a")
    assert "/nowhere/cluster.yaml" in run["nodes"][0]["error"] or "connect" in run["nodes"][0]["error"]
    assert json.loads(skyctl("ps", "--json", "--offline").stdout)["runs"][0]["nodes"] is None


def test_another_machines_run_is_left_to_it(skyctl: Skyctl) -> None:
    paths = make("20261121-040405-cccc", status="running")
    other = this_process(attached=True).model_copy(update={"host": f"not-{socket.gethostname()}"})
    paths.lock.write_text(other.model_dump_json())
    assert f"supervised on {other.host}" in skyctl("ps").stdout
    for command in ("attach", "stop"):
        done = skyctl(command, "cccc")
        assert (done.returncode, "error:" in done.stderr) == (1, True)
        assert other.host in done.stderr
        assert str(paths.lock) in done.stderr


@pytest.mark.slow
def test_logs_of_a_run_that_has_ended(skyctl: Skyctl) -> None:
    paths = make("20261121-040405-cccc", status="stopped")
    make("20261121-040405-ccdd", status="stopped")
    paths.log(0).write_text("".join(f"zero {n}\n" for n in range(5)))
    paths.log(1).write_text("one\n")
    paths.supervisor_log.write_text("2026-11-21T00:00:00+00:00 phase: training\n")
    done = skyctl("logs", "cccc", "-n", "2")
    assert done.stdout == "[0 a] zero 3\n[0 a] zero 4\n[1 b] one\n"
    assert skyctl("logs", "cccc", "--rank", "1", "-f").stdout == "one\n"
    assert skyctl("logs", "cccc", "--rank", "b").stdout == "[1 b] one\n"
    assert "phase: training" in skyctl("logs", "cccc", "--supervisor").stdout
    lines = json.loads(skyctl("logs", "cccc", "--rank", "1", "--json").stdout)["lines"]
    assert lines == [{"attempt": 1, "who": "rank 1", "node": "b", "rank": 1, "text": "one"}]
    several = skyctl("logs", "20261121")
    assert (several.returncode, "cccc, 20261121-040405-ccdd" in several.stderr) == (2, True)
    for wrong in (("--rank", "c"), ("--attempt", "4"), ("-f", "--json"), ("--supervisor", "--rank", "0")):
        done = skyctl("logs", "cccc", *wrong)
        assert (done.returncode, done.stderr.count("error:")) == (2, 1), wrong


def test_what_has_ended_is_said_and_left(skyctl: Skyctl) -> None:
    paths = make("20261121-040405-cccc", status="failed", detail="rank 0 died of it")
    done = skyctl("attach")
    assert (done.returncode, "rank 0 died of it" in done.stderr) == (1, True)
    done = skyctl("stop", "cccc", "--json")
    assert done.returncode == 0
    assert json.loads(done.stdout)["runs"] == [
        {
            "run_id": paths.run_id,
            "status": "failed",
            "already": True,
            "checkpoint": None,
            "unreached": {},
        }
    ]
    done = skyctl("stop")
    assert (done.returncode, "no run is under way" in done.stderr) == (0, True)
    assert skyctl("stop", "cccc", "--all").returncode == 2
    assert skyctl("stop", "zzzz").returncode == 2


def test_a_stop_needs_a_name_where_several_go_on(tmp_path: Path, skyctl: Skyctl) -> None:
    for end in ("cccc", "dddd"):
        make(f"20261121-040405-{end}", status="running")
    done = skyctl("stop")
    assert done.returncode == 2
    assert "2 runs go on: 20261121-040405-dddd, 20261121-040405-cccc" in done.stderr


@pytest.mark.slow
def test_a_node_that_can_not_be_told_to_end_is_named(tmp_path: Path, skyctl: Skyctl) -> None:
    """Its agent ends by itself: the exit code is 4, and the time is said."""
    (tmp_path / "cluster.yaml").write_text(
        "name: here\nnodes:\n  - {name: far, host: 127.0.0.1, port: 1, user: nobody}\n"
    )
    connect = {"timeout_s": 2.0, "hold_s": 3600.0, "redial_s": 3600.0, "manual_ack": True}
    paths = make(
        "20261121-040405-cccc",
        status="running",
        sessions=(NodeSession(node="far", session="s-x", cache="/c"),),
        cluster_file=str(tmp_path / "cluster.yaml"),
        order={"connect": connect},
    )
    done = skyctl("stop", "cccc", "--now")
    assert done.returncode == 4, done.stderr + done.stdout
    assert "node far" in done.stderr
    assert "ends all by itself, at the latest on" in done.stderr
    kept = json.loads(paths.state.read_text())
    assert kept["status"] == "stopped"
    assert [session["node"] for session in kept["sessions"]] == ["far"]
    again = skyctl("stop", "cccc")
    assert again.returncode == 4


@pytest.mark.slow
def test_a_run_that_had_not_begun_is_ended_by_attach(tmp_path: Path, skyctl: Skyctl) -> None:
    (tmp_path / "cluster.yaml").write_text("name: here\nnodes:\n  - {name: a, transport: local}\n")
    paths = make(
        "20261121-040405-cccc",
        status="starting",
        attempts=(),
        cluster_file=str(tmp_path / "cluster.yaml"),
        order={"connect": {}},
    )
    done = skyctl("attach")
    assert done.returncode == 1, done.stderr
    assert "had no plan yet" in done.stderr
    assert json.loads(paths.state.read_text())["status"] == "failed"


@pytest.mark.parametrize(
    ("typed", "meant"),
    [("plan.jsno", "plan.json"), ("plna.json", "plan.json"), ("trian.py", "train.py"), ("xyz", None)],
)
def test_launch_names_the_file_that_may_be_meant(
    skyctl: Skyctl, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, typed: str, meant: str | None
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("plan.json", "train.py", "notes.txt"):
        (tmp_path / name).touch()
    done = skyctl("launch", typed)
    assert done.returncode == 2
    assert f"there is no file {typed}" in done.stderr
    assert (f"did you mean {meant}?" in done.stderr) if meant else ("did you mean" not in done.stderr)
    assert "a plan is a .json file" in done.stderr


def test_launch_leaves_what_is_wrong_with_a_model_to_the_model(skyctl: Skyctl, tmp_path: Path) -> None:
    assert "gpt has no 'layrs' (did you mean 'layers'?)" in skyctl("launch", "gpt:layrs=2").stderr
    (tmp_path / "train.py").touch()
    assert "there is no file" not in skyctl("launch", f"{tmp_path}/train.py,width=").stderr


def test_no_command_suggests_what_can_not_help(tmp_path: Path, skyctl: Skyctl) -> None:
    """A run is told to be resumed where it has a checkpoint, with --steps where it has ended well."""
    for command in (("checkpoint", "ls"), ("launch", "--resume", "x"), ("logs",)):
        done = skyctl(*command)
        assert (done.returncode, "skyctl launch PLAN" in done.stderr) == (2, True), done.stderr
    paths = make("20261121-040405-cccc", status="failed", attempts=())
    for command in (("checkpoint", "ls"), ("launch", "--resume", "cccc"), ("checkpoint", "export")):
        done = skyctl(*command)
        assert (done.returncode, "has no plan" in done.stderr) == (2, True), done.stderr
        assert "skyctl plan" not in done.stderr
    layer = Layer(name="l", flops=1.0, state_bytes=1.0, activation_bytes=1.0, output_bytes=1.0)
    device = Device(id="a/cpu:0", flops_per_s=1.0, memory_bytes=None)
    problem = Problem(layers=(layer,) * 2, devices=(device,), microbatches=4)
    paths.keep_plan(plan(problem, assign=[("a/cpu:0", 0, 2)]).to_json())

    def hinted(*words: str, **state: object) -> str:
        make(paths.run_id, cluster_file=str(tmp_path / "cluster.yaml"), **state)
        done = skyctl(*words)
        assert done.returncode == 2, done.stderr
        return done.stderr

    (tmp_path / "cluster.yaml").write_text("name: here\nnodes:\n  - {name: a, transport: local}\n")
    assert "--resume" not in hinted("join", "cccc", "a", status="failed")
    assert f"--resume {paths.run_id}\n" in hinted("join", "cccc", "a", status="failed", checkpoint=7)
    done = {"status": "done", "step": 20, "checkpoint": 20}
    assert f"--resume {paths.run_id} --steps MORE" in hinted("join", "cccc", "a", **done)
    assert f"--resume {paths.run_id} --steps MORE" in hinted("launch", "--resume", "cccc", **order(), **done)
    none = hinted("launch", "--resume", "cccc", status="failed", **order())
    assert "launch it again; --checkpoint-every N" in none
    never = hinted("launch", "--resume", "cccc", status="failed", **order(checkpoint_every=0))
    assert "without --checkpoint-every 0" in never
    paths.weights.write_bytes(b"")
    gone = hinted("launch", "--resume", "cccc", status="done", **order())
    assert "skyctl launch gpt:layers=2 --init-from 20261121-040405-cccc" in gone


def order(**options: object) -> dict[str, object]:
    """The part of a run's state that says how it was launched."""
    spec = {"source": "gpt:layers=2"}
    request = {"spec": spec, "microbatches": 4, "recipe": {"total_steps": 20}}
    return {"order": {"request": request, "options": {"deadlines": {}, **options}, "connect": {}}}


def test_rounds_of_a_run_are_called_rounds(skyctl: Skyctl, tmp_path: Path) -> None:
    problem = data_problem(rhythm=Rhythm(local_steps=3))
    paths = make("20261121-040405-cccc", status="stopped", step=5, checkpoint=5)
    assert "after 5 of 20 steps" in skyctl("attach").stdout, "it has no plan yet"
    paths.keep_plan(plan(problem).to_json())
    assert "after 5 of 20 rounds" in skyctl("attach").stdout
    readable = paths.newest_plan.read_text()
    paths.newest_plan.write_text(readable[:-9])
    assert "after 5 of 20 steps" in skyctl("attach").stdout, "it has no plan that can be read"
    assert counted_unit(paths) == "step", "nor does that keep anybody from stopping it"
    paths.keep_plan(readable)
    (tmp_path / "cluster.yaml").write_text("name: here\nnodes:\n  - {name: a, transport: local}\n")
    make(paths.run_id, status="stopped", step=5, checkpoint=5, cluster_file=str(tmp_path / "cluster.yaml"))
    assert "go on from round 5: skyctl launch --resume" in skyctl("join", "cccc", "a").stderr
    done = {"status": "done", "step": 20, "checkpoint": 20, "cluster_file": str(tmp_path / "cluster.yaml")}
    make(paths.run_id, **order(), **done)
    assert "has ended well after 20 rounds" in skyctl("launch", "--resume", "cccc").stderr


SPARSE = """
import torch
from torch import nn


def model():
    return [nn.Embedding(9, 4, sparse={sparse}), nn.Sequential(nn.Flatten(), nn.Linear(8, 3))]


def data(batch_size, seed):
    while True:
        yield torch.zeros(batch_size, 2, dtype=torch.long), torch.zeros(batch_size, dtype=torch.long)
"""


def test_a_run_is_resumed_with_a_plan_that_sums_only_gradients_that_can_be_summed(
    tmp_path: Path, skyctl: Skyctl, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a fresh launch of that plan, before anything is started."""
    monkeypatch.chdir(tmp_path)
    Path("cluster.yaml").write_text(
        "name: here\nnodes: [{name: a, transport: local}, {name: b, transport: local}]\n"
    )
    layer = Layer(name="l", flops=1.0, state_bytes=1.0, activation_bytes=1.0, output_bytes=1.0)
    devices = tuple(Device(id=f"{name}/cpu:0", flops_per_s=1.0, memory_bytes=None) for name in "ab")
    problem = Problem(layers=(layer,) * 2, devices=devices, microbatches=4)
    ref = WorkloadRef(source="train.py", digest="0" * 64, batch_size=4, dtype="float32", seed=0)
    old_plan = plan(problem, "even").model_copy(update={"workload": ref})
    given = plan(problem.model_copy(update={"parallel": "data"}), "even").model_copy(update={"workload": ref})
    assert len(given.pipelines) == 2
    Path("given.json").write_text(given.to_json())
    asked = order()
    asked["order"]["request"]["spec"] = {  # type: ignore[index]
        "source": "train.py", "path": str(tmp_path / "train.py"), "batch_size": 4,
        "init_from": "gone.safetensors", "init_sha256": "0" * 64,
    }  # fmt: skip
    paths = make("20261121-040405-cccc", status="failed", checkpoint=7, cluster_file="cluster.yaml", **asked)
    paths.keep_plan(old_plan.to_json())
    words = ("launch", "given.json", "--resume", "cccc", "--dry-run")
    Path("train.py").write_text(SPARSE.format(sparse=True))
    done = skyctl(*words)
    assert done.returncode == 2, done.stderr
    assert "layer Embedding is an embedding with sparse=True" in " ".join(done.stderr.split())
    Path("train.py").write_text(SPARSE.format(sparse=False))
    done = skyctl(*words)
    assert done.returncode == 0, done.stderr
    assert "going on after step 7" in done.stderr


def test_a_run_whose_workload_has_changed_is_not_resumed(
    tmp_path: Path, skyctl: Skyctl, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a plan of another workload, before anything is started: no rank could read a checkpoint."""
    monkeypatch.chdir(tmp_path)
    Path("cluster.yaml").write_text("name: here\nnodes: [{name: a, transport: local}]\n")
    Path("train.py").write_text(SPARSE.format(sparse=False))
    spec = {"source": "train.py", "path": str(tmp_path / "train.py"), "batch_size": 4}
    asked = order()
    asked["order"]["request"]["spec"] = spec  # type: ignore[index]
    asked["order"]["digest"] = digest_workload(WorkloadSpec.from_dict(spec))
    paths = make(
        "20261121-040405-cccc",
        status="stopped",
        workload="train.py",
        checkpoint=7,
        cluster_file="cluster.yaml",
        **asked,
    )
    layer = Layer(name="l", flops=1.0, state_bytes=1.0, activation_bytes=1.0, output_bytes=1.0)
    device = Device(id="a/cpu:0", flops_per_s=1.0, memory_bytes=None)
    paths.keep_plan(plan(Problem(layers=(layer,) * 2, devices=(device,), microbatches=4)).to_json())
    words = ("launch", "--resume", "cccc", "--dry-run")
    assert skyctl(*words).returncode == 0
    Path("train.py").write_text(SPARSE.format(sparse=True))
    done = skyctl(*words)
    assert done.returncode == 5, done.stderr
    assert f"train.py is not what run {paths.run_id} has trained so far" in " ".join(done.stderr.split())
    assert "skyctl launch train.py --init-from 20261121-040405-cccc" in " ".join(done.stderr.split())


def test_the_weights_that_a_run_has_ended_with_are_exported_from_here(
    tmp_path: Path, skyctl: Skyctl, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No node is asked: its cluster file may be gone."""
    monkeypatch.chdir(tmp_path)
    paths = make("20261121-040405-cccc", status="done", step=20)
    layer = Layer(name="l", flops=1.0, state_bytes=1.0, activation_bytes=1.0, output_bytes=1.0)
    device = Device(id="a/cpu:0", flops_per_s=1.0, memory_bytes=None)
    problem = Problem(layers=(layer,) * 2, devices=(device,), microbatches=4)
    paths.keep_plan(plan(problem, assign=[("a/cpu:0", 0, 2)]).to_json())
    safetensors.save(paths.weights, {"0.weight": torch.arange(6.0).view(2, 3)})
    done = skyctl("checkpoint", "export", "-o", "w.pt", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {"run_id": paths.run_id, "step": 20, "path": "w.pt"}
    plain = torch.load("w.pt", weights_only=True)
    assert (type(plain), torch.equal(plain["0.weight"], torch.arange(6.0).view(2, 3))) == (dict, True)
    assert skyctl("checkpoint", "export", "cccc").returncode == 0
    assert Path("weights.safetensors").read_bytes() == paths.weights.read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir() if path.suffix) == ["w.pt", "weights.safetensors"]
