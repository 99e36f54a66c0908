"""How stages run: depths, deferred weight gradients, recomputation, against brute force over all choices."""

from __future__ import annotations

import itertools
import random
import re

import pytest
from tests.plan_changes import with_stage
from tests.planner.brute_force_executions import StageRun, best_s, need_bytes, split_problem
from tests.planner.planner_problems import layer, problem, random_problem

from skyctl.errors import InfeasibleError, UndecidedError
from skyctl.planner.api import plan, verify
from skyctl.planner.cost_model import CostModel, StageAssignment
from skyctl.planner.evaluation import StageExecution, least_execution, recompute_choices, step_s
from skyctl.planner.explanation.advice import advise
from skyctl.planner.explanation.plan_reasons import describe_choices
from skyctl.planner.pipeline_depth import choose_execution, refine_execution
from skyctl.planner.verification.problem_data import ProblemData
from skyctl.planner.verification.proofs import proof_by_paths
from skyctl.records.problem import Device, LayerTimes, Link, Problem, SharedResource

KINDS = (
    {"schedule": "eager-1f1b", "objective": "iteration"},
    {"schedule": "zero-bubble", "objective": "iteration"},
    {"schedule": "1f1b", "recompute": True},
    {"schedule": "gpipe", "recompute": True},
    {"schedule": "eager-1f1b", "objective": "iteration", "recompute": True},
    {"schedule": "zero-bubble", "objective": "iteration", "recompute": True},
)
CLOSE = 0.03
"""The relative error that is allowed if depths are a choice: the searches are not exact then."""


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: "-".join(map(str, kind.values())))
def test_against_every_plan_and_every_way_to_run_it(kind, seed):
    given = split_problem(seed, **kind)
    if given.microbatches > 3 and len(given.devices) > 2:
        given = given.model_copy(update={"microbatches": 2})
    best = best_s(given)
    try:
        planned = plan(given, time_limit_s=0.5)
    except InfeasibleError:
        assert best is None
        return
    except UndecidedError:
        assert given.recompute  # no plan, and no proof that there is none: allowed there only
        return
    assert best is not None
    bound = planned.certificate.lower_bound_s
    assert bound is not None
    assert bound <= best * (1 + 1e-9)
    exact = given.schedule in ("1f1b", "gpipe") and given.objective == "iteration"
    assert best * (1 - 1e-9) <= planned.certificate.value_s <= best * (1 + (1e-9 if exact else CLOSE))
    assert verify(given, planned).ok
    quick = plan(given, "heuristic")
    assert quick.certificate.value_s >= best * (1 - 1e-9)
    assert verify(given, quick).ok


def chain(seed, schedule, microbatches=8):
    """One layer a device, unequal, with slow links and on some devices little memory."""
    r = random.Random(seed)
    n = r.randint(2, 4)
    layers = tuple(layer(i, activation=1.0, output=1.0) for i in range(n))
    devices = tuple(
        Device(id=f"n{i}/cpu:0", flops_per_s=1.0, memory_bytes=r.choice([None, 2 + r.uniform(n - i, 9)]))
        for i in range(n)
    )
    times = {
        d.id: LayerTimes(
            forward_s=tuple(r.uniform(0.2, 0.5) for _ in layers),
            backward_s=tuple(r.uniform(0.4, 1.0) for _ in layers),
            optimizer_s=(0.0,) * n,
            weight_s=tuple(r.uniform(0.1, 0.4) for _ in layers),
        )
        for d in devices
    }
    links = tuple(
        Link(
            source=a.id,
            target=b.id,
            latency_s=r.uniform(0, 0.4),
            bandwidth_bytes_per_s=1 / r.uniform(0.01, 1.3),
        )
        for a, b in itertools.permutations(devices, 2)
    )
    return Problem(
        layers=layers,
        devices=devices,
        times=times,
        links=links,
        microbatches=microbatches,
        schedule=schedule,
    )


@pytest.mark.parametrize("seed", range(12))
def test_depths_are_as_good_as_the_best_of_all_with_no_more_memory(seed):
    model = CostModel(chain(seed, "eager-1f1b", 6))
    placement = tuple(StageAssignment(i, i, i + 1) for i in range(model.devices))
    least = [model.least_in_flight(s, len(placement)) for s in range(len(placement))]
    every = [
        StageExecution.plain(numbers)
        for numbers in itertools.product(*(range(low, 7) for low in least))
        if all(a >= b for a, b in itertools.pairwise(numbers))
        and all(model.fits(*stage, k) for stage, k in zip(placement, numbers, strict=True))
    ]
    steps = {execution: step_s(model, placement, execution) for execution in every}
    value, execution = refine_execution(model, placement, *choose_execution(model, placement))
    assert value == pytest.approx(steps[execution])
    assert value <= min(steps.values()) * 1.002
    enough = [run for run, step in steps.items() if step <= min(steps.values()) * 1.001]
    assert sum(execution.in_flight) <= min(sum(run.in_flight) for run in enough)


