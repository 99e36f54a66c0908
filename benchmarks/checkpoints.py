"""The costs of checkpoints: writing, reading and verifying shards, and moving them between two keepers.

One JSON line a case, on standard output. ``python benchmarks/checkpoints.py [--folder DIR] [--hidden N]``
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
from runs.driver import worker_driver

from skyctl.checkpoint.node import layout
from skyctl.checkpoint.node.shard_client import (
    ReplicatorAddress,
    ReplicatorCredentials,
    ShardClient,
    fetch_shards,
)
from skyctl.checkpoint.node.shard_server import ShardServer
from skyctl.checkpoint.node.shards import ShardStamp, StageState
from skyctl.workload.mixed_precision import master_of
from skyctl.workload.workload import load_workload
from skyctl.workload.workload_spec import WorkloadSpec

REPEATS = 5


def main() -> int:
    """Prints the lines; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, help="where to write (default: a temporary folder)")
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--dtype", default="float32")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=given.folder) as folder:
        _measure(Path(folder), given.hidden, given.dtype)
        _training(Path(folder), given.hidden, given.dtype)
    return 0


def _measure(folder: Path, hidden: int, dtype: str) -> None:
    source = f"gpt:layers=4,hidden={hidden},heads=8,context=64"
    workload = load_workload(WorkloadSpec(source=source, batch_size=4, dtype=dtype, random_inputs=True))
    layers = workload.build(0, workload.layers)
    parameters = [p for layer in layers for p in layer.parameters()]
    optimizer = workload.optimizer(parameters)
    state = StageState(layers, optimizer, master_of)
    value: Any = next(workload.batches())
    outputs, targets = value
    for layer in layers:
        outputs = layer(outputs)
    torch.autograd.backward([workload.loss(outputs, targets)])
    optimizer.step()
    optimizer.zero_grad()
    stamps = [
        ShardStamp("bench", 1, i, name, workload.layers, workload.digest, dtype, 0)
        for i, name in enumerate(workload.names)
    ]

    def write() -> dict[int, Any]:
        layout.make_step_folder(folder, 1)
        return {i: state.write(i, layout.layer_path(folder, 1, i), stamps[i]) for i in range(len(layers))}

    files, write_s = _best(write)
    part = layout.ShardManifest("bench", 0, 1, 0, 0, len(layers), workload.digest, files)
    layout.write_manifest(folder, part)
    size = sum(file.size_bytes for file in files.values())
    _tell("write (with fsync and SHA-256)", size, write_s, files=len(files))
    _, verify_s = _best(lambda: [layout.find_fault(folder, 1, i) for i in range(len(layers))])
    _tell("verify", size, verify_s)

    def restore() -> None:
        for i, stamp in enumerate(stamps):
            state.read(i, layout.layer_path(folder, 1, i), stamp)

    _, read_s = _best(restore)
    _tell("restore", size, read_s)
    wanted = {i: (file.sha256, 0) for i, file in files.items()}
    server = ShardServer(folder, run_id="bench", node="here", secret="bench", address="127.0.0.1")
    try:

        def pull() -> object:
            copies = folder / "copies"
            layout.remove_run_folder(copies)
            with ShardClient(
                ReplicatorAddress("127.0.0.1", server.port, "here"), ReplicatorCredentials("bench", "bench")
            ) as peer:
                limits = {i: file.size_bytes for i, file in files.items()}
                return fetch_shards(peer, copies, 1, wanted, limits, "bench")

        _, pull_s = _best(pull)
        _tell("pull over loopback", size, pull_s)
    finally:
        server.close()


def _training(folder: Path, hidden: int, dtype: str) -> None:
    """Two ranks on this machine: a step beside a checkpoint, both as the ranks report them."""
    spec = WorkloadSpec(
        source=f"gpt:layers=4,hidden={hidden},heads=8,context=128", batch_size=16, dtype=dtype
    )
    layers = load_workload(spec).layers
    driver = worker_driver()
    (folder / "ranks").mkdir()
    pool = driver.Pool(2, folder / "ranks")
    try:
        told = {"folder": str(folder / "run"), "every": 3, "keep": 2}
        cuts = [0, layers // 2, layers]
        orders = driver.orders(spec.to_dict(), cuts, 8, "1f1b", 9, checkpoint=told)
        outcome = pool.run(orders)
    finally:
        pool.close()
    if outcome.errors:
        raise RuntimeError(str(outcome.errors))
    for rank, events in sorted(outcome.checkpoints.items()):
        size = sum(file["bytes"] for file in events[-1]["layers"].values())
        wall_s = median(event["wall_s"] for event in events)
        step_s = median(event["iteration_s"] for event in outcome.steps[rank][1:])
        _tell(f"in training, rank {rank}", size, (wall_s, None), step_s=round(step_s, 4))


def _best(act: Callable[[], Any]) -> tuple[Any, tuple[float, float]]:
    """The result, and the median seconds: on the wall, and of CPU time."""
    times = []
    result = None
    for _ in range(REPEATS):
        began, used = time.perf_counter(), time.process_time()
        result = act()
        times.append((time.perf_counter() - began, time.process_time() - used))
    return result, sorted(times)[REPEATS // 2]


def _tell(case: str, size_bytes: int, times_s: tuple[float, float | None], **more: Any) -> None:
    wall_s, cpu_s = times_s
    figures = {
        "case": case,
        "mb": round(size_bytes / 1e6, 1),
        "wall_s": round(wall_s, 4),
        "mb_per_s": round(size_bytes / wall_s / 1e6, 1),
        "cpu_s_per_gb": None if cpu_s is None else round(cpu_s / size_bytes * 1e9, 2),
        "torch": torch.__version__,
        **more,
    }
    sys.stdout.write(json.dumps(figures) + "\n")


if __name__ == "__main__":
    sys.exit(main())
