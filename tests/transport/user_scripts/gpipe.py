"""torch's own pipeline: two stages, ``ScheduleGPipe``; prints the losses of three steps."""

import json
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

dist.init_process_group(sys.argv[1])
rank, size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
layers = [nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(size)]
stage = PipelineStage(layers[rank], rank, size, torch.device("cpu"))
schedule = ScheduleGPipe(stage, 4, loss_fn=nn.functional.mse_loss)
optimizer = torch.optim.SGD(layers[rank].parameters(), lr=0.1)
inputs, targets = torch.randn(16, 8), torch.randn(16, 8)
losses = []
for _ in range(3):
    optimizer.zero_grad()
    step_losses = []
    if rank == size - 1:
        schedule.step(target=targets, losses=step_losses)
    elif rank:
        schedule.step()
    else:
        schedule.step(inputs)
    optimizer.step()
    losses.append([loss.item() for loss in step_losses])
print(json.dumps(losses))
if sys.argv[1] == "skyctl":  # Gloo's own hangs or aborts at times as its group goes (torch 2.13)
    dist.destroy_process_group()
