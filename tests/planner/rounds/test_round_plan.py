"""Plans of rounds: their seconds by hand, memory, owners, and that ``verify`` finds what is wrong."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from skyctl.errors import InfeasibleError, InputError, InvalidRecordError
from skyctl.planner.api import plan, predict, verify
from skyctl.planner.prediction_interval import with_interval
from skyctl.planner.problem_parts import with_devices
from skyctl.planner.rhythms import median_slowest_s
from skyctl.planner.rounds.owner_plan import tied_groups
from skyctl.records.base import parse
from skyctl.records.plan import Plan
from skyctl.records.problem import Problem, Tie
from skyctl.records.rhythm import Rhythm

NODES = ("a", "b", "c", "d")
LAYERS, MICROBATCHES = 3, 4
SIZE = 3e6
"""Of each layer's weights."""
BYTE_S, REDUCE_S, MESSAGE_S, LATENCY_S = 1e-7, 1e-9, 2e-9, 0.01
SPEEDS = {"a": 1.0, "b": 2.0, "c": 3.0, "d": 3.0}
"""A microbatch takes so many seconds on a, b, …: 1/2 forward and backward by layer, 0.1 optimizer in all."""


def problem(rhythm: dict[str, Any], nodes: tuple[str, ...] = NODES, **more: Any) -> Problem:
    """Devices of unlike speeds, all linked alike."""
    times = {
        f"{name}/cpu:0": {
            "forward_s": [SPEEDS[name] / 6] * LAYERS,
            "backward_s": [SPEEDS[name] / 6] * LAYERS,
            "optimizer_s": [0.1 / LAYERS] * LAYERS,
        }
        for name in nodes
    }
    layer = {"flops": 1.0, "state_bytes": 4 * SIZE, "activation_bytes": 1e5, "output_bytes": 1e3}
    device = {
        "flops_per_s": 1.0,
        "memory_bytes": None,
        "reduce_byte_s": REDUCE_S,
        "message_byte_s": MESSAGE_S,
    }
    link = {"latency_s": LATENCY_S, "bandwidth_bytes_per_s": 1 / BYTE_S}
    fields = {
        "layers": [{"name": f"l{i}", "gradient_bytes": SIZE, **layer} for i in range(LAYERS)],
        "devices": [{"id": f"{name}/cpu:0", **device} for name in nodes],
        "times": times,
        "links": [
            {"source": f"{x}/cpu:0", "target": f"{y}/cpu:0", **link}
            for x, y in itertools.permutations(nodes, 2)
        ],
        "microbatches": MICROBATCHES,
        "parallel": "data",
        "sync": "star",
        "rhythm": Rhythm(**rhythm),
        **more,
    }
    return Problem.model_validate(fields)


def owned(rhythm: dict[str, Any], *owners: str, **more: Any) -> Problem:
    """The problem with these owners, as on the command line."""
    parallelism = "hybrid" if any("+" in owner for owner in owners) else "data"
    named = tuple(tuple(owner.split("+")) for owner in owners)
    return problem(rhythm, **{"owners": named, "parallel": parallelism, **more})


def average_s(count: int, passes: int) -> float:
    """A star: each byte passes the root's lines and processor for each of the others, up and down."""
    total = LAYERS * SIZE
    line_s = BYTE_S * total
    processor_s = (count - 1) * (REDUCE_S + 2 * MESSAGE_S) * total
    return max(line_s, processor_s) + 2 * LATENCY_S + passes * REDUCE_S * total


def test_a_round_is_the_slowest_owners_steps_and_the_average() -> None:
    planned = plan(owned({"local_steps": 5}, "a", "b", "c", "d"))
    assert [pipeline.local_steps for pipeline in planned.pipelines] == [5] * 4
    assert {pipeline.microbatches for pipeline in planned.pipelines} == {MICROBATCHES}
    sync_s = average_s(4, passes=3)
    assert planned.predicted.sync_s == pytest.approx(sync_s)
    assert planned.predicted.iteration_s == pytest.approx(5 * (MICROBATCHES * 3.0 + 0.1) + sync_s)
    kept = LAYERS * (4 * SIZE + SIZE + 1e5)
    assert min(replica.memory_bytes for replica in planned.predicted.replicas) == pytest.approx(kept)
    assert verify(planned.problem, planned).ok
    assert predict(planned.problem, planned) == planned.predicted
    again = parse(Plan, planned.to_json(), "a file")
    assert again == planned


