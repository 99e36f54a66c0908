"""The launcher's order to a node's replicator, checked where it arrives (``agent.task_orders``)."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, ClassVar

from skyctl.agent.message_fields import Address, Label, MaxLength, Seconds
from skyctl.transport.tls_identity import TlsIdentity


@dataclass(frozen=True)
class ReplicatorOrder:
    """Whose checkpoints a replicator serves and copies, and how the others reach it.

    Attributes:
        node: this one's name.
        folder: the run's on this node (``layout``).
        secret: what the run's replicators share.
        address: to listen on.
        tls: the run's certificate and key; None: nothing between replicators is encrypted.
        poll_s: how often those that it follows are asked for new files.
    """

    kind: ClassVar[str] = "replicator"
    run_id: Label
    node: Label
    folder: Path
    secret: Annotated[str, MaxLength(200)] = field(repr=False)
    address: Address
    poll_s: Seconds
    tls: TlsIdentity | None = None
