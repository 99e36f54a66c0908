"""Message overhead: what a stage costs its node in addition to its layers, a microbatch and a step.

Messages have to be handled, Python runs, threads are woken up; and a step is begun, ended and told of: what
lies between the last action of a step and the first of the next is so much more than between two others.

That time is taken from the layers: 1 ms is 10 ms on a tenth of a core, or on one that ten nodes share. It is
measured by running the real thing in this process: three stages, each a training loop in a thread of its own,
over loopback connections, with layers that sleep, so that the stages wait for each other as they do in
training. The three share the time that the process's CPU clock shows beyond the layers' own. How much wall
time goes by for that is known from the layers: here more threads than in training wait for Python's lock and
for a core, and equal nodes came to seconds that differed fivefold.
"""

from __future__ import annotations

import gc
import itertools
import os
import secrets
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from skyctl.agent.frames import write_frame
from skyctl.device.device_timer import DeviceTimer, TimedResult
from skyctl.device.process_memory import give_back_freed_memory
from skyctl.errors import RunError
from skyctl.probe.node.loopback_ranks import LoopbackRanks
from skyctl.transport import BACKEND
from skyctl.transport.planned_process_group import PlannedProcessGroup
from skyctl.transport.tls_identity import TlsIdentity
from skyctl.worker.batches.sample_batches import Prefetcher
from skyctl.worker.peer import Peer
from skyctl.worker.pipeline.executor import Executor
from skyctl.worker.pipeline.layer_seeder import LayerSeeder
from skyctl.worker.pipeline.messages import MessageReceiver, MessageSender
from skyctl.worker.pipeline.stage import PipelineStage
from skyctl.worker.pipeline.stage_io import StageIO
from skyctl.worker.progress import Progress
from skyctl.worker.training_loop import TrainingLoop
from skyctl.worker.updates.lr_scheduler import LearningRateScheduler
from skyctl.worker.updates.stage_update import StageUpdate
from skyctl.worker.updates.update_rules import EachStep
from skyctl.workload.recipe import Recipe

STAGES = 3
MICROBATCHES = 16
STEPS = 5
"""The first is warm-up."""
SLEEP_S = 0.001
SMALL_BYTES = 4 << 10
LARGE_BYTES = 512 << 10
TIMEOUT_S = 60.0
_CPU = torch.device("cpu")


@dataclass(frozen=True)
class MessageOverhead:
    """Seconds of the node's time for a stage's microbatch: ``stage_s`` + a message's bytes · ``byte_s``;
    and, once a step, ``step_s``."""

    stage_s: float
    byte_s: float
    step_s: float


def measure_message_overhead(
    ratio: float, identity: TlsIdentity | None = None, backend: str = BACKEND
) -> MessageOverhead:
    """Measures the message overhead of this node, as it is now.

    Args:
        ratio: seconds of the node for one of its processors'.
        identity: the TLS certificate that messages will go under, None: none.
        backend: what carries them: ``skyctl`` or ``gloo``.

    Raises:
        RunError: this node can't connect to itself, or not all messages arrive.
    """
    small, large = (_measure_overhead(size, identity, backend) for size in (SMALL_BYTES, LARGE_BYTES))
    give_back_freed_memory()
    byte_s = max(0.0, large.stage_s - small.stage_s) / (LARGE_BYTES - SMALL_BYTES)
    stage_s = max(0.0, small.stage_s - byte_s * SMALL_BYTES)
    return MessageOverhead(stage_s * ratio, byte_s * ratio, small.step_s * ratio)


@dataclass(frozen=True)
class _FloatSpec:
    shape: tuple[int, ...]
    dtype: str = "float32"
    requires_grad: bool = True


