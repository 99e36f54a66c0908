"""Objective bottleneck for many devices: methods against all subsets, valid bounds, the paper's cases."""

import math
import random
import time

import numpy as np
import pytest
from tests.planner.planner_problems import layer, problem, random_problem

from skyctl.errors import InfeasibleError
from skyctl.planner.api import plan, verify
from skyctl.planner.bottleneck import device_subsets, priced_beam
from skyctl.planner.bottleneck.balanced_edges import EdgeBalance, potential_bound
from skyctl.planner.bottleneck.layer_prices import LayerPrices, price_bound_s, volume_bound_s
from skyctl.planner.bottleneck.least_bottleneck import (
    BottleneckSearch,
    CoveringModel,
    bisect_limit,
    least_bottleneck,
)
from skyctl.planner.bottleneck.periodic_search import EQUAL_SUMS, PeriodicSearch
from skyctl.planner.bottleneck.reach_table import ReachTable
from skyctl.planner.bottleneck.repeated_layers import LayerRun, find_run
from skyctl.planner.cost_model import CostModel
from skyctl.planner.evaluation import bottleneck_s
from skyctl.records.problem import Device, Layer, LayerTimes, Problem

NEVER = float("inf")


def periodic_problem(seed, schedules=("sequential", "gpipe", "1f1b")):
    """Repeated blocks between a head and a tail, with caps, pins, windows, workspace and times on some."""
    r = random.Random(seed)
    n = r.randint(2, 5)

    def made_up_layer(i):
        return layer(
            i, r.uniform(0.2, 2), r.uniform(1, 10), r.choice([0.0, r.uniform(0.1, 2)]), r.uniform(0.1, 2),
            r.choice([0.0, 0.0, r.uniform(0, 5)]),
        )  # fmt: skip

    block = [made_up_layer(i) for i in range(r.choice([1, 2, 3, 3, 4]))]
    head, tail = (
        [made_up_layer(100 + i) for i in range(r.randint(0, 2))],
        [made_up_layer(200 + i) for i in range(r.randint(0, 3))],
    )
    layers = tuple(
        x.model_copy(update={"name": f"{i}"}) for i, x in enumerate([*head, *block * r.randint(5, 6), *tail])
    )
    total = sum(x.state_bytes for x in layers)
    capped = r.random() < 0.7
    devices = tuple(
        Device(
            id=f"n{i}/cpu:0",
            flops_per_s=r.choice([1.0, 2.0, r.uniform(0.5, 4)]),
            memory_bytes=total * r.uniform(0.15, 0.9) if capped and r.random() < 0.8 else None,
            reserved_bytes=r.choice([0.0, r.uniform(0, 2)]),
        )
        for i in range(n)
    )
    ids = [d.id for d in devices]
    times = {}
    for d in devices:
        if r.random() < 0.3:
            shares = {x.flops: (r.uniform(0.3, 0.5), r.uniform(0.5, 1)) for x in layers}
            times[d.id] = LayerTimes(
                forward_s=tuple(x.flops / d.flops_per_s * shares[x.flops][0] for x in layers),
                backward_s=tuple(x.flops / d.flops_per_s * shares[x.flops][1] for x in layers),
                optimizer_s=(0.0,) * len(layers),
            )
    return Problem(
        layers=layers, devices=devices, times=times,
        first_stage=tuple(r.sample(ids, r.randint(1, n))) if r.random() < 0.3 else None,
        last_stage=tuple(r.sample(ids, r.randint(1, n))) if r.random() < 0.3 else None,
        microbatches=r.randint(1, 6), receive_window=r.choice([0, 0, 0, 1, 2]),
        schedule=r.choice(schedules), objective="bottleneck",
    )  # fmt: skip


def optimum(model):
    """By all subsets; infinite where nothing fits."""
    best, _, proved = bisect_limit(
        model,
        None,
        lambda limit_s, strict: device_subsets.placement_within(model, limit_s, strict=strict),
        0.0,
        NEVER,
    )
    assert proved
    return math.inf if best is None else bottleneck_s(model, best)


def examined(search, optimum_s):
    """Asserts that a search's claims are true."""
    value = math.inf
    if search.best is not None:
        assert search.model.is_allowed(search.best)
        value = bottleneck_s(search.model, search.best)
    assert value >= optimum_s * (1 - 1e-9)
    assert search.bound_s <= optimum_s * (1 + 1e-9)
    if search.proved:
        assert value == pytest.approx(optimum_s, rel=2e-9)


