"""A rank that ends in the middle of everything."""

import os

import torch
import torch.distributed as dist

dist.init_process_group("skyctl")
for step in range(100):
    if step == 3 and dist.get_rank() == 1:
        os._exit(9)
    dist.all_reduce(torch.ones(1000))
