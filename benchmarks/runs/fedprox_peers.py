"""Has Flower play FedProx's experiment with our draws, in an environment of its own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from runs.fedprox_rounds import METHODS, Federation, Method

BENCHMARKS = Path(__file__).resolve().parents[1]
START = "from runs.fedprox_flower import main; main()"
ENVIRONMENT = {"RAY_USAGE_STATS_ENABLED": "0", "FLWR_TELEMETRY_ENABLED": "0", "PYTHONPATH": str(BENCHMARKS)}


START_S, ROUND_S = 300.0, 10.0
"""How long a method may take at most: until Ray runs, and for each round."""


class FlowerError(Exception):
    """Flower can't be run; the text says why."""


class FlowerHistory(NamedTuple):
    """By round, after its average; and the seconds of a round, without the first, in which Ray starts."""

    accuracy: NDArray[np.float64]
    loss: NDArray[np.float64]
    round_s: float


def by_flower(
    python: str, federation: Federation, rounds: int, methods: tuple[Method, ...] = METHODS
) -> Iterator[tuple[Method, FlowerHistory]]:
    """Each method's rounds. Raises FlowerError where that interpreter does not get to their end."""
    with TemporaryDirectory(prefix="fedprox-") as name:
        _write_draws(Path(name), federation, rounds, methods)
        command = [python, "-c", START, name, *(method.label for method in methods)]
        with (Path(name) / "stderr").open("w+") as errors:
            try:
                child = subprocess.Popen(
                    command,
                    stdout=subprocess.PIPE,
                    stderr=errors,
                    text=True,
                    env=os.environ | ENVIRONMENT,
                    start_new_session=True,
                )
            except OSError as exc:
                raise FlowerError(f"{python}: {exc}") from exc
            try:
                for method in methods:
                    text = _next_line(child, rounds)
                    if not text:
                        errors.seek(0)
                        raise FlowerError(f"Flower ended: {errors.read()[-500:].strip()}")
                    yield method, _read(json.loads(text))
            finally:
                with suppress(ProcessLookupError):
                    os.killpg(child.pid, signal.SIGKILL)  # with what Ray has started
                child.wait()
                assert child.stdout is not None
                child.stdout.close()


def _next_line(child: subprocess.Popen[str], rounds: int) -> str:
    """The next method's line; empty where it did not come in time (Ray may lose its processes and wait)."""
    assert child.stdout is not None
    limit = threading.Timer(START_S + rounds * ROUND_S, child.kill)
    limit.start()
    try:
        text = child.stdout.readline()
        while text and not text.startswith("{"):  # Ray may write there, too
            text = child.stdout.readline()
    finally:
        limit.cancel()
        limit.join()
    return text


def _read(said: dict[str, Any]) -> FlowerHistory:
    return FlowerHistory(np.array(said["accuracy"]), np.array(said["loss"]), said["round_s"])


def _write_draws(folder: Path, federation: Federation, rounds: int, methods: tuple[Method, ...]) -> None:
    """All that clients need: samples, and by round who makes how many epochs in which orders."""
    classes = federation.script.CLASSES
    samples: dict[str, Any] = {}
    for client, (inputs, labels, _, _) in enumerate(federation.samples):
        samples[f"inputs_{client}"] = inputs
        samples[f"targets_{client}"] = np.eye(classes, dtype=np.float32)[labels]
    parts = zip(*federation.samples, strict=True)
    for key, part in zip(("trained", "labels", "tested", "test_labels"), parts, strict=True):
        samples[key] = np.concatenate(part)
    np.savez(folder / "samples.npz", **samples)
    work, orders, first = [], [], 0
    for number in range(rounds):
        clients = []
        for part_of in federation.round_of(number, methods):
            clients.append({"client": part_of.client, "epochs": part_of.epochs.tolist(), "first": first})
            orders += [order.astype(np.int32) for order in part_of.orders]
            first += sum(len(order) for order in part_of.orders)
        work.append(clients)
    np.save(folder / "orders.npy", np.concatenate(orders))
    said = {
        "methods": [method.label for method in methods],
        "mu": [method.mu for method in methods],
        "work": work,
        "nodes": federation.clients,
        "shape": [samples["trained"].shape[1], classes],
    }
    (folder / "work.json").write_text(json.dumps(said))
