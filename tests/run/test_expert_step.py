"""The predicted step of a plan whose experts are on hosts. Pure."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.run.test_expert_spec import SETTING, A, B, C, make_plan

from skyctl.records.problem import Link
from skyctl.run.expert_spec import ExpertSetting, place_hosts
from skyctl.run.expert_step import predict_hosted

LINES = tuple(
    Link(source=one, target=other, latency_s=0.25, bandwidth_bytes_per_s=400.0)
    for one, other in ((A, B), (B, A), (A, C), (C, A))
)


def test_the_slowest_host_takes_the_place_of_the_experts() -> None:
    places = place_hosts(make_plan(), SETTING, {"b", "c"})
    assert places is not None
    found = predict_hosted(make_plan(), SETTING, places)
    # Layer 0 takes 1 s forward and 1 s backward, b two thirds of 1 s, and c a third of 2 s.
    assert found.iteration_s == pytest.approx(4 * 2 * (1 + 2 / 3))
    assert found.replicas[0].compute_s == pytest.approx(found.iteration_s)
    assert found.interval is None
    uneven = predict_hosted(make_plan(), SETTING, places, {1: (0.9, 0.1)})
    assert uneven.iteration_s == pytest.approx(4 * 2 * (1 + 0.9))


def test_the_gate_stays_lines_take_their_time_and_exchanges_cost_both_ends() -> None:
    plan, half = make_plan(links=LINES), replace(SETTING.layers[0], work=0.5)
    slow = tuple(device.model_copy(update={"neighbour_s": 0.01}) for device in plan.problem.devices)
    plan = plan.model_copy(update={"problem": plan.problem.model_copy(update={"devices": slow})})
    places = place_hosts(plan, ExpertSetting(("c",), (half,)), {"c"})
    assert places is not None
    found = predict_hosted(plan, ExpertSetting(("c",), (half,)), places)
    trunk_s = 1 + 1.5 / 2 + 2 * 0.01
    host_s = 2.0 / 2 + 2 * 0.01 + 2 * (0.25 + 2 * 100 / 400)
    assert found.iteration_s == pytest.approx(4 * 2 * (trunk_s + host_s) + 2 * 0.25)
