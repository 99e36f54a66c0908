"""A script that knows nothing of skyctl; prints a digest of the weights that it ends with.

Arguments: seconds that each rank sleeps in a step's computing, by rank; "buffers" for a model with buffers,
"logged" for one that sums its loss over the ranks after each step.
"""

import gc
import hashlib
import os
import sys
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
dist.init_process_group("gloo", init_method=os.environ["RENDEZVOUS"], rank=rank, world_size=world_size)
torch.manual_seed(0)
sleep_s = [float(part) for part in sys.argv[1].split(",")][rank]
layers = [nn.Linear(8, 16), nn.BatchNorm1d(16) if "buffers" in sys.argv else nn.ReLU(), nn.Linear(16, 1)]
model = DistributedDataParallel(nn.Sequential(*layers))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
torch.manual_seed(rank)
for _ in range(8):
    time.sleep(sleep_s)
    loss = model(torch.randn(4, 8)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if "logged" in sys.argv:
        dist.all_reduce(loss.detach())
weights = b"".join(p.detach().numpy().tobytes() for p in model.parameters())
print(hashlib.sha256(weights).hexdigest())
del model, optimizer
gc.collect()
dist.barrier()  # else a rank of DDP over Gloo may abort as it ends (torch 2.13)
dist.destroy_process_group()
