"""One rank of an equal split by ``DistributedDataParallel`` over Gloo, for ``data.py``. A program.

What could make it slower for another reason than its shares is as in skyctl's ranks: threads, optimizer,
loss, and a heap that keeps freed memory. Its samples are drawn before the clock starts.
"""

from __future__ import annotations

import json
import os
import sys
import time
import warnings
from contextlib import nullcontext
from datetime import timedelta
from itertools import pairwise
from typing import Any

warnings.filterwarnings("ignore", message="Failed to initialize NumPy")

import torch  # noqa: E402 — the filter must come first
from torch import distributed, nn  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402

from skyctl.device.process_memory import keep_freed_memory  # noqa: E402

TIMEOUT_S = 120.0


def train(told: dict[str, Any]) -> list[float]:
    """Seconds of each step, from the end of the one before.

    Args:
        told: ``rank`` of ``world``; ``host``, ``port`` of the first; ``interface``, the way to the others;
            ``workload``, a train.py's text; ``batch``, samples of all ranks together; ``microbatches`` of a
            rank; ``steps``.
    """
    rank, world, microbatches = told["rank"], told["world"], told["microbatches"]
    keep_freed_memory()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    workload: dict[str, Any] = {}
    exec(told["workload"], workload)  # its text, since nodes and this machine have no folder in common
    inputs, targets = (part.chunk(world)[rank] for part in next(workload["data"](told["batch"], 0)))
    model = DistributedDataParallel(nn.Sequential(*workload["model"]()))
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    loss_fn = nn.CrossEntropyLoss()
    distributed.barrier()
    ends = [time.perf_counter()]
    for _ in range(told["steps"]):
        parts = list(zip(inputs.chunk(microbatches), targets.chunk(microbatches), strict=True))
        for number, (x, y) in enumerate(parts, 1):
            with nullcontext() if number == microbatches else model.no_sync():
                (loss_fn(model(x), y) / microbatches).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        ends.append(time.perf_counter())
    return [end - start for start, end in pairwise(ends)]


def main() -> None:
    """Joins the others, trains, and prints the steps' seconds."""
    told = json.loads(sys.argv[1])
    os.environ["GLOO_SOCKET_IFNAME"] = told["interface"]
    print("begun", flush=True)
    distributed.init_process_group(
        "gloo",
        init_method=f"tcp://{told['host']}:{told['port']}",
        rank=told["rank"],
        world_size=told["world"],
        timeout=timedelta(seconds=TIMEOUT_S),
    )
    took = train(told)
    distributed.barrier()
    print(json.dumps(took), flush=True)
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
