"""The alternatives that a user has without skyctl, beside its plan: the same training, in turns in one lab.

One JSON line a case. Needs root (network namespaces, cgroups, sshd).

    python benchmarks/others.py                             # every case, about 50 minutes
    python benchmarks/others.py --case "WAN, gpt"           # one of them (may be repeated)

``ddp`` and ``torch pipeline`` are torch's own, an equal part for each node. ``metis`` and ``amp`` are what
those planners choose (``baselines``; of Metis its balancer of layers, nodes in the inventory's order), run
by skyctl: only the choice differs. ``ratio``: of its step to ours.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from baselines.amp import Choice, choose
from baselines.hybrids import as_plan
from baselines.metis import capacity_slices
from runs.data import LARGE_PICTURES
from runs.form_cases import CLUSTERS, SIZES, source_in
from runs.labs import Bench, lab
from runs.torch_runs import torch_steps

from skyctl.records.plan import Plan

CASES = (
    "LAN, gpt",
    "WAN, gpt",
    "WAN, bert",
    "uplink, llama",
    "uplink, convolutional",
    "70/70/35/14%, gpt",
)
TURNS, STEPS = 2, 3


def case(cluster: str, name: str) -> dict[str, Any]:
    """Seconds a step of all, medians."""
    with lab(CLUSTERS[cluster]) as bench:
        source = source_in(bench.folder, name, LARGE_PICTURES)
        bench.skyctl("probe", source, *SIZES[name])
        ours = _plan(bench, source, name, "auto")
        pipeline = _plan(bench, source, name, "pipeline", "--parallel", "pipeline")
        hybrid = _plan(bench, source, name, "hybrid", "--parallel", "hybrid")
        slices = ",".join(f"{device}={a}:{b}" for device, a, b in capacity_slices(pipeline.problem))
        amp = choose(hybrid.problem)
        made = {
            "skyctl": ours,
            "metis": _plan(bench, source, name, "metis", "--assign", slices),
            "amp": _of_amp(bench, source, name, amp, hybrid),
        }
        batch, microbatches = SIZES[name][1], SIZES[name][3]
        ways: dict[str, Callable[[], list[float]]] = {
            each: partial(_launched, bench, each) for each, plan in made.items() if plan is not None
        }
        for way, form in (("ddp", "data"), ("torch pipeline", "pipeline")):
            ways[way] = partial(
                torch_steps, bench, source, form, batch=batch, microbatches=microbatches, steps=STEPS
            )
        took: dict[str, list[float]] = {way: [] for way in ways}
        for _ in range(TURNS):
            for way, run in ways.items():
                took[way] += run()
    steps = {way: median(seconds) for way, seconds in took.items()}
    return {
        "benchmark": "others",
        "cluster": cluster,
        "workload": name,
        "form": ours.problem.parallel,
        "amp": [amp.grid, amp.cuts],
        "predicted_s": {
            each: round(plan.predicted.iteration_s, 4) for each, plan in made.items() if plan is not None
        },
        "step_s": {way: round(seconds, 4) for way, seconds in steps.items()},
        "ratio": {way: round(seconds / steps["skyctl"], 3) for way, seconds in steps.items()},
    }


def _plan(bench: Bench, source: str, name: str, file: str, *how: str) -> Plan:
    path = _path(bench, "skyctl" if file == "auto" else file)
    bench.skyctl("plan", source, *SIZES[name], *how, "--no-learn", "-o", path)
    return Plan.model_validate_json(path.read_text())


def _of_amp(bench: Bench, source: str, name: str, chosen: Choice, hybrid: Plan) -> Plan | None:
    """Its choice as a plan of ours; None: memory does not allow it."""
    if len(chosen.grid) == 1:
        ranges = zip(chosen.grid[0], pairwise(chosen.cuts), strict=True)
        text = ",".join(f"{device}={a}:{b}" for device, (a, b) in ranges)
        return _plan(bench, source, name, "amp", "--assign", text)
    share = hybrid.problem.microbatches // len(chosen.grid)
    if len(chosen.cuts) == 2:
        return _plan(
            bench, source, name, "amp", "--assign", ",".join(f"{row[0]}={share}" for row in chosen.grid)
        )
    placed = [
        [(device, a, b) for device, (a, b) in zip(row, pairwise(chosen.cuts), strict=True)]
        for row in chosen.grid
    ]
    made = as_plan(hybrid, placed, [share] * len(placed))
    if made is not None:
        _path(bench, "amp").write_text(made.to_json())
    return made


def _path(bench: Bench, name: str) -> Path:
    return bench.folder / f"{name}.json"


def _launched(bench: Bench, name: str) -> list[float]:
    run = bench.skyctl("launch", _path(bench, name), "--steps", STEPS, "--checkpoint-every", 0)
    return [step["iteration_s"] for step in run["steps"][1:]]


def main() -> None:
    """Runs the cases asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--case", action="append", choices=CASES)
    given = parser.parse_args()
    for one in given.case or CASES:
        print(json.dumps(case(*one.split(", "))), flush=True)


if __name__ == "__main__":
    main()
