"""One rank that sums by Gloo in a lab's node, whenever it is told to, for ``sums.py``. A program."""

from __future__ import annotations

import json
import os
import sys
import time
import warnings
from datetime import timedelta

warnings.filterwarnings("ignore", message="Failed to initialize NumPy")

import torch  # noqa: E402 — the filter must come first
from torch import distributed  # noqa: E402

TIMEOUT_S = 120.0


def main() -> None:
    """Joins the others, then prints the seconds of a sum for each line of its input, from all together on.

    Told: ``rank`` of ``world``; ``host`` and ``port`` of the first; ``numbers``, of float32.
    """
    told = json.loads(sys.argv[1])
    print("begun", flush=True)
    os.environ["GLOO_SOCKET_IFNAME"] = "eth0"
    torch.set_num_threads(1)
    distributed.init_process_group(
        "gloo",
        init_method=f"tcp://{told['host']}:{told['port']}",
        rank=told["rank"],
        world_size=told["world"],
        timeout=timedelta(seconds=TIMEOUT_S),
    )
    for _ in sys.stdin:
        values = torch.full((told["numbers"],), told["rank"] + 1.0)
        distributed.barrier()
        begun_s = time.monotonic()
        distributed.all_reduce(values)
        taken_s = time.monotonic() - begun_s
        if not bool((values == sum(range(1, told["world"] + 1))).all()):
            raise SystemExit("the sum is wrong")
        print(taken_s, flush=True)
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
