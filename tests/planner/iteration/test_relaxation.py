"""Whether the relaxation's tables are computed at all."""

from __future__ import annotations

from tests.planner.planner_problems import problem

from skyctl.planner.cost_model import CostModel
from skyctl.planner.iteration.relaxation import relaxation_fits


def test_for_many_devices_they_are_not() -> None:
    """Their size, a power of the number of devices, is beyond any float."""
    many = problem(flops=(1.0,) * 1200, speeds=(1.0,) * 1100)
    assert not relaxation_fits(CostModel(many), 60.0)
    assert relaxation_fits(CostModel(problem()), 60.0)
