"""``skyctl sweep`` on local nodes: rows, failures, what is resumed, early stops, lost nodes, the best one."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
from pathlib import Path
from typing import Any

import pytest

from ..helpers.commands import Command, Skyctl, run_here
from ..helpers.processes import parent, until

TRIAL = """\
import json, os, sys, time
values = dict(word[2:].split("=", 1) for word in sys.argv[1:] if word.startswith("--"))
with open(values["marks"], "a") as marks:
    marks.write(f"{values['x']} {os.getpid()}\\n")
print("argv", sys.argv[1:])
while not os.path.exists(values.get("gate", "/")):
    time.sleep(0.05)
if values["x"] == "13":
    print("unlucky")
    sys.exit(7)
for step in range(int(values.get("steps", 1))):
    print(json.dumps({"step": step, "loss": float(values["x"]) / (step + 1)}), flush=True)
    time.sleep(float(values.get("wait", 0)))
with open("model.txt", "w") as model:
    model.write(values["x"])
"""


LATE_TRIAL = """\
import json, sys, time
values = dict(word[2:].split("=", 1) for word in sys.argv[1:])
bad = float(values["x"]) > 900
while bad and open(values["marks"], "a+").tell() < 3:
    time.sleep(0.1)
for step in range(10_000 if bad else 4):
    print(json.dumps({"step": min(step, 1) if bad else step, "loss": float(values["x"])}), flush=True)
    time.sleep(0.3 if bad else 0)
with open(values["marks"], "a") as marks:
    marks.write("x")
"""
"""Those with a large ``x`` wait until three others have ended, and report until they are stopped."""


class Sweep:
    """A script that marks each of its starts in a file, and what is known of its sweeps.

    ``gate``: trials that are given it go on once it is there.
    """

    def __init__(self, here: Skyctl) -> None:
        self.here, self.marks, self.gate = here, here.folder.parent / "marks", here.folder.parent / "gate"
        (here.folder / "trial.py").write_text(TRIAL)

    @property
    def starts(self) -> list[tuple[str, int]]:
        """By start, the trial's ``x`` and its process."""
        words = [line.split() for line in self.marks.read_text().splitlines()]
        return [(x, int(pid)) for x, pid in words]

    def words(self, *options: str, own: tuple[str, ...] = ()) -> tuple[str, ...]:
        return ("sweep", "trial.py", "--metric", "loss", *options, "--", f"--marks={self.marks}", *own)

    def document(self, *words: str, code: int = 0) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.here.run(*words, "--json", code=code).stdout)
        return found

    @property
    def folder(self) -> Path:
        (folder,) = (self.here.state / "sweeps").iterdir()
        return folder

    def states(self) -> list[dict[str, Any]]:
        return [json.loads(path.read_text()) for path in sorted((self.folder / "trials").glob("0*.json"))]

    def until_runs(self, child: Command, count: int) -> None:
        until(lambda: len(self.starts) >= count, lambda: child.text)

    def agent(self, start: int) -> int:
        """The agent below which that start's trial runs."""
        found = parent(parent(self.starts[start][1]))
        assert found > 1, "the trial has ended"
        return found


@pytest.fixture
def sweep(here: Skyctl) -> Sweep:
    return Sweep(here)


def test_each_trial_is_a_row_and_a_failed_one_no_end(sweep: Sweep) -> None:
    words = sweep.words("--grid", "x=3,13,1", "--grid", "y={a},b", own=("--steps=2",))
    done = sweep.here.run(*words[:2], "--json", *words[2:], code=1)
    found = json.loads(done.stdout)
    rows = {trial["number"]: trial for trial in found["trials"]}
    assert [rows[number]["status"] for number in range(1, 7)] == ["done"] * 2 + ["failed"] * 2 + ["done"] * 2
    assert [rows[number]["returncode"] for number in (1, 3)] == [0, 7]
    assert rows[3]["why"] == "exit status 7: unlucky"
    assert [rows[number]["value"] for number in (1, 3, 5)] == [1.5, None, 0.5]
    assert (rows[5]["step"], rows[5]["reports"]) == (1, 2)
    assert {trial["device"] for trial in found["trials"]} <= {"a/cpu:0", "b/cpu:0", "c/cpu:0"}
    assert all(trial["seconds"] > 0 for trial in found["trials"])
    assert "--resume" in done.stderr
    log = (sweep.folder / "logs" / "0005.log").read_text()
    assert log.startswith(f"argv {[f'--marks={sweep.marks}', '--steps=2', '--x=1', '--y={a}']}")
    best = sweep.folder / "best"
    assert found["best"] == {"number": 5, "folder": str(best)}
    said = json.loads((best / "best.json").read_text())
    assert said == {
        "number": 5,
        "parameters": {"x": "1", "y": "{a}"},
        "metric": "loss",
        "value": 0.5,
        "step": 1,
        "files": ["model.txt"],
    }
    assert (best / "files" / "model.txt").read_text() == "1"


