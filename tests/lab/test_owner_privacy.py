"""The parts of an owner's data that show on the wire, by reading it: every byte between nodes and launcher
while owners make rounds. Each sample has a 32-byte marker; weights pass, so the test is known to see."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from skyctl.lab.lab_state import LabState

from . import clusters
from .test_privacy import BATCH, OUT, SIZES, SPEC, TRAIN, WIDTH, Cluster, Wire, as_bytes

MARKER_IDS = 4
OWNERS = ("n1", "n2", "n3")
LINEAR = "        self.linear = nn.Linear(WIDTH, WIDTH)\n"
OWNED = (
    TRAIN.replace("WIDTH, IDS, OUT = 64, 16, 8", f"WIDTH, IDS, OUT = {WIDTH}, {MARKER_IDS}, {OUT}")
    .replace("def data(batch_size, seed):", "def data(batch_size, seed, owner):")
    .replace(LINEAR, LINEAR + "        self.known = nn.Parameter(torch.ones(WIDTH) * 0.731)\n")
)
"""With a weight that nothing trains."""


class OwnersCluster(Cluster):
    """The lab, with data of its own on each node."""

    def __init__(self, lab: LabState, folder: Path) -> None:
        clusters.Cluster.__init__(self, lab, folder)
        (folder / "train.py").write_text(OWNED)
        generator = torch.Generator().manual_seed(os.getpid())
        self.markers = []
        for node in OWNERS:
            ids = torch.randint(-(2**62), 2**62, (BATCH, MARKER_IDS), generator=generator)
            values = torch.randn(BATCH, WIDTH, generator=generator)
            wanted = torch.randn(BATCH, OUT, generator=generator)
            classes = torch.randint(-(2**62), 2**62, (BATCH, 1), generator=generator)
            self._put(node, values=values, ids=ids, wanted=wanted, classes=classes)
            self.markers += [ids, values, wanted, classes]

    def prepare(self) -> None:
        """Probes, and plans with each node as an owner."""
        self.probe_briefly("train.py", *SIZES, "--links", "none")
        rounds = ("--local-steps", "2", "--owners", ",".join(OWNERS), "--prox-mu", "0.1")
        self.run_inside("plan", "train.py", *SIZES, *rounds, "-o", "plan.json")
        plan = json.loads((self.folder / "plan.json").read_text())
        assert plan["problem"]["owners"] == [[node] for node in OWNERS]

    def secrets(self) -> Iterator[bytes]:
        """Any four floats, or any one integer, as they lie in memory; integers as floats, too."""
        for tensor in self.markers:
            step = 16 if tensor.is_floating_point() else 8
            raw = as_bytes(tensor)
            yield from (raw[at : at + step] for at in range(0, len(raw), step))
            if not tensor.is_floating_point() and tensor.shape[1] == MARKER_IDS:
                floats = as_bytes(tensor.to(torch.float32))
                yield from (floats[at : at + 16] for at in range(0, len(floats), 16))


@pytest.fixture(scope="module")
def cluster(
    shared_lab: Callable[..., LabState], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[OwnersCluster]:
    cluster = OwnersCluster(shared_lab(SPEC, name="owners"), tmp_path_factory.mktemp("owners"))
    try:
        cluster.prepare()
        yield cluster
    finally:
        cluster.end()


@pytest.mark.slow
def test_weights_pass_and_data_do_not(cluster: OwnersCluster) -> None:
    wire: Wire = cluster.train("rounds", "--checkpoint-every", "1")
    weights = as_bytes(torch.ones(WIDTH) * 0.731 * float(2 * BATCH))
    assert wire.holds(weights[:64]), "the weight that nothing trains passes, times a round's samples"
    assert [pattern for pattern in cluster.secrets() if wire.holds(pattern)] == []
