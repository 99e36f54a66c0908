"""Each step's own computing time, without waiting for other ranks, of a script that knows nothing of it.

A step ends when the first optimizer that stepped has stepped again; ``torch.optim``'s global hooks tell it.
From the time between two ends the clock takes off what was spent waiting for other ranks:

- from the end of a backward's computing to the end of its callbacks, in which DDP waits for its sums;
- in ``Work.wait``, by which every blocking collective of ``torch.distributed`` waits;
- in DDP's broadcasts of buffers and of the order of gradients, before a forward.

Everything else counts as the rank's own: loading data, forward, backward, clipping, the optimizer, logging.
Sums that overlap with a backward are not taken off. On an accelerator the times are those of events on its
stream. A step that the optimizer skips, as under a ``GradScaler``, counts as part of the next one.
"""

from __future__ import annotations

import atexit
import fcntl
import json
import os
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils.weak import WeakIdKeyDictionary

from skyctl.torch.rank_shares import asked_batch

STEP_TIMES = "SKYCTL_STEP_TIMES"
"""The environment variable that names the file of step times."""
STEPS_WRITTEN_AT_ONCE = 50
SECONDS_BETWEEN_WRITES = 0.5


@dataclass(frozen=True)
class StepTime:
    """One step of this rank: its number, from 1 (the first is not timed), its own seconds, its samples.

    ``samples`` is None where nobody counts them (``weigh`` does).
    """

    step: int
    compute_s: float
    samples: float | None


class Stamp(Protocol):
    """A point of time in the order of the device's work."""

    def is_over(self) -> bool:
        """Whether the device has got there."""

    def seconds_to(self, later: Any) -> float:
        """From here to a later stamp of the same kind, once both are over."""


@dataclass(frozen=True)
class HostStamp:
    """A point of time of the calling thread."""

    at_s: float = field(default_factory=time.perf_counter)

    def is_over(self) -> bool:
        """Always: it is taken when it happens."""
        return True

    def seconds_to(self, later: HostStamp) -> float:
        """Seconds from here to the later one."""
        return later.at_s - self.at_s


class DeviceStamp:
    """A point of an accelerator's current stream."""

    def __init__(self, device: torch.device) -> None:
        self._event = torch.Event(device, enable_timing=True)
        self._event.record()

    def is_over(self) -> bool:
        """Whether the stream has got there."""
        return bool(self._event.query())

    def seconds_to(self, later: DeviceStamp) -> float:
        """Seconds from here to the later one, on the stream."""
        return float(self._event.elapsed_time(later._event)) / 1000.0


class StepTurn(Protocol):
    """A device's turn that a step holds while it computes, and not while it waits for other ranks."""

    def on_backward_computed(self) -> None:
        """The backward waits for others from now on, where there are any."""

    def on_backward_over(self) -> None:
        """The backward waits for others no longer."""

    def outside(self) -> AbstractContextManager[None]:
        """Around a wait of the calling thread."""


class _NoTurn:
    """The device is nobody else's."""

    def on_backward_computed(self) -> None:
        """Does nothing: there is no turn to give back."""

    def on_backward_over(self) -> None:
        """Does nothing: there is no turn to take."""

    def outside(self) -> AbstractContextManager[None]:
        return nullcontext()


@dataclass
class _Step:
    """A step that goes on, or whose stamps the device has not got to yet."""

    number: int
    begin: Stamp
    waits: list[tuple[Stamp, Stamp]] = field(default_factory=list)
    samples: float | None = None
    end: Stamp | None = None


