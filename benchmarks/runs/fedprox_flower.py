"""FedProx's experiment by Flower's FedAvg and FedProx strategies, in its own environment.

Started by ``benchmarks/fedprox.py --flower`` with a folder that holds every draw: users' samples, who makes
how many epochs in which round, and in which order. Clients are a ClientApp in Flower's simulation (Ray, one
client at a time) and compute with the same numpy code as skyctl's side. Prints a JSON line a method. Ray's
processes import this module, too, so it is started as

    PYTHONPATH=benchmarks python -c "from runs.fedprox_flower import main; main()" FOLDER METHOD …
"""

from __future__ import annotations

import json
import logging
import sys
import time
from functools import cache
from itertools import pairwise
from pathlib import Path

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg, FedProx
from flwr.simulation import run_simulation

from runs.softmax_regression import BATCH, accuracy, mean_loss, train


@cache
def read(folder):
    """The draws, once in each process."""
    place = Path(folder)
    said = json.loads((place / "work.json").read_text())
    return said, dict(np.load(place / "samples.npz")), np.load(place / "orders.npy", mmap_mode="r")


def make_client(folder):
    """An app whose clients train as the round's message says."""
    app = ClientApp()

    @app.train()
    def work(message: Message, _context: Context) -> Message:
        config = message.content["config"]
        _, samples, stored = read(folder)
        client, epochs, first = (int(config[key]) for key in ("client", "epochs", "first"))
        inputs, targets = samples[f"inputs_{client}"], samples[f"targets_{client}"]
        count = len(targets)
        orders = [stored[first + n * count : first + (n + 1) * count] for n in range(epochs)]
        start = message.content["arrays"].to_numpy_ndarrays()[0][:, None]
        mu = np.array([config.get("proximal-mu", 0.0)], np.float32)
        made = train(inputs, targets, orders, start, mu, np.array([epochs]))
        metrics = MetricRecord({"num-examples": epochs * (count // BATCH) * BATCH})
        reply = RecordDict({"arrays": ArrayRecord([made[:, 0]]), "metrics": metrics})
        return Message(reply, reply_to=message)

    return app


def chosen_by(strategy_class, work, column):
    """The strategy, whose clients are those of the draws: any node plays any of them."""

    class Drawn(strategy_class):
        def configure_train(self, server_round, arrays, config, grid):
            messages = []
            parts = [part for part in work[server_round - 1] if part["epochs"][column]]
            if isinstance(self, FedProx):
                config["proximal-mu"] = self.proximal_mu
            for node, part in zip(sorted(grid.get_node_ids()), parts, strict=False):
                mine = {"client": part["client"], "epochs": part["epochs"][column], "first": part["first"]}
                record = RecordDict({"arrays": arrays, "config": ConfigRecord({**config, **mine})})
                messages += self._construct_messages(record, [node], "train")
            return messages

        def configure_evaluate(self, *_):
            return []

    return Drawn


def run(folder, name):
    """One method's rounds; the figures of its JSON line."""
    said, samples, _ = read(folder)
    column = said["methods"].index(name)
    mu = said["mu"][column]
    figures = {"accuracy": [], "loss": []}
    ended = []

    def evaluate(number, arrays):
        ended.append(time.perf_counter())
        if number:
            weights = arrays.to_numpy_ndarrays()[0][:, None]
            figures["accuracy"].append(float(accuracy(weights, samples["tested"], samples["test_labels"])[0]))
            figures["loss"].append(float(mean_loss(weights, samples["trained"], samples["labels"])[0]))

    server = ServerApp()

    @server.main()
    def main(grid: Grid, _context: Context) -> None:
        more = {} if name.startswith("fedavg") else {"proximal_mu": mu}
        strategy = chosen_by(FedProx if more else FedAvg, said["work"], column)(
            min_train_nodes=1, fraction_evaluate=0.0, **more
        )
        start = ArrayRecord([np.zeros(said["shape"], np.float32)])
        while len(list(grid.get_node_ids())) < said["nodes"]:
            time.sleep(0.1)
        strategy.start(grid, start, num_rounds=len(said["work"]), evaluate_fn=evaluate)

    logging.getLogger("flwr").setLevel(logging.ERROR)
    run_simulation(
        server,
        make_client(folder),
        said["nodes"],
        backend_config={"init_args": {"num_cpus": 1}, "client_resources": {"num_cpus": 1, "num_gpus": 0.0}},
    )
    took = [after - before for before, after in pairwise(ended[1:])]  # Ray starts within the first round
    return {"method": name, "round_s": sum(took) / len(took), **figures}


def main():
    """Prints the methods' lines."""
    folder, *methods = sys.argv[1:]
    for method in methods:
        print(json.dumps(run(folder, method)), flush=True)
