"""A lab that is up for a while, and skyctl's commands in it, as a user types them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.lab import fault_injection

from skyctl.lab.lab_state import LabState

MEASURING_S = 12.0
"""About so long before all layers are measured, nodes are at it: their first lines may be left out."""


@dataclass(frozen=True)
class Lines:
    """A command's lines of progress: (``time.monotonic``, text)."""

    lines: list[tuple[float, str]]

    def last(self, *texts: str) -> float:
        """When the last line with the first of these texts that any line has came."""
        for text in texts:
            found = [at for at, line in self.lines if text in line]
            if found:
                return found[-1]
        raise SystemExit(f"no line of progress with any of {texts}")

    @property
    def probed(self) -> tuple[float, float]:
        """Of a probe: the time in which its layers are measured, about."""
        end = self.last(": measured (", ": messages", "links: ")
        return end - MEASURING_S, end

    def ran(self, steps_s: float) -> tuple[float, float]:
        """Of a launch: so long before its last step's end."""
        end = self.last(": step ")
        return end - steps_s, end


@dataclass(frozen=True)
class Bench:
    """A folder of its own, and the environment in which commands find the lab's cluster."""

    folder: Path
    env: dict[str, str]

    def skyctl(self, *arguments: object, ok: tuple[int, ...] = (0,)) -> Any:
        """Runs one command with --json and gives its document."""
        return self.timed(*arguments, ok=ok)[0]

    def timed(self, *arguments: object, ok: tuple[int, ...] = (0,)) -> tuple[Any, Lines]:
        """The same, and when each line of progress came."""
        command = [sys.executable, "-m", "skyctl", *map(str, arguments), "--json"]
        with (
            tempfile.TemporaryFile("w+") as out,
            subprocess.Popen(command, env=self.env, stdout=out, stderr=subprocess.PIPE, text=True) as process,
        ):
            assert process.stderr is not None
            lines = []
            for line in process.stderr:
                lines.append((time.monotonic(), line.rstrip()))
                print(line, end="", file=sys.stderr)
            code = process.wait()
            out.seek(0)
            document = out.read()
        if code not in ok:
            raise SystemExit(f"{' '.join(command)} ended with {code}\n{document}")
        return json.loads(document), Lines(lines)

    def lab_state(self) -> LabState:
        """The lab as it was made: its nodes and their addresses."""
        return LabState.model_validate(json.loads(next(self.folder.rglob("lab.json")).read_text()))

    def start_in(self, node: str, argv: list[str]) -> subprocess.Popen[bytes]:
        """A command in that node of the lab, under its quota, once it has said its first line."""
        process = subprocess.Popen(
            fault_injection.command_in_node(self.lab_state(), node, argv),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert process.stdout is not None
        process.stdout.readline()
        return process


@contextmanager
def local_nodes(text: str) -> Iterator[Bench]:
    """A cluster of this machine's own processes, as that cluster.yaml has it."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    with tempfile.TemporaryDirectory(prefix="skyctl-bench-") as name:
        folder = Path(name)
        cluster = folder / "cluster.yaml"
        cluster.write_text(text)
        env = {**os.environ, "SKYCTL_HOME": str(folder / "state"), "SKYCTL_CLUSTER": str(cluster)}
        yield Bench(folder, env)


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
