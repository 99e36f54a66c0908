"""Stages that talk through TLS: the same losses, the same errors, and nobody else gets in."""

from __future__ import annotations

import socket
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
from tests.worker.workloads import RAISING

from skyctl.remote.credentials import make_tls_certificate
from skyctl.transport.tls_identity import TlsIdentity

Workloads = Callable[..., dict[str, Any]]


def tls(encrypt: bool) -> TlsIdentity | None:
    return make_tls_certificate() if encrypt else None


@pytest.mark.parametrize("schedule", ["1f1b", "zero-bubble"])
@pytest.mark.parametrize("link", [None, "int8"])
def test_losses_are_the_same_to_the_last_bit(
    workload: Workloads, pool: Any, driver: ModuleType, schedule: str, link: str | None
) -> None:
    losses = []
    for encrypt in (False, True):
        dtypes = dict.fromkeys(("to_next", "from_next", "to_previous", "from_previous"), link)
        orders = driver.orders(
            workload(), [0, 2, 4, 7], 4, schedule, 4, tls=tls(encrypt), trace=True, link_dtypes=dtypes
        )
        outcome = pool.run(orders)
        assert not outcome.errors, outcome.errors
        losses.append(outcome.losses)
    assert losses[0] == losses[1]


def test_clipping_and_validation_go_through_tls(workload: Workloads, pool: Any, driver: ModuleType) -> None:
    recipe = {"total_steps": 3, "clip_norm": 0.01}
    norms = []
    for encrypt in (False, True):
        orders = driver.orders(workload(), [0, 3, 7], 4, "1f1b", 3, recipe=recipe, tls=tls(encrypt))
        outcome = pool.run(orders)
        assert not outcome.errors, outcome.errors
        norms.append([event["grad_norm"] for event in outcome.steps[0]])
    assert norms[0] == norms[1]


def test_a_stage_that_fails_is_the_cause_and_its_neighbours_lost_it(
    workload: Workloads, pool: Any, driver: ModuleType
) -> None:
    outcome = pool.run(driver.orders(workload(replace=RAISING), [0, 3, 5, 7], 4, "1f1b", 5, tls=tls(True)))
    assert sorted(outcome.errors) == [0, 1, 2]
    assert outcome.errors[1]["message"] == "step 1, forward of microbatch 2: ValueError: bad sample"
    assert [outcome.errors[rank]["type"] for rank in (0, 2)] == ["PeerLostError", "PeerLostError"]


@pytest.mark.parametrize("encrypt", [False, True])
def test_strangers_at_a_ranks_port_do_not_disturb_the_run(
    workload: Workloads, pool: Any, driver: ModuleType, encrypt: bool
) -> None:
    strangers: list[socket.socket] = []

    def come(_rank: int, host: str, port: int) -> tuple[str, int]:
        for garbage in (b"", b"GET / HTTP/1.0\r\n\r\n", bytes(40)):
            strangers.append(socket.create_connection((host, port), 10))
            strangers[-1].sendall(garbage)
        return host, port  # the peer is told of it only now: it does not listen for long then

    try:
        orders = driver.orders(workload(), [0, 2, 7], 4, "1f1b", 2, tls=tls(encrypt))
        outcome = pool.run(orders, route=come)
    finally:
        for stranger in strangers:
            stranger.close()
    assert not outcome.errors, outcome.errors
    assert len(strangers) == 3
    assert len(outcome.losses) == 2
