"""Public models as people write them, each trained on three unequal local nodes and by plain torch beside.

Every file of ``benchmarks/zoo/`` is a user's: ``model()`` gives an ordinary module, with ``data()`` and
``loss()`` around it. It is probed, planned (by its bottleneck, so that all three nodes have work), and
trained for ten steps; the losses are compared with those of plain torch in one process, from the same
weights and with the same microbatches, or, where the model draws random numbers, with skyctl's own on one
device. Then the trained weights go back into the file's own class. A line of JSON a model is added to
the record, which is not measured again; ``--write`` puts the table into docs/workloads.md.

    python benchmarks/zoo.py                                   # about 15 minutes
    python benchmarks/zoo.py --only resnet18 unet --record build/some.jsonl
    python benchmarks/zoo.py --peers --write                   # which of them torch.fx and torch.export take
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from porting import plain_torch, tracers
from runs.labs import Bench, local_nodes
from tables.page import markdown, replaced

FOLDER = Path(__file__).resolve().parent / "zoo"
DOCUMENT = FOLDER.parents[1] / "docs" / "workloads.md"
RECORD = Path("build/zoo.jsonl")
NODES = """\
name: zoo
nodes:
  - {name: n1, transport: local, threads: 1}
  - {name: n2, transport: local, threads: 1, slowdown: 1.5}
  - {name: n3, transport: local, threads: 1, slowdown: 3.0}
"""
BATCH, MICROBATCHES = 8, 4
SIZES = ("--batch-size", BATCH, "--microbatches", MICROBATCHES)
STEPS = 10
ERRORS = (1, 2, 3, 4, 5)
"""Exit codes of a command that says why it does nothing."""
EQUAL = 1e-5
ENOUGH = 21
"""So many of the models are to run."""
LINE = re.compile(r"\.py, line \d+")


def model_names() -> list[str]:
    """The zoo's models, by their files' names."""
    return sorted(path.stem for path in FOLDER.glob("*.py"))


def measure(bench: Bench, name: str) -> dict[str, Any]:
    """One model's line: how it is cut, planned and trained, or why not."""
    path = FOLDER / f"{name}.py"
    file = plain_torch.ModelFile.load(path)
    row: dict[str, Any] = {
        "benchmark": "zoo",
        "model": name,
        "about": file.about,
        "parameters": sum(p.numel() for p in file.make().parameters()),
    }
    profile = bench.skyctl("probe", path, *SIZES, ok=(0, *ERRORS))
    if "error" in profile:
        return row | _error(profile, "refused")
    layers = profile["workload"]["shapes"][0]["layers"]
    flops = [layer["flops"] for layer in layers]
    row |= {
        "layers": len(layers),
        "distinct": len({layer["signature"] for layer in layers}),
        "largest_layer": round(max(flops) / sum(flops), 3),
    }
    made, strategy = _plan(bench, path)
    row |= {
        "strategy": strategy,
        "stages": [[s["replicas"][0]["device"], s["stop"] - s["start"]] for s in made["stages"]],
    }
    run = bench.skyctl("launch", bench.folder / "plan.json", *_length(), ok=(0, *ERRORS))
    if "error" in run:
        return row | _error(run, "failed")
    try:
        return row | _compare(bench, file, run)
    except RuntimeError as exc:  # what load_state_dict raises for other names or shapes
        return row | {"failed": str(exc)}


def _plan(bench: Bench, path: Path) -> tuple[dict[str, Any], str]:
    """A plan over all three nodes and its strategy; ``even`` where the least bottleneck needs fewer."""
    out = ("-o", bench.folder / "plan.json")
    made = bench.skyctl("plan", path, *SIZES, "--objective", "bottleneck", *out)
    if len(made["stages"]) == NODES.count("name: n"):
        return made, "bottleneck"
    return bench.skyctl("plan", path, *SIZES, "--strategy", "even", *out), "even"


def _length() -> tuple[object, ...]:
    return "--steps", STEPS, "--checkpoint-every", 0, "--max-restarts", 0, "--yes"


def _compare(bench: Bench, file: plain_torch.ModelFile, run: dict[str, Any]) -> dict[str, Any]:
    """The run beside one device, and its weights in the file's own class."""
    losses = [step["loss"] for step in run["steps"]]
    row: dict[str, Any] = {
        "losses": losses,
        "step_s": run["iteration_s"]["median"],
    }
    workload = plain_torch.load(file.path, BATCH)
    with plain_torch.single_thread():
        if plain_torch.draws(file, BATCH):
            alone = bench.folder / "alone.json"
            bench.skyctl("plan", file.path, *SIZES, "--strategy", "alone", "-o", alone)
            others = [step["loss"] for step in bench.skyctl("launch", alone, *_length())["steps"]]
            row["beside"] = "skyctl on one device"
        else:
            weights = plain_torch.initial_weights(workload)
            others = plain_torch.train(file, weights, BATCH, MICROBATCHES, STEPS)
            row["beside"] = "plain torch"
        row["loss_difference"] = plain_torch.largest_difference(losses, others)
        row["reload_difference"] = plain_torch.reload_difference(file, workload, Path(run["weights"]), BATCH)
    return row


def _error(document: dict[str, Any], how: str) -> dict[str, Any]:
    error = document["error"]
    return {
        how: error["message"],
        "hint": error["hint"],
        "exit_code": error["exit_code"],
        "names_line": LINE.search(error["message"]) is not None,
    }


