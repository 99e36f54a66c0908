"""A replica group of one rank that ``elastic_torchft.py`` has train. A program, for torchft's own Python.

torchft's ``DistributedDataParallel`` over Gloo, on an equal part of the batch. Prints each attempt at a step
and whether it was committed; a step that was not is done again, with the same samples.
"""

from __future__ import annotations

import json
import sys
import time
from datetime import timedelta

import torch
from torch import nn
from torch.distributed import TCPStore
from torchft import DistributedDataParallel, Manager, ProcessGroupGloo

from skyctl.workload.workload import load_workload
from skyctl.workload.workload_spec import make_spec

TIMEOUT = timedelta(seconds=30)


def main():
    """Trains until so many steps are committed."""
    told = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    torch.manual_seed(3)
    loaded = load_workload(make_spec(told["source"], batch_size=told["batch"]))
    batches = loaded.batches()
    drawn = [next(batches) for _ in range(told["steps"])]
    model = nn.Sequential(*loaded.build(0, loaded.layers, "cpu"))
    optimizer = loaded.optimizer(list(model.parameters()))

    def state():
        return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}

    def load(held):
        model.load_state_dict(held["model"])
        optimizer.load_state_dict(held["optimizer"])

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=TIMEOUT),
        load_state_dict=load,
        state_dict=state,
        min_replica_size=told["least"],
        timeout=TIMEOUT,
        quorum_timeout=TIMEOUT,
        rank=0,
        world_size=1,
        store_addr="127.0.0.1",
        store_port=store.port,
        lighthouse_addr=told["lighthouse"],
        hostname="127.0.0.1",
        replica_id=f"group{told['rank']}",
    )
    replica = DistributedDataParallel(manager, model)
    print(
        "bench", json.dumps({"ready": True}), flush=True
    )  # it gives signs of life: the first quorum waits for it
    sys.stdin.readline()
    while (step := manager.current_step()) < told["steps"]:
        inputs, targets = (part.chunk(told["ranks"])[told["rank"]] for part in drawn[step])
        manager.start_quorum()
        optimizer.zero_grad(set_to_none=True)
        loaded.loss(replica(inputs), targets).backward()
        is_committed = manager.should_commit()
        if is_committed:
            optimizer.step()
        said = {
            "step": step,
            "committed": is_committed,
            "at": time.monotonic(),
            "groups": manager.num_participants(),
        }
        print("bench", json.dumps(said), flush=True)
    manager.shutdown(wait=False)


if __name__ == "__main__":
    main()
