"""lab.yaml → ``LabSpec``: which nodes to emulate, how fast each is, and how they are linked."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import Field, field_validator, model_validator

from skyctl.errors import InvalidRecordError
from skyctl.inventory.yaml_document import (
    YamlDocument,
    YamlPath,
    describe_value,
    load_yaml,
    nearest_word_hint,
)
from skyctl.records.base import Name, Positive, Record, Seq

NAME = re.compile(r"^[A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?$")
"""A node's name is its host name and a folder's name; a lab's name is a folder's name."""

NODES_PER_SITE = 250
SITES = 250
LINKS = 600
"""Directions of pairs: the switch waits for two TAPs a pair that takes time, by select()."""
MIN_CPUS = 0.001
"""The kernel's smallest quota is 1 ms, its longest period 1 s."""

_HINT = "see docs/examples/lab.yaml for one that works"
_BOTH_WAYS = "a line has two directions, and `between` says both at once"


class LabNode(Record):
    """One emulated machine.

    ``cpus``: cores' worth of time it gets (0.4: 40% of one core). ``rate_mbit``: what a TCP stream carries
    over its link, each direction, 10^6 bit/s (the headers come on top); None: unlimited. ``python``: the
    interpreter that cluster.yaml names for it; None: the launcher's own.
    """

    name: Name
    cpus: float = Field(ge=MIN_CPUS)
    memory_gib: Positive | None = None
    rate_mbit: Positive | None = None
    site: Name | None = None
    python: Name | None = None

    @field_validator("name")
    @classmethod
    def _host_name(cls, value: str) -> str:
        if not NAME.match(value):
            raise ValueError("a lab node's name is letters, digits, '-', '_' and '.', at most 63 of them")
        return value


class LabSites(Record):
    """The network between sites: one-way latency, and what each site's uplink carries in each direction."""

    latency_ms: float = Field(default=0.0, ge=0, le=10_000)
    uplink_mbit: dict[str, Positive] = Field(default_factory=dict)


class LabLink(Record):
    """One direction of a line between two nodes that nothing else shares.

    ``rate_mbit``: as a node's; None: unlimited. ``latency_ms``: this way.
    """

    source: Name
    target: Name
    rate_mbit: Positive | None = None
    latency_ms: float = Field(default=0.0, ge=0, le=10_000)


class LabSpec(Record):
    """A whole lab. Nodes that name no site share one.

    ``cpu_slice_ms``: every node runs so long at a time and then stands still, for as long as its ``cpus`` ask
    for; caches are then as cold after a pause on all of them. None: each has its part of every
    ``cpu_period_ms`` (None: 10 ms; containers usually have 100).

    ``links``: a pair that is named (in both directions) has a line of its own: what its nodes send each other
    passes neither their ``rate_mbit`` nor what lies between their sites.
    """

    nodes: Seq[LabNode] = Field(min_length=1)
    cpu_slice_ms: float | None = Field(default=None, ge=1, le=1000)
    cpu_period_ms: float | None = Field(default=None, ge=1, le=1000)
    sites: LabSites = LabSites()
    links: Seq[LabLink] = ()

    @model_validator(mode="after")
    def _consistent(self) -> LabSpec:
        if self.cpu_slice_ms is not None and self.cpu_period_ms is not None:
            raise ValueError("cpu_slice_ms and cpu_period_ms are two ways to say the same; give one of them")
        if fault := _find_fault(self.nodes, self.sites, self.links):
            raise ValueError(fault[1])
        return self

    @staticmethod
    def site_of(node: LabNode) -> str:
        """The site's name; ``default`` where the node names none."""
        return node.site or "default"

    def site_names(self) -> list[str]:
        """Every site, in the order of its first node."""
        return list(dict.fromkeys(self.site_of(node) for node in self.nodes))

    def apart(self) -> bool:
        """Whether traffic between sites is delayed or limited at all."""
        return len(self.site_names()) > 1 and bool(self.sites.latency_ms or self.sites.uplink_mbit)

    def lines(self) -> list[tuple[LabLink, LabLink]]:
        """Every line of a pair's own: its direction that was named first, and the one back."""
        links = {(link.source, link.target): link for link in self.links}
        lines: dict[frozenset[str], tuple[LabLink, LabLink]] = {}
        for link in self.links:
            lines.setdefault(frozenset((link.source, link.target)), (link, links[link.target, link.source]))
        return list(lines.values())


