"""Scripts of ``skyctl run`` over real SSH: trained as with torchrun, and nodes that go black."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest

from skyctl.lab.lab_state import LabState

from ..helpers.processes import until
from . import harm
from .clusters import Cluster

pytestmark = pytest.mark.slow

NODES = {"nodes": [{"name": "n1", "cpus": 0.8}, {"name": "n2", "cpus": 0.6}, {"name": "n3", "cpus": 0.6}]}
TRAIN = """\
import gc
import os
import sys
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
rank, steps = dist.get_rank(), int(sys.argv[1])
torch.manual_seed(0)
layers = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
model = DistributedDataParallel(layers)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
step = 0
if os.path.exists("kept/last.pt"):
    kept = torch.load("kept/last.pt")
    model.load_state_dict(kept["model"])
    step = kept["step"]
print("from", step, "of", dist.get_world_size(), flush=True)
while step < steps:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    inputs = torch.randn(16, 8, generator=generator)
    loss = (model(inputs) - inputs.sum(1, keepdim=True)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    step += 1
    dist.all_reduce(loss.detach())
    if rank == 0:
        print("loss", step, loss.item(), flush=True)
        os.makedirs("kept", exist_ok=True)
        torch.save({"model": model.state_dict(), "step": step}, "kept/new.pt")
        os.replace("kept/new.pt", "kept/last.pt")
    time.sleep(float(os.environ.get("PAUSE_S", "0")))
del model, optimizer
gc.collect()
dist.barrier()  # else a rank of DDP over Gloo may abort as it ends (torch 2.13)
dist.destroy_process_group()
"""
LOCAL = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "3", "train.py", "20")


@pytest.fixture(scope="module")
def cluster(
    shared_lab: Callable[..., LabState], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Cluster]:
    cluster = Cluster(shared_lab(NODES, name="scripts"), tmp_path_factory.mktemp("scripts"))
    (cluster.folder / "train.py").write_text(TRAIN)
    try:
        yield cluster
    finally:
        cluster.end()


def losses(text: str) -> list[float]:
    return [float(line.split()[-1]) for line in text.splitlines() if "loss " in line]


def test_it_trains_as_with_torchrun(cluster: Cluster) -> None:
    done = cluster.run("run", "--env", "OMP_NUM_THREADS=1", "--output", "kept", "train.py", "20")
    assert (cluster.folder / "kept" / "last.pt").is_file()
    shutil.rmtree(cluster.folder / "kept")
    alone = cluster.folder / "alone"
    alone.mkdir()
    (alone / "train.py").write_text(TRAIN)
    env = {**cluster.env, "OMP_NUM_THREADS": "1"}
    words = [sys.executable, *LOCAL]
    done_alone = subprocess.run(words, cwd=alone, env=env, capture_output=True, text=True, check=True)
    assert len(losses(done.stdout)) == 20
    assert losses(done.stdout) == pytest.approx(losses(done_alone.stdout), rel=1e-5)
    assert cluster.settled() == {}


def test_a_node_goes_black_and_the_others_go_on_from_the_output(cluster: Cluster) -> None:
    words = ("--env", "OMP_NUM_THREADS=1", "--env", "PAUSE_S=0.3", "--output", "kept")
    child = cluster.start("run", *words, "--min-nodes", "2", "train.py", "60")
    until(lambda: "loss 8 " in child.out, lambda: child.text)
    with harm.black(cluster.lab, "n3"):
        done = child.end()
    assert "node n3 has not been heard for" in done.stderr
    assert "] from 0 of 3" in done.stdout
    (began,) = {line.partition("] ")[2] for line in done.stdout.splitlines() if line.endswith(" of 2")}
    assert int(began.split()[1]) >= 8
    assert f"loss 60 {losses(done.stdout)[-1]}" in done.stdout
    runs = json.loads(cluster.run("ps", "--json", "-a").stdout)["runs"]
    assert [attempt["why"] for attempt in runs[0]["attempts"]] == ["launched", "node n3 was lost"]
    shutil.rmtree(cluster.folder / "kept")


def test_a_node_that_only_the_launcher_does_not_hear_trains_on(cluster: Cluster) -> None:
    words = ("--env", "OMP_NUM_THREADS=1", "--env", "PAUSE_S=0.3")
    child = cluster.start("run", *words, "--min-nodes", "2", "--json", "train.py", "90")
    until(lambda: "loss 4 " in child.err, lambda: child.text)
    with harm.launcher_cut(cluster.lab, "n3"):
        until(lambda: "node n3 has not been heard for" in child.err, lambda: child.text)
        until(lambda: "loss 60 " in child.err, lambda: child.text)
    done = child.end()
    assert "node n3 is heard again" in done.stderr
    assert json.loads(done.stdout)["restarts"] == 0
