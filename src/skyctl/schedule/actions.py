"""What each device does, in which order: the one object that the simulator and the worker both play.

A schedule is a static order of forwards and backwards per stage. All here are one rule with another
number of microbatches in flight: ``in_flight − 1`` forwards, then forward and backward in turn, then the
remaining backwards (``docs/contract.md``, Order). ``zero-bubble`` cuts each backward in two: the gradients of
the inputs, which the stage before waits for, and those of the weights, which nobody does.

Sources: GPipe (Huang et al. 2019); 1F1B (PipeDream-Flush, Narayanan et al. 2021); eager 1F1B (Zhuang et
al. 2022, on overlapping slow links); zero bubble (Qi et al. 2023, section 2, ZB-H1, here with any depth).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

FORWARD = "F"
BACKWARD = "B"
WEIGHTS = "W"
OPTIMIZER = "O"

SEQUENTIAL = "sequential"
GPIPE = "gpipe"
ONE_F_ONE_B = "1f1b"
EAGER = "eager-1f1b"
ZERO_BUBBLE = "zero-bubble"
SCHEDULES = (SEQUENTIAL, GPIPE, ONE_F_ONE_B, EAGER, ZERO_BUBBLE)
DEEPER = (EAGER, ZERO_BUBBLE)
"""Those where a plan may keep more in flight than the least."""


class Action(NamedTuple):
    """A part of one microbatch (from 0): F forward, B backward, W weight gradients.

    Under ``zero-bubble`` B gives the input's gradients and W the weights'; elsewhere B does both.
    """

    kind: str
    microbatch: int


def in_flight(schedule: str, stage: int, stages: int, microbatches: int) -> int:
    """How many microbatches stage ``stage`` (from 0) of ``stages`` keeps between forward and backward.

    For ``eager-1f1b`` and ``zero-bubble`` this is the least; a plan may decide on more.

    Raises:
        ValueError: an unknown schedule, or a stage out of range.
    """
    if not 0 <= stage < stages:
        raise ValueError(f"stage {stage} is not one of {stages}")
    if schedule == SEQUENTIAL:
        return 1
    if schedule == GPIPE:
        return microbatches
    if schedule in (ONE_F_ONE_B, *DEEPER):
        return min(microbatches, stages - stage)
    raise ValueError(f"unknown schedule {schedule!r}; known: {', '.join(SCHEDULES)}")


def check_in_flight(
    schedule: str, numbers: Sequence[int], microbatches: int, weights_behind: Sequence[int] | None = None
) -> str | None:
    """What is wrong with a plan's in-flight numbers and weights_behind (one each a stage), or None.

    In-flight numbers never grow along the pipeline: a stage that waits for more forwards than the one before
    it starts without a backward would wait for ever.
    """
    for stage, number in enumerate(numbers):
        least = in_flight(schedule, stage, len(numbers), microbatches)
        if schedule in DEEPER:
            if not least <= number <= microbatches:
                return f"stage {stage} keeps {number} in flight, {schedule} allows {least} to {microbatches}"
        elif number != least:
            return f"stage {stage} keeps {number} in flight, {schedule} keeps {least}"
        if stage and number > numbers[stage - 1]:
            return f"stage {stage} keeps {number} in flight, more than the {numbers[stage - 1]} before it"
    most = microbatches - 1 if schedule == ZERO_BUBBLE else 0
    for stage, behind in enumerate(weights_behind or ()):
        if not 0 <= behind <= most:
            return (
                f"stage {stage} has its weight gradients {behind} microbatches behind, "
                f"{schedule} allows {f'0 to {most}' if most else 'none'}"
            )
    return None


def actions(schedule: str, microbatches: int, in_flight: int, weights_behind: int = 0) -> list[Action]:
    """One stage's static order: every microbatch once forward and once backward.

    Args:
        weights_behind: ``zero-bubble``: after the backward of microbatch m come the weight gradients of
            m − ``weights_behind``; what is left of them comes at the end. All in the order 0…M−1.

    Raises:
        ValueError: an unknown schedule, ``in_flight`` not within 1 … ``microbatches``, or ``weights_behind``
            not within 0 … ``microbatches`` − 1 (0 where the schedule does not cut the backward).
    """
    if schedule not in SCHEDULES:
        raise ValueError(f"unknown schedule {schedule!r}; known: {', '.join(SCHEDULES)}")
    if not 1 <= in_flight <= microbatches:
        raise ValueError(f"in_flight must be 1 to {microbatches}, it is {in_flight}")
    splits = schedule == ZERO_BUBBLE
    if not 0 <= weights_behind <= (microbatches - 1 if splits else 0):
        raise ValueError(
            f"weights_behind must be 0 to {microbatches - 1}, it is {weights_behind}"
            if splits
            else f"{schedule} has no weights_behind, it is {weights_behind}"
        )
    order = [Action(FORWARD, m) for m in range(in_flight - 1)]
    for m in range(microbatches):
        if m + in_flight <= microbatches:
            order.append(Action(FORWARD, m + in_flight - 1))
        order.append(Action(BACKWARD, m))
        if splits and m >= weights_behind:
            order.append(Action(WEIGHTS, m - weights_behind))
    if splits:
        order.extend(Action(WEIGHTS, m) for m in range(microbatches - weights_behind, microbatches))
    return order
