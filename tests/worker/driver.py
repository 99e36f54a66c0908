"""Ranks as real processes, with the launcher's part of the protocol played here: no agent, no SSH.

The processes are used for one run after another. Also used by ``benchmarks/executor.py``.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import queue
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from skyctl.agent.frames import read_frame, write_frame
from skyctl.agent.task_events import read_event
from skyctl.agent.task_orders import write_order, write_request
from skyctl.agent.task_runner import TaskChannel, make_error_event
from skyctl.schedule.actions import least_in_flight
from skyctl.worker.elastic.witness import QuorumWitness
from skyctl.worker.rank_events import WitnessAskedEvent
from skyctl.worker.rank_order import AnyRankOrder, HelperOrder, RankOrder, SumGroupOrder, SumOrder
from skyctl.worker.rank_requests import AdmitRequest

if __name__ != "__main__":
    from tests.helpers.orders import beside, rank_order, with_fields
    from tests.worker.sums import RouteEdges, places

Event = dict[str, Any]
RUN_S = 240.0
"""Some of them begin with the test: up to eight processes that import torch at a time, beside other tests."""


@dataclass
class Outcome:
    """The events of the ranks of one run, by rank; ``order``: every event as it came, with its rank.

    ``alive``: signs of life, which are in no order.
    """

    steps: dict[int, list[Event]] = field(default_factory=dict)
    results: dict[int, Event] = field(default_factory=dict)
    errors: dict[int, Event] = field(default_factory=dict)
    validation: dict[int, float] = field(default_factory=dict)
    checkpoints: dict[int, list[Event]] = field(default_factory=dict)
    members: dict[int, list[Event]] = field(default_factory=dict)
    order: list[tuple[int, Event]] = field(default_factory=list)
    alive: dict[int, list[Event]] = field(default_factory=dict)

    @property
    def losses(self) -> list[float]:
        """By step, what the last ranks of all pipelines say together."""
        parts = [[event["loss"] for event in events] for _, events in sorted(self.steps.items())]
        return [sum(loss for loss in step if loss is not None) for step in zip(*parts, strict=True)]


class Process:
    """One child; ``events`` gets (its number, event)."""

    def __init__(
        self,
        number: int,
        folder: Path,
        events: queue.Queue[tuple[int, Event]],
        prefix: Sequence[str] = (),
        warnings: str = "error",
    ) -> None:
        ours, theirs = socket.socketpair()
        self.number = number
        self.popen = subprocess.Popen(
            [
                *prefix,
                sys.executable,
                "-W",
                warnings,
                __file__,
                str(theirs.fileno()),
                str(folder),
                str(number),
            ],
            pass_fds=[theirs.fileno()],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        self._traces = folder / f"traces-{number}"
        theirs.close()
        self._socket = ours
        self._file = ours.makefile("rwb", buffering=0)
        self._events = events
        threading.Thread(target=self._pump, daemon=True).start()

    def send(self, message: Event) -> None:
        write_frame(self._file, message)

    def traces(self) -> str:
        """The tracebacks of all its threads."""
        self.popen.send_signal(signal.SIGUSR1)
        time.sleep(0.3)
        return self._traces.read_text()

    def close(self) -> None:
        self.popen.kill()
        self.popen.wait()
        self._file.close()
        self._socket.close()

    def _pump(self) -> None:
        try:
            while (frame := read_frame(self._file)) is not None:
                self._events.put((self.number, frame[0]))
        except (OSError, ValueError):
            pass
        self._events.put((self.number, {"event": "exit"}))


class Pool:
    """Processes that play ranks. ``prefix``: by number, what to put before a process's command.

    After a run in which nobody got any further there are new ones, so that the next one is not disturbed.
    ``warnings``: what a warning is to them, as ``python -W`` takes it.

    ``stall_s`` (an attribute): how long none of them may say anything new.
    """

    def __init__(
        self,
        number: int,
        folder: Path,
        prefix: Callable[[int], Sequence[str]] = lambda _number: (),
        warnings: str = "error",
    ) -> None:
        self._number, self._folder, self._prefix, self._warnings = number, folder, prefix, warnings
        self.stall_s = RUN_S
        self._start()

    def _start(self) -> None:
        self.events: queue.Queue[tuple[int, Event]] = queue.Queue()
        self.processes = [
            Process(i, self._folder, self.events, self._prefix(i), self._warnings)
            for i in range(self._number)
        ]

    def run(
        self,
        orders: Sequence[AnyRankOrder],
        on_event: Callable[[Pool, int, Event], None] = lambda _pool, _rank, _event: None,
        route: Callable[[int, str, int], tuple[str, int]] = lambda _rank, host, port: (host, port),
    ) -> Outcome:
        """Plays the launcher until every rank has ended.

        ``route``: where the next rank is led that is to reach this one at that host and port.
        """
        outcome = self.outcome = Outcome()
        stored: dict[str, str] = {}
        wanted: list[tuple[int, str]] = []
        for rank, order in enumerate(orders):
            self._order(rank, order)
        open_ranks = self._open = set(range(len(orders)))
        witness = QuorumWitness()
        ready: dict[int, Event] = {}
        while open_ranks:
            rank, event = self._next(open_ranks)
            outcome.order.append((rank, event))
            kind = event["event"]
            if kind == "stored":
                assert event["key"].split("/")[1] == str(rank), f"rank {rank} set {event['key']}"
                stored[event["key"]] = event["value"]
                if event["key"].startswith("listening/"):
                    host, port = route(rank, *listening_at(event))
                    stored[event["key"]] = f"{host}:{port}".encode().hex()
                elif (at := gloo_listening_at(event)) is not None:
                    address, port = at
                    _, led_to = route(rank, "127.0.0.1", port)
                    stored[event["key"]] = event["value"].replace(
                        address, f"{address[:4]}{led_to:04x}{address[8:]}", 1
                    )
            elif kind == "wanted":
                wanted.append((rank, event["key"]))
            elif kind == "facts":
                self.processes[rank].send({"op": "build"})
            elif kind == "ready":
                ready[rank] = event
                if len(ready) == len(orders) and rank < len(orders):
                    for order, process in zip(orders, self.processes, strict=False):
                        sums = {"sums": ready[0]["sums"]} if isinstance(order, HelperOrder) else {}
                        process.send({"op": "start", **sums})
            elif kind == "step":
                outcome.steps.setdefault(rank, []).append(event)
            elif kind == "validation":
                outcome.validation[event["step"]] = event["loss"]
            elif kind == "witness":
                asked = read_event(WitnessAskedEvent, event, "local")
                self.processes[rank].send(write_request(witness.answer(asked)))
            elif kind == "members":
                outcome.members.setdefault(rank, []).append(event)
            elif kind == "checkpoint":
                outcome.checkpoints.setdefault(rank, []).append(event)
            elif kind == "result":
                outcome.results[rank] = event
                open_ranks.discard(rank)
            else:
                outcome.errors[rank] = event
                open_ranks.discard(rank)
            for waiting in [key for key in wanted if key[1] in stored]:
                wanted.remove(waiting)
                caller, key = waiting
                self.processes[caller].send({"op": "stored", "key": key, "value": stored[key]})
            on_event(self, rank, event)
        return outcome

    def add(self) -> None:
        """One process more, for a rank that joins."""
        number = len(self.processes)
        self.processes.append(
            Process(number, self._folder, self.events, self._prefix(number), self._warnings)
        )

    def admit(self, order: RankOrder) -> None:
        """During a run: the rank of that order joins those in its ``hosts``."""
        rank = order.world.rank
        self._open.add(rank)
        for member in order.world.hosts:
            asked = AdmitRequest(rank, "127.0.0.1", f"{sorted((rank, member))}", 300.0)
            self.processes[member].send(write_request(asked))
        self._order(rank, order)

    def _order(self, rank: int, order: AnyRankOrder) -> None:
        secrets = {other: f"{sorted((rank, other))}" for other in order.world.hosts}
        world = replace(order.world, secrets={**secrets, **order.world.secrets})
        self.processes[rank].send({"payload": write_order(replace(order, world=world))})

    def _next(self, open_ranks: set[int]) -> tuple[int, Event]:
        """The next event that is more than a sign of life; a hang is an error with every rank's traces."""
        deadline = time.monotonic() + self.stall_s
        while (left_s := deadline - time.monotonic()) > 0:
            with contextlib.suppress(queue.Empty):
                rank, event = self.events.get(timeout=left_s)
                if event["event"] == "alive":
                    self.outcome.alive.setdefault(rank, []).append(event)
                elif rank in open_ranks:
                    return rank, event
        traces = "\n".join(f"rank {rank}:\n{self.processes[rank].traces()}" for rank in sorted(open_ranks))
        self.close()
        self._start()
        raise AssertionError(f"no rank got any further for {self.stall_s:.0f} s\n{traces}")

    def close(self) -> None:
        for process in self.processes:
            process.close()


