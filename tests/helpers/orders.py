"""Orders of ranks as the launcher makes them, on this machine, with what a test wants to be different."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import fields, is_dataclass, replace
from typing import Any, TypeVar

from skyctl.agent.message_fields import read_fields, write_fields
from skyctl.remote.credentials import make_credentials
from skyctl.run.rank_spec import RankSpec, peer_pairs, replica_sets
from skyctl.run.round_spec import LEAST_WAIT_S
from skyctl.worker.rank_order import AnyRankOrder, HelperOrder, LinkDtypes, RankOrder, SumOrder, WorldOrder
from skyctl.workload.recipe import Recipe
from skyctl.workload.workload_spec import WorkloadSpec

T = TypeVar("T")
WORLD_FIELDS = {field.name for field in fields(WorldOrder)}


def with_fields(record: T, **changes: Any) -> T:
    """The record with other fields, given as records or as JSON has them; of an order its world's, too."""
    told = {name: changes.pop(name) for name in WORLD_FIELDS & changes.keys() if hasattr(record, "world")}
    if told:
        changes["world"] = with_fields(record.world, **told)  # type: ignore[attr-defined]
    plain = {name: _plain(value) for name, value in changes.items()}
    cls = type(record)
    return cls(**read_fields(cls, write_fields(record) | plain, exact=True))


def _plain(value: Any) -> Any:
    if is_dataclass(value) and not isinstance(value, type):
        return write_fields(value)
    return json.loads(json.dumps(value))


def with_sync(order: RankOrder, **changes: Any) -> RankOrder:
    """The order with other fields of its ``sync``."""
    assert order.sync is not None
    return replace(order, sync=with_fields(order.sync, **changes))


def rank_order(rank: int = 0, stages: int = 1, **changes: Any) -> RankOrder:
    """The order of a stage of the only pipeline; ``changes`` as of ``with_fields``."""
    steps = changes.setdefault("steps", 2)
    before, after = (rank - 1 if rank else None), (rank + 1 if rank + 1 < stages else None)
    world = WorldOrder(
        rank=rank,
        ranks=stages,
        backend="skyctl",
        interface=None,
        hosts={peer: "127.0.0.1" for peer in (before, after) if peer is not None},
        before=before,
        after=after,
        clock_of=before,
        clock_for=() if after is None else (after,),
        timeout_s=LEAST_WAIT_S,
    )
    order = RankOrder(
        world=world,
        run_id="test",
        device="cpu:0",
        threads=1,
        slowdown=1.0,
        workload=WorkloadSpec("gpt:"),
        recipe=Recipe(total_steps=steps),
        steps=steps,
        pipeline=0,
        stage=rank,
        stages=stages,
        layers=(rank, rank + 1),
        microbatches=1,
        microbatch_range=(0, changes.get("microbatches", 1)),
        schedule="1f1b",
        in_flight=1,
        weights_behind=0,
        recompute=False,
        receive_window=0,
        link_dtypes=LinkDtypes(),
        compare_batches=True,
        weights=False,
        trace=False,
    )
    return with_fields(order, **changes)


def beside(order: RankOrder, rank: int, peers: Sequence[int], **changes: Any) -> RankOrder:
    """The order of that rank in the place of a stage's: a pipeline of its own that sums with its peers."""
    place = {"pipeline": rank, "stage": 0, "stages": 1, "before": None, "after": None, "clock_for": []}
    hosts = {str(peer): "127.0.0.1" for peer in peers}
    return with_fields(order, rank=rank, hosts=hosts, clock_of=None, **{**place, **changes})


def helper_order(order: RankOrder, sync: SumOrder | None = None) -> HelperOrder:
    """The order of a rank that helps, in the place of one that holds layers."""
    given = sync or order.sync or SumOrder("float32", 1024, ())
    return HelperOrder(order.world, order.device, order.steps, 0, given, (), order.trace)


def rank_spec(rank: int, node: str, order: AnyRankOrder | None = None, **more: Any) -> RankSpec:
    """That rank on the node's processor."""
    return RankSpec(rank, node, f"{node}/cpu:0", order or rank_order(), **more)


def sent_orders(specs: Sequence[RankSpec], *, encrypt: bool = False) -> list[Any]:
    """By rank, its order as the launcher sends it, with what ranks share."""
    told = make_credentials(len(specs), peer_pairs(specs), replica_sets(specs), encrypt=encrypt)
    return [spec.with_credentials(credentials) for spec, credentials in zip(specs, told, strict=True)]
