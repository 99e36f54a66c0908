"""The tasks that host an attempt's experts: started before its ranks, watched beside them, ended with them.

One that ends is not the attempt's end: ranks bring its experts back elsewhere (``worker.experts``).
"""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace

from skyctl.agent.task_events import DoneEvent, LogEvent
from skyctl.agent.task_orders import write_order
from skyctl.errors import RunError, SkyctlError
from skyctl.records.cluster import node_of, split_device_id
from skyctl.remote.agent_session import Session
from skyctl.remote.credentials import SECRET_BYTES
from skyctl.remote.remote_task import RemoteTask, TaskError, TaskExit, read_task_message, task_failure_error
from skyctl.remote.task_group import GroupEvent, TaskGroup
from skyctl.run.attempt_orders import AttemptOrders, HostedExperts
from skyctl.run.expert_spec import leading_ranks
from skyctl.run.journal import update_attempt
from skyctl.run.live_run import LiveRun
from skyctl.run.rank_spec import RankSpec
from skyctl.transport.tls_identity import TlsIdentity
from skyctl.worker.expert_orders import ExpertHostListening, ExpertHostOrder, ExpertsOrder, HostAddress
from skyctl.worker.rank_order import AnyRankOrder, RankOrder

HOST_MODULE = "skyctl.worker.experts.host_task"
START_S = 300.0
"""For a host to listen: it imports torch, and loads the workload."""
HOST_KINDS: Mapping[str, type] = {cls.kind: cls for cls in (ExpertHostListening, LogEvent, DoneEvent)}
"""By ``event``, the records of what hosts send."""


def host_task_name(place: int) -> str:
    """The name of a host's task on its node."""
    return f"experts-{place}"


def is_host_task(name: str) -> bool:
    """Whether the task that is called so is a host."""
    return re.fullmatch("experts-[0-9]{1,8}", name) is not None


