"""The node's end of a probe, told things out of turn."""

from __future__ import annotations

import faulthandler
import os
from typing import Any

import pytest

from skyctl.probe.node import message_overhead
from skyctl.probe.node.probe_order import ProbeOrder
from skyctl.probe.node.probe_task import _ProbeServer


class Line:
    """The launcher, with what it has to say."""

    def __init__(self, *orders: str) -> None:
        self.orders = list(orders)

    def send(self, message: dict[str, Any], body: bytes = b"") -> None: ...

    def recv(self, timeout_s: float | None = None) -> tuple[dict[str, Any], bytes] | None:
        return {"op": self.orders.pop(0)}, b""


def test_an_order_that_comes_too_late_ends_nothing() -> None:
    line = Line("go", "stop", "quit", "more")
    _ProbeServer(ProbeOrder(None, None, None, 1.0), line, "cpu:0", {"quota": None}, None, None).serve()
    assert line.orders == ["more"]


def test_gloo_that_aborts_its_process_costs_the_figures_of_gloo_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def abort(*_: object) -> None:
        faulthandler.disable()  # pytest's
        os.write(2, b"terminate called after throwing an instance of 'gloo::EnforceNotMet'\n")
        os.write(2, b"  what():  accept: Too many open files\n")
        os.abort()

    monkeypatch.setattr(message_overhead, "measure_message_overhead", abort)
    server = _ProbeServer(ProbeOrder(None, None, None, 1.0), Line(), "cpu:0", {"quota": None}, None, None)
    assert server._gloo_figures(1.0, 0.0, 0.0) == {
        "gloo_error": "the process that measured it was ended by SIGABRT; "
        "its last line: what():  accept: Too many open files"
    }


def test_what_messages_cost_over_gloo_is_measured_in_a_process_of_its_own() -> None:
    server = _ProbeServer(ProbeOrder(None, None, None, 1.0), Line(), "cpu:0", {"quota": None}, None, None)
    figures = server._gloo_figures(1.0, 0.0, 0.0)["gloo"]
    assert set(figures) == {"handling_s", "handling_byte_s", "step_s", "message_byte_s", "ring_byte_s"}
    assert figures["handling_s"] > 0
