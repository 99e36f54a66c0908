"""A quota's saved-up time is not taken for speed: in a cgroup of its own, with as much saved as may be."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from skyctl.lab import cgroup_quotas

pytestmark = [pytest.mark.lab, pytest.mark.alone]
QUOTA_US, PERIOD_US = 50_000, 200_000
CODE = """
import json, sys, time
from types import SimpleNamespace
for folder in sys.argv[1:]:
    open(folder + "/cgroup.procs", "w").write("0")
import torch
torch.set_num_threads(1)
from skyctl.device.node_environment import collect_environment
from skyctl.probe.node import layer_bench
from skyctl.probe.node.probe_requests import DistinctLayer
from skyctl.probe.node.window_bench import WindowBench
from skyctl.workload.workload import load_workload
from skyctl.workload.workload_spec import make_spec
gpt = load_workload(make_spec("gpt:layers=2,hidden=16,heads=2,context=8", batch_size=4, random_inputs=True))
found = collect_environment()
time.sleep(0.6)  # saves up
start = time.monotonic()
bench = layer_bench.LayerBench(
    WindowBench(gpt, "cpu", threads=1, slowdown=1.0, memory_bytes=None, quota=found["quota"])
)
layers = [DistinctLayer(1, "it", {2: "it"}, {2: 0.0})]
alone = SimpleNamespace(count_s=lambda: 0.0, stopped=lambda: True)
alone.progress = alone.passed = alone.measured = lambda *_: None
bench.measure(layers, 0.1, 60.0, alone)
rows = bench.timings(layers)
print(json.dumps({"quota": found["quota"], "ratio": bench.wall_cpu_ratio(), "rows": rows}))
"""


@pytest.fixture
def burst() -> Iterator[list[str]]:
    """Folders of a cgroup with a quarter of a processor, as much saved up as the kernel allows."""
    layout = cgroup_quotas.find_cgroups()
    token = f"burst{os.getpid()}"
    folders = cgroup_quotas.make_node_cgroups(layout, token, 1, None)
    try:
        for folder in folders:
            if (folder / "cpu.cfs_quota_us").exists():
                (folder / "cpu.cfs_period_us").write_text(str(PERIOD_US))
                (folder / "cpu.cfs_quota_us").write_text(str(QUOTA_US))
                _write(folder / "cpu.cfs_burst_us")
            elif (folder / "cpu.max").exists():
                (folder / "cpu.max").write_text(f"{QUOTA_US} {PERIOD_US}")
                _write(folder / "cpu.max.burst")
        yield [str(folder) for folder in folders]
    finally:
        for folder in cgroup_quotas.lab_cgroups(layout, token):
            assert cgroup_quotas.remove_cgroups(folder)


def _write(file: Path) -> None:
    if not file.exists():
        pytest.skip("this kernel lets nothing be saved up")
    file.write_text(str(QUOTA_US))


@pytest.mark.slow
def test_the_stretch_is_the_quotas(burst: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, "-c", CODE, *burst], capture_output=True, text=True, timeout=120, check=True
    )
    measured = json.loads(done.stdout)
    assert measured["quota"]["burst_s"] == QUOTA_US / 1e6
    assert measured["ratio"] >= PERIOD_US / QUOTA_US
    assert measured["rows"][0]["forward_s"] > 0
