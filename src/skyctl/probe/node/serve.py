"""The node's end of a probe: one process a device, told what to measure. Task: ``skyctl.probe.node.serve``.

One process for everything, because importing torch costs seconds where CPU time is rationed. Orders come as
``{"op": …}``; the launcher (``probe/devices.py``) keeps all devices of a cluster in step with them:

* ``warm`` → ``warm``, when what torch imports with its first backward and optimizer is there;
* ``measure`` → ``progress``…, ``passed`` and goes on until ``count``, ``measured`` and goes on until ``stop``
  → ``timings``;
* ``link`` → ``listening`` (role ``listen``), then ``link`` with figures or an ``error``;
* ``line`` → ``line-listening`` (role ``hub``), with ``hold`` also ``line-ready`` and a wait for ``go``, then
  ``line`` with times of arrival or an ``error``;
* ``quit``.

From the first word on it says every few seconds that it is ``alive``: a process that is stopped is told from
one that is slow.
"""

from __future__ import annotations

import gc
import threading
import warnings
from typing import Any, Protocol

warnings.filterwarnings("ignore", message="Failed to initialize NumPy")

import torch  # noqa: E402 - the filter must come first

from skyctl.device import facts  # noqa: E402
from skyctl.device.heap import give_back_freed_memory, keep_freed_memory, share_one_heap  # noqa: E402
from skyctl.errors import RunError, SkyctlError  # noqa: E402
from skyctl.probe.node import compute, handling, line, link, watch  # noqa: E402
from skyctl.probe.node.layers import LayerBench  # noqa: E402
from skyctl.probe.node.tasks import LayerTask  # noqa: E402
from skyctl.probe.node.windowbench import WindowBench  # noqa: E402
from skyctl.transport.identity import Identity  # noqa: E402
from skyctl.transport.pair import Pair  # noqa: E402
from skyctl.workload.workload import Workload, WorkloadSpec, load  # noqa: E402

BEAT_S = 5.0


class Channel(Protocol):
    """What is used of ``agent.task.TaskChannel``."""

    def send(self, message: dict[str, Any], body: bytes = b"") -> None:
        """To the launcher."""

    def recv(self, timeout_s: float | None = None) -> tuple[dict[str, Any], bytes] | None:
        """From the launcher; None when nothing came in time."""


def main(payload: dict[str, Any], channel: Channel) -> dict[str, Any]:
    """The task.

    Args:
        payload: ``device`` (None: the first), ``devices`` (wanted, or None), ``threads``, ``slowdown``,
            ``workload`` (a spec with this node's paths, or None), ``tls`` (``{"cert", "key"}``: messages are
            measured through TLS; or None).
    """
    keep_freed_memory()
    share_one_heap()
    if payload.get("threads"):
        torch.set_num_threads(int(payload["threads"]))
    found = facts.facts(payload.get("devices"))
    device = payload.get("device") or found["devices"][0]["id"]
    card = None
    if torch.device(device).type != "cpu":
        cards = watch.cards_in_use() if torch.device(device).type == "cuda" else []
        facts.note_free(device)
        card = watch.own_card(cards, torch.device(device).index or 0, facts.card_uuid(device))
    spec = payload.get("workload")
    workload = load(WorkloadSpec.from_dict(spec)) if spec else None
    gc.freeze()  # torch's own objects: a collection would look at all of them, half a second on a slow node
    channel.send({"event": "facts", "device": device, **found})
    server = _Server(payload, channel, device, found, workload)
    server.card = card
    quitting = threading.Event()
    threading.Thread(target=_beat, args=(channel, quitting), daemon=True, name="heartbeat").start()
    try:
        server.serve()
    finally:
        quitting.set()
    return {}


def _beat(channel: Channel, quitting: threading.Event) -> None:
    while not quitting.wait(BEAT_S):
        try:
            channel.send({"event": "alive"})
        except (OSError, EOFError):  # the agent is gone, and this process will be
            return


