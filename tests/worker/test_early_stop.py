"""The best validation's checkpoint is kept, and a run ends once validations are no better."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from tests.worker.sums import ring
from tests.worker.workloads import LAYERS, edit_workload

from skyctl.checkpoint.node import layout
from skyctl.errors import InputError
from skyctl.workload.recipe import Recipe

Workloads = Callable[..., dict[str, Any]]
STEPS, EVERY = 16, 2
GIVEN_LOSSES = (
    "    return nn.functional.cross_entropy(outputs, targets)\n",
    "    if torch.is_grad_enabled():\n"
    "        return nn.functional.cross_entropy(outputs, targets)\n"
    "    return torch.tensor(LOSSES, dtype=torch.float32)[targets].mean() + 0 * outputs.sum()\n",
)
VALIDATION = """
LOSSES, calls = (*GIVEN, *[9.0] * 11), 0

def validation(batch_size, seed):
    global calls
    yield torch.zeros(batch_size, 5, dtype=torch.long), torch.full((batch_size,), calls)
    calls += 1
"""
"""By validation, the loss that it finds."""


def finding(spec: dict[str, Any], losses: Sequence[float]) -> dict[str, Any]:
    """The workload whose validations have these losses."""
    return edit_workload(spec, GIVEN_LOSSES, text=VALIDATION.replace("GIVEN", str(losses)))


def recipe(patience: int | None, **more: Any) -> dict[str, Any]:
    return Recipe(validate_every=EVERY, total_steps=STEPS, patience=patience, **more).to_dict()


def keeping(folder: Path, every: int = 3) -> dict[str, Any]:
    return {"folder": str(folder), "every": every, "keep": 2, "at_end": True}


def written(outcome: Any) -> dict[int, list[int]]:
    return {rank: [event["step"] for event in events] for rank, events in outcome.checkpoints.items()}


@pytest.mark.parametrize("cuts", [[0, 7], [0, 2, 5, 7]])
def test_all_stages_end_with_the_step_after_the_validation_that_was_too_many(
    cuts: list[int], workload: Workloads, pool: Any, driver: ModuleType, tmp_path: Path
) -> None:
    spec = finding(workload(), [5.0, 3.0, 4.0, 3.5, 3.25, 1.0])
    orders = driver.orders(
        spec, cuts, 4, "1f1b", STEPS, recipe=recipe(3), checkpoint=keeping(tmp_path / "r"), weights=True
    )
    outcome = pool.run(orders)
    assert not outcome.errors
    assert outcome.validation == pytest.approx({1: 5.0, 3: 3.0, 5: 4.0, 7: 3.5, 9: 3.25})
    assert [(result["steps"], result["stopped_early"]) for _, result in sorted(outcome.results.items())] == [
        (11, rank == 0) for rank in range(len(cuts) - 1)
    ]
    # those after 2 and 4 steps are better than all before, 3, 6 and 9 were due, 11 is the end
    assert written(outcome) == {rank: [2, 3, 4, 6, 9, 11] for rank in range(len(cuts) - 1)}
    assert layout.list_steps(tmp_path / "r") == [4, 9, 11]
    assert layout.pinned_steps(tmp_path / "r") == {4}


def test_a_better_one_takes_the_place_of_the_best_once_all_ranks_have_written_it(
    workload: Workloads, pool: Any, driver: ModuleType, tmp_path: Path
) -> None:
    spec, folder = finding(workload(), [3.0, 2.0, 4.0, 4.0]), tmp_path / "r"
    kept = []

    def look(_pool: Any, rank: int, event: dict[str, Any]) -> None:
        if event["event"] == "checkpoint" and rank == 1:
            kept.append((event["step"], sorted(layout.pinned_steps(folder))))

    orders = driver.orders(
        spec, [0, 3, 7], 4, "1f1b", 8, recipe=recipe(None), checkpoint=keeping(folder, every=0)
    )
    assert not pool.run(orders, look).errors
    assert kept[0][0] == 2
    assert kept[0][1] in ([2], [2, 4], [4]), "the ranks may be further when the test looks"
    assert kept[1][0] == 4
    assert set(kept[1][1]) >= {4}
    assert kept[2] == (8, [4])
    assert layout.list_steps(folder) == [4, 8]


def test_a_run_that_goes_on_counts_on(
    workload: Workloads, pool: Any, driver: ModuleType, tmp_path: Path
) -> None:
    spec, folder = finding(workload(), [3.0, 2.0, 4.0]), tmp_path / "r"
    first = driver.orders(
        spec, [0, 3, 7], 4, "1f1b", 6, recipe=recipe(None), checkpoint=keeping(folder, every=0)
    )
    assert not pool.run(first).errors
    best = {"step": 4, "loss": 2.0}
    resume = {"step": 6, "folder": str(folder), "layers": {}}

    def last_step(asked: dict[str, Any]) -> int:
        options = {"recipe": asked, "checkpoint": keeping(folder, every=0), "resume": resume, "best": best}
        outcome = pool.run(driver.orders(spec, [0, 4, 7], 4, "1f1b", STEPS, **options))
        assert not outcome.errors
        assert 4 in layout.list_steps(folder)
        return int(outcome.results[0]["steps"])

    assert last_step(recipe(2)) == 9, "one was no better before, and one is now"
    assert last_step(recipe(1)) == 7, "it had been enough before"
    assert last_step(recipe(2, patience_from=6)) == 11, "who resumes a run has new patience"


def test_pipelines_side_by_side_end_together(
    workload: Workloads, pool: Any, driver: ModuleType, tmp_path: Path
) -> None:
    """Only the first one validates: all write at each validation, as others can't know what it found."""
    spec = finding(workload(batch_size=8), [3.0, 2.0, 4.0, 4.0, 1.0])
    orders = driver.side_by_side(
        spec, LAYERS, [2, 1, 1], ring(3), STEPS, recipe=recipe(2), checkpoint=keeping(tmp_path / "r", every=0)
    )
    outcome = pool.run(orders)
    assert not outcome.errors
    ends = {rank: (result["steps"], result["stopped_early"]) for rank, result in outcome.results.items()}
    assert ends == {0: (9, True), 1: (9, False), 2: (9, False)}
    assert written(outcome) == {rank: [2, 4, 6, 8, 9] for rank in range(3)}
    assert layout.list_steps(tmp_path / "r") == [4, 8, 9]


def test_patience_needs_validations() -> None:
    with pytest.raises(InputError, match="--patience 3 counts validations") as caught:
        Recipe(patience=3, total_steps=9)
    assert caught.value.hint == "add --validate-every N"
