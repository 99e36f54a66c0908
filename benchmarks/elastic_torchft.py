"""``elastic.py``'s kills with torchft's DDP: four replica groups of one rank each over Gloo, one is killed.

The model and batch are the same; shares are equal. Prints one JSON line. ``pause_s``: by run, the longest
time in which the others have not all committed a step, from the kill on. ``redone``: how often a
survivor's step was not committed and was made again. ``seconds``: of all steps, ``calm``: without a kill.
``ended``: well, or which rank failed, with the last error it told of. Times of lighthouse and manager are
torchft's defaults, but for the 10 s of stragglers that its README has.

    python3.11 -m venv build/torchft
    build/torchft/bin/pip install torch==2.13.0 torchft==0.2.0 numpy
    python benchmarks/elastic_torchft.py [RUNS] --environment build/torchft
"""

from __future__ import annotations

import argparse
import json
import os
import random
import socket
import subprocess
import tempfile
import threading
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from elastic import BATCH, MODEL, STRIKE_STEP, longest_pause

HERE = Path(__file__).resolve().parent
RANKS, STEPS, WITHIN_S = 4, 60, 240.0
JOIN_TIMEOUT_MS = 10_000


def main() -> None:
    """A calm run, and so many with a kill."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--environment", type=Path, metavar="DIR", help="a virtual environment that has torchft"
    )
    parser.add_argument("runs", nargs="?", type=int, default=3)
    options = parser.parse_args()
    row: dict[str, Any] = {"benchmark": "elastic torchft", "steps": STEPS}
    if options.environment is None:
        print(json.dumps(row | {"unavailable": "name an environment that has it with --environment"}))
        return
    calm = Run(options.environment, None, 0.0)
    row["calm"] = calm.figures()
    step_s = row["calm"]["seconds"] / STEPS
    runs = []
    for number in range(options.runs):
        draw = random.Random(number)
        runs.append(Run(options.environment, draw.randrange(RANKS), draw.random() * step_s).figures())
    row |= {name: [run[name] for run in runs] for name in (runs[0] if runs else {})}
    print(json.dumps(row))


class Run:
    """One run, played to its end.

    Args:
        victim: the rank that is killed; None: none is.
        delay_s: from the end of ``STRIKE_STEP`` to that.
    """

    def __init__(self, environment: Path, victim: int | None, delay_s: float) -> None:
        self._victim, self._delay_s = victim, delay_s
        self.struck_at = 0.0
        self._timer: threading.Timer | None = None
        self._ready, self._lock = 0, threading.Lock()
        self._said: dict[int, list[dict[str, Any]]] = {rank: [] for rank in range(RANKS)}
        self._children: list[subprocess.Popen[str]] = []
        self._errors = ""
        with ExitStack() as ends:
            self._stderr = [ends.enter_context(tempfile.TemporaryFile("w+")) for _ in self._said]
            lighthouse = self._open_lighthouse(environment, ends)
            for rank in range(RANKS):
                self._children.append(self._open_rank(environment, lighthouse, rank, ends))
            readers = [threading.Thread(target=self._read, args=(rank,), daemon=True) for rank in self._said]
            deadline = time.monotonic() + WITHIN_S
            for reader in readers:
                reader.start()
            for rank, reader in enumerate(readers):
                reader.join(max(0.0, deadline - time.monotonic()))
                if rank != victim and (reader.is_alive() or self._children[rank].wait()):
                    self._errors = f"rank {rank}: {self._last_words(rank)}"

    def _last_words(self, rank: int) -> str:
        """The last of what it said of errors."""
        self._stderr[rank].seek(0)
        lines = [line.strip() for line in self._stderr[rank]]
        told = [number for number, line in enumerate(lines) if line.split(":")[0].endswith("Error")]
        return " ".join(lines[max(0, told[-1] - 3) : told[-1] + 1])[-400:] if told else "it did not end"

    def figures(self) -> dict[str, Any]:
        """As the module says."""
        left = [said for rank, said in self._said.items() if rank != self._victim]
        committed = [{line["step"]: line["at"] for line in said if line["committed"]} for said in left]
        ends = {
            step: max(told[step] for told in committed)
            for step in range(STEPS)
            if all(step in told for told in committed)
        }
        return {
            "ended": self._errors or "well",
            "seconds": round(max(ends.values()) - min(ends.values()), 2) if ends else 0.0,
            "pause_s": round(longest_pause(at - self.struck_at for at in ends.values()), 3)
            if self.struck_at
            else None,
            "redone": max(sum(not line["committed"] for line in said) for said in left),
            "groups": sorted({line["groups"] for said in left for line in said[-5:]}),
        }

    def _open_lighthouse(self, environment: Path, ends: ExitStack) -> str:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        program = environment / "bin" / "torchft_lighthouse"
        words = ["--min_replicas", "1", "--join_timeout_ms", str(JOIN_TIMEOUT_MS)]
        child = subprocess.Popen(
            [program, "--bind", f"127.0.0.1:{port}", *words],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        ends.callback(child.wait)
        ends.callback(child.kill)
        return f"http://127.0.0.1:{port}"

    def _open_rank(
        self, environment: Path, lighthouse: str, rank: int, ends: ExitStack
    ) -> subprocess.Popen[str]:
        told = {"rank": rank, "ranks": RANKS, "lighthouse": lighthouse, "least": 1}
        told |= {"source": MODEL, "batch": BATCH, "steps": STEPS}
        child = subprocess.Popen(
            [environment / "bin" / "python", HERE / "runs" / "elastic_torchft_rank.py", json.dumps(told)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr[rank],
            text=True,
            env=os.environ
            | {"PYTHONPATH": str(HERE.parent / "src"), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
        )
        ends.callback(child.wait)
        ends.callback(child.kill)
        return child

    def _read(self, rank: int) -> None:
        stdout = self._children[rank].stdout
        assert stdout is not None
        for line in stdout:
            word, _, text = line.partition(" ")
            if word != "bench":
                continue
            said = json.loads(text)
            if "ready" in said:
                self._start_once_all_are()
                continue
            self._said[rank].append(said)
            if rank == self._victim and said.get("step") == STRIKE_STEP and self._timer is None:
                self._timer = threading.Timer(self._delay_s, self._strike)
                self._timer.start()

    def _start_once_all_are(self) -> None:
        with self._lock:
            self._ready += 1
            if self._ready < RANKS:
                return
        for child in self._children:
            assert child.stdin is not None
            child.stdin.write("go\n")
            child.stdin.flush()

    def _strike(self) -> None:
        assert self._victim is not None
        self.struck_at = time.monotonic()
        self._children[self._victim].kill()


if __name__ == "__main__":
    main()