def peers(name: str) -> dict[str, Any]:
    """One model's line on torch's own tracers: by tracer, why it does not take the model, or null."""
    file = plain_torch.ModelFile.load(FOLDER / f"{name}.py")
    found = {tracer: tracers.failure(file, tracer, BATCH) for tracer in tracers.TRACERS}
    return {"benchmark": "zoo-peers", "model": name, **found}


def is_good(row: dict[str, Any]) -> bool:
    """Whether a model ran as on one device, or was refused with a line and a reason."""
    if "refused" in row:
        return bool(row["exit_code"] == 2 and row["names_line"])
    if "loss_difference" not in row:
        return False
    return bool(max(row["loss_difference"], row["reload_difference"]) <= EQUAL)


def table(rows: Sequence[dict[str, Any]]) -> str:
    """For docs/workloads.md: what ran, what was refused and why, in Markdown."""
    ran = [row for row in rows if row["benchmark"] == "zoo" and "refused" not in row and "failed" not in row]
    left = [row for row in rows if row["benchmark"] == "zoo" and row not in ran]
    traced = {row["model"]: row for row in rows if row["benchmark"] == "zoo-peers"}
    head = ("model", "", "parameters", "layers (distinct)", "largest layer", "layers of each stage",
            "losses differ by", "reloaded, by", *tracers.TRACERS)  # fmt: skip
    lines = []
    for row in ran:
        mark = "" if row["beside"] == "plain torch" else " ¹"
        lines.append(
            (
                f"`{row['model']}`",
                row["about"].rstrip("."),
                f"{row['parameters']:,}",
                f"{row['layers']} ({row['distinct']})",
                f"{row['largest_layer']:.0%}",
                " + ".join(str(count) for _, count in row["stages"])
                + (" ²" if row["strategy"] == "even" else ""),
                _figure(row["loss_difference"]) + mark,
                _figure(row["reload_difference"]),
                *_taken(traced.get(row["model"])),
            )
        )
    good = sum(is_good(row) for row in ran)
    text = (
        f"{good} of {len(ran) + len(left)} run as on one device. ¹ They draw random numbers, so beside a run "
        "of skyctl on one device; the others beside plain torch. ² An even split.\n\n" + markdown(head, lines)
    )
    refused = [
        (
            f"`{row['model']}`",
            row["about"].rstrip("."),
            " ".join((row.get("refused") or row["failed"]).replace("|", "\\|").split()),
            *_taken(traced.get(row["model"])),
        )
        for row in left
    ]
    if refused:
        text += "\n\n" + markdown(("refused", "", "what skyctl says", *tracers.TRACERS), refused)
    if traced:
        counts = " and ".join(
            f"{sum(row[tracer] is None for row in traced.values())} by `torch.{tracer}`"
            for tracer in tracers.TRACERS
        )
        text += f"\n\nOf the {len(traced)}, {counts} are taken as they are, for any batch size, in `train()`."
    return text


def _figure(difference: float) -> str:
    return f"{difference:.0e}" if difference else "0"


def _taken(row: dict[str, Any] | None) -> tuple[str, ...]:
    if row is None:
        return ("",) * len(tracers.TRACERS)
    return tuple("yes" if row[tracer] is None else "no" for tracer in tracers.TRACERS)


def read(record: Path) -> list[dict[str, Any]]:
    """The record's lines by model's name; none where there is no record."""
    lines = record.read_text().splitlines() if record.exists() else []
    return sorted((json.loads(line) for line in lines), key=lambda row: row["model"])


def _keep(record: Path, row: dict[str, Any]) -> None:
    record.parent.mkdir(parents=True, exist_ok=True)
    line = json.dumps(row, ensure_ascii=False)
    with record.open("a") as file:
        file.write(line + "\n")
    print(line, flush=True)


def main() -> int:
    """Exit code 1 where a model did not run as on one device, and was not refused with a line, either."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=model_names(), metavar="NAME")
    parser.add_argument("--record", type=Path, default=RECORD, help=f"a line a model; default {RECORD}")
    parser.add_argument("--peers", action="store_true", help="also ask torch's own tracers")
    parser.add_argument("--write", action="store_true", help="put the table into docs/workloads.md")
    given = parser.parse_args()
    names = given.only or model_names()
    known = {(row["benchmark"], row["model"]) for row in read(given.record)}
    todo = [name for name in names if ("zoo", name) not in known]
    if todo:
        with local_nodes(NODES) as bench:
            for name in todo:
                _keep(given.record, measure(bench, name))
    for name in names if given.peers else []:
        if ("zoo-peers", name) not in known:
            _keep(given.record, peers(name))
    rows = read(given.record)
    if given.write:
        cores = len(os.sched_getaffinity(0))
        made_by = (
            f"`python benchmarks/zoo.py --peers --write` · {cores} cores, "
            f"Python {platform.python_version()}, torch {torch.__version__}."
        )
        text = DOCUMENT.read_text(encoding="utf-8")
        DOCUMENT.write_text(replaced(text, "zoo", f"{table(rows)}\n\n{made_by}"), encoding="utf-8")
    mine = [row for row in rows if row["benchmark"] == "zoo" and row["model"] in names]
    ran = sum("loss_difference" in row for row in mine)
    bad = [row["model"] for row in mine if not is_good(row)]
    print(f"{ran} of {len(mine)} ran; not as they should be: {', '.join(bad) or 'none'}", file=sys.stderr)
    return int(bool(bad) or (given.only is None and ran < ENOUGH))


if __name__ == "__main__":
    sys.exit(main())
