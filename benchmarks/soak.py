"""A long run in a lab that is struck again and again: does it end, and as if nothing had happened?

Prints one JSON line; what happens goes to standard error. Needs root. Ends by itself within 20 minutes.

    python benchmarks/soak.py [--kills 15] [--steps 600] [--seed 1]
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from typing import Any

from surviving import lab

LIMIT_S = 20 * 60
LAST_KILL_S = 15 * 60
"""After that nothing more is struck, so that the run can end in time."""
LAST_STEPS = 30
"""The same in steps."""
SETTLE_S = 2.0
"""What was under way when it was struck is written down by then."""
KINDS = ("rank", "agent", "black", "off", "ssh", "launcher")


class Soak:
    """A run, and one fault after the other."""

    def __init__(self, cluster: Any, run: Any, steps: int, chance: random.Random) -> None:
        self.harm = lab.harm()
        self.cluster = cluster
        self.run = run
        self.steps = steps
        self.chance = chance
        self.began = time.monotonic()
        self.kills: list[dict[str, Any]] = []

    def strike(self, kind: str) -> None:
        """One fault, and until the run has got further than ever."""
        where = self._node()
        fault: dict[str, Any] = {"kind": kind, "step": self._reached()}
        if kind not in ("ssh", "launcher"):
            fault["node"] = where
        began = time.monotonic()
        getattr(self, f"_{kind}")(where)
        self._say(fault)
        time.sleep(SETTLE_S)
        reached = self._reached()
        self._until(reached + 1)
        self.kills.append({**fault, "s": round(time.monotonic() - began, 1)})
        self._say({"step": self._reached(), "s": self.kills[-1]["s"]})
        self._until(reached + self.chance.randint(8, 25))

    def ending(self) -> bool:
        """Whether too few steps are left for one more fault."""
        return self._reached() > self.steps - LAST_STEPS

    def _until(self, step: int) -> None:
        """Until it has got that far, or as far as it goes."""
        self.run.until(lambda: self._reached() >= min(step, self.steps))

    def _reached(self) -> int:
        """Steps that were done at some time."""
        return int(max(step["step"] for step in self.run.steps)) + 1

    def _node(self) -> str:
        """One that computes."""
        used: list[str] = []
        while not used:
            used = [name for name in self.cluster.nodes if self.harm.ranks(self.cluster.lab, name)]
        return self.chance.choice(used)

    def alone(self) -> bool:
        """Whether one node only computes: it is then spared."""
        return sum(bool(self.harm.ranks(self.cluster.lab, name)) for name in self.cluster.nodes) < 2

    def _rank(self, node: str) -> None:
        for pid in self.harm.ranks(self.cluster.lab, node):
            self.harm.kill(pid)

    def _agent(self, node: str) -> None:
        self.harm.kill(self.harm.agent(self.cluster.lab, node))

    def _black(self, node: str) -> None:
        with self.harm.black(self.cluster.lab, node):
            time.sleep(self.chance.uniform(5, 60))

    def _off(self, node: str) -> None:
        self.harm.switch_off(self.cluster.lab, node)
        time.sleep(self.chance.uniform(2, 30))
        self.harm.switch_on(self.cluster.lab, node)

    def _ssh(self, _node: str) -> None:
        for node in self.cluster.nodes:
            for pid in self.harm.connections(self.cluster.lab, node):
                self.harm.kill(pid)

    def _launcher(self, _node: str) -> None:
        self.run.child.kill()
        time.sleep(self.chance.uniform(0, 10))
        self.run.attach()

    def _say(self, what: dict[str, Any]) -> None:
        print(f"{time.monotonic() - self.began:7.1f} s  {what}", file=sys.stderr, flush=True)


def soak(kills: int, steps: int, seed: int) -> dict[str, Any]:
    """The whole of it; figures."""
    chance = random.Random(seed)
    began = time.monotonic()
    with lab.cluster(0.01, "soak") as cluster:
        losses = cluster.losses(steps)
        words = ("--steps", str(steps), "--json", "--checkpoint-every", "10", "--max-restarts", "50")
        run = cluster.launch(*words)
        soaked = Soak(cluster, run.wait_for(12), steps, chance)
        kinds = [KINDS[i % len(KINDS)] for i in range(kills)]
        chance.shuffle(kinds)
        for kind in kinds:
            if time.monotonic() - began > LAST_KILL_S or soaked.ending():
                break
            soaked.strike("rank" if soaked.alone() and kind in ("agent", "black", "off") else kind)
        done = json.loads(run.end(0, LIMIT_S - (time.monotonic() - began)).stdout)
        again = lab.restarts(run)
        cluster.run("checkpoint", "rm", run.folder.name)  # what a lost node still had
        return {
            "benchmark": "soak",
            "seed": seed,
            "steps": len(done["steps"]),
            "kills": len(soaked.kills),
            "attempts": done["attempts"],
            "planned_attempts": sum(one["planned"] for one in again),
            "lost_steps": sum(one["lost_steps"] for one in again),
            "most_lost_steps": max((one["lost_steps"] for one in again), default=0),
            "loss_differs": lab.differs(done["steps"], losses),
            "left": cluster.settled(),
            "wall_s": round(time.monotonic() - began),
            "what": soaked.kills,
        }


def main() -> int:
    """Exit code 1 where the losses differ, steps are missing, or something was left."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--kills", type=int, default=15)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    figures = soak(given.kills, given.steps, given.seed)
    print(json.dumps(figures), flush=True)
    return int(figures["loss_differs"] > 1e-5 or bool(figures["left"]))


if __name__ == "__main__":
    sys.exit(main())
