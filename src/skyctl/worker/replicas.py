"""The ranks that hold the same layers as this one, as a process group for a user's own collectives.

The world of a run has other stages and helpers in it, which never call what a user's ``model()`` or ``loss``
calls. Those of the same stage do, if they make equally many microbatches in the same order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any, cast

import torch.distributed as dist

from skyctl.errors import RunError
from skyctl.transport import BACKEND
from skyctl.transport.mesh_process_group import MeshOptions
from skyctl.transport.planned_process_group import Store
from skyctl.transport.torch_backend import join_alone
from skyctl.worker.rank_order import RankOrder

REASONS: Mapping[str, str] = {
    "rhythm": "its replicas go on without each other (--local-steps, --staleness or --owners)",
    "elastic": "its replicas may leave, and the others go on without them (--elastic)",
    "stages": "its pipelines are cut at different layers",
    "microbatches": "its replicas make unequal numbers of microbatches a step",
    "order": "its replicas order forwards and backwards differently (--schedule, or recomputing)",
}
"""Why replicas would not call the same collectives."""


class _ReplicaStore:
    """The launcher's store as replicas use it: each key's second part is the rank that sets it, as must be.

    Args:
        ranks: by number in the group, the run's.
    """

    def __init__(self, store: Store, ranks: Sequence[int]) -> None:
        self._store, self._ranks = store, ranks

    def set(self, key: str, value: str) -> None:
        """Sets a key of this rank's."""
        self._store.set(self._named(key), value)

    def get(self, key: str) -> bytes:
        """The value of a rank's key; waits for it."""
        return self._store.get(self._named(key))

    def _named(self, key: str) -> str:
        what, number, *rest = key.split("/")
        return "/".join((f"replica {what}", str(self._ranks[int(number)]), *rest))


class _Here:
    """Of this process: what it is told, the group once it is asked for, and whether it is too late to ask."""

    store: Store | None = None
    order: RankOrder | None = None
    group: Any = None
    is_late = False


def replicas() -> dist.ProcessGroup:
    """The process group of the ranks that hold the same layers as this one, for collectives of your own.

    Ask for it in ``model()``, or while the file is loaded: ranks can't find each other once training has
    begun. Until then its collectives exchange nothing. Each replica must call the same collectives in the
    same order, as with any group. It is of the backend ``skyctl`` and connects each replica with each,
    whatever carries the run's own tensors.

    If the plan has one pipeline, and outside a run (``probe``, ``plan``, ``check``), it has one rank. In a
    script that is none of skyctl's, it is the group of all ranks.

    Raises:
        RunError: replicas make unequal numbers of microbatches, are cut differently, or go on without each
            other, so that a collective would wait for ever; training has begun; the run validates, which only
            one pipeline does; or it shares devices by turns.
    """
    if _Here.group is None:
        _Here.group = _make_group()
    return cast("dist.ProcessGroup", _Here.group)


def offer_replicas(store: Store | None, order: RankOrder | None) -> None:
    """Says who this rank's replicas are: ``replicas`` may be asked for from now on.

    Args:
        store: the launcher's, over which ranks find each other.
        order: the rank's; None: this process is no rank any more.
    """
    _Here.store, _Here.order, _Here.group, _Here.is_late = store, order, None, False


def end_offer() -> None:
    """From now on ranks can't meet any more; a group that is there stays, and its collectives are meant."""
    _Here.is_late = True
    if _Here.group is not None:
        _Here.group.rehearses = _Here.group.size() == 1


def close_replicas(*, graceful: bool = False) -> None:
    """Closes the group's connections; whatever waits on them ends. Idempotent."""
    if _Here.group is not None:
        _Here.group.close(graceful=graceful)


def _make_group() -> Any:
    order = _Here.order
    if order is None:
        join_alone()
        if dist.get_world_size() > 1:
            return dist.group.WORLD
    ours = None if order is None else order.replicas
    if order is None or ours is None:
        own = [dist.get_rank()]
        alone = cast("Any", MeshOptions())
        return dist.new_group(own, backend=BACKEND, pg_options=alone, use_local_synchronization=True)
    if ours.unlike is not None:
        figures = f" ({' and '.join(ours.unlike.figures)})" if ours.unlike.figures else ""
        raise RunError(
            f"skyctl.replicas() has no group in this run: {REASONS[ours.unlike.reason]}{figures}, and a "
            "collective would wait for ever",
            hint="--parallel data --strategy even makes replicas alike, if the microbatches divide evenly",
        )
    if order.recipe.validate_every is not None:
        raise RunError(
            "skyctl.replicas() does not go with --validate-every: one pipeline alone validates",
            hint="leave --validate-every out, and compare the checkpoints' loss afterwards",
        )
    if order.turns is not None:
        raise RunError(
            "skyctl.replicas() does not go with --turns: its collectives wait for other machines while they "
            "hold this device's turn, and runs could wait for each other for ever",
            hint="leave --turns out",
        )
    if _Here.is_late:
        raise RunError(
            "skyctl.replicas() was first called once training had begun, when ranks can't find each other",
            hint="call it in model(), and keep what it returns",
        )
    assert _Here.store is not None
    world = order.world
    options = MeshOptions(
        ours.secret.encode(),
        ours.address,
        world.tls,
        world.interface,
        _ReplicaStore(_Here.store, ours.ranks),
    )
    group: Any = dist.new_group(
        list(ours.ranks),
        timedelta(seconds=world.timeout_s),
        BACKEND,
        cast("Any", options),
        use_local_synchronization=True,
    )
    group.rehearses = True  # what the loss and layers give is found out first, by each rank for itself
    return group
