"""Summing 4 MB (or more) between four processes of this machine: skyctl, Gloo and hivemind, one JSON line.

``skyctl``: the runtime's ``GradientSync`` over a ring of sockets, as a data plan's replicas sum gradients.
``gloo``: torch.distributed's ``all_reduce`` in the same processes. ``hivemind``: its averager, without
compression, in an environment of its own in the folder that ``--peers`` names, made there with pip; its
group has been found before the clock runs, so that only the averaging is timed. Each process has one thread.
All take turns in one run; a turn lasts from the instant at which all are told to begin until the last process
has the sum, which is checked.

    python benchmarks/averaging.py
    python benchmarks/averaging.py --numbers 2500000 --sync-format fixed32    # of skyctl's sum alone
    python benchmarks/averaging.py --peers build/peers      # some minutes more the first time
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from statistics import median, quantiles
from types import TracebackType
from typing import Any

HERE = Path(__file__).resolve().parent
PROCESSES = 4
NUMBERS = 1_000_000
TURNS = 15
WARM_UP = 2
LEAD_S = 0.15
"""From the word to the instant at which all begin."""
ANSWER_S = 90.0
HIVEMIND = "hivemind>=1.1,<1.2"
INSTALL_S = 1800.0


class PeerError(Exception):
    """A side can't be measured; the text says why."""


class Side:
    """Four processes of one program, which begin together when told to and say when each had the sum.

    Args:
        python: their interpreter.
        program: their script; takes rank, number of processes, count of floats, a port of this machine, and
            what skyctl's sum is sent as.
    """

    def __init__(self, python: str, program: Path, numbers: int, sync_format: str = "float32") -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        words = [str(PROCESSES), str(numbers), str(port), sync_format]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        self._children: list[subprocess.Popen[str]] = []
        self._answers: list[queue.SimpleQueue[str]] = []
        for rank in range(PROCESSES):
            child = subprocess.Popen(
                [python, str(program), str(rank), *words],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env=environment,
                start_new_session=True,
            )
            answers: queue.SimpleQueue[str] = queue.SimpleQueue()
            threading.Thread(target=_read_lines, args=(child, answers), daemon=True).start()
            self._children.append(child)
            self._answers.append(answers)

    def __enter__(self) -> Side:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        for child in self._children:
            if child.stdin is not None:
                child.stdin.close()
        for child in self._children:
            with suppress(subprocess.TimeoutExpired):
                child.wait(10.0)
            with suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)  # what it has started, too
            child.wait()

    def wait_until_ready(self) -> None:
        """Until every process is connected. Raises PeerError where one is not."""
        self._hear("ready")

    def turn(self, what: str) -> float:
        """Seconds of one sum by ``what``, until the last process had it."""
        self._tell(f"prepare {what}")
        self._hear("prepared")
        begin = time.monotonic() + LEAD_S
        self._tell(f"begin {begin!r}")
        return max(float(words[0]) for words in self._hear("done")) - begin

    def _tell(self, text: str) -> None:
        for child in self._children:
            assert child.stdin is not None
            try:
                child.stdin.write(f"{text}\n")
                child.stdin.flush()
            except OSError:  # it is gone; what it said last is heard next
                pass

    def _hear(self, word: str) -> list[list[str]]:
        found = []
        for rank, answers in enumerate(self._answers):
            try:
                said = answers.get(timeout=ANSWER_S).split(maxsplit=1)
            except queue.Empty:
                raise PeerError(f"process {rank} said nothing for {ANSWER_S:.0f} s") from None
            if not said or said[0] != word:
                raise PeerError(f"process {rank}: {' '.join(said)[-300:] or 'it ended'}")
            found.append(said[1].split() if len(said) > 1 else [])
        return found


def _read_lines(child: subprocess.Popen[str], answers: queue.SimpleQueue[str]) -> None:
    assert child.stdout is not None
    for line in child.stdout:
        if line.startswith("bench "):
            answers.put(line.removeprefix("bench ").strip())
    answers.put("")


