"""Sums of 10 MB of gradients in labs: over packed trees, rings, and by Gloo; and are they as predicted?

One JSON line a case. Needs root (network namespaces, cgroups, sshd).

    python benchmarks/sums.py                        # everything, about half an hour
    python benchmarks/sums.py --only mesh            # also: "two sites", helper, prediction, gpt
    python benchmarks/sums.py --only prediction --lab uplink

mesh, two sites, helper: skyctl's sums (``skyctl bench-sync``) and Gloo's all-reduce take turns in one lab.
prediction: what ``bench-sync`` predicts, from what it has probed, beside what it measures. gpt: a whole
data-parallel step of a GPT on the mesh, and the losses of one device.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import count
from pathlib import Path
from statistics import median
from typing import Any

from runs.awake import Awake
from runs.labs import Bench, lab
from runs.sum_labs import HELPER, LABS, SumLab
from tests.lab import fault_injection

BYTES = 10_000_000
TURNS, SUMS = 3, 3
"""Turns, and in each so many sums by skyctl's runtime over each kind of routes; Gloo's are one a turn."""
GLOO = Path(__file__).parent / "runs" / "sum_gloo.py"
GPT = "gpt:layers=4,hidden=128,heads=4,context=64"
GPT_SIZES = ("--batch-size", 64, "--microbatches", 16)
STEPS = 8
_ports = count(29611)


def _cut(bench: Bench, pairs: Sequence[tuple[str, str]]) -> None:
    """Makes each pair of nodes unreachable for each other."""
    state = bench.lab_state()
    address = {node.name: node.address for node in state.nodes}
    for pair in pairs:
        for here, there in (pair, pair[::-1]):
            fault_injection.run_in_node(
                state, here, ["ip", "route", "add", "unreachable", f"{address[there]}/32"]
            )


@contextmanager
def _up(found: SumLab) -> Iterator[Bench]:
    with lab(found.text) as bench, Awake():
        _cut(bench, found.cut)
        yield bench


@contextmanager
def _gloo(bench: Bench, names: Sequence[str]) -> Iterator[Callable[[], float]]:
    """Gloo's ranks in these nodes, in this order; what is given sums once and gives the slowest's seconds."""
    address = {node.name: node.address for node in bench.lab_state().nodes}
    told = {"world": len(names), "host": address[names[0]], "port": next(_ports), "numbers": BYTES // 4}
    ranks: list[subprocess.Popen[bytes]] = []

    def turn() -> float:
        for rank in ranks:
            assert rank.stdin is not None
            rank.stdin.write(b"sum\n")
            rank.stdin.flush()
        said = [rank.stdout.readline() for rank in ranks if rank.stdout is not None]
        if not all(said):
            raise SystemExit("a rank of Gloo's failed; its error is above")
        return max(map(float, said))

    try:
        for number, name in enumerate(names):
            argv = [sys.executable, str(GLOO), json.dumps({**told, "rank": number})]
            ranks.append(bench.start_in(name, argv))
        yield turn
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()


def _sums(bench: Bench, syncs: Sequence[str], *more: object) -> list[dict[str, Any]]:
    """The rows of one ``bench-sync``."""
    asked = ("--bytes", BYTES, "--sync", ",".join(syncs), "--repeat", SUMS, *more)
    return list(bench.skyctl("bench-sync", *asked, ok=(0, 1))["rows"])


def _in_turns(
    name: str, found: SumLab, syncs: Sequence[str], orders: Sequence[Sequence[str]], *more: object
) -> dict[str, Any]:
    """skyctl's sums by each of ``syncs``, and Gloo's in each order of the nodes, in turns."""
    with ExitStack() as stack:
        bench = stack.enter_context(_up(found))
        rows = _sums(bench, syncs, *more)  # it probes, too, and is Gloo's turn to warm up
        gloo = {"→".join(order): stack.enter_context(_gloo(bench, order)) for order in orders}
        for turn in gloo.values():
            turn()
        took: dict[str, list[float]] = {key: [] for key in (*syncs, *gloo)}
        for _ in range(TURNS):
            for row in (rows := _sums(bench, syncs, *more)):
                took[row["sync"]].append(row["measured_s"])
            for order, turn in gloo.items():
                took[order].append(turn())
    figures: dict[str, Any] = {"benchmark": "sums", "case": name, "bytes": BYTES, "turns": TURNS}
    for row in rows:
        figures[row["sync"]] = _figures(took[row["sync"]]) | {
            "routes": row["routes"],
            "kind": row["kind"],
            "predicted_s": round(row["predicted_s"], 4),
        }
    figures |= {f"gloo {order}": _figures(took[order]) for order in gloo}
    figures |= {"bound_mbit": round(rows[0]["bound_mbit"], 2), "optimum_mbit": found.optimum_mbit}
    ours = median(took[syncs[0]])
    figures["times_as_fast_as"] = {
        key: round(median(seconds) / ours, 3) for key, seconds in took.items() if key != syncs[0]
    }
    return figures


def _figures(seconds: Sequence[float]) -> dict[str, Any]:
    taken_s = median(seconds)
    return {
        "measured_s": round(taken_s, 4),
        "rate_mbit": round(BYTES * 8e-6 / taken_s, 2),
        "all_s": [round(one, 3) for one in seconds],
    }


def mesh() -> Iterator[dict[str, Any]]:
    """Four nodes with unequal links; rings go around in the best order, Gloo also in the nodes' own."""
    yield _in_turns("mesh", LABS["mesh"], ("auto", "ring"), (("a", "b", "d", "c"), ("a", "b", "c", "d")))


