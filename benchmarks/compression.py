"""Sums in fewer bytes: how far losses drift, what is sent, how much faster steps are, as predicted?

One JSON line a case. ``lab`` needs root (network namespaces, cgroups, sshd).

    python benchmarks/compression.py                 # everything, half an hour and more
    python benchmarks/compression.py --only losses   # also: lab, rounds, ddp

losses: two ranks, no limit on their link, ``STEPS`` steps of a GPT in float32, and with rank 4 after ten
uncompressed ones, without checkpoints and with one every 20 or five steps (residuals are dropped there).
lab: the same model over lines of 10 Mbit/s, three holders and a helper as the root: bytes that leave
nodes a step, and steps predicted and measured, in float32 and with rank 4. rounds: the same of local SGD,
whose weights are averaged as float32, bfloat16 and int8. ddp: torch's hook on Gloo, with one bucket and
with several.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from runs.driver import worker_driver
from runs.labs import Bench, lab
from tests.lab import fault_injection
from tests.worker.sums import star

from skyctl.records.sync_format import WEIGHT_FORMATS
from skyctl.workload.workload import load_workload
from skyctl.workload.workload_spec import WorkloadSpec

GPT = "gpt:layers=4,hidden=256,heads=4,context=64"
STEPS, BATCH, UNCOMPRESSED, RANK = 50, 8, 10, 4
SEEDS = (1, 2)
FORMAT = f"powersgd:{RANK}"
LAB = """nodes:
  - {name: n1, cpus: 0.5, memory_gib: 2, rate_mbit: 10}
  - {name: n2, cpus: 0.5, memory_gib: 2, rate_mbit: 10}
  - {name: n3, cpus: 0.5, memory_gib: 2, rate_mbit: 10}
  - {name: h, cpus: 0.3, memory_gib: 2, rate_mbit: 50}
