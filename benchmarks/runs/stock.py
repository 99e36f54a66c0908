"""The same stages under ``torch.distributed.pipelining``'s ``Schedule1F1B``, as its documentation uses it.

Run as a program, this file is one rank.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from runs.wires import OWN, Chain

PORT = 29511
STEPS = 4
SETTLED = 1
TIMEOUT_S = 40.0


def stock_step_s(times: Sequence[tuple[float, float]], width: int, microbatches: int, wires: Chain) -> float:
    """Seconds of a step, the slowest rank's median."""
    ranks: list[subprocess.Popen[str]] = []
    for number in range(len(times)):
        told = {"rank": number, "times": times, "width": width, "microbatches": microbatches}
        ranks.append(
            subprocess.Popen(
                [*wires.prefix(number), sys.executable, __file__, json.dumps(told)],
                stdout=subprocess.PIPE,
                text=True,
                env={
                    **os.environ,
                    "PYTHONPATH": str(Path(__file__).parents[1]),
                    "OMP_NUM_THREADS": "1",
                    "TORCH_CPP_LOG_LEVEL": "ERROR",
                },
            )
        )
    try:
        said = [rank.communicate(timeout=TIMEOUT_S)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    return max(float(median(json.loads(text)[SETTLED:])) for text in said)


def _rank(told: dict[str, Any]) -> None:
    import torch
    import torch.distributed
    from torch import nn
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    dist: Any = torch.distributed  # what follows is not all in torch's type stubs
    rank, microbatches, width = int(told["rank"]), int(told["microbatches"]), int(told["width"])
    times: list[tuple[float, float]] = told["times"]
    forward_s, backward_s = times[rank]

    class Sleep(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, weight):  # type: ignore[no-untyped-def]  # noqa: ARG004
            if x.device.type == "cpu":
                time.sleep(forward_s)
            return x * weight

        @staticmethod
        def backward(ctx, gradient):  # type: ignore[no-untyped-def]  # noqa: ARG004
            time.sleep(backward_s)
            return gradient, gradient.sum()

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(()))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = Sleep.apply(x, self.weight)  # type: ignore[no-untyped-call]
            return out

    os.environ["GLOO_SOCKET_IFNAME"] = OWN
    store = dist.TCPStore(Chain.own(0), PORT, len(times), rank == 0)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=len(times))
    example = torch.ones(1, width)
    stage = PipelineStage(
        Layer(), rank, len(times), torch.device("cpu"), input_args=(example,), output_args=(example,)
    )
    last = rank == len(times) - 1
    schedule = Schedule1F1B(stage, microbatches, loss_fn=(lambda out, _: out.mean()) if last else None)
    batch, target = torch.ones(microbatches, width), torch.zeros(microbatches)
    took = []
    for _ in range(STEPS):
        start = time.perf_counter()
        if rank == 0:
            schedule.step(batch)
        elif last:
            schedule.step(target=target)
        else:
            schedule.step()
        took.append(time.perf_counter() - start)
    dist.barrier()
    print(json.dumps(took), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    _rank(json.loads(sys.argv[1]))