class StepClock:
    """Times this process's steps from its first optimizer step on; ``listeners`` are told of each.

    ``turn`` is given back for as long as a step waits for other ranks.

    Nothing that the script computes is changed. There is one per process: ``running_clock`` gives it.
    """

    def __init__(self) -> None:
        self.listeners: list[Callable[[StepTime], None]] = []
        self.turn: StepTurn = _NoTurn()
        self._first_optimizer: weakref.ref[Optimizer] | None = None
        self._hooked: Any = WeakIdKeyDictionary()
        self._steps = 0
        self._current: _Step | None = None
        self._ended: deque[_Step] = deque()
        self._take_stamp: Callable[[], Stamp] = HostStamp
        self._thread = 0
        self._in_backward = self._in_backward_end = False
        self._is_waiting = False
        self._undo: list[Callable[[], object]] = []

    def start(self) -> None:
        """Hooks into all optimizers, and into the calls that wait for other ranks."""
        self._undo += [
            register_optimizer_step_pre_hook(self._before_step).remove,
            register_optimizer_step_post_hook(self._after_step).remove,
        ]
        if dist.is_available():
            self._time_waits_of(dist.Work, "wait")
            self._time_waits_of(dist, "_broadcast_coalesced")
            self._time_waits_of(torch._C._distributed_c10d.Reducer, "_rebuild_buckets")

    def stop(self) -> None:
        """Takes all hooks away again."""
        for undo in reversed(self._undo):
            undo()
        for handle in list(self._hooked.values()):
            handle.remove()
        self._undo.clear()
        self._hooked = WeakIdKeyDictionary()
        self._current = None

    def add_samples(self, samples: float) -> None:
        """Counts samples to the step that goes on."""
        if self._current is not None:
            self._current.samples = (self._current.samples or 0.0) + samples

    def _time_waits_of(self, owner: Any, name: str) -> None:
        original = getattr(owner, name)

        def timed(*args: Any, **kwargs: Any) -> Any:
            with self.waiting():
                return original(*args, **kwargs)

        setattr(owner, name, timed)
        self._undo.append(lambda: setattr(owner, name, original))

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """The calling thread waits for others; only the one that trains counts, and no wait twice."""
        step = self._current
        if step is None or self._is_waiting or self._in_backward_end or threading.get_ident() != self._thread:
            with self.turn.outside():
                yield
            return
        self._is_waiting, begin = True, self._take_stamp()
        try:
            with self.turn.outside():
                yield
        finally:
            self._is_waiting = False
            step.waits.append((begin, self._take_stamp()))

    def _before_step(self, optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
        self._in_backward = self._in_backward_end = False  # of a backward that raised
        for group in optimizer.param_groups:
            self.follow(group["params"])

    def follow(self, parameters: Iterable[Any]) -> None:
        """Sees from now on when backwards that give these gradients have computed them."""
        for parameter in parameters:
            if parameter.requires_grad and parameter not in self._hooked:
                hook = parameter.register_post_accumulate_grad_hook(self._on_gradient)
                self._hooked[parameter] = hook

    def _after_step(self, optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
        first = self._first_optimizer and self._first_optimizer()
        if first is None:
            self._first_optimizer = weakref.ref(optimizer)
            self._thread = threading.get_ident()
            self._take_stamp = _stamp_function(optimizer)
        elif first is not optimizer:
            return
        stamp = self._take_stamp()
        if self._current is not None:
            self._current.end = stamp
            self._ended.append(self._current)
        self._steps += 1
        self._current = _Step(self._steps, stamp)
        self._tell()

    def _tell(self) -> None:
        """Tells of all steps that the device has ended."""
        while self._ended and self._ended[0].end is not None and self._ended[0].end.is_over():
            step = self._ended.popleft()
            waited_s = sum(begin.seconds_to(end) for begin, end in step.waits)
            compute_s = max(0.0, step.begin.seconds_to(step.end) - waited_s)
            for listener in tuple(self.listeners):
                listener(StepTime(step.number, compute_s, step.samples))

    def _on_gradient(self, _parameter: torch.Tensor) -> None:
        """A backward's first gradient is there. DDP's wait is a callback that is made later than this one."""
        if not self._in_backward:
            self._in_backward = True
            torch.autograd.Variable._execution_engine.queue_callback(self._on_backward_computed)

    def _on_backward_computed(self) -> None:
        """All gradients are computed; what other callbacks there are comes next, then the one made here."""
        if self._in_backward_end:
            return  # an optimizer that steps within the backward had another one made
        step, begin = self._current, self._take_stamp()
        self._in_backward_end = True
        self.turn.on_backward_computed()

        def on_callbacks_over() -> None:
            self._in_backward = self._in_backward_end = False
            self.turn.on_backward_over()
            if step is not None:
                step.waits.append((begin, self._take_stamp()))

        torch.autograd.Variable._execution_engine.queue_callback(on_callbacks_over)


class StepTimesFile:
    """Appends each step to a file, as a line of JSON.

    ``{"step": k, "compute_s": s, "samples": n or null, "batch": N or null}``, N being the samples over all
    ranks that the script has asked its share of.

    The first lines are written at once, later ones at most twice a second. One process at a time writes a
    file, the first that steps: its children, and what else inherits the environment, don't.

    Raises:
        OSError: the file can't be opened.
        BlockingIOError: another process writes it.
    """

    def __init__(self, path: str) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BaseException:
            os.close(self._file)
            raise
        self._process = os.getpid()
        self._lines: list[str] = []
        self._written_at_s = 0.0

    def add(self, step: StepTime) -> None:
        """Takes one step, and writes what is due."""
        line = {
            "step": step.step,
            "compute_s": round(step.compute_s, 9),
            "samples": step.samples,
            "batch": asked_batch(),
        }
        self._lines.append(json.dumps(line) + "\n")
        due = time.monotonic() - self._written_at_s >= SECONDS_BETWEEN_WRITES
        if due or step.step <= STEPS_WRITTEN_AT_ONCE:
            self.flush()

    def flush(self) -> None:
        """Writes all lines that are not yet written."""
        if self._lines and os.getpid() == self._process:
            os.write(self._file, "".join(self._lines).encode())
            self._written_at_s = time.monotonic()
        self._lines.clear()

    def close(self) -> None:
        """Writes what is left, and lets others write."""
        self.flush()
        os.close(self._file)


class _Here:
    """This process's clock."""

    clock: StepClock | None = None


def running_clock() -> StepClock:
    """This process's clock, started if it did not run yet."""
    if _Here.clock is None:
        _Here.clock = StepClock()
        _Here.clock.start()
    return _Here.clock


def count_samples(samples: float) -> None:
    """Counts samples to the step that goes on, if the clock runs."""
    if _Here.clock is not None:
        _Here.clock.add_samples(samples)


def write_step_times(path: str) -> None:
    """Starts the clock, and appends this process's steps to a file, which is opened at its first step."""
    file: StepTimesFile | None = None

    def add(step: StepTime) -> None:
        nonlocal file
        if file is None:
            file = _open_step_times(path)
            if file is None:
                running_clock().listeners.remove(add)
                return
            atexit.register(file.flush)
        file.add(step)

    running_clock().listeners.append(add)


def _open_step_times(path: str) -> StepTimesFile | None:
    """The file; None: it can't be written, which a line on standard error says, or another process does."""
    try:
        return StepTimesFile(path)
    except BlockingIOError:
        return None  # another process of this rank trains, too, and began before
    except OSError as error:
        print(f"skyctl: step times can't be written: {error}", file=sys.stderr)
        return None


def _stamp_function(optimizer: Optimizer) -> Callable[[], Stamp]:
    """How points of time are taken on the device of an optimizer's first parameter."""
    device = next((p.device for group in optimizer.param_groups for p in group["params"]), None)
    if device is None or device.type in {"cpu", "meta"}:
        return HostStamp
    try:
        DeviceStamp(device).is_over()
    except (RuntimeError, NotImplementedError):  # a kind without timed events: its work is waited for

        def waited() -> HostStamp:
            torch.accelerator.synchronize(device)
            return HostStamp()

        return waited
    return lambda: DeviceStamp(device)