"""
SIZES = ("--batch-size", 3, "--microbatches", 3)
SHARES = ("--assign", "n1=1,n2=1,n3=1", "--parallel", "data")
SUMS = (*SHARES, "--sync", "server", "--helper", "h")
ROUNDS = (*SHARES, "--local-steps", "4")
DDP = Path(__file__).parent / "runs" / "powersgd_ddp.py"


def losses() -> None:
    """Of the last step, and the largest difference on the way."""
    driver = worker_driver()
    with tempfile.TemporaryDirectory() as folder:
        pool = driver.Pool(2, Path(folder))
        try:
            for seed in SEEDS:
                plain = _train(driver, pool, seed, {})
                compressed = {"format": FORMAT, "uncompressed_steps": UNCOMPRESSED}
                for every in (None, 20, 5):
                    kept = {"folder": f"{folder}/{seed}-{every}", "every": every, "keep": 2}
                    kept |= {"at_end": False, "attempt": 1}
                    more = {} if every is None else {"checkpoint": kept}
                    found = _train(driver, pool, seed, compressed, **more)
                    off = [a - b for a, b in zip(found, plain, strict=True)]
                    row = {
                        "benchmark": "compression",
                        "case": "losses",
                        "seed": seed,
                        "checkpoint_every": every,
                        "loss": [round(plain[0], 4), round(plain[-1], 4)],
                        "off_at_the_end": round(off[-1], 4),
                        "largest_off": round(max(map(abs, off)), 4),
                    }
                    print(json.dumps(row), flush=True)
        finally:
            pool.close()


def _train(driver: Any, pool: Any, seed: int, sync: dict[str, Any], **more: Any) -> list[float]:
    spec = WorkloadSpec(source=GPT, batch_size=BATCH, seed=seed)
    layers = load_workload(spec).layers
    sync = {"chunk_bytes": 65536, **sync}
    made = driver.side_by_side(spec.to_dict(), layers, [2, 2], star(2), STEPS, sync=sync, **more)
    outcome = pool.run(made)
    if outcome.errors:
        raise RuntimeError(f"{sync}: {outcome.errors}")
    found: list[float] = outcome.losses
    return found


def measure_lab() -> None:
    """Steps and bytes of both formats."""
    with lab(LAB) as bench:
        bench.skyctl("probe", GPT, *SIZES)
        plain, compressed = (
            _measure(bench, name, SUMS, *steps) for name, steps in (("float32", (3, 5)), (FORMAT, (6, 26)))
        )
    row = {
        "benchmark": "compression",
        "case": "lab",
        "float32": plain,
        FORMAT: compressed,
        "bytes_share": round(compressed["bytes_a_step"] / plain["bytes_a_step"], 4),
        "times_as_fast": round(plain["measured_s"] / compressed["measured_s"], 2),
        "compute_share": round(plain["compute_s"] / plain["sync_s"], 4),
    }
    print(json.dumps(row), flush=True)


def measure_rounds() -> None:
    """Rounds and bytes of each format that weights are averaged in; of float32 and the same seed the loss."""
    with lab(LAB) as bench:
        bench.skyctl("probe", GPT, *SIZES)
        rows = {name: _measure(bench, name, ROUNDS, 3, 8) for name in WEIGHT_FORMATS}
    row: dict[str, Any] = {"benchmark": "compression", "case": "rounds", **rows}
    plain = rows["float32"]
    for name in WEIGHT_FORMATS[1:]:
        row[f"{name}_bytes_share"] = round(rows[name]["bytes_a_step"] / plain["bytes_a_step"], 4)
        row[f"{name}_times_as_fast"] = round(plain["measured_s"] / rows[name]["measured_s"], 2)
    print(json.dumps(row), flush=True)


def _measure(bench: Bench, name: str, how: Sequence[str], fewer: int, more: int) -> dict[str, Any]:
    """A plan's step; bytes a step are what leaves all nodes in ``more`` steps beyond that in ``fewer``."""
    path = bench.folder / f"{name}.json"
    bench.skyctl("plan", GPT, *SIZES, *how, "--sync-format", name, "--no-learn", "-o", path)
    sent, done = [], {}
    for steps in (fewer, more):
        before = _sent_bytes(bench)
        done = bench.skyctl("launch", path, "--steps", steps, "--checkpoint-every", 0, "-y")
        sent.append(_sent_bytes(bench) - before)
    plan = json.loads(path.read_text())
    return {
        "bytes_a_step": round((sent[1] - sent[0]) / (more - fewer)),
        "predicted_s": round(done["predicted_iteration_s"], 4),
        "measured_s": round(done["iteration_s"]["median"], 4),
        "sync_s": round(done["sync_s"], 4),
        "predicted_sync_s": round(plan["predicted"]["sync_s"], 4),
        "compute_s": round(max(one["compute_s"] for one in done["replicas"]), 4),
        "loss": round(done["final_loss"], 4),
    }


def _sent_bytes(bench: Bench) -> int:
    """The bytes that have left all nodes so far."""
    state, total = bench.lab_state(), 0
    for node in state.nodes:
        text = fault_injection.run_in_node(state, node.name, ["cat", "/proc/net/dev"]).stdout
        rows = [line.split(":") for line in text.splitlines() if ":" in line]
        total += sum(int(figures.split()[8]) for name, figures in rows if name.strip() != "lo")
    return total


def ddp() -> None:
    """How far torch's hook comes on Gloo."""
    for number, (buckets, megabytes) in enumerate((("one", 25.0), ("several", 0.3))):
        told = {"world": 2, "port": 29741 + number, "bucket_mb": megabytes, "hooked": True}
        ranks = [
            subprocess.Popen(
                [sys.executable, str(DDP), json.dumps({**told, "rank": rank})],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank in range(2)
        ]
        said = []
        for rank in ranks:
            try:
                out, err = rank.communicate(timeout=90)
            except subprocess.TimeoutExpired:
                rank.kill()
                out, err = "", rank.communicate()[1] + "hung"
            words = err.strip().splitlines()
            ended = {"steps": None, "error": words[-1][:160] if words else f"ended with {rank.returncode}"}
            said.append(json.loads(out) if out else ended)
        row = {"benchmark": "compression", "case": "ddp", "buckets": buckets, "ranks": said}
        print(json.dumps(row), flush=True)


CASES: dict[str, Callable[[], None]] = {
    "losses": losses,
    "lab": measure_lab,
    "rounds": measure_rounds,
    "ddp": ddp,
}


def main() -> None:
    """The cases asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=tuple(CASES), help="one case alone")
    only = parser.parse_args().only
    for name, case in CASES.items():
        if only in (None, name):
            case()


if __name__ == "__main__":
    main()
