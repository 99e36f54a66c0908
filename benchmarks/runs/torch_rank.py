"""One rank of what a user has without skyctl: torch's own equal split, by samples or by layers. A program.

``DistributedDataParallel`` over Gloo with an equal part of the batch each, or
``torch.distributed.pipelining``'s ``Schedule1F1B`` with as many layers each. The workload is loaded as
skyctl's ranks load it: model, samples, loss and optimizer are the same, and so are threads and the heap.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any

warnings.filterwarnings("ignore", message="Failed to initialize NumPy")

import torch  # noqa: E402 — the filter must come first
import torch.distributed  # noqa: E402
from torch import nn  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402

from skyctl.device.process_memory import keep_freed_memory  # noqa: E402
from skyctl.workload.workload import Workload, load_workload  # noqa: E402
from skyctl.workload.workload_spec import WorkloadSpec, make_spec  # noqa: E402

TIMEOUT_S = 120.0


def train(told: dict[str, Any]) -> list[float]:
    """Seconds of each step, from the end of the one before.

    Args:
        told: ``rank`` of ``world``; ``host``, ``port`` of the first; ``interface``, the way to the others;
            ``source``, the workload; where it is in a file, that file's name and text, ``file`` and
            ``text``, and ``{folder}`` in ``source`` for where it is put; ``batch``, samples of a step;
            ``microbatches``; ``steps``; ``form``: ``data`` or ``pipeline``.
    """
    keep_freed_memory()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        loaded = load_workload(_spec(told, Path(folder)))
        batches = loaded.batches()
        drawn = [next(batches) for _ in range(told["steps"])]
        step = (_by_samples if told["form"] == "data" else _by_layers)(loaded, told)
        torch.distributed.barrier()
        ends = [time.perf_counter()]
        for inputs, targets in drawn:
            step(inputs, targets)
            ends.append(time.perf_counter())
    return [end - start for start, end in pairwise(ends)]


def _spec(told: dict[str, Any], folder: Path) -> WorkloadSpec:
    if "text" not in told:
        return make_spec(told["source"], batch_size=told["batch"])
    path = folder / told["file"]  # its text, since nodes and this machine have no folder in common
    path.write_text(told["text"])
    return make_spec(told["source"].format(folder=folder), batch_size=told["batch"])


class _Layers(nn.Module):
    """Layers one after the other; between two there may be a tuple of tensors."""

    def __init__(self, layers: list[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, *values: Any) -> Any:
        value: Any = values if len(values) > 1 else values[0]
        for layer in self.layers:
            value = layer(value)
        return value


def _by_samples(loaded: Workload, told: dict[str, Any]) -> Callable[[Any, Any], None]:
    rank, world = told["rank"], told["world"]
    model = DistributedDataParallel(_Layers(loaded.build(0, loaded.layers, "cpu")))
    optimizer = loaded.optimizer(list(model.parameters()))

    def step(inputs: Any, targets: Any) -> None:
        loss: Any = loaded.loss(model(inputs.chunk(world)[rank]), targets.chunk(world)[rank])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def _by_layers(loaded: Workload, told: dict[str, Any]) -> Callable[[Any, Any], None]:
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    rank, world = told["rank"], told["world"]
    cuts = [number * loaded.layers // world for number in range(world + 1)]
    module = _Layers(loaded.build(cuts[rank], cuts[rank + 1], "cpu"))
    stage = PipelineStage(module, rank, world, torch.device("cpu"))
    schedule = Schedule1F1B(stage, told["microbatches"], loss_fn=loaded.loss)
    optimizer = loaded.optimizer(list(module.parameters()))

    def step(inputs: Any, targets: Any) -> None:
        if rank == 0:
            schedule.step(inputs)
        elif rank == world - 1:
            schedule.step(target=targets)
        else:
            schedule.step()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def main() -> None:
    """Joins the others, trains, and prints the steps' seconds."""
    told = json.loads(sys.argv[1])
    os.environ["GLOO_SOCKET_IFNAME"] = told["interface"]
    print("begun", flush=True)
    torch.distributed.init_process_group(
        "gloo",
        init_method=f"tcp://{told['host']}:{told['port']}",
        rank=told["rank"],
        world_size=told["world"],
        timeout=timedelta(seconds=TIMEOUT_S),
    )
    took = train(told)
    torch.distributed.barrier()
    print(json.dumps(took), flush=True)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
