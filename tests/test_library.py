"""``skyctl.launch`` and ``skyctl.attach``: runs as Python code and notebooks have them."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

import skyctl
from skyctl.errors import InputError, RunError
from skyctl.library import _launch_options
from skyctl.run.run_lock import acquire_run_lock

from .helpers.commands import Skyctl
from .helpers.processes import left_of_state
from .helpers.watched_runs import RUN_ID, add_steps, write_state

TRAIN = """\
import time

import torch
from torch import nn


class Slow(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        time.sleep(0.005)
        return self.linear(x)


def model():
    return [Slow(), Slow(), nn.Linear(8, 3)]


def data(batch_size, seed):
    generator = torch.Generator().manual_seed(seed)
    while True:
        yield (
            torch.randn(batch_size, 8, generator=generator),
            torch.randint(3, (batch_size,), generator=generator),
        )
"""
SCRIPT = """\
import json
import signal
import sys

import skyctl

told, lines, steps = {}, [], []
run = skyctl.launch("train.py", cluster="cluster.yaml", batch_size=8, steps=100_000, progress=lines.append)
told["launched"] = run.status


def interrupt_the_kernel(step):
    steps.append(step.step)
    if len(steps) == 3:
        signal.raise_signal(signal.SIGINT)


try:
    run.wait(on_step=interrupt_the_kernel)
except KeyboardInterrupt:
    told["interrupted"] = run.status
other = skyctl.attach(run.run_id[-4:])
other.stop()
other.stop()
told["stopped"] = run.status
try:
    run.wait()
except skyctl.SkyctlError as exc:
    told["error"] = exc.message
told["done_before"] = run.state.step
again = skyctl.launch(resume=run.run_id, steps=5)
measured = again.wait(on_step=lambda step: steps.append(step.step))
told |= {
    "same": again.run_id == run.run_id,
    "steps": steps,
    "losses": [step.loss for step in again.steps()],
    "measured": [step.loss for step in measured.steps],
    "weights": again.weights.is_file(),
    "lines": lines,
    "handle": repr(again),
}
print(json.dumps(told), file=sys.stderr)
"""


@pytest.fixture
def here(tmp_path: Path) -> Iterator[Skyctl]:
    folder = tmp_path / "work"
    folder.mkdir()
    nodes = "".join(f"  - {{name: {name}, transport: local, threads: 1, memory_gib: 2}}\n" for name in "ab")
    (folder / "cluster.yaml").write_text(f"name: two\nnodes:\n{nodes}")
    (folder / "train.py").write_text(TRAIN)
    (folder / "notebook.py").write_text(SCRIPT)
    launcher = Skyctl(folder, tmp_path / "state")
    yield launcher
    launcher.end()
    assert left_of_state(launcher.state) == []


@pytest.mark.slow
def test_a_script_launches_watches_leaves_stops_and_resumes(here: Skyctl) -> None:
    done = here.start(program=("notebook.py",)).end()
    assert done.stdout == ""
    answers = json.loads(done.stderr.splitlines()[-1])
    assert [answers[phase] for phase in ("launched", "interrupted", "stopped")] == [
        "running",
        "running",
        "stopped",
    ]
    assert "was stopped after" in answers["error"]
    assert any(line.startswith("launch: ") for line in answers["lines"])
    assert answers["steps"][:3] == [0, 1, 2]
    count = answers["done_before"] + 5
    assert answers["steps"][3:] == list(range(count))
    assert len(answers["losses"]) == len(answers["measured"]) == count
    assert answers["losses"] == answers["measured"]
    assert (answers["same"], answers["weights"]) == (True, True)
    assert f"done, {count} of {count}" in answers["handle"]


def test_the_package_offers_both_and_imports_neither_torch_nor_typer() -> None:
    assert {"launch", "attach", "Run"} <= set(skyctl.__all__)
    code = (
        "import skyctl, sys; skyctl.launch, skyctl.attach, skyctl.Run; "
        "print({'torch', 'typer', 'pydantic', 'wandb'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


def test_options_are_those_of_the_command_and_are_checked_like_there() -> None:
    given = _launch_options({"staleness": 2, "cluster": "c.yaml", "ship": ("a",), "validate_every": None})
    assert (given.staleness, given.cluster, given.ship) == ("2", Path("c.yaml"), ["a"])
    assert (given.detach, given.yes, given.dry_run) == (True, True, False)
    for bad, message in (
        ({"stepz": 3}, "did you mean 'steps'"),
        ({"steps": 0}, "1 at least"),
        ({"steps": "many"}, "steps='many'"),
        ({"steps": 1.5}, "steps=1.5"),
        ({"sync_delay": 2}, "1 at most"),
        ({"detach": False}, "no option 'detach'"),
    ):
        with pytest.raises(InputError, match=message):
            _launch_options(bad)


def test_launch_raises_skyctls_own_errors_and_prints_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match=r"what to train\?"):
        skyctl.launch()
    with pytest.raises(InputError, match="there is no file plan"):
        skyctl.launch("plan.json")
    with pytest.raises(InputError, match="does not exist"):
        skyctl.launch("gpt:layers=1,hidden=16,heads=2,context=8", cluster="nowhere.yaml")
    with pytest.raises(InputError, match="there is no run"):
        skyctl.attach("nothing")
    assert capfd.readouterr() == ("", "")


def test_launch_is_for_the_main_thread() -> None:
    errors: list[BaseException] = []

    def elsewhere() -> None:
        try:
            skyctl.launch("train.py")
        except InputError as exc:
            errors.append(exc)

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert "main thread" in str(errors[0])


def test_a_handle_tells_what_the_folder_has(capfd: pytest.CaptureFixture[str]) -> None:
    paths = write_state(step=2)
    add_steps(paths, range(2))
    lines: list[str] = []
    with acquire_run_lock(paths, attached=False):
        run = skyctl.attach()
        assert (run.run_id, run.status, run.ended, run.measurement) == (RUN_ID, "running", False, None)
        assert [step.loss for step in run.steps()] == [5, 4.9]
        assert run.folder == paths.folder
        assert repr(run) == f"<skyctl run {RUN_ID}: running, 2 of 20>"
    write_state(step=2, status="failed", detail="rank 0 died")
    seen: list[int] = []
    with pytest.raises(RunError, match="rank 0 died"):
        run.wait(progress=lines.append, on_step=lambda step: seen.append(step.step))
    assert seen == [0, 1]
    assert any("loss 5.0" in line for line in lines)
    run.stop()  # it has ended
    write_state(step=2, status="stopped")
    with pytest.raises(RunError, match="was stopped after 2 of 20 steps") as stopped:
        run.wait()
    assert RUN_ID in str(stopped.value.hint)
    assert capfd.readouterr() == ("", "")


def test_a_scripts_run_is_left_to_the_command() -> None:
    write_state(steps=None, order={"script": {}})
    with pytest.raises(InputError, match="a script's"):
        skyctl.attach()
