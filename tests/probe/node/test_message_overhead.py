"""The cost of a stage beside its layers, measured by running stages that only sleep."""

import threading
import time

import pytest
from torch import Tensor

from skyctl.errors import RunError
from skyctl.probe.node import message_overhead
from skyctl.probe.node.message_overhead import measure_message_overhead
from skyctl.remote.credentials import make_tls_certificate
from skyctl.transport.tls_identity import TlsIdentity


def test_a_quota_stretches_what_the_whole_process_takes() -> None:
    alone = measure_message_overhead(1.0)
    under = measure_message_overhead(10.0)
    assert 0 < alone.stage_s < 0.1
    assert under.stage_s > alone.stage_s
    assert under.byte_s >= 0


def test_what_comes_once_a_step_is_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """A loop that is busy for 4 ms after each step costs that once a step, and its microbatches no more."""

    def tell(_file: object, _event: object) -> None:
        end = time.thread_time() + 0.004
        while time.thread_time() < end:
            pass

    plain = measure_message_overhead(1.0)
    monkeypatch.setattr(message_overhead, "write_frame", tell)
    busy = measure_message_overhead(1.0)
    assert busy.step_s > plain.step_s + 0.003
    assert busy.step_s > busy.stage_s


@pytest.mark.parametrize("identity", [None, make_tls_certificate()])
def test_nothing_is_left_running(identity: TlsIdentity | None) -> None:
    before = threading.active_count()
    assert measure_message_overhead(1.0, identity).stage_s > 0
    assert threading.active_count() == before


def test_over_gloo_it_is_measured_alike_and_again() -> None:
    """Several groups of one process listen at the same time, and none of them ends the process."""
    before = threading.active_count()
    for _ in range(2):
        measured = measure_message_overhead(1.0, None, "gloo")
        assert 0 < measured.stage_s < 0.5
        assert measured.byte_s >= 0
    assert threading.active_count() == before


def test_a_stage_that_fails_is_an_error_and_no_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    def lost(_layer: object, _values: Tensor) -> Tensor:
        raise RunError("the connection to itself is gone")

    monkeypatch.setattr(message_overhead._SleepLayer, "forward", lost)
    before = threading.active_count()
    with pytest.raises(RunError, match="messages from this node to itself failed: the connection to itself"):
        measure_message_overhead(1.0)
    assert threading.active_count() == before