def test_a_command_after_dashes_gets_the_folder_and_its_values_last(sweep: Sweep) -> None:
    words = ("sweep", "--grid", "x=2,1", "--metric", "loss", "--json", "--", "python3", "trial.py")
    found = json.loads(sweep.here.run(*words, f"--marks={sweep.marks}", code=0).stdout)
    assert {trial["number"]: trial["value"] for trial in found["trials"]} == {1: 2.0, 2: 1.0}
    assert found["best"]["number"] == 2
    request = json.loads((sweep.folder / "sweep.json").read_text())
    assert (request["script"]["kind"], "trial.py" in request["files"]) == ("command", True)


def test_without_a_metric_nothing_is_best(sweep: Sweep) -> None:
    (sweep.here.folder / "trials.csv").write_text("x,steps\n1,1\n2,3\n")
    words = ("sweep", "trial.py", "--from", "trials.csv", "--per-device", "2", "--limit", "a", "--json")
    found = json.loads(sweep.here.run(*words, "--", f"--marks={sweep.marks}").stdout)
    assert [trial["value"] for trial in found["trials"]] == [None, None]
    assert found["best"] is None
    assert not (sweep.folder / "best").exists()
    assert sorted(x for x, _ in sweep.starts) == ["1", "2"]


def test_the_largest_is_best_where_that_is_asked_for(sweep: Sweep) -> None:
    done = sweep.here.run(*sweep.words("--grid", "x=1,5,3", "--mode", "max"))
    assert "best: trial 2, loss 5" in done.stdout
    assert done.stdout.splitlines()[1].split()[:3] == ["2", "x=5", "done"]
    assert (sweep.folder / "best" / "files" / "model.txt").read_text() == "5"


def test_interrupted_and_resumed_no_trial_runs_twice(sweep: Sweep) -> None:
    child = sweep.here.start(*sweep.words("--grid", "x=1,2,3,4,5,6,7", own=("--wait=2",)))
    sweep.until_runs(child, 4)
    until(lambda: any(state["status"] == "done" for state in sweep.states()), lambda: child.text)
    child.interrupt()
    done = child.end(130)
    assert f"skyctl sweep --resume {sweep.folder.name}" in done.stderr
    ended = {state["parameters"]["x"] for state in sweep.states() if state["status"] == "done"}
    assert {state["status"] for state in sweep.states()} == {"done", "waiting"}
    assert ended
    before = len(sweep.starts)
    found = sweep.document("sweep", "--resume", sweep.folder.name[-4:])
    assert [trial["status"] for trial in found["trials"]] == ["done"] * 7
    again = [x for x, _ in sweep.starts[before:]]
    assert sorted(again) == sorted({str(x) for x in range(1, 8)} - ended)
    assert (sweep.folder / "best" / "files" / "model.txt").read_text() == "1"
    sweep.document("sweep", "--resume", sweep.folder.name)
    assert len(sweep.starts) == before + len(again)


def test_a_killed_sweep_is_resumed(sweep: Sweep) -> None:
    child = sweep.here.start(*sweep.words("--grid", "x=1,2,3,4", own=("--wait=1",)))
    until(lambda: any(state["status"] == "done" for state in sweep.states()), lambda: child.text)
    child.kill()
    ended = {state["parameters"]["x"] for state in sweep.states() if state["status"] == "done"}
    before = len(sweep.starts)
    found = sweep.document("sweep", "--resume", sweep.folder.name)
    assert [trial["status"] for trial in found["trials"]] == ["done"] * 4
    assert not ended.intersection(x for x, _ in sweep.starts[before:])


def test_two_processes_do_not_run_one_sweep(sweep: Sweep) -> None:
    child = sweep.here.start(*sweep.words("--grid", "x=1", own=("--wait=1000",)))
    sweep.until_runs(child, 1)
    done = sweep.here.run("sweep", "--resume", sweep.folder.name, code=1)
    assert "is under way in another process" in done.stderr
    child.interrupt()
    child.end(130)


