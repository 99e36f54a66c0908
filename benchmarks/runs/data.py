"""Data parallelism with unequal shares on four unequal nodes: beside an equal split, and beside a pipeline.

A convolutional net on a LAN, where gradients are few bytes: skyctl's data plan, an equal split by
``DistributedDataParallel`` over Gloo (``torch_rank.py``) and the best pipeline plan, one after the other, in
turns. A GPT of 12 blocks at 100 Mbit/s, where they are many: both forms' plans, run as well.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from runs.bounds import data_bound_s
from runs.labs import Bench, Lines, lab
from runs.machine import Case, steadily
from runs.prediction import CONVOLUTIONAL
from runs.torch_runs import torch_steps

LAN = """\
nodes:
  - {name: n1, cpus: 0.8, memory_gib: 4, rate_mbit: RATE}
  - {name: n2, cpus: 0.4, memory_gib: 4, rate_mbit: RATE}
  - {name: n3, cpus: 0.2, memory_gib: 4, rate_mbit: RATE}
  - {name: n4, cpus: 0.2, memory_gib: 4, rate_mbit: RATE}
"""
LARGE_PICTURES = CONVOLUTIONAL.replace("3, 32, 32, generator", "3, 64, 64, generator")
GPT = "gpt:layers=12,hidden=256,heads=8,context=128"
BATCH, MICROBATCHES = 64, (8, 16, 32)
"""Each form's plan is of the number of microbatches that is predicted the fastest."""
TURNS, STEPS = 2, 7
CASES = ("convolutional", "gpt")
SIZES = ("--batch-size", BATCH)


def data(cases: Sequence[str] = CASES) -> Iterator[dict[str, Any]]:
    """One figure a case."""
    if "convolutional" in cases:
        with lab(LAN.replace("RATE", "1000")) as bench:
            source = bench.folder / "train.py"
            source.write_text(LARGE_PICTURES)
            yield steadily(partial(_convolutional, bench, source), attempts=1)
    if "gpt" in cases:
        with lab(LAN.replace("RATE", "100")) as bench:
            yield steadily(partial(_gpt, bench), attempts=1)


def _convolutional(bench: Bench, source: Path) -> Case:
    _, probing = bench.timed("probe", source, *SIZES, "--microbatches", ",".join(map(str, MICROBATCHES)))
    plans = {form: best_plan(bench, source, form) for form in ("data", "pipeline")}
    ways = {form: partial(_launch, bench, path) for form, (path, _) in plans.items()}
    took: dict[str, list[float]] = {"data": [], "equal": [], "pipeline": []}
    launching = Lines([])
    for _ in range(TURNS):
        run, launching = ways["data"]()
        took["data"] += _settled(run)
        took["equal"] += torch_steps(bench, source, "data", batch=BATCH, microbatches=1, steps=STEPS)
        took["pipeline"] += _settled(ways["pipeline"]()[0])
    steps = {name: median(seconds) for name, seconds in took.items()}
    made = plans["data"][1]
    bound = data_bound_s(made["problem"])
    figures = {
        "benchmark": "runtime",
        "section": "data",
        "workload": "convolutional",
        "rate_mbit": 1000,
        "turns": TURNS,
        "data": _about(made) | {"measured_s": round(steps["data"], 4)},
        "pipeline": _about(plans["pipeline"][1]) | {"measured_s": round(steps["pipeline"], 4)},
        "equal": {"measured_s": round(steps["equal"], 4)},
        "bound_s": round(bound, 4),
        "of_bound": round(steps["data"] / bound, 4),
        "as_fast_as_equal": round(steps["equal"] / steps["data"], 4),
        "as_fast_as_pipeline": round(steps["pipeline"] / steps["data"], 4),
    }
    return Case(figures, probing.probed, launching.ran((STEPS - 1) * steps["data"]))


def _gpt(bench: Bench) -> Case:
    _, probing = bench.timed("probe", GPT, *SIZES, "--microbatches", MICROBATCHES[1])
    made, words = {}, []
    for form in ("data", "pipeline"):
        path = bench.folder / f"{form}.json"
        options = (*SIZES, "--microbatches", MICROBATCHES[1], "--parallel", form, "--no-learn")
        said = bench.timed("plan", GPT, *options, "-o", path)[1]
        made[form] = json.loads(path.read_text())
        words += [text for _, text in said.lines if text.startswith("beside it")]
    took, launching = {}, Lines([])
    for form in made:
        run, launching = _launch(bench, bench.folder / f"{form}.json")
        took[form] = median(_settled(run))
    figures = {
        "benchmark": "runtime",
        "section": "data",
        "workload": "gpt",
        "rate_mbit": 100,
        "said": words,
        "pipeline_iteration_s": made["data"]["pipeline_iteration_s"],
        **{form: _about(one) | {"measured_s": round(took[form], 4)} for form, one in made.items()},
        "pipeline_as_fast": round(took["data"] / took["pipeline"], 4),
    }
    return Case(figures, probing.probed, launching.ran((STEPS - 1) * took["pipeline"]))


def best_plan(bench: Bench, source: Path, form: str) -> tuple[Path, dict[str, Any]]:
    """Of the numbers of microbatches the fastest as predicted: the plan's file and what is in it."""
    found = []
    for number in MICROBATCHES:
        path = bench.folder / f"{form}-{number}.json"
        bench.skyctl(
            "plan", source, *SIZES, "--microbatches", number, "--parallel", form, "--no-learn", "-o", path
        )
        found.append((path, json.loads(path.read_text())))
    return min(found, key=lambda one: one[1]["predicted"]["iteration_s"])


def _launch(bench: Bench, path: Path) -> tuple[dict[str, Any], Lines]:
    return bench.timed("launch", path, "--steps", STEPS, "--checkpoint-every", 0)


def _settled(run: dict[str, Any]) -> list[float]:
    return [step["iteration_s"] for step in run["steps"][1:]]


def _about(made: dict[str, Any]) -> dict[str, Any]:
    """A plan in short."""
    return {
        "microbatches": made["problem"]["microbatches"],
        "schedule": made["problem"]["schedule"],
        "devices": devices_of(made),
        "predicted_s": round(made["predicted"]["iteration_s"], 4),
    }


def devices_of(made: dict[str, Any]) -> list[list[Any]]:
    """By holder its microbatches, or by stage its layers."""
    if made["form"] == "pipelines":
        return [[one["stages"][0]["device"], one["microbatches"]] for one in made["pipelines"]]
    return [[stage["replicas"][0]["device"], stage["start"], stage["stop"]] for stage in made["stages"]]
