"""What a stage costs beside its layers, measured by running stages that only sleep."""

import threading

import pytest
from torch import Tensor

from skyctl.errors import RunError
from skyctl.probe.node import handling
from skyctl.probe.node.handling import measure
from skyctl.remote.credentials import certificate
from skyctl.transport.identity import Identity


def test_a_quota_stretches_what_the_whole_process_takes() -> None:
    alone = measure(None)
    under = measure(0.1)
    assert 0 < alone.stage_s < 0.1
    assert under.stage_s > alone.stage_s
    assert under.byte_s >= 0


@pytest.mark.parametrize("identity", [None, Identity.of(certificate())])
def test_nothing_is_left_running(identity: Identity | None) -> None:
    before = threading.active_count()
    assert measure(None, identity).stage_s > 0
    assert threading.active_count() == before


def test_a_stage_that_fails_is_an_error_and_no_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    def lost(_layer: object, _values: Tensor) -> Tensor:
        raise RunError("the connection to itself is gone")

    monkeypatch.setattr(handling._Nap, "forward", lost)
    before = threading.active_count()
    with pytest.raises(RunError, match="messages from this node to itself failed: the connection to itself"):
        measure(None)
    assert threading.active_count() == before