def test_a_script_that_has_changed_since_is_refused(sweep: Sweep) -> None:
    sweep.here.run(*sweep.words("--grid", "x=1,13"), code=1)
    (sweep.here.folder / "trial.py").write_text(TRIAL + "# other\n")
    done = sweep.here.run("sweep", "--resume", sweep.folder.name, code=5)
    assert "have changed since: trial.py" in done.stderr


def test_trials_behind_the_median_are_stopped(sweep: Sweep) -> None:
    (sweep.here.folder / "trial.py").write_text(LATE_TRIAL)
    words = ("--grid", "x=1,2,3,901,902", "--stop", "median", "--grace", "2", "--per-device", "2")
    document = json.loads(sweep.here.run(*sweep.words(*words, "--json")).stdout)
    by_x = {trial["parameters"]["x"]: trial for trial in document["trials"]}
    assert {by_x[x]["status"] for x in ("1", "2", "3")} == {"done"}
    for x in ("901", "902"):
        assert (by_x[x]["status"], by_x[x]["returncode"]) == ("stopped", None)
        assert by_x[x]["reports"] >= 2
        assert by_x[x]["why"] == "worse than the median of the others at step 1"
    assert document["best"]["number"] == by_x["1"]["number"]


def test_trials_of_a_lost_node_run_elsewhere(sweep: Sweep) -> None:
    words = sweep.words("--grid", "x=1,2,3,4,5", "--limit", "a,b", "--json", own=(f"--gate={sweep.gate}",))
    child = sweep.here.start(*words)
    sweep.until_runs(child, 2)
    x, _ = sweep.starts[1]
    (node,) = [s["device"][0] for s in sweep.states() if s["parameters"]["x"] == x]
    os.kill(sweep.agent(1), signal.SIGKILL)
    sweep.gate.touch()
    found = json.loads(child.end(0).stdout)
    assert [trial["status"] for trial in found["trials"]] == ["done"] * 5
    assert list(found["lost"]) == [node]
    assert [x for x, _ in sweep.starts].count(x) == 2
    assert {trial["device"][0] for trial in found["trials"] if trial["parameters"]["x"] == x} == {
        "b" if node == "a" else "a"
    }


def test_a_node_lost_before_the_best_files_have_come(sweep: Sweep) -> None:
    size = 200 << 20
    (sweep.here.folder / "large.py").write_text(
        "import json, os, time\n"
        f"with open({str(sweep.marks)!r}, 'a') as marks: marks.write(f'1 {{os.getpid()}}\\n')\n"
        f"while not os.path.exists({str(sweep.gate)!r}): time.sleep(0.05)\n"
        f"os.truncate(os.open('model.bin', os.O_CREAT | os.O_WRONLY), {size})\n"
        "print(json.dumps({'loss': 1}))\n"
    )
    words = ("sweep", "large.py", "--metric", "loss", "--grid", "x=1", "--limit", "a,b", "--json")
    child = sweep.here.start(*words)
    sweep.until_runs(child, 1)
    agent = sweep.agent(0)
    sweep.gate.touch()
    until((sweep.folder / "best.new" / "files").exists, lambda: child.text)
    os.kill(agent, signal.SIGKILL)
    found = json.loads(child.end(0).stdout)
    assert len(sweep.starts) == 2
    assert len(found["lost"]) == 1
    assert (sweep.folder / "best" / "files" / "model.bin").stat().st_size == size


def test_without_any_node_left_it_ends_and_can_be_resumed(sweep: Sweep) -> None:
    child = sweep.here.start(*sweep.words("--grid", "x=1,2", "--limit", "a", own=(f"--gate={sweep.gate}",)))
    sweep.until_runs(child, 1)
    os.kill(sweep.agent(0), signal.SIGKILL)
    done = child.end(4)
    assert "node a was lost" in done.stderr
    assert {state["status"] for state in sweep.states()} == {"waiting"}
    sweep.gate.touch()
    found = sweep.document("sweep", "--resume", sweep.folder.name)
    assert [trial["status"] for trial in found["trials"]] == ["done", "done"]


