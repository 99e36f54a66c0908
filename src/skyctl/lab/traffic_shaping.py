"""The commands that make a lab's network: pure functions from the state to lines for ``ip`` and ``tc``.

In the fabric's namespace: a bridge ``siteK`` a site, a port ``nI`` a node (its other end is ``eth0`` in the
node), a port ``upK`` towards the launcher, ``tapK`` or ``coreK``/``edgeK`` towards the other sites. Only
the nodes' links are shaped: a token bucket on both ends. A pair's own line (``links``) ends in its nodes:
``lineJa`` and ``lineJb``, each with a token bucket and a route to the other node's address. Addresses:
``10.N.K.I`` for node I of site K, ``10.N.K.254`` for the launcher, which so reaches every site directly.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from skyctl.errors import SkyctlError
from skyctl.lab.lab_spec import LabLink, LabSpec

LAUNCHER = 254
_HEADERS = 1514 / 1448
"""Ethernet frame over TCP payload: rates are what a TCP stream carries, buckets count frames."""
_BURST_S = 0.002
_QUEUE_S = 0.05
_MOST_ROUND_TRIP_S = 1.0
"""Of the round trip between sites that a link's queue holds beside that (``queue_s``)."""
_MIN_BURST_BYTES = 5000
_MIN_QUEUE_BYTES = 65536
_MTU_BYTES = 1500


def node_places(spec: LabSpec) -> list[tuple[int, int]]:
    """(site, number in the site) of every node; numbers count from 1, sites from 0."""
    sites = spec.site_names() if spec.apart() else ["default"]
    counts = [0] * len(sites)
    result = []
    for node in spec.nodes:
        site = sites.index(spec.site_of(node)) if spec.apart() else 0
        counts[site] += 1
        result.append((site, counts[site]))
    return result


def node_address(subnet: int, site: int, number: int) -> str:
    """The IPv4 address; in one lab all nodes are of one /16."""
    return f"10.{subnet}.{site}.{number}"


def node_mac(subnet: int, site: int, number: int) -> str:
    """A locally administered MAC address that says who it is."""
    return f"02:53:4b:{subnet:02x}:{site:02x}:{number:02x}"


def uplinks_bytes_per_s(spec: LabSpec) -> list[float | None]:
    """Each site's uplink, headers counted (None: unlimited), in the sites' order."""
    return [
        spec.sites.uplink_mbit[site] * 125_000 * _HEADERS if site in spec.sites.uplink_mbit else None
        for site in spec.site_names()
    ]


def launcher_interface(token: str, site: int) -> str:
    """The launcher's own interface into a site: at most 15 characters, the lab's alone."""
    return f"sk{token}s{site}"


def burst_bytes(rate_mbit: float) -> int:
    """Size of the bucket: small, so that short transfers are not faster than long ones."""
    return max(_MIN_BURST_BYTES, int(rate_mbit * 125_000 * _BURST_S))


def queue_s(latency_ms: float) -> float:
    """How long the queue before a link may get, that far (one way) from the other end.

    A round trip's worth of bytes, as routers are sized: with less, one TCP stream that has lost a packet
    does not fill the link any more, for seconds (Villamizar and Song 1994).
    """
    return _QUEUE_S + min(_MOST_ROUND_TRIP_S, 2 * latency_ms / 1000)


def token_bucket(rate_mbit: float, held_s: float = _QUEUE_S) -> str:
    """The token bucket for a rate, and the queue before it (``queue_s``)."""
    burst = burst_bytes(rate_mbit)
    limit = burst + max(_MIN_QUEUE_BYTES, int(rate_mbit * 125_000 * held_s))
    return f"tbf rate {int(rate_mbit * 1e6 * _HEADERS)}bit burst {burst} limit {limit}"


