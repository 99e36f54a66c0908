"""A user's DDP script on nodes with 80/40/20/20% of a core: equal shares beside ``skyctl run --balance``.

Both in one lab, over real SSH, in turns. Prints one JSON line: seconds of a step (medians), their ratio (2.0
is the limit: 160% of a core in place of four times 20%), the shares that were found, the best ones by the
measured times, and how far the weights are from those of one process with the whole batch.

    sudo .venv/bin/python benchmarks/script_shares.py      # about 4 minutes
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from statistics import median
from typing import Any

from runs.labs import Bench, lab

LAB = """\
nodes:
  - {name: n1, cpus: 0.8, memory_gib: 3}
  - {name: n2, cpus: 0.4, memory_gib: 3}
  - {name: n3, cpus: 0.2, memory_gib: 3}
  - {name: n4, cpus: 0.2, memory_gib: 3}
"""
SCRIPT = Path(__file__).parent / "runs" / "conv_shares.py"
BATCH, NODES = 64, 4
SHARES = re.compile(r"shares (n1 .*?): ")


def played(bench: Bench, *words: object) -> tuple[dict[str, Any], str]:
    """The JSON object that rank 0 printed, and all that skyctl said."""
    command = [sys.executable, "-m", "skyctl", "run", "--env", "OMP_NUM_THREADS=1", *map(str, words)]
    done = subprocess.run(
        command, cwd=bench.folder, env=bench.env, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(done.stderr)
    said = [line.partition("] ")[2] for line in done.stdout.splitlines() if line.startswith("[0 ")]
    found: dict[str, Any] = json.loads(next(line for line in reversed(said) if line.startswith("{")))
    return found, done.stderr


def main() -> None:
    """Brings the lab up, measures, takes it down again."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--turns", type=int, default=2)
    given = parser.parse_args()
    with lab(LAB) as bench:
        shutil.copy(SCRIPT, bench.folder / SCRIPT.name)
        runs: dict[str, list[dict[str, Any]]] = {"equal": [], "balanced": []}
        told = ""
        for _ in range(given.turns):
            runs["equal"].append(played(bench, SCRIPT.name, BATCH // NODES, given.steps)[0])
            found, told = played(bench, "--balance", 5, SCRIPT.name, f"{{share:{BATCH}}}", given.steps)
            runs["balanced"].append(found)
        env = {**os.environ, "OMP_NUM_THREADS": "1"}
        words = [sys.executable, str(SCRIPT), str(BATCH), str(given.steps)]
        whole = json.loads(subprocess.run(words, env=env, capture_output=True, text=True, check=True).stdout)
    steps_s = {name: median(s for run in of for s in run["steps_s"][2:]) for name, of in runs.items()}
    apart = {
        name: max(
            abs(one - other) / abs(other)
            for run in of
            for one, other in zip(run["weights"], whole["weights"], strict=True)
        )
        for name, of in runs.items()
    }
    shares = SHARES.search(told)
    print(
        json.dumps(
            {
                "benchmark": "script_shares",
                "step_s": {name: round(value, 4) for name, value in steps_s.items()},
                "ratio": round(steps_s["equal"] / steps_s["balanced"], 3),
                "shares": shares and shares.group(1),
                "weights_relatively_apart": apart,
            }
        )
    )


if __name__ == "__main__":
    main()
