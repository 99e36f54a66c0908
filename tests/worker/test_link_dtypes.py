"""Training over links that carry less: the losses stay near, and what has diverged shows."""

from __future__ import annotations

import math
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from tests.helpers.orders import with_fields

from skyctl.workload.workload_spec import WorkloadSpec

GPT = "gpt:layers=2,hidden=64,heads=2,context=16"
STEPS = 10
BOUNDS = {"bfloat16": 0.01, "int8": 0.03}
"""The furthest a loss may be from that of the same run without (docs/runtime.md has what is typical)."""


def links(number: int, dtype: str | None) -> list[dict[str, str | None]]:
    """``link_dtypes`` of each of so many ranks."""
    return [
        {
            "to_next": dtype if rank + 1 < number else None,
            "from_next": dtype if rank + 1 < number else None,
            "to_previous": dtype if rank else None,
            "from_previous": dtype if rank else None,
        }
        for rank in range(number)
    ]


def losses(
    pool: Any, driver: ModuleType, spec: dict[str, Any], dtype: str | None, cuts: list[int], steps: int
) -> list[float]:
    orders = driver.orders(spec, cuts, 2, "1f1b", steps)
    linked = zip(orders, links(len(orders), dtype), strict=True)
    outcome = pool.run([with_fields(order, link_dtypes=dtypes) for order, dtypes in linked])
    assert not outcome.errors, outcome.errors
    losses: list[float] = outcome.losses
    return losses


@pytest.mark.slow
def test_losses_stay_within_the_stated_bounds(pool: Any, driver: ModuleType) -> None:
    spec = WorkloadSpec(source=GPT, batch_size=8, seed=1).to_dict()
    cuts = [0, 3, 6]
    plain = losses(pool, driver, spec, None, cuts, STEPS)
    assert plain[-1] < plain[0] - 0.2
    for dtype, bound in BOUNDS.items():
        coded = losses(pool, driver, spec, dtype, cuts, STEPS)
        assert max(abs(a - b) for a, b in zip(coded, plain, strict=True)) <= bound, dtype
        assert coded != plain


def test_tuples_with_integers_go_over_encoded_links(workload: Any, pool: Any, driver: ModuleType) -> None:
    spec = workload("sgd")
    plain = losses(pool, driver, spec, None, [0, 2, 3, 7], 10)
    assert losses(pool, driver, spec, "float32", [0, 2, 3, 7], 10) == plain
    for dtype in ("bfloat16", "int8"):
        assert losses(pool, driver, spec, dtype, [0, 2, 3, 7], 10) == pytest.approx(plain, rel=0.02)


@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
def test_a_divergence_is_seen_at_the_other_end(
    dtype: str, workload: Any, pool: Any, driver: ModuleType
) -> None:
    spec = workload(replace=("return x.relu(), ids, skip", "return x.relu() / 0 * 0, ids, skip"))
    assert all(math.isnan(loss) for loss in losses(pool, driver, spec, dtype, [0, 3, 7], 2))


def test_only_the_pairs_that_a_plan_needs_connect(pool: Any, driver: ModuleType, workload: Any) -> None:
    pairs: set[tuple[int, int]] = set()

    def look(running: Any, rank: int, event: dict[str, Any]) -> None:
        if event["event"] == "step" and rank == 2:
            pairs.update(_connections([process.popen.pid for process in running.processes]))

    outcome = pool.run(driver.orders(workload(), [0, 2, 4, 7], 4, "1f1b", 20), look)
    assert not outcome.errors, outcome.errors
    assert [rank for rank, event in outcome.order if event["event"] == "stored"] in ([0, 1], [1, 0])
    assert pairs == {(0, 1), (1, 2)}


def _connections(pids: list[int]) -> set[tuple[int, int]]:
    """Which of these processes are connected with each other over TCP, as pairs of their places."""
    ends: dict[str, tuple[str, str]] = {}
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        fields = line.split()
        if fields[3] == "01":  # established
            ends[f"socket:[{fields[9]}]"] = (fields[1], fields[2])
    owner: dict[tuple[str, str], int] = {}
    for place, pid in enumerate(pids):
        for descriptor in Path(f"/proc/{pid}/fd").iterdir():
            try:
                name = str(descriptor.readlink())
            except OSError:
                continue
            if name in ends:
                owner[ends[name]] = place
    met = ((place, owner.get((far, near))) for (near, far), place in owner.items())
    return {(min(a, b), max(a, b)) for a, b in met if b is not None and a != b}
