"""Seconds of a probe: four unequal nodes, sixteen of a tenth of a core, sixty-four local ones."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from runs.labs import lab

BERT = ("bert:layers=24,hidden=512,heads=8,context=128", "--batch-size", "32", "--microbatches", "8")
SMALL = ("gpt:layers=4,hidden=64,heads=4,context=32", "--batch-size", "64", "--microbatches", "16")
CLUSTERS = {
    "80/40/20/20%": [0.8, 0.4, 0.2, 0.2],
    "16 nodes of 10%": [0.1] * 16,
}


def duration() -> Iterator[dict[str, Any]]:
    """Seconds of whole commands, microbatches of four samples."""
    for name, cpus in CLUSTERS.items():
        nodes = "".join(
            f"  - {{name: n{number}, cpus: {share}, memory_gib: 1.2, rate_mbit: 100}}\n"
            for number, share in enumerate(cpus, 1)
        )
        with lab(f"nodes:\n{nodes}") as bench:
            begun = time.monotonic()
            profile = bench.skyctl("probe", *BERT)
            yield {
                "benchmark": "probing",
                "section": "duration",
                "cluster": name,
                "wall_s": round(time.monotonic() - begun, 1),
                "profiled": len(profile["devices"]),
                "links": len(profile["links"]),
            }


def local(count: int = 64) -> Iterator[dict[str, Any]]:
    """All of them on this machine, a thread each: seconds, and how far available memory fell."""
    with tempfile.TemporaryDirectory(prefix="skyctl-bench-") as name:
        folder = Path(name)
        nodes = "".join(f"  - {{name: w{n:02d}, transport: local, threads: 1}}\n" for n in range(count))
        (folder / "cluster.yaml").write_text(f"name: local\nnodes:\n{nodes}")
        env = {**os.environ, "SKYCTL_HOME": str(folder / "state")}
        command = [sys.executable, "-m", "skyctl", "probe", *SMALL, "--json"]
        begun = time.monotonic()
        with Lowest() as memory:
            done = subprocess.run(
                command, env=env, cwd=folder, stdout=subprocess.PIPE, text=True, check=False
            )
        yield {
            "benchmark": "probing",
            "section": "local",
            "nodes": count,
            "exit_code": done.returncode,
            "wall_s": round(time.monotonic() - begun, 1),
            "profiled": done.stdout.count('"flops_per_s"'),
            "available_gib": round(memory.first / 2**30, 1),
            "fell_gib": round((memory.first - memory.lowest) / 2**30, 1),
        }


class Lowest:
    """Looks at the machine's available memory every quarter of a second."""

    def __init__(self) -> None:
        self.first = self.lowest = available_bytes()
        self._over = threading.Event()
        self._watch = threading.Thread(target=self._look, daemon=True)

    def _look(self) -> None:
        while not self._over.wait(0.25):
            self.lowest = min(self.lowest, available_bytes())

    def __enter__(self) -> Lowest:
        self._watch.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._watch.join()


def available_bytes() -> int:
    """MemAvailable of this machine."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
