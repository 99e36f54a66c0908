"""FedAvg by Flower over gRPC: a server and its clients, each a process. For Flower's own environment.

    python federated_flower.py TRAIN.PY OWNERS STEPS BATCH ROUNDS

Prints a JSON line: seconds between one average and the next, and the last weights, by name.
"""

from __future__ import annotations

import importlib.util
import itertools
import json
import multiprocessing
import socket
import sys
import time
from pathlib import Path
from typing import Any


def load(path: str) -> Any:
    """The workload's file as a module."""
    spec = importlib.util.spec_from_file_location("train", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def play_client(address: str, path: str, number: int, steps: int, batch: int) -> None:
    """One owner: local steps whenever the server asks for them."""
    import flwr
    import torch

    torch.set_num_threads(1)
    train = load(path)
    model = torch.nn.Sequential(*train.model())
    batches = train.data(batch, 0, f"n{number}")

    class Owner(flwr.client.NumPyClient):
        def fit(self, parameters: Any, config: Any) -> Any:  # noqa: ARG002
            with torch.no_grad():
                for own, value in zip(sorted_parameters(model), parameters, strict=True):
                    own.copy_(torch.from_numpy(value))
            optimizer = train.optimizer(model.parameters())
            for _ in range(steps):
                inputs, targets = next(batches)
                optimizer.zero_grad()
                train.loss(model(inputs), targets).backward()
                optimizer.step()
            return [one.detach().numpy() for one in sorted_parameters(model)], steps * batch, {}

    flwr.client.start_client(server_address=address, client=Owner().to_client())


def sorted_parameters(model: Any) -> list[Any]:
    """By name."""
    return [parameter for _, parameter in sorted(model.named_parameters())]


def main() -> None:
    """Plays the server here, and the clients in processes of their own."""
    path, owners, steps, batch, rounds = sys.argv[1], *map(int, sys.argv[2:])
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{one.getsockname()[1]}"
    context = multiprocessing.get_context("spawn")
    clients = [
        context.Process(target=play_client, args=(address, path, number, steps, batch), daemon=True)
        for number in range(owners)
    ]
    for client in clients:
        client.start()
    import flwr
    import torch

    ended: list[float] = []
    last: list[Any] = []

    class Averaged(flwr.server.strategy.FedAvg):
        def aggregate_fit(self, server_round: int, results: Any, failures: Any) -> Any:
            found = super().aggregate_fit(server_round, results, failures)
            ended.append(time.perf_counter())
            last[:] = flwr.common.parameters_to_ndarrays(found[0])
            return found

    first = sorted_parameters(torch.nn.Sequential(*load(path).model()))
    strategy = Averaged(
        fraction_evaluate=0.0,
        min_fit_clients=owners,
        min_available_clients=owners,
        initial_parameters=flwr.common.ndarrays_to_parameters([one.detach().numpy() for one in first]),
    )
    flwr.server.start_server(
        server_address=address, config=flwr.server.ServerConfig(num_rounds=rounds), strategy=strategy
    )
    for client in clients:
        client.join(30)
    seconds = [after - before for before, after in itertools.pairwise(ended)]
    print(json.dumps({"rounds_s": seconds, "weights": [one.tolist() for one in last]}))


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    main()
