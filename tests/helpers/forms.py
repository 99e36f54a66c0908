"""The forms of plans for three nodes, and on how many devices each loses what an undisturbed run loses."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from .hybrid_plans import summed_at

NODES = ("n1", "n2", "n3")
LAYERS = 6
SIZES = ("--batch-size", "8", "--microbatches", "4")
DATA = ("--parallel", "data", "--assign", "n1=2,n2=1,n3=1")


@dataclass(frozen=True)
class Form:
    """A form of plans.

    Attributes:
        plan: the options that ask ``skyctl plan`` for it.
        needs: from the first attempt on that has fewer devices, other losses than an undisturbed run's are
            right, so they have to be finite only; None: from the beginning.
        helper: the node of a helper that is to be the root of all sums. Among three nodes no planner gives a
            helper anything to do.
    """

    plan: tuple[str, ...]
    needs: int | None = 1
    helper: str | None = None

    def finish(self, file: Path) -> None:
        """Changes a plan file that was made with these options to what no options ask for."""
        if self.helper is not None:
            file.write_text(json.dumps(summed_at(json.loads(file.read_text()), f"{self.helper}/cpu:0")))


FORMS = {
    "pipeline": Form(("--parallel", "pipeline", "--assign", "n1=0:2,n2=2:4,n3=4:6")),
    "data": Form(DATA),
    "hybrid": Form(("--parallel", "hybrid")),
    # one device alone sums nothing, and has no delay
    "delay": Form((*DATA, "--sync-delay", "1", "--undelayed-steps", "2"), needs=2),
    # an owner that has lost its node leaves with its data
    "rounds": Form(("--local-steps", "1,2,3", "--owners", "all"), needs=3),
    # pushes arrive in any order
    "staleness": Form((*DATA, "--staleness", "2"), needs=None),
    "helper": Form(("--parallel", "data", "--assign", "n1=2,n2=2", "--helper", "n3"), helper="n3"),
}
