"""Hosts of experts as real processes, with the launcher's part played here: no agent, no SSH.

Also used by ``benchmarks/runs/expert_runs.py``.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from skyctl.agent.frames import read_frame, write_frame
from skyctl.agent.task_orders import write_order
from skyctl.agent.task_runner import TaskChannel
from skyctl.worker.expert_orders import ExpertHostOrder, ExpertsOrder, HostAddress
from skyctl.worker.rank_order import RankOrder
from skyctl.workload.recipe import Recipe
from skyctl.workload.workload_spec import WorkloadSpec

SURE_S = 120.0
"""Nothing is late in tests that are not about it."""
ASKED, GIVEN = "_state", "_adopt"
"""A host is asked for an expert's state; it is given one."""


class Host:
    """One process, which is a host for one order after the other."""

    def __init__(self, folder: Path, env: Mapping[str, str]) -> None:
        self._ours, theirs = socket.socketpair()
        module = ["-W", "error", "-m", "tests.worker.expert_hosts"]
        self.popen = subprocess.Popen(
            [sys.executable, *module, str(theirs.fileno()), str(folder)],
            pass_fds=[theirs.fileno()],
            env={**os.environ, "OMP_NUM_THREADS": "1", **env},
            cwd=Path(__file__).parents[2],
        )
        theirs.close()
        self._file = self._ours.makefile("rwb", buffering=0)

    def start(self, order: ExpertHostOrder, fail_every: int = 0, dies: str | None = None) -> None:
        """It is to be that host.

        Args:
            fail_every: of one call in so many the answer is lost.
            dies: it kills itself once an expert moves, asked for what the old host has, or given to the new.
        """
        write_frame(self._file, {"payload": write_order(order), "fail_every": fail_every, "dies": dies})

    def listen(self) -> int:
        """The port on which it listens."""
        frame = read_frame(self._file)
        assert frame is not None
        assert frame[0]["event"] == "listening", frame[0]
        return int(frame[0]["port"])

    def stop(self) -> None:
        """It is no host any more."""
        with suppress(OSError, EOFError):
            write_frame(self._file, {"op": "stop"})
            frame = read_frame(self._file)
            assert frame is None or frame[0]["event"] == "result", frame[0]

    def kill(self) -> None:
        """It is gone, as it is."""
        self.popen.kill()
        self.popen.wait()

    def close(self) -> None:
        """Ends the process."""
        self.popen.kill()
        self.popen.wait()
        self._file.close()
        self._ours.close()


class HostPool:
    """So many processes for hosts; ``env``: of each, what else it has in its environment."""

    def __init__(
        self, folder: Path, count: int, env: Callable[[int], Mapping[str, str]] = lambda _place: {}
    ) -> None:
        self._start = lambda place: Host(folder, env(place))
        self._hosts = [self._start(place) for place in range(count)]

    def take(self, count: int) -> list[Host]:
        """So many of them, anew where they were killed."""
        for place, host in enumerate(self._hosts):
            if host.popen.poll() is not None:
                host.close()
                self._hosts[place] = self._start(place)
        return self._hosts[:count]

    def close(self) -> None:
        """Ends them all."""
        for host in self._hosts:
            host.close()


class Hosts:
    """Hosts for the ranks of some orders; ``orders``: these, told of the hosts. ``with`` ends them.

    Args:
        holders: by layer, of each expert the place of its host.
        room: of each layer so many experts have room on each host; 0: none moves there as loads drift.
        dies: by host's place, as of ``Host.start``.
        options: fields of every rank's ``ExpertsOrder``.
    """

    def __init__(
        self,
        orders: Sequence[RankOrder],
        holders: Mapping[int, Sequence[int]],
        hosts: Sequence[Host],
        fail_every: int = 0,
        room: int = 0,
        dies: Mapping[int, str] = MappingProxyType({}),
        **options: Any,
    ) -> None:
        first, self.hosts = orders[0], hosts
        layers = {
            order.world.rank: tuple(n for n in range(*order.layers) if n in holders) for order in orders
        }
        for place, host in enumerate(hosts):
            told = ExpertHostOrder(
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
            )
            host.start(told, fail_every, dies.get(place))
        self.ports = [host.listen() for host in hosts]
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
                            HostAddress(
                                f"host-{place}",
                                "127.0.0.1",
                                port,
                                f"{place} of {order.world.rank}",
                                layer_s=dict.fromkeys(held, 1.0),
                                room=dict.fromkeys(held, room),
                                byte_s=0.0,
                            )
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
            host.stop()


def _failing(every: int, done: Any) -> Any:
    from skyctl.experts.host_messages import NotDone
    from skyctl.schedule.seeds import splitmix64

    def some(self: Any, trunk: Any, request: Any, tensors: Any) -> Any:
        answer = done(self, trunk, request, tensors)
        if splitmix64(request.call) % every == 0:
            return NotDone(request.call, "its answer is lost"), ()
        return answer

    return some


def _dying(done: Any) -> Any:
    def once_it_moves(self: Any, trunk: Any, request: Any, *tensors: Any) -> Any:
        if (request.layer, request.expert) in (self._coming if tensors else self._left):
            os.kill(os.getpid(), signal.SIGKILL)
        return done(self, trunk, request, *tensors)

    return once_it_moves


def _child(descriptor: int, folder: Path) -> None:
    from skyctl.worker.experts import host_task
    from skyctl.worker.experts.expert_host import ExpertHost

    names = (ASKED, GIVEN, "_forward", "_backward")
    whole = {name: getattr(ExpertHost, name) for name in names}
    channel = TaskChannel(socket.socket(fileno=descriptor), folder, folder)
    while True:
        received = channel.recv()
        assert received is not None
        every, dies = received[0]["fail_every"], received[0]["dies"]
        for name, done in whole.items():
            if name in (ASKED, GIVEN):
                changed = _dying(done) if name == dies else done
            else:
                changed = _failing(every, done) if every else done
            setattr(ExpertHost, name, changed)
        host_task.main(received[0]["payload"], channel)
        channel.send({"event": "result"})


def recipe(steps: int) -> Recipe:
    """Of so many steps."""
    return Recipe(total_steps=steps)


def spec_of(path: Path, batch_size: int = 8) -> dict[str, Any]:
    """The workload of a file."""
    return WorkloadSpec(source=str(path), path=str(path), batch_size=batch_size, seed=3).to_dict()


if __name__ == "__main__":
    with suppress(EOFError):
        _child(int(sys.argv[1]), Path(sys.argv[2]))