def _find_fault(
    nodes: Sequence[LabNode], sites: LabSites, links: Sequence[LabLink]
) -> tuple[YamlPath, str] | None:
    """The first thing that does not fit the rest: where in the lab, and what is wrong. None: all fits."""
    numbers: dict[str, int] = {}
    for number, node in enumerate(nodes):
        if node.name in numbers:
            first = f"node {numbers[node.name] + 1} is the first"
            return ("nodes", number), f"duplicate node {node.name!r} ({first})"
        numbers[node.name] = number
    counts = Counter(map(LabSpec.site_of, nodes))
    for site in sites.uplink_mbit:
        if site not in counts:
            message = f"uplink_mbit names site {site!r}, which no node is in{nearest_word_hint(site, counts)}"
            return ("sites", "uplink_mbit", site), message
    for site, count in counts.items():
        if count > NODES_PER_SITE:
            return ("nodes",), f"site {site!r} has {count} nodes; a lab's site holds {NODES_PER_SITE}"
    if len(counts) > SITES:
        return ("nodes",), f"{len(counts)} sites; a lab holds {SITES}"
    ways: dict[tuple[str, str], int] = {}
    for number, link in enumerate(links):
        for name in (link.source, link.target):
            if name not in numbers:
                hint = nearest_word_hint(name, numbers)
                return ("links", number), f"links names node {name!r}, which the lab has not{hint}"
        if link.source == link.target:
            return ("links", number), f"links has a line from node {link.source!r} to itself"
        if (link.source, link.target) in ways:
            return ("links", number), f"links says {link.source} → {link.target} more than once"
        ways[link.source, link.target] = number
    for (a, b), number in ways.items():
        if (b, a) not in ways:
            return ("links", number), f"links says {a} → {b} and not {b} → {a}: {_BOTH_WAYS}"
    return (("links",), f"{len(ways)} links; a lab holds {LINKS}") if len(ways) > LINKS else None


def read_lab(path: str | Path) -> LabSpec:
    """Reads one lab.yaml.

    Raises:
        InputError: the file can't be read.
        InventoryError: anything wrong in it, with file and line.
    """
    document = load_yaml(path, hint=_HINT)
    document.mapping((), tuple(LabSpec.model_fields), "the file")
    items = document.sequence(("nodes",), "nodes")
    if not items:
        raise document.error(("nodes",), "nodes is empty; a lab needs at least one node", hint=_HINT)
    nodes = [_node(document, index) for index in range(len(items))]
    sites = _sites(document)
    links = _links(document)
    if fault := _find_fault(nodes, sites, [link for _, link in links]):
        (section, *inner), message = fault
        number = [links[int(at)][0] for at in inner] if section == "links" else inner
        raise document.error((section, *number), message)
    names = ("cpu_slice_ms", "cpu_period_ms")
    given = {name: value for name in names if (value := document.at((name,))) is not None}
    try:
        return LabSpec(nodes=tuple(nodes), sites=sites, links=tuple(link for _, link in links), **given)
    except InvalidRecordError as exc:
        raise document.validation(exc, (), "the file") from exc


def _node(document: YamlDocument, index: int) -> LabNode:
    loc = ("nodes", index)
    item = document.at(loc)
    if not isinstance(item, dict):
        message = f"a lab node is a mapping with a name and cpus, it is {describe_value(item)}"
        raise document.error(loc, message, hint=_HINT)
    where = f"node {item.get('name', index + 1)!r}"
    fields = document.mapping(loc, tuple(LabNode.model_fields), where)
    try:
        return LabNode(**fields)
    except InvalidRecordError as exc:
        raise document.validation(exc, loc, where) from exc


def _sites(document: YamlDocument) -> LabSites:
    fields = document.mapping(("sites",), tuple(LabSites.model_fields), "sites")
    document.mapping(("sites", "uplink_mbit"), None, "uplink_mbit")
    try:
        return LabSites(**{key: value for key, value in fields.items() if value is not None})
    except InvalidRecordError as exc:
        raise document.validation(exc, ("sites",), "sites") from exc


_LINK_KEYS = ("between", "from", "to", "rate_mbit", "latency_ms")


def _links(document: YamlDocument) -> list[tuple[int, LabLink]]:
    """The links of the file, one for each direction of each pair, each with its number in the file."""
    links: list[tuple[int, LabLink]] = []
    for index, item in enumerate(document.sequence(("links",), "links")):
        loc = ("links", index)
        where = f"link {index + 1}"
        if not isinstance(item, dict):
            message = f"a link is a mapping with the nodes that it is between, it is {describe_value(item)}"
            raise document.error(loc, message, hint=_HINT)
        fields = document.mapping(loc, _LINK_KEYS, where)
        ends = _link_ends(document, loc, fields)
        limits = {key: fields[key] for key in ("rate_mbit", "latency_ms") if fields.get(key) is not None}
        if not limits:
            raise document.error(loc, f"{where} has neither rate_mbit nor latency_ms", hint=_HINT)
        for source, target in (ends, ends[::-1]) if fields.get("between") else (ends,):
            try:
                links.append((index, LabLink(source=source, target=target, **limits)))
            except InvalidRecordError as exc:
                raise document.validation(exc, loc, where) from exc
    return links


def _link_ends(document: YamlDocument, loc: tuple[str, int], fields: dict[str, Any]) -> tuple[str, str]:
    """(from, to) of a link, as the file has it."""
    between, ends = fields.get("between"), [fields.get("from"), fields.get("to")]
    if between is not None:
        ends = [] if any(ends) or not isinstance(between, list) else between
    names = [name for name in ends if isinstance(name, str)]
    if len(names) != 2 or len(ends) != 2 or names[0] == names[1]:
        message = "a link names two nodes: `between: [n1, n2]`, or `from: n1` and `to: n2` for one direction"
        raise document.error(loc, message, hint=_HINT)
    return names[0], names[1]
