"""Message overhead: what a stage costs its node in addition to its layers, in CPU seconds a microbatch.

Messages have to be handled, Python runs, threads are woken up.

Under a CPU quota that time is taken from the layers: 1 ms is 10 ms on a tenth of a core. It is measured by
running the real thing in this process: three stages, each an executor in a thread of its own, over loopback
connections, with layers that sleep, so that the stages wait for each other as they do in training. What the
process's CPU clock shows beyond the layers' own is shared by the three.

Without a quota the transport's threads have another core, and only what the computing thread does itself
holds its layers up.
"""

from __future__ import annotations

import gc
import secrets
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any

import torch
from torch import Tensor, nn

from skyctl.device.device_timer import DeviceTimer, TimedResult
from skyctl.device.process_memory import give_back_freed_memory
from skyctl.errors import RunError
from skyctl.transport.peer_connection import PeerConnection
from skyctl.transport.tls_identity import TlsIdentity
from skyctl.worker.executor import Executor
from skyctl.worker.messages import MessageReceiver, MessageSender
from skyctl.worker.stage import PipelineStage
from skyctl.worker.stage_io import StageIO

STAGES = 3
MICROBATCHES = 16
STEPS = 4
"""The first is warm-up."""
SLEEP_S = 0.001
SMALL_BYTES = 4 << 10
LARGE_BYTES = 512 << 10
HOST = "127.0.0.1"
TIMEOUT_S = 60.0
_CPU = torch.device("cpu")


@dataclass(frozen=True)
class MessageOverhead:
    """Seconds of the node's time for a stage's microbatch: ``stage_s`` + a message's bytes · ``byte_s``."""

    stage_s: float
    byte_s: float


def measure_message_overhead(cpus: float | None, identity: TlsIdentity | None = None) -> MessageOverhead:
    """Measures the message overhead of this node, as it is now.

    Args:
        cpus: the CPU quota that all of this process is held to, None: none.
        identity: the TLS certificate that messages will go under, None: none.

    Raises:
        RunError: this node can't connect to itself, or not all messages arrive.
    """
    small_s, large_s = (
        _stage_overhead_s(size, identity, whole=cpus is not None) for size in (SMALL_BYTES, LARGE_BYTES)
    )
    give_back_freed_memory()
    byte_s = max(0.0, large_s - small_s) / (LARGE_BYTES - SMALL_BYTES)
    ratio = quota_ratio(cpus) or 1.0
    return MessageOverhead(max(0.0, small_s - byte_s * SMALL_BYTES) * ratio, byte_s * ratio)


def quota_ratio(cpus: float | None) -> float | None:
    """Seconds of a node under that quota for one of its CPU's; None: it has no quota."""
    return None if cpus is None else max(1.0, 1.0 / cpus)


@dataclass(frozen=True)
class _FloatSpec:
    shape: tuple[int, ...]
    dtype: str = "float32"
    requires_grad: bool = True


class _SleepLayer(nn.Module):
    """A layer that takes wall time and hardly any of the CPU's."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, values: Tensor) -> Tensor:
        time.sleep(SLEEP_S)
        return values * self.weight


class _CountingTimer(DeviceTimer):
    """Adds up what the layers' actions took of their thread's CPU time, and lets each backward sleep too."""

    def __init__(self) -> None:
        super().__init__(1.0, single_thread=True, device=_CPU)
        self.layers_s = 0.0

    def run(self, action: Any) -> TimedResult[Any]:
        timed = super().run(action)
        self.layers_s += timed.cpu_s
        time.sleep(SLEEP_S)
        return timed


class _StageThread:
    """One stage and the thread it runs in."""

    def __init__(
        self,
        number: int,
        before: PeerConnection | None,
        after: PeerConnection | None,
        width: int,
        warm: threading.Barrier,
    ) -> None:
        boundary = (_FloatSpec((1, width)),)
        self.timer = _CountingTimer()
        self.overhead_s: list[float] = []
        self._warm = warm
        self._pairs = [pair for pair in (before, after) if pair is not None]
        inputs = torch.zeros(1, width).expand(MICROBATCHES, width)  # one sample's memory for all of them
        self._batch = inputs, torch.zeros(MICROBATCHES)
        stage = PipelineStage(
            [_SleepLayer()],
            input_specs=lambda _microbatch: (
                boundary if before else (_FloatSpec((1, width), requires_grad=False),)
            ),
            input_is_tuple=False,
            output_specs=(lambda _microbatch: boundary) if after else None,
            loss_fn=None if after else lambda outputs, _targets: outputs.mean(),
        )
        self._executor = Executor(
            stage=stage,
            stage_io=_stage_ports(before, after, boundary),
            timer=self.timer,
            microbatch_sizes=[1] * MICROBATCHES,
            schedule="eager-1f1b",
            in_flight=2 * (STAGES - number) - 1,
            optimizer=None,
            is_last=after is None,
            device=_CPU,
        )

    def run(self, failures: list[Exception]) -> None:
        """Every step; what goes wrong is added to the failures, and ends the other stages too."""
        try:
            self._steps()
        except Exception as exc:  # noqa: BLE001 — raised by the one who waits
            failures.append(exc)
            self._warm.abort()
            for pair in self._pairs:
                pair.close()

    def _steps(self) -> None:
        """Notes this thread's CPU time without its layers."""
        self._executor.step(0, lambda: self._batch)
        self.timer.layers_s = 0.0
        self._warm.wait(TIMEOUT_S)
        for step in range(1, STEPS):
            cpu_s, layers_s = time.thread_time(), self.timer.layers_s
            self._executor.step(step, lambda: self._batch)
            self.overhead_s.append(time.thread_time() - cpu_s - (self.timer.layers_s - layers_s))
        self._executor.drain()


