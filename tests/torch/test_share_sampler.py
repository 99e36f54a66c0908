import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from skyctl.errors import InputError
from skyctl.torch import ShareSampler, sampler

SHARES = st.lists(st.integers(1, 9), min_size=1, max_size=6)


def deal(length, shares, epoch=0, skip=0, **options):
    """Each rank's batches of an epoch."""
    dealt = []
    for rank in range(len(shares)):
        sampler = ShareSampler(length, shares, rank, **options)
        sampler.set_epoch(epoch, skip)
        batches = list(sampler)
        assert len(batches) == len(sampler) - skip
        dealt.append(batches)
    return dealt


@settings(max_examples=2000, deadline=None)
@given(SHARES, st.integers(0, 150), st.booleans())
def test_an_epoch_deals_each_sample_once_in_equally_many_steps(shares, more, shuffle):
    length, batch = len(shares) + more, sum(shares)
    dealt = deal(length, shares, epoch=3, shuffle=shuffle)
    assert sorted(i for batches in dealt for indices in batches for i in indices) == list(range(length))
    steps = len(dealt[0])
    assert {len(batches) for batches in dealt} == {steps}
    assert steps in (length // batch, math.ceil(length / batch))
    for step in range(steps):
        sizes = [len(batches[step]) for batches in dealt]
        assert min(sizes) >= 1
        if step < steps - 2 or length % batch == 0:
            assert sizes == shares
        elif max(n - share for n, share in zip(sizes, shares, strict=True)) > 0:
            assert batch < 2 * len(shares)  # the only case in which a rank takes more than its share
            assert sum(sizes) < batch + len(shares)


@settings(max_examples=500, deadline=None)
@given(SHARES, st.integers(0, 150), st.integers(0, 40))
def test_an_epoch_goes_on_after_the_steps_that_were_made(shares, more, skip):
    length = len(shares) + more
    whole = deal(length, shares, epoch=5, seed=2)
    skip = min(skip, len(whole[0]))
    assert deal(length, shares, epoch=5, seed=2, skip=skip) == [batches[skip:] for batches in whole]


@settings(max_examples=500, deadline=None)
@given(SHARES, st.integers(0, 150))
def test_without_the_last_step_all_steps_are_whole(shares, more):
    length, batch = sum(shares) + more, sum(shares)
    dealt = deal(length, shares, drop_last=True)
    for batches, share in zip(dealt, shares, strict=True):
        assert [len(indices) for indices in batches] == [share] * (length // batch)
    flat = [i for batches in dealt for indices in batches for i in indices]
    assert len(flat) == len(set(flat)) == length // batch * batch


def test_a_step_takes_the_samples_of_a_distributed_sampler_with_the_same_seed_and_epoch():
    theirs = []
    for rank in range(4):
        sampler = DistributedSampler(range(64), num_replicas=4, rank=rank, seed=3)
        sampler.set_epoch(2)
        theirs.append(list(sampler))
    dealt = deal(64, [8, 4, 2, 2], epoch=2, seed=3)
    for step in range(4):
        ours = {i for batches in dealt for i in batches[step]}
        assert ours == {i for own in theirs for i in own[4 * step : 4 * step + 4]}


def test_epochs_differ_and_are_the_same_each_time():
    assert deal(20, [3, 1], epoch=1) == deal(20, [3, 1], epoch=1)
    assert deal(20, [3, 1], epoch=1) != deal(20, [3, 1], epoch=2)
    assert deal(20, [3, 1], epoch=1, seed=1) == deal(20, [3, 1], epoch=2)  # seed + epoch, as torch's


def test_epochs_are_counted_where_nobody_sets_them():
    sampler, other = ShareSampler(20, [3, 1], 0), ShareSampler(20, [3, 1], 0)
    other.set_epoch(1)
    assert list(sampler) != list(other) == list(sampler)


def test_a_skip_counts_once():
    sampler = ShareSampler(20, [3, 1], 0)
    sampler.set_epoch(1, skip=2)
    assert len(list(sampler)) == 3
    assert len(list(sampler)) == 5
    with pytest.raises(InputError, match="can't skip 6 steps of an epoch of 5"):
        sampler.set_epoch(1, skip=6)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_data_loader_takes_it_as_its_batch_sampler(monkeypatch, workers):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("SKYCTL_SHARES", "5,3")
    dataset = TensorDataset(torch.arange(20))
    dealt = sampler(dataset, 8, shuffle=False)
    with_workers = {"num_workers": workers, "multiprocessing_context": "fork"} if workers else {}
    batches = [x.tolist() for (x,) in DataLoader(dataset, batch_sampler=dealt, **with_workers)]
    assert batches == [[5, 6, 7], [13, 14, 15], [19]]
    assert list(sampler(20, [4, 4], shuffle=False)) == [[4, 5, 6, 7], [12, 13, 14, 15], [18, 19]]


def test_what_can_not_be_dealt_is_refused(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(InputError, match="1 samples are too few: there are 2 ranks"):
        sampler(1, 8)
    with pytest.raises(InputError, match="7 samples are too few: without a last partial step one takes 8"):
        sampler(7, 8, drop_last=True)
    with pytest.raises(InputError, match="has no length"):
        sampler(iter([1, 2]), 8)
    for shares in ([3], [3, 0], [1, 2, 3]):
        with pytest.raises(InputError, match="don't go with 2 ranks"):
            sampler(20, shares)


def test_who_would_deal_its_batches_again_is_refused():
    """accelerate asks a batch sampler for its size before it gives each rank a part of its batches."""
    with pytest.raises(InputError, match="can't be dealt to the ranks again"):
        getattr(ShareSampler(20, [3, 1], 0), "batch_size", None)
