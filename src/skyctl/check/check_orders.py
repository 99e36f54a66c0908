"""Orders and requests of ``skyctl check`` to a node: frozen records (``agent.task_orders``)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, ClassVar

from skyctl.agent.message_fields import Address, DeviceName, Index, MaxLength, Port, Seconds

Secret = Annotated[str, MaxLength(200)]


@dataclass(frozen=True)
class TorchOrder:
    """Say what torch finds there; ``devices``: those that are wanted, None: any."""

    kind: ClassVar[str] = "torch"
    devices: tuple[DeviceName, ...] | None


@dataclass(frozen=True)
class ServeOrder:
    """Answer questions until told to stop."""

    kind: ClassVar[str] = "serve"


@dataclass(frozen=True)
class CountAcceleratorsOrder:
    """Say how many accelerators there are."""

    kind: ClassVar[str] = "count-accelerators"


CheckOrder = TorchOrder | ServeOrder | CountAcceleratorsOrder
CHECK_ORDERS: tuple[type[CheckOrder], ...] = (TorchOrder, ServeOrder, CountAcceleratorsOrder)


@dataclass(frozen=True)
class ClockRequest:
    """Say what time it is. ``id``, here and below: the number that the answer names."""

    kind: ClassVar[str] = "clock"
    id: Index


@dataclass(frozen=True)
class EnvironmentRequest:
    """Say what there is of Python, processors, memory and room."""

    kind: ClassVar[str] = "facts"
    id: Index


@dataclass(frozen=True)
class ListenRequest:
    """Listen on a port of that address, for those who know the secret."""

    kind: ClassVar[str] = "listen"
    id: Index
    address: Address
    secret: Secret = field(repr=False)


@dataclass(frozen=True)
class PeerPort:
    """A port on which a peer listens, for those who know its secret."""

    host: Address
    port: Port
    secret: Secret = field(repr=False)


@dataclass(frozen=True)
class ConnectRequest:
    """Connect to each of the peers, by name; ``wait_s``: for each of them."""

    kind: ClassVar[str] = "connect"
    id: Index
    peers: Mapping[str, PeerPort]
    wait_s: Seconds


@dataclass(frozen=True)
class StopCheckRequest:
    """The node's check ends."""

    kind: ClassVar[str] = "stop"
    id: Index


CheckRequest = ClockRequest | EnvironmentRequest | ListenRequest | ConnectRequest | StopCheckRequest
CHECK_REQUESTS: tuple[type[CheckRequest], ...] = (
    ClockRequest,
    EnvironmentRequest,
    ListenRequest,
    ConnectRequest,
    StopCheckRequest,
)
