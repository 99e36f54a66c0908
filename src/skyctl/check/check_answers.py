"""A node's answers to ``skyctl check`` (``check_task``): one frozen record for each question."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, ClassVar

from skyctl.agent.message_fields import (
    ByteCount,
    DeviceName,
    Label,
    MaxLength,
    Port,
    Seconds,
    Within,
)

MOST_DEVICES = 256
MOST_PEERS = 100_000
Number = Annotated[int, Within(0, 2**53)]
Cpus = Annotated[float, Within(0.0, 1e6)]


@dataclass(frozen=True)
class ClockAnswer:
    """The node's clock, in seconds since 1970."""

    kind: ClassVar[str] = "answer"
    id: Number
    time_s: Annotated[float, Within(0.0, 1e11)]


@dataclass(frozen=True)
class FolderFacts:
    """A folder, and how much room its disk has."""

    path: Annotated[str, MaxLength(4096)]
    free_bytes: ByteCount | None


@dataclass(frozen=True)
class HostEnvironment:
    """Python, processors, memory and limits of the node."""

    kind: ClassVar[str] = "answer"
    id: Number
    python: Label
    executable: Annotated[str, MaxLength(4096)]
    cpus: Cpus
    cpu_quota: Cpus | None
    memory_total_bytes: ByteCount
    memory_available_bytes: ByteCount
    memory_limit_bytes: ByteCount | None
    nofile: tuple[Number, Number] | None
    shm_bytes: ByteCount | None
    cache: FolderFacts
    tmp: FolderFacts


@dataclass(frozen=True)
class ListenAnswer:
    """The port at which peers reach the node, or why there is none."""

    kind: ClassVar[str] = "answer"
    id: Number
    port: Port | None = None
    error: Label | None = None


@dataclass(frozen=True)
class PeerResult:
    """How long it took to connect to a peer, or why that failed."""

    connect_s: Seconds | None = None
    error: Label | None = None


@dataclass(frozen=True)
class ConnectAnswer:
    """By peer, what came of connecting to it."""

    kind: ClassVar[str] = "answer"
    id: Number
    results: Annotated[Mapping[str, PeerResult], MaxLength(MOST_PEERS)] | None = None
    error: Label | None = None


ANSWERS: Mapping[str, type] = {
    "clock": ClockAnswer,
    "facts": HostEnvironment,
    "listen": ListenAnswer,
    "connect": ConnectAnswer,
}
"""By ``op``, the record of its answer."""


@dataclass(frozen=True)
class TorchDevice:
    """A device that torch sees."""

    id: DeviceName
    name: Label
    memory_bytes: ByteCount | None


@dataclass(frozen=True)
class DtypeTrial:
    """The outcome of a trial of a dtype, as ``check_report.DtypeReport`` has it."""

    dtype: Annotated[str, MaxLength(100)]
    works: bool
    max_cpu_isa: Label | None
    died_by: Label | None


@dataclass(frozen=True)
class TorchEnvironment:
    """Torch, and what it sees and can do there."""

    kind: ClassVar[str] = "result"
    torch: Label
    distributed: bool
    threads: Annotated[int, Within(1, 10**6)]
    devices: Annotated[tuple[TorchDevice, ...], MaxLength(MOST_DEVICES)]
    missing: Annotated[tuple[Label, ...], MaxLength(MOST_DEVICES)]
    faults: Annotated[Mapping[str, str], MaxLength(MOST_DEVICES)]
    dtypes: Annotated[tuple[DtypeTrial, ...], MaxLength(100)]


@dataclass(frozen=True)
class AcceleratorCount:
    """How many accelerators there are; ``source``: who found them, torch or ``nvidia-smi``."""

    kind: ClassVar[str] = "result"
    count: Annotated[int, Within(0, MOST_DEVICES)]
    source: Label
