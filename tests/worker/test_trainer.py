"""The report of a rank on an error."""

from __future__ import annotations

import pytest
import torch

from skyctl.errors import RunError, WorkloadError
from skyctl.worker.trainer import with_phase


def test_a_cpu_without_memory_is_named_with_what_to_do() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**50)
    error = with_phase(caught.value, "step 3", "cpu:0")
    assert isinstance(error, RunError)
    assert error.message.startswith("step 3: out of memory on cpu:0: ")
    assert error.hint is not None
    assert "more microbatches" in error.hint


def test_the_users_own_errors_stay_as_they_are() -> None:
    theirs = WorkloadError("train.py: data() raised")
    assert with_phase(theirs, "step 3", "cpu:0") is theirs
    assert str(with_phase(ValueError("odd"), "step 3", "cpu:0")) == "step 3: ValueError: odd"


def test_an_error_that_is_its_own_cause_is_told_all_the_same() -> None:
    gone = RunError("the connection to rank 1 is gone")
    other = ValueError("raised of it")
    gone.__cause__, other.__cause__ = other, gone
    assert str(with_phase(gone, "step 3", "cpu:0")) == "step 3: the connection to rank 1 is gone"
