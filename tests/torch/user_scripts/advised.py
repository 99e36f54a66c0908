"""Equal shares on ranks of unequal speed: what ``step`` says; each rank prints what it returned, as JSON.

Arguments: seconds that a sample takes, by rank; samples that a rank says it has, or none.
"""

import gc
import json
import os
import sys
import time

import torch
import torch.distributed as dist
from torch import nn

from skyctl.torch import share, step

rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
dist.init_process_group("gloo", init_method=os.environ["RENDEZVOUS"], rank=rank, world_size=world_size)
sample_s = [float(part) for part in sys.argv[1].split(",")][rank]
samples = share(12)
model = nn.parallel.DistributedDataParallel(nn.Linear(2, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
answers = []
try:
    for _ in range(100):
        time.sleep(sample_s * samples)
        model(torch.ones(samples, 2)).sum().backward()
        optimizer.step()
        answers.append(step(samples if "silent" not in sys.argv else None))
except Exception as error:
    print(error)
else:
    print(json.dumps(answers))
del model, optimizer
gc.collect()
dist.barrier()  # else a rank of DDP over Gloo may abort as it ends (torch 2.13)
dist.destroy_process_group()
