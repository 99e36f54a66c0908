"""The cost of summing gradients beside the adding: more under a quota. No thread and no child is left."""

import threading
from pathlib import Path

import pytest
from tests.helpers.processes import MOMENT_S, until

from skyctl.errors import RunError
from skyctl.probe.node import sum_overhead
from skyctl.probe.node.sum_overhead import measure_message_byte_s
from skyctl.remote.credentials import make_tls_certificate
from skyctl.transport.tls_identity import TlsIdentity


def children() -> str:
    """Of this thread, which is the one that measures."""
    return Path(f"/proc/self/task/{threading.get_native_id()}/children").read_text()


@pytest.mark.parametrize(
    ("identity", "backend"),
    [(None, "skyctl"), (make_tls_certificate(), "skyctl"), (None, "gloo")],
)
def test_a_byte_of_gradients_costs_its_sender_and_its_receiver(
    identity: TlsIdentity | None, backend: str
) -> None:
    before, there = threading.active_count(), children()
    alone, under = (measure_message_byte_s(ratio, 0.0, identity, backend) for ratio in (1.0, 100.0))
    assert 1e-11 < alone < 1e-6
    assert under > 5 * alone
    until(lambda: threading.active_count() == before, patience_s=MOMENT_S)
    assert children() == there


@pytest.mark.parametrize("backend", ["skyctl", "gloo"])
def test_a_byte_of_a_small_sum_costs_more(backend: str) -> None:
    """Beginning it, agreeing on it and waking up are there however little is summed."""
    small, large = (measure_message_byte_s(1.0, 0.0, None, backend, numel) for numel in (0, 2_000_000))
    assert small > 2 * large


def test_what_adding_takes_is_not_counted_twice() -> None:
    assert measure_message_byte_s(1.0, 1e-3) == 0.0


@pytest.mark.parametrize("backend", ["skyctl", "gloo"])
def test_a_child_that_can_not_connect_is_not_waited_for(
    backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sum_overhead, "_sum_as_child", lambda *_: None)
    monkeypatch.setattr(sum_overhead, "TIMEOUT_S", 0.5)
    there = children()
    with pytest.raises(RunError, match="itself"):
        measure_message_byte_s(1.0, 0.0, None, backend)
    assert children() == there
