"""The toy accelerator keeps what it promises: counted memory, late copies, no use before its event."""

from __future__ import annotations

import copy
import gc
from collections.abc import Iterator

import pytest
import torch
from torch import nn

TOY = torch.device("toy:0")
UNWRITTEN = 0xEE


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    """Nothing waits on a stream when the next test begins."""
    yield
    gc.collect()
    torch.accelerator.synchronize(TOY)


def side_stream() -> torch.Stream:
    return torch.Stream(TOY)


def pinned(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.uint8).pin_memory()


def test_memory_is_counted_and_ends() -> None:
    before = torch.accelerator.memory_allocated(TOY)
    torch.accelerator.reset_peak_memory_stats(TOY)
    values = torch.zeros(1 << 20, device=TOY)
    assert torch.accelerator.memory_allocated(TOY) == before + (4 << 20)
    free, total = torch.accelerator.get_memory_info(TOY)
    assert total - free == before + (4 << 20)
    del values
    assert torch.accelerator.memory_allocated(TOY) == before
    assert torch.accelerator.max_memory_allocated(TOY) == before + (4 << 20)
    with pytest.raises(torch.OutOfMemoryError, match=r"toy accelerator out of memory"):
        torch.empty(total + 1, dtype=torch.uint8, device=TOY)


def test_a_copy_to_the_host_is_made_when_it_is_waited_for() -> None:
    values, host = torch.full((8,), 3, dtype=torch.uint8, device=TOY), pinned(8)
    host.copy_(values, non_blocking=True)
    event = torch.accelerator.current_stream(TOY).record_event()
    assert not event.query()
    event.synchronize()
    assert host.tolist() == [3] * 8
    other = pinned(8)
    other.copy_(values, non_blocking=True)
    assert other.tolist() == [UNWRITTEN] * 8
    torch.accelerator.synchronize(TOY)
    assert other.tolist() == [3] * 8


def test_what_is_copied_in_is_not_used_before_its_event() -> None:
    host, values = pinned(8).fill_(5), torch.zeros(8, dtype=torch.uint8, device=TOY)
    ready = torch.accelerator.current_stream(TOY).record_event()
    stream = side_stream()
    stream.wait_event(ready)
    with stream:
        values.copy_(host, non_blocking=True)
    with pytest.raises(RuntimeError, match=r"add.* on stream 0 .* reads 8 bytes .* does not come after"):
        values + 1
    torch.accelerator.current_stream(TOY).wait_event(stream.record_event())
    assert (values + 1).tolist() == [6] * 8


def test_what_is_computed_is_not_copied_out_before_its_event() -> None:
    values, host, stream = torch.zeros(8, dtype=torch.uint8, device=TOY), pinned(8), side_stream()
    values.fill_(7)
    with stream, pytest.raises(RuntimeError, match=r"a copy on stream .* reads 8 bytes of device memory"):
        host.copy_(values, non_blocking=True)
    stream.wait_event(torch.accelerator.current_stream(TOY).record_event())
    with stream:
        host.copy_(values, non_blocking=True)
    with pytest.raises(RuntimeError, match=r"fill_ .* writes 8 bytes .* does not come after"):
        values.fill_(8)
    stream.record_event().synchronize()  # the host has waited: so does all that it asks for from now on
    values.fill_(8)
    assert host.tolist() == [7] * 8


def test_memory_is_not_freed_under_a_copy() -> None:
    for records in (True, False):
        values, host, stream = torch.ones(8, dtype=torch.uint8, device=TOY), pinned(8), side_stream()
        stream.wait_event(torch.accelerator.current_stream(TOY).record_event())
        with stream:
            host.copy_(values, non_blocking=True)
        if records:
            values.record_stream(stream)
        held = torch.accelerator.memory_allocated(TOY)
        del values
        if records:
            assert torch.accelerator.memory_allocated(TOY) == held, "until the copy is over"
            stream.synchronize()
            assert torch.accelerator.memory_allocated(TOY) == held - 8
        else:
            with pytest.raises(RuntimeError, match=r"was freed while stream .* record_stream"):
                stream.synchronize()
        assert host.tolist() == [1] * 8


def test_it_trains_as_the_cpu_does() -> None:
    torch.manual_seed(1)
    on_cpu = nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 3))
    losses = []
    for device in ("cpu", "toy:0", "toy:1"):
        model = copy.deepcopy(on_cpu).to(device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
        generator = torch.Generator().manual_seed(2)
        found = []
        for _ in range(5):
            inputs, targets = (
                torch.randn(4, 6, generator=generator),
                torch.randint(3, (4,), generator=generator),
            )
            loss = nn.functional.cross_entropy(model(inputs.to(device)), targets.to(device))
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.item())
        losses.append(found)
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    assert losses[1] == losses[2]


def test_each_device_draws_from_its_own_generator() -> None:
    torch.manual_seed(4)
    here = torch.rand(3, device=TOY)
    host = torch.rand(3)
    torch.toy.manual_seed(4)
    assert torch.equal(torch.rand(3, device=TOY), here)
    assert not torch.equal(torch.rand(3), host), "the CPU's is left as it was"
