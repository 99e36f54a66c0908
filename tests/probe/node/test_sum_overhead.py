"""What summing gradients costs beside the adding: more under a quota, and nothing is left behind."""

import threading

import pytest
from tests.helpers.processes import MOMENT_S, until

from skyctl.probe.node.sum_overhead import measure_message_byte_s
from skyctl.remote.credentials import make_tls_certificate
from skyctl.transport.tls_identity import TlsIdentity


@pytest.mark.parametrize("identity", [None, TlsIdentity.from_credentials(make_tls_certificate())])
def test_a_byte_of_gradients_costs_its_sender_and_its_receiver(identity: TlsIdentity | None) -> None:
    before = threading.active_count()
    alone, under = (measure_message_byte_s(cpus, 0.0, identity) for cpus in (None, 0.01))
    assert 1e-11 < alone < 1e-6
    assert under > 5 * alone
    until(lambda: threading.active_count() == before, patience_s=MOMENT_S)


def test_what_adding_takes_is_not_counted_twice() -> None:
    assert measure_message_byte_s(None, 1e-3) == 0.0
