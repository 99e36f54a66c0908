"""The cost of sending less: encoding and decoding, and how far losses drift from those of a run without.

Prints one JSON line a case. ``*_us_per_mb``: microseconds of CPU time per 10^6 bytes of float32, one thread,
the least of five. ``largest``: the furthest any of 50 steps' losses is from the plain run's, three stages,
all links; ``last``: the last step's. Run: ``python benchmarks/link_dtypes.py``.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from runs.driver import worker_driver

from skyctl.worker.sums.tensor_codec import codec_for
from skyctl.workload.workload import load_workload
from skyctl.workload.workload_spec import WorkloadSpec

SIZES = (1 << 16, 1 << 18, 1 << 20)
GPT = "gpt:layers=4,hidden=64,heads=4,context=32"
STEPS = 50
SEEDS = (1, 2, 3)


def _us(action: Callable[[], None], rounds: int = 40) -> float:
    best = float("inf")
    for _ in range(5):
        start = time.thread_time()
        for _ in range(rounds):
            action()
        best = min(best, (time.thread_time() - start) / rounds)
    return best * 1e6


def codec() -> None:
    torch.set_num_threads(1)
    for values in SIZES:
        tensor, out = torch.randn(values), torch.empty(values)
        for dtype in ("bfloat16", "int8"):
            code = codec_for(dtype, tensor.shape, tensor.dtype)
            assert code is not None
            wire = torch.empty(code.shape, dtype=code.dtype)
            megabytes = 4 * values / 1e6
            case = {
                "link_dtype": dtype,
                "megabytes": megabytes,
                "encode_us_per_mb": round(_us(partial(code.encode, tensor, wire)) / megabytes),
                "decode_us_per_mb": round(_us(partial(code.decode, wire, out)) / megabytes),
            }
            print(json.dumps(case), flush=True)


def losses() -> None:
    driver = worker_driver()
    with tempfile.TemporaryDirectory() as folder:
        pool = driver.Pool(3, Path(folder))
        try:
            for seed in SEEDS:
                spec = WorkloadSpec(source=GPT, batch_size=16, seed=seed)
                layers = load_workload(spec).layers
                cuts = [0, layers // 3, 2 * layers // 3, layers]
                plain = _train(driver, pool, spec, cuts, None)
                for dtype in ("bfloat16", "int8"):
                    found = _train(driver, pool, spec, cuts, dtype)
                    off = [abs(a - b) for a, b in zip(found, plain, strict=True)]
                    case = {
                        "link_dtype": dtype,
                        "seed": seed,
                        "loss": [round(plain[0], 4), round(plain[-1], 4)],
                        "largest": round(max(off), 5),
                        "last": round(off[-1], 5),
                    }
                    print(json.dumps(case), flush=True)
        finally:
            pool.close()


def _train(driver: Any, pool: Any, spec: WorkloadSpec, cuts: list[int], dtype: str | None) -> list[float]:
    streams = ("to_next", "from_next", "to_previous", "from_previous")
    dtypes = dict.fromkeys(streams, dtype)
    outcome = pool.run(driver.orders(spec.to_dict(), cuts, 4, "1f1b", STEPS, link_dtypes=dtypes))
    if outcome.errors:
        raise RuntimeError(f"{dtype}: {outcome.errors}")
    found: list[float] = outcome.losses
    return found


if __name__ == "__main__":
    codec()
    losses()