def network_commands(
    spec: LabSpec, token: str, *, subnet: int, switch: str, pids: Sequence[int], launcher_pid: int
) -> list[str]:
    """For ``ip -batch`` in the fabric: every link, with its far end put where it belongs.

    Args:
        pids: a process in each node's network namespace; ``launcher_pid``: one in the launcher's.
    """
    where = node_places(spec)
    lines = ["link set lo up"]
    for site in sorted({site for site, _ in where}):
        bridge, up, own = f"site{site}", f"up{site}", launcher_interface(token, site)
        far = f"name {own} address {node_mac(subnet, site, LAUNCHER)} netns {launcher_pid}"
        lines += [
            f"link add {bridge} type bridge forward_delay 0 mcast_snooping 0",
            f"link set {bridge} up",
            f"link add {up} type veth peer {far}",
            f"link set {up} master {bridge} up",
        ]
        if switch == "user" and spec.apart():
            lines.append(f"link set tap{site} master {bridge} up")
    if switch == "netem" and spec.apart():
        lines += ["link add core type bridge forward_delay 0 mcast_snooping 0", "link set core up"]
        for site in sorted({site for site, _ in where}):
            lines += [
                f"link add edge{site} type veth peer name core{site}",
                f"link set edge{site} master site{site} up",
                f"link set core{site} master core up",
            ]
    for number, ((site, host), pid) in enumerate(zip(where, pids, strict=True)):
        lines += [
            f"link add n{number} type veth peer name eth0 address {node_mac(subnet, site, host)} netns {pid}",
            f"link set n{number} master site{site} up",
        ]
    return lines


@dataclass(frozen=True)
class LineEnd:
    """One end of a pair's own line: in which node, its interface, what it sends, and who is at the other end.

    Attributes:
        node, peer: numbers of the two nodes.
    """

    node: int
    peer: int
    interface: str
    peer_interface: str
    link: LabLink


def line_ends(spec: LabSpec) -> list[tuple[LineEnd, LineEnd]]:
    """The two ends of every pair's own line."""
    numbers = {node.name: number for number, node in enumerate(spec.nodes)}
    ends = []
    for number, (there, back) in enumerate(spec.lines()):
        a, b = numbers[there.source], numbers[there.target]
        names = f"line{number}a", f"line{number}b"
        ends.append((LineEnd(a, b, *names, there), LineEnd(b, a, *names[::-1], back)))
    return ends


def delayed_lines(spec: LabSpec) -> list[tuple[LineEnd, LineEnd]]:
    """Those of ``line_ends`` that take time, in one direction at least."""
    return [pair for pair in line_ends(spec) if any(end.link.latency_ms for end in pair)]


def line_commands(spec: LabSpec, *, switch: str, pids: Sequence[int]) -> list[str]:
    """For ``ip -batch`` in the fabric: every pair's own line, its ends put into their nodes.

    A line that takes time has two TAPs for ends where the switch is the user's: they are there already.
    """
    delayed = delayed_lines(spec) if switch == "user" else []
    lines = []
    for pair in line_ends(spec):
        if pair not in delayed:
            lines.append(f"link add {pair[0].interface} type veth peer name {pair[1].interface}")
        for end in pair:
            lines.append(f"link set {end.interface} address {line_mac(end.interface)}")
            lines.append(f"link set {end.interface} netns {pids[end.node]}")
    return lines


def line_mac(interface: str) -> str:
    """The locally administered MAC address of an end of a line, by its interface's name."""
    number = int(interface.removeprefix("line")[:-1])
    return f"02:53:4c:{number >> 8:02x}:{number & 255:02x}:{interface[-1] == 'b':02x}"


def network_shaping_commands(spec: LabSpec, switch: str) -> list[str]:
    """For ``tc -batch`` in the fabric: what goes towards the nodes, and between sites where netem does it."""
    lines = [
        f"qdisc add dev n{number} root {token_bucket(node.rate_mbit, queue_s(spec.sites.latency_ms))}"
        for number, node in enumerate(spec.nodes)
        if node.rate_mbit
    ]
    if switch == "netem" and spec.apart():
        latency_s = spec.sites.latency_ms / 1000
        for site, rate in enumerate(uplinks_bytes_per_s(spec)):
            # The delay is on the way out only; each direction of an uplink has its rate.
            lines.append(f"qdisc add dev edge{site} root {_netem(latency_s, rate)}")
            if rate is not None:
                lines.append(f"qdisc add dev core{site} root {_netem(0.0, rate)}")
    return lines


def _netem(latency_s: float, rate: float | None) -> str:
    text = f"netem delay {round(latency_s * 1e6)}us"
    if rate is None:
        return f"{text} limit 100000"
    # netem's limit counts packets and holds the delayed ones too.
    packets = max(90, int(rate * (_QUEUE_S + latency_s) / _MTU_BYTES))
    return f"{text} rate {int(rate * 8)}bit limit {packets}"


