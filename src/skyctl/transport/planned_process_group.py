"""The part of a run's process group that all carriers share: its peers, its options, its refusals.

Collectives over all of a run's ranks are refused: there are ranks among them that hold other layers, or none,
and that would never call the same.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn, Protocol

import torch
import torch.distributed as dist

from skyctl.errors import RunError
from skyctl.transport import BACKEND
from skyctl.transport.peer_connection import PURPOSE
from skyctl.transport.tls_identity import TlsIdentity

PEER_READY_TIMEOUT_S = 3600.0
"""For a peer to build its stage and connect; the launcher watches it, so this is only a last resort."""
_COLLECTIVES = (
    "_allgather_base",
    "_reduce_scatter_base",
    "all_gather_single",
    "all_gather_single_coalesced",
    "all_to_all_single",
    "allgather",
    "allgather_coalesced",
    "allgather_into_tensor_coalesced",
    "allreduce",
    "allreduce_coalesced",
    "alltoall",
    "alltoall_base",
    "barrier",
    "broadcast",
    "gather",
    "monitored_barrier",
    "recv_anysource",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_single",
    "reduce_scatter_single_coalesced",
    "reduce_scatter_tensor_coalesced",
    "scatter",
)


class Store(Protocol):
    """The part of a ``dist.Store`` that ranks need to find each other."""

    def set(self, key: str, value: str) -> None: ...
    def get(self, key: str) -> bytes: ...


@dataclass(frozen=True)
class PairOptions:
    """All that a rank is told of its peers: the ``pg_options`` of ``init_process_group("skyctl", …)``.

    Attributes:
        hosts: by rank, the address at which each peer's machine is reached.
        secrets: by rank, what this rank shares with that peer, and with nobody else.
        interface: the network interface to use; None: the one on the route to the peer.
        identity: the TLS certificate of all ranks; None: nothing is encrypted.
        devices: by rank, where the tensors are that pass between it and this one, to choose NCCL where both
            ends are CUDA; of ranks that are not in it, the CPU.
        backend: what carries them: ``skyctl``, or ``gloo``, torch's own.
        ring: all ranks, in the order in which Gloo's own sums go round; None: nobody calls them.
        ready_s: how long a peer is waited for that is to connect.
        keeps_listening: until the group is closed, so that ranks may ``reconnect``.
        purpose: of these connections; a second group of the same ranks and secrets needs another.
    """

    hosts: Mapping[int, str]
    secrets: Mapping[int, str]
    interface: str | None = None
    identity: TlsIdentity | None = None
    devices: Mapping[int, torch.device] = field(default_factory=dict)
    backend: str = BACKEND
    ring: Sequence[int] | None = None
    ready_s: float = PEER_READY_TIMEOUT_S
    keeps_listening: bool = False
    purpose: str = PURPOSE


class PlannedProcessGroup(dist.ProcessGroup):
    """All ranks of a run, each talking to its peers alone: ``connect`` once, then ``send`` and ``recv``.

    Args:
        rank, size: of this process, and of all.
        peers: the ranks that this one talks to.
    """

    def __init__(self, rank: int, size: int, peers: Iterable[int]) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg] # torch's stub lacks this one
        self.peers = sorted(peers)

    def getBackendName(self) -> str:  # noqa: N802 — torch calls it so
        """The name that ``dist.get_backend`` gives: ``skyctl``, whatever carries the tensors."""
        return BACKEND

    @abstractmethod
    def connect(self, store: Store, options: PairOptions) -> None:
        """Connects to all peers at the same time.

        Args:
            store: any ``dist.Store`` that both ends of each pair reach until they are connected.

        Raises:
            PeerProtocolError: a peer does not say where it is.
            PeerUnreachableError: a peer can't be reached, or did not come in time.
            RunError: the interface named has no address.
        """

    @abstractmethod
    def close(self, *, graceful: bool = False) -> None:
        """Closes all connections; whatever waits on them ends. Idempotent.

        Args:
            graceful: each only once its peer closes it, too. All ranks go through their pairs in one order.
        """

    @abstractmethod
    def close_pair(self, peer: int) -> None:
        """Ends what is under way with that peer, at once."""

    def shutdown(self) -> None:
        """Closes the group, for ``dist.destroy_process_group``."""
        self.close()

    def abort(self) -> None:
        """Closes all connections at once; what waits on them ends."""
        self.close()

    def refused(self, name: str) -> RunError:
        """The error where a collective over all ranks of a run is asked for."""
        return RunError(
            f"{name} over all ranks of a run is refused: they hold other layers, or none, and never call it",
            hint="group=skyctl.replicas(), asked for in model(), is of those that hold the same layers",
        )

    def no_peer(self, rank: int) -> RunError:
        """The error where something is asked of a rank that is no peer."""
        return RunError(
            f"rank {self.rank()} exchanges nothing with rank {rank}; it does with "
            + (", ".join(map(str, self.peers)) or "no rank"),
            hint="only ranks that the plan makes neighbours, or that sum together, are connected",
        )


def _refuse(name: str) -> Callable[..., NoReturn]:
    def refuse(group: PlannedProcessGroup, *_args: Any, **_options: Any) -> NoReturn:
        raise group.refused(name)

    refuse.__name__, refuse.__doc__ = name, "Refused: see the module's text."
    return refuse


for _name in _COLLECTIVES:
    setattr(PlannedProcessGroup, _name, _refuse(_name.strip("_")))