def _stage_ports(
    before: PeerConnection | None, after: PeerConnection | None, boundary: Sequence[_FloatSpec]
) -> StageIO:
    def inbox(pair: PeerConnection | None, *, backward: bool) -> MessageReceiver | None:
        if pair is None:
            return None
        return MessageReceiver(
            pair,
            lambda _microbatch: boundary,
            backward=backward,
            microbatches=MICROBATCHES,
            window=2,
            device=_CPU,
            latency_s=0.0,
        )

    def outbox(pair: PeerConnection | None, *, backward: bool, window: int | None) -> MessageSender | None:
        if pair is None:
            return None
        return MessageSender(
            pair,
            lambda _microbatch: boundary,
            backward=backward,
            microbatches=MICROBATCHES,
            window=window,
        )

    return StageIO(
        inputs=inbox(before, backward=False),
        outputs=outbox(after, backward=False, window=None),
        output_gradients=inbox(after, backward=True),
        input_gradients=outbox(before, backward=True, window=2),
    )


def _loopback_pair(identity: TlsIdentity | None) -> tuple[PeerConnection, PeerConnection]:
    """Two ends connected over loopback, with a secret of their own: others may be logged in on this node."""
    secret = secrets.token_hex(16)
    first, second = (PeerConnection("itself", TIMEOUT_S, secret=secret, identity=identity) for _ in range(2))
    return first, second


def _stage_overhead_s(message_bytes: int, identity: TlsIdentity | None, *, whole: bool) -> float:
    """CPU seconds of one microbatch of a stage without its layers, after a first step as warm-up.

    ``whole``: of the process; else of the computing thread.
    """
    connections = [_loopback_pair(identity) for _ in range(STAGES - 1)]
    stages: list[_StageThread] = []
    warm_s: list[float] = []
    warm = threading.Barrier(STAGES, action=lambda: warm_s.append(time.process_time()))
    try:
        for listening, connecting in connections:
            port = listening.listen(HOST)
            accepting = threading.Thread(target=listening.accept, args=(TIMEOUT_S,), daemon=True)
            accepting.start()
            connecting.connect(HOST, port, HOST, TIMEOUT_S)
            accepting.join(TIMEOUT_S)
        stages += [
            _StageThread(
                number,
                connections[number - 1][1] if number else None,
                connections[number][0] if number + 1 < STAGES else None,
                message_bytes // 4,
                warm,
            )
            for number in range(STAGES)
        ]
        failures: list[Exception] = []
        threads = [threading.Thread(target=one.run, args=(failures,), daemon=True) for one in stages]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(TIMEOUT_S)
        if failures:
            raise RunError(f"messages from this node to itself failed: {failures[0]}") from failures[0]
        if any(thread.is_alive() for thread in threads):
            raise RunError(f"messages from this node to itself did not all arrive within {TIMEOUT_S:.0f} s")
        if whole:
            overhead_s = time.process_time() - warm_s[0] - sum(one.timer.layers_s for one in stages)
            return overhead_s / (STAGES * (STEPS - 1) * MICROBATCHES)
        return fmean(median(one.overhead_s) for one in stages) / MICROBATCHES
    finally:
        for pair in (one for both in connections for one in both):
            pair.close()
        stages.clear()
        gc.collect()  # executors and their buffers refer to each other