@pytest.mark.parametrize("seed", range(60))
def test_periods_agree_with_subsets(seed):
    p = periodic_problem(seed)
    model = CostModel(p)
    reach = ReachTable(model)
    run = find_run(model, reach)
    assert run is not None
    best_s = optimum(model)
    search = BottleneckSearch(reach, None, volume_bound_s(reach), time.perf_counter() + 5)
    search.by_periods(PeriodicSearch(model, reach, run))
    examined(search, best_s)
    if not reach.staged:
        assert search.proved


@pytest.mark.parametrize("seed", range(40))
def test_the_general_methods_agree_with_subsets(seed):
    """Prices, beams and CP-SAT, whether layers repeat or not."""
    p = (
        periodic_problem(seed, ("sequential", "gpipe"))
        if seed % 2
        else random_problem(seed, objective="bottleneck", schedule="gpipe", most_devices=5, most_layers=9)
    )
    model = CostModel(p)
    reach = ReachTable(model)
    search = BottleneckSearch(reach, None, volume_bound_s(reach), time.perf_counter() + 5)
    search.in_general()
    examined(search, optimum(model))
    assert search.proved


@pytest.mark.parametrize("seed", range(40))
def test_price_bounds_hold(seed):
    """Memory by place included; and a larger limit than the optimum is never refuted."""
    p = periodic_problem(seed, ("1f1b",)) if seed % 2 else random_problem(seed, objective="bottleneck")
    model = CostModel(p)
    reach = ReachTable(model)
    best_s = optimum(model)
    prices = LayerPrices(reach)
    bound, _ = price_bound_s(prices, volume_bound_s(reach), math.inf, time.perf_counter() + 5)
    assert bound <= best_s * (1 + 1e-9)
    if best_s < math.inf:
        assert not prices.refute(best_s)
        assert not prices.refute(best_s, by_place=True)
        run = find_run(model, reach)
        if run is not None:
            periodic = PeriodicSearch(model, reach, run)
            assert not periodic.refuted(best_s)
            assert periodic.holds(best_s)


def paper(encoders, factors, caps=None, **more):
    """The paper's case: N encoders, hidden size 1024."""
    h, count = 1024, 3 * encoders
    a, b = 32.0 * (8 * 128 * h**2 + 4 * 128**2 * h), 32.0 * 2 * 128 * h * 4 * h
    flops = [32.0 * 128 * h * 10, *[a, b, b] * encoders, 32.0 * 2 * h**2, 32.0 * 6 * h]
    state = [16.0 * 30522 * h, *[16.0 * 4 * h * h] * count, 16.0 * h * h, 16.0 * 3 * h]
    return Problem(
        layers=tuple(
            Layer(name=f"{i}", flops=3 * x, state_bytes=y, activation_bytes=0.0, output_bytes=4.0 * h)
            for i, (x, y) in enumerate(zip(flops, state, strict=True))
        ),
        devices=tuple(
            Device(id=f"n{i}/cpu:0", flops_per_s=1e13 / f, memory_bytes=None if caps is None else caps[i])
            for i, f in enumerate(factors.tolist())
        ),
        **{"microbatches": 8, "objective": "bottleneck", **more},
    )


FACTORS = {
    "f1": 1 + np.random.default_rng(32).random(64),
    "f2": 1 + np.random.default_rng(35).integers(1, 7, 64),
}
CAPS = (1.25e9 / (1 + 2 * np.random.default_rng(22).random(64))).tolist()


@pytest.mark.parametrize("factors", ["f1", "f2"])
@pytest.mark.parametrize("caps", [None, CAPS], ids=["free", "capped"])
def test_the_papers_cases_are_proved(factors, caps):
    """64 devices, 160 encoders, 483 layers; the bound once more by the full dynamic program."""
    p = paper(160, FACTORS[factors], caps)
    planned = plan(p)
    proof = planned.certificate
    assert proof.status == "optimal"
    assert "prices" in proof.method
    model = CostModel(p)
    reach = ReachTable(model)
    run = find_run(model, reach)
    assert run == LayerRun(1, 481, 3)
    periodic = PeriodicSearch(model, reach, run)
    assert not periodic.holds(proof.value_s * (1 - EQUAL_SUMS))
    assert periodic.holds(proof.value_s)
    assert proof.value_s >= volume_bound_s(reach)


def test_many_devices_are_proved():
    """256 different devices, 1,203 layers."""
    p = paper(400, np.random.default_rng(1).uniform(1, 4, 256))
    model = CostModel(p)
    best, bound, proved, *_ = least_bottleneck(model, None, time.perf_counter() + 30)
    assert proved
    assert model.is_allowed(best)
    assert bound == bottleneck_s(model, best)


