"""How many local steps a pipeline makes in a round: as its first stage says, for all of its stages.

Stages that made other numbers of steps would wait for each other for ever. So none goes by its own clock, and
where the user's ``local_steps(owner, round)`` gives them other numbers, that is an error.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch

from skyctl.errors import WorkloadError
from skyctl.schedule.rounds import clients_of_round
from skyctl.worker.progress import Progress
from skyctl.worker.rank_order import RoundOptions
from skyctl.worker.stage_group import StageGroup
from skyctl.worker.updates.step_report import StepReport

OwnerSteps = Callable[[int], int]
"""Round → how many local steps an owner can make in it."""


class StepBudget:
    """One stage's part: ``begin`` with every round, ``is_spent`` before each further local step.

    Args:
        options: local steps of a round, who takes part in it, and its deadline.
        seed: the run's, by which clients are drawn.
        owner_steps: as the user's function says; None: all of a round's steps.
        clock: of the first stage, in seconds.
    """

    def __init__(
        self,
        options: RoundOptions,
        seed: int,
        stages: StageGroup,
        progress: Progress,
        owner_steps: OwnerSteps | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._options, self._seed = options, seed
        self._stages, self._progress = stages, progress
        self._owner_steps, self._clock = owner_steps, clock
        self._began = 0.0

    def begin(self, round_number: int, report: StepReport) -> int:
        """How many local steps the pipeline is to make in that round; 0: it does not take part.

        Raises:
            WorkloadError: this stage comes to another number than the first one.
            PeerLostError, PeerProtocolError: as ``StageGroup.broadcast``.
        """
        options = self._options
        steps = options.steps
        if options.owner is not None:
            if options.index not in clients_of_round(
                options.owners, options.clients, self._seed, round_number
            ):
                return 0
            if self._owner_steps is not None:
                steps = min(steps, self._owner_steps(round_number))
                self._progress.phase = f"round {round_number}, comparing how many local steps its stages make"
                if (steps_there := self._broadcast(steps, report)) != steps:
                    raise WorkloadError(
                        f"owner {options.owner} affords different numbers of local steps in round "
                        f"{round_number}: local_steps() comes to {steps} here, and to {steps_there:g} on its "
                        "first machine",
                        hint="all machines of an owner make the same steps: let local_steps(owner, round) "
                        "depend on owner and round alone",
                    )
        self._began = self._clock()
        return steps

    def is_spent(self, round_number: int, report: StepReport) -> bool:
        """Whether the round's deadline has passed, by the first stage's clock.

        Raises: as ``StageGroup.broadcast``.
        """
        if self._options.deadline_s is None:
            return False
        self._progress.phase = f"round {round_number}, hearing whether its time is over"
        is_over = self._clock() - self._began >= self._options.deadline_s
        return self._broadcast(float(is_over), report) > 0.0

    def _broadcast(self, number: float, report: StepReport) -> float:
        """The first stage's number."""
        tensor = torch.tensor([number], dtype=torch.float64)
        waited = self._stages.broadcast(tensor)
        report.idle_s += waited.idle_s
        report.transfer_s += waited.transfer_s
        return tensor.item()


def make_owner_steps(
    function: Callable[[str, int], Any] | None,
    owner: str | None,
    name: str,
    user_errors: Callable[[str], AbstractContextManager[None]],
) -> OwnerSteps | None:
    """How many local steps an owner can make in a round, as the user's ``local_steps(owner, round)`` says.

    None where there is no owner, or no such function. Raises WorkloadError, when called, where it gives no
    whole number of at least 0; ``user_errors``: names the user's line in what it raises.
    """
    if function is None or owner is None:
        return None

    def owner_steps(round_number: int) -> int:
        with user_errors("local_steps()"):
            steps = function(owner, round_number)
        if isinstance(steps, bool) or not isinstance(steps, int) or steps < 0:
            raise WorkloadError(
                f"{name}: local_steps({owner!r}, {round_number}) must give a whole number of at least 0, not "
                f"{steps!r:.80}",
                hint="how many local steps this owner can make in that round",
            )
        return steps

    return owner_steps
