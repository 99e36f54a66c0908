"""A rank of DistributedDataParallel with torch's PowerSGD hook on Gloo, for ``compression.py``. A program."""

from __future__ import annotations

import json
import os
import sys
import warnings
from datetime import timedelta

warnings.filterwarnings("ignore")

import torch  # noqa: E402 — the filter must come first
from torch import distributed, nn  # noqa: E402
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402

WIDTH, LAYERS, STEPS, BATCH = 256, 8, 8, 16


def main() -> None:
    """Trains as many steps as it can, and prints how many, and what ended it.

    Told: ``rank`` of ``world``, ``port`` of the first, ``bucket_mb`` of a bucket, ``hooked``.
    """
    told = json.loads(sys.argv[1])
    os.environ |= {"GLOO_SOCKET_IFNAME": "lo", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    torch.set_num_threads(1)
    distributed.init_process_group(
        "gloo",
        init_method=f"tcp://127.0.0.1:{told['port']}",
        rank=told["rank"],
        world_size=told["world"],
        timeout=timedelta(seconds=30),
    )
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))
    parallel = DistributedDataParallel(model, bucket_cap_mb=told["bucket_mb"])
    if told["hooked"]:
        state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=4, start_powerSGD_iter=2)
        parallel.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    done, error = 0, None
    try:
        for _ in range(STEPS):
            parallel.zero_grad()
            parallel(torch.randn(BATCH, WIDTH)).square().mean().backward()
            for parameter in model.parameters():
                assert parameter.grad is not None
                parameter.data.sub_(parameter.grad, alpha=0.01)
            done += 1
        sums = [p.detach().double().sum().item() for p in model.parameters()]
        other = torch.tensor(sums, dtype=torch.float64)
        distributed.broadcast(other, 0)
        if other.tolist() != sums:
            error = "the ranks' weights differ"
    except Exception as exc:  # noqa: BLE001 — it is what is looked for
        error = f"{type(exc).__name__}: {str(exc).splitlines()[0]}"
    print(json.dumps({"steps": done, "error": error}), flush=True)
    os._exit(0)  # Gloo's threads may hang


if __name__ == "__main__":
    main()
