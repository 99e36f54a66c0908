"""Shared parameters in the plan: the seconds of their exchange, found again by ``verify``."""

from __future__ import annotations

import pytest

from skyctl.errors import InputError, InvalidRecordError
from skyctl.planner.api import plan, verify
from skyctl.records.plan import Plan
from skyctl.records.problem import Device, Layer, Link, Problem, SharedResource, Tie

MEGABYTE = 1e6


def problem(*ties: Tie, memory_bytes: float = 2.5e6, **more: object) -> Problem:
    """Six layers of a megabyte on three devices of two and a half, over links of 10 and 20 MB/s."""
    ids = ("a", "b", "c")
    return Problem(
        layers=tuple(
            Layer(name=str(i), flops=1e6, state_bytes=MEGABYTE, activation_bytes=1.0, output_bytes=1.0)
            for i in range(6)
        ),
        devices=tuple(Device(id=i, flops_per_s=1e9, memory_bytes=memory_bytes) for i in ids),
        links=tuple(
            Link(source=s, target=t, latency_s=0.01, bandwidth_bytes_per_s=1e7 if s < t else 2e7)
            for s in ids
            for t in ids
            if s != t
        ),
        microbatches=4,
        ties=ties,
        **more,  # type: ignore[arg-type]
    )


def test_the_exchange_is_added_and_the_plan_is_no_longer_called_optimal() -> None:
    plain = plan(problem())
    tied = plan(problem(Tie(layers=(0, 5), bytes=MEGABYTE)))
    assert tied.predicted.sync_s == pytest.approx(0.1 + 0.02)
    assert tied.certificate.value_s == tied.predicted.iteration_s
    assert tied.predicted.iteration_s - tied.predicted.sync_s == pytest.approx(plain.predicted.iteration_s)
    assert (plain.certificate.status, tied.certificate.status) == ("optimal", "bounded")
    assert verify(tied.problem, tied).ok
    less = tied.model_copy(update={"predicted": tied.predicted.model_copy(update={"sync_s": 0.0})})
    assert not verify(less.problem, less).ok
    assert Plan.model_validate_json(tied.model_dump_json()).problem.ties == tied.problem.ties


def test_layers_of_one_stage_exchange_nothing() -> None:
    tied = plan(problem(Tie(layers=(0, 1), bytes=MEGABYTE)))
    assert tied.predicted.sync_s == 0.0
    assert tied.certificate.status == "optimal"
    assert verify(tied.problem, tied).ok


def test_replicas_share_the_first_ones_line() -> None:
    line = SharedResource(name="line", bandwidth_bytes_per_s=1e7, links=(("a", "b"), ("a", "c"), ("b", "c")))
    planned = plan(problem(Tie(layers=(0, 3, 5), bytes=MEGABYTE), shared=(line,)), "even")
    assert planned.predicted.sync_s == pytest.approx(0.2 + 0.02)
    assert verify(planned.problem, planned).ok


@pytest.mark.parametrize("layers", [(0, 6), (3, 1), (2, 2)])
def test_ties_name_layers_in_their_order(layers: tuple[int, int]) -> None:
    with pytest.raises(InvalidRecordError, match="ties: layers must ascend below 6"):
        problem(Tie(layers=layers, bytes=1.0))


def test_parameters_of_both_ends_are_not_taken_from_pinned_machines() -> None:
    pins = {"first_stage": ("a",), "last_stage": ("b",)}
    pinned = problem(Tie(layers=(0, 5), bytes=MEGABYTE), **pins)
    for assign in (None, [("a", 0, 3), ("b", 3, 6)]):
        with pytest.raises(InputError, match=r"share parameters.*pins keep those on a and b") as caught:
            plan(pinned, assign=assign)
        assert "untie" in str(caught.value.hint)
    assert plan(problem(Tie(layers=(1, 5), bytes=MEGABYTE), **pins)).pipelines
