"""Labs for tests: made by a factory, taken down whatever happens, and nothing may be left of one.

A test that uses ``lab`` or ``shared_lab`` is marked ``lab``: without root it is left out and says so; with
``SKYCTL_REQUIRE_LAB=1`` it fails instead. Labs live side by side: each is named by its state folder, and
every test process has one of its own; a test that measures times or rates is marked ``alone`` as well.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from tests.lab import traffic as traffic_module
from tests.lab.clusters import Cluster

from skyctl.errors import SkyctlError
from skyctl.lab import prerequisites
from skyctl.lab.lab_setup import up
from skyctl.lab.lab_spec import LabSpec
from skyctl.lab.lab_state import LabState
from skyctl.lab.teardown import down, leftovers

Factory = Callable[..., LabState]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        fixtures = getattr(item, "fixturenames", ())
        if here in item.path.parents and {"lab", "shared_lab"} & set(fixtures):
            item.add_marker(pytest.mark.lab)


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("lab") is None:
        return
    try:
        prerequisites.check_machine()
    except SkyctlError as exc:
        if os.environ.get("SKYCTL_REQUIRE_LAB") == "1":
            pytest.fail(f"SKYCTL_REQUIRE_LAB=1, and no lab can be made here: {exc}", pytrace=False)
        pytest.skip(f"lab tests are left out: {exc.message}")


def _labs() -> Iterator[Factory]:
    names: list[str] = []

    def make(spec: LabSpec | dict, **options: object) -> LabState:
        """``lab({"nodes": [{"name": "n1", "cpus": 0.5}]}, carrier="user")``; options are those of ``up``."""
        name = str(options.pop("name", f"t{len(names)}"))
        names.append(name)
        return up(LabSpec.model_validate(spec) if isinstance(spec, dict) else spec, name=name, **options)

    try:
        yield make
    finally:
        for name in names:
            down(name)
    left = {name: leftovers(name) for name in names if leftovers(name)}
    assert not left, f"left of the lab: {left}"


@pytest.fixture
def lab() -> Iterator[Factory]:
    """Makes labs for one test."""
    yield from _labs()


@pytest.fixture(scope="module")
def shared_lab() -> Iterator[Factory]:
    """Makes labs for all tests of one file (bring-up takes about half a second)."""
    yield from _labs()


@pytest.fixture(scope="module")
def planned_cluster(
    shared_lab: Factory, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[..., Cluster]]:
    """Makes clusters of labs, with a plan each: ``planned_cluster(SPEC, NAME, **options of Cluster)``."""
    clusters: list[Cluster] = []

    def make(spec: dict[str, Any], name: str, **options: Any) -> Cluster:
        cluster = Cluster(shared_lab(spec, name=name), tmp_path_factory.mktemp(name), **options)
        clusters.append(cluster)
        cluster.plan()
        return cluster

    try:
        yield make
    finally:
        for cluster in clusters:
            cluster.end()


@pytest.fixture
def ssh() -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs a command in a node through the system's own ssh client and the lab's ssh_config."""

    def run(
        state: LabState, node: str, command: str, timeout_s: float = 60
    ) -> subprocess.CompletedProcess[str]:
        argv = [
            "ssh",
            "-F",
            str(state.ssh_config),
            "-o",
            "BatchMode=yes",
            "-o",
            "ConnectTimeout=20",
            node,
            command,
        ]
        return subprocess.run(
            argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=timeout_s, check=False
        )

    return run


@pytest.fixture(scope="session")
def traffic() -> ModuleType:
    """``traffic.py`` of this folder: measures links and burns CPU time inside nodes."""
    return traffic_module


@pytest.fixture
def skyctl() -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs the command line: ``skyctl("lab", "status")``."""

    def run(*words: str, timeout_s: float = 120) -> subprocess.CompletedProcess[str]:
        argv = [sys.executable, "-c", "from skyctl.cli.app import main; main()", *words]
        return subprocess.run(
            argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=timeout_s, check=False
        )

    return run
