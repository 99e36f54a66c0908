"""The errors of ``weigh`` for calls that it can't make right; each rank prints a JSON object."""

import gc
import json
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from skyctl.torch import weigh

rank = int(os.environ["RANK"])
dist.init_process_group("gloo", init_method=os.environ["RENDEZVOUS"], rank=rank, world_size=2)


class Numbers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))

    def forward(self, number: float) -> torch.Tensor:
        return self.weight * number


def twice() -> None:
    weigh(weigh(DistributedDataParallel(nn.Linear(2, 2))))


def inner() -> None:
    """The first call of the module is followed by one around it."""
    model = weigh(DistributedDataParallel(nn.Linear(2, 2)))
    model(torch.ones(3, 2)).sum().backward()
    model.reducer.prepare_for_backward([])
    model.module(torch.ones(3, 2)).sum().backward()


errors = {}
for name, wrong in {
    "plain module": lambda: weigh(nn.Linear(2, 2)),
    "twice": twice,
    "no tensor": lambda: weigh(DistributedDataParallel(Numbers()))(2.0),
    "inner module": inner,
}.items():
    try:
        wrong()
    except Exception as error:
        errors[name] = str(error)
print(json.dumps(errors))
gc.collect()
dist.barrier()  # else a rank of DDP over Gloo may abort as it ends (torch 2.13)
dist.destroy_process_group()
