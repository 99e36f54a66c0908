"""What a stage costs beside its layers, measured by running stages that only sleep."""

import threading

import pytest
from torch import Tensor

from skyctl.errors import RunError
from skyctl.probe.node import message_overhead
from skyctl.probe.node.message_overhead import measure_message_overhead
from skyctl.remote.credentials import make_tls_certificate
from skyctl.transport.tls_identity import TlsIdentity


def test_a_quota_stretches_what_the_whole_process_takes() -> None:
    alone = measure_message_overhead(None)
    under = measure_message_overhead(0.1)
    assert 0 < alone.stage_s < 0.1
    assert under.stage_s > alone.stage_s
    assert under.byte_s >= 0


@pytest.mark.parametrize("identity", [None, TlsIdentity.from_credentials(make_tls_certificate())])
def test_nothing_is_left_running(identity: TlsIdentity | None) -> None:
    before = threading.active_count()
    assert measure_message_overhead(None, identity).stage_s > 0
    assert threading.active_count() == before


def test_a_stage_that_fails_is_an_error_and_no_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    def lost(_layer: object, _values: Tensor) -> Tensor:
        raise RunError("the connection to itself is gone")

    monkeypatch.setattr(message_overhead._SleepLayer, "forward", lost)
    before = threading.active_count()
    with pytest.raises(RunError, match="messages from this node to itself failed: the connection to itself"):
        measure_message_overhead(None)
    assert threading.active_count() == before
