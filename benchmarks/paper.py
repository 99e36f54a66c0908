"""Sky Computing's experiment: simulated at its sizes, and run for real at a small one.

Prints one JSON line. ``--write`` puts the tables and the picture into docs/paper.md.

    python benchmarks/paper.py --write       # simulated, minutes: up to 60 s for each plan that is not proved
    python benchmarks/paper.py --measured    # real processes on this machine

``--measured``: workers 5 to 8 of the published draw (factors 7, 3, 7, 2) as local nodes that are slowed
down so, BERT at a small width; even, the published heuristic, ours, optimal and the least sum, each in the
published execution (the whole batch through all stages and back, then the next) and pipelined.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from pathlib import Path
from typing import Any

from runs.labs import Bench
from tables.page import machine, markdown, replaced

from skyctl.paper.paper_experiment import LIMIT_S as DEFAULT_S
from skyctl.paper.paper_experiment import published_heuristic, run_experiment, slowdown_factors
from skyctl.paper.paper_report import PaperTable, paper_tables, plot_paper
from skyctl.paper.paper_result import PaperResult
from skyctl.records.plan import Plan

ROOT = Path(__file__).resolve().parents[1]
DOCUMENT = ROOT / "docs" / "paper.md"
PICTURE = ROOT / "docs" / "images" / "paper.svg"

LIMIT_S = 60.0
"""For the document; ``skyctl compare --paper`` takes two seconds unless told."""

WORKERS = slice(4, 8)
BATCH, MICROBATCHES, STEPS = 16, 16, 8
WORKLOAD = "bert:layers=16,hidden=192,heads=6,context=64"


def texts(paper: PaperResult) -> dict[str, str]:
    """By section of the document: its table in Markdown."""
    return {table.name: _text(table) for table in paper_tables(paper)}


def _text(table: PaperTable) -> str:
    return f"**{table.title}**\n\n{markdown(table.head, table.rows)}"


def write(paper: PaperResult) -> None:
    """Puts every table between its markers, and the picture beside the document."""
    document = DOCUMENT.read_text(encoding="utf-8")
    how = f"\n\n`python benchmarks/paper.py --write`, {LIMIT_S:g} s for a step's optimal · {machine()}."
    for name, text in texts(paper).items():
        document = replaced(document, name, text + how if name == "planning" else text)
    DOCUMENT.write_text(document, encoding="utf-8")
    plot_paper(paper, PICTURE)


def line(paper: PaperResult) -> dict[str, Any]:
    """The largest size's figures."""
    found: dict[str, Any] = {}
    for case in paper.cases:
        if (case.nodes, case.encoders) == (64, 160):
            found[case.execution] = {
                e.strategy: {"s": round(e.time_s, 4), "saved": round(e.reduction, 4), "gap": e.gap}
                for e in case.entries
            }
    return {"benchmark": "paper", "size": "64 × 160", "wall_s": round(paper.wall_s, 1), **found}


def measured() -> dict[str, Any]:
    """Real processes: every strategy in both executions."""
    factors = slowdown_factors(WORKERS.stop + 1)[WORKERS]
    with tempfile.TemporaryDirectory(prefix="skyctl-bench-") as name:
        folder = Path(name)
        nodes = "".join(
            f"  - {{name: w{i}, transport: local, threads: 1, slowdown: {f}}}\n"
            for i, f in enumerate(factors, start=WORKERS.start + 1)
        )
        (folder / "cluster.yaml").write_text(f"name: paper\nnodes:\n{nodes}")
        env = {"SKYCTL_HOME": str(folder / "state"), "SKYCTL_CLUSTER": str(folder / "cluster.yaml")}
        bench = Bench(folder, {**os.environ, **env})
        chain = _runs(bench, 1, ("--schedule", "sequential"), _CHAIN)
        pipelined = _runs(bench, MICROBATCHES, ("--schedule", "1f1b"), _PIPELINED)
    return {
        "benchmark": "paper",
        "section": "measured",
        "workload": WORKLOAD,
        "factors": factors,
        "batch": BATCH,
        "microbatches": MICROBATCHES,
        "steps": STEPS,
        "chain": chain,
        "pipelined": pipelined,
    }


_CHAIN: dict[str, tuple[str, ...]] = {
    "even": ("--strategy", "even"),
    "dynamic": (),
    "heuristic": ("--strategy", "heuristic", "--objective", "bottleneck"),
    "optimal": ("--strategy", "optimal", "--objective", "bottleneck"),
    "least sum": ("--strategy", "optimal", "--objective", "iteration"),
}
_PIPELINED = {name: how for name, how in _CHAIN.items() if name != "least sum"} | {
    "heuristic": ("--strategy", "heuristic"),
    "optimal": ("--strategy", "optimal"),
}


def _runs(
    bench: Bench, microbatches: int, schedule: tuple[str, ...], hows: dict[str, tuple[str, ...]]
) -> dict[str, Any]:
    """Probed once for that size of microbatch; each strategy planned, and each distinct plan run."""
    sizes = ("--batch-size", BATCH, "--microbatches", microbatches)
    bench.skyctl("probe", WORKLOAD, *sizes, "--refresh")
    found: dict[str, Any] = {}
    ran: dict[str, Any] = {}
    for name, how in hows.items():
        path = bench.folder / "plan.json"
        asked = how if how else ("--assign", _assign(found["even"]["plan"]))
        bench.skyctl(
            "plan", WORKLOAD, *sizes, "--parallel", "pipeline", *schedule, *asked, "--no-learn", "-o", path
        )
        made = Plan.model_validate_json(path.read_text())
        key = str([(s.start, s.stop, s.replicas[0].device) for s in made.stages])
        if key not in ran:
            ran[key] = bench.skyctl("launch", path, "--steps", STEPS, "--checkpoint-every", 0)
        found[name] = {"plan": made, "run": ran[key]}
    even_s = found["even"]["run"]["iteration_s"]["median"]
    even_predicted_s = found["even"]["plan"].predicted.iteration_s
    return {
        name: {
            "layers": [s.stop - s.start for s in one["plan"].stages],
            "devices": [s.replicas[0].device.partition("/")[0] for s in one["plan"].stages],
            "status": one["plan"].certificate.status,
            "predicted_s": round(one["plan"].predicted.iteration_s, 4),
            "measured_s": round(one["run"]["iteration_s"]["median"], 4),
            "saved_predicted": round(1 - one["plan"].predicted.iteration_s / even_predicted_s, 4),
            "saved": round(1 - one["run"]["iteration_s"]["median"] / even_s, 4),
            "final_loss": one["run"]["final_loss"],
        }
        for name, one in found.items()
    }


def _assign(even: Plan) -> str:
    """The published heuristic's plan for the same problem, as ``plan --assign`` takes it."""
    return ",".join(
        f"{device.partition('/')[0]}={start}:{stop}"
        for device, start, stop in published_heuristic(even.problem)
    )


def main() -> None:
    """Runs what is asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--write", action="store_true", help="put tables and picture into docs/paper.md")
    parser.add_argument("--measured", action="store_true", help="run real processes instead")
    given = parser.parse_args()
    if given.measured:
        print(json.dumps(measured()), flush=True)
        return
    paper = run_experiment(limit_s=LIMIT_S if given.write else DEFAULT_S)
    print(json.dumps(line(paper), ensure_ascii=False), flush=True)
    if given.write:
        write(paper)


if __name__ == "__main__":
    main()
