"""A lab with a workload, the tests' ways to harm it, and figures of what a run then did."""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
SPEC = {
    "nodes": [
        {"name": f"n{i}", "cpus": 0.5, "memory_gib": 3, "rate_mbit": 200, "site": "ab"[i > 2]}
        for i in range(1, 5)
    ],
    "sites": {"latency_ms": 5},
}


def of_tests(name: str) -> Any:
    """A module of ``tests/``: ``of_tests("lab.harm")``."""
    if str(ROOT) not in sys.path:
        sys.path.append(str(ROOT))
    return importlib.import_module(f"tests.{name}")


def harm() -> Any:
    """``tests/lab/harm.py``."""
    return of_tests("lab.harm")


@contextmanager
def cluster(sleep_s: float, name: str) -> Iterator[Any]:
    """Four nodes at two sites and a plan for all of them; taken down whatever happens, on SIGTERM too."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    with tempfile.TemporaryDirectory(prefix="skyctl-bench-") as folder, lab_of(SPEC, name, folder) as state:
        made = of_tests("lab.clusters").Cluster(state, Path(folder), sleep_s=sleep_s)
        try:
            made.plan()
            yield made
        finally:
            made.end()


@contextmanager
def lab_of(
    spec: dict[str, Any],
    name: str,
    folder: str,
    mounted: Callable[[Path], AbstractContextManager[object]] = nullcontext,
) -> Iterator[Any]:
    """A lab of its own whose files are in ``folder``; taken down whatever happens.

    Args:
        mounted: gives what is mounted in the folder of its nodes' files, before there are nodes and until
            they are to go (nothing is deleted through a mount).
    """
    before = os.environ.get("SKYCTL_HOME")
    os.environ["SKYCTL_HOME"] = str(Path(folder) / "labs")
    from skyctl.files import lab_folder
    from skyctl.lab.lab_setup import up
    from skyctl.lab.lab_spec import LabSpec
    from skyctl.lab.teardown import down

    name = f"{name}-{os.getpid()}"
    mounts = ExitStack()
    try:
        mounts.enter_context(mounted(lab_folder(name) / "nodes"))
        yield up(LabSpec.model_validate(spec), name=name)
    finally:
        mounts.close()
        down(name)
        if before is None:
            os.environ.pop("SKYCTL_HOME")
        else:
            os.environ["SKYCTL_HOME"] = before


def restarts(run: Any) -> list[dict[str, Any]]:
    """Of each attempt but the first: why it was begun, and how many steps it did again."""
    attempts = run.state["attempts"]
    found = []
    for before, after in pairwise(attempts):
        reached = [e["step"] + 1 for e in _steps(run.folder, before["number"])]
        found.append(
            {
                "why": after["why"],
                "planned": after["planned"],
                "lost_steps": max([before["from_step"], *reached]) - after["from_step"],
            }
        )
    return found


def _steps(folder: Path, attempt: int) -> list[dict[str, Any]]:
    path = folder / "attempts" / str(attempt) / "events.jsonl"
    lines = path.read_text().splitlines() if path.is_file() else []
    events = [json.loads(line) for line in lines]
    return [event for event in events if event.get("event") == "step" and event.get("loss") is not None]


def seconds(stamp: str) -> float:
    """An ISO time as seconds since the epoch."""
    return datetime.fromisoformat(stamp).timestamp()


def said_at(run: Any, words: str, after: float) -> float | None:
    """When the supervisor first said so, as it noted it in its log."""
    for line in (run.folder / "supervisor.log").read_text().splitlines():
        stamp, _, text = line.partition(" ")
        if words in text and seconds(stamp) >= after:
            return seconds(stamp)
    return None


def differs(steps: list[dict[str, Any]], losses: list[float]) -> float:
    """The largest relative difference of two runs' losses; infinite where steps are missing or doubled."""
    if [step["step"] for step in steps] != list(range(len(losses))):
        return float("inf")
    apart = (abs(s["loss"] - loss) / abs(loss) for s, loss in zip(steps, losses, strict=True))
    return float(max(apart, default=0.0))
