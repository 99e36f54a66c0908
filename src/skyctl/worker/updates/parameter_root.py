"""A parameter server: weights, their optimizer, and how far each worker is (Ho et al., SSP, NIPS 2013).

Every push is applied as it arrives, with the learning rate of its clock. A worker may begin its next clock
once the slowest is at most ``staleness`` clocks behind; it then pulls the weights as they are. So the
weights that it computes with hold every push of clocks more than ``staleness`` before its own.

After some clocks all workers meet: before validations, checkpoints and the end, all wait for each other, pull
the same weights, and nothing further is applied until the root's own worker goes on.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import nn

from skyctl.errors import RunError
from skyctl.worker.sums.summed_gradients import find_trained
from skyctl.worker.updates.clock_rates import ClockRates
from skyctl.worker.updates.lr_scheduler import LearningRateScheduler
from skyctl.workload.mixed_precision import master_of
from skyctl.workload.parameter_names import copy_name

Tensor = torch.Tensor


class Grant(NamedTuple):
    """A worker's permission to begin its next clock, told with the weights for it.

    Attributes:
        end: the last clock of the run, where it was told to end early and has not ended before; else None.
        slowest: how many of the run's clocks the slowest worker has finished.
        held_s: seconds from the arrival of its push until it might go on.
    """

    end: int | None
    slowest: int
    held_s: float


class RootWeights:
    """The weights that pushes are applied to: a copy of what the root's own worker trains with.

    Attributes:
        parameters: in the order in which workers push their gradients.
        optimizer, scheduler: of these parameters.

    Args:
        layers: all of the model's, as the root's own worker has built them.
        make_optimizer, make_scheduler: as for any other parameters.
    """

    def __init__(
        self,
        layers: Sequence[nn.Module],
        make_optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer],
        make_scheduler: Callable[[list[nn.Parameter], torch.optim.Optimizer], LearningRateScheduler],
    ) -> None:
        self._copies: dict[int, nn.Parameter] = {}
        self.parameters: list[nn.Parameter] = []
        for trained in find_trained(layers):
            copied = nn.Parameter(trained.master.detach().clone())
            copy_name(trained.master, copied)
            self._copies[id(trained.master)] = copied
            self.parameters.append(copied)
        self.optimizer = make_optimizer(self.parameters)
        self.scheduler = make_scheduler(self.parameters, self.optimizer)

    def stands_for(self, parameter: nn.Parameter) -> nn.Parameter:
        """The parameter here that one of the worker's layers is a copy of; one not trained: itself."""
        master = master_of(parameter)
        return self._copies.get(id(master), master)


