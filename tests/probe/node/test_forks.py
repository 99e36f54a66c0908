"""A fork that measures tells its figure or why there is none, and has ended when the answer is there."""

import os
import signal
import threading
from pathlib import Path

import pytest
import torch

from skyctl.errors import RunError
from skyctl.probe.node.forks import result_of_fork


def children() -> str:
    return Path(f"/proc/self/task/{threading.get_native_id()}/children").read_text()


def test_its_result_comes_back_and_it_has_computed_by_itself() -> None:
    there = children()
    weight = torch.ones(200, 200, requires_grad=True)

    def measure() -> tuple[int, float]:
        (weight @ weight).sum().backward()
        assert weight.grad is not None
        return os.getpid(), float(weight.grad[0, 0])

    (weight @ weight).sum().backward()  # a backward before the fork forbids none in it
    weight.grad = None
    pid, found = result_of_fork(measure)
    assert (found, weight.grad) == (400.0, None)
    assert pid != os.getpid()
    assert children() == there


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        (RunError("no answer"), "no answer"),
        (ValueError("no number"), "ValueError: no number"),
        (SystemExit(3), "the process that measured it ended without a result"),
        (KeyboardInterrupt(), "the process that measured it ended without a result"),
    ],
)
def test_its_exception_is_told(fault: BaseException, said: str) -> None:
    def measure() -> None:
        raise fault

    there = children()
    with pytest.raises(RunError, match=said):
        result_of_fork(measure)
    assert children() == there


def test_a_signal_that_ends_it_is_named() -> None:
    with pytest.raises(RunError, match=r"was ended by SIGKILL$"):
        result_of_fork(lambda: os.kill(os.getpid(), signal.SIGKILL))