def test_fedprox_costs_two_passes_a_step_and_auto_levels_the_work() -> None:
    plain, proximal = (
        plan(owned({"local_steps": 5, "prox_mu": mu}, "a", "b")).predicted.iteration_s for mu in (0.0, 1.0)
    )
    assert proximal - plain == pytest.approx(5 * 2 * REDUCE_S * LAYERS * SIZE)
    planned = plan(owned({"local_steps": "auto"}, "a", "b", "c", "d"))
    assert [pipeline.local_steps for pipeline in planned.pipelines] == [2, 1, 1, 1]
    slow = plan(owned({"local_steps": "auto"}, "a", "d", links=()))
    assert [pipeline.local_steps for pipeline in slow.pipelines] == [2, 1]
    assert verify(planned.problem, planned).ok
    numbers = plan(owned({"local_steps": [6, 3, 1]}, "a", "b", "c"))
    assert [pipeline.local_steps for pipeline in numbers.pipelines] == [6, 3, 1]
    assert verify(numbers.problem, numbers).ok


@pytest.mark.parametrize("owners", [(), ("a", "b", "c", "d"), ("a", "c+d")])
@pytest.mark.parametrize("sync_format", ["float32", "int8"])
def test_an_outer_step_costs_passes_a_round_and_keeps_its_momentum(
    owners: tuple[str, ...], sync_format: str
) -> None:
    """Over the round's first weights, which need one pass and one copy where nothing else keeps them."""

    def stepped(**rhythm: float) -> Plan:
        asked = {"local_steps": 5, **rhythm}
        more = {"sync_format": sync_format}
        planned = plan(owned(asked, *owners, **more) if owners else problem(asked, **more))
        assert verify(planned.problem, planned).ok
        assert predict(planned.problem, planned) == planned.predicted
        assert parse(Plan, planned.to_json(), "a file") == planned
        return planned

    plain, still, moving = stepped(), stepped(outer_lr=0.7), stepped(outer_lr=0.7, outer_momentum=0.9)
    begins = not owners and sync_format == "float32"
    pass_s = REDUCE_S * LAYERS * SIZE
    for outside, passes in ((still, 3), (moving, 5)):
        assert outside.predicted.sync_s - plain.predicted.sync_s == pytest.approx(begins * pass_s)
        assert outside.predicted.iteration_s - plain.predicted.iteration_s == pytest.approx(
            (passes + begins) * pass_s
        )
    held = [stage.stop - stage.start for pipeline in plain.pipelines for stage in pipeline.stages]
    memory = [
        [replica.memory_bytes or 0 for replica in stepped_plan.predicted.replicas]
        for stepped_plan in (plain, still, moving)
    ]
    for layers, without, slow, fast in zip(held, *memory, strict=True):
        assert slow - without == pytest.approx(begins * layers * SIZE)
        assert fast - slow == pytest.approx(layers * SIZE)
    same = stepped(outer_lr=1.0, outer_momentum=0.0)
    assert same.predicted == plain.predicted
    for wrong in (plain, still):
        changed = moving.model_copy(update={"predicted": wrong.predicted})
        assert not verify(moving.problem, changed).ok


@pytest.mark.parametrize(("sync_format", "share"), [("bfloat16", 1 / 2), ("int8", 33 / 128)])
@pytest.mark.parametrize("owners", [(), ("a", "b", "c", "d")])
def test_an_average_in_fewer_bytes_is_two_sums_and_keeps_what_it_loses(
    sync_format: str, share: float, owners: tuple[str, ...]
) -> None:
    rhythm = {"local_steps": 5}
    planned = plan(
        owned(rhythm, *owners, sync_format=sync_format)
        if owners
        else problem(rhythm, sync_format=sync_format)
    )
    total = LAYERS * SIZE
    count = len(planned.pipelines)
    line_s = max(BYTE_S, (count - 1) * (REDUCE_S + 2 * MESSAGE_S)) * share * total
    assert planned.predicted.sync_s == pytest.approx(line_s + 4 * LATENCY_S + 6 * REDUCE_S * total)
    kept = LAYERS * (4 * SIZE + 2 * SIZE + 1e5)
    assert min(replica.memory_bytes for replica in planned.predicted.replicas) == pytest.approx(kept)
    assert planned.sync is not None
    assert planned.sync.format == sync_format
    assert verify(planned.problem, planned).ok
    assert predict(planned.problem, planned) == planned.predicted
    other = planned.sync.model_copy(update={"format": "float32"})
    assert not verify(planned.problem, planned.model_copy(update={"sync": other})).ok


