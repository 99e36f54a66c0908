import json
import os
import statistics

import pytest
import torch
from tests.torch.ranks import SCRIPTS, run_ranks
from torch import nn
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from skyctl.torch import rank_shares, step_clock
from skyctl.torch.step_clock import HostStamp, StepClock, StepTime, StepTimesFile

INJECTED = os.path.join(os.path.dirname(step_clock.__file__), "injected")


@pytest.fixture
def clock(monkeypatch):
    """A clock that runs, with the steps that it told of."""
    own_clock = StepClock()
    own_clock.notes = []
    own_clock.listeners.append(own_clock.notes.append)
    own_clock.start()
    yield own_clock
    own_clock.stop()


@pytest.fixture
def hours(monkeypatch):
    """The time that the clock reads; tests set it forward."""

    class Hours:
        now_s = 100.0

        def spend(self, seconds):
            self.now_s += seconds

    hours = Hours()
    monkeypatch.setattr(HostStamp, "__init__", lambda self: object.__setattr__(self, "at_s", hours.now_s))
    return hours


class Slow(torch.autograd.Function):
    """Takes 2 s forward and 3 s backward."""

    hours = None

    @staticmethod
    def forward(ctx, x):
        Slow.hours.spend(2)
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        Slow.hours.spend(3)
        return gradient


def backward(model, hours, waits_s=0):
    """One forward and backward, of 5 s, at whose end a callback waits as DDP's does."""
    Slow.hours = hours
    engine = torch.autograd.Variable._execution_engine

    def wait_for_others(_parameter):
        engine.queue_callback(lambda: hours.spend(waits_s))

    handle = model.weight.register_post_accumulate_grad_hook(wait_for_others)
    Slow.apply(model(torch.ones(3, 2))).sum().backward()
    handle.remove()


