"""The actions of each device, in their order: the simulator and the worker execute the same ones.

A schedule is a static order of forwards and backwards per stage. All of them follow one rule with different
numbers of microbatches in flight: ``in_flight − 1`` forwards, then forward and backward in turn, then the
remaining backwards (``docs/contract.md``, Order). ``zero-bubble`` splits each backward in two: the gradients
of the inputs, which the previous stage waits for, and those of the weights, which nobody waits for.

Sources: GPipe (Huang et al. 2019); 1F1B (PipeDream-Flush, Narayanan et al. 2021); eager 1F1B (Zhuang et
al. 2022, on overlapping slow links); zero bubble (Qi et al. 2023, section 2, ZB-H1, here with any depth).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

FORWARD = "F"
BACKWARD = "B"
WEIGHT_GRADIENTS = "W"
OPTIMIZER = "O"

SEQUENTIAL = "sequential"
GPIPE = "gpipe"
ONE_F_ONE_B = "1f1b"
EAGER = "eager-1f1b"
ZERO_BUBBLE = "zero-bubble"
SCHEDULES = (SEQUENTIAL, GPIPE, ONE_F_ONE_B, EAGER, ZERO_BUBBLE)
CHOSEN_DEPTH = (EAGER, ZERO_BUBBLE)
"""The schedules under which a plan may keep more microbatches in flight than the least."""


class Action(NamedTuple):
    """One step of a stage's order: ``kind`` F (forward), B (backward) or W (weight gradients).

    Microbatches count from 0. Under ``zero-bubble`` B computes the input's gradients and W the weights';
    elsewhere B computes both.
    """

    kind: str
    microbatch: int


def least_in_flight(schedule: str, stage: int, stages: int, microbatches: int) -> int:
    """How many microbatches stage ``stage`` (from 0) of ``stages`` keeps between forward and backward.

    Under ``eager-1f1b`` and ``zero-bubble`` a plan may decide on more, elsewhere the number is fixed.

    Raises:
        ValueError: an unknown schedule, or a stage out of range.
    """
    if not 0 <= stage < stages:
        raise ValueError(f"stage {stage} is not one of {stages}")
    if schedule == SEQUENTIAL:
        return 1
    if schedule == GPIPE:
        return microbatches
    if schedule in (ONE_F_ONE_B, *CHOSEN_DEPTH):
        return min(microbatches, stages - stage)
    raise ValueError(f"unknown schedule {schedule!r}; known: {', '.join(SCHEDULES)}")


def check_in_flight(
    schedule: str, numbers: Sequence[int], microbatches: int, deferred_weights: Sequence[int] | None = None
) -> str | None:
    """Returns the fault in a plan's in-flight numbers and deferred weights (one each per stage), or None.

    In-flight numbers must not grow along the pipeline: a stage that waits for more forwards than the previous
    one starts without a backward would wait for ever.
    """
    for stage, number in enumerate(numbers):
        least = least_in_flight(schedule, stage, len(numbers), microbatches)
        if schedule in CHOSEN_DEPTH:
            if not least <= number <= microbatches:
                return f"stage {stage} keeps {number} in flight, {schedule} allows {least} to {microbatches}"
        elif number != least:
            return f"stage {stage} keeps {number} in flight, {schedule} keeps {least}"
        if stage and number > numbers[stage - 1]:
            return f"stage {stage} keeps {number} in flight, more than the {numbers[stage - 1]} before it"
    most = microbatches - 1 if schedule == ZERO_BUBBLE else 0
    for stage, deferred in enumerate(deferred_weights or ()):
        if not 0 <= deferred <= most:
            return (
                f"stage {stage} has its weight gradients {deferred} microbatches behind, "
                f"{schedule} allows {f'0 to {most}' if most else 'none'}"
            )
    return None


def check_order(schedule: str, microbatches: int, in_flight: int, deferred_weights: int = 0) -> None:
    """Checks the numbers that a stage's order is made of.

    Raises:
        ValueError: an unknown schedule, ``in_flight`` not in 1 … ``microbatches``, or ``deferred_weights``
            not in 0 … ``microbatches`` − 1 (0 where the schedule does not split the backward).
    """
    if schedule not in SCHEDULES:
        raise ValueError(f"unknown schedule {schedule!r}; known: {', '.join(SCHEDULES)}")
    if not 1 <= in_flight <= microbatches:
        raise ValueError(f"in_flight must be 1 to {microbatches}, it is {in_flight}")
    splits = schedule == ZERO_BUBBLE
    if not 0 <= deferred_weights <= (microbatches - 1 if splits else 0):
        raise ValueError(
            f"deferred_weights must be 0 to {microbatches - 1}, it is {deferred_weights}"
            if splits
            else f"{schedule} has no deferred_weights, it is {deferred_weights}"
        )


def actions(schedule: str, microbatches: int, in_flight: int, deferred_weights: int = 0) -> list[Action]:
    """One stage's static order: every microbatch once forward and once backward.

    Args:
        deferred_weights: under ``zero-bubble``, how many microbatches later W comes: the backward
            of microbatch m is followed by the W of m − ``deferred_weights``, and the rest of
            them come at the end, all in the order 0…M−1.

    Raises:
        ValueError: see ``check_order``.
    """
    check_order(schedule, microbatches, in_flight, deferred_weights)
    splits = schedule == ZERO_BUBBLE
    order = [Action(FORWARD, m) for m in range(in_flight - 1)]
    for m in range(microbatches):
        if m + in_flight <= microbatches:
            order.append(Action(FORWARD, m + in_flight - 1))
        order.append(Action(BACKWARD, m))
        if splits and m >= deferred_weights:
            order.append(Action(WEIGHT_GRADIENTS, m - deferred_weights))
    if splits:
        order.extend(
            Action(WEIGHT_GRADIENTS, m) for m in range(microbatches - deferred_weights, microbatches)
        )
    return order
