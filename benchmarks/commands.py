"""How long commands take, beside those of an older checkout; one JSON line a command.

Two local nodes and a small model. The files that commands need (a profile, a plan, a run with checkpoints)
are made once, by the older checkout where there is one. So both read the same files. Each command then runs
``--repeats`` times, in turns with the older checkout's, after one run that is not counted (it fills the
node's cache). ``launch`` is timed until its first step is written down, all others until they have ended.

    .venv/bin/python benchmarks/commands.py                                  # about 2 minutes
    .venv/bin/python benchmarks/commands.py --against ../older --only plan,check
    .venv/bin/python benchmarks/commands.py --only demo --repeats 2
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

WORKLOAD = "gpt:layers=4,hidden=128,heads=4,context=64"
SETTINGS = ("--batch-size", "16", "--microbatches", "4")
CLUSTER = "name: local\nnodes:\n  - {name: a, transport: local}\n  - {name: b, transport: local}\n"
CHECKPOINT_WAIT_S = 120.0
POLL_S = 0.01
LIMITS_S = {"plan": 1.5, "ps": 1.0, "verify": 1.0, "checkpoint ls": 1.0, "check": 2.0, "launch": 8.0}
DEFAULT = list(LIMITS_S)
LIMITS_S |= {"demo": 30.0}
"""The commands, and how long each may take; the demo is timed only where it is asked for."""


@dataclass(frozen=True)
class Checkout:
    """A checkout of skyctl, and a ``folder`` of its own with the cluster file, a plan, skyctl's home."""

    root: Path
    folder: Path

    def start(self, *words: str) -> subprocess.Popen[str]:
        """Starts a command of this checkout; what it prints is caught."""
        home = {"SKYCTL_HOME": str(self.folder / "home"), "PYTHONPATH": str(self.root / "src")}
        return subprocess.Popen(
            [sys.executable, "-m", "skyctl", *words],
            cwd=self.folder,
            env={**os.environ, **home},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(self, *words: str) -> str:
        """Runs a command to its end; its standard output."""
        with self.start(*words) as process:
            out, err = process.communicate()
        if process.returncode:
            raise SystemExit(f"skyctl {' '.join(words)} ended with {process.returncode}:\n{err}")
        return out

    def seconds(self, *words: str) -> float:
        """How long a command takes."""
        began = time.perf_counter()
        self.run(*words)
        return time.perf_counter() - began

    def first_step_seconds(self) -> float:
        """How long it takes from typing ``launch`` with a plan until a step is in the run's metrics."""
        runs = self.folder / "home" / "runs"
        before = set(runs.iterdir())
        began = time.perf_counter()
        with self.start("launch", "plan.json", "--steps", "3", "--yes") as process:
            while not any(_has_text(run / "metrics.jsonl") for run in set(runs.iterdir()) - before):
                if process.poll() is not None:
                    raise SystemExit(f"skyctl launch ended without a step:\n{process.communicate()[1]}")
                time.sleep(POLL_S)
            took_s = time.perf_counter() - began
            process.communicate()
        return took_s


def _has_text(path: Path) -> bool:
    return path.is_file() and path.stat().st_size > 0


def prepare(checkout: Checkout) -> str:
    """Makes a profile, a plan and a run that was stopped after a checkpoint; the run's id."""
    checkout.folder.mkdir()
    (checkout.folder / "cluster.yaml").write_text(CLUSTER)
    checkout.run("probe", WORKLOAD, *SETTINGS)
    checkout.run("plan", WORKLOAD, *SETTINGS, "-o", "plan.json")
    saved = ("--steps", "100000", "--checkpoint-every", "5")
    run = json.loads(checkout.run("launch", "plan.json", *saved, "--detach", "--yes", "--json"))["run_id"]
    state = checkout.folder / "home" / "runs" / run / "state.json"
    deadline = time.monotonic() + CHECKPOINT_WAIT_S
    try:
        while not json.loads(state.read_text()).get("checkpoint") and time.monotonic() < deadline:
            time.sleep(0.1)
    finally:
        checkout.run("stop", run)
    return str(run)


def timers(run: str) -> dict[str, Callable[[Checkout], float]]:
    """By command, what times it once."""

    def timed(*words: str) -> Callable[[Checkout], float]:
        return lambda checkout: checkout.seconds(*words)

    return {
        "plan": timed("plan", WORKLOAD, *SETTINGS),
        "ps": timed("ps"),
        "verify": timed("verify", "plan.json"),
        "checkpoint ls": timed("checkpoint", "ls", run),
        "check": timed("check"),
        "launch": Checkout.first_step_seconds,
        "demo": timed("demo", "--yes", "-o", "demo"),
    }


def compare(
    name: str, timer: Callable[[Checkout], float], checkouts: Sequence[Checkout], repeats: int
) -> dict[str, Any]:
    """One command's seconds in each checkout, in turns."""
    taken: list[list[float]] = [[] for _ in checkouts]
    if name != "demo":
        for checkout in checkouts:
            timer(checkout)
    for _ in range(repeats):
        for times, checkout in zip(taken, checkouts, strict=True):
            times.append(timer(checkout))
    row: dict[str, Any] = {"benchmark": "commands", "command": name, "limit_s": LIMITS_S[name]}
    row |= {"median_s": round(median(taken[0]), 2), "best_s": round(min(taken[0]), 2), "runs": repeats}
    if len(taken) > 1:
        row |= {"older_median_s": round(median(taken[1]), 2), "older_best_s": round(min(taken[1]), 2)}
        row["ratio"] = round(median(taken[0]) / median(taken[1]), 2)
    return row


def main() -> None:
    """Times the commands that were asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--against", type=Path, metavar="PATH", help="an older checkout of skyctl")
    parser.add_argument("--only", default=",".join(DEFAULT), help=f"of {', '.join(LIMITS_S)}")
    parser.add_argument("--repeats", type=int, default=5)
    given = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="skyctl-commands-"))
    checkouts = [Checkout(Path(__file__).resolve().parent.parent, folder / "new")]
    if given.against is not None:
        checkouts.append(Checkout(given.against.resolve(), folder / "old"))
    try:
        run = prepare(checkouts[-1])
        for checkout in checkouts[:-1]:
            shutil.copytree(checkouts[-1].folder, checkout.folder)
        todo = timers(run)
        for name in given.only.split(","):
            print(json.dumps(compare(name, todo[name], checkouts, given.repeats)), flush=True)
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