@pytest.mark.parametrize("owners", [(), ("a", "b", "c", "d"), ("a", "c+d")])
def test_the_interval_is_of_the_same_round(owners: tuple[str, ...]) -> None:
    rhythm = {"local_steps": 5, "prox_mu": 0.1, "outer_momentum": 0.9}
    asked = owned(rhythm, *owners) if owners else problem({"local_steps": 5})

    def with_uncertainty(uncertainty: float) -> Plan:
        devices = [
            device.model_copy(update={"time_uncertainty": uncertainty, "overhead_uncertainty": uncertainty})
            for device in asked.devices
        ]
        links = [link.model_copy(update={"uncertainty": uncertainty}) for link in asked.links]
        return with_interval(
            plan(asked.model_copy(update={"devices": tuple(devices), "links": tuple(links)}))
        )

    sure, unsure = with_uncertainty(1e-6), with_uncertainty(0.3)
    for planned in (sure, unsure):
        assert planned.predicted.interval is not None
        assert (
            planned.predicted.interval.low_s
            <= planned.predicted.iteration_s
            <= planned.predicted.interval.high_s
        )
    assert sure.predicted.interval.high_s < 1.1 * sure.predicted.iteration_s
    assert unsure.predicted.interval.high_s > 1.2 * unsure.predicted.iteration_s
    assert with_interval(plan(asked)).predicted.interval is None


@pytest.mark.parametrize(("step_s", "limit_s", "steps"), [(0.01, 0.07, 7), (0.03, 0.27, 9), (0.1, 0.25, 3)])
def test_a_deadline_of_a_whole_number_of_steps_is_that_many(
    step_s: float, limit_s: float, steps: int
) -> None:
    """Rounding the quotient makes no difference; and a round of very many steps is verified at once."""
    asked = owned({"local_steps": 10**12, "round_deadline_s": limit_s}, "a", "b", nodes=("a", "b"))
    none = (0.0,) * LAYERS
    each = {"forward_s": (step_s / MICROBATCHES, 0.0, 0.0), "backward_s": none, "optimizer_s": none}
    times = {name: layer_times.model_copy(update=each) for name, layer_times in asked.times.items()}
    planned = plan(asked.model_copy(update={"times": times}))
    assert planned.predicted.iteration_s - planned.predicted.sync_s == pytest.approx(steps * step_s)
    assert verify(planned.problem, planned).ok
    endless = plan(problem({"local_steps": 10**12}))
    assert verify(endless.problem, endless).ok


