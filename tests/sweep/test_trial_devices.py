"""The devices that trials run on, as cluster.yaml and probes know them."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.helpers.bare_records import OF_DEVICE, OF_PROFILE

from skyctl.errors import InputError
from skyctl.files import save_profile
from skyctl.records.cluster import Cluster, Node
from skyctl.records.profile import DeviceProfile, Profile
from skyctl.sweep.trial_devices import TrialDevice, find_devices


@pytest.fixture(autouse=True)
def own_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SKYCTL_HOME", str(tmp_path / "state"))


def cluster(*nodes: Node) -> Cluster:
    return Cluster(name="c", nodes=nodes)


def test_of_nodes_that_nobody_knows_the_processors() -> None:
    assert find_devices(cluster(Node(name="a"), Node(name="b"))) == [
        TrialDevice("a/cpu:0", "a", 1.0),
        TrialDevice("b/cpu:0", "b", 1.0),
    ]


def test_a_probe_tells_accelerators_and_speeds() -> None:
    devices = tuple(
        DeviceProfile(
            id=device,
            node=device[0],
            name="some",
            threads=1,
            slowdown=slowdown,
            memory_bytes=1e9,
            memory_from="free memory",
            reserved_bytes=0.0,
            flops_per_s=speed,
            **OF_DEVICE,
        )
        for device, speed, slowdown in (
            ("a/cpu:0", 1e9, 1.0),
            ("a/cuda:0", 8e9, 1.0),
            ("a/cuda:1", 4e9, 1.0),
            ("b/cpu:0", 4e9, 2.0),
        )
    )
    save_profile(
        Profile(
            cluster="c",
            cluster_digest="d",
            created="2026-11-21T06:30:12Z",
            nodes=(),
            devices=devices,
            links=(),
            **OF_PROFILE,
        )
    )
    assert find_devices(cluster(Node(name="a"), Node(name="b"), Node(name="new"))) == [
        TrialDevice("a/cuda:0", "a", 8e9, {"CUDA_VISIBLE_DEVICES": "0"}),
        TrialDevice("a/cuda:1", "a", 4e9, {"CUDA_VISIBLE_DEVICES": "1"}),
        TrialDevice("b/cpu:0", "b", 2e9),
        TrialDevice("new/cpu:0", "new", 4e9),
    ]


def test_each_trial_sees_the_device_that_is_named_for_it() -> None:
    found = find_devices(cluster(Node(name="a", devices=("cpu", "cuda:2", "xpu:0"))))
    assert [(device.id, device.environment) for device in found] == [
        ("a/cpu:0", {"CUDA_VISIBLE_DEVICES": "", "ZE_AFFINITY_MASK": ""}),
        ("a/cuda:2", {"CUDA_VISIBLE_DEVICES": "2"}),
        ("a/xpu:0", {"ZE_AFFINITY_MASK": "0"}),
    ]
    assert find_devices(cluster(Node(name="a", devices=("mps:0",))))[0].environment == {}
    with pytest.raises(InputError, match="can't be kept to a/mps:0"):
        find_devices(cluster(Node(name="a", devices=("mps:0", "mps:1"))))
