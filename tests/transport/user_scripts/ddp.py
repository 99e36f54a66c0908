"""DDP over Gloo, whose gradients a communication hook averages over the group that is asked for."""

import json
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
model = DistributedDataParallel(nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 4)))
if sys.argv[1] == "skyctl":

    def average(group, bucket):
        work = dist.all_reduce(bucket.buffer().div_(size), group=group, async_op=True)
        return work.get_future().then(lambda done: done.value()[0])

    model.register_comm_hook(dist.new_group(backend="skyctl"), average)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
torch.manual_seed(rank)
losses = []
for _ in range(5):
    inputs, targets = torch.randn(8, 16), torch.randn(8, 4)
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(model(inputs), targets)
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
print(json.dumps(losses), flush=True)
dist.barrier()  # to destroy a group of DDP's over Gloo aborts or hangs at times (torch 2.13)
