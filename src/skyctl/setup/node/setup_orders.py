"""Orders of ``skyctl setup`` to a node: one frozen record each, read by ``agent.task_orders``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from skyctl.agent.message_fields import Label


@dataclass(frozen=True)
class LookOrder:
    """Say what is there, and in an interpreter. ``python``: None: the one that runs us."""

    kind: ClassVar[str] = "look"
    python: str | None = None
    packages: tuple[str, ...] = ()


@dataclass(frozen=True)
class MakeOrder:
    """Make an environment.

    Attributes:
        name: the folder's.
        torch: the version, without what stands after its ``+``.
        requirements: further lines of the requirements file.
        options: its options, such as ``--pre``.
        anew: make it even if it is there: something in it is lacking.
        uv: uv's program, which was pushed there.
        index: ``index_url`` and ``extra_index_url``, where given.
        cpu_index: asked too, where it can be reached: it has torch without CUDA.
        wheels: file name → path of what was pushed here; None: from the index.
    """

    kind: ClassVar[str] = "make"
    name: Label
    torch: Label
    requirements: tuple[str, ...]
    options: tuple[str, ...]
    anew: bool
    owner: Label
    uv: str
    index: Mapping[str, str | None]
    cpu_index: str | None
    wheels: Mapping[str, str] | None


@dataclass(frozen=True)
class RemoveOrder:
    """End these owners' claim to all environments but ``keep``. ``dry_run``: say what would be removed."""

    kind: ClassVar[str] = "remove"
    owners: tuple[Label, ...]
    keep: str | None = None
    dry_run: bool = False


SetupOrder = LookOrder | MakeOrder | RemoveOrder
SETUP_ORDERS: tuple[type[SetupOrder], ...] = (LookOrder, MakeOrder, RemoveOrder)