def two_sites() -> Iterator[dict[str, Any]]:
    """Three nodes each, and three slow links; Gloo needs every pair, so it has no turn."""
    yield _in_turns("two sites", LABS["two sites"], ("auto",), ())


def helper() -> Iterator[dict[str, Any]]:
    """Four lines, and a machine with a fat one that only helps; Gloo's ring is of the four."""
    yield _in_turns("helper", HELPER, ("auto", "ring"), (("n1", "n2", "n3", "n4"),), "--helper", "h")


def prediction(names: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Each lab's fastest sum, predicted and measured."""
    for name in names:
        found = LABS[name]
        with _up(found) as bench:
            row = _sums(bench, ("auto",))[0]
        yield {
            "benchmark": "sums",
            "case": "prediction",
            "lab": name,
            "processors_bind": found.processors,
            "kind": row["kind"],
            "routes": row["routes"],
            "predicted_s": round(row["predicted_s"], 4),
            "measured_s": round(row["measured_s"], 4),
            "error": round(row["predicted_s"] / row["measured_s"] - 1, 4),
            "rate_mbit": round(row["rate_mbit"], 2),
            "bound_mbit": round(row["bound_mbit"], 2),
        }


def gpt() -> Iterator[dict[str, Any]]:
    """A whole step on the mesh, predicted and measured, and its losses beside one device's."""
    with _up(LABS["mesh"]) as bench:
        bench.skyctl("probe", GPT, *GPT_SIZES)
        runs = {}
        for name, options in {
            "data": ("--parallel", "data", "--assign", "a=4,b=4,c=4,d=4"),
            "alone": ("--strategy", "alone"),
        }.items():
            path = bench.folder / f"{name}.json"
            bench.skyctl("plan", GPT, *GPT_SIZES, *options, "--no-learn", "-o", path)
            runs[name] = bench.skyctl("launch", path, "--steps", STEPS, "--checkpoint-every", 0)
    data = runs["data"]
    losses = [[step["loss"] for step in run["steps"]] for run in runs.values()]
    measured_s = data["iteration_s"]["median"]
    yield {
        "benchmark": "sums",
        "case": "gpt",
        "workload": GPT,
        "predicted_s": round(data["predicted_iteration_s"], 4),
        "measured_s": round(measured_s, 4),
        "error": round(data["predicted_iteration_s"] / measured_s - 1, 4),
        "sync_s": data["sync_s"],
        "predicted_sync_s": data["predicted_sync_s"],
        "compute_error": [
            round(r["predicted"]["compute_s"] / r["compute_s"] - 1, 4) for r in data["replicas"]
        ],
        "losses_differ": max(abs(a / b - 1) for a, b in zip(*losses, strict=True)),
    }


SECTIONS = {"mesh": mesh, "two sites": two_sites, "helper": helper, "gpt": gpt}


def main() -> None:
    """Runs the cases asked for."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", action="append", choices=[*SECTIONS, "prediction"])
    parser.add_argument("--lab", action="append", choices=LABS, help="of prediction: this one")
    given = parser.parse_args()
    cases = SECTIONS | {"prediction": lambda: prediction(given.lab or tuple(LABS))}
    for name, case in cases.items():
        if name in (given.only or cases):
            for line in case():
                print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
