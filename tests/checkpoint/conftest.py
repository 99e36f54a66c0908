"""Replicators that end with the test."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.checkpoint.replicator_process import Node, Nodes

from skyctl.transport.tls_identity import TlsIdentity


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[Nodes]:
    """Starts replicators; at the end none has printed anything that was not expected."""
    started: list[Node] = []

    def start(name: str, tls: TlsIdentity | None = None) -> Node:
        started.append(Node(name, tmp_path / name, tls))
        started[-1].start()
        return started[-1]

    try:
        yield start
    finally:
        printed = [(node.name, node.close()) for node in started]
    for name, text in printed:
        lines = [line for line in text.splitlines() if not line.startswith("refused an unauthenticated peer")]
        assert not lines, f"{name}:\n{text}"