def listening_at(event: Event) -> tuple[str, int]:
    """The address at which a rank waits for another one, as it has stored it."""
    host, port = bytes.fromhex(event["value"]).decode().split(":")
    return host, int(port)


def gloo_listening_at(event: Event) -> tuple[str, int] | None:
    """The socket address in what Gloo has stored, in hexadecimal digits, and its port; None: no address."""
    here = re.search("0200(....)7f000001", event["value"])
    return None if here is None else (here[0], int(here[1], 16))


def orders(
    workload: Event, cuts: list[int], microbatches: int, schedule: str, steps: int, **options: Any
) -> list[RankOrder]:
    """One rank a stage; ``cuts`` are the layers at which stages begin, and the number of layers.

    Options: ``depth`` (added to every in_flight), ``slowdowns``; others are fields of every order.
    """
    stages = len(cuts) - 1
    depth = options.pop("depth", 0)
    slowdowns = options.pop("slowdowns", [1.0] * stages)
    return [
        rank_order(
            stage,
            stages,
            slowdown=slowdowns[stage],
            workload=workload,
            layers=[cuts[stage], cuts[stage + 1]],
            microbatches=microbatches,
            schedule=schedule,
            in_flight=min(microbatches, least_in_flight(schedule, stage, stages, microbatches) + depth),
            steps=steps,
            **options,
        )
        for stage in range(stages)
    ]


