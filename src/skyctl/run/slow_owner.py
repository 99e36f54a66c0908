"""A note in rounds, where one owner has become so slow that all others wait for it."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from statistics import median

from skyctl.run.step_collector import StepCollector

SLOW_ROUNDS = 3
"""So many rounds in a row show that an owner is slow, and so many before them what it was like."""
SLOW_FACTOR = 1.5
"""An owner whose local steps, and rounds that take so many times what they took, are slow."""


class SlowOwners:
    """Names each owner that has become slow, and rounds with it, once.

    Args:
        collected: the figures of the attempt so far.
    """

    def __init__(self, collected: StepCollector) -> None:
        self._collected = collected
        self._named: set[str] = set()

    def note(self, last: int) -> str | None:
        """The note about an owner that has slowed the last rounds down, where it was not named before.

        Args:
            last: the round that has just ended.
        """
        if not self._collected.owners:
            return None
        slowest = find_slow_owner(self._collected, last)
        if slowest is None or slowest[0] in self._named:
            return None
        owner, text = slowest
        self._named.add(owner)
        return text


def find_slow_owner(collected: StepCollector, last: int) -> tuple[str, str] | None:
    """The owner that has slowed the last rounds down, and the note about it; None: none has.

    Only what an owner computes counts, by local step: so it is not those who wait for it, nor one that makes
    more local steps than before.

    Args:
        last: the round that has just ended.
    """
    rounds = range(collected.settled_steps.start, last + 1)
    took_s = {number: collected.by_rank[0][number].iteration_s for number in rounds}
    ends = pairwise((-1, *collected.last_ranks))
    slow = []
    for owner, (before, end) in zip(collected.owners, ends, strict=False):
        steps_s = _local_step_s(collected, range(before + 1, end + 1), rounds)
        made = sorted(steps_s)
        lately, earlier = made[-SLOW_ROUNDS:], made[:-SLOW_ROUNDS]
        if len(earlier) < SLOW_ROUNDS or lately[-1] != last:
            continue
        usual_s, usual_round_s = (median(of[number] for number in earlier) for of in (steps_s, took_s))
        if all(
            steps_s[number] > SLOW_FACTOR * usual_s and took_s[number] > SLOW_FACTOR * usual_round_s
            for number in lately
        ):
            now_s, round_s = (median(of[number] for number in lately) for of in (steps_s, took_s))
            slow.append((now_s / usual_s, owner, now_s, usual_s, round_s, usual_round_s))
    if not slow:
        return None
    _, owner, now_s, usual_s, round_s, usual_round_s = max(slow)
    return owner, (
        f"owner {owner} has become slow: {now_s:.2f} s a local step, {usual_s:.2f} s before; a round takes "
        f"{round_s:.2f} s, {usual_round_s:.2f} s before, as all others wait for it. Planned again with "
        "--round-deadline SECONDS, an owner whose time is up makes fewer local steps"
    )


def _local_step_s(collected: StepCollector, ranks: Sequence[int], rounds: Sequence[int]) -> dict[int, float]:
    """By round that these ranks took part in, the computing of a local step on the slowest of them."""
    seconds = {}
    for number in rounds:
        events = [collected.by_rank[rank][number] for rank in ranks]
        if all(event.local_steps for event in events):
            seconds[number] = max(event.compute_s / (event.local_steps or 1) for event in events)
    return seconds
