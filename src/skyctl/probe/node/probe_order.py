"""The launcher's order to a device's probe, checked where it arrives (``agent.task_orders``)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

from skyctl.agent.message_fields import Count, DeviceName, MaxLength, Within
from skyctl.transport.tls_identity import TlsIdentity
from skyctl.workload.workload_spec import WorkloadSpec


@dataclass(frozen=True)
class ProbeOrder:
    """Measure one device, as later requests say.

    Attributes:
        device: None: the node's first.
        devices: those of the node that are wanted; None: all.
        threads: None: as many as torch takes.
        slowdown: so many times longer it makes each computation take.
        workload: with the paths of this node; None: the device's generic speed is measured.
        tls: the certificate and key with which messages are measured through TLS; None: in the clear.
    """

    kind: ClassVar[str] = "probe"
    device: DeviceName | None
    devices: Annotated[tuple[DeviceName, ...], MaxLength(1000)] | None
    threads: Count | None
    slowdown: Annotated[float, Within(1.0, 1e9)]
    workload: WorkloadSpec | None = None
    tls: TlsIdentity | None = None
