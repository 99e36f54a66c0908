"""Each case's gradients on three ranks of unequal batches, next to one process with the whole batch.

Rank 0 prints a JSON object: the norm of the difference by the norm of the gradient, by case.
"""

import contextlib
import gc
import json
import os
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from skyctl.torch import weigh

rank = int(os.environ["RANK"])
dist.init_process_group("gloo", init_method=os.environ["RENDEZVOUS"], rank=rank, world_size=3)


class Net(nn.Module):
    def __init__(self, branches: bool = False, recompute: bool = False) -> None:
        super().__init__()
        self.first = nn.Linear(6, 40)
        self.middle = nn.Linear(40, 40)
        self.other = nn.Linear(40, 40) if branches else None
        self.last = nn.Linear(40, 4)
        self.recompute = recompute

    def forward(self, x: Any, branch: bool = False) -> torch.Tensor:
        if isinstance(x, dict):
            x = x["inputs"][0]
        x = torch.tanh(self.first(x))
        middle = self.other if branch and self.other is not None else self.middle
        x = checkpoint(middle, x, use_reentrant=False) if self.recompute else middle(x)
        return self.last(torch.relu(x))


def data(samples: int, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(samples)
    return torch.randn(samples, 6, dtype=dtype), torch.randint(4, (samples,))


def parts(shares: list[int]) -> list[slice]:
    ends = [sum(shares[: r + 1]) for r in range(3)]
    return [slice(end - n, end) for n, end in zip(shares, ends, strict=True)]


def difference(module: nn.Module, reference: nn.Module) -> float:
    """The norm of what the gradients differ by, relative."""
    apart = total = 0.0
    for ours, theirs in zip(module.parameters(), reference.parameters(), strict=True):
        if theirs.grad is None:
            assert ours.grad is None
            continue
        apart += float((ours.grad.double() - theirs.grad.double()).norm() ** 2)
        total += float(theirs.grad.double().norm() ** 2)
    return (apart / total) ** 0.5


def compare(
    steps: list[list[int]],
    microbatches: list[int] | None = None,
    accumulate_from: int = 0,
    branch: Any = None,
    dtype: torch.dtype = torch.float32,
    call: Any = lambda model, x, **kwargs: model(x, **kwargs),
    net: Any = Net,
    **options: Any,
) -> float:
    """The largest difference of some steps; ``steps``: each rank's samples of each."""
    torch.manual_seed(1)
    reference = net().to(dtype)
    model = net().to(dtype)
    model.load_state_dict(reference.state_dict())
    ddp = weigh(DistributedDataParallel(model, **options))
    loss_of = nn.CrossEntropyLoss()
    worst = 0.0
    for step, shares in enumerate(steps):
        x, y = data(sum(shares), dtype)
        mine = parts(shares)
        pieces = microbatches[rank] if microbatches and step >= accumulate_from else 1
        model.zero_grad()
        xs, ys = x[mine[rank]].chunk(pieces), y[mine[rank]].chunk(pieces)
        for number, (some_x, some_y) in enumerate(zip(xs, ys, strict=True)):
            with ddp.no_sync() if number < pieces - 1 else contextlib.nullcontext():
                more = {"branch": branch(rank)} if branch else {}
                (loss_of(call(ddp, some_x, **more), some_y) / pieces).backward()
        with torch.no_grad():
            ddp(x)  # an evaluation counts no samples
        if sum(shares) == 0:
            assert all(p.grad.isnan().all() for p in model.parameters())
            continue
        reference.zero_grad()
        whole = 0.0
        for r in range(3) if branch else [None]:
            where = slice(None) if r is None else mine[r]
            more = {"branch": branch(r)} if branch else {}
            part = len(y[where]) / len(y)
            whole = whole + part * loss_of(reference(x[where], **more), y[where])
        whole.backward()
        worst = max(worst, difference(model, reference))
    return worst


def tokens() -> float:
    """A loss that is a mean over tokens, of which sequences have unequal numbers."""
    torch.manual_seed(2)
    model, reference = nn.Linear(6, 4), nn.Linear(6, 4)
    reference.load_state_dict(model.state_dict())
    loss_of = nn.CrossEntropyLoss(ignore_index=-100)

    class Tagger(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = model

        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            return loss_of(self.linear(x).flatten(0, 1), labels.flatten())

    ddp = weigh(DistributedDataParallel(Tagger()), samples=lambda x, labels: (labels != -100).sum())
    x, labels = torch.randn(9, 5, 6), torch.randint(4, (9, 5))
    for i in range(9):
        labels[i, i % 5 + 1 :] = -100
    labels[8] = -100  # the last rank has no token at all: its own loss is not a number
    mine = parts([5, 3, 1])[rank]
    ddp(x[mine], labels=labels[mine]).backward()
    loss_of(reference(x).flatten(0, 1), labels.flatten()).backward()
    return difference(model, reference)


def joined() -> float:
    """Ranks that end at different steps, under ``Join``: who has ended counts nothing."""
    torch.manual_seed(3)
    model, reference = Net(), Net()
    reference.load_state_dict(model.state_dict())
    ddp = weigh(DistributedDataParallel(model, bucket_cap_mb=0.001))
    loss_of, worst = nn.CrossEntropyLoss(), 0.0
    with Join([ddp]):
        for step in range(3 if rank == 0 else 2):
            shares = [4, 2, 1] if step < 2 else [4, 0, 0]
            x, y = data(sum(shares) + step)
            x, y = x[: sum(shares)], y[: sum(shares)]
            model.zero_grad()
            reference.zero_grad()
            mine = parts(shares)[rank]
            loss_of(ddp(x[mine]), y[mine]).backward()
            loss_of(reference(x), y).backward()
            worst = max(worst, difference(model, reference))
    return worst


def empty() -> float:
    """A rank without samples, and a step that nobody has any for: a mean over nothing is not a number."""
    return compare([[5, 3, 0], [0, 0, 0], [2, 1, 4]])


UNEQUAL = [5, 3, 2]
CASES = {
    "unequal": lambda: compare([UNEQUAL, UNEQUAL, UNEQUAL]),
    "last partial batch": lambda: compare([UNEQUAL, UNEQUAL, [2, 1, 1], UNEQUAL]),
    "accumulation": lambda: compare([[6, 4, 2], [6, 4, 2]], microbatches=[3, 2, 1]),
    "several buckets": lambda: compare([UNEQUAL, [1, 1, 4], UNEQUAL], bucket_cap_mb=0.001),
    "static graph": lambda: compare([UNEQUAL, [2, 1, 1], UNEQUAL], static_graph=True),
    "static graph, accumulation": lambda: compare(
        [[6, 4, 2]] * 3, microbatches=[3, 2, 1], accumulate_from=1, static_graph=True
    ),
    "bucket views": lambda: compare([UNEQUAL, [2, 1, 1]], gradient_as_bucket_view=True),
    "unused parameters": lambda: compare(
        [UNEQUAL, UNEQUAL],
        net=lambda: Net(branches=True),
        branch=lambda r: r == 1,
        find_unused_parameters=True,
    ),
    "unused by all": lambda: compare(
        [UNEQUAL, UNEQUAL],
        net=lambda: Net(branches=True),
        branch=lambda _: False,
        find_unused_parameters=True,
    ),
    "recomputing": lambda: compare([UNEQUAL, UNEQUAL], net=lambda: Net(recompute=True)),
    "keyword": lambda: compare([UNEQUAL], call=lambda model, x: model(x=x)),
    "nested": lambda: compare([UNEQUAL], call=lambda model, x: model({"inputs": [x]})),
    "bfloat16": lambda: compare([UNEQUAL, [2, 1, 1], UNEQUAL], dtype=torch.bfloat16),
    "compiled": lambda: compare([UNEQUAL, UNEQUAL], net=lambda: torch.compile(Net(), backend="eager")),
    "tokens": tokens,
    "join": joined,
    "empty": empty,
}
results = {}
for name, case in CASES.items():
    if len(sys.argv) < 2 or name in sys.argv[1:]:
        results[name] = case()
if rank == 0:
    print(json.dumps(results))
gc.collect()
dist.barrier()  # else a rank of DDP over Gloo may abort as it ends (torch 2.13)
dist.destroy_process_group()