def test_random_costs_come_close():
    """32 devices, 241 layers of random costs: nothing repeats, too many for CP-SAT to decide."""
    r = np.random.default_rng(0)
    p = problem(flops=r.uniform(1, 9, 241).tolist(), speeds=(1 / r.uniform(1, 2, 32)).tolist())
    model = CostModel(p)
    reach = ReachTable(model)
    prices = LayerPrices(reach)
    bound, _ = price_bound_s(prices, volume_bound_s(reach), math.inf, time.perf_counter() + 1)
    best = priced_beam.search_beams(prices, None, bound, NEVER, priced_beam.WIDTHS[:2])
    assert model.is_allowed(best)
    assert bottleneck_s(model, best) <= bound * 1.02


def test_memory_by_place_bounds_and_plans():
    """1F1B keeps most in flight at the first stages: with the least number in flight everywhere more fits."""
    r = random.Random(5)
    p = problem(flops=[r.uniform(1, 3) for _ in range(40)], speeds=[r.uniform(1, 4) for _ in range(14)])
    p = p.model_copy(
        update={
            "layers": tuple(x.model_copy(update={"activation_bytes": 1.0}) for x in p.layers),
            "devices": tuple(d.model_copy(update={"memory_bytes": 26.0}) for d in p.devices),
            "microbatches": 16,
        }
    )
    model = CostModel(p)
    best, bound, *_ = least_bottleneck(model, None, time.perf_counter() + 1)
    assert model.is_allowed(best)
    assert bound <= bottleneck_s(model, best)
    scarce = p.model_copy(
        update={"devices": tuple(d.model_copy(update={"memory_bytes": 14.0}) for d in p.devices)}
    )
    reach = ReachTable(CostModel(scarce))
    prices = LayerPrices(reach)
    assert not prices.refute(math.inf)
    assert prices.refute(math.inf, by_place=True)


def test_a_shortage_of_memory_is_proved_by_prices():
    p = problem(flops=[1.0] * 50, speeds=[1.0 + i / 100 for i in range(20)], memory=[2.9] * 20)
    with pytest.raises(InfeasibleError):
        plan(p, time_limit_s=60)


@pytest.mark.parametrize("make", [lambda: paper(160, FACTORS["f1"]), lambda: random_costs(64, 200)])
def test_no_time_at_all_still_gives_a_bound(make):
    p = make()
    stopped = plan(p, time_limit_s=0.0).certificate
    assert stopped.status == "bounded"
    best = plan(p, time_limit_s=1.0).certificate
    assert 0 < stopped.lower_bound_s <= best.value_s
    assert best.gap <= stopped.gap


def random_costs(devices, layers):
    r = np.random.default_rng(1)
    return problem(flops=r.uniform(1, 9, layers).tolist(), speeds=(1 / r.uniform(1, 2, devices)).tolist())


def test_it_is_deterministic():
    p = paper(40, FACTORS["f1"][:20], CAPS[:20])
    assert plan(p).stages == plan(p).stages


def test_prices_and_balance_agree_on_the_most_layers():
    """Potentials bound what the dynamic program counts exactly, whatever the window allows."""
    p = paper(40, FACTORS["f1"][:20])
    model = CostModel(p)
    reach = ReachTable(model)
    run = find_run(model, reach)
    periodic = PeriodicSearch(model, reach, run)
    edges = periodic.edges(())
    for limit_s in np.linspace(0.05, 0.12, 8).tolist():
        lengths = edges.lengths(limit_s)
        nodes = run.period + len(edges.places)
        exact = EdgeBalance(edges.edges, run.period, nodes, edges.source, edges.sink, 10).most(lengths)
        small = EdgeBalance(edges.edges, run.period, nodes, edges.source, edges.sink, 2)
        counted, choice = small.choose(lengths)
        assert counted == small.most(lengths) <= exact
        assert counted == sum(int(lengths[d, e]) for d, e in enumerate(choice) if e >= 0)
        assert exact <= potential_bound(edges, lengths, reach.sizes)[0] + 1e-6


