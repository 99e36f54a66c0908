"""A node of four leaves or comes back every few seconds: steps that survive it beside attempts.

Both runs have the same plan and the same nodes leave, over a lab's real SSH: all of a node's processes end,
sshd first, and it answers again after as long. Prints one JSON line. ``ratio``: steps a second of each, over
those of a run that nothing happens to, counted from the first node's loss. ``again``: steps that were done
again. Needs root; about six minutes.

    python benchmarks/elastic_attempts.py [--steps 150] [--every 10] [--seed 1]
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import threading
import time
from statistics import median
from typing import Any

from surviving import lab

SLEEP_S = 0.02
FORM = ("--parallel", "data", "--sync-format", "fixed32", "--sync", "ring", "--assign", "n1=1,n2=1,n3=1,n4=1")
FIRST_STEP = 20
"""After which the first node leaves."""


class Changes(threading.Thread):
    """A node at a time leaves and comes back, drawn by seed, until it is told to end."""

    def __init__(self, cluster: Any, every_s: float, seed: int) -> None:
        super().__init__(name="changes")
        self._cluster, self._every_s, self._draw = cluster, every_s, random.Random(seed)
        self._ended = threading.Event()
        self.left = 0

    def run(self) -> None:
        """Until ``end``; every node is there then."""
        while not self._ended.is_set():
            node = self._draw.choice(self._cluster.nodes)
            lab.harm().switch_off(self._cluster.lab, node)
            self.left += 1
            self._ended.wait(self._every_s)
            lab.harm().switch_on(self._cluster.lab, node)
            self._ended.wait(self._every_s)

    def end(self) -> None:
        """No node leaves any more."""
        self._ended.set()
        self.join()


def played(cluster: Any, given: argparse.Namespace, words: tuple[str, ...], calm_s: float) -> dict[str, Any]:
    """One run with changes, from the first of them to its end."""
    run = cluster.launch("--steps", str(given.steps), "--json", "--checkpoint-every", "10", *words).wait_for(
        FIRST_STEP
    )
    changes = Changes(cluster, given.every, given.seed)
    began = time.monotonic()
    changes.start()
    try:
        done = json.loads(run.end().stdout)
    finally:
        took_s = time.monotonic() - began
        changes.end()
    return {
        "left": changes.left,
        "attempts": done["attempts"],
        "again": sum(again["lost_steps"] for again in lab.restarts(run)),
        "ratio": round((given.steps - FIRST_STEP) * calm_s / took_s, 3),
        "losses": [step["loss"] for step in done["steps"]],
    }


def main() -> int:
    """Exit code 1 where losses are not those of a run that nothing happens to."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--every", type=float, default=10.0, help="seconds from one change to the next")
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    with lab.cluster(SLEEP_S, "changes") as cluster:
        cluster.plan(*FORM)
        calm = cluster.run_inside(
            "launch", "plan.json", "--steps", "60", "--json", "--checkpoint-every", "10"
        )
        steps = json.loads(calm.stdout)["steps"]
        calm_s = median(step["iteration_s"] for step in steps[10:])
        losses = cluster.losses(given.steps)
        rows = {
            name: played(cluster, given, words, calm_s)
            for name, words in (("elastic", ("--elastic",)), ("attempts", ()))
        }
    for row in rows.values():
        apart = [
            abs(ours - theirs) / abs(theirs) for ours, theirs in zip(row.pop("losses"), losses, strict=True)
        ]
        row["loss_differs"] = max(apart)
    print(json.dumps({"benchmark": "elastic_attempts", "steps": given.steps, "step_s": calm_s, **rows}))
    return int(any(row["loss_differs"] > 1e-5 for row in rows.values()))


if __name__ == "__main__":
    sys.exit(main())
