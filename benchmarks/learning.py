"""How plans learn that a node is slowed four- to five-fold: in one run, for good, or in every other run.

Prints one JSON line a case. Needs root (network namespaces, cgroups, sshd); about three minutes a case.

    python benchmarks/learning.py [--only once]      # also: lasting, half
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from typing import Any

from runs.labs import Bench, Lines, lab

LAB = """\
nodes:
  - {name: n1, cpus: 0.6, memory_gib: 3, rate_mbit: 200}
  - {name: n2, cpus: 0.5, memory_gib: 3, rate_mbit: 200}
  - {name: n3, cpus: 0.4, memory_gib: 3, rate_mbit: 200}
"""
SLOWED = "n2"
NICE = (0, 5)
"""Of the loops that work beside the node's own process: with them its layers took 3.9–5.2 times as long."""
WORKLOAD = "gpt:layers=8,hidden=192,heads=6,context=64"
SIZES = ("--batch-size", 16, "--microbatches", 8)
PIPELINE = ("--parallel", "pipeline")
STEPS, TURNS = 12, 2
RUNS = 10
LOOP = """import os, sys, threading
threading.Thread(target=lambda: (sys.stdin.read(), os._exit(0)), daemon=True).start()
print('busy', flush=True)
os.nice(int(sys.argv[1]))
while True: pass
"""
"""Works until its stdin is closed."""
TOLD = ("as seen in run", "run saw", " saw ", "measured again", "disturbed", "what this run")


@contextmanager
def slowed(bench: Bench) -> Iterator[None]:
    """While it is entered the node has a quarter of its quota or less: the rest is other processes'."""
    with ExitStack() as begun:
        for nice in NICE:
            begun.enter_context(bench.start_in(SLOWED, [sys.executable, "-c", LOOP, str(nice)]))
        yield


def plan(bench: Bench, name: str, *more: object) -> tuple[Path, list[str]]:
    """A plan's file, and what the command said of runs."""
    path = bench.folder / f"{name}.json"
    sizes = () if "--from-run" in more else SIZES
    form = () if "--from-run" in more else PIPELINE
    _, lines = bench.timed("plan", WORKLOAD, *sizes, *form, *more, "-o", path)
    return path, told(lines)


def told(lines: Lines) -> list[str]:
    """The lines in which a command spoke of runs and of what they saw."""
    return [line for _, line in lines.lines if any(words in line for words in TOLD)]


def shares(path: Path) -> dict[str, int]:
    """By device, how many layers a plan gives it."""
    stages = json.loads(path.read_text())["stages"]
    return {stage["replicas"][0]["device"]: stage["stop"] - stage["start"] for stage in stages}


def in_turns(bench: Bench, paths: dict[str, Path]) -> dict[str, float]:
    """By plan, the median step of several runs, which take turns."""
    took: dict[str, list[float]] = {name: [] for name in paths}
    for turn in range(TURNS):
        for name in sorted(paths, reverse=turn % 2 == 1):
            done = bench.skyctl("launch", paths[name], "--steps", STEPS)
            took[name].append(done["iteration_s"]["median"])
    return {name: round(median(seconds), 4) for name, seconds in took.items()}


def once(bench: Bench) -> dict[str, Any]:
    """One run of the probe's plan is slowed, and the next plan is measured beside the probe's own."""
    probed, _ = plan(bench, "probed", "--no-learn")
    with slowed(bench):
        run, lines = bench.timed("launch", probed, "--steps", STEPS)
    learned, said = plan(bench, "learned")
    believing, _ = plan(bench, "believing", "--from-run", run["run_id"])
    steps = in_turns(bench, {"probed": probed, "learned": learned, "believing": believing})
    return {
        "slowed_step_s": run["iteration_s"]["median"],
        "run_said": told(lines),
        "plan_said": said,
        "layers": {name: shares(path) for name, path in (("probed", probed), ("learned", learned))},
        "layers_believing_the_run": shares(believing),
        "step_s": steps,
        "learned_to_probed": round(steps["learned"] / steps["probed"], 4),
        "believing_to_probed": round(steps["believing"] / steps["probed"], 4),
    }


def lasting(bench: Bench) -> dict[str, Any]:
    """The node stays slow: the launch after the first run measures it again, and its plan knows."""
    probed, _ = plan(bench, "probed", "--no-learn")
    with slowed(bench):
        _, first = bench.timed("launch", probed, "--steps", STEPS)
        _, second = bench.timed("launch", WORKLOAD, *SIZES, *PIPELINE, "--steps", STEPS)
        learned, said = plan(bench, "learned")
        steps = in_turns(bench, {"probed": probed, "learned": learned})
    return {
        "run_said": told(first),
        "launch_said": told(second),
        "plan_said": said,
        "layers": {name: shares(path) for name, path in (("probed", probed), ("learned", learned))},
        "step_s": steps,
        "learned_to_probed": round(steps["learned"] / steps["probed"], 4),
    }


def half(bench: Bench) -> dict[str, Any]:
    """Every other of ten launches is slowed: what each says, and which layers it gives whom."""
    launches = []
    for number in range(RUNS):
        with ExitStack() as slow:
            if number % 2 == 0:
                slow.enter_context(slowed(bench))
            done, lines = bench.timed("launch", WORKLOAD, *SIZES, *PIPELINE, "--steps", STEPS)
        folder = Path(bench.env["SKYCTL_HOME"]) / "runs" / done["run_id"]
        launches.append(
            {
                "slowed": number % 2 == 0,
                "run_id": done["run_id"],
                "step_s": done["iteration_s"]["median"],
                "layers": shares(folder / "plan.json"),
                "said": told(lines),
            }
        )
    return {"launches": launches}


CASES: dict[str, Callable[[Bench], dict[str, Any]]] = {"once": once, "lasting": lasting, "half": half}


def main() -> int:
    """Exit code 1 where a run that was slowed once moved the next plan by more than a twentieth."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", action="append", choices=CASES, help="this case (may be repeated)")
    given = parser.parse_args()
    bad = 0
    for name, case in CASES.items():
        if name in (given.only or CASES):
            with lab(LAB) as bench:
                bench.skyctl("probe", WORKLOAD, *SIZES)
                figures = case(bench)
            print(json.dumps({"benchmark": "learning", "case": name, **figures}), flush=True)
            bad += name == "once" and figures["learned_to_probed"] > 1.05
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
