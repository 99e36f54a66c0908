"""The messages between a trunk rank and an expert host: frozen records, checked where they arrive.

An expert is named by its workload layer, and its number among all experts that the layer holds. Each request
has a ``call``, a number of its own, which the answer repeats. A host answers a rank's requests in their
order, but those behind an ``EndStep`` only after the update. Tensors go with the message (``message_link``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, TypeVar

from skyctl.agent.frames import FrameError
from skyctl.agent.message_fields import FieldError, Index, MaxLength, Within, read_fields, write_fields

T = TypeVar("T")
CallNumber = Annotated[int, Within(0, 1 << 60)]
Metadata = Mapping[str, Annotated[str, MaxLength(1 << 20)]]


@dataclass(frozen=True)
class BeginStep:
    """The rank's step begins, or begins again: nothing counts that it has asked for since the last update."""

    kind: ClassVar[str] = "begin"
    call: CallNumber
    step: Index


@dataclass(frozen=True)
class Forward:
    """With tokens [tokens, features]; answered by the expert's ``Result``.

    ``seed``: of what the expert draws at random; ``trains``: a backward may follow.
    """

    kind: ClassVar[str] = "forward"
    call: CallNumber
    layer: Index
    expert: Index
    seed: Annotated[int, Within(0, 1 << 32)]
    trains: bool


@dataclass(frozen=True)
class Backward:
    """With the gradient of the outputs of the forward ``of``; the ``Result`` is that of its tokens."""

    kind: ClassVar[str] = "backward"
    call: CallNumber
    of: CallNumber


@dataclass(frozen=True)
class EndStep:
    """The rank has no more gradients of the step; answered by ``StepEnded`` after the update."""

    kind: ClassVar[str] = "end"
    call: CallNumber
    step: Index


@dataclass(frozen=True)
class StateWanted:
    """An expert's weights and optimizer state after the rank's last step; answered by ``ExpertState``."""

    kind: ClassVar[str] = "state"
    call: CallNumber
    layer: Index
    expert: Index


@dataclass(frozen=True)
class HandOver:
    """An expert changes its host with the update at the end of this step; nothing is answered.

    Attributes:
        epoch: how often the expert was placed before.
        arrives: this host is the new one: the rank's ``Adopt`` follows, and what others ask of the expert
            waits for it, until the rank's next step begins. Else this host is the old one, and keeps the
            state until the end of the next step.
    """

    kind: ClassVar[str] = "hand-over"
    call: CallNumber
    layer: Index
    expert: Index
    epoch: Index
    arrives: bool


@dataclass(frozen=True)
class Adopt:
    """Hold an expert from now on, from this state, with its tensors; answered by ``Adopted``.

    Attributes:
        epoch: how often the expert was placed before.
        step: so many steps were done when the state was.
        done: so many steps are done now.
        names: of the tensors.
        metadata: of the state (``checkpoint.node.shards``).
    """

    kind: ClassVar[str] = "adopt"
    call: CallNumber
    layer: Index
    expert: Index
    epoch: Index
    step: Index
    done: Index
    names: tuple[str, ...]
    metadata: Metadata


@dataclass(frozen=True)
class Result:
    """The answer to a ``Forward`` or ``Backward``, with one tensor of the shape and dtype that came."""

    kind: ClassVar[str] = "result"
    call: CallNumber


@dataclass(frozen=True)
class NotDone:
    """The host can't do what was asked; ``by_expert``: the expert's own code has failed."""

    kind: ClassVar[str] = "not-done"
    call: CallNumber
    reason: Annotated[str, MaxLength(4000)]
    by_expert: bool = False


@dataclass(frozen=True)
class StepEnded:
    """``held``: (layer, expert, epoch) of all that the host holds, or is to adopt by a ``HandOver``."""

    kind: ClassVar[str] = "ended"
    call: CallNumber
    held: tuple[tuple[Index, Index, Index], ...]


@dataclass(frozen=True)
class ExpertState:
    """An expert's state after ``step`` steps, with its tensors, as of ``Adopt``."""

    kind: ClassVar[str] = "expert"
    call: CallNumber
    step: Index
    names: tuple[str, ...]
    metadata: Metadata


@dataclass(frozen=True)
class Adopted:
    """The host holds the expert."""

    kind: ClassVar[str] = "adopted"
    call: CallNumber


TrunkRequest = BeginStep | Forward | Backward | EndStep | StateWanted | HandOver | Adopt
HostAnswer = Result | NotDone | StepEnded | ExpertState | Adopted
TRUNK_REQUESTS: tuple[type[TrunkRequest], ...] = (
    *(BeginStep, Forward, Backward, EndStep),
    *(StateWanted, HandOver, Adopt),
)
HOST_ANSWERS: tuple[type[HostAnswer], ...] = (Result, NotDone, StepEnded, ExpertState, Adopted)


def to_header(message: TrunkRequest | HostAnswer) -> dict[str, Any]:
    """The message as the JSON object that is sent."""
    return {"op": message.kind} | write_fields(message)


def read_message(kinds: Sequence[type[T]], header: Mapping[str, Any]) -> T:
    """The message that has arrived.

    Raises:
        FrameError: it is none of these kinds, or a field is missing, unknown or wrong.
    """
    kind = header.get("op")
    cls = next((cls for cls in kinds if cls.kind == kind), None)  # type: ignore[attr-defined]
    if cls is None:
        raise FrameError(f"it sent {str(kind)[:40]!r}, which is nothing that is expected")
    try:
        return cls(**read_fields(cls, {k: v for k, v in header.items() if k != "op"}, exact=True))
    except FieldError as exc:
        raise FrameError(f"it sent {kind!r} with {exc}") from None
