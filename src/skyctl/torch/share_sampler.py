"""Dealing a dataset's samples to ranks of unequal shares: each sample once an epoch, equally many steps."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence, Sized

import torch
from torch.utils.data import Sampler

from skyctl.errors import InputError
from skyctl.schedule.batch_shares import proportional_shares
from skyctl.torch.rank_shares import rank_and_world_size, shares


class ShareSampler(Sampler[list[int]]):
    """One rank's batches of indices, for ``DataLoader(dataset, batch_sampler=…)``.

    In each epoch every sample comes to exactly one rank, once, and all ranks have the same number of steps.
    Step k of all ranks together takes the samples [k · batch, (k + 1) · batch) of the epoch's order, which is
    ``torch.utils.data.DistributedSampler``'s for the same seed and epoch. The last step shares what is left
    in the same proportion. If that is less than one sample per rank, the last two steps share it evenly.
    Only if they would be too small as well, because the shares average less than two, the last step takes
    all of it.

    Args:
        length: number of samples.
        step_shares: samples of a step, by rank; at least 1 each.
        rank: whose batches these are.
        shuffle: a new order each epoch; False: the dataset's own.
        seed: of the order; the same on all ranks.
        drop_last: leave out the samples that fill no whole step.

    Raises:
        InputError: the dataset is too small to give each rank a sample.
    """

    def __init__(
        self,
        length: int,
        step_shares: Sequence[int],
        rank: int,
        *,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
    ) -> None:
        self.length = length
        self.step_shares = tuple(step_shares)
        self.rank = rank
        self.shuffle = shuffle
        self.seed = seed
        self.epoch = 0
        self._skipped = 0
        self._full_steps, self._last_steps = _step_sizes(length, self.step_shares, drop_last)

    def __len__(self) -> int:
        """Steps of an epoch, the same on all ranks; those that ``set_epoch`` skips are counted."""
        return self._full_steps + len(self._last_steps)

    @property
    def batch_size(self) -> int:
        """Refused: its steps have no one size, and who asks would deal these batches to the ranks again.

        Raises:
            InputError: always. ``accelerate`` would leave out samples in silence.
        """
        raise InputError(
            "these batches are one rank's already, of unequal sizes, and can't be dealt to the ranks again",
            hint="leave this DataLoader out of accelerator.prepare(), and move batches to the device there",
        )

    def set_epoch(self, epoch: int, skip: int = 0) -> None:
        """Chooses the next epoch's order, as ``DistributedSampler.set_epoch``; without it they are counted.

        Args:
            epoch: its number, the same on all ranks.
            skip: steps of it that were made before, with the same batch: a run that goes on within an epoch.
        """
        if not 0 <= skip <= len(self):
            raise InputError(
                f"can't skip {skip} steps of an epoch of {len(self)}",
                hint="pass the steps made in this epoch, not in the whole run",
            )
        self.epoch = epoch
        self._skipped = skip

    def __iter__(self) -> Iterator[list[int]]:
        """This rank's indices of one epoch, step by step; the next call gives those of the epoch after it."""
        order, skipped = self._order(), self._skipped
        self.epoch, self._skipped = self.epoch + 1, 0
        return self._batches(order, skipped)

    def _batches(self, order: torch.Tensor, skipped: int) -> Iterator[list[int]]:
        batch, begin = sum(self.step_shares), 0
        sizes = itertools.chain(itertools.repeat(batch, self._full_steps), self._last_steps)
        for step, size in enumerate(sizes):
            if step >= skipped:
                parts = self.step_shares if size == batch else proportional_shares(size, self.step_shares)
                first = begin + sum(parts[: self.rank])
                yield order[first : first + parts[self.rank]].tolist()
            begin += size

    def _order(self) -> torch.Tensor:
        if not self.shuffle:
            return torch.arange(self.length)
        generator = torch.Generator()
        generator.manual_seed(self.seed + self.epoch)
        return torch.randperm(self.length, generator=generator)


def sampler(
    dataset: Sized | int,
    batch: int | Sequence[int] | None = None,
    *,
    shuffle: bool = True,
    seed: int = 0,
    drop_last: bool = False,
) -> ShareSampler:
    """This rank's batch sampler, for ``DataLoader(dataset, batch_sampler=sampler(dataset, 64))``.

    Args:
        dataset: a dataset with a length, or its length.
        batch: samples of a step over all ranks, which are shared as ``shares(batch)``; or each rank's. Left
            out: skyctl's shares.
        shuffle: a new order each epoch; False: the dataset's own.
        seed: of the order; the same on all ranks.
        drop_last: leave out the samples that fill no whole step.

    Raises:
        InputError: the dataset has no length or is too small, or the shares don't go with the ranks.
    """
    rank, world_size = rank_and_world_size()
    step_shares = shares(batch) if batch is None or isinstance(batch, int) else tuple(batch)
    if len(step_shares) != world_size or min(step_shares) < 1:
        raise InputError(
            f"the shares {list(step_shares)} don't go with {world_size} ranks: each needs one, of at least 1",
            hint="give one number per rank, or the batch of all of them",
        )
    try:
        length = dataset if isinstance(dataset, int) else len(dataset)
    except TypeError:
        raise InputError(
            f"{type(dataset).__name__} has no length, so its samples can't be dealt",
            hint="use a dataset with len(); an iterable one has to divide its samples itself",
        ) from None
    return ShareSampler(length, step_shares, rank, shuffle=shuffle, seed=seed, drop_last=drop_last)


def _step_sizes(length: int, step_shares: tuple[int, ...], drop_last: bool) -> tuple[int, list[int]]:
    """How many whole steps an epoch has, and the samples of those that follow."""
    batch, ranks = sum(step_shares), len(step_shares)
    full, left = divmod(length, batch)
    if length < (batch if drop_last else ranks):
        raise InputError(
            f"{length} samples are too few: "
            + (f"without a last partial step one takes {batch}" if drop_last else f"there are {ranks} ranks"),
            hint="use more samples, a smaller batch, or fewer ranks",
        )
    if left == 0 or drop_last:
        return full, []
    if left >= ranks:
        return full, [left]
    both = batch + left
    return full - 1, [both - both // 2, both // 2] if both // 2 >= ranks else [both]
