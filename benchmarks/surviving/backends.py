"""Three nodes to strike, of this machine's own processes or of a lab over real SSH, and a plan for them.

Each node's disk is a small one of its own (local nodes share one), and its Python's clock can be set
(``tests/lab/clocks.py``).
"""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from surviving import lab

forms = lab.of_tests("helpers.forms")
FORMS: dict[str, Any] = forms.FORMS
NODES: tuple[str, ...] = forms.NODES
SLEEP_S = 0.012
DISK = "48m"
SPEC = {"nodes": [{"name": name, "cpus": 0.6, "memory_gib": 2, "rate_mbit": 200} for name in NODES]}
LOCAL = "\n".join(
    ["name: here", "nodes:"]
    + [f"  - {{name: {name}, transport: local, threads: 1, memory_gib: 2}}" for name in NODES]
)


class Backend:
    """Three nodes with a plan.

    Attributes:
        name: ``local`` or ``lab``.
        form: the plan's.
        cluster: the tests' way to run skyctl there; its ``lab`` is None for local nodes.
        disks: by node, the folder whose disk can be filled.
        clocks: by node, the file that says by how many seconds its clock is ahead.
        folder: of all files; nothing of a run may be left in it but runs' folders.
    """

    def __init__(self, name: str, cluster: Any, folder: Path) -> None:
        self.name, self.cluster, self.folder = name, cluster, folder
        self.form = FORMS["pipeline"]
        self.disks: dict[str, Path] = {}
        self.clocks: dict[str, Path] = {}
        self.losses: list[float] = []

    @property
    def lab(self) -> Any:
        """The lab's state, None for local nodes."""
        return self.cluster.lab

    def left(self) -> dict[str, Any]:
        """The remains of runs on nodes and here, once what is ending has had a moment."""
        found: dict[str, Any] = self.cluster.settled()
        return found


@contextmanager
def backend(name: str, form: str = "pipeline") -> Iterator[Backend]:
    """Taken down whatever happens, and nothing of it may be left.

    Args:
        name: ``local`` or ``lab``.
        form: its plan's, one of ``FORMS``.
    """
    with tempfile.TemporaryDirectory(prefix="skyctl-chaos-") as folder, ExitStack() as stack:
        made = stack.enter_context((_lab if name == "lab" else _local)(Path(folder)))
        made.form = FORMS[form]
        file = made.cluster.plan(*made.form.plan)
        made.form.finish(file)
        yield made


@contextmanager
def _local(folder: Path) -> Iterator[Backend]:
    work, site, disk = (folder / name for name in ("work", "site", "disk"))
    for one in (work, site, disk, folder / "tmp"):
        one.mkdir()
    clock = folder / "clock-shift"
    (site / "sitecustomize.py").write_text(lab.of_tests("lab.clocks").shift_from_file())
    (work / "cluster.yaml").write_text(f"{LOCAL}\n")
    with _mounted(disk):
        cluster = _local_cluster(work, folder / "state", disk)
        cluster.env |= {
            "XDG_CACHE_HOME": str(disk),
            "TMPDIR": str(folder / "tmp"),
            "CHAOS_CLOCK": str(clock),
            "PYTHONPATH": os.pathsep.join(filter(None, [str(site), os.environ.get("PYTHONPATH")])),
        }
        made = Backend("local", cluster, folder)
        made.disks, made.clocks = dict.fromkeys(NODES, disk), dict.fromkeys(NODES, clock)
        try:
            yield made
        finally:
            cluster.end()


def _local_cluster(work: Path, state: Path, cache: Path) -> Any:
    clusters, harm = lab.of_tests("lab.clusters"), lab.harm()

    class LocalCluster(clusters.Cluster):  # type: ignore[name-defined, misc]
        """The same as a lab's, of this machine's processes."""

        def __init__(self) -> None:
            super(clusters.Cluster, self).__init__(work, state, work / "cluster.yaml")
            self.lab, self.layers, self.nodes = None, forms.LAYERS, list(NODES)
            (work / "train.py").write_text(lab.of_tests("lab.workload").train_py(SLEEP_S, forms.LAYERS))

        def left(self, *_nodes: str, checkpoints: bool = True) -> dict[str, list[str]]:
            found = harm.leavings_in_cache(cache / "skyctl", checkpoints=checkpoints)
            found |= lab.of_tests("helpers.processes").files(work.parent / "tmp", "skyctl*")
            return {"files": sorted(map(str, found))} if found else {}

        def end(self) -> None:
            super(clusters.Cluster, self).end()
            for pid in lab.of_tests("helpers.processes").of_state(self.state):
                harm.kill(pid)

    return LocalCluster()


@contextmanager
def _lab(folder: Path) -> Iterator[Backend]:
    with lab.lab_of(SPEC, "chaos", str(folder), _mounted_homes) as state:
        cluster = lab.of_tests("lab.clusters").Cluster(state, folder, sleep_s=SLEEP_S, layers=forms.LAYERS)
        made = Backend("lab", cluster, folder)
        made.disks = {name: cluster.home(name) for name in NODES}
        made.clocks = {name: home / "clock-shift" for name, home in made.disks.items()}
        for home in made.disks.values():
            _make_clocked_python(home / "clocked")
        clocked = {name: {"python": "~/clocked/bin/python"} for name in NODES}
        cluster.env["SKYCTL_CLUSTER"] = str(cluster.changed("clocked", **clocked))
        try:
            yield made
        finally:
            cluster.end()


def _make_clocked_python(folder: Path) -> None:
    python = lab.of_tests("lab.torch_only_venv").make_torch_only_venv(folder)
    packages = next(python.parents[1].glob("lib/python3*/site-packages"))
    (packages / "sitecustomize.py").write_text(lab.of_tests("lab.clocks").shift_from_file())


@contextmanager
def _mounted_homes(nodes: Path) -> Iterator[None]:
    """A small disk for each node's HOME."""
    with ExitStack() as mounts:
        for name in NODES:
            (nodes / name / "home").mkdir(parents=True, mode=0o700)
            mounts.enter_context(_mounted(nodes / name / "home"))
        yield


@contextmanager
def _mounted(folder: Path) -> Iterator[None]:
    """A small disk of its own."""
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={DISK},mode=700", "chaos", str(folder)], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)
