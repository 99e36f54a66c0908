"""A lab, and skyctl run on it as a user runs it; nothing of it may be left on any node."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml

from skyctl.lab.lab_state import LabState

from ..helpers import runs
from ..helpers.commands import Skyctl
from ..helpers.processes import after_a_moment, files
from ..helpers.runs import Run
from . import harm
from .workload import LAYERS, train_py

SIZES = ("--batch-size", "8", "--microbatches", "4")
FOUR_NODES = {
    "nodes": [
        {"name": "n1", "cpus": 0.8, "memory_gib": 3, "rate_mbit": 200, "site": "a"},
        {"name": "n2", "cpus": 0.4, "memory_gib": 3, "rate_mbit": 200, "site": "a"},
        {"name": "n3", "cpus": 0.2, "memory_gib": 3, "rate_mbit": 100, "site": "b"},
        {"name": "n4", "cpus": 0.2, "memory_gib": 3, "rate_mbit": 100, "site": "b"},
    ],
    "sites": {"latency_ms": 5},
}
"""A lab.yaml of four unequal nodes at two sites."""


class Cluster(Skyctl):
    """A lab with a ``train.py`` (``workload.py``) of layers that sleep ``sleep_s`` each."""

    def __init__(
        self, lab: LabState, folder: Path, *, sleep_s: float = 0.004, layers: int = LAYERS, width: int = 16
    ) -> None:
        super().__init__(folder, folder / "state", lab.cluster)
        self.lab = lab
        self.layers = layers
        self.nodes = [node.name for node in lab.nodes]
        (folder / "train.py").write_text(train_py(sleep_s, layers, width))

    def plan(self, *form: str) -> Path:
        """Probes, and plans for all nodes.

        Args:
            form: what ``plan`` is asked for; left out: a pipeline with as many layers for each node, and what
                is over for the last.
        """
        count = len(self.nodes)
        cuts = [self.layers // count * i for i in range(count)] + [self.layers]
        assigned = ",".join(f"{n}={cuts[i]}:{cuts[i + 1]}" for i, n in enumerate(self.nodes))
        form = form or ("--parallel", "pipeline", "--assign", assigned)
        self.probe_briefly("train.py", *SIZES, "--links", "none")
        self.run_inside("plan", "train.py", *SIZES, *form, "-o", "plan.json")
        return self.folder / "plan.json"

    def launch(self, *words: str, terminal: bool = False, **env: str) -> Run:
        """``skyctl launch plan.json`` with these words; given back as soon as its folder is there."""
        return runs.launch(self, "plan.json", *words, terminal=terminal, **env)

    def losses(self, steps: int, *words: str) -> list[float]:
        """Of a run that nothing happens to, and that writes no checkpoints."""
        calm = ("--steps", str(steps), "--json", "--checkpoint-every", "0")
        return runs.losses_of(self.run_inside("launch", "plan.json", *calm, *words))

    def changed(self, name: str, **nodes: dict[str, Any]) -> Path:
        """Another cluster.yaml of the same lab: ``changed("odd", n2={"python": "~/bin/python"})``."""
        text = yaml.safe_load(self.lab.cluster.read_text())
        text["nodes"] = [node | nodes.get(node["name"], {}) for node in text["nodes"]]
        folder = self.folder / name
        folder.mkdir()
        (folder / "cluster.yaml").write_text(yaml.safe_dump(text))
        (folder / "known_hosts").write_text(self.lab.known_hosts.read_text())
        return folder / "cluster.yaml"

    def home(self, node: str) -> Path:
        """That node's HOME, from out here."""
        return self.lab.node_folder(node) / "home"

    def at_home(self, node: str, name: str, text: str) -> None:
        """A file in that node's HOME, there whole or not at all."""
        hidden = self.home(node) / f".new.{name}"
        hidden.write_text(text)
        hidden.replace(self.home(node) / name)

    def copies(self, run: Run) -> dict[int, dict[int, list[str]]]:
        """Whole files of its checkpoints on all nodes, lost ones too: step → layer → nodes."""
        copies: dict[int, dict[int, list[str]]] = {}
        for node in self.nodes:
            folder = self.home(node) / ".cache" / "skyctl" / "runs"
            for file in files(folder, f"{run.id}@*/step-*/layer-*.safetensors"):
                step, layer = (int(name.partition("-")[2]) for name in (file.parent.name, file.stem))
                copies.setdefault(step, {}).setdefault(layer, []).append(node)
        return copies

    def whole_without(self, run: Run, node: str) -> list[int]:
        """The steps that the run can go on from should that node be lost now."""
        layers = json.loads((self.folder / "plan.json").read_text())["problem"]["layers"]
        return [
            step
            for step, copies in self.copies(run).items()
            if all(set(copies.get(layer, ())) - {node} for layer in range(len(layers)))
        ]

    def left(self, *nodes: str, checkpoints: bool = True) -> dict[str, list[str]]:
        """The leavings of runs on those nodes (none: all), now: processes and files (``harm.leavings``)."""
        leavings = {}
        for node in nodes or self.nodes:
            there = [f"{pid} {text}" for pid, text in harm.strays(self.lab, node).items()]
            there += harm.leavings(self.lab, node, checkpoints=checkpoints)
            if there:
                leavings[node] = there
        return leavings

    def settled(self, *nodes: str, checkpoints: bool = True) -> dict[str, list[str]]:
        """The same and, as ``here``, what is left on this machine, once what is ending has had a moment."""

        def left() -> dict[str, list[str]]:
            leavings = self.left(*nodes, checkpoints=checkpoints)
            here = runs.left_behind(self)
            return leavings | {"here": here} if here else leavings

        leavings: dict[str, list[str]] = after_a_moment(left)
        return leavings

    def end(self) -> None:
        """For tests that failed half-way: nothing goes on here or there."""
        super().end()
        for node in self.nodes:
            for pid in harm.strays(self.lab, node):
                harm.kill(pid)
            for file in ("fault", "habits"):
                (self.home(node) / file).unlink(missing_ok=True)