def side_by_side(
    workload: Event,
    layers: int,
    shares: Sequence[int],
    routes: Sequence[RouteEdges],
    steps: int,
    **options: Any,
) -> list[RankOrder]:
    """One rank a pipeline of one stage; ``shares``: microbatches of each.

    Options: ``schedule``, ``sync`` (fields of every order's); others are fields of every order.
    """
    microbatches, sync, schedule = sum(shares), options.pop("sync", {}), options.pop("schedule", "1f1b")
    rank_orders = []
    for rank, share in enumerate(shares):
        [order] = orders(workload, [0, layers], microbatches, schedule, steps, **options)
        first = sum(shares[:rank])
        group = SumGroupOrder(0, 0, tuple(places(routes, rank)), start=0, stop=layers)
        sums = with_fields(SumOrder("float32", 128, (group,)), **sync)
        rank_orders.append(
            beside(
                order,
                rank,
                sums.peers,
                ranks=len(shares),
                in_flight=1,
                microbatch_range=[first, first + share],
                sync=sums,
                weights=order.weights and not rank,
                checkpoint=order.checkpoint and with_fields(order.checkpoint, writes=not rank),
            )
        )
    return rank_orders


def _child(descriptor: int, folder: Path, number: int) -> None:
    faulthandler.register(signal.SIGUSR1, (folder / f"traces-{number}").open("w"), all_threads=True)
    from skyctl.worker import rank

    channel = TaskChannel(socket.socket(fileno=descriptor), folder, folder)
    while True:
        got = channel.recv()
        assert got is not None
        if "payload" not in got[0]:
            continue
        try:
            result = rank.main(got[0]["payload"], channel)
        except EOFError:
            return
        except Exception as exc:
            channel.send(make_error_event(exc))
        else:
            channel.send({**result, "event": "result"})


if __name__ == "__main__":
    with contextlib.suppress(EOFError):
        _child(int(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))
