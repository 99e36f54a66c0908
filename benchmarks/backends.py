"""The cost of a message between ranks: over skyctl's connections, in the clear and under TLS, and over Gloo.

Two processes over loopback, each kind in turn, several times; medians over the turns. One JSON line, by kind
and size: µs of wall and of CPU time (both processes) for a message in a stream, and for a round trip.

    python benchmarks/backends.py [--turns 5]
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from skyctl.remote.credentials import make_tls_certificate
from skyctl.transport import GLOO
from skyctl.transport.planned_process_group import PairOptions
from skyctl.transport.tls_identity import TlsIdentity
from skyctl.transport.torch_backend import join
from skyctl.worker.peer import FIRST_STREAM_TAG, Peer

SIZES = {64: 3000, 64 << 10: 2000, 1 << 20: 150, 8 << 20: 20}
"""Bytes of a message, and how many are sent."""
TRIPS, WINDOW = 1000, 4
KINDS = ("skyctl", "skyctl TLS", "gloo")
HOST = "127.0.0.1"


def play(kind: str, rank: int, folder: Path) -> dict[str, float]:
    """One end's figures: the first sends the streams."""
    told = (folder / "tls").read_text()
    identity = TlsIdentity(**json.loads(told)) if kind == "skyctl TLS" else None
    backend = GLOO if kind == "gloo" else "skyctl"
    options = PairOptions({1 - rank: HOST}, {1 - rank: "s"}, identity=identity, backend=backend)
    store = dist.FileStore(str(folder / "store"), 2)  # type: ignore[attr-defined]
    group = join(store, rank, 2, options, 60.0)
    group.connect(store, options)
    peer = Peer(group, 1 - rank)
    found: dict[str, float] = {}
    for nbytes, count in SIZES.items():
        tensors = [torch.zeros(nbytes, dtype=torch.uint8) for _ in range(WINDOW)]
        act = peer.recv if rank else peer.send
        peer.measure_latency()  # both begin together
        wall_s, cpu_s = time.perf_counter(), time.process_time()
        stream(lambda number: act(tensors[number % WINDOW], FIRST_STREAM_TAG), count)  # noqa: B023
        found[f"{nbytes} wall_us"] = 1e6 * (time.perf_counter() - wall_s) / count
        found[f"{nbytes} cpu_us"] = 1e6 * (time.process_time() - cpu_s) / count
    cpu_s = time.process_time()
    peer.measure_latency(TRIPS)
    found["round trip cpu_us"] = 1e6 * (time.process_time() - cpu_s) / TRIPS
    found["round trip wall_us"] = 2e6 * peer.latency_s
    group.close(graceful=True)
    return found


def stream(act: Callable[[int], Any], count: int) -> None:
    """Has so many messages under way, ``WINDOW`` at a time."""
    works: list[Any] = []
    for number in range(count):
        works.append(act(number))
        if len(works) >= WINDOW:
            works.pop(0).wait()
    for work in works:
        work.wait()


def measure(kind: str) -> dict[str, float]:
    """One turn of one kind: wall time of the receiver, CPU time of both ends."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "tls").write_text(json.dumps(asdict(make_tls_certificate())))
        words = [sys.executable, __file__, "--kind", kind, "--folder", folder, "--end"]
        ends = [subprocess.Popen([*words, str(rank)], stdout=subprocess.PIPE, text=True) for rank in (0, 1)]
        first, second = (json.loads(end.communicate(timeout=120)[0]) for end in ends)
    return {key: second[key] + (first[key] if "cpu" in key else 0.0) for key in second}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--turns", type=int, default=5)
    for hidden in ("--kind", "--folder", "--end"):
        parser.add_argument(hidden, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    if asked.end is not None:
        print(json.dumps(play(asked.kind, int(asked.end), Path(asked.folder))), flush=True)
        os._exit(0)
    taken: dict[str, list[dict[str, float]]] = {kind: [] for kind in KINDS}
    for _ in range(asked.turns):
        for kind, turns in taken.items():
            turns.append(measure(kind))
    medians = {
        kind: {key: round(median(turn[key] for turn in turns), 1) for key in turns[0]}
        for kind, turns in taken.items()
    }
    print(json.dumps({"benchmark": "backends", "turns": asked.turns, **medians}), flush=True)


if __name__ == "__main__":
    main()
