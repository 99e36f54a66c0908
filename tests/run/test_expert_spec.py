"""The hosts of experts for a plan, what is refused, and what ranks may say of them. Pure."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import pytest

from skyctl.errors import InfeasibleError, InputError, MismatchError
from skyctl.experts.step_record import ExpertMove, StepRecord
from skyctl.records.pipeline import Pipeline, PlacedStage
from skyctl.records.plan import Certificate, Plan, Prediction, ReplicaPrediction
from skyctl.records.problem import Device, Layer, LayerTimes, Link, Problem
from skyctl.run.expert_figures import describe_figures, figures_record, host_loads, read_figures
from skyctl.run.expert_spec import (
    ExpertLayer,
    ExpertSetting,
    RankExperts,
    check_expert_options,
    check_expert_plan,
    hosting_again,
    leading_ranks,
    place_hosts,
)

A, B, C = "a/cpu:0", "b/cpu:0", "c/cpu:0"
SETTING = ExpertSetting(("b", "c"), (ExpertLayer(1, experts=12, top_k=2, part=1 / 12, work=1.0),))
OWN = RankExperts((B, C), {1: 2})


def make_plan(*, memory: float | None = None, links: tuple[Link, ...] = (), **changes: Any) -> Plan:
    """Layers 0 and 1 on a; layer 1 takes 3 s on a, 2 s on b and 4 s on c, forward and backward."""
    layers = tuple(
        Layer(name=f"l{i}", flops=1.0, state_bytes=1200.0, activation_bytes=1.0, output_bytes=100.0)
        for i in range(2)
    )
    times = {
        device: LayerTimes(forward_s=(1.0, half_s), backward_s=(1.0, half_s), optimizer_s=(0.0, 0.0))
        for device, half_s in ((A, 1.5), (B, 1.0), (C, 2.0))
    }
    problem = Problem(
        layers=layers,
        devices=tuple(
            Device(id=d, flops_per_s=1.0, memory_bytes=None if d == A else memory) for d in (A, B, C)
        ),
        times=times,
        links=links,
        microbatches=4,
        **changes,
    )
    stage = PlacedStage(start=0, stop=2, device=A, in_flight=1)
    held = ReplicaPrediction(device=A, compute_s=1.0, idle_s=0.0, memory_bytes=1.0)
    return Plan(
        strategy="even",
        problem=problem,
        pipelines=(Pipeline(stages=(stage,), microbatches=4),),
        predicted=Prediction(iteration_s=1.0, bottleneck_s=1.0, replicas=(held,), sync_s=0.0, stale=None),
        certificate=Certificate(
            status="feasible", value_s=1.0, lower_bound_s=None, gap=None, method="even", wall_s=0.0
        ),
    )


def test_experts_are_put_by_speed_each_on_one_host() -> None:
    places = place_hosts(make_plan(), SETTING, {"a", "b", "c"})
    assert places is not None
    assert places.devices == (B, C)
    assert [places.holders[1].count(host) for host in (0, 1)] == [8, 4]
    assert places.time_s == pytest.approx(4 / 3)
    assert places.bound_s == pytest.approx(4 / 3)
    assert places.even_s == pytest.approx(2.0)
    assert places.layer_s[1] == pytest.approx((4 * 2.0, 4 * 4.0))
    assert (places.room, places.byte_s) == ({1: (12, 12)}, (0.0, 0.0))
    text = places.describe(2.0)
    assert text.startswith(f"experts: 8 on {B}, 4 on {C}; ")
    assert text.endswith("; a step is predicted to take 2.00 s")


def test_a_slow_line_counts_with_all_that_passes_it() -> None:
    lines = tuple(
        Link(source=one, target=other, latency_s=0.0, bandwidth_bytes_per_s=400.0)
        for one, other in ((A, B), (B, A))
    )
    places = place_hosts(make_plan(links=lines), SETTING, {"b", "c"})
    assert places is not None
    assert places.layer_s[1] == pytest.approx((4 * (2.0 + 4 * 2 * 100 / 400), 4 * 4.0))
    assert places.byte_s == pytest.approx((1 / 400, 0.0))
    assert [places.holders[1].count(host) for host in (0, 1)] == [6, 6]


def test_only_nodes_that_are_there_host_experts_and_memory_is_kept_to() -> None:
    places = place_hosts(make_plan(), SETTING, {"a", "c"})
    assert places is not None
    assert (places.devices, {*places.holders[1]}) == ((C,), {0})
    assert place_hosts(make_plan(), SETTING, {"a"}) is None
    tight = place_hosts(make_plan(memory=700.0), SETTING, {"b", "c"})
    assert tight is not None
    assert [tight.holders[1].count(host) for host in (0, 1)] == [7, 5]
    assert tight.room == {1: (7, 7)}
    with pytest.raises(InfeasibleError, match="12 experts"):
        place_hosts(make_plan(memory=500.0), SETTING, {"b", "c"})


def test_a_setting_survives_json_and_a_takeover_knows_its_hosts() -> None:
    assert ExpertSetting.from_dict(json.loads(json.dumps(asdict(SETTING)))) == SETTING
    again = hosting_again(SETTING, [B, C])
    assert again is not None
    assert again.of_layers(range(1, 2)) == RankExperts((B, C), {1: 12})
    assert again.of_layers(range(1)) is None
    assert hosting_again(SETTING, []) is None


def test_the_lowest_rank_that_holds_a_layer_leads_it() -> None:
    assert leading_ranks({0: (1, 2), 2: (1,), 3: (2, 3)}) == {0: (1, 2), 2: (), 3: (3,)}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"elastic": True}, "--elastic"),
        ({"turns": "fair"}, "--turns"),
        ({"clip_norm": 1.0}, "--clip-norm"),
        ({"turns": "fair", "clip_norm": 1.0}, "--turns and --clip-norm"),
    ],
)
def test_what_does_not_go_with_hosts_is_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        check_expert_options(**{"clip_norm": None, "elastic": False, "turns": None, **given})
    check_expert_options(clip_norm=None, elastic=False, turns=None)


def test_a_plan_that_does_not_go_with_hosts_or_does_not_know_them_is_refused() -> None:
    check_expert_plan(make_plan(), SETTING)
    plan = make_plan()
    stage = plan.pipelines[0].stages[0].model_copy(update={"recompute": True})
    pipeline = plan.pipelines[0].model_copy(update={"stages": (stage,)})
    with pytest.raises(InputError, match="recompute"):
        check_expert_plan(plan.model_copy(update={"pipelines": (pipeline,)}), SETTING)
    with pytest.raises(InputError, match="zero-bubble"):
        check_expert_plan(make_plan(schedule="zero-bubble"), SETTING)
    with pytest.raises(MismatchError, match="node d is to host experts"):
        check_expert_plan(plan, ExpertSetting(("d",), SETTING.layers))


def seen() -> dict[str, Any]:
    """The message of a rank that has lost a host."""
    record = StepRecord()
    record.note_mask("1.0", 0, (True, True))
    record.note_mask("1.0", 1, (True, False))
    record.forwards[1] = [3, 4]
    record.moves.append(ExpertMove(2, 1, 1, 1, 0))
    values = {
        "tokens": {"1": [5, 7]},
        "hosts": {B: {"1": 5}, C: {"1": 7}},
        "dropped": 1,
        "lost": {C: {"step": 2, "why": "it is gone"}},
        "record": record.to_dict(),
    }
    plain: dict[str, Any] = json.loads(json.dumps(values))
    return plain


def test_figures_are_read_told_and_written_down() -> None:
    read = read_figures(seen(), OWN, 3)
    assert read is not None
    assert describe_figures({0: read}) == (
        f"experts: tokens 5 to {B}, 7 to {C}; without any answer: 1; calls failed: 2; steps with experts "
        "masked: 1; experts that moved: 1"
    )
    assert "; predicted step with these loads: 2.00 s" in describe_figures({0: read}, 2.0)
    assert json.loads(json.dumps(figures_record({0: read})))["ranks"]["0"] == seen()
    assert host_loads({0: read, 1: read}, (C, B)) == {1: (7 / 12, 5 / 12)}
    assert read_figures(None, None, 3) is None


def _set(*path: str, to: Any) -> Callable[[dict[str, Any]], object]:
    def change(values: dict[str, Any]) -> None:
        *inner, last = path
        for name in inner:
            values = values[name]
        values[last] = to

    return change


@pytest.mark.parametrize(
    "change",
    [
        _set("tokens", to={"1": [5]}),
        _set("tokens", to={"2": [5, 7]}),
        _set("tokens", to={"1": [5, -7]}),
        _set("hosts", to={"d/cpu:0": {"1": 1}}),
        _set("hosts", to={B: {"2": 5}}),
        _set("dropped", to="1"),
        _set("lost", to={C: {"step": 2}}),
        _set("record", to=[]),
        _set("record", "moves", to=[{"step": 2, "layer": 1, "expert": 2, "copied": 1, "host": 0}]),
        _set("record", "moves", to=[{"step": 2, "layer": 1, "expert": 1, "copied": 1, "host": 2}]),
        _set("record", "moves", to=[{"step": 9, "layer": 1, "expert": 1, "copied": 1, "host": 0}]),
        _set("record", "forwards", to={"3": [0]}),
        _set("record", "masks", "1.0", "missing", to={"3": [0]}),
        _set("record", "masks", "1.0", "missing", to={"9" * 5000: [0]}),
        _set("more", to=1),
    ],
)
def test_what_no_rank_sees_is_refused(change: Callable[[dict[str, Any]], object]) -> None:
    values = seen()
    change(values)
    with pytest.raises(InputError):
        read_figures(values, OWN, 3)


def test_a_rank_without_experts_tells_of_none_and_one_with_them_does() -> None:
    with pytest.raises(InputError, match="no experts"):
        read_figures(seen(), None, 3)
    with pytest.raises(InputError, match="experts on hosts"):
        read_figures(None, OWN, 3)
