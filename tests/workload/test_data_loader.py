"""A DataLoader with worker processes in data(): the same batches for one seed, and no process left."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from tests.helpers.processes import after_a_moment, parent, runs

from skyctl.workload.structures import value_tensors
from skyctl.workload.workload import Workload

TRAIN = """
import random
from torch.utils.data import DataLoader, Dataset

class Samples(Dataset):
    def __len__(self): return 20

    def __getitem__(self, index):
        noise = torch.rand(6) * random.random()  # torch seeds both generators in workers
        return {"image": noise, "number": torch.tensor(index)}, torch.tensor(index % 4)

def data(batch_size, seed):
    return DataLoader(Samples(), batch_size, shuffle=True, num_workers=2)

class First(nn.Linear):
    def forward(self, batch): return super().forward(batch["image"])

def model(): return [First(6, 4)]
"""


def children() -> list[int]:
    """The processes that this one has started and that run."""
    pids = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]
    return [pid for pid in pids if parent(pid) == os.getpid() and runs(pid)]


def test_batches_are_the_same_for_one_seed_and_no_process_is_left(user: Callable[..., Workload]) -> None:
    before = set(children())
    workload = user(TRAIN, data="", seed=5)
    first = _take(workload.batches(), 5)  # two and a half epochs of 20 samples by 8
    torch.manual_seed(99)
    assert _same(_take(workload.batches(), 5), first)
    assert _same(_take(workload.batches(2), 3), first[2:])
    assert not _same(_take(user(TRAIN, data="", seed=6).batches(), 5), first)
    numbers = [batch[0]["number"].tolist() for batch in first]
    assert numbers[0] != sorted(numbers[0])
    assert len({*numbers[0], *numbers[1]}) == 16
    assert numbers[2:4] != numbers[:2]
    assert not after_a_moment(lambda: set(children()) - before)


def _take(batches: Iterator[Any], count: int) -> list[Any]:
    return [batch for batch, _ in zip(batches, range(count), strict=False)]


def _same(some: list[Any], others: list[Any]) -> bool:
    pairs = zip(some, others, strict=True)
    return all(
        torch.equal(a, b) for x, y in pairs for a, b in zip(value_tensors(x), value_tensors(y), strict=True)
    )
