"""One step without shared resources, as one pass over rounds (max-plus recurrence).

Every directed link then serves one boundary in one direction, in microbatch order, so each action's time
follows from those of actions before it in an order that depends on no time. In round n every stage runs its
last forward before backward n, from the first stage to the last, and then backward n, from the last to the
first.

With fewer microbatches in flight than a step has, rounds repeat after a transient: all times are those of a
few rounds before and the same seconds later (cyclicity of max-plus systems, Baccelli et al. 1992, chapter 3).
All later times follow from when devices and links are free and when waiting inputs have arrived; once these
repeat (found as in Brent 1980), what follows does too, and is counted instead of played. A step is a
nonexpansive function of these times, so that an error in them does not grow.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

EQUAL = 1e-10
"""Relative to a period's seconds: how near two times are that are taken for the same but for rounding."""


class PlayedStep(NamedTuple):
    """When what happened in one simulated step, in seconds.

    Attributes:
        free: by stage, when its last action but the optimizer ends.
        inputs: by stage and microbatch, when its input arrives (none at the first stage).
        gradients: the same of gradients (none at the last stage).
    """

    free: list[float]
    inputs: list[list[float]]
    gradients: list[list[float]]


def play_recurrence(
    microbatches: int,
    in_flight: Sequence[int],
    forward_s: Sequence[float],
    backward_s: Sequence[float],
    weights: tuple[Sequence[float], Sequence[int]] | None,
    ahead: Sequence[tuple[float, float]],
    back: Sequence[tuple[float, float]],
    *,
    whole: bool = True,
) -> PlayedStep:
    """One step without shared resources.

    Args:
        weights: seconds of a W and by how many microbatches it is deferred, by stage; ``backward_s`` is then
            of B alone.
        ahead: by boundary, (link seconds, latency seconds) of a forward message; ``back``: of a backward one.
        whole: play all rounds, also those that repeat; else only ``free`` is of the whole step.

    Raises:
        ValueError: in-flight numbers that grow along the pipeline.
    """
    if any(after > before for before, after in pairwise(in_flight)):
        raise ValueError(f"in-flight numbers {in_flight} make stages wait for each other for ever")
    last = len(forward_s) - 1
    weight_s, deferred = weights if weights is not None else ([0.0] * (last + 1), [0] * (last + 1))
    free, sent_ahead, sent_back = [0.0] * (last + 1), [0.0] * last, [0.0] * last  # by stage, by boundary
    inputs: list[list[float]] = [[] for _ in forward_s]
    gradients: list[list[float]] = [[] for _ in forward_s]
    stages = range(last + 1)
    forwards = list(zip(stages, in_flight, forward_s, [*ahead, (0.0, 0.0)], strict=True))
    backwards = list(zip(stages, backward_s, weight_s, deferred, [(0.0, 0.0), *back], strict=True))[::-1]
    rounds = None if whole else _RepeatedRounds(in_flight, max(deferred))
    n = 1 - in_flight[0]
    while n < microbatches:
        for s, k, seconds, (link_s, latency_s) in forwards:
            m = n + k - 1
            if not 0 <= m < microbatches:
                continue
            at = free[s]
            if s and (arrived := inputs[s][m]) > at:
                at = arrived
            at += seconds
            free[s] = at
            if s < last:
                sent = sent_ahead[s]
                sent = (at if at > sent else sent) + link_s
                sent_ahead[s] = sent
                inputs[s + 1].append(sent + latency_s)
        for s, seconds, weight, later, (link_s, latency_s) in backwards if n >= 0 else ():
            at = free[s]
            if s < last and (arrived := gradients[s][n]) > at:
                at = arrived
            at += seconds
            free[s] = at + weight if n >= later else at
            if s:
                sent = sent_back[s - 1]
                sent = (at if at > sent else sent) + link_s
                sent_back[s - 1] = sent
                gradients[s - 1].append(sent + latency_s)
        n += 1
        if rounds is not None:
            microbatches -= rounds.repeated(n, microbatches, (free, sent_ahead, sent_back), inputs)
    left_out_s = rounds.left_out_s if rounds is not None else 0.0
    return PlayedStep(
        [at + w * later + left_out_s for at, w, later in zip(free, weight_s, deferred, strict=True)],
        inputs,
        gradients,
    )


class _RepeatedRounds:
    """Finds the first rounds that repeat, and how many later ones need not be played.

    ``left_out_s``: what these take, in seconds.
    """

    def __init__(self, in_flight: Sequence[int], first: int) -> None:
        """``first``: the round from which on all are alike but for their times."""
        self.in_flight = in_flight
        self.first = first
        self.left_out_s = 0.0
        self._found = False
        self._compared_with = 0  # the round whose times are ``_before``
        self._before: list[list[float]] = []

    def repeated(
        self, done: int, microbatches: int, times: tuple[list[float], ...], inputs: list[list[float]]
    ) -> int:
        """How many rounds to leave out, after round ``done`` − 1 of a step with that many microbatches."""
        left = microbatches - self.in_flight[0] - done  # rounds in which all stages run a forward
        if self._found or left <= 0 or done <= self.first:
            return 0
        if self._before:
            seconds = times[0][0] - self._before[0][0]
            if _are_shifted(times, self._before, seconds) and _are_shifted(
                self._waiting(done, inputs), self._before[len(times) :], seconds
            ):
                period = done - self._compared_with
                self._found = True
                self.left_out_s = left // period * seconds
                return left // period * period
        if not self._before or done >= 2 * self._compared_with:
            self._compared_with = done
            self._before = [list(some) for some in (*times, *self._waiting(done, inputs))]
        return 0

    def _waiting(self, done: int, inputs: list[list[float]]) -> list[list[float]]:
        """By stage, the arrivals of inputs that no forward has used."""
        return [arrived[done + k - 1 :] for arrived, k in zip(inputs, self.in_flight, strict=True)]


def _are_shifted(times: Sequence[list[float]], before: Sequence[list[float]], seconds: float) -> bool:
    """Whether all times are later by that many seconds, but for rounding."""
    within = EQUAL * seconds
    for some, earlier in zip(times, before, strict=False):
        for a, b in zip(some, earlier, strict=True):
            if not -within <= a - b - seconds <= within:
                return False
    return True
