"""This machine's own addresses. Standard library only: not all that listens on a node needs torch."""

from __future__ import annotations

import ipaddress
import socket
import struct
import sys

from skyctl.errors import RunError

_SIOCGIFADDR = 0x8915


def address_towards(host: str, interface: str | None = None) -> str:
    """This machine's own IPv4 address on the route to ``host``, or that of ``interface`` where one is named.

    Raises:
        RunError: no such interface, it has no IPv4 address, or there is no route.
    """
    if interface is not None:
        return _interface_address(interface)
    try:
        found = socket.getaddrinfo(host, 9, socket.AF_INET, socket.SOCK_DGRAM)[0][4]
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect(found)  # sends nothing: it only makes the kernel choose a route
            return str(probe.getsockname()[0])
    except OSError as exc:
        raise RunError(
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
    import fcntl

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            request = struct.pack("256s", interface.encode()[:15])
            answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)
        except OSError as exc:
            raise RunError(
                f"network interface {interface!r} has no IPv4 address: {exc.strerror or exc}",
                hint="connect it (a VPN, say), or name another with 'interface:' in cluster.yaml",
            ) from exc
    return str(ipaddress.IPv4Address(answer[20:24]))
