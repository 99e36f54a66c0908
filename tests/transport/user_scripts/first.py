"""Somebody's first script: who am I, a sum, something sent to the next rank and received from the last."""

import json
import sys
from datetime import timedelta

import torch
import torch.distributed as dist

# a rank may take long to import torch, and is waited for; from then on none is slow
store, rank, size = next(dist.rendezvous("env://", timeout=timedelta(seconds=240)))
dist.init_process_group(sys.argv[1], timeout=timedelta(seconds=10), store=store, rank=rank, world_size=size)
total = torch.full((300_000,), float(rank + 1))
dist.all_reduce(total)
sent, received = torch.tensor([rank]), torch.empty(1, dtype=torch.int64)
works = [dist.isend(sent, (rank + 1) % size, tag=3), dist.irecv(received, (rank - 1) % size, tag=3)]
for work in works:
    work.wait()
print(json.dumps({"total": total.unique().tolist(), "received": received.item(), "over": dist.get_backend()}))
dist.destroy_process_group()
