"""Names of devices cut to the room that a chart has for them."""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence


def device_names(labels: Sequence[str], limit: int = 22) -> dict[str, str]:
    """By label the name to show: without its domain if names still differ, at most ``limit`` long."""
    if any(len(label) > limit for label in labels):
        bare_names = [_without_domain(label) for label in labels]
        if len(set(bare_names)) == len(set(labels)):
            return {label: shortened(name, limit) for label, name in zip(labels, bare_names, strict=True)}
    return {label: shortened(label, limit) for label in labels}


def _without_domain(label: str) -> str:
    """``box.lab.example.org/cuda:1`` → ``box/cuda:1``; an address keeps its figures."""
    node, slash, device = label.rpartition("/") if "/" in label else (label, "", "")
    first = node.partition(".")[0]
    return node + slash + device if first.isdigit() or not first else first + slash + device


def shortened(text: str, limit: int = 22) -> str:
    """At most ``limit`` characters, the middle left out; control characters become dots."""
    clean = "".join(c if unicodedata.category(c)[0] != "C" else "·" for c in text)
    if len(clean) <= limit:
        return clean
    tail = (limit - 1) // 2
    return f"{clean[: limit - 1 - tail]}…{clean[-tail:]}"