class _Server:
    def __init__(
        self,
        payload: dict[str, Any],
        channel: Channel,
        device: str,
        found: dict[str, Any],
        workload: Workload | None,
    ) -> None:
        self._payload = payload
        self._channel = channel
        self._device = device
        self._quota = found["quota"]
        self._workload = workload
        self._slowdown = float(payload.get("slowdown") or 1.0)
        self._identity = Identity.of(payload.get("tls"))
        self._stopped = False
        self._count_s: float | None = None
        self.card: dict[str, Any] | None = None
        """What ``nvidia-smi`` told of it before we used it."""

    def serve(self) -> None:
        """Follows orders until ``quit``; one that comes too late (a ``go``, a ``stop``) is nothing to do."""
        orders = {"warm": self.warm, "measure": self.measure, "link": self.link, "line": self.line}
        while True:
            got = self._channel.recv(None)
            if got is None:
                continue
            if got[0]["op"] == "quit":
                return
            follow = orders.get(got[0]["op"])
            if follow is not None:
                follow(got[0])
                give_back_freed_memory()

    def warm(self, order: dict[str, Any]) -> None:  # noqa: ARG002 - there is nothing to say
        """Makes torch import what it needs for backwards and optimizers: more than a second of CPU time.

        Before anybody measures: a slow node would come to its layers when the others have had theirs for
        long, and a machine's speed changes meanwhile.
        """
        weight = torch.nn.Parameter(torch.zeros(1))
        torch.autograd.backward([weight * 1.0], [torch.zeros(1)])
        torch.optim.SGD([weight]).step()
        self._channel.send({"event": "warm"})

    def measure(self, order: dict[str, Any]) -> None:
        """Layer times, or the generic figure without a workload; memory as seen with everything loaded."""
        self._stopped, self._count_s = False, None
        budget_s, cap_s = float(order["budget_s"]), float(order["cap_s"])
        if order.get("threads"):
            torch.set_num_threads(int(order["threads"]))
        threads = torch.get_num_threads()
        watching = watch.Watch()
        left_out_s = 0.0
        result: dict[str, Any] = {"event": "timings", "threads": threads, "timings": [], "flops_per_s": None}
        if self._workload is None:
            self.progress(0, 1, "matrix products")
            result["flops_per_s"] = self._generic(budget_s / 2, cap_s, told=False)
        else:
            memory = facts.device_memory(self._device)
            cap_bytes = order.get("memory_bytes")
            usable = memory["memory_bytes"] if cap_bytes is None else min(memory["memory_bytes"], cap_bytes)
            windows = WindowBench(
                self._workload,
                self._device,
                threads=threads,
                slowdown=self._slowdown,
                memory_bytes=usable - memory["reserved_bytes"],
                quota=self._quota,
            )
            bench = LayerBench(windows)
            tasks = [LayerTask.from_dict(raw) for raw in order["layers"]]
            kinds = {int(size): found for size, found in order["kinds"].items()}
            again = "action_s" in order  # too little of it is measured now to tell
            bench.measure(tasks, budget_s, cap_s, self, kinds, entering=not again)
            stretch = bench.stretch() or 1.0
            action_s = float(order["action_s"]) / stretch if again else bench.action_s()
            result |= {"timings": bench.timings(tasks, action_s), "action_s": action_s * stretch}
            left_out_s = bench.left_out_s()
            if order.get("generic"):  # layers without a matrix product tell nothing of flops
                self._stopped = True
                result["flops_per_s"] = self._generic(0.5, cap_s, told=True)
        result["watched"] = watching.read() | {"left_out_s": left_out_s, "card": self.card}
        give_back_freed_memory()  # of the layers measured: a stage holds others
        result |= facts.device_memory(self._device)  # before what follows leaves its own in the heap
        if order.get("handling", True):
            self.progress(0, 1, "messages")
            beside = handling.measure(self._quota["cpus"] if self._quota else None, self._identity)
            result |= {"handling_s": beside.stage_s, "handling_byte_s": beside.byte_s}
        self._channel.send(result)
        while not self._stopped:  # past the cap, the order to stop is still to come
            self._hear(None)

    def _generic(self, budget_s: float, cap_s: float, *, told: bool) -> float:
        return compute.flops_per_s(
            self._device,
            threads=torch.get_num_threads(),
            slowdown=self._slowdown,
            quota=self._quota,
            budget_s=budget_s,
            stopped=self.stopped,
            on_measured=(lambda: None) if told else self.measured,
            cap_s=cap_s,
        )

    def _hear(self, timeout_s: float | None = 0.0) -> None:
        got = None if self._stopped else self._channel.recv(timeout_s)
        if got is not None and got[0].get("op") == "stop":
            self._stopped = True
        elif got is not None and got[0].get("op") == "count":
            self._count_s = float(got[0]["seconds"])

    def stopped(self) -> bool:
        """Of ``Conductor``."""
        self._hear()
        return self._stopped

    def count_s(self) -> float | None:
        """Of ``Conductor``."""
        self._hear()
        return self._count_s

    def passed(self) -> None:
        """Of ``Conductor``."""
        self._channel.send({"event": "passed"})

    def measured(self) -> None:
        """Of ``Conductor``."""
        self._channel.send({"event": "measured"})

    def progress(self, done: int, of: int, what: str) -> None:
        """Of ``Conductor``."""
        self._channel.send({"event": "progress", "done": done, "of": of, "what": what})

    def link(self, order: dict[str, Any]) -> None:
        """One pair; whatever goes wrong is its figure's ``error`` and ends nothing else."""
        timeout_s = float(order["timeout_s"])
        pair = self._pair(order, 30.0)
        answer: dict[str, Any] = {"event": "link", "peer": order["peer"]}
        try:
            address = str(order["address"])
            if order["role"] == "listen":
                port = pair.listen(address)
                self._channel.send({"event": "listening", "address": address, "port": port})
                pair.accept(timeout_s)
            else:
                pair.connect(str(order["host"]), int(order["port"]), address, timeout_s)
            figures = link.measure(pair, order["role"] == "listen", self._message_device())
            pair.close(politely=True)
            answer |= {
                "latency_s": figures.latency_s,
                "bandwidth_bytes_per_s": figures.bandwidth_bytes_per_s,
            }
            stretch = handling.stretched(self._quota["cpus"] if self._quota else None)
            if stretch is not None:
                answer |= {
                    "send_byte_s": figures.send_byte_s * stretch,
                    "receive_byte_s": figures.receive_byte_s * stretch,
                }
        except (SkyctlError, RuntimeError, OSError, ValueError) as exc:
            answer["error"] = _words(exc)
        finally:
            pair.close()
        self._channel.send(answer)

    def line(self, order: dict[str, Any]) -> None:
        """One hub's line, as the hub or as one of its peers; what goes wrong is its ``error``."""
        timeout_s, address = float(order["timeout_s"]), str(order["address"])
        pairs = [(self._pair(entry, float(order["transfer_s"])), _flows(entry)) for entry in order["pairs"]]
        answer: dict[str, Any] = {"event": "line", "hub": order["hub"]}
        try:
            if order["role"] == "hub":
                ports = [pair.listen(address) for pair, _ in pairs]
                said = {"event": "line-listening", "hub": order["hub"], "address": address, "ports": ports}
                self._channel.send(said)
                hold = (lambda: self._hold(order)) if order.get("hold") else (lambda: None)
                answer["arrivals"] = line.as_hub(pairs, timeout_s, self._message_device(), hold)
            else:
                ((pair, flows),) = pairs
                pair.connect(str(order["host"]), int(order["port"]), address, timeout_s)
                arrivals = line.exchange(pair, flows, None, self._message_device())
                answer["arrivals"] = {pair.peer: arrivals}
                pair.close(politely=True)
        except (SkyctlError, RuntimeError, OSError, ValueError) as exc:
            answer["error"] = _words(exc)
        finally:
            for pair, _ in pairs:
                pair.close()
        self._channel.send(answer)

    def _hold(self, order: dict[str, Any]) -> None:
        """Until the launcher, which has other pairs to start at the same time, says go."""
        self._channel.send({"event": "line-ready", "hub": order["hub"]})
        got = self._channel.recv(float(order["timeout_s"]))
        if got is None or got[0].get("op") != "go":
            raise RunError("the other flows were not ready in time")

    def _pair(self, order: dict[str, Any], timeout_s: float) -> Pair:
        device, secret = torch.device(self._device), str(order["secret"])
        return Pair(str(order["peer"]), timeout_s, secret=secret, device=device, identity=self._identity)

    def _message_device(self) -> str:
        return self._device if torch.device(self._device).type == "cuda" else "cpu"


def _flows(entry: dict[str, Any]) -> line.Flows:
    return line.Flows(int(entry["messages"]), int(entry["send_bytes"]), int(entry["receive_bytes"]))


def _words(exc: Exception) -> str:
    return exc.message if isinstance(exc, SkyctlError) else f"{type(exc).__name__}: {exc}"
