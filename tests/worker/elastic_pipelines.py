"""Orders for ranks of several pipelines, any of which may leave."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from types import ModuleType
from typing import Any

from tests.helpers.orders import with_fields
from tests.worker.sums import RouteEdges, places

from skyctl.worker.rank_order import ElasticOrder, RankOrder, RouteTree, SumGroupOrder, SumOrder


def trees_of(routes: Sequence[RouteEdges]) -> tuple[RouteTree, ...]:
    return tuple(RouteTree(share, root, tuple(up), tuple(down)) for share, root, up, down in routes)


def pipelines(
    driver: ModuleType,
    spec: dict[str, Any],
    cuts: list[int],
    shares: Sequence[int],
    steps: int,
    format_: str = "float32",
) -> list[RankOrder]:
    """Pipelines of the same cuts side by side, whose ranks may leave.

    Args:
        driver: ``tests/worker/driver.py``.
        shares: microbatches of each pipeline.
        format_: in which their sums are sent.
    """
    stages, count = len(cuts) - 1, len(shares)
    ranks = range(count * stages)
    routes = {
        stage: [
            (1.0, stage, [(rank, stage) for rank in others], [(stage, rank) for rank in others])
            for others in [[stage + stages * number for number in range(1, count)]]
        ]
        for stage in range(stages)
    }
    elastic_order = ElasticOrder(
        {rank: rank - rank % stages for rank in ranks},
        {stages * number: (sum(shares[:number]), sum(shares[: number + 1])) for number in range(count)},
        {stage: trees_of(routes[stage]) for stage in routes},
    )
    made = []
    for number, share in enumerate(shares):
        first = sum(shares[:number])
        for stage, order in enumerate(driver.orders(spec, cuts, sum(shares), "1f1b", steps)):
            rank = stages * number + stage
            group = SumGroupOrder(
                stage,
                4 * stage,
                tuple(places(routes[stage], rank)),
                start=cuts[stage],
                stop=cuts[stage + 1],
            )
            made.append(
                with_fields(
                    replace(
                        order,
                        pipeline=number,
                        microbatch_range=(first, first + share),
                        sync=SumOrder(format_, 65536, (group,)),
                        elastic=elastic_order,
                        weights=True,
                    ),
                    rank=rank,
                    ranks=len(ranks),
                    before=rank - 1 if stage else None,
                    after=rank + 1 if stage + 1 < stages else None,
                    clock_of=None,
                    clock_for=[],
                    hosts={str(peer): "127.0.0.1" for peer in ranks if peer != rank},
                )
            )
    return made