def test_memory_is_the_contracts():
    r = random.Random(3)
    for seed in range(20):
        given = split_problem(seed, schedule=r.choice(["zero-bubble", "1f1b"]), recompute=True)
        model = CostModel(given)
        p, q = sorted(r.sample(range(len(given.layers) + 1), 2))
        for again in (False, True):
            deferred = 0 if again or given.schedule == "1f1b" else 1
            run = StageRun(0, p, q, 2, deferred, again)
            want = need_bytes(given, run)
            device = given.devices[0]
            stage = StageAssignment(0, p, q)
            assert model.device_bytes(stage, 2, deferred, recompute=again) == pytest.approx(want)
            need = model.need_bytes(p, q, 2, deferred, recompute=again)
            assert need + device.reserved_bytes == pytest.approx(want)


def tight(**more):
    """A fast device that holds more than two layers only if it recomputes, and a slow one with plenty."""
    more = {"objective": "iteration", "microbatches": 4, **more}
    base = problem(flops=[3.0] * 6, speeds=[4.0, 1.0], memory=[30.0, None], **more)
    layers = tuple(x.model_copy(update={"activation_bytes": 6.0, "output_bytes": 0.5}) for x in base.layers)
    return base.model_copy(update={"layers": layers})


def test_a_full_device_recomputes_where_that_is_faster():
    without, allowed = tight(), tight(recompute=True)
    plain, recomputing = plan(without), plan(allowed)
    assert recomputing.certificate.status == "optimal"
    assert recomputing.certificate.value_s < plain.certificate.value_s
    assert any(stage.replicas[0].recompute for stage in recomputing.stages)
    assert verify(allowed, recomputing).ok
    assert "recomputed in the backward: stage" in describe_choices(recomputing)[0]
    assert any(advice.kind == "recompute" for advice in advise(plain))


def crowded(seed):
    """All messages pass one slow resource; stages may recompute, and none must."""
    r = random.Random(seed)
    given = random_problem(
        seed, most_layers=5, schedule=r.choice(["1f1b", "gpipe"]), objective="iteration", recompute=True
    )
    pairs = tuple(itertools.permutations([x.id for x in given.devices], 2))
    slow = SharedResource(name="up", bandwidth_bytes_per_s=r.uniform(1, 5), links=pairs)
    layers = [x.model_copy(update={"output_bytes": r.uniform(0.5, 3)}) for x in given.layers]
    devices = [x.model_copy(update={"memory_bytes": None}) for x in given.devices]
    free = {"links": [], "times": {}, "first_stage": None, "last_stage": None}
    fixed = {"layers": layers, "devices": devices, "shared": [slow], "microbatches": r.randint(2, 4)}
    return given.model_validate({**dict(given), **free, **fixed})


@pytest.mark.parametrize("seed", [0, 6, 9, 11, 17, 19, 20])
def test_what_is_proved_where_messages_queue_can_be_checked(seed):
    given = crowded(seed)
    planned = plan(given)
    assert planned.certificate.status == "optimal"
    verdict = verify(given, planned)
    assert verdict.ok
    assert all(check.checked for check in verdict.checks)


def test_a_stage_that_need_not_recompute_may_shorten_a_step_where_messages_queue():
    shorter = 0
    for seed in range(40):
        given = crowded(seed)
        model = CostModel(given)
        if min(model.devices, model.layers) < 3:
            continue
        placement = tuple(StageAssignment(d, d, d + 1 if d < 2 else model.layers) for d in range(3))
        base = least_execution(model, placement)
        base_s = step_s(model, placement, base)
        runs = (base._replace(recompute=chosen) for chosen in itertools.product((False, True), repeat=3))
        least_s = min(step_s(model, placement, run) for run in runs)
        listed = [base, *recompute_choices(model, placement, base, base_s)]
        assert min(step_s(model, placement, run) for run in listed) == least_s
        search = proof_by_paths._Search(ProblemData(given), base_s * (1 - 1e-9))
        found_s = search._play(tuple(proof_by_paths.PathStage(*stage) for stage in placement))
        assert (found_s is not None) == (least_s < base_s * (1 - 1e-9))
        shorter += found_s is not None
    assert shorter


