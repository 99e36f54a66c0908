"""What each device does, in which order: the one object that the simulator and the worker both play.

A schedule is a static order of forwards and backwards per stage. All four here are one rule with another
number of microbatches in flight: ``in_flight − 1`` forwards, then forward and backward in turn, then the
remaining backwards (``docs/contract.md``, Order).

Sources: GPipe (Huang et al. 2019); 1F1B (PipeDream-Flush, Narayanan et al. 2021); eager 1F1B (Zhuang et
al. 2022, on overlapping slow links).
"""

from __future__ import annotations

from typing import NamedTuple

FORWARD = "F"
BACKWARD = "B"
OPTIMIZER = "O"

SEQUENTIAL = "sequential"
GPIPE = "gpipe"
ONE_F_ONE_B = "1f1b"
EAGER = "eager-1f1b"
SCHEDULES = (SEQUENTIAL, GPIPE, ONE_F_ONE_B, EAGER)


class Action(NamedTuple):
    """One forward or backward of one microbatch (from 0)."""

    kind: str
    microbatch: int


def in_flight(schedule: str, stage: int, stages: int, microbatches: int) -> int:
    """How many microbatches stage ``stage`` (from 0) of ``stages`` keeps between forward and backward.

    For ``eager-1f1b`` this is the least; a plan may decide on more.

    Raises:
        ValueError: an unknown schedule, or a stage out of range.
    """
    if not 0 <= stage < stages:
        raise ValueError(f"stage {stage} is not one of {stages}")
    if schedule == SEQUENTIAL:
        return 1
    if schedule == GPIPE:
        return microbatches
    if schedule in (ONE_F_ONE_B, EAGER):
        return min(microbatches, stages - stage)
    raise ValueError(f"unknown schedule {schedule!r}; known: {', '.join(SCHEDULES)}")


def check_in_flight(schedule: str, numbers: list[int], microbatches: int) -> str | None:
    """What is wrong with a plan's in-flight numbers (one a stage), or None.

    They never grow along the pipeline: a stage that waits for more forwards than the one before it starts
    without a backward would wait for ever.
    """
    for stage, number in enumerate(numbers):
        least = in_flight(schedule, stage, len(numbers), microbatches)
        if schedule == EAGER:
            if not least <= number <= microbatches:
                return f"stage {stage} keeps {number} in flight, {schedule} allows {least} to {microbatches}"
        elif number != least:
            return f"stage {stage} keeps {number} in flight, {schedule} keeps {least}"
        if stage and number > numbers[stage - 1]:
            return f"stage {stage} keeps {number} in flight, more than the {numbers[stage - 1]} before it"
    return None


def actions(schedule: str, microbatches: int, in_flight: int) -> list[Action]:
    """One stage's static order: every microbatch once forward and once backward.

    Raises:
        ValueError: an unknown schedule, or ``in_flight`` not within 1 … ``microbatches``.
    """
    if schedule not in SCHEDULES:
        raise ValueError(f"unknown schedule {schedule!r}; known: {', '.join(SCHEDULES)}")
    if not 1 <= in_flight <= microbatches:
        raise ValueError(f"in_flight must be 1 to {microbatches}, it is {in_flight}")
    warm_up = in_flight - 1
    order = [Action(FORWARD, m) for m in range(warm_up)]
    for m in range(microbatches - warm_up):
        order.append(Action(FORWARD, m + warm_up))
        order.append(Action(BACKWARD, m))
    order.extend(Action(BACKWARD, m) for m in range(microbatches - warm_up, microbatches))
    return order
