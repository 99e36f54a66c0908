"""A data() of dicts with a DataLoader and its processes, on two nodes: as plain torch, and nothing left."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from skyctl.workload.recipe import microbatch_sizes
from skyctl.workload.workload import load_workload
from skyctl.workload.workload_spec import make_spec

from ..helpers.commands import brief_probes
from ..helpers.processes import left_of_state, until
from ..helpers.runs import left_behind, losses_of
from .conftest import Here

TRAIN = """
import time
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Scenes(Dataset):
    def __len__(self):
        return 26

    def __getitem__(self, index):
        noise = torch.randn(6)  # from the generator that torch seeds in each worker
        image = torch.randn(6, generator=torch.Generator().manual_seed(index)) + 0.1 * noise
        inputs = {"image": image, "mask": ((image > 0).float(), [torch.tensor(float(index % 3))])}
        return inputs, {"classes": image[:4].argmax(), "sum": image.sum()}


def data(batch_size, seed):
    return DataLoader(Scenes(), batch_size, shuffle=True, num_workers=2)


class Encode(nn.Module):
    def __init__(self):
        super().__init__()
        self.image, self.mask = nn.Linear(6, 8), nn.Linear(6, 8)

    def forward(self, batch):
        mask, (scale,) = batch["mask"]
        return {"h": self.image(batch["image"]) + self.mask(mask), "scale": scale}


class Mix(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, given):
        SLEEP
        return {"h": self.linear(given["h"]).relu(), "scale": given["scale"]}


class Heads(nn.Module):
    def __init__(self):
        super().__init__()
        self.classes, self.sum = nn.Linear(8, 4), nn.Linear(8, 1)

    def forward(self, given):
        return {"classes": self.classes(given["h"]), "sum": self.sum(given["h"])[:, 0] * given["scale"]}


def model():
    return [Encode(), Mix(), Mix(), Heads()]


def loss(outputs, targets):
    classes = nn.functional.cross_entropy(outputs["classes"], targets["classes"])
    return classes + nn.functional.mse_loss(outputs["sum"], targets["sum"])


def optimizer(parameters):
    return torch.optim.SGD(parameters, lr=0.05)
"""
BATCH, MICROBATCHES, STEPS = 6, 4, 9  # two epochs, of four whole batches each, and the next
SIZES = ("--batch-size", str(BATCH), "--microbatches", str(MICROBATCHES), "--strategy", "even")


def _slice(value: Any, start: int, stop: int) -> Any:
    if isinstance(value, dict):
        return {key: _slice(part, start, stop) for key, part in value.items()}
    return (
        tuple(_slice(part, start, stop) for part in value) if isinstance(value, tuple) else value[start:stop]
    )


def _plain(here: Here) -> list[float]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    loaded = load_workload(make_spec(str(here.folder / "train.py"), batch_size=BATCH))
    layers = nn.Sequential(*loaded.build(0, loaded.layers))
    optimizer = torch.optim.SGD(layers.parameters(), lr=0.05)
    losses = []
    for batch, _ in zip(loaded.batches(), range(STEPS), strict=False):
        total, at = 0.0, 0
        for size in microbatch_sizes(BATCH, MICROBATCHES):
            inputs, targets = (_slice(side, at, at + size) for side in batch)
            outputs = layers(inputs)
            loss = nn.functional.cross_entropy(outputs["classes"], targets["classes"])
            loss = (loss + nn.functional.mse_loss(outputs["sum"], targets["sum"])) * (size / BATCH)
            loss.backward()
            total, at = total + loss.item(), at + size
        losses.append(total)
        optimizer.step()
        optimizer.zero_grad()
    torch.set_num_threads(threads)
    return losses


@pytest.mark.slow
def test_two_nodes_lose_what_plain_torch_loses_and_no_worker_is_left(here: Here) -> None:
    here.train(TRAIN.replace("SLEEP", ""))
    with brief_probes():
        done = here.run_inside("launch", "train.py", *SIZES, "--steps", str(STEPS), "--json")
    assert losses_of(done) == pytest.approx(_plain(here), rel=1e-5)
    assert not left_of_state(here.state)
    assert not left_behind(here)


@pytest.mark.slow
def test_an_interrupted_run_leaves_no_worker_of_a_data_loader(here: Here) -> None:
    here.train(TRAIN.replace("SLEEP", "time.sleep(0.02)"))
    here.probe_briefly("train.py", *SIZES[:4])
    here.run_inside("plan", "train.py", *SIZES, "-o", "plan.json")
    run = here.launch("plan.json", "--steps", "100000").wait_for(2)
    until(lambda: all(len(run.processes(node, "skyctl.worker.rank")) >= 3 for node in ("fast", "slow")))
    run.child.interrupt()
    run.end(130)
    assert not left_of_state(here.state)
    assert not left_behind(here)
