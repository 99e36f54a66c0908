"""Whether other shares would make a script's steps shorter, by the times that its ranks measure."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import torch.distributed as dist

from skyctl.errors import InputError
from skyctl.schedule.batch_shares import best_shares
from skyctl.torch.rank_shares import environment_shares, rank_and_world_size
from skyctl.torch.step_clock import StepTime, running_clock

STEPS_BETWEEN = 50
"""Calls of ``step`` from one comparison of all ranks to the next."""
LEAST_GAIN = 0.05
ERRORS_OF_A_GAIN = 3.0
"""A gain has to be this many times as large as the least certain rank's error."""


@dataclass(frozen=True)
class RankTimes:
    """One rank's median over some steps.

    Args:
        samples: of a step.
        sample_s: own seconds of a step by its samples.
        error: standard error of ``sample_s``, relative.
    """

    samples: float
    sample_s: float
    error: float


class _Here:
    """This process's steps since the ranks last compared them."""

    calls = 0
    listens = False
    times: list[tuple[float, float | None]]
    printed: tuple[int, ...] | None = None


def step(samples: int | None = None) -> tuple[int, ...] | None:
    """Says when other shares would make steps shorter; call it once per step, on all ranks.

    Each rank's own computing time is measured from the second optimizer step on. At every 50th call the
    ranks compare their times per sample, which takes one small ``all_gather_object``. If other shares of the
    same batch would shorten the step by more than 5%, and by more than three times the error of measurement,
    rank 0 prints one line with these shares and both times. Nothing is changed.

    Times are taken to be in proportion to samples. If a step has a fixed part the gain is less than said, and
    the next comparison, with the new shares, comes nearer.

    Args:
        samples: this rank's samples of the step. Left out: as ``weigh`` counted them, else skyctl's share.

    Returns:
        The shares to use, by rank, the same on all ranks, as for ``sampler(dataset, shares)``; None: the
        present ones are good, or it is not yet time to compare.

    Raises:
        InputError: no optimizer has stepped, or nobody says how many samples a step has.
    """
    rank, world_size = rank_and_world_size()
    if not _Here.listens:
        _Here.times = []
        running_clock().listeners.append(_note)
        _Here.listens = True
    _Here.calls += 1
    if _Here.calls % STEPS_BETWEEN:
        return None
    if samples is None and (shares_given := environment_shares()) is not None:
        samples = shares_given[rank]
    mine = summarize(_Here.times, samples)
    _Here.times = []
    gathered: list[RankTimes | None] = [mine]
    if world_size > 1:
        gathered = [None] * world_size
        dist.all_gather_object(gathered, mine)
    complete = [times for times in gathered if times is not None]
    if len(complete) < world_size:
        raise InputError(
            f"step() has no times per sample of ranks {[r for r, t in enumerate(gathered) if t is None]}",
            hint="step a torch.optim optimizer, and use weigh(), step(samples) or shares from skyctl",
        )
    better, now_s, then_s = better_shares(complete)
    if better is not None and rank == 0 and better != _Here.printed:
        present = ",".join(f"{times.samples:g}" for times in complete)
        print(
            f"skyctl: shares {','.join(map(str, better))} would make a step's computing take {then_s:.3g} s"
            f" in the place of {now_s:.3g} s (now {present})",
            flush=True,
        )
    _Here.printed = better
    return better


def _note(time: StepTime) -> None:
    _Here.times.append((time.compute_s, time.samples))


def summarize(times: Sequence[tuple[float, float | None]], share: int | None) -> RankTimes | None:
    """One rank's times, (seconds, samples) of each step; None: there are too few, or samples are unknown.

    Args:
        times: of some steps.
        share: samples of steps that don't say theirs.
    """
    counted = [(own_s, samples or share) for own_s, samples in times]
    rates = [own_s / samples for own_s, samples in counted if samples]
    if len(rates) < 3:
        return None
    sample_s = statistics.median(rates)
    spread_s = 1.4826 * statistics.median(abs(rate - sample_s) for rate in rates)
    error = 1.2533 * spread_s / sample_s / len(rates) ** 0.5 if sample_s > 0 else 0.0
    return RankTimes(statistics.median(samples for _, samples in counted if samples), sample_s, error)


def better_shares(ranks: Sequence[RankTimes]) -> tuple[tuple[int, ...] | None, float, float]:
    """The best shares of the present batch if they gain more than noise, and the step's seconds now and then.

    The shares are None where the present ones are as good.
    """
    sample_s = [times.sample_s for times in ranks]
    now_s = max(times.samples * times.sample_s for times in ranks)
    batch = max(len(ranks), round(sum(times.samples for times in ranks)))
    best = best_shares(batch, [0.0] * len(ranks), sample_s)
    then_s = max(n * each for n, each in zip(best, sample_s, strict=True))
    least = max(LEAST_GAIN, ERRORS_OF_A_GAIN * max(times.error for times in ranks))
    return (best if now_s > then_s * (1 + least) else None), now_s, then_s
