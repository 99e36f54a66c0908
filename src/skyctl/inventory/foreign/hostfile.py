"""Hostfiles: of DeepSpeed and Open MPI (``host slots=4``), of MPICH and Intel MPI (``host:4``)."""

from __future__ import annotations

import re
from dataclasses import replace

from skyctl.errors import InventoryError
from skyctl.inventory.foreign.model import Notes
from skyctl.inventory.init import NewNode

_LINE = re.compile(
    r"^(?:(?P<user>[^@\s:=]+)@)?(?:\[(?P<six>[0-9A-Fa-f]*:[0-9A-Fa-f]*:[0-9A-Fa-f:.%\w]*)\]|(?P<host>[^\s:=\[\]^]+))(?::(?P<count>\d+))?$"
)
_SLOTS = ("slots", "slot", "cpu", "count", "sockets")
_MOST_SLOTS = 1024
_KNOWN = {
    **dict.fromkeys(_SLOTS, "slots"),
    **dict.fromkeys(("max_slots", "max-slots", "slots_max", "slots-max", "cpu_max", "binding"), "unused"),
    **dict.fromkeys(("user", "username", "user_name", "user-name"), "user"),
    "port": "port",
    "ifname": "interface",
}


def looks_so(text: str) -> bool:
    """Whether every line is a host with nothing behind it but slots and the like."""
    lines = _lines(text)
    return bool(lines) and all(
        (_LINE.match(words[0]) or words[0].startswith("^"))
        and all(word.partition("=")[0].lower() in _KNOWN and "=" in word for word in words[1:])
        for _, words in lines
    )


def read(text: str, path: str, notes: Notes) -> list[NewNode]:
    """The hosts; one that stands twice has the sum of its slots. ``localhost`` is this machine itself.

    Raises:
        InventoryError: with file and line.
    """
    nodes: dict[str, NewNode] = {}
    for number, words in _lines(text):
        if words[0].startswith("^"):
            notes.add("hosts that are ruled out (^HOST) are not taken", words[0][1:])
            continue
        node = _node(words, f"{path}:{number}", notes)
        before = nodes.get(node.name)
        if before is not None:
            node = replace(node, slots=(before.slots or 0) + (node.slots or 0) or None)
        nodes[node.name] = node
    return list(nodes.values())


def _lines(text: str) -> list[tuple[int, list[str]]]:
    """(number, words) of the lines that are not empty; ``slots = 4`` is one word."""
    found = []
    for number, raw in enumerate(text.splitlines(), 1):
        words = re.sub(r"\s*=\s*", "=", raw.split("#")[0]).split()
        if words:
            found.append((number, words))
    return found


def _node(words: list[str], where: str, notes: Notes) -> NewNode:
    found = _LINE.match(words[0])
    assert found is not None  # looks_so has seen it
    host = found["six"] or found["host"]
    fields = {"slots": found["count"], "user": found["user"], "port": None, "interface": None}
    for word in words[1:]:
        key, _, value = word.partition("=")
        meant = _KNOWN[key.lower()]
        if meant == "unused":
            notes.add(f"{key} has no meaning here", host)
        else:
            fields[meant] = value
    for name, most in (("slots", _MOST_SLOTS), ("port", 65535)):
        given = fields[name]
        if given is not None and not (given.isascii() and given.isdigit() and 1 <= int(given) <= most):
            raise InventoryError(f"{where}: {name} of {host} is a number from 1 to {most}, not {given!r}")
    slots, port = fields["slots"], fields["port"]
    local = host in ("localhost", "127.0.0.1", "::1")
    return NewNode(
        host,
        None,
        None if local else fields["user"],
        int(port) if port and not local else None,
        local,
        interface=fields["interface"],
        slots=int(slots) if slots else None,
    )
