"""The node's end of a probe: one process a device, told what to measure (``skyctl.probe.node.probe_task``).

One process for everything, because importing torch costs seconds where CPU time is rationed. By its requests
(``probe_requests``) the launcher (``probe/device_measurement.py``) keeps all devices in step:

* ``measure`` → ``progress``…, ``passed`` and more until ``count``, ``measured`` and more until ``stop``
  → ``timings``;
* ``compare`` → ``compared``;
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
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from skyctl.device.torch_import import import_torch

import_torch()

import torch  # noqa: E402 - after that

from skyctl.agent.task_orders import read_order, read_request  # noqa: E402
from skyctl.device import node_environment  # noqa: E402
from skyctl.device.accelerator import device_uuid  # noqa: E402
from skyctl.device.dtype_support import prepare_dtype  # noqa: E402
from skyctl.device.process_memory import give_back_freed_memory, keep_freed_memory, share_one_heap  # noqa: E402
from skyctl.errors import RunError, SkyctlError  # noqa: E402
from skyctl.probe.node import device_speed, link_speed, load_counters, message_overhead  # noqa: E402
from skyctl.probe.node.forks import error_text, result_of_fork  # noqa: E402
from skyctl.probe.node.layer_bench import LayerBench  # noqa: E402
from skyctl.probe.node.probe_order import ProbeOrder  # noqa: E402
from skyctl.probe.node.probe_requests import (  # noqa: E402
    PROBE_REQUESTS,
    CompareRequest,
    CountRequest,
    FlowPair,
    FlowRequest,
    GoRequest,
    LinkRequest,
    MeasureRequest,
    QuitRequest,
    StopMeasuringRequest,
)
from skyctl.probe.node.sum_overhead import measure_message_byte_s  # noqa: E402
from skyctl.probe.node.window_bench import WindowBench  # noqa: E402
from skyctl.transport import BACKEND, GLOO  # noqa: E402
from skyctl.transport.peer_connection import PeerConnection  # noqa: E402
from skyctl.workload.workload import Workload, load_workload  # noqa: E402

HEARTBEAT_S = 5.0


class LauncherChannel(Protocol):
    """The part of ``agent.task_runner.TaskChannel`` that is used here.

    ``cache``: the node's folder that outlives runs.
    """

    @property
    def cache(self) -> Path:
        """A folder of the node that outlives sessions."""

    def send(self, message: dict[str, Any], body: bytes = b"") -> None:
        """Sends a message to the launcher."""

    def recv(self, timeout_s: float | None = None) -> tuple[dict[str, Any], bytes] | None:
        """From the launcher; None when nothing came in time."""


def main(message: dict[str, Any], channel: LauncherChannel) -> dict[str, Any]:
    """The task; ``message``: a ``ProbeOrder``.

    Raises:
        MismatchError, RecordError: it can't follow the order.
    """
    order = read_order([ProbeOrder], message)
    keep_freed_memory()
    share_one_heap()
    if order.threads is not None:
        torch.set_num_threads(order.threads)
    facts = node_environment.collect_environment(order.devices)
    device = order.device or facts["devices"][0]["id"]
    gpu = None
    if torch.device(device).type != "cpu":
        gpus = load_counters.gpu_usage() if torch.device(device).type == "cuda" else []
        node_environment.note_free_memory(device)
        gpu = load_counters.find_gpu(gpus, torch.device(device).index or 0, device_uuid(torch.device(device)))
    spec = order.workload
    support = prepare_dtype(spec.dtype, device, channel.cache) if spec is not None else None
    workload = load_workload(spec) if spec is not None else None
    gc.freeze()  # a collection would look at all there is, half a second on a slow node
    max_cpu_isa = support.max_cpu_isa if support is not None else None
    period_s = facts["quota"]["period_s"] if facts["bound"] else None
    more = {"device": device, "max_cpu_isa": max_cpu_isa, "quota_period_s": period_s}
    channel.send({"event": "facts", **more, **facts})
    server = _ProbeServer(order, channel, device, facts, workload, gpu)
    quitting = threading.Event()
    threading.Thread(target=_send_heartbeats, args=(channel, quitting), daemon=True, name="heartbeat").start()
    try:
        server.serve()
    finally:
        quitting.set()
    return {}


def _send_heartbeats(channel: LauncherChannel, quitting: threading.Event) -> None:
    while not quitting.wait(HEARTBEAT_S):
        try:
            channel.send({"event": "alive"})
        except (OSError, EOFError):  # the agent is gone, and this process will be
            return


class _ProbeServer:
    """Does what the launcher asks of one device; it is the ``PassCoordinator`` of its own bench."""

    def __init__(
        self,
        order: ProbeOrder,
        channel: LauncherChannel,
        device: str,
        facts: dict[str, Any],
        workload: Workload | None,
        gpu: dict[str, Any] | None,
    ) -> None:
        self._spec = order.workload
        self._channel = channel
        self._device = device
        self._quota = facts["quota"]
        self._workload = workload
        self._slowdown = order.slowdown
        self._identity = order.tls
        self._stopped = False
        self._count_s: float | None = None
        self._halts = load_counters.HaltWatch()
        self._gpu = gpu  # as ``nvidia-smi`` told of it before this process used it

    def serve(self) -> None:
        """Answers requests until the last; one that comes too late (a ``go``, a ``stop``) asks nothing.

        Raises:
            RecordError: a field of a request is missing, unknown or wrong.
        """
        while True:
            got = self._channel.recv(None)
            if got is None:
                continue
            request = read_request(PROBE_REQUESTS, got[0])
            if isinstance(request, QuitRequest):
                return
            if isinstance(request, CompareRequest):
                self.compare(request)
            elif isinstance(request, MeasureRequest):
                self.measure(request)
            elif isinstance(request, LinkRequest):
                self.link(request)
            elif isinstance(request, FlowRequest):
                self.line(request)
            else:
                continue
            give_back_freed_memory()

    def compare(self, request: CompareRequest) -> None:
        """Trains the model whole and cut, in its own dtype; a difference is the answer's ``error``."""
        from skyctl.worker.cut_check.comparison import NOT_COMPARED, compare_cut

        answer: dict[str, Any] = {"event": "compared"}
        try:
            workload, spec = self._workload, self._spec
            assert workload is not None
            assert spec is not None
            if spec.dtype != "float32":  # the boundaries that it was sent have that dtype
                workload = load_workload(replace(spec, dtype="float32", boundaries=None))
            answer |= compare_cut(workload, self._device, request.samples, request.limit_s).to_dict()
        except SkyctlError as exc:
            answer |= {"error": exc.message, "hint": exc.hint}
        except (MemoryError, torch.OutOfMemoryError):
            answer |= {"verdict": NOT_COMPARED, "reason": "there was too little memory for it"}
        self._channel.send(answer)

    def measure(self, request: MeasureRequest) -> None:
        """Layer times, or the generic figure without a workload; memory as seen with everything loaded."""
        self._stopped, self._count_s = False, None
        budget_s, cap_s = request.budget_s, request.cap_s
        if request.threads is not None:
            torch.set_num_threads(request.threads)
        threads = torch.get_num_threads()
        result: dict[str, Any] = {"event": "timings", "threads": threads, "timings": [], "flops_per_s": None}
        counters = load_counters.LoadCounters()
        bench: LayerBench | None = None
        left_out_s = 0.0
        if self._workload is None:
            self.progress(0, 1, "matrix products")
            result["flops_per_s"] = self._flops_per_s(budget_s / 2, cap_s, known=False)
        else:
            bench = self._measure_layers(self._workload, request, result)
            left_out_s = bench.left_out_s()
            if request.generic:  # layers without a matrix product tell nothing of flops
                self._stopped = True
                result["flops_per_s"] = self._flops_per_s(0.5, cap_s, known=True)
        result["watched"] = counters.read() | {
            "left_out_s": left_out_s,
            "gpu": self._gpu,
            "halted_share": self._halts.share(),
        }
        give_back_freed_memory()  # of the layers measured: a stage holds others
        result |= node_environment.device_memory(
            self._device
        )  # before what follows leaves its own in the heap
        if request.handling:
            self.progress(0, 1, "messages")
            ratio = self._node_ratio(request, None if bench is None else bench.wall_cpu_ratio())
            adding_s = device_speed.measure_reduce_byte_s(self._device, ratio)
            result |= {
                "reduce_byte_s": adding_s,
                **self._message_costs(BACKEND, ratio, adding_s, request.gradient_bytes),
            }
            if request.gloo:
                self.progress(0, 1, "messages over Gloo")
                result |= self._gloo_figures(ratio, adding_s, request.gradient_bytes)
        self._channel.send(result)
        while not self._stopped:  # past the cap, the order to stop is still to come
            self._hear(None)

    @property
    def _cpus(self) -> float | None:
        """The CPU quota that this process is held to; None: none."""
        return self._quota["cpus"] if self._quota else None

    def _node_ratio(self, request: MeasureRequest, measured: float | None) -> float:
        """Seconds of the node for one of its processors', with its quota and all that share them at work.

        Args:
            measured: as the layers have just shown it; None: there are none, or it is not the same for all.
        """
        shared = request.crowding if measured is None else measured
        return max(1.0, shared, 0.0 if self._cpus is None else 1.0 / self._cpus)

    def _message_costs(
        self, backend: str, ratio: float, adding_s: float, gradient_bytes: float
    ) -> dict[str, float]:
        """The costs of messages over that backend, in seconds of the node.

        Args:
            ratio: of these, for one of its processors'.
            adding_s: what adding a byte takes.
            gradient_bytes: of a step's sum.
        """
        overhead = message_overhead.measure_message_overhead(ratio, self._identity, backend)
        return {
            "handling_s": overhead.stage_s,
            "handling_byte_s": overhead.byte_s,
            "step_s": overhead.step_s,
            "message_byte_s": self._sum_byte_s(backend, ratio, adding_s, gradient_bytes, ring=False),
        }

    def _gloo_figures(self, ratio: float, adding_s: float, gradient_bytes: float) -> dict[str, Any]:
        """The costs of messages over Gloo, as ``gloo``, or why they are not known, as ``gloo_error``.

        Gloo aborts its process where others take all files that it may open, by connecting to its listeners.
        """

        def measure() -> dict[str, float]:
            costs = self._message_costs(GLOO, ratio, adding_s, gradient_bytes)
            return costs | {"ring_byte_s": self._sum_byte_s(GLOO, ratio, adding_s, gradient_bytes, ring=True)}

        try:
            return {"gloo": measure() if torch.accelerator.is_available() else result_of_fork(measure)}
        except (SkyctlError, RuntimeError, OSError) as exc:  # not all builds of torch can
            return {"gloo_error": error_text(exc)}

    def _sum_byte_s(
        self, backend: str, ratio: float, adding_s: float, gradient_bytes: float, *, ring: bool
    ) -> float:
        numel = int(gradient_bytes) // torch.float32.itemsize
        return measure_message_byte_s(ratio, adding_s, self._identity, backend, numel, ring=ring)

    def _measure_layers(
        self, workload: Workload, request: MeasureRequest, result: dict[str, Any]
    ) -> LayerBench:
        """Times the layers of a request, into ``timings`` and ``action_s`` of the result."""
        memory = node_environment.device_memory(self._device)
        cap_bytes = request.memory_bytes
        usable = memory["memory_bytes"] if cap_bytes is None else min(memory["memory_bytes"], cap_bytes)
        windows = WindowBench(
            workload,
            self._device,
            threads=torch.get_num_threads(),
            slowdown=self._slowdown,
            memory_bytes=usable - memory["reserved_bytes"],
            quota=self._quota,
        )
        bench = LayerBench(windows)
        layers, known_s = request.layers, request.action_s
        bench.measure(
            layers,
            request.budget_s,
            request.cap_s,
            self,
            request.kinds,
            with_call_overhead=known_s is None,  # else too little is measured now to tell it
        )
        ratio = bench.wall_cpu_ratio() or 1.0
        action_s = bench.action_s() if known_s is None else known_s / ratio
        result |= {"timings": bench.timings(layers, action_s), "action_s": action_s * ratio}
        return bench

    def _flops_per_s(self, budget_s: float, cap_s: float, *, known: bool) -> float:
        return device_speed.measure_flops_per_s(
            self._device,
            threads=torch.get_num_threads(),
            slowdown=self._slowdown,
            quota=self._quota,
            budget_s=budget_s,
            stopped=self.stopped,
            on_measured=(lambda: None) if known else self.measured,
            cap_s=cap_s,
        )

    def _hear(self, timeout_s: float | None = 0.0) -> None:
        got = None if self._stopped else self._channel.recv(timeout_s)
        request = None if got is None else read_request(PROBE_REQUESTS, got[0])
        if isinstance(request, StopMeasuringRequest):
            self._stopped = True
        elif isinstance(request, CountRequest):
            self._count_s = request.seconds

    def stopped(self) -> bool:
        """Whether the launcher has said that all devices are done."""
        self._hear()
        return self._stopped

    def count_s(self) -> float | None:
        """The seconds for which measurements count, as the launcher said; None: it has said nothing yet."""
        self._hear()
        return self._count_s

    def passed(self) -> None:
        """Tells the launcher that the first pass is over."""
        self._channel.send({"event": "passed"})

    def measured(self) -> None:
        """Tells the launcher that this device has measured its layers."""
        self._channel.send({"event": "measured"})

    def progress(self, done: int, of: int, what: str) -> None:
        """Tells the launcher which layer is under way."""
        self._channel.send({"event": "progress", "done": done, "of": of, "what": what})

    def link(self, request: LinkRequest) -> None:
        """Measures a link with one peer; what goes wrong is the answer's ``error`` and ends nothing else."""
        timeout_s, address = request.timeout_s, request.address
        connection = self._connection(request.peer, request.secret, 30.0)
        answer: dict[str, Any] = {"event": "link", "peer": request.peer}
        listens = request.role == "listen"
        try:
            if listens:
                port = connection.listen(address)
                self._channel.send({"event": "listening", "address": address, "port": port})
                connection.accept(timeout_s)
            else:
                connection.connect(*_place_of_peer(request), address, timeout_s)
            figures = link_speed.measure_link(connection, listens, self._device)
            connection.close(graceful=True)
            answer |= {
                "latency_s": figures.latency_s,
                "bandwidth_bytes_per_s": figures.bandwidth_bytes_per_s,
            }
            if self._cpus is not None:
                ratio = max(1.0, 1.0 / self._cpus)
                answer |= {
                    "send_byte_s": figures.send_byte_s * ratio,
                    "receive_byte_s": figures.receive_byte_s * ratio,
                }
        except (SkyctlError, RuntimeError, OSError, ValueError) as exc:
            answer["error"] = error_text(exc)
        finally:
            connection.close()
        self._channel.send(answer)

    def line(self, request: FlowRequest) -> None:
        """Takes part in a hub's flows, as the hub or a peer; what goes wrong is the answer's ``error``."""
        timeout_s, address = request.timeout_s, request.address
        connections = [
            (self._connection(pair.peer, pair.secret, request.transfer_s), _flow_spec(pair))
            for pair in request.pairs
        ]
        answer: dict[str, Any] = {"event": "line", "hub": request.hub}
        begun_s = time.process_time()
        try:
            if request.role == "hub":
                ports = [connection.listen(address) for connection, _ in connections]
                event = {"event": "line-listening", "hub": request.hub, "address": address, "ports": ports}
                self._channel.send(event)
                hold = (lambda: self._hold(request)) if request.hold else (lambda: None)
                answer["arrivals"] = link_speed.run_hub(connections, timeout_s, self._device, hold)
            else:
                ((connection, flows),) = connections
                connection.connect(*_place_of_peer(request), address, timeout_s)
                arrivals = link_speed.exchange_flows(connection, flows, None, self._device)
                answer["arrivals"] = {connection.peer: arrivals}
                connection.close(graceful=True)
            if self._cpus is not None:
                flows_s = max(at_s for times_s in answer["arrivals"].values() for at_s in times_s)
                answer["busy_share"] = (time.process_time() - begun_s) / (max(flows_s, 1e-6) * self._cpus)
        except (SkyctlError, RuntimeError, OSError, ValueError) as exc:
            answer["error"] = error_text(exc)
        finally:
            for connection, _ in connections:
                connection.close()
        self._channel.send(answer)

    def _hold(self, request: FlowRequest) -> None:
        """Waits until the launcher, which starts other flows at the same time, says go."""
        self._channel.send({"event": "line-ready", "hub": request.hub})
        got = self._channel.recv(request.timeout_s)
        if got is None or not isinstance(read_request(PROBE_REQUESTS, got[0]), GoRequest):
            raise RunError("the other flows were not ready in time")

    def _connection(self, peer: str, secret: str, timeout_s: float) -> PeerConnection:
        device = torch.device(self._device)
        return PeerConnection(peer, timeout_s, secret=secret, device=device, identity=self._identity)


def _place_of_peer(request: LinkRequest | FlowRequest) -> tuple[str, int]:
    """Host and port of the peer that this end is to connect to."""
    if request.host is None or request.port is None:
        raise RunError(f"the request to be a {request.role!r} says no host and port to connect to")
    return request.host, request.port


def _flow_spec(pair: FlowPair) -> link_speed.FlowSpec:
    return link_speed.FlowSpec(pair.messages, pair.send_bytes, pair.receive_bytes)
