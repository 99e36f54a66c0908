"""How sure figures are: what the probe saw of each device widens its predictions."""

from __future__ import annotations

from typing import Any

import pytest
from tests.helpers.bare_records import OF_DEVICE, OF_LAYER

from skyctl.learning.figure_uncertainty import (
    LEAST_TIME,
    MOST_BY_SLICES,
    link_uncertainty,
    slice_uncertainty,
    time_uncertainty,
)
from skyctl.records.profile import (
    Conditions,
    DeviceProfile,
    LayerCosts,
    LayerTiming,
    LinkProfile,
    ShapeProfile,
)

SHAPE = ShapeProfile(
    microbatch_size=4,
    microbatches=8,
    layers=[
        LayerCosts(
            name=name,
            signature=name,
            flops=1e6,
            state_bytes=1,
            activation_bytes=1,
            output_bytes=1,
            workspace_bytes=0,
            **OF_LAYER,
        )
        for name in ("large", "small")
    ],
)


def device(conditions: dict[str, Any] | None = None, **large: float) -> DeviceProfile:
    """A device with a layer of 10 ms, of which more is given, and one of 10 µs that is hardly known."""
    return DeviceProfile(
        id="a/cpu:0",
        node="a",
        name="cpu",
        threads=1,
        slowdown=1.0,
        memory_bytes=1e9,
        memory_from="free",
        reserved_bytes=0.0,
        flops_per_s=1e9,
        timings=[
            LayerTiming(signature="large", microbatch_size=4, forward_s=0.003, backward_s=0.007, **large),
            LayerTiming(signature="small", microbatch_size=4, forward_s=3e-6, backward_s=7e-6, interval=0.5),
        ],
        conditions=None if conditions is None else Conditions(wall_s=10.0, **conditions),
        **OF_DEVICE,
    )


def test_a_quiet_device_that_is_well_known_is_as_sure_as_can_be() -> None:
    assert time_uncertainty(device({"share": 1.0}), SHAPE) == pytest.approx(LEAST_TIME, abs=0.001)


@pytest.mark.parametrize(
    "disturbed",
    [
        device(interval=0.2),
        device(spread=0.6),
        device({"share": 0.8}),
        device({"share": 1.0, "stolen_share": 0.2}),
        device({"share": 1.0, "halted_share": 0.3}),
    ],
)
def test_what_was_seen_of_it_makes_it_less_sure(disturbed: DeviceProfile) -> None:
    assert time_uncertainty(disturbed, SHAPE) > 1.5 * LEAST_TIME


def test_a_device_of_which_nothing_was_left_is_no_endless_figure() -> None:
    assert time_uncertainty(device({"share": 0.0, "stolen_share": 1.0}), SHAPE) < 10


def test_a_link_that_was_filled_in_is_less_sure() -> None:
    measured = LinkProfile(source="a", target="b", latency_s=0.001, bandwidth_bytes_per_s=1e7)
    filled_in = measured.model_copy(update={"estimated": True})
    assert link_uncertainty(filled_in) > link_uncertainty(measured)


def test_a_forward_longer_than_its_nodes_slices_is_unsure_by_their_pauses() -> None:
    assert slice_uncertainty(0.0012, 0.010, 0.009, 100.0) < 1e-4
    uncertainties = [slice_uncertainty(0.0012, 0.010, forward_s, 100.0) for forward_s in (0.013, 0.040, 0.4)]
    assert uncertainties == pytest.approx([0.276, 0.09, 0.009], rel=0.02)
    assert slice_uncertainty(0.009, 0.010, 0.012, 100.0) < 0.04


def test_steps_of_few_periods_have_a_pause_more_or_less() -> None:
    uncertainties = [slice_uncertainty(0.008, 0.010, 0.001, step_s) for step_s in (0.01, 0.1, 1.0)]
    assert uncertainties == pytest.approx([0.1, 0.01, 0.001])
    assert slice_uncertainty(0.001, 0.010, 0.001, 0.001) == MOST_BY_SLICES