def test_runs_are_found_and_only_where_everything_that_matters_repeats():
    p = problem(flops=[5.0, *[1.0, 2.0, 3.0] * 6, 4.0], speeds=[1.0, 2.0])
    model = CostModel(p)
    assert find_run(model, ReachTable(model)) == LayerRun(1, 19, 3)
    uneven = [x.model_copy(update={"state_bytes": float(i)}) for i, x in enumerate(p.layers)]
    same = p.model_copy(update={"layers": tuple(uneven)})
    model = CostModel(same)
    assert find_run(model, ReachTable(model)) == LayerRun(1, 19, 3)  # no caps: state does not matter
    capped = same.model_copy(
        update={"devices": tuple(d.model_copy(update={"memory_bytes": 100.0}) for d in p.devices)}
    )
    model = CostModel(capped)
    assert find_run(model, ReachTable(model)) is None
    assert find_run(CostModel(random_costs(3, 30)), ReachTable(CostModel(random_costs(3, 30)))) is None


@pytest.mark.parametrize("seed", range(30))
def test_reach_tables_are_the_models_own(seed):
    """Farthest stops and lowest starts, against every range asked one by one."""
    model = CostModel(periodic_problem(seed) if seed % 2 else random_problem(seed, objective="bottleneck"))
    reach = ReachTable(model)
    limit_s = random.Random(seed).uniform(0.5, 8)
    for in_flight in {reach.in_flight, model.least_in_flight(0, model.max_stages)}:
        far, low = reach.far(limit_s, in_flight), reach.low(limit_s, in_flight)
        for row, (d, *_) in enumerate(reach.members):

            def fits(p, q, d=d, in_flight=in_flight):
                pinned = (p > 0 or d in model.may_be_first) and (q < model.layers or d in model.may_be_last)
                return pinned and model.busy_s(d, p, q) <= limit_s and model.fits(d, p, q, in_flight)

            for at in range(model.layers + 1):
                assert far[row, at] == max([at, *(q for q in range(at + 1, model.layers + 1) if fits(at, q))])
                assert low[row, at] == min([at, *(p for p in range(at) if fits(p, at))])


@pytest.mark.parametrize("seed", range(10))
def test_covering_agrees_with_subsets(seed):
    p = random_problem(seed, objective="bottleneck", most_devices=5, most_layers=9)
    model = CostModel(p)
    best_s = optimum(model)
    covering = CoveringModel(ReachTable(model), NEVER)
    if best_s == math.inf:
        assert covering.cover(math.inf, False) is None
        return
    placement = covering.cover(best_s, False)
    assert model.is_allowed(placement)
    assert bottleneck_s(model, placement) <= best_s * (1 + 1e-9)
    assert covering.cover(best_s, True) is None


def test_its_certificates_verify():
    p = paper(20, FACTORS["f1"][:18])
    planned = plan(p)
    assert planned.certificate.status == "optimal"
    assert verify(p, planned).ok


def test_heavy_layers_before_the_run_may_need_cuts_among_them():
    """No device can hold all layers before the run, and the best plan cuts there."""
    flops = [10.0, 30, 10, *([0.5] * 140), 10, 10, 20]
    speeds = [1.09, 1.12, 1.14, 1.15, 1.16, 1.2, 1.21, 1.28, 1.3, 1.37, 1.41, 1.43, 2, 3, 4]
    p = problem(flops, speeds)
    planned = plan(p)
    assert planned.certificate.value_s == pytest.approx(7.5)
    assert verify(p, planned).ok


@pytest.mark.parametrize("flops", [[5.0] + [1.0] * 6, [10.0] * 3 + [1.0] * 12])
def test_more_devices_than_layers_that_repeat(flops):
    planned = plan(problem(flops, [1 + 0.01 * i for i in range(30)]))
    assert planned.certificate.status == "optimal"


@pytest.mark.parametrize("seed", range(60))
def test_periods_alone_never_refute_what_subsets_allow(seed):
    """The search by periods itself, on small problems that ``least_bottleneck`` leaves to the subsets."""
    r = random.Random(seed)
    ends = [[r.choice([1.0, 5.0, 10.0, 30.0]) for _ in range(r.randint(0, 4))] for _ in range(2)]
    flops = [*ends[0], *([r.choice([0.5, 1.0])] * r.randint(8, 20)), *ends[1]]
    p = problem(flops, [r.uniform(1, 4) for _ in range(r.randint(2, 6))])
    model = CostModel(p)
    reach = ReachTable(model)
    run = find_run(model, reach)
    if run is None:
        return
    search = BottleneckSearch(reach, None, volume_bound_s(reach), time.perf_counter() + 20)
    search.by_periods(PeriodicSearch(model, reach, run))
    low = search.low * (1 - 1e-6)
    assert device_subsets.placement_within(model, low, strict=True) is None
