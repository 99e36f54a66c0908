"""The launcher's orders for experts on other machines: to a host of experts, and to a rank that uses them.

Needs the standard library only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar

from skyctl.agent.message_fields import (
    Address,
    Count,
    DeviceName,
    Index,
    Label,
    MaxLength,
    Port,
    Seconds,
    Within,
)
from skyctl.transport.tls_identity import TlsIdentity
from skyctl.workload.recipe import Recipe
from skyctl.workload.workload_spec import WorkloadSpec

HostSecret = Annotated[str, MaxLength(200)]
LEAST_WAIT_S = 1.0
"""An expert is waited for so long in any case."""


def handshake_purpose(run_id: str, node: str) -> str:
    """The purpose that both ends prove (``transport.handshake``): the run, and the node of the host."""
    return f"experts {run_id} of {node}"


@dataclass(frozen=True)
class ExpertHostOrder:
    """Hold experts, and compute them for the ranks that hold their layers.

    Attributes:
        node: its name.
        device: as its node calls it.
        threads: that it computes with; None: as many as torch takes.
        slowdown: so many times longer it makes each computation take.
        address: to listen on.
        trunks: by rank, the layers with experts that it holds.
        secrets: by rank, what the host shares with it alone.
        steps: of the whole run.
        tls: the run's certificate and key; None: nothing is encrypted.
    """

    kind: ClassVar[str] = "expert-host"
    run_id: Label
    node: Label
    device: DeviceName
    threads: Count | None
    slowdown: Annotated[float, Within(1.0, 1e9)]
    address: Address
    trunks: Mapping[int, tuple[Index, ...]]
    secrets: Mapping[int, HostSecret] = field(repr=False)
    workload: WorkloadSpec
    recipe: Recipe
    steps: Count
    tls: TlsIdentity | None = None


@dataclass(frozen=True)
class ExpertHostListening:
    """The host can be connected to there."""

    kind: ClassVar[str] = "listening"
    address: Address
    port: Port


@dataclass(frozen=True)
class StopHostRequest:
    """The host ends; nothing is answered."""

    kind: ClassVar[str] = "stop"


@dataclass(frozen=True)
class HostAddress:
    """A host of experts, as a rank reaches it.

    Attributes:
        node: its name.
        secret: what the two share, and nobody else.
        layer_s: by layer, the seconds of a step in which it computes all tokens of the layer's experts, lines
            included.
        room: by layer, so many of its experts have room there.
        byte_s: seconds a byte over the line to it.
    """

    node: Label
    host: Address
    port: Port
    secret: HostSecret = field(repr=False)
    layer_s: Mapping[int, Seconds]
    room: Mapping[int, Index]
    byte_s: Seconds


@dataclass(frozen=True)
class ExpertsOrder:
    """The rank's layers have experts on hosts.

    Attributes:
        hosts: the rank is connected with all of them.
        holders: by layer, of each of its experts the host's place in ``hosts``.
        leads: the layers whose experts this rank gives to hosts: at first, after a host is lost, and where
            loads drift.
        alone: no other rank holds these layers, so it can compute experts itself if no host is left.
        least_wait_s: an expert is waited for so long in any case.
        record: of a run before, which is made again as it was (``step_record``); None: it is a new one.
    """

    hosts: tuple[HostAddress, ...]
    holders: Mapping[int, tuple[Index, ...]]
    leads: tuple[Index, ...]
    alone: bool
    least_wait_s: Seconds = LEAST_WAIT_S
    record: Any = None