def test_nothing_is_recomputed_where_memory_does_not_bind():
    roomy = problem(flops=[3.0] * 6, memory=[400.0, 400.0], objective="iteration")
    allowed = roomy.model_copy(update={"recompute": True})
    plain, recomputing = plan(roomy), plan(allowed)
    assert recomputing.stages == plain.stages
    assert recomputing.certificate.lower_bound_s == plain.certificate.lower_bound_s
    assert recomputing.certificate.status == "optimal"


def test_too_little_time_for_the_exact_search():
    """The tables of 7 devices and 60 layers are too many for 0.3 s, and few enough for 1 s."""
    base = problem(flops=[1.0 + i % 3 for i in range(60)], speeds=range(3, 10), memory=[130.0] * 7)
    layers = tuple(x.model_copy(update={"activation_bytes": 5.0, "output_bytes": 1.0}) for x in base.layers)
    fixed = {"layers": layers, "recompute": True, "objective": "iteration", "schedule": "1f1b"}
    given = base.model_copy(update=fixed)
    planned = plan(given, time_limit_s=0.3)
    assert verify(given, planned).ok


@pytest.mark.parametrize("seed", [74, 135, 365])
def test_what_is_said_of_unused_devices_counts_recomputing(seed):
    r = random.Random(seed)
    flops = [r.uniform(1, 3) for _ in range(r.randint(3, 6))]
    count = r.randint(2, 3)
    speeds = [r.choice([4, 2, 1, 0.5, 0.2]) for _ in range(count)]
    memory = [r.choice([None, r.uniform(8, 40)]) for _ in range(count)]
    given = problem(flops=flops, speeds=speeds, memory=memory, recompute=True)
    sizes = {"activation_bytes": 6.0, "output_bytes": 0.5}
    layers = tuple(x.model_copy(update=sizes) for x in given.layers)
    given = given.model_copy(update={"layers": layers})
    planned = plan(given, "heuristic")
    best = best_s(given) / planned.certificate.value_s
    assert best > 1 - CLOSE
    for unused in planned.unused:
        match = re.search(r"([0-9.]+)% faster", unused.reason)
        assert match is None or 1 - float(match[1]) / 100 >= best - 0.005, unused.reason


def test_verify_refuses_what_is_not_allowed():
    given = tight(recompute=True)
    planned = plan(given)
    forbidden = given.model_copy(update={"recompute": False})
    verdict = verify(forbidden, planned.model_copy(update={"problem": forbidden}))
    assert not verdict.ok
    assert not next(check for check in verdict.checks if check.name == "recompute").ok
    wrong = verify(given, with_stage(planned, 0, weights_behind=1))
    assert not wrong.ok


def test_a_slow_link_is_named_as_the_reason_for_a_depth():
    given = chain(5, "eager-1f1b", 12)
    free = [d.model_copy(update={"memory_bytes": None}) for d in given.devices]
    slow = [k.model_copy(update={"bandwidth_bytes_per_s": 2.0}) for k in given.links]
    planned = plan(given.model_copy(update={"devices": tuple(free), "links": tuple(slow)}), time_limit_s=1)
    reasons = describe_choices(planned)
    if len(planned.stages) > 1:
        assert reasons[0].startswith("eager 1F1B, in flight ")
        assert "the link n" in reasons[0]


def test_advised_memory_counts_deferred_weight_gradients():
    r = random.Random(29)
    given = chain(29, "zero-bubble")
    layers = [x.model_copy(update={"deferred_bytes": r.choice([1.0, 4.0, 10.0])}) for x in given.layers]
    devices = [
        d if d.memory_bytes is None else d.model_copy(update={"memory_bytes": d.memory_bytes + 4})
        for d in given.devices
    ]
    given = given.model_copy(update={"layers": tuple(layers), "devices": tuple(devices)})
    planned = plan(given, "heuristic")
    for advice in advise(planned):
        if advice.kind == "memory":
            match = re.match(r"(\d+) B more on (\S+) would save", advice.text)
            assert match is not None
            more = [
                d.model_copy(update={"memory_bytes": d.memory_bytes + int(match[1])})
                if d.id == match[2]
                else d
                for d in given.devices
            ]
            then = plan(given.model_copy(update={"devices": tuple(more)}), "heuristic")
            limit = planned.certificate.value_s * (1 - advice.saves) * 1.002
            assert then.certificate.value_s <= limit


def test_fewer_bytes_on_slow_links_are_offered():
    given = chain(1, "1f1b", 8)
    planned = plan(given)
    offers = [advice for advice in advise(planned) if advice.kind == "link dtype"]
    assert len(planned.stages) == 1 or offers
    for advice in offers:
        assert advice.text.startswith(("--link-dtype bfloat16@slow", "--link-dtype int8@slow"))
