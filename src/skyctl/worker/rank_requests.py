"""The launcher's requests to a running rank: one frozen record each, read by ``agent.task_orders``."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, ClassVar

from skyctl.agent.message_fields import Index, Label, MaxLength, Seconds
from skyctl.worker.member_messages import Accepted, Promise, Refused
from skyctl.worker.rank_events import StoreKey, StoreValue, SumSizes
from skyctl.worker.rank_order import Secret


@dataclass(frozen=True)
class BuildRequest:
    """The rank's environment is the one its plan was made for: it may build its stage."""

    kind: ClassVar[str] = "build"


@dataclass(frozen=True)
class EnterRequest:
    """To a rank that takes turns: it may ask for memory on its device, and says when it has it."""

    kind: ClassVar[str] = "enter"


@dataclass(frozen=True)
class StoredRequest:
    """A key that the rank waits for, as another one has set it; ``value``: in hex."""

    kind: ClassVar[str] = "stored"
    key: StoreKey
    value: StoreValue


@dataclass(frozen=True)
class StartRequest:
    """All ranks are ready: the first step begins. ``sums``: what is summed, for a rank that only helps."""

    kind: ClassVar[str] = "start"
    sums: SumSizes | None = None


@dataclass(frozen=True)
class TokensRequest:
    """To the first rank of those that generate: the tokens that follow those before."""

    kind: ClassVar[str] = "tokens"
    ids: Annotated[tuple[Index, ...], MaxLength(1 << 20)]


@dataclass(frozen=True)
class StopTrainingRequest:
    """To the first rank: the run ends after the step under way, or the next one."""

    kind: ClassVar[str] = "stop"


@dataclass(frozen=True)
class AdmitRequest:
    """A rank of a higher number wants to join: it is to be let in at ``host``.

    ``secret``: what the two share, and nobody else. ``limit_s``: how long it is waited for.
    """

    kind: ClassVar[str] = "admit"
    rank: Index
    host: Label
    secret: Secret = field(repr=False)
    limit_s: Seconds


@dataclass(frozen=True)
class WitnessRequest:
    """The answer of the witness to a rank that has asked: one of these."""

    kind: ClassVar[str] = "witness"
    promise: Promise | None = None
    accepted: Accepted | None = None
    refused: Refused | None = None
