"""Scripts on one device whose steps take turns: one computes at a time, each for half of it, as if alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from skyctl.turns.turn_client import list_shared_devices

from ..helpers.commands import Command, Done, Skyctl
from ..helpers.processes import after_a_moment, until

STEPS, FIRST = 200, 2
"""Of a script, and how many it makes before its data waits for the other one."""
FAIR_PART = (0.5, 2.0)
"""One's device seconds ÷ the other's while both compute; step by step they would be 1 ÷ 4."""
TRAIN = """\
import json, os, sys, time
from pathlib import Path
import torch
from torch import nn

SECONDS, GATE = float(sys.argv[1]), Path(os.environ["GATE"])
torch.manual_seed(0)

class Slow(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        global began
        began = time.monotonic()
        time.sleep(SECONDS)
        return self.linear(x)

model = nn.Sequential(Slow(), nn.Tanh(), nn.Linear(8, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
ended = []
optimizer.register_step_post_hook(lambda *_: ended.append(time.monotonic()))
for step in range(STEPS):
    while step >= FIRST and not GATE.exists():
        time.sleep(0.01)
    optimizer.zero_grad()
    loss = model(torch.randn(16, 8)).square().mean()
    loss.backward()
    optimizer.step()
    print(json.dumps({"loss": loss.item().hex(), "span": [began, ended[-1]]}))
""".replace("STEPS", str(STEPS)).replace("FIRST", str(FIRST))
NO_STEPS = "import torch; print('computed', torch.ones(2).sum().item())"


@pytest.fixture
def gate(here: Skyctl) -> Path:
    """No data waits once it is there."""
    found = here.folder.parent / "gate"
    here.env["GATE"] = str(found)
    (here.folder / "train.py").write_text(TRAIN)
    return found


def start(here: Skyctl, seconds: float, *words: str) -> Command:
    return here.start("run", "--limit", "a", *words, "train.py", str(seconds))


def steps(done: Done) -> list[dict[str, Any]]:
    told = [line.partition("] ")[2] for line in done.stdout.splitlines() if line.startswith("[")]
    return [json.loads(line) for line in told]


def shared_jobs(here: Skyctl) -> dict[str, float]:
    """By run, the seconds that it has had of the device that runs share."""
    listed = list_shared_devices(Path(here.env["XDG_CACHE_HOME"]) / "skyctl")
    assert [device.device for device in listed] in ([], ["a/cpu:0"])
    return {job.job: job.used_s for device in listed for job in device.jobs}


def in_common(spans: list[tuple[float, float]], others: list[tuple[float, float]]) -> float:
    """Seconds of the first ones from when both have begun waiting for no data to when one has ended."""
    begin = max(spans[FIRST][0], others[FIRST][0])
    end = min(spans[-1][1], others[-1][1])
    return sum(max(0.0, min(b, end) - max(a, begin)) for a, b in spans)


@pytest.mark.slow
def test_two_scripts_take_turns_and_compute_what_they_do_alone(here: Skyctl, gate: Path) -> None:
    gate.touch()
    alone = [step["loss"] for step in steps(start(here, 0.0).end())]
    gate.unlink()
    runs = [start(here, seconds, "--turns", "fair") for seconds in (0.01, 0.04)]
    until(lambda: len(shared_jobs(here)) == 2, lambda: "\n".join(run.text for run in runs))
    told = json.loads(here.run("ps", "--json").stdout)
    [device] = told["shared"]
    assert (device["device"], device["turns"]) == ("a/cpu:0", "fair")
    assert {job["job"] for job in device["jobs"]} == {run["run_id"] for run in told["runs"][:2]}
    gate.touch()
    both = [steps(run.end()) for run in runs]
    assert [[step["loss"] for step in one] for one in both] == [alone, alone]
    first, second = ([(step["span"][0], step["span"][1]) for step in one] for one in both)
    met = [(m, n) for m, (a, b) in enumerate(first) for n, (c, d) in enumerate(second) if a < d and c < b]
    assert not [pair for pair in met if min(pair) >= FIRST]  # a first step may take so long that it is late
    assert FAIR_PART[0] <= in_common(first, second) / in_common(second, first) <= FAIR_PART[1]
    assert not after_a_moment(lambda: shared_jobs(here))


@pytest.mark.slow
def test_another_policy_is_refused(here: Skyctl, gate: Path) -> None:
    first = start(here, 0.0, "--turns", "fair")
    until(lambda: shared_jobs(here), lambda: first.text)
    done = start(here, 0.0, "--turns", "fifo").wait()
    assert done.returncode == 1
    assert "device a/cpu:0 is shared by turns 'fair'" in done.stderr
    gate.touch()
    assert len(steps(first.end())) == STEPS


def test_a_script_that_takes_no_turn_is_told_of(here: Skyctl) -> None:
    (here.folder / "none.py").write_text(NO_STEPS)
    done = here.run("run", "--per-node", "1", "--limit", "a,b", "--turns", "fair", "none.py")
    assert "ranks 0, 1 took no turn" in done.stderr
    assert done.stdout.count("computed 2.0") == 2