def test_waits_are_taken_off_and_all_else_counts(clock, hours):
    model = nn.Linear(2, 2, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for waits_s in (0, 7, 70):
        hours.spend(1)  # the data
        backward(model, hours, waits_s)
        hours.spend(0.5)  # clipping
        optimizer.step()
    assert clock.notes == [StepTime(1, 6.5, None), StepTime(2, 6.5, None)]


def test_a_step_of_several_backwards_is_one(clock, hours):
    model = nn.Linear(2, 2, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        for _ in range(4):
            backward(model, hours, waits_s=2)
            clock.add_samples(5)
        optimizer.step()
    assert clock.notes == [StepTime(1, 20.0, 20.0), StepTime(2, 20.0, 20.0)]


def test_an_optimizer_that_computes_within_its_step(clock, hours):
    model = nn.Linear(2, 2, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def closure():
        optimizer.zero_grad()
        backward(model, hours, waits_s=7)
        return 0.0

    for _ in range(3):
        optimizer.step(closure)
    assert clock.notes == [StepTime(1, 5.0, None), StepTime(2, 5.0, None)]


def test_steps_of_several_optimizers_end_with_the_first(clock, hours):
    models = [nn.Linear(2, 2, bias=False) for _ in range(2)]
    optimizers = [torch.optim.Adam(model.parameters()) for model in models]
    for _ in range(4):
        for model, optimizer in zip(models, optimizers, strict=True):
            backward(model, hours, waits_s=9)
            optimizer.step()
    # the second model's wait is known to be one once its optimizer has stepped
    assert [step.compute_s for step in clock.notes] == [19.0, 10.0, 10.0]
    optimizer = optimizers[1]
    del optimizers, model, models
    for _ in range(2):  # the first one is gone: another phase of the script
        hours.spend(4)
        optimizer.step()
    assert clock.notes[-1].step == 5
    assert clock.notes[-1].compute_s == 4.0


def test_an_optimizer_that_steps_within_the_backward(clock, hours):
    model = nn.Linear(2, 2)
    for parameter in model.parameters():
        own = torch.optim.SGD([parameter], lr=0.1)
        parameter.register_post_accumulate_grad_hook(lambda _, own=own: own.step())
    for _ in range(4):
        backward(model, hours, waits_s=7)
    assert [round(step.compute_s, 6) for step in clock.notes[1:]] == [5.0, 5.0]


def test_a_step_that_the_optimizer_skips_is_part_of_the_next(clock, hours):
    model = nn.Linear(2, 2, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    for number in range(4):
        backward(model, hours)
        if number == 2:
            model.weight.grad[0, 0] = torch.inf
        scaler.scale(torch.ones(()))
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    assert [step.compute_s for step in clock.notes] == [5.0, 10.0]


def test_a_backward_that_failed_does_not_stop_the_clock(clock, hours):
    model = nn.Linear(2, 2, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def fail(_parameter):
        raise ValueError("out of memory")

    for number in range(4):
        handle = model.weight.register_post_accumulate_grad_hook(fail) if number == 1 else None
        try:
            backward(model, hours, waits_s=9)
        except ValueError:
            handle.remove()
        optimizer.step()
    assert clock.notes[-1] == StepTime(3, 5.0, None)


def test_a_clock_that_stopped_has_left_nothing(hours):
    wait = torch.distributed.Work.wait
    clock = StepClock()
    clock.start()
    model = nn.Linear(2, 2, bias=False)
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    assert torch.distributed.Work.wait is not wait
    clock.stop()
    assert torch.distributed.Work.wait is wait
    assert not model.weight._post_accumulate_grad_hooks
    assert not _global_optimizer_pre_hooks
    assert not _global_optimizer_post_hooks


def run_injected(folder, *arguments):
    """Three ranks with the clock injected: what they print, and each rank's lines."""
    ends = run_ranks(
        SCRIPTS / "plain_ddp.py",
        3,
        folder,
        *arguments,
        PYTHONPATH=INJECTED,
        SKYCTL_STEP_TIMES=str(folder / "times"),
    )
    assert [end.returncode for end in ends] == [0, 0, 0], ends[0].stderr
    lines = [(folder / f"times.{rank}").read_text().splitlines() for rank in range(3)]
    return [end.stdout for end in ends], [[json.loads(line) for line in own] for own in lines]


@pytest.mark.parametrize("script", ["plain", "buffers", "logged"])
def test_each_rank_of_an_unmodified_script_tells_its_own_time(tmp_path, script):
    """The first rank is the slow one: the others wait in their sum, or for its buffers, or for its loss."""
    _, steps = run_injected(tmp_path, "0.4,0,0", script)
    for own in steps:
        assert [line["step"] for line in own] == list(range(1, 8))
        assert {line["samples"] for line in own} == {None}
    medians = [statistics.median(line["compute_s"] for line in own) for own in steps]
    assert medians[0] >= 0.4
    assert max(medians[1:]) < medians[0] / 2


def test_the_clock_changes_nothing_that_is_computed(tmp_path):
    injected, _ = run_injected(tmp_path, "0,0,0", "buffers")
    (tmp_path / "rendezvous").unlink(missing_ok=True)
    plain = run_ranks(SCRIPTS / "plain_ddp.py", 3, tmp_path, "0,0,0", "buffers")
    assert injected == [end.stdout for end in plain]


def test_one_process_writes_a_file(tmp_path, monkeypatch):
    monkeypatch.setattr(rank_shares._Here, "batch", 64)
    first = StepTimesFile(str(tmp_path / "times"))
    with pytest.raises(BlockingIOError):
        StepTimesFile(str(tmp_path / "times"))
    first.add(StepTime(1, 0.25, 8))
    assert json.loads((tmp_path / "times").read_text()) == {
        "step": 1,
        "compute_s": 0.25,
        "samples": 8,
        "batch": 64,
    }
    first.close()
    again = StepTimesFile(str(tmp_path / "times"))
    for step in range(2, 200):
        again.add(StepTime(step, 0.5, None))
    again.close()
    lines = [json.loads(line) for line in (tmp_path / "times").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, 200))