def hivemind_python(folder: Path) -> str:
    """The interpreter of an environment with hivemind in that folder; made there where it is not yet.

    Raises:
        PeerError: it can't be made.
    """
    python = folder / "hivemind" / "bin" / "python"
    if not python.exists():
        _run([sys.executable, "-m", "venv", str(folder / "hivemind")])
    if subprocess.run([python, "-c", "import hivemind"], capture_output=True, check=False).returncode:
        import torch

        version = torch.__version__.partition("+")[0]
        _run([str(python), "-m", "pip", "install", "--prefer-binary", f"torch=={version}", HIVEMIND])
        _run([str(python), "-c", "import hivemind"])
    return str(python)


def _run(argv: Sequence[str]) -> None:
    try:
        done = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=INSTALL_S)
    except (OSError, subprocess.TimeoutExpired) as exc:
        raise PeerError(str(exc)) from exc
    if done.returncode:
        lines = [line for line in (done.stderr or done.stdout).splitlines() if line.strip()]
        raise PeerError(f"`{' '.join(argv[1:])}` failed: {' '.join(lines[-3:])[-500:]}")


def figures(seconds: Sequence[float]) -> dict[str, Any]:
    """Median, p10 and p90 of the turns, and the fastest."""
    tenths = quantiles(seconds, n=10)
    rounded = {"median_s": median(seconds), "p10_s": tenths[0], "p90_s": tenths[-1], "least_s": min(seconds)}
    return {name: float(f"{value:.4g}") for name, value in rounded.items()} | {"turns": len(seconds)}


def measure(peers: Path | None, turns: int, numbers: int, sync_format: str) -> dict[str, Any]:
    """Every side's figures, or why it has none."""
    found: dict[str, Any] = {}
    sides: dict[str, Side] = {}
    with ExitStack() as stack:
        own = stack.enter_context(
            Side(sys.executable, HERE / "runs" / "averaging_rank.py", numbers, sync_format)
        )
        own.wait_until_ready()
        sides |= {"skyctl": own, "gloo": own}
        try:
            if peers is None:
                raise PeerError("not asked for (--peers DIR)")
            python = hivemind_python(peers.resolve())
            other = stack.enter_context(Side(python, HERE / "runs" / "averaging_hivemind.py", numbers))
            other.wait_until_ready()
            sides["hivemind"] = other
        except PeerError as exc:
            found["hivemind"] = {"unavailable": str(exc)}
        seconds: dict[str, list[float]] = {name: [] for name in sides}
        for number in range(WARM_UP + turns):
            for name in list(sides):
                try:
                    took_s = sides[name].turn(name)
                except PeerError as exc:
                    if name != "hivemind":
                        raise
                    found[name] = {"unavailable": str(exc)}
                    del sides[name]
                    continue
                if number >= WARM_UP:
                    seconds[name].append(took_s)
    return {name: figures(seconds[name]) for name in sides} | found


def main() -> int:
    """Prints one JSON line; exit code 1 where skyctl or Gloo could not be measured."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--peers", type=Path, metavar="DIR", help="also hivemind, in an environment in DIR")
    parser.add_argument("--turns", type=int, default=TURNS, metavar="N")
    parser.add_argument("--numbers", type=int, default=NUMBERS, metavar="N", help="floats to be summed")
    parser.add_argument(
        "--sync-format", choices=("float32", "fixed32", "bfloat16", "int8"), default="float32"
    )
    given = parser.parse_args()
    row: dict[str, Any] = {
        "benchmark": "averaging",
        "processes": PROCESSES,
        "bytes": 4 * given.numbers,
        "sync_format": given.sync_format,
        "cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
    }
    try:
        row |= measure(given.peers, max(2, given.turns), given.numbers, given.sync_format)
    except PeerError as exc:
        print(f"averaging: {exc}", file=sys.stderr)
        return 1
    print(json.dumps(row), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
