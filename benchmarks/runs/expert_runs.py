"""Runs with experts on six hosts of unequal speed: a rank and the hosts are processes of this machine.

The speeds are simulated: an expert makes its host sleep for each token, as ``WAIT`` says.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from types import MappingProxyType
from typing import Any

from runs.driver import worker_driver
from skyctl.planner.expert_problem import ExpertDevice, ExpertPlacement
from skyctl.workload.recipe import Recipe

SPEEDS = (80, 40, 20, 20, 10, 10)
_TOKEN_S = "SKYCTL_BENCHMARK_TOKEN_S"
WAIT = f"""
import os, time

def wait(tokens):
    time.sleep(len(tokens) * float(os.environ.get("{_TOKEN_S}", "0")))
"""
"""For a workload's source: what its experts call with their tokens."""


class ExpertRuns:
    """Runs of a workload of two layers, the first of which holds experts. ``with`` ends their processes.

    Args:
        source: the workload's.
        token_s: seconds a token on a host of speed 1.
    """

    def __init__(self, source: str, batch_size: int, token_s: float) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="skyctl-bench-")
        path = Path(self._folder.name) / "train.py"
        path.write_text(source)
        self._token_s = token_s
        self._driver = worker_driver()
        self._processes = import_module("tests.worker.expert_hosts")
        self._spec = self._processes.spec_of(path, batch_size)
        self._pool = self._driver.Pool(1, path.parent)
        self._hosts = self._processes.HostPool(
            path.parent, len(SPEEDS), lambda place: {_TOKEN_S: str(token_s / SPEEDS[place])}
        )

    def __enter__(self) -> ExpertRuns:
        return self

    def __exit__(self, *_: object) -> None:
        self._hosts.close()
        self._pool.close()
        self._folder.cleanup()

    @property
    def devices(self) -> list[ExpertDevice]:
        """The hosts, for a placement."""
        return [ExpertDevice(f"d{n}", self._token_s / speed, 1 << 30) for n, speed in enumerate(SPEEDS)]

    def spec(self, seed: int) -> dict[str, Any]:
        """The workload with that seed."""
        return {**self._spec, "seed": seed}

    def run(
        self,
        placement: ExpertPlacement,
        recipe: Recipe,
        *,
        seed: int = 3,
        fail_every: int = 0,
        kills: Mapping[int, int] = MappingProxyType({}),
        **options: Any,
    ) -> Any:
        """The ``Outcome``, with the trained weights.

        Args:
            fail_every: of one call in so many the answer is lost.
            kills: by step, the place of the host that is killed after it.
            options: fields of ``ExpertsOrder``.
        """
        steps = recipe.total_steps
        orders = self._driver.orders(self.spec(seed), [0, 2], 1, "1f1b", steps, recipe=recipe, weights=True)
        taken = self._hosts.take(len(SPEEDS))

        def kill(_pool: Any, _rank: int, event: dict[str, Any]) -> None:
            if event["event"] == "step" and event["step"] in kills:
                taken[kills[event["step"]]].kill()

        with self._processes.Hosts(orders, {0: _holders(placement)}, taken, fail_every, **options) as hosts:
            outcome = self._pool.run(hosts.orders, kill)
        if outcome.errors:
            raise RuntimeError(f"the run has ended early: {outcome.errors}")
        return outcome


def _holders(placement: ExpertPlacement) -> list[int]:
    """Of each expert its host's place; one that is split is on the host with the larger share."""
    return [int(max(shares, key=lambda name: (shares[name], name))[1:]) for shares in placement.shares]