class _SleepLayer(nn.Module):
    """A layer that takes wall time and hardly any of the CPU's."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones((), dtype=torch.float32))

    def forward(self, values: Tensor) -> Tensor:
        time.sleep(SLEEP_S)
        return values * self.weight


class _CountingTimer(DeviceTimer):
    """Notes its thread's CPU time in the layers' actions and between them; lets a backward sleep, too."""

    def __init__(self) -> None:
        super().__init__(1.0, single_thread=True, device=_CPU)
        self.layers_s = 0.0
        self.gaps_s: list[float] = []
        """Before each action so far, but for the very first."""
        self._ended_s: float | None = None

    def run(self, action: Any) -> TimedResult[Any]:
        if self._ended_s is not None:
            self.gaps_s.append(time.thread_time() - self._ended_s)

        def action_and_sleep() -> Any:
            result = action()
            time.sleep(SLEEP_S)
            return result

        timed = super().run(action_and_sleep)
        self.layers_s += timed.cpu_s
        self._ended_s = time.thread_time()
        return timed


class _StageThread:
    """One stage and the thread it runs in."""

    def __init__(
        self,
        number: int,
        before: Peer | None,
        after: Peer | None,
        width: int,
        warm: threading.Barrier,
    ) -> None:
        boundary = (_FloatSpec((1, width)),)
        self.timer = _CountingTimer()
        self._is_warm = False
        self._warm = warm
        self._pairs = [pair for pair in (before, after) if pair is not None]
        # one sample's memory for all of them
        inputs = torch.zeros(1, width, dtype=torch.float32).expand(MICROBATCHES, width)
        self._batch = inputs, torch.zeros(MICROBATCHES, dtype=torch.float32)
        seeder = LayerSeeder(0, number, _CPU)
        stage = PipelineStage(
            [_SleepLayer()],
            input_specs=lambda _microbatch: (
                boundary if before else (_FloatSpec((1, width), requires_grad=False),)
            ),
            output_specs=(lambda _microbatch: boundary) if after else None,
            loss_fn=None if after else lambda outputs, _targets: outputs.mean(),
            before_layer=seeder,
        )
        recipe = Recipe(total_steps=STEPS)
        progress = Progress()
        executor = Executor(
            stage=stage,
            stage_io=_stage_ports(before, after, boundary),
            timer=self.timer,
            microbatch_sizes=[1] * MICROBATCHES,
            schedule="eager-1f1b",
            in_flight=2 * (STAGES - number) - 1,
            rule=EachStep(StageUpdate(None, self.timer, progress)),
            progress=progress,
            is_last=after is None,
            device=_CPU,
        )
        self._loop = TrainingLoop(
            executor,
            executor,
            recipe,
            LearningRateScheduler(None, recipe),
            seeder,
            self._end_step,
            stop_requested=None,
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
        with Path(os.devnull).open("wb", buffering=0) as self._sink:
            self._loop.run(Prefetcher(itertools.repeat(self._batch)), 0, STEPS)
        self._loop.executor.drain()

    def _end_step(self, event: dict[str, Any]) -> None:
        """Tells of a step as a rank does; the end of the first is waited for on all stages."""
        write_frame(self._sink, event)
        if not self._is_warm:
            self._is_warm = True
            self._warm.wait(TIMEOUT_S)

    def once_s(self) -> float:
        """Seconds of this thread's CPU time that come once a step, the warm-up left out."""
        actions = 2 * MICROBATCHES
        gaps_s = self.timer.gaps_s[actions - 1 :]  # from the last action of the warm-up on
        steps = [gaps_s[at : at + actions] for at in range(0, len(gaps_s), actions)]
        return max(0.0, median(step[0] - fmean(step[1:]) for step in steps))


def _stage_ports(before: Peer | None, after: Peer | None, boundary: Sequence[_FloatSpec]) -> StageIO:
    def inbox(pair: Peer | None, *, backward: bool) -> MessageReceiver | None:
        if pair is None:
            return None
        return MessageReceiver(
            pair,
            lambda _microbatch: boundary,
            backward=backward,
            microbatches=MICROBATCHES,
            window=2,
            device=_CPU,
        )

    def outbox(pair: Peer | None, *, backward: bool, window: int | None) -> MessageSender | None:
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


def _peer(group: PlannedProcessGroup, rank: int) -> Peer | None:
    return Peer(group, rank) if rank in group.peers else None


def _measure_overhead(message_bytes: int, identity: TlsIdentity | None, backend: str) -> MessageOverhead:
    """The overhead of a stage with messages of that size, in CPU seconds; ``byte_s`` is left at 0."""
    ranks = LoopbackRanks(STAGES, secrets.token_hex(16), backend, identity, TIMEOUT_S)
    ends = {
        number: [end for end in (number - 1, number + 1) if 0 <= end < STAGES] for number in range(STAGES)
    }
    store: Any = dist.HashStore()  # type: ignore[attr-defined] # not in torch's stubs
    groups = ranks.connect(store, ends)
    stages: list[_StageThread] = []
    warm_s: list[float] = []

    def warmed_up() -> None:
        warm_s.append(time.process_time() - sum(stage.timer.layers_s for stage in stages))

    warm = threading.Barrier(STAGES, action=warmed_up)
    try:
        for number, group in groups.items():
            before, after = (_peer(group, end) for end in (number - 1, number + 1))
            stages.append(_StageThread(number, before, after, message_bytes // 4, warm))
        failures: list[Exception] = []
        threads = [threading.Thread(target=stage.run, args=(failures,), daemon=True) for stage in stages]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(TIMEOUT_S)
        if failures:
            raise RunError(f"messages from this node to itself failed: {failures[0]}") from failures[0]
        if any(thread.is_alive() for thread in threads):
            raise RunError(f"messages from this node to itself did not all arrive within {TIMEOUT_S:.0f} s")
        once_s = fmean(stage.once_s() for stage in stages)
        layers_s = sum(stage.timer.layers_s for stage in stages)
        step_s = (time.process_time() - layers_s - warm_s[0]) / (STAGES * (STEPS - 1))
        return MessageOverhead(max(0.0, step_s - once_s) / MICROBATCHES, 0.0, once_s)
    finally:
        for group in groups.values():
            group.close()
        stages.clear()
        groups.clear()
        gc.collect()  # executors and their buffers refer to each other
