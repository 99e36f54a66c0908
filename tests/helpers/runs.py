"""Runs of training, as their folders tell of them: launched, waited for, held against what they must be."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from . import processes
from .commands import COMMAND_S, Command, Done, Skyctl, Terminal


class Run:
    """A run's folder, and the command that launched it, or that has taken it over."""

    def __init__(self, skyctl: Skyctl, child: Command | Terminal, folder: Path) -> None:
        self.skyctl = skyctl
        self.child = child
        self.folder = folder
        self.id = folder.name

    @property
    def state(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.folder / "state.json").read_text())
        return found

    @property
    def steps(self) -> list[dict[str, Any]]:
        """The whole lines of metrics.jsonl so far; of one that is being written a part may be there."""
        path = self.folder / "metrics.jsonl"
        text = path.read_text() if path.exists() else ""
        return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]

    def told(self) -> str:
        """For a failed test."""
        log = self.folder / "supervisor.log"
        return f"{self.state}\n{log.read_text() if log.exists() else ''}\n{self.child.text}"

    def until(self, happened: Callable[[], Any]) -> Any:
        """Until that is so. Fails where its command ends with an error before."""

        def unless_it_failed() -> Any:
            assert self.child.process.poll() in (None, 0), self.told()
            return happened()

        return processes.until(unless_it_failed, self.told)

    def wait_for(self, steps: int) -> Run:
        """Until it has done so many steps."""
        self.until(lambda: len(self.steps) >= steps)
        return self

    def more(self, steps: int = 2) -> Run:
        """Until it has done so many more."""
        return self.wait_for(len(self.steps) + steps)

    def processes(self, node: str, word: str) -> list[int]:
        """Its tasks on that node whose command has that word in it."""
        session = next(one["session"] for one in self.state["sessions"] if one["node"] == node)
        return processes.of_session(session, word)

    def rank(self, node: str) -> int:
        """The process of its rank there."""
        found: list[int] = self.until(lambda: self.processes(node, "skyctl.worker.rank"))
        (rank,) = [pid for pid in found if processes.parent(pid) not in found]  # not a DataLoader's worker
        return rank

    def agent(self, node: str) -> int:
        """Its agent there: it has started the rank."""
        return processes.parent(self.rank(node))

    def begins(self, attempts: int) -> Run:
        """Until that attempt has begun."""
        self.until(lambda: len(self.state["attempts"]) >= attempts)
        return self

    def kill_at_random(self, nodes: str, seed: int, most: int = 10) -> int:
        """Kills a rank at a random moment of each attempt, so often at most; how many attempts were begun.

        Args:
            nodes: names of one letter, of which each kill's is drawn; the run allows that many restarts.
        """
        draw = random.Random(seed)
        for attempt in range(1, most + 1):
            self.until(lambda attempt=attempt: self.is_done or len(self.state["attempts"]) >= attempt)
            if self.is_done:  # the one before came too late
                break
            rank = self.rank(draw.choice(nodes))
            time.sleep(draw.uniform(0.0, 3.0))
            with contextlib.suppress(ProcessLookupError):
                os.kill(rank, signal.SIGKILL)
        self.end()
        return len(self.state["attempts"])

    @property
    def is_done(self) -> bool:
        """Whether it has made all its steps."""
        return bool(self.state["status"] == "done")

    def attach(self) -> None:
        """Another command takes it over."""
        self.child = self.skyctl.start("attach", self.id, "--json")

    def end(self, code: int = 0, timeout_s: float = COMMAND_S) -> Done:
        """To its command's end."""
        return self.child.end(code, timeout_s)

    def is_as(self, losses: Sequence[float], attempts: int) -> None:
        """It has ended well, with those losses (there may be more of them)."""
        state = self.state
        assert (state["status"], len(state["attempts"])) == ("done", attempts), self.told()
        measured = json.loads((self.folder / "measurement.json").read_text())
        for steps in (self.steps, measured["steps"]):
            assert len(steps) == state["steps"], self.told()
            self.loses(steps, losses)

    def loses(self, steps: Sequence[dict[str, Any]], losses: Sequence[float]) -> None:
        """Those are its first steps, each once, with those losses as far as there are any."""
        assert [step["step"] for step in steps] == list(range(len(steps))), self.told()
        for step, loss in zip(steps, losses, strict=False):
            assert abs(step["loss"] - loss) <= 1e-5 * abs(loss), (step, loss)

    def is_stopped(self, *, kept: bool = True) -> None:
        """It was stopped, with a last checkpoint (``kept``); else some nodes may have done a step more."""
        state = self.state
        assert (state["status"], state["sessions"]) == ("stopped", []), self.told()
        assert state["step"] <= len(self.steps), self.told()
        assert not kept or state["checkpoint"] == state["step"] == len(self.steps), self.told()


def runs_of(skyctl: Skyctl) -> set[Path]:
    """The folders of all runs so far."""
    return set((skyctl.state / "runs").glob("*"))


def launch(skyctl: Skyctl, *words: str, terminal: bool = False, **env: str) -> Run:
    """``skyctl launch`` with these words; given back as soon as its folder is there."""
    before = runs_of(skyctl)
    child: Command | Terminal
    child = skyctl.on_terminal("launch", *words) if terminal else skyctl.start("launch", *words, **env)

    def new() -> set[Path]:
        assert child.process.poll() in (None, 0), child.text
        return runs_of(skyctl) - before

    return Run(skyctl, child, processes.until(new, lambda: child.text).pop())


def losses_of(done: Done) -> list[float]:
    """The losses that a command with ``--json`` told."""
    return [step["loss"] for step in json.loads(done.stdout)["steps"]]


def left_behind(skyctl: Skyctl) -> list[str]:
    """Processes of skyctl's that were started here and still run, and half files in its state folder."""
    found = [f"{pid} {processes.command(pid)}" for pid in processes.of_state(skyctl.state)]
    return found + [str(path) for path in processes.files(skyctl.state, "**/.*.tmp")]