def node_commands(spec: LabSpec, subnet: int, number: int) -> list[str]:
    """For ``ip -batch`` in one node: its address, and its peers' so that no first packet asks for them."""
    where = node_places(spec)
    site, host = where[number]
    lines = [
        "link set lo up",
        f"addr add {node_address(subnet, site, host)}/16 brd + dev eth0",
        "link set eth0 up",
    ]
    lines += _segment_limit("eth0", spec.nodes[number].rate_mbit)
    peers = [place for index, place in enumerate(where) if index != number]
    lines += [
        f"neigh add {node_address(subnet, s, h)} lladdr {node_mac(subnet, s, h)} dev eth0 nud permanent"
        for s, h in [*peers, (site, LAUNCHER)]
    ]
    for end in own_line_ends(spec, number):
        peer = node_address(subnet, *where[end.peer])
        lines += [
            f"link set {end.interface} up",
            *_segment_limit(end.interface, end.link.rate_mbit),
            f"neigh add {peer} lladdr {line_mac(end.peer_interface)} dev {end.interface} nud permanent",
            f"route add {peer}/32 dev {end.interface} src {node_address(subnet, site, host)}",
        ]
    return lines


def own_line_ends(spec: LabSpec, number: int) -> list[LineEnd]:
    """The ends of lines that are in that node."""
    return [end for pair in line_ends(spec) for end in pair if end.node == number]


def _segment_limit(interface: str, rate_mbit: float | None) -> list[str]:
    """Segments that fit the bucket pass it whole; larger ones would be cut into frames."""
    if rate_mbit is None:
        return []
    return [f"link set {interface} gso_max_size {min(65536, int(burst_bytes(rate_mbit) * 0.9))}"]


def node_shaping_commands(spec: LabSpec, number: int, switch: str) -> list[str]:
    """For ``tc -batch`` in one node: what it sends."""
    rate = spec.nodes[number].rate_mbit
    lines = [f"qdisc add dev eth0 root {token_bucket(rate, queue_s(spec.sites.latency_ms))}"] if rate else []
    for end in own_line_ends(spec, number):
        rate, latency_ms = end.link.rate_mbit, end.link.latency_ms
        if switch == "netem" and latency_ms:
            shaped = _netem(latency_ms / 1000, None if rate is None else rate * 125_000 * _HEADERS)
        elif rate is not None:
            shaped = token_bucket(rate, queue_s(latency_ms))
        else:
            continue
        lines.append(f"qdisc add dev {end.interface} root {shaped}")
    return lines


def launcher_commands(spec: LabSpec, token: str, subnet: int) -> list[str]:
    """For ``ip -batch`` in the launcher's own namespace."""
    lines = []
    for site in sorted({site for site, _ in node_places(spec)}):
        own = launcher_interface(token, site)
        lines += [
            f"addr add {node_address(subnet, site, LAUNCHER)}/24 brd + dev {own}",
            f"link set {own} up",
        ]
    return lines


def free_subnets(first: int) -> list[int]:
    """The N whose 10.N.0.0/16 no route or address of this machine touches, beginning at ``first``."""
    taken: set[int] = set()
    for what in (["route", "show", "table", "all"], ["addr", "show"]):
        text = run_tool(["ip", "-j", "-4", *what])
        for item in json.loads(text or "[]"):
            entries = [item.get("dst", "")]
            entries += [f"{i.get('local', '')}/{i.get('prefixlen', 32)}" for i in item.get("addr_info", [])]
            for entry in entries:
                taken |= _covered(entry)
    return [n for n in ((first + i) % 256 for i in range(256)) if n not in taken]


def _covered(network: str) -> set[int]:
    host, _, length = network.partition("/")
    parts = host.split(".")
    bits = int(length or 32)
    if len(parts) != 4 or parts[0] != "10" or bits == 0:
        return set()
    second = int(parts[1])
    if bits >= 16:
        return {second}
    size = 1 << (16 - max(bits, 8))
    return set(range(second // size * size, second // size * size + size))


def run_batch(tool: str, lines: Iterable[str], *, pid: int | None = None) -> None:
    """Runs lines through ``ip`` or ``tc``, in the network namespace of ``pid`` where one is given.

    Raises:
        SkyctlError: with the tool's own words.
    """
    text = "\n".join(lines)
    if text:
        enter = [] if pid is None else ["nsenter", "-t", str(pid), "-n"]
        run_tool([*enter, tool, "-batch", "-"], text + "\n")


def run_tool(argv: Sequence[str], text: str = "") -> str:
    """Runs a program to its end and gives its output. Raises SkyctlError with its last words."""
    done = subprocess.run(argv, input=text, capture_output=True, text=True, check=False)
    if done.returncode:
        message = (done.stderr or done.stdout).strip()
        raise SkyctlError(f"`{' '.join(argv)}` failed ({done.returncode}): {message[-500:]}")
    return done.stdout