def test_a_trial_that_hangs_is_ended(sweep: Sweep) -> None:
    words = sweep.words("--grid", "x=1", "--stall", "1", "--json", own=("--wait=1000",))
    (trial,) = json.loads(sweep.here.run(*words, code=1).stdout)["trials"]
    assert trial["status"] == "failed"
    assert trial["why"] == "has printed nothing and used no processor for 1 s"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("trial.py",), "which trials are there?"),
        (("--grid", "x=1"), "what is to be run?"),
        (("train", "--grid", "x=1"), "train is no Python file"),
        (("tril.py", "--grid", "x=1"), "there is no script tril.py; did you mean trial.py?"),
        (("trial.py", "--grid", "x"), "--grid x is not NAME=VALUE"),
        (("trial.py", "--range", "x=1:2"), "--range goes with --random N"),
        (("trial.py", "--grid", "x=1", "--seed", "3"), "--seed goes with --random N"),
        (("trial.py", "--random", "3"), "neither is given"),
        (("trial.py", "--random", "3", "--grid", "x=1,2", "--optuna"), "it needs --metric"),
        (("trial.py", "--from", "none.csv"), "can't read none.csv"),
        (("trial.py", "--from", "t.csv", "--grid", "x=1"), "--grid does not go with --from"),
        (("trial.py", "--grid", "x=1", "--mode", "max"), "--mode goes with --metric"),
        (("trial.py", "--grid", "x=1", "--stop", "median"), "--stop goes with --metric"),
        (("trial.py", "--grid", "x=1", "--metric", "l", "--stop", "best"), "--stop"),
        (("trial.py", "--grid", "x=1", "--metric", "l", "--grace", "3"), "--grace goes with --stop"),
        (("--resume", "none"), "there is no sweep 'none'"),
        (("--resume", "none", "--grid", "x=1"), "--grid does not go with --resume"),
        (("trial.py", "--resume", "none"), "trial.py does not go with --resume"),
        (("trial.py", "--grid", "x=1", "--lr", "3"), "come after --, all others before: … -- --lr"),
    ],
)
def test_mistakes_are_said_before_anything_runs(
    words: tuple[str, ...],
    said: str,
    sweep: Sweep,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(sweep.here.folder)
    monkeypatch.setenv("SKYCTL_HOME", str(sweep.here.state))
    done = run_here(capsys, "sweep", *words)
    assert done.returncode == 2
    assert said in done.stderr
    assert not (sweep.here.state / "sweeps").exists()


def test_copies_of_ended_trials_are_removed(sweep: Sweep) -> None:
    (sweep.here.folder / "look.py").write_text(
        "import os\nprint([name for name in sorted(os.listdir('..')) if os.path.isdir(f'../{name}')])\n"
    )
    sweep.here.run("sweep", "look.py", "--grid", "x=1,2,3,4", "--limit", "a")
    logs = [path.read_text().strip() for path in sorted((sweep.folder / "logs").iterdir())]
    assert logs == [f"['trial-000{number}']" for number in range(1, 5)]


def test_a_node_on_which_all_fail_is_named(sweep: Sweep) -> None:
    (sweep.here.folder / "fails.py").write_text(
        "import os, sys, time\nif os.environ['BROKEN'] == 'yes': sys.exit(1)\ntime.sleep(2)\n"
    )
    (sweep.here.folder / "cluster.yaml").write_text(
        "name: two\nnodes:\n"
        "  - {name: good, transport: local, threads: 1, env: {BROKEN: 'no'}}\n"
        "  - {name: bad, transport: local, threads: 1, env: {BROKEN: 'yes'}}\n"
    )
    done = sweep.here.run("sweep", "fails.py", "--grid", "x=1,2,3,4,5,6", code=1)
    assert "every trial on node bad failed" in done.stderr
    assert "on node good" not in done.stderr


@pytest.mark.slow
def test_the_example_of_the_documents(here: Skyctl) -> None:
    page = (Path(__file__).parents[2] / "docs/sweep.md").read_text()
    found = re.search(r"```python\n(.*?)```.*?```\nskyctl (sweep .*?)\n```", page, re.DOTALL)
    assert found is not None
    (here.folder / "train.py").write_text(found[1])
    words = ("--json", "--limit", "a,b", "--", "--steps=60")
    document = json.loads(here.run(*shlex.split(found[2]), *words).stdout)
    assert [trial["reports"] for trial in document["trials"]] == [3] * 6
    (sweep,) = (here.state / "sweeps").iterdir()
    assert json.loads((sweep / "best" / "best.json").read_text())["files"] == ["model.pt"]


def test_a_dry_run_shows_trials_and_devices(sweep: Sweep) -> None:
    done = sweep.here.run("sweep", "trial.py", "--grid", "x=1,2", "--dry-run", "--json")
    assert json.loads(done.stdout) == {
        "trials": [{"x": "1"}, {"x": "2"}],
        "devices": ["a/cpu:0", "b/cpu:0", "c/cpu:0"],
    }
    assert not (sweep.here.state / "sweeps").exists()
