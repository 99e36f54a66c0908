"""``launch`` starts anew while a long run trains, to hold less: nobody but its memory shows it."""

from __future__ import annotations

import json
import re
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from ..helpers.processes import left_of_state, of_state, read
from ..helpers.runs import Run, launch

TRAIN = """\
import os
import time

import torch
from torch import nn

SLOW_S, SLOW_COUNT = float(os.environ["SLOW_S"]), int(os.environ["SLOW_COUNT"])


class Slow(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.count = 0

    def forward(self, x):
        if self.training:
            self.count += 1
            time.sleep(SLOW_S if self.count <= SLOW_COUNT else 0.002)
        return self.linear(x)


def model():
    return [Slow(), nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 3)]


def data(batch_size, seed):
    generator = torch.Generator().manual_seed(seed)
    while True:
        yield (
            torch.randn(batch_size, 8, generator=generator),
            torch.randint(3, (batch_size,), generator=generator),
        )
"""
LONG = ("plan.json", "--steps", "100000", "--ignore-changes")
MIB = 1 << 20
AS_PART = ("-c", "from skyctl.cli.app import main; main()")
"""A program that could do more than the command, so it is never started anew."""


@pytest.fixture(scope="module")
def two(another: Callable[..., Any]) -> Any:
    made = another("fast", "slow")
    made.env |= {"SLOW_S": "0", "SLOW_COUNT": "0"}
    made.train(TRAIN)
    made.plan()
    return made


@pytest.fixture
def here(two: Any) -> Iterator[Any]:
    """A test that fails half-way leaves no run behind."""
    two.env |= {"SLOW_S": "0.01", "SLOW_COUNT": "1000000"}
    yield two
    if of_state(two.state):
        two.run("stop", "--all", "--now")
    two.end()


def is_fresh(run: Run) -> bool:
    """Whether its launcher has started anew."""
    return b"SKYCTL_LEFT_RUN=" in read(run.child.process.pid, "environ")


def rss_bytes(pid: int) -> int:
    (line,) = [one for one in read(pid, "status").splitlines() if one.startswith(b"VmRSS:")]
    return int(line.split()[1]) << 10


@pytest.mark.slow
def test_it_holds_little_and_ends_as_ever_by_ctrl_c(here: Any) -> None:
    run = here.launch(*LONG)
    pid = run.child.process.pid
    run.until(lambda: is_fresh(run))
    run.more(20)
    assert rss_bytes(pid) <= 200 * MIB
    assert b"libtorch" not in read(pid, "maps")
    supervisor = run.state["supervisor"]
    assert (supervisor["pid"], supervisor["attached"]) == (pid, True)
    run.child.interrupt()
    done = run.end(130)
    run.is_stopped()
    assert "error: interrupted; stopped after" in done.stderr
    assert left_of_state(here.state) == []


@pytest.mark.slow
def test_at_a_terminal_ctrl_c_asks_and_detaches_as_ever(here: Any) -> None:
    run = here.launch(*LONG, terminal=True)
    run.until(lambda: is_fresh(run))
    run.more(5)
    run.child.types("\x03", answered="(d)etach")
    run.child.types("g\n")
    run.more(5)
    run.child.types("\x03", answered="(d)etach")
    run.child.types("d\n", answered="goes on in the background")
    run.end()
    run.more(5)
    here.run("stop", run.id)
    run.is_stopped()
    assert left_of_state(here.state) == []


@pytest.mark.slow
def test_it_says_and_writes_what_it_would_have_without(here: Any) -> None:
    """Its first steps are slow, so that the run seems long."""
    here.env |= {"SLOW_S": "0.4", "SLOW_COUNT": "20"}
    words = ("plan.json", "--steps", "150", "--ignore-changes")
    said, told, losses = [], [], []
    for program in (("-m", "skyctl"), AS_PART):
        fresh = program != AS_PART
        copy = here.folder / "copy.json"
        run = _launch(here, program, *words, "--json", "-o", str(copy))
        if fresh:
            run.until(lambda run=run: is_fresh(run))
        done = run.end()
        assert "going back" not in done.stderr
        assert json.loads(copy.read_text()) == json.loads(done.stdout)
        losses.append([one["loss"] for one in run.steps])
        told.append(_shape(json.loads(done.stdout)))
        said.append(_said(done.stderr))
        run.is_as(losses[0], 1)
    assert told[0] == told[1]
    assert said[0] == said[1]
    assert left_of_state(here.state) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("signum", "code", "delays_s"),
    [
        (signal.SIGINT, 130, (0.4,)),
        (signal.SIGTERM, 143, (0.9,)),
        pytest.param(signal.SIGINT, 130, (0.0, 0.1, 0.9, 1.6), marks=pytest.mark.matrix),
        pytest.param(signal.SIGTERM, 143, (0.0, 0.1, 0.4, 1.6), marks=pytest.mark.matrix),
    ],
)
def test_a_signal_meanwhile_stops_the_run(
    here: Any, signum: signal.Signals, code: int, delays_s: tuple[float, ...]
) -> None:
    for delay_s in delays_s:
        run = here.launch(*LONG)
        run.wait_for(2)
        time.sleep(delay_s)
        run.child.process.send_signal(signum)
        run.end(code)
        run.is_stopped(kept=signum == signal.SIGINT)
        assert left_of_state(here.state) == [], delay_s


@pytest.mark.slow
@pytest.mark.parametrize("delays_s", [(0.3,), pytest.param((0.0, 1.0), marks=pytest.mark.matrix)])
def test_a_terminal_that_closes_meanwhile_leaves_the_run_to_the_background(
    here: Any, delays_s: tuple[float, ...]
) -> None:
    for delay_s in delays_s:
        run = here.launch(*LONG)
        run.wait_for(2)
        time.sleep(delay_s)
        run.child.process.send_signal(signal.SIGHUP)
        run.end()
        assert run.state["supervisor"]["pid"] != run.child.process.pid
        run.more(3)
        here.run("stop", run.id)
        run.is_stopped()
        assert left_of_state(here.state) == [], delay_s


def _launch(here: Any, program: tuple[str, ...], *words: str) -> Run:
    with pytest.MonkeyPatch.context() as patch:
        start = here.start
        patch.setattr(here, "start", lambda *more, **env: start(*more, program=program, **env))
        return launch(here, *words)


def _shape(document: Any) -> Any:
    """A document without its numbers and names."""
    if isinstance(document, dict):
        return {key: _shape(value) for key, value in document.items() if key != "differences"}
    if isinstance(document, list):
        return [_shape(one) for one in document[:2]], len(document) > 0
    return type(document).__name__ if not isinstance(document, str) else "str"


def _said(text: str) -> list[str]:
    """The printed lines, without numbers and widths, and without what depends on the clock or was off."""
    plain = re.sub(r"\d{8}-\d{6}-[0-9a-f]{4}|[\d.,]+", "#", text)
    lines = [re.sub(" +", " ", line) for line in plain.splitlines()]
    said = r"its last|run: |weights|loss|rank (#|device predicted)|warning|error"
    return [line for line in lines if re.match(said, line)]