def test_clients_and_deadlines_shorten_the_median_round() -> None:
    work = [4 * (MICROBATCHES * SPEEDS[name] + 0.1) for name in NODES]
    for clients in (1, 2, 3, 4):
        planned = plan(owned({"local_steps": 4, "clients_per_round": clients}, *NODES))
        drawn = sorted(max(chosen) for chosen in itertools.combinations(work, clients))
        expected = drawn[(len(drawn) - 1) // 2]
        assert planned.predicted.iteration_s - planned.predicted.sync_s == pytest.approx(expected)
        assert verify(planned.problem, planned).ok
        assert median_slowest_s(work, clients) == pytest.approx(expected)
    late = plan(owned({"local_steps": 4, "round_deadline_s": 13.0}, *NODES))
    assert late.predicted.iteration_s - late.predicted.sync_s == pytest.approx(2 * (MICROBATCHES * 3.0 + 0.1))
    assert verify(late.problem, late).ok


def test_an_owners_machines_become_a_pipeline_where_one_has_no_room() -> None:
    asked = owned({"local_steps": 2}, "a", "c+d")
    small = [device.model_copy(update={"memory_bytes": 3.5 * 5 * SIZE}) for device in asked.devices]
    for device in (2, 3):
        small[device] = small[device].model_copy(update={"memory_bytes": 2.5 * 5 * SIZE})
    tight = asked.model_copy(update={"devices": tuple(small)})
    planned = plan(tight)
    assert [len(pipeline.stages) for pipeline in planned.pipelines] == [1, 2]
    assert planned.sync is not None
    assert planned.sync.of == "weights"
    assert len(planned.sync.groups) == 2
    assert [unused.reason for unused in planned.unused] == ["it belongs to no owner"]
    verdict = verify(tight, planned)
    assert verdict.ok, verdict
    with pytest.raises(InfeasibleError, match=r"c/cpu:0 needs|owner c"):
        plan(tight.model_copy(update={"owners": (("a",), ("c",)), "parallel": "data"}))


def tied(*layers: int, owners: tuple[str, ...] = ("a", "c+d")) -> Problem:
    """Owners of which one has two machines that hold two layers each; these layers share parameters."""
    asked = owned({"local_steps": 2}, *owners)
    memory = {"c/cpu:0": 2.5 * 5 * SIZE, "d/cpu:0": 2.5 * 5 * SIZE}
    devices = [device.model_copy(update={"memory_bytes": memory.get(device.id)}) for device in asked.devices]
    tie = Tie(layers=layers, bytes=SIZE / 2)
    return asked.model_copy(update={"devices": tuple(devices), "ties": (tie,)})


@pytest.mark.parametrize(("layers", "cut"), [((0, 1), 2), ((1, 2), 1)])
def test_layers_that_share_parameters_are_in_one_stage_of_an_owner(layers: tuple[int, ...], cut: int) -> None:
    asked = tied(*layers)
    planned = plan(asked)
    assert [stage.stop for stage in planned.pipelines[1].stages] == [cut, LAYERS]
    verdict = verify(asked, planned)
    assert verdict.ok, verdict
    assert predict(asked, planned) == planned.predicted


def test_where_no_stage_of_an_owner_holds_a_tie_the_error_says_which_and_what_to_do() -> None:
    with pytest.raises(InfeasibleError) as caught:
        plan(tied(0, 2))
    assert caught.value.message.startswith("owner c+d: ")
    assert "layers 0 (l0) and 2 (l2) share parameters, and beside other owners" in caught.value.message
    assert "hf:DIR,untie" in str(caught.value.hint)
    with pytest.raises(
        InfeasibleError, match=r"owner c\+d: an even cut is not possible: layers 1 \(l1\) and"
    ):
        plan(tied(1, 2), "even")
    even = plan(tied(0, 1), "even")
    assert [stage.stop for stage in even.pipelines[1].stages] == [2, LAYERS]
    alone = plan(tied(0, 2, owners=("c+d",)))
    assert len(alone.pipelines[0].stages) == 2, "with nobody beside it an owner sums what it has cut"
    assert verify(alone.problem, alone).ok


def test_an_owner_alone_sums_what_it_has_cut_in_every_local_step() -> None:
    """A local step is a step of the same pipeline, whose stages sum the gradients of their copies."""
    asked = tied(0, 2, owners=("c+d",))
    asked = with_devices(asked, ["c/cpu:0", "d/cpu:0"])
    planned = plan(asked)
    step = plan(asked.model_copy(update={"owners": None, "rhythm": Rhythm(), "parallel": "pipeline"}))
    exchange_s = SIZE / 2 * BYTE_S + 2 * LATENCY_S
    assert step.predicted.sync_s == pytest.approx(exchange_s)
    assert planned.predicted.iteration_s == pytest.approx(2 * step.predicted.iteration_s)
    assert verify(asked, planned).ok
    assert predict(asked, planned) == planned.predicted
    unsure = asked.model_copy(
        update={"devices": tuple(x.model_copy(update={"time_uncertainty": 1e-9}) for x in asked.devices)}
    )
    interval = with_interval(plan(unsure)).predicted.interval
    assert interval is not None
    assert (interval.low_s + interval.high_s) / 2 == pytest.approx(planned.predicted.iteration_s, rel=0.005)


def test_layers_of_ties_that_overlap_stay_together() -> None:
    asked = owned({"local_steps": 2}, "a", "c+d")
    ten = asked.model_copy(update={"layers": asked.layers[:1] * 10})

    def groups(*ties: tuple[int, ...]) -> list[list[int]]:
        parts = tuple(Tie(layers=layers, bytes=1.0) for layers in ties)
        return tied_groups(ten.model_copy(update={"ties": parts}))

    assert groups() == [[layer] for layer in range(10)]
    assert groups((1, 4), (3, 6), (7, 8)) == [[0], [1, 2, 3, 4, 5, 6], [7, 8], [9]]
    assert groups((0, 2, 9), (3, 4)) == [list(range(10))]


def test_common_batches_are_shared_by_those_with_the_shortest_round() -> None:
    planned = plan(problem({"local_steps": 3}))
    shares = {pipeline.stages[0].device: pipeline.microbatches for pipeline in planned.pipelines}
    assert sum(shares.values()) == MICROBATCHES
    assert shares["a/cpu:0"] == max(shares.values())
    assert verify(planned.problem, planned).ok
    equal = plan(problem({"local_steps": 3}), "even")
    assert [pipeline.microbatches for pipeline in equal.pipelines] == [1, 1, 1, 1]
    own = plan(problem({"local_steps": 3}), assign=[("b/cpu:0", 1), ("a/cpu:0", 3)])
    assert [pipeline.microbatches for pipeline in own.pipelines] == [3, 1]
    assert verify(own.problem, own).ok
    for strategy in ("alone",):
        with pytest.raises(InputError, match="nobody to average"):
            plan(problem({"local_steps": 3}), strategy)


@pytest.mark.parametrize(
    ("rhythm", "more", "message"),
    [
        ({"prox_mu": 1.0}, {}, "of a rhythm with local_steps"),
        ({"outer_lr": 0.7}, {}, "of a rhythm with local_steps"),
        ({"outer_momentum": 0.9}, {}, "of a rhythm with local_steps"),
        ({"local_steps": 2, "delay": 1}, {}, "has no delay"),
        ({"local_steps": [2, 2]}, {}, "of a problem with owners"),
        ({"local_steps": 2, "clients_per_round": 1}, {}, "of a problem with owners"),
        ({"local_steps": 2}, {"parallel": "pipeline"}, "parallel 'data'"),
        ({"local_steps": 2}, {"sync_format": "fixed32"}, "averaged as float32, bfloat16, int8, not as"),
        ({"local_steps": 2}, {"sync": "trees"}, "a ring or a star"),
        ({}, {"owners": [["a"]]}, "owners are of a problem whose rhythm"),
        ({"local_steps": 2}, {"owners": [["a"], ["x"]]}, "'x', which has no device"),
        ({"local_steps": 2}, {"owners": [["a"], ["a"]]}, "two owners"),
        ({"local_steps": [1, 2]}, {"owners": [["a"]]}, "2 numbers of local steps for 1"),
        ({"local_steps": 2, "clients_per_round": 3}, {"owners": [["a"], ["b"]]}, "there are 2 owners"),
    ],
)
def test_what_does_not_go_together_is_refused(rhythm: Any, more: Any, message: str) -> None:
    with pytest.raises(InvalidRecordError, match=message):
        problem(rhythm, **more)


def test_an_owner_that_is_lost_leaves_with_its_machines() -> None:
    asked = owned({"local_steps": [5, 4, 3], "clients_per_round": 3}, "a", "b", "c+d")
    left = with_devices(asked, {"a/cpu:0", "b/cpu:0", "c/cpu:0"})
    assert left.owners == (("a",), ("b",))
    assert left.rhythm.local_steps == (5, 4)
    assert left.rhythm.clients_per_round == 2
    assert Problem.model_validate(dict(left)) == left
    planned = plan(left)
    assert len(planned.pipelines) == 2
    assert verify(left, planned).ok


def test_verify_finds_what_was_changed() -> None:
    planned = plan(owned({"local_steps": 5, "prox_mu": 0.1}, "a", "b", "c"))
    slower = planned.predicted.model_copy(update={"iteration_s": 1.01 * planned.predicted.iteration_s})
    assert not verify(planned.problem, planned.model_copy(update={"predicted": slower})).ok
    fewer = [pipeline.model_copy(update={"local_steps": 4}) for pipeline in planned.pipelines]
    assert not verify(planned.problem, planned.model_copy(update={"pipelines": tuple(fewer)})).ok
    swapped = (planned.pipelines[1], planned.pipelines[0], planned.pipelines[2])
    verdict = verify(planned.problem, planned.model_copy(update={"pipelines": swapped}))
    assert {check.name for check in verdict.checks if not check.ok} >= {"owners"}
