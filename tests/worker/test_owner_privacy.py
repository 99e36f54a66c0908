"""An owner's data stays in its own ranks: 32-byte markers, one in every sample, looked for in the memory of
all ranks while they train, in every file that is written, and in every event."""

from __future__ import annotations

import os
import re
import secrets
from pathlib import Path
from typing import Any

import pytest
from tests.worker.test_owner_pipelines import CUT, rank_orders

from skyctl.workload.workload_spec import WorkloadSpec

SAMPLES = 24
BATCH = 6
TRAIN = """
from pathlib import Path

import torch
from torch import nn

PRIVATE = Path("FOLDER")


class First(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, given):
        values, marker = given
        return self.linear(values + marker.to(torch.float32).mean(1, keepdim=True) * 1e-20)


def model():
    return [First()] + [nn.Linear(8, 8) for _ in range(5)] + [nn.Linear(8, 3)]


def example(batch_size):
    values = torch.zeros(batch_size, 8), torch.zeros(batch_size, 4, dtype=torch.int64)
    return values, torch.zeros(batch_size, dtype=torch.int64)


def read(owner):
    raw = bytearray((PRIVATE / owner).read_bytes())
    return torch.frombuffer(raw, dtype=torch.int64).reshape(-1, 4)


def data(batch_size, seed, owner):
    order = torch.randperm(24, generator=torch.Generator().manual_seed(seed))
    for batch in order.split(batch_size):
        markers = read(owner)[batch]
        yield (torch.randn(batch_size, 8), markers), batch % 3


def validation(batch_size, seed, owner):
    yield from data(batch_size, seed + 1, owner)


def loss(outputs, targets):
    return nn.functional.cross_entropy(outputs, targets)


def local_steps(owner, round):
    return 3 if owner == "a" else 2
"""


def holds(pid: int, prefix: bytes) -> bool:
    """Whether these bytes are anywhere in the process's memory."""
    maps = Path(f"/proc/{pid}/maps").read_text().splitlines()
    ranges = [line.split()[0].split("-") for line in maps if " r" in line and "[v" not in line]
    with open(f"/proc/{pid}/mem", "rb", buffering=0) as memory:
        for start, stop in ((int(a, 16), int(b, 16)) for a, b in ranges):
            for at in range(start, stop, 16 << 20):
                try:
                    region = os.pread(memory.fileno(), min(16 << 20, stop - at) + len(prefix), at)
                except OSError:  # a region that can't be read, or is gone
                    continue
                if prefix in region:
                    return True
    return False


def can_read(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/mem", "rb"):
            return True
    except OSError:
        return False


@pytest.mark.slow
def test_no_byte_of_an_owners_data_is_with_others(pool: Any, tmp_path: Path) -> None:
    """An owner with two ranks reads inputs in one and targets in the other."""
    pids = [process.popen.pid for process in pool.processes]
    if not can_read(pids[0]):
        pytest.skip("another process's memory can't be read here")
    private = tmp_path / "private"
    private.mkdir()
    prefixes = {owner: secrets.token_bytes(8) for owner in CUT}
    for owner, prefix in prefixes.items():
        markers = b"".join(prefix + secrets.token_bytes(24) for _ in range(SAMPLES))
        (private / owner).write_bytes(markers)
    (tmp_path / "train.py").write_text(TRAIN.replace("FOLDER", str(private)))
    path = str(tmp_path / "train.py")
    spec = WorkloadSpec(source=path, path=path, batch_size=BATCH, seed=3).to_dict()
    kept = tmp_path / "kept"
    keeps = {"folder": str(kept), "every": 1, "keep": 9, "at_end": True, "attempt": 1}
    whose = ["a", "b", "c+d", "c+d"]  # by rank
    seen: list[tuple[int, str]] = []

    def look(pool: Any, rank: int, event: dict[str, Any]) -> None:
        if event["event"] == "step" and event["step"] == 1 and rank == 0:
            seen.extend(
                (number, owner)
                for number, pid in enumerate(pids)
                for owner, prefix in prefixes.items()
                if holds(pid, prefix)
            )

    recipe = {"validate_every": 1, "validate_batches": 2}
    orders = rank_orders(
        CUT, [3, 3, 2], spec, 4, {"prox_mu": 0.1}, checkpoint=keeps, weights=True, recipe=recipe
    )
    done = pool.run(orders, look)
    assert not done.errors, done.errors
    assert {owner for number, owner in seen if whose[number] == owner} == set(CUT), "what is there is found"
    assert [(number, owner) for number, owner in seen if whose[number] != owner] == []
    files = [path for path in (*kept.rglob("*"), Path(done.results[0]["weights"])) if path.is_file()]
    assert len(files) > 7
    pattern = re.compile(b"|".join(re.escape(prefix) for prefix in prefixes.values()))
    assert [path for path in files if pattern.search(path.read_bytes())] == []
    for _, event in done.order:
        assert event.get("batch") is None, "nothing is told of an owner's batches"
        assert event.get("validation_batch") is None
    assert len({event["loss"] for rank, event in done.order if event["event"] == "validation"}) > 1
