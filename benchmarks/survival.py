"""A node of four is lost in the middle of a run: how soon is it seen, what is lost, when does it go on?

Two ways to be lost: the link goes black without a word, and all of the node's processes end, sshd and agent
first. Prints one JSON line for each. Needs root; about four minutes.

    python benchmarks/survival.py [--only black] [--steps 100] [--at 60] [--every 10]
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from typing import Any

from surviving import lab

SLEEP_S = 0.025
LOST = "n3"
WAYS = ("black", "off")


def strike(cluster: Any, way: str) -> None:
    """The node is lost from here on."""
    if way == "black":
        lab.of_tests("lab.fault_injection").disconnect(cluster.lab, LOST)
    else:
        lab.harm().switch_off(cluster.lab, LOST)


def undo(cluster: Any, way: str) -> None:
    """It answers again."""
    if way == "black":
        lab.of_tests("lab.fault_injection").reconnect(cluster.lab, LOST)
    else:
        lab.harm().switch_on(cluster.lab, LOST)


def survive(cluster: Any, way: str, given: argparse.Namespace, losses: list[float]) -> dict[str, Any]:
    """One run; times count from the loss of the node, ``noticed_s`` to the first warning or the end of the
    attempt, ``given_up_s`` to the end of the attempt, ``next_step_s`` to a step of the next one."""
    words = ("--steps", str(given.steps), "--json", "--checkpoint-every", str(given.every))
    run = cluster.launch(*words).wait_for(given.at)
    lost_at = time.time()
    strike(cluster, way)
    copies = cluster.copies(run).get(given.at, {})
    try:
        done = json.loads(run.end().stdout)
    finally:
        undo(cluster, way)
    again = lab.restarts(run)
    given_up = lab.seconds(run.state["attempts"][0]["ended"])
    went_on = lab.said_at(run, "the next step came", lost_at)
    assert went_on is not None
    warned = lab.said_at(run, f"{LOST} has not been heard", lost_at)
    left = cluster.settled(*(name for name in cluster.nodes if name != LOST))
    return {
        "benchmark": "survival",
        "way": way,
        "nodes": len(cluster.lab.nodes),
        "steps": len(done["steps"]),
        "lost_at_step": given.at,
        "checkpoint_every": given.every,
        "attempts": done["attempts"],
        "why": again[0]["why"],
        "noticed_s": round(min(given_up, warned or given_up) - lost_at, 1),
        "given_up_s": round(given_up - lost_at, 1),
        "next_step_s": round(went_on - lost_at, 1),
        "lost_steps": again[0]["lost_steps"],
        "from_step": run.state["attempts"][1]["from_step"],
        "copies_of_newest": copies,
        "loss_differs": lab.differs(done["steps"], losses),
        "devices": sorted({replica["device"] for replica in done["replicas"]}),
        "left": left,
    }


def main() -> int:
    """Exit code 1 where a run did not come out as if nothing had happened."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", choices=WAYS)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--at", type=int, default=60, help="the node is lost after this step")
    parser.add_argument("--every", type=int, default=10, help="steps from one checkpoint to the next")
    given = parser.parse_args()
    worst = 0.0
    with lab.cluster(SLEEP_S, "survival") as cluster:
        losses = cluster.losses(given.steps)
        for way in [given.only] if given.only else WAYS:
            figures = survive(cluster, way, given, losses)
            print(json.dumps(figures), flush=True)
            worst = max(worst, figures["loss_differs"])
    return int(worst > 1e-5)


if __name__ == "__main__":
    sys.exit(main())
