"""FedProx's experiment by real owners: a skyctl run, each of whose owners is a process of this machine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file

from runs.fedprox_rounds import SCRIPT, Federation, Method, simulate
from runs.softmax_regression import BATCH

NODE = "  - {{name: user-{}, transport: local, threads: 1, memory_gib: 0.5}}\n"


class RunFailedError(Exception):
    """A command of skyctl failed; the text says why."""


def by_owners(federation: Federation, method: Method, rounds: int, folder: Path) -> dict[str, Any]:
    """The method's rounds by owners, beside the simulation's: the largest differences.

    Args:
        folder: an empty one, for the cluster file and the run.

    Raises:
        RunFailedError: a command failed.
    """
    workload = f"{SCRIPT},{_arguments(federation, method)}"
    sizes = ("--batch-size", str(BATCH), "--microbatches", "1", "--seed", str(federation.draw))
    nodes = "".join(NODE.format(number + 1) for number in range(federation.users))
    (folder / "cluster.yaml").write_text(f"name: federation\nnodes:\n{nodes}")
    home = {"SKYCTL_HOME": str(folder / "home")}
    steps = [federation.epochs * federation.batches(client) for client in range(federation.users)]
    words = ["--local-steps", ",".join(map(str, steps)), "--owners", "all"]
    words += ["--clients-per-round", str(federation.clients), "--prox-mu", str(method.mu)]
    words += ["--drop-stragglers"] if method.drop else []
    _skyctl(folder, home, "probe", workload, *sizes, "--links", "none")
    _skyctl(folder, home, "plan", workload, *sizes, *words, "-o", "plan.json")
    held_out = max(len(labels) for _, _, _, labels in federation.samples)
    launch = ["--steps", str(rounds), "--checkpoint-every", "0"]
    launch += ["--validate-every", str(max(1, rounds // 10)), "--validate-batches", str(held_out)]
    _skyctl(folder, home, "launch", "plan.json", *launch)
    (run,) = (folder / "home" / "runs").iterdir()
    return _compared(federation, method, run)


def _arguments(federation: Federation, method: Method) -> str:
    return ",".join(
        f"{name}={value}"
        for name, value in {
            "alpha": federation.alpha,
            "beta": federation.beta,
            "draw": federation.draw,
            "users": federation.users,
            "clients": federation.clients,
            "epochs": federation.epochs,
            "stragglers": method.stragglers,
        }.items()
    )


def _skyctl(folder: Path, env: Mapping[str, str], *words: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "skyctl", *words],
        cwd=folder,
        env=os.environ | env,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise RunFailedError(f"skyctl {words[0]}: {done.stderr.strip()[-500:]}")


def _compared(federation: Federation, method: Method, run: Path) -> dict[str, Any]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    simulated = simulate(federation, len(lines), [method])
    stored = load_file(run / "weights.safetensors")
    weights = np.concatenate(
        [next(v for k, v in stored.items() if k.endswith("weight")).T,
         next(v for k, v in stored.items() if k.endswith("bias"))[None]]
    )  # fmt: skip
    validated = [line for line in lines if line.get("validation_loss") is not None]
    rounds = [line["step"] for line in validated]
    accuracy = np.array([line["validation_metrics"]["accuracy"] for line in validated])
    loss = np.array([line["validation_loss"] for line in validated])
    return {
        "method": method.label,
        "rounds": len(lines),
        "owners": federation.users,
        "accuracy": round(float(accuracy[-1]), 6),
        "test_loss": round(float(loss[-1]), 6),
        "accuracy_differs_by": float(np.abs(accuracy - simulated.accuracy[rounds, 0]).max()),
        "test_loss_differs_by": float(np.abs(loss - simulated.test_loss[rounds, 0]).max()),
        "weights_differ_by": float(np.abs(weights - simulated.weights[:, 0]).max()),
        "round_s": round(float(np.median([line["iteration_s"] for line in lines])), 4),
    }
