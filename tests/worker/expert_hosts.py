"""Hosts of experts as real processes, with the launcher's part played here: no agent, no SSH."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from skyctl.agent.frames import read_frame, write_frame
from skyctl.agent.task_orders import write_order
from skyctl.agent.task_runner import TaskChannel
from skyctl.worker.experts.expert_orders import ExpertHostOrder, ExpertsOrder, HostAddress
from skyctl.worker.rank_order import RankOrder
from skyctl.workload.recipe import Recipe
from skyctl.workload.workload_spec import WorkloadSpec

SURE_S = 120.0
"""Nothing is late in tests that are not about it."""
FAIL_EVERY = "SKYCTL_TEST_FAIL_EVERY"
"""To a host: one call in so many is not done, as its numbers have it."""


class Host:
    """One process; ``port`` once it listens."""

    def __init__(self, order: ExpertHostOrder, folder: Path, env: Mapping[str, str]) -> None:
        self.node = order.node
        self._ours, theirs = socket.socketpair()
        module = ["-W", "error", "-m", "tests.worker.expert_hosts"]
        with (folder / f"{order.node}.log").open("w") as log:
            self.popen = subprocess.Popen(
                [sys.executable, *module, str(theirs.fileno()), str(folder)],
                pass_fds=[theirs.fileno()],
                env={**os.environ, "OMP_NUM_THREADS": "1", **env},
                cwd=Path(__file__).parents[2],
                stderr=log,
            )
        theirs.close()
        self._file = self._ours.makefile("rwb", buffering=0)
        write_frame(self._file, {"payload": write_order(order)})

    def listen(self) -> int:
        """The port on which it listens."""
        frame = read_frame(self._file)
        assert frame is not None
        assert frame[0]["event"] == "listening", frame[0]
        return int(frame[0]["port"])

    def close(self) -> None:
        """Ends it, and says how it ended."""
        with suppress(OSError):
            write_frame(self._file, {"op": "stop"})
        self._ours.close()
        self._file.close()
        try:
            self.popen.wait(20.0)
        finally:
            self.popen.kill()
            self.popen.wait()


class Hosts:
    """Hosts for the ranks of some orders; ``orders``: these, told of the hosts. ``with`` ends them.

    Args:
        holders: by layer, of each expert the place of its host.
        hosts: how many there are.
        options: fields of every rank's ``ExpertsOrder``.
    """

    def __init__(
        self,
        orders: Sequence[RankOrder],
        holders: Mapping[int, Sequence[int]],
        hosts: int,
        folder: Path,
        env: Mapping[str, str] | None = None,
        **options: Any,
    ) -> None:
        first = orders[0]
        layers = {
            order.world.rank: tuple(n for n in range(*order.layers) if n in holders) for order in orders
        }
        self.hosts = [
            Host(
                ExpertHostOrder(
                    run_id="test",
                    node=f"host-{place}",
                    device="cpu:0",
                    threads=1,
                    slowdown=1.0,
                    address="127.0.0.1",
                    trunks={rank: held for rank, held in layers.items() if held},
                    secrets={rank: f"{place} of {rank}" for rank, held in layers.items() if held},
                    workload=first.workload,
                    recipe=first.recipe,
                    steps=first.steps,
                    tls=first.world.tls,
                ),
                folder,
                env or {},
            )
            for place in range(hosts)
        ]
        self.ports = [host.listen() for host in self.hosts]
        led: set[int] = set()
        self.orders: list[RankOrder] = []
        for order in orders:
            held = layers[order.world.rank]
            if not held:
                self.orders.append(order)
                continue
            self.orders.append(
                replace(
                    order,
                    experts=ExpertsOrder(
                        hosts=tuple(
                            HostAddress(f"host-{place}", "127.0.0.1", port, f"{place} of {order.world.rank}")
                            for place, port in enumerate(self.ports)
                        ),
                        holders={layer: tuple(holders[layer]) for layer in held},
                        leads=tuple(layer for layer in held if layer not in led),
                        alone=sum(layer in other for other in layers.values() for layer in held[:1]) == 1,
                        **{"least_wait_s": SURE_S, **options},
                    ),
                )
            )
            led |= {*held}

    def __enter__(self) -> Hosts:
        return self

    def __exit__(self, *_: object) -> None:
        for host in self.hosts:
            host.close()


def _fail_some(every: int) -> None:
    from skyctl.experts.host_messages import NotDone
    from skyctl.schedule.seeds import splitmix64
    from skyctl.worker.experts.expert_host import ExpertHost

    for name in ("_forward", "_backward"):
        done = getattr(ExpertHost, name)

        def some(self: Any, trunk: Any, request: Any, tensors: Any, done: Any = done) -> Any:
            if splitmix64(request.call) % every == 0:
                return NotDone(request.call, "it does not do this one"), ()
            return done(self, trunk, request, tensors)

        setattr(ExpertHost, name, some)


def _child(descriptor: int, folder: Path) -> None:
    from skyctl.worker.experts import host_task

    if every := int(os.environ.get(FAIL_EVERY, "0")):
        _fail_some(every)
    channel = TaskChannel(socket.socket(fileno=descriptor), folder, folder)
    received = channel.recv()
    assert received is not None
    host_task.main(received[0]["payload"], channel)


def recipe(steps: int) -> Recipe:
    """Of so many steps."""
    return Recipe(total_steps=steps)


def spec_of(path: Path, batch_size: int = 8) -> dict[str, Any]:
    """The workload of a file."""
    return WorkloadSpec(source=str(path), path=str(path), batch_size=batch_size, seed=3).to_dict()


if __name__ == "__main__":
    _child(int(sys.argv[1]), Path(sys.argv[2]))
