"""A device's turn for each step of a script that knows nothing of it, beside runs on the same device.

A step has the turn from its first call of a ``torch.nn.Module`` to the end of its optimizer's step. A module
called without gradients (a validation) has it for the call. No turn is held while the script waits for other
ranks, as far as the step clock sees that, nor between steps, in which it loads data. On an accelerator a turn
ends when the work of the current stream has.

The turns are those of the device of the first parameter. A process that waits for others in a way that the
clock does not see keeps the turn, until that is late (``turn_policy``). Other threads than the first one that
computes, and processes forked from this one, take no turns.
"""

from __future__ import annotations

import atexit
import json
import os
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from skyctl.errors import RunError
from skyctl.torch.step_clock import StepClock, running_clock
from skyctl.turns.turn_client import NO_TURNS, DeviceTurns, NoTurns, open_turns


class StepTurns:
    """The turns of this process's steps.

    Args:
        turns: the policy, as the option's text.
        node: the name of this node: with the device's own it names the device.
        job: the run's id.
        cache: the node's cache folder.
        mark: a file that is made when the first turn is there.
    """

    def __init__(self, clock: StepClock, *, turns: str, node: str, job: str, cache: str, mark: str) -> None:
        self._clock = clock
        self._policy, self._node, self._job = turns, node, job
        self._cache, self._mark = Path(cache), Path(mark)
        self._process, self._thread = os.getpid(), 0
        self._turns: DeviceTurns | NoTurns = NO_TURNS
        self._device = torch.device("cpu")
        self._in_step = self._is_outside = self._ends_with_backward = False
        self._opened_by: nn.Module | None = None
        self._known: WeakSet[nn.Module] = WeakSet()

    def start(self) -> None:
        """Hooks into all modules and optimizers, and into the clock."""
        self._clock.turn = self
        warnings.filterwarnings("ignore", "Using `torch.compile.module.` when there are global hooks")
        register_module_forward_pre_hook(self._before_forward)
        register_module_forward_hook(self._after_forward, always_call=True)
        register_optimizer_step_pre_hook(self._before_optimizer)
        register_optimizer_step_post_hook(self._after_optimizer)

    # --- waits for other ranks, of which the clock knows

    def on_backward_computed(self) -> None:
        """Gives the turn back for as long as the backward waits for others."""
        if self._in_step and os.getpid() == self._process:
            self._pause()

    def on_backward_over(self) -> None:
        """Takes it again, if the step goes on."""
        if self._ends_with_backward:
            self._end()
        else:
            self._resume()

    @contextmanager
    def outside(self) -> Iterator[None]:
        """No turn for so long, if it is the thread that trains."""
        if not self._in_step or self._is_outside or self._is_elsewhere():
            yield
            return
        self._pause()
        try:
            yield
        finally:
            self._resume()

    def _pause(self) -> None:
        if dist.is_available() and dist.is_initialized():  # else there are no others
            self._give()
            self._is_outside = True

    def _resume(self) -> None:
        if self._is_outside:
            self._synchronize()  # a stream may wait for others after the call has returned
            self._turns.turn().__enter__()
            self._is_outside = False

    # --- steps

    def _before_forward(self, module: nn.Module, _args: Any) -> None:
        if torch.compiler.is_compiling() or self._in_step or self._is_elsewhere():
            return
        parameter = next(module.parameters(), None)
        if parameter is None:
            return  # a loss: it follows a model's forward, or it is no part of a step
        if module not in self._known:
            self._known.add(module)
            self._clock.follow(module.parameters())
        self._begin(parameter.device)
        if not torch.is_grad_enabled():
            self._opened_by = module

    def _after_forward(self, module: nn.Module, _args: Any, _output: Any) -> None:
        if torch.compiler.is_compiling() or self._opened_by is not module or self._is_elsewhere():
            return
        self._end()

    def _before_optimizer(self, _optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
        if self._is_elsewhere():
            return
        if self._thread == 0:
            raise RunError(
                "skyctl run --turns: a step has its device's turn from its first call of a torch.nn.Module, "
                "and this optimizer steps before any",
                hint="call the model as a module, or give it less priority: skyctl run -- nice -n 19 python",
            )
        self._resume()  # a backward may have raised in its last callbacks
        if not self._in_step:
            self._begin(self._device)

    def _after_optimizer(self, _optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
        if not self._in_step or self._is_elsewhere():
            return
        if torch._C._current_graph_task_id() != -1:  # it steps within the backward, of some gradients
            self._ends_with_backward = True
        else:
            self._end()

    def _is_elsewhere(self) -> bool:
        return os.getpid() != self._process or (self._thread not in {0, threading.get_ident()})

    def _begin(self, device: torch.device) -> None:
        if self._thread == 0:
            self._join(device)
        with self._clock.waiting():
            self._turns.turn().__enter__()
        self._in_step = True

    def _end(self) -> None:
        if not self._is_outside:
            self._give()
        self._in_step = self._is_outside = self._ends_with_backward = False
        self._opened_by = None

    def _join(self, device: torch.device) -> None:
        """Raises MismatchError where the device's jobs take turns by another policy; as ``open_turns``."""
        name = f"{self._node}/{device.type}:{device.index or 0}"
        self._turns = open_turns(self._policy, device=name, job_id=self._job, cache=self._cache)
        atexit.register(self._leave)
        self._device, self._thread = device, threading.get_ident()
        self._mark.touch()

    def _leave(self) -> None:
        if os.getpid() == self._process:
            self._turns.close()

    def _give(self) -> None:
        self._synchronize()
        self._turns.turn().__exit__(None, None, None)

    def _synchronize(self) -> None:
        """Not of all streams: one that sums gradients waits for other ranks."""
        if self._device.type != "cpu":
            torch.accelerator.current_stream(self._device).synchronize()


def take_turns(asked: str) -> None:
    """Has this process take turns, as ``SKYCTL_TURNS`` says: the arguments of ``StepTurns`` as JSON."""
    StepTurns(running_clock(), **json.loads(asked)).start()
