"""Makes ``skyctl`` known to torch.distributed as the name of a backend, and a process one of its ranks.

If skyctl is installed, ``import torch`` calls ``register`` (the entry point ``torch.backends``); on nodes,
whose skyctl has been sent there, ranks call it themselves. It imports next to nothing: a group's parts come
when a group is made.
"""

from __future__ import annotations

import sys
from datetime import timedelta
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist

from skyctl.transport import BACKEND, GLOO

if TYPE_CHECKING:
    from skyctl.transport.peer_connection import PeerConnection
    from skyctl.transport.planned_process_group import PairOptions, PlannedProcessGroup
    from skyctl.transport.process_group import SkyctlProcessGroup


def register() -> None:
    """Registers the backend, for the CPU and the node's kind of accelerator; a second call does nothing."""
    if dist.is_available() and BACKEND not in dist.Backend.backend_list:
        accelerator = torch.accelerator.current_accelerator()
        devices = ["cpu"] if accelerator is None else ["cpu", accelerator.type]
        dist.Backend.register_backend(BACKEND, make_group, extended_api=True, devices=devices)


def make_group(request: Any, options: Any) -> PlannedProcessGroup:
    """The group that torch asks for with ``init_process_group("skyctl")`` and ``new_group``.

    Args:
        request: torch's ``DistributedBackendOptions``.
        options: the ``pg_options``: of a run's rank ``PairOptions``, of a script ``MeshOptions``, torch's own
            or None.
    """
    from skyctl.transport.planned_process_group import PairOptions

    if not isinstance(options, PairOptions):
        from skyctl.transport.mesh_process_group import MeshOptions, MeshProcessGroup

        if not isinstance(options, MeshOptions):  # torch's own: it may say that (2.14)
            said = (getattr(asked, "enable_reconfigure", False) for asked in (options, request))
            options = MeshOptions(enable_reconfigure=any(said))
        return MeshProcessGroup.meet(request, options)
    if options.backend == GLOO:
        from skyctl.transport.gloo_process_group import GlooProcessGroup

        return GlooProcessGroup(
            request.group_rank, request.group_size, options.hosts, request.timeout, options.ring
        )
    return planned_group(request.group_rank, request.group_size, options, request.timeout.total_seconds())


def planned_group(rank: int, size: int, options: PairOptions, timeout_s: float) -> SkyctlProcessGroup:
    """A group whose ranks talk to their peers alone, over this backend; nothing is connected yet.

    Args:
        timeout_s: for one transfer, waiting for the peer included.
    """
    from skyctl.transport.process_group import SkyctlProcessGroup

    pairs = {peer: planned_pair(peer, options, timeout_s) for peer in options.hosts}
    return SkyctlProcessGroup(rank, size, pairs)


def planned_pair(peer: int, options: PairOptions, timeout_s: float) -> PeerConnection:
    """The connection to one of the peers, as the options have it; nothing is connected yet."""
    from skyctl.transport.peer_connection import PeerConnection

    return PeerConnection(
        f"rank {peer} ({options.hosts[peer]})",
        timeout_s,
        secret=options.secrets[peer],
        peer_rank=peer,
        device=options.devices.get(peer),
        identity=options.identity,
        purpose=options.purpose,
    )


def join(store: Any, rank: int, size: int, options: PairOptions, timeout_s: float = 1800.0) -> Any:
    """Makes this process a rank of torch.distributed over this backend, and returns its world's group.

    Nothing is exchanged yet, and nobody waited for.

    Args:
        timeout_s: for one transfer, waiting for the peer included.
    """
    register()
    limit, pg_options = timedelta(seconds=timeout_s), cast("Any", options)
    hook = sys.excepthook
    dist.init_process_group(
        BACKEND, store=store, rank=rank, world_size=size, timeout=limit, pg_options=pg_options
    )
    sys.excepthook = hook  # torch's puts the rank before every line of a traceback
    return dist.group.WORLD


def join_alone() -> None:
    """Makes this process the only rank of a world, unless it is a rank already.

    So a user's code may ask torch.distributed who it is wherever it is called, and not in a run alone.
    """
    from skyctl.transport.planned_process_group import PairOptions

    if not dist.is_initialized():
        store: Any = dist.HashStore()  # type: ignore[attr-defined] # not in torch's stubs
        join(store, 0, 1, PairOptions({}, {}))
