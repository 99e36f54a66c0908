"""The launcher's requests to a running replicator: one frozen record each, read by ``agent.task_orders``.

``id``: the number that the answer names; None: only a failure is answered. The answers are in
``replicator_events``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from skyctl.agent.message_fields import Address, ByteCount, Index, Label, Port, Sha256

ByteLimits = Mapping[int, ByteCount]
"""By layer, the most bytes that its file can have."""


@dataclass(frozen=True)
class ListRequest:
    """Which files there are. ``named``: all that manifests name, present or not."""

    kind: ClassVar[str] = "list"
    named: bool = False
    id: Index | None = None


@dataclass(frozen=True)
class VerifyRequest:
    """Read files of a step. ``layers``: by layer, its file's digest; None: the one in its manifest."""

    kind: ClassVar[str] = "verify"
    step: Index
    layers: Mapping[int, Sha256 | None]
    id: Index | None = None


@dataclass(frozen=True)
class PullRequest:
    """Fetch files of a step from the replicator of ``node``, which listens at ``host`` and ``port``.

    ``layers``: by layer, its file's digest. ``attempt``: the one that has written them.
    """

    kind: ClassVar[str] = "pull"
    host: Address
    port: Port
    node: Label
    step: Index
    attempt: Index
    layers: Mapping[int, Sha256]
    limits: ByteLimits
    id: Index | None = None


@dataclass(frozen=True)
class PushedFile:
    """A file that arrived over the launcher's session, at ``path``."""

    path: Path
    sha256: Sha256


@dataclass(frozen=True)
class AdoptRequest:
    """Move files of a step that arrived over the launcher's session into their place."""

    kind: ClassVar[str] = "adopt"
    step: Index
    attempt: Index
    layers: Mapping[int, PushedFile]
    id: Index | None = None


@dataclass(frozen=True)
class FollowedPeer:
    """A replicator whose new files are copied: the one of ``node``."""

    host: Address
    port: Port
    node: Label


@dataclass(frozen=True)
class FollowRequest:
    """Copy what these write from now on, in the place of those before. ``keep``: how many steps stay."""

    kind: ClassVar[str] = "follow"
    peers: tuple[FollowedPeer, ...]
    keep: Index
    limits: ByteLimits
    id: Index | None = None


@dataclass(frozen=True)
class PinRequest:
    """These steps are followed first and never pruned, in the place of those before."""

    kind: ClassVar[str] = "pin"
    steps: tuple[Index, ...]
    id: Index | None = None


@dataclass(frozen=True)
class PruneRequest:
    """Remove the files of all of the run's steps but ``keep_steps``."""

    kind: ClassVar[str] = "prune"
    keep_steps: tuple[Index, ...]
    id: Index | None = None


@dataclass(frozen=True)
class ForgetRequest:
    """Remove the run's checkpoint folder from this node."""

    kind: ClassVar[str] = "forget"
    id: Index | None = None


@dataclass(frozen=True)
class StopReplicatorRequest:
    """The replicator ends; nothing is answered."""

    kind: ClassVar[str] = "stop"


ReplicatorRequest = (
    ListRequest
    | VerifyRequest
    | PullRequest
    | AdoptRequest
    | FollowRequest
    | PinRequest
    | PruneRequest
    | ForgetRequest
)
"""All but the last one, which has no answer."""
REPLICATOR_REQUESTS: tuple[type[ReplicatorRequest | StopReplicatorRequest], ...] = (
    ListRequest,
    VerifyRequest,
    PullRequest,
    AdoptRequest,
    FollowRequest,
    PinRequest,
    PruneRequest,
    ForgetRequest,
    StopReplicatorRequest,
)