class ExpertHosts:
    """The hosts of one attempt: ``start`` or ``adopt``, ``take_events`` now and then, ``kill``.

    For one thread.
    """

    def __init__(self, run: LiveRun, orders: AttemptOrders, hosted: HostedExperts) -> None:
        self._run, self._orders, self._hosted = run, orders, hosted
        self._devices = hosted.places.devices
        self._layers = {
            spec.rank: tuple(layer for layer in spec.layers if layer in hosted.places.counts)
            for spec in orders.specs
        }
        self._layers = {rank: held for rank, held in self._layers.items() if held}
        self._secrets = [
            {rank: secrets.token_hex(SECRET_BYTES) for rank in self._layers} for _ in self._devices
        ]
        self._sessions = dict(run.sessions)
        self._tasks: dict[int, RemoteTask] = {}
        self._events: TaskGroup[int] = TaskGroup("expert host")
        self._listening: dict[int, ExpertHostListening] = {}
        self._is_killed = False

    def start(self, identity: TlsIdentity | None) -> None:
        """Starts all hosts, and waits until they listen.

        Raises:
            SkyctlError: one can't be started, or ends.
            RunError: one does not listen in time.
        """
        self._run.callbacks.phase(f"starting {len(self._devices)} hosts of experts")
        update_attempt(self._run.journal, expert_hosts=self._devices)
        for place, device in enumerate(self._devices):
            session = self._sessions[node_of(device)]
            order = write_order(self._order_of(place, identity))
            self._follow(place, session.start_task(HOST_MODULE, order, name=host_task_name(place)))
        deadline = time.monotonic() + START_S
        while len(self._listening) < len(self._devices):
            if time.monotonic() > deadline:
                silent = [d for place, d in enumerate(self._devices) if place not in self._listening]
                raise RunError(
                    f"the hosts of experts on {', '.join(silent)} don't listen after {START_S:.0f} s"
                )
            came = self._events.receive(0.5)
            error = None if came is None else self._take(came)
            if error is not None:
                raise error

    def adopt(self, tasks: Mapping[int, RemoteTask]) -> None:
        """In place of ``start``: takes over hosts that another process has started, by their places."""
        for place, device in enumerate(self._devices):
            if place in tasks:
                self._follow(place, tasks[place])
            else:
                self._warn(device, "it had ended before")

    def order_of(self, spec: RankSpec, order: AnyRankOrder) -> AnyRankOrder:
        """A rank's order, told of the hosts where its layers have experts there."""
        held = self._layers.get(spec.rank)
        if held is None or not isinstance(order, RankOrder):
            return order
        places = self._hosted.places
        hosts = tuple(
            HostAddress(
                node=device,
                host=self._hosted.addresses[node_of(device)],
                port=self._listening[place].port,
                secret=self._secrets[place][spec.rank],
                layer_s={layer: places.layer_s[layer][place] for layer in held},
                room={layer: places.room[layer][place] for layer in held},
                byte_s=places.byte_s[place],
            )
            for place, device in enumerate(self._devices)
        )
        others = {layer for rank, layers in self._layers.items() if rank != spec.rank for layer in layers}
        experts = ExpertsOrder(
            hosts=hosts,
            holders={layer: places.holders[layer] for layer in held},
            leads=leading_ranks(self._layers)[spec.rank],
            alone=others.isdisjoint(held),
        )
        return replace(order, experts=experts)

    def take_events(self) -> None:
        """Takes in what hosts have said; of one that has ended it is said."""
        while (came := self._events.receive(0)) is not None:
            error = self._take(came)
            if error is not None and not self._is_killed:
                self._warn(self._devices[came.key], error.message)

    def kill(self) -> None:
        """Ends all that still run. Idempotent; errors of dead connections don't matter here."""
        self._is_killed = True
        for task in self._tasks.values():
            if not task.done:
                with suppress(SkyctlError, OSError):
                    task.kill()
        with suppress(SkyctlError):
            self.take_events()

    def wait_gone(self, limit_s: float) -> None:
        """After ``kill``: until all have ended on their nodes, lost ones left out."""
        deadline = time.monotonic() + limit_s
        while time.monotonic() < deadline and any(
            not task.done and self._session(place).is_waited_for for place, task in self._tasks.items()
        ):
            self.take_events()
            time.sleep(0.02)
        self.take_events()
        for place, task in self._tasks.items():
            self._session(place).discard(task)

    def _warn(self, device: str, why: str) -> None:
        self._run.callbacks.warn(
            f"the host of experts on {device} has ended: {why}; its experts come back on other hosts, from "
            "their last copies"
        )

    def _follow(self, place: int, task: RemoteTask) -> None:
        self._tasks[place] = task
        self._events.follow(place, task)

    def _session(self, place: int) -> Session:
        return self._sessions[node_of(self._devices[place])]

    def _take(self, came: GroupEvent[int]) -> SkyctlError | None:
        """Takes in one event, written down before anything else; what has ended the host, if that has."""
        node = self._session(came.key).node
        if came.error is not None:
            return came.error if isinstance(came.error, SkyctlError) else RunError(str(came.error))
        if came.value is None:
            return None
        name = host_task_name(came.key)
        try:
            message = read_task_message(HOST_KINDS, node, came.value)
        except SkyctlError as exc:
            with suppress(SkyctlError, OSError):
                self._tasks[came.key].kill()
            return exc
        if not self._run.journal.heard(node.name, name, message.plain):
            return None
        event = message.event
        if isinstance(event, ExpertHostListening):
            self._listening.setdefault(came.key, event)
        elif isinstance(event, TaskError | TaskExit):
            return task_failure_error(node, event)
        elif isinstance(event, DoneEvent):
            return RunError("it has ended by itself")
        return None

    def _order_of(self, place: int, identity: TlsIdentity | None) -> ExpertHostOrder:
        hosted, device = self._hosted, self._devices[place]
        name, own = split_device_id(device)
        node = self._run.cluster.node(name)
        first = next(spec.order for spec in self._orders.specs if isinstance(spec.order, RankOrder))
        machines = {machine.device: machine.threads for machine in self._orders.plan.machines}
        return ExpertHostOrder(
            run_id=first.run_id,
            node=device,
            device=own,
            threads=node.threads or machines.get(device),
            slowdown=node.slowdown,
            address=hosted.addresses[name],
            trunks=self._layers,
            secrets=self._secrets[place],
            workload=hosted.workload[name],
            recipe=first.recipe,
            steps=first.steps,
            tls=identity,
        )
