"""This machine's network interfaces and IPv4 addresses. Standard library only."""

from __future__ import annotations

import socket
import struct
import sys
from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import ClassVar

from skyctl.agent.message_fields import Address
from skyctl.errors import RunError

LOOPBACK = "127.0.0.1"
SIOCGIFADDR = 0x8915


@dataclass(frozen=True)
class RouteRequest:
    """Which of the node's own addresses do routes to most of these start from?

    It is asked of sessions that an older launcher has begun, too, so it names no version.
    """

    kind: ClassVar[str] = "route"
    towards: tuple[Address, ...]


def interface_addresses() -> list[list[str]]:
    """[interface, IPv4] of every interface that has one (Linux; elsewhere empty)."""
    addresses = []
    for _, name in socket.if_nameindex() if sys.platform.startswith("linux") else ():
        with suppress(OSError):
            addresses.append([name, _read_address(name)])
    return addresses


def _read_address(interface: str) -> str:
    """An interface's IPv4 address (Linux). Raises OSError where it has none."""
    import fcntl

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        answer = fcntl.ioctl(sock, SIOCGIFADDR, struct.pack("256s", interface.encode()[:15]))
    return socket.inet_ntoa(answer[20:24])


class NoRouteError(RunError):
    """This machine has no route to a peer."""


def local_address_towards(host: str, interface: str | None = None) -> str:
    """This machine's own IPv4 address on the route to ``host``, or that of ``interface`` where one is named.

    Raises:
        NoRouteError: there is no route.
        RunError: no such interface, or it has no IPv4 address.
    """
    if interface is not None:
        return _interface_address(interface)
    try:
        address = socket.getaddrinfo(host, 9, socket.AF_INET, socket.SOCK_DGRAM)[0][4]
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect(address)  # sends nothing: it only makes the kernel choose a route
            return str(probe.getsockname()[0])
    except OSError as exc:
        raise NoRouteError(
            f"no route from this machine to its peer {host!r}: {exc.strerror or exc}",
            hint="name the network interface to use with 'interface:' in cluster.yaml (a VPN's, say)",
        ) from exc


def _interface_address(interface: str) -> str:
    names = [name for _, name in socket.if_nameindex()]
    if interface not in names:
        raise RunError(
            f"there is no network interface {interface!r} on this machine; it has {', '.join(names)}",
            hint="name one of them with 'interface:' in cluster.yaml, or leave it out",
        )
    if not sys.platform.startswith("linux"):
        raise RunError(
            f"can't look up the address of interface {interface!r} on {sys.platform}",
            hint="leave 'interface:' out for this node: the route to its peers is used",
        )
    try:
        return _read_address(interface)
    except OSError as exc:
        raise RunError(
            f"network interface {interface!r} has no IPv4 address: {exc.strerror or exc}",
            hint="connect it (a VPN, say), or name another with 'interface:' in cluster.yaml",
        ) from exc


def find_source_address(addresses: Iterable[str]) -> str | None:
    """This machine's own address on the route to most of ``addresses`` (UDP connect: nothing is sent)."""
    sources: Counter[str] = Counter()
    for address in addresses:
        with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
            sock.connect((address, 9))
            sources[sock.getsockname()[0]] += 1
    sources.pop(LOOPBACK, None)
    return sources.most_common(1)[0][0] if sources else None
