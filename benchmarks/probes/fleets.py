"""A lab's nodes with a probe's process on each, ready for orders: links without the layers before them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from runs.labs import Bench, lab

from skyctl.errors import SkyctlError
from skyctl.inventory.cluster_file import read_cluster
from skyctl.jobs.node_sessions import connect_nodes, require_all
from skyctl.probe.device_probes import DeviceProbes
from skyctl.probe.node.probe_order import ProbeOrder
from skyctl.remote.base import ConnectOptions
from skyctl.remote.peer_addresses import find_peer_addresses


@dataclass(frozen=True)
class Ready:
    """Processes that wait for orders, and by node the address at which its peers reach it."""

    probes: DeviceProbes
    addresses: dict[str, str]
    bench: Bench


def lab_text(nodes: Sequence[Mapping[str, Any]], **sites: Any) -> str:
    """A lab.yaml."""
    return yaml.safe_dump({"nodes": [dict(node) for node in nodes], "sites": sites})


@contextmanager
def ready(text: str) -> Iterator[Ready]:
    """Brings that lab up with a probe's process on every node; takes all of it down again."""
    with lab(text) as bench:
        folder = Path(bench.env["SKYCTL_CLUSTER"])
        cluster = read_cluster(folder)
        options = ConnectOptions(known_hosts=str(folder.parent / "known_hosts"))
        with connect_nodes(cluster.nodes, options) as links:
            require_all(links.failures)
            probes = DeviceProbes()
            try:
                for session in links.sessions.values():
                    probes.start(session, ProbeOrder(None, None, 1, 1.0), name="probe")
                probes.wait(probes.alive(), "facts", 300.0, lambda m, event: m.facts.update(event))
                if probes.failures:
                    raise SystemExit(str(probes.failures))
                addresses = {}
                for name, outcome in find_peer_addresses(links.sessions).items():
                    if isinstance(outcome, SkyctlError):
                        raise outcome
                    addresses[name] = outcome
                yield Ready(probes, addresses, bench)
            finally:
                probes.close()
