"""A lab that is up for a while, and skyctl's commands in it, as a user types them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Bench:
    """A folder of its own, and the environment in which commands find the lab's cluster."""

    folder: Path
    env: dict[str, str]

    def skyctl(self, *arguments: object, ok: tuple[int, ...] = (0,)) -> Any:
        """Runs one command with --json and gives its document."""
        command = [sys.executable, "-m", "skyctl", *map(str, arguments), "--json"]
        done = subprocess.run(command, env=self.env, stdout=subprocess.PIPE, text=True, check=False)
        if done.returncode not in ok:
            raise SystemExit(f"{' '.join(command)} ended with {done.returncode}\n{done.stdout}")
        return json.loads(done.stdout)


@contextmanager
def lab(text: str, core: int | None = None) -> Iterator[Bench]:
    """Brings the lab of that lab.yaml up, and takes it down again, on SIGTERM too.

    Args:
        core: the one processor that all its nodes are held to (they keep what the lab was started with).
    """
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    with tempfile.TemporaryDirectory(prefix="skyctl-bench-") as name:
        folder = Path(name)
        cluster = folder / "lab" / "cluster.yaml"
        env = {**os.environ, "SKYCTL_HOME": str(folder / "state"), "SKYCTL_CLUSTER": str(cluster)}
        bench = Bench(folder, env)
        file = folder / "lab.yaml"
        file.write_text(text)
        allowed = os.sched_getaffinity(0)
        os.sched_setaffinity(0, allowed if core is None else {core})
        try:
            bench.skyctl("lab", "up", file, "-o", folder / "lab", "--name", f"bench-{os.getpid()}")
        finally:
            os.sched_setaffinity(0, allowed)
        try:
            yield bench
        finally:
            bench.skyctl("lab", "down", file)
