"""Which of a node's addresses its peers are to use: one choice, made here, for check, probe and launch.

In this order: the interface that cluster.yaml names; loopback where all nodes are one machine; the address
that the launcher dialled, where it is one of the node's own (it is not behind NAT or a forwarded port);
else the source address of the node's route towards its peers, as the node's kernel says.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from skyctl.agent.message_fields import Address
from skyctl.agent.network_interfaces import LOOPBACK, RouteRequest, find_source_address
from skyctl.agent.task_orders import write_request
from skyctl.errors import SkyctlError, UnfitError

if TYPE_CHECKING:
    from skyctl.remote.agent_session import Session

ROUTE_TASK_MODULE = "skyctl.check.check_task"
_ROUTE_TIMEOUT_S = 60.0


@dataclass(frozen=True)
class RouteAnswer:
    """The node's own address on the route to its peers; None: it has none."""

    kind: ClassVar[str] = "result"
    address: Address | None


def find_peer_addresses(sessions: Mapping[str, Session]) -> dict[str, str | SkyctlError]:
    """The IPv4 address by which its peers reach each node, by node name; or why there is none.

    That is an UnfitError where the node lacks the interface that cluster.yaml names for it.
    """
    one_machine = _are_one_machine(sessions.values())
    outcomes: dict[str, str | SkyctlError] = {}
    asked: list[str] = []
    for name, session in sessions.items():
        dialled = resolve_ipv4(session.host)
        own = own_addresses(session)
        if session.node.interface is not None:
            outcomes[name] = _address_of_interface(session, session.node.interface)
        elif one_machine:
            outcomes[name] = LOOPBACK
        elif dialled is not None and not _is_loopback(dialled) and (dialled in own or not own):
            outcomes[name] = dialled
        else:
            asked.append(name)
    # Local nodes first: theirs is found without asking, and the others' routes may lead to it.
    for name in sorted(asked, key=lambda n: sessions[n].node.transport != "local"):
        towards = [a for n, a in outcomes.items() if n != name and isinstance(a, str)]
        dials = [resolve_ipv4(sessions[n].host) for n in asked if n != name]
        towards += [a for a in dials if a is not None and not _is_loopback(a)]
        try:
            outcomes[name] = _address_towards_peers(sessions[name], towards)
        except SkyctlError as exc:
            outcomes[name] = exc
    return {name: outcomes[name] for name in sessions}


def own_addresses(session: Session) -> dict[str, str]:
    """The node's own IPv4 addresses and the interface of each (empty where it can't say)."""
    return {address: interface for interface, address in session.hello.addresses}


def interface_with_address(session: Session, address: str) -> str | None:
    """The name of the node's interface that has ``address``."""
    return own_addresses(session).get(address)


def resolve_ipv4(host: str) -> str | None:
    """A host as an IPv4 address, looked up here where it is a name; None where it has none."""
    try:
        return str(ipaddress.IPv4Address(host))
    except ValueError:
        with suppress(OSError, UnicodeError):
            return str(socket.getaddrinfo(host, None, socket.AF_INET, socket.SOCK_STREAM)[0][4][0])
    return None


def _are_one_machine(sessions: Iterable[Session]) -> bool:
    """Whether all are this machine: on loopback, with one name and the same addresses (no port forwards)."""
    them = list(sessions)
    if all(session.node.transport == "local" for session in them):
        return True
    hosts = [resolve_ipv4(session.host) or session.host for session in them]
    looks = {(s.hello.hostname, tuple(sorted(own_addresses(s)))) for s in them}
    return all(_is_loopback(host) for host in hosts) and len(looks) == 1


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _address_of_interface(session: Session, interface: str) -> str | SkyctlError:
    own = own_addresses(session)
    for address, name in own.items():
        if name == interface:
            return address
    there = ", ".join(f"{name} ({address})" for address, name in own.items()) or "none that it can name"
    return UnfitError(
        f"node {session.node.name!r} has no interface {interface!r} with an IPv4 address; it has {there}",
        node=session.node.name,
        hint=f"correct `interface` of node {session.node.name!r} in cluster.yaml, or bring that interface up",
    )


def _address_towards_peers(session: Session, peers: list[str]) -> str:
    source: str | None = None
    if peers and session.node.transport == "local":
        source = find_source_address(peers)
    elif peers:
        request = write_request(RouteRequest(tuple(peers)))
        answer = session.run_task(ROUTE_TASK_MODULE, request, _ROUTE_TIMEOUT_S, answer=RouteAnswer)
        source = answer["address"]
    if source is not None:
        return source
    outside = [address for address in own_addresses(session) if not _is_loopback(address)]
    return outside[0] if outside else LOOPBACK
