"""The node's end of a probe, told things out of turn."""

from __future__ import annotations

from typing import Any

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