class ParameterRoot:
    """The clocks and the weights; ``push`` and ``take_grant`` are called by a thread for each worker.

    Attributes:
        ended_by: the worker that was first to want the run to end; None: none has.

    Args:
        weights: as they are before clock ``first``.
        workers: their ranks.
        staleness: how many clocks a worker may be ahead of the slowest; None: any number. 0: all meet after
            every clock, and its pushes add up to one step.
        first, steps: the workers make clocks [first, steps).
        meets_after: whether all workers meet after a clock; they do after the last one in any case.
    """

    def __init__(
        self,
        weights: RootWeights,
        workers: Iterable[int],
        *,
        staleness: int | None,
        first: int,
        steps: int,
        meets_after: Callable[[int], bool] = lambda _clock: False,
    ) -> None:
        self._weights, self._staleness, self._steps, self._meets_after = (
            weights,
            staleness,
            steps,
            meets_after,
        )
        self._rates = ClockRates(weights.optimizer, weights.scheduler, first)
        self._finished = dict.fromkeys(workers, first)
        self._granted = dict(self._finished)
        self._end: int | None = None
        self.ended_by: int | None = None
        self._meeting: int | None = None
        self._is_resumed = True
        self._changed = threading.Condition()
        self._error: BaseException | None = None

    @property
    def finished(self) -> Mapping[int, int]:
        """By worker, how many of the run's clocks it has finished."""
        return dict(self._finished)

    def push(self, worker: int, clock: int, gradients: Tensor, present: bytes, *, wants_end: bool) -> None:
        """Applies a worker's gradients of a clock, as soon as no meeting holds it up.

        Args:
            gradients: of all parameters in a row, float32 in host memory; not kept.
            present: by parameter, 1 where there is a gradient.
            wants_end: it was told that the run is to end; clocks that nobody has begun are not made.

        Raises:
            RunError: the worker's next clock is another one; or what ``fail`` was told.
        """
        with self._changed:
            while self._is_held and self._error is None:
                self._changed.wait()
            self._raise()
            if clock != self._finished[worker] or clock > self._granted[worker]:
                raise RunError(f"worker {worker} has finished {self._finished[worker]} clocks, not {clock}")
            self._apply(clock, gradients, present)
            self._finished[worker] += 1
            if wants_end and self._end is None:
                self._end, self.ended_by = max(self._granted.values()), worker
            slowest = min(self._finished.values())
            self._rates.drop_before(slowest)
            if slowest == max(self._finished.values()) and self._is_meeting(slowest - 1):
                self._meeting, self._is_resumed = slowest, self._is_last(slowest - 1)
            self._changed.notify_all()

    def take_grant(self, worker: int, out: Tensor) -> Grant:
        """Waits until the worker may begin its next clock, and copies the weights for it.

        Args:
            out: where all parameters' numbers go in a row: float32 in host memory.

        Raises:
            RunError: what ``fail`` was told.
        """
        arrived = time.perf_counter()
        with self._changed:
            done = self._finished[worker]
            while not self._may_go(done) and self._error is None:
                self._changed.wait()
            self._raise()
            held_s = time.perf_counter() - arrived
            self.copy_weights(out)
            self._granted[worker] = done
            if self._meeting == done:
                self._changed.notify_all()
            return Grant(self._end, min(self._finished.values()), held_s)

    def resume(self) -> None:
        """The root's own worker goes on: nobody looks at the weights of the last meeting any more."""
        with self._changed:
            self._is_resumed = True
            self._changed.notify_all()

    def copy_weights(self, out: Tensor) -> None:
        """All parameters' numbers in a row, as float32 in host memory."""
        at = 0
        for parameter in self._weights.parameters:
            out[at : at + parameter.numel()].copy_(parameter.detach().reshape(-1))
            at += parameter.numel()

    def fail(self, error: BaseException) -> None:
        """Ends every wait with that error; the first one counts."""
        with self._changed:
            self._error = self._error or error
            self._changed.notify_all()

    def check(self) -> None:
        """Raises what ``fail`` was told, if anything."""
        with self._changed:
            self._raise()

    def is_last(self, clock: int) -> bool:
        """Whether the run ends with that clock, as far as is decided."""
        with self._changed:
            return self._is_last(clock)

    @property
    def _is_held(self) -> bool:
        """Whether a meeting goes on: somebody has not pulled, or the root's own worker not gone on."""
        if self._meeting is None:
            return False
        return not self._is_resumed or min(self._granted.values()) < self._meeting

    def _is_last(self, clock: int) -> bool:
        return clock + 1 == self._steps or clock == self._end

    def _is_meeting(self, clock: int) -> bool:
        return self._staleness == 0 or self._is_last(clock) or self._meets_after(clock)

    def _may_go(self, done: int) -> bool:
        """Whether a worker that has finished so many clocks may begin the next one."""
        if self._is_meeting(done - 1):
            needed = done
        elif self._staleness is None:
            return True
        else:
            needed = done - self._staleness
        return min(self._finished.values()) >= needed

    def _apply(self, clock: int, gradients: Tensor, present: bytes) -> None:
        at = 0
        for parameter, there in zip(self._weights.parameters, present, strict=True):
            part = gradients[at : at + parameter.numel()]
            at += parameter.numel()
            shaped = part.view(parameter.shape)
            parameter.grad = shaped.to(parameter.device, parameter.dtype) if there else None
        self._rates.set(clock)
        self._weights.optimizer.step()
        self._weights.optimizer.zero_grad(set_to_none=True)

    def _raise(self) -> None:
        if self._error is not None:
            raise self._error
