"""The setups that are refused before a node is asked anything."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.learning.profiles import nodes

from skyctl.errors import SkyctlError
from skyctl.files import home
from skyctl.jobs import cluster_setup
from skyctl.records.cluster import Cluster
from skyctl.remote.base import ConnectOptions
from skyctl.setup.installer import SetupJob
from skyctl.setup.workload_requirements import read_workload_requirements


def test_where_what_is_made_could_not_be_kept_nothing_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a gigabyte would lie on each node that nobody knows of."""
    (tmp_path / "state").mkdir()
    (tmp_path / "state").chmod(0o777)
    monkeypatch.setenv("SKYCTL_HOME", str(tmp_path / "state"))
    assert home() == tmp_path / "state"
    monkeypatch.setattr(cluster_setup, "connect_nodes", None)
    job = SetupJob("here", torch="2.13.0", requirements=read_workload_requirements(None), here="me")
    cluster = Cluster(name="here", nodes=nodes("a"), groups={})
    with pytest.raises(SkyctlError, match="anybody may write to it") as refused:
        cluster_setup.set_up_cluster(cluster, ConnectOptions(), job)
    assert refused.value.exit_code == 1
    assert "SKYCTL_HOME" in str(refused.value.hint)
