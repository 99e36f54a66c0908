"""The launcher's requests to a device's probe: one frozen record each, read by ``agent.task_orders``.

Needs the standard library only: the launcher makes them without torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, ClassVar

from skyctl.agent.message_fields import (
    Address,
    ByteCount,
    Bytes,
    Count,
    Index,
    Label,
    Matches,
    MaxLength,
    Port,
    Seconds,
    Within,
)

Secret = Annotated[str, MaxLength(200)]


@dataclass(frozen=True)
class DistinctLayer:
    """One distinct layer, the first of its kind, at the microbatch sizes to measure.

    ``signatures`` and ``needs_bytes`` (what running it takes) are by microbatch size. ``known_sizes``: those
    at which it is only run as company for others.
    """

    index: Index
    name: Label
    signatures: Mapping[int, Label]
    needs_bytes: Mapping[int, Bytes]
    known_sizes: tuple[Count, ...] = ()


@dataclass(frozen=True)
class MeasureRequest:
    """Measure the device: its layers' times, what messages cost, its memory.

    Attributes:
        budget_s, cap_s: seconds that the first pass over the layers may take, and all of the measuring.
        layers: empty: the device's generic speed is measured.
        kinds: by microbatch size, the position in ``layers`` that each layer of the workload is like.
        threads: None: as the order says.
        generic: whether the generic speed is measured beside layers.
        handling: whether it is measured what messages cost; ``gloo``: over Gloo as well.
        memory_bytes: the most that may be used; None: all there is.
        crowding: how many devices there are for each of the processors that it shares; 1 at least.
        gradient_bytes: of all layers' gradients in float32.
        action_s: the call overhead that is known from earlier; None: it is measured.
    """

    kind: ClassVar[str] = "measure"
    budget_s: Seconds
    cap_s: Seconds
    layers: tuple[DistinctLayer, ...]
    kinds: Mapping[int, tuple[Index, ...]]
    threads: Count | None
    generic: bool
    handling: bool
    gloo: bool
    memory_bytes: Bytes | None
    crowding: Annotated[float, Within(1.0, 1e6)]
    gradient_bytes: Bytes
    action_s: Seconds | None = None


@dataclass(frozen=True)
class CountRequest:
    """All devices are through their layers: what is measured for ``seconds`` from now on counts."""

    kind: ClassVar[str] = "count"
    seconds: Seconds


@dataclass(frozen=True)
class StopMeasuringRequest:
    """All devices have measured their layers, so this one stops measuring its own."""

    kind: ClassVar[str] = "stop"


@dataclass(frozen=True)
class CompareRequest:
    """Train the model whole and cut into layers, with so many samples, for at most ``limit_s``."""

    kind: ClassVar[str] = "compare"
    samples: Count
    limit_s: Seconds


@dataclass(frozen=True)
class LinkRequest:
    """Measure the link with one peer.

    Attributes:
        peer: its name.
        address: this node's own.
        role: ``listen``, or ``connect`` to ``host`` and ``port``.
        timeout_s: how long the peer is waited for.
    """

    kind: ClassVar[str] = "link"
    peer: Label
    secret: Secret = field(repr=False)
    address: Address
    role: Annotated[str, Matches("listen|connect")]
    timeout_s: Seconds
    host: Address | None = None
    port: Port | None = None


@dataclass(frozen=True)
class FlowPair:
    """Messages between this node and one peer: how many each way, and their sizes."""

    peer: Label
    secret: Secret = field(repr=False)
    messages: Count
    send_bytes: ByteCount
    receive_bytes: ByteCount


@dataclass(frozen=True)
class FlowRequest:
    """Take part in the flows between a hub and its peers.

    Attributes:
        hub: its node's name.
        address: this node's own.
        role: ``hub``, or ``peer``, which connects to ``host`` and ``port``.
        pairs: a peer has one, with the hub.
        timeout_s: how long each peer is waited for; ``transfer_s``: each message.
        hold: the hub says that it is ready, and waits for a ``GoRequest``.
    """

    kind: ClassVar[str] = "line"
    hub: Label
    address: Address
    role: Annotated[str, Matches("hub|peer")]
    pairs: Annotated[tuple[FlowPair, ...], MaxLength(1000)]
    timeout_s: Seconds
    transfer_s: Seconds
    hold: bool = False
    host: Address | None = None
    port: Port | None = None


@dataclass(frozen=True)
class GoRequest:
    """All hubs are ready: the flows begin."""

    kind: ClassVar[str] = "go"


@dataclass(frozen=True)
class QuitRequest:
    """The device's probe ends."""

    kind: ClassVar[str] = "quit"


ProbeRequest = (
    MeasureRequest
    | CountRequest
    | StopMeasuringRequest
    | CompareRequest
    | LinkRequest
    | FlowRequest
    | GoRequest
    | QuitRequest
)
PROBE_REQUESTS: tuple[type[ProbeRequest], ...] = (
    MeasureRequest,
    CountRequest,
    StopMeasuringRequest,
    CompareRequest,
    LinkRequest,
    FlowRequest,
    GoRequest,
    QuitRequest,
)
