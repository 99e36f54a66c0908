"""Which address of a node its peers are given."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from skyctl.agent.network_interfaces import find_source_address
from skyctl.errors import SkyctlError, UnfitError, UnreachableError
from skyctl.records.cluster import Node
from skyctl.remote.peer_addresses import (
    find_peer_addresses,
    resolve_ipv4,
)

LO = ["lo", "127.0.0.1"]


@dataclass
class Stub:
    """As much of a session as the choice looks at."""

    node: Node
    host: str
    addresses: list[list[str]]
    hostname: str = "box"
    route: str | SkyctlError | None = None
    asked: list[Any] = field(default_factory=list)

    @property
    def hello(self) -> SimpleNamespace:
        return SimpleNamespace(hostname=self.hostname, addresses=self.addresses)

    def run_task(
        self, module: str, payload: dict[str, Any], timeout_s: float, *, answer: type
    ) -> dict[str, Any]:
        self.asked.append(payload)
        if isinstance(self.route, SkyctlError):
            raise self.route
        return {"address": self.route}


def ssh(host: str, *addresses: list[str], interface: str | None = None, **more: Any) -> Stub:
    return Stub(Node(name=f"n-{host}", host=host, interface=interface), host, [LO, *addresses], **more)


def local(name: str = "l") -> Stub:
    return Stub(Node(name=name, transport="local"), "127.0.0.1", [LO, ["eth0", "192.0.2.9"]])


def test_all_local_is_loopback() -> None:
    assert find_peer_addresses({"a": local("a"), "b": local("b")}) == {"a": "127.0.0.1", "b": "127.0.0.1"}  # type: ignore[dict-item]
    assert find_peer_addresses({}) == {}


def test_dialled_address_where_it_is_the_nodes_own() -> None:
    a = ssh("192.0.2.1", ["docker0", "172.17.0.1"], ["eth0", "192.0.2.1"])
    b = ssh("192.0.2.2", ["eth1", "192.0.2.2"])
    silent = Stub(Node(name="mac", host="192.0.2.3"), "192.0.2.3", [])  # can't list its addresses
    addresses = find_peer_addresses({"a": a, "b": b, "mac": silent})  # type: ignore[dict-item]
    assert addresses == {"a": "192.0.2.1", "b": "192.0.2.2", "mac": "192.0.2.3"}


def test_named_interface_wins() -> None:
    a = ssh("192.0.2.1", ["eth0", "192.0.2.1"], ["tailscale0", "100.64.0.1"], interface="tailscale0")
    b = ssh("192.0.2.2", ["eth0", "192.0.2.2"], interface="wg0")
    outcomes = find_peer_addresses({"a": a, "b": b})  # type: ignore[dict-item]
    assert outcomes["a"] == "100.64.0.1"
    error = outcomes["b"]
    assert isinstance(error, UnfitError)
    assert "no interface 'wg0'" in error.message
    assert "eth0 (192.0.2.2)" in error.message


def test_behind_nat_the_nodes_route_to_its_peers() -> None:
    a = ssh("192.0.2.1", ["eth0", "192.0.2.1"])
    nat = ssh("198.51.100.7", ["eth0", "10.0.0.5"], ["wg0", "10.9.0.5"], route="10.9.0.5")
    assert find_peer_addresses({"nat": nat, "a": a}) == {"nat": "10.9.0.5", "a": "192.0.2.1"}  # type: ignore[dict-item]
    assert nat.asked == [{"op": "route", "towards": ["192.0.2.1"]}]
    nat.route = None
    assert find_peer_addresses({"nat": nat, "a": a})["nat"] == "10.0.0.5"  # type: ignore[dict-item]
    nat.route = UnreachableError("gone", node="nat")
    assert isinstance(find_peer_addresses({"nat": nat, "a": a})["nat"], UnreachableError)  # type: ignore[dict-item]


def test_forwarded_ports_on_loopback_are_not_one_machine() -> None:
    first = ssh("127.0.0.1", ["eth0", "10.0.0.1"], hostname="vm1", route="10.0.0.1")
    two = ssh("127.0.0.1", ["eth0", "10.0.0.2"], hostname="vm2", route="10.0.0.2")
    assert find_peer_addresses({"one": first, "two": two}) == {"one": "10.0.0.1", "two": "10.0.0.2"}  # type: ignore[dict-item]
    same = {"one": first, "two": ssh("127.0.0.1", ["eth0", "10.0.0.1"], hostname="vm1"), "l": None}
    same.pop("l")
    assert set(find_peer_addresses(same).values()) == {"127.0.0.1"}  # type: ignore[arg-type]


def test_looking_up() -> None:
    assert resolve_ipv4("192.0.2.1") == "192.0.2.1"
    assert resolve_ipv4("localhost") == "127.0.0.1"
    assert resolve_ipv4("::1") is None
    assert find_source_address([]) is None
    assert find_source_address(["127.0.0.1"]) is None
