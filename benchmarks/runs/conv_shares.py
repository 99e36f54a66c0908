"""A convolutional net with DDP, as ``benchmarks/script_shares.py`` runs it: ``conv_shares.py SAMPLES STEPS``.

A step has 64 samples, this rank takes SAMPLES of them. Prints each step's seconds and, on rank 0, the sum of
each weight's absolute values at the end.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from skyctl.torch import weigh

BATCH, WIDTH, SIZE = 64, 24, 32


def make_net() -> nn.Module:
    """A small net without batch norms, whose gradients are sums over samples."""
    torch.manual_seed(0)
    layers: list[nn.Module] = [nn.Conv2d(3, WIDTH, 3, padding=1), nn.ReLU()]
    for _ in range(3):
        layers += [nn.Conv2d(WIDTH, WIDTH, 3, padding=1), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(WIDTH, 10))


def main() -> None:
    """Trains, whole in one process without torchrun's environment."""
    samples, steps = int(sys.argv[1]), int(sys.argv[2])
    is_alone = "RANK" not in os.environ
    net = make_net()
    first = 0
    if not is_alone:
        dist.init_process_group("gloo")
        shares = [torch.zeros(1, dtype=torch.int64) for _ in range(dist.get_world_size())]
        dist.all_gather(shares, torch.tensor([samples]))
        first = int(sum(share.item() for share in shares[: dist.get_rank()]))
        net = weigh(DistributedDataParallel(net))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    seconds = []
    for step in range(steps):
        generator = torch.Generator().manual_seed(step)
        inputs = torch.randn(BATCH, 3, SIZE, SIZE, generator=generator)[first : first + samples]
        targets = torch.randint(10, (BATCH,), generator=generator)[first : first + samples]
        began = time.perf_counter()
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(inputs), targets).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        seconds.append(time.perf_counter() - began)
    if is_alone or dist.get_rank() == 0:
        sums = [parameter.detach().abs().double().sum().item() for parameter in net.parameters()]
        print(json.dumps({"samples": samples, "steps_s": seconds, "weights": sums}), flush=True)
    if not is_alone:
        # Without this a rank of DDP over Gloo sometimes aborts as it ends, under torchrun, too (torch 2.13).
        del net, optimizer
        gc.collect()
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
