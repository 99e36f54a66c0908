"""The cost of TLS: messages in the clear and through TLS side by side on loopback, one JSON line.

Each figure is the median of some turns, the two ways taken in turn in one run, so that a machine that changes
its speed changes both. ``cpu_ms_per_mb``: CPU time of both ends together for a megabyte (10^6 bytes) one way,
in messages of 1 MiB; ``small_us``: the same for a message of 64 bytes. ``stage_us``, ``stage_us_per_mb``: CPU
time of a stage's microbatch beside its layers, and more for a megabyte of message, as the probe finds them.
``step_s``: a training step of two stages with one thread each. Run: ``python benchmarks/encrypt.py``.
"""

from __future__ import annotations

import json
import ssl
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

warnings.filterwarnings("ignore", message="Failed to initialize NumPy")

import torch  # noqa: E402 — the filter must come first
from runs.driver import worker_driver  # noqa: E402

from skyctl.probe.node import message_overhead  # noqa: E402
from skyctl.remote.credentials import make_tls_certificate  # noqa: E402
from skyctl.transport.peer_connection import FIRST_TAG, PeerConnection  # noqa: E402
from skyctl.transport.process_group import SkyctlProcessGroup  # noqa: E402
from skyctl.transport.tls_identity import TlsIdentity  # noqa: E402
from skyctl.worker.peer import Peer  # noqa: E402
from skyctl.workload.workload import load_workload  # noqa: E402
from skyctl.workload.workload_spec import WorkloadSpec  # noqa: E402

MESSAGE_BYTES, MESSAGES = 1 << 20, 64
SMALL_BYTES, SMALLS = 64, 1000
WINDOW = 8
TURNS = 7
GPT = "gpt:layers=4,hidden=256,heads=8,context=128"
BATCH, MICROBATCHES, STEPS = 16, 8, 8
HOST = "127.0.0.1"


def pair_figures(identity: TlsIdentity | None) -> dict[str, float]:
    """One pair, both ends in this process."""
    ends = [PeerConnection("the other", 60.0, secret="benchmark", identity=identity) for _ in range(2)]
    port = ends[0].listen(HOST)
    accepting = threading.Thread(target=ends[0].accept)
    accepting.start()
    ends[1].connect(HOST, port, HOST)
    accepting.join()
    try:
        large_cpu_s, large_s = _stream(ends, MESSAGE_BYTES, MESSAGES)
        small_cpu_s, _ = _stream(ends, SMALL_BYTES, SMALLS)
        peers = [Peer(SkyctlProcessGroup(end, 2, {1 - end: ends[end]}), 1 - end) for end in (0, 1)]
        asking = threading.Thread(target=peers[1].measure_latency, args=(200,))
        asking.start()
        peers[0].measure_latency(200)
        asking.join()
    finally:
        for end in ends:
            end.close()
    megabytes = MESSAGE_BYTES * MESSAGES / 1e6
    beside = message_overhead.measure_message_overhead(1.0, identity)
    return {
        "mb_per_s": megabytes / large_s,
        "cpu_ms_per_mb": 1e3 * large_cpu_s / megabytes,
        "small_us": 1e6 * small_cpu_s / SMALLS,
        "round_trip_us": 2e6 * peers[0].latency_s,
        "stage_us": 1e6 * beside.stage_s,
        "stage_us_per_mb": 1e12 * beside.byte_s,
    }


def _stream(ends: list[PeerConnection], size: int, count: int) -> tuple[float, float]:
    """(CPU seconds of both ends, seconds) for messages one way, some receives posted ahead."""
    source, targets = torch.zeros(size, dtype=torch.uint8), [torch.empty(size, dtype=torch.uint8)] * WINDOW

    def receive() -> None:
        posted = [ends[1].recv(targets[n], FIRST_TAG) for n in range(min(WINDOW, count))]
        for number in range(count):
            posted[number].wait()
            if len(posted) < count:
                posted.append(ends[1].recv(targets[number % WINDOW], FIRST_TAG))

    receiver = threading.Thread(target=receive)
    cpu_s, began = time.process_time(), time.perf_counter()
    receiver.start()
    sends = [ends[0].send(source, FIRST_TAG) for _ in range(count)]
    for sent in sends:
        sent.wait()
    receiver.join()
    return time.process_time() - cpu_s, time.perf_counter() - began


def step_s(driver: Any, pool: Any, layers: int, *, encrypt: bool) -> tuple[float, list[float]]:
    """(median seconds of a step, the losses)."""
    spec = WorkloadSpec(source=GPT, batch_size=BATCH, seed=0)
    orders = driver.orders(
        spec.to_dict(),
        [0, layers // 2, layers],
        MICROBATCHES,
        "eager-1f1b",
        STEPS,
        tls=make_tls_certificate() if encrypt else None,
    )
    outcome = pool.run(orders)
    assert not outcome.errors, outcome.errors
    return median(event["iteration_s"] for event in outcome.steps[0][1:]), outcome.losses


def in_turn(
    clear: Callable[[], dict[str, float]], encrypted: Callable[[], dict[str, float]]
) -> dict[str, dict[str, float]]:
    """Medians of both, taken in turn."""
    found: dict[str, list[dict[str, float]]] = {"clear": [], "tls": []}
    for _ in range(TURNS):
        found["clear"].append(clear())
        found["tls"].append(encrypted())
    return {
        name: {key: float(f"{median(one[key] for one in rows):.4g}") for key in rows[0]}
        for name, rows in found.items()
    }


def main() -> None:
    """Measures and prints."""
    torch.set_num_threads(1)
    told = make_tls_certificate()
    case: dict[str, Any] = in_turn(lambda: pair_figures(None), lambda: pair_figures(told))
    if "--pairs" not in sys.argv:
        layers = load_workload(WorkloadSpec(source=GPT, batch_size=BATCH, seed=0)).layers
        driver = worker_driver()
        with tempfile.TemporaryDirectory() as folder:
            pool = driver.Pool(2, Path(folder))
            try:
                runs = [
                    [step_s(driver, pool, layers, encrypt=encrypt) for encrypt in (False, True)]
                    for _ in range(3)
                ]
            finally:
                pool.close()
        case["clear"]["step_s"], case["tls"]["step_s"] = (
            float(f"{median(pair[way][0] for pair in runs):.4g}") for way in (0, 1)
        )
        case["same_losses"] = all(pair[0][1] == pair[1][1] for pair in runs)
    case |= {"torch": torch.__version__, "openssl": ssl.OPENSSL_VERSION}
    print(json.dumps(case), flush=True)


if __name__ == "__main__":
    main()
