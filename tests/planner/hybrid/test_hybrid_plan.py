"""Plans of several pipelines: known steps, what is refused, and searches of more devices."""

import pytest
from tests.planner.data_problems import data_problem
from tests.planner.hybrid_problems import random_hybrid_problem

from skyctl import InfeasibleError, plan, predict, verify
from skyctl.errors import InputError
from skyctl.planner.cost_model import StageAssignment
from skyctl.planner.hybrid import hybrid_plan
from skyctl.planner.hybrid.hybrid_bound import hybrid_bound
from skyctl.planner.hybrid.hybrid_model import Draft, HybridModel
from skyctl.planner.prediction_interval import COMMON_UNCERTAINTY, ratio_interval, with_interval
from skyctl.records.problem import LayerTimes, Link, SharedResource
from skyctl.records.rhythm import Rhythm
from skyctl.schedule.joint_simulation import ends_together


def hybrid_problem(speeds=(1.0,) * 4, **more):
    return data_problem(speeds, parallel="hybrid", **more)


def sites(count, each, *, near=1e4, far=50.0, **more):
    """Sites of equal devices: fast links within, slow ones between them."""
    problem = hybrid_problem((1.0,) * (count * each), rate=near, **more)
    ids = [device.id for device in problem.devices]
    rate = {(a, b): near if i // each == j // each else far
            for i, a in enumerate(ids) for j, b in enumerate(ids)}  # fmt: skip
    links = [
        Link(source=a, target=b, latency_s=0.0, bandwidth_bytes_per_s=rate[a, b])
        for a in ids
        for b in ids
        if a != b
    ]
    return problem.model_copy(update={"links": tuple(links)})


def test_the_joint_sum_by_hand():
    """Two layers of 100 bytes on one device, and one each on two others; links of 50 bytes a second."""
    model = HybridModel(hybrid_problem((1.0,) * 3, rate=50.0, microbatches=2))
    whole = (StageAssignment(0, 0, 2),)
    cut = (StageAssignment(1, 0, 1), StageAssignment(2, 1, 2))
    step = model.step(Draft((whole, cut), (1, 1)))
    # alone: 2 s forward, 4 s backward, layer 1 there at 4 s; cut: forward to 2 s, backward 4 s and 6 s
    assert [model.ends_s(pipeline) for pipeline in step.candidate.pipelines] == [(6.0,), (6.0, 4.0)]
    assert [(group.start, group.stop, group.replicas) for group in step.candidate.sums] == [
        (0, 1, (0, 1)),
        (1, 2, (0, 2)),
    ]
    assert step.iteration_s == pytest.approx(8.0)  # layer 1: 4 s to 6 s, layer 0: 6 s to 8 s, on other links
    assert step.sync_s == pytest.approx(2.0)


def test_sums_of_two_groups_queue_on_a_shared_resource():
    problem = hybrid_problem((1.0,) * 3, rate=50.0, microbatches=2)
    both = [("n0/cpu:0", "n1/cpu:0"), ("n0/cpu:0", "n2/cpu:0")]
    shared = SharedResource(name="out", bandwidth_bytes_per_s=25.0, links=both)
    model = HybridModel(problem.model_copy(update={"shared": (shared,)}))
    cut = (StageAssignment(1, 0, 1), StageAssignment(2, 1, 2))
    step = model.step(Draft(((StageAssignment(0, 0, 2),), cut), (1, 1)))
    assert step.iteration_s == pytest.approx(12.0)  # layer 1 until 8 s, then layer 0 for 4 s


def test_messages_of_two_pipelines_queue_on_a_shared_resource():
    """Two pipelines of two stages; both ways from the first to the second take 3 s for a message."""
    problem = hybrid_problem((1.0,) * 4, rate=1e9, microbatches=2)
    there = [("n0/cpu:0", "n1/cpu:0"), ("n2/cpu:0", "n3/cpu:0")]
    shared = SharedResource(name="up", bandwidth_bytes_per_s=1.0, links=there)
    layers = [layer.model_copy(update={"output_bytes": 3.0}) for layer in problem.layers]
    model = HybridModel(problem.model_copy(update={"shared": (shared,), "layers": tuple(layers)}))
    first, second = ((StageAssignment(d, 0, 1), StageAssignment(d + 1, 1, 2)) for d in (0, 2))
    draft = Draft((first, second), (1, 1))
    alone = [model.play(placement, 1).ends.ends_s for placement in draft.placements]
    # forward 1 s, message 3 s, forward 1 s, backward 2 s, at once back, backward 2 s
    assert alone == [pytest.approx((9.0, 7.0))] * 2
    step = model.step(draft)
    simulated = [model.simulated(pipeline) for pipeline in step.candidate.pipelines]
    assert ends_together(simulated, alone) == [pytest.approx((9.0, 7.0)), pytest.approx((12.0, 10.0))]
    planned = plan(model.problem, "optimal")
    assert verify(model.problem, planned).ok
    assert planned.certificate.value_s <= step.iteration_s


@pytest.mark.parametrize("sync", ["ring", "star"])
def test_one_stage_a_pipeline_is_data_parallelism(sync):
    problem = data_problem((3.0, 2.0, 1.0), rate=40.0, latency=0.1, sync=sync, microbatches=12)
    data = plan(problem)
    model = HybridModel(problem.model_copy(update={"parallel": "hybrid"}))
    whole = tuple(
        (StageAssignment(model.base.index(stage.device), 0, model.layers),) for stage in data.placed_stages
    )
    step = model.step(Draft(whole, tuple(pipeline.microbatches for pipeline in data.pipelines)))
    assert step.iteration_s == pytest.approx(data.predicted.iteration_s, rel=1e-12)
    assert step.sync_s == pytest.approx(data.predicted.sync_s, rel=1e-12)


def test_pipelines_stay_within_sites_where_links_between_them_are_slow():
    """No device holds the whole model, and activations are as large as gradients, times microbatches."""
    problem = sites(2, 2, gradient=1e8, layers=4, memory=[1.2e9] * 4, near=1e10, far=1e8)
    layers = tuple(layer.model_copy(update={"output_bytes": 1e8}) for layer in problem.layers)
    planned = plan(problem.model_copy(update={"layers": layers}))
    assert planned.certificate.status == "optimal"
    names = [{stage.device for stage in pipeline.stages} for pipeline in planned.pipelines]
    assert names == [{"n0/cpu:0", "n1/cpu:0"}, {"n2/cpu:0", "n3/cpu:0"}]
    assert len(planned.sync.groups) == 2
    assert verify(planned.problem, planned).ok


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"schedule": "gpipe"}, "gpipe"),
        ({"objective": "bottleneck"}, "bottleneck"),
        ({"sync": "trees"}, "trees"),
        ({"sync": "server"}, "server"),
        ({"helpers": ["n0/cpu:0"]}, "n0/cpu:0"),
    ],
)
def test_what_hybrids_do_not_have_is_refused(options, words):
    with pytest.raises(InputError, match=words) as refused:
        plan(hybrid_problem(rate=50.0, **options))
    assert refused.value.hint


@pytest.mark.parametrize(
    "options",
    [
        {"strategy": "even"},
        {"strategy": "alone"},
        {"assign": [("n0/cpu:0", 0, 2)]},
        {"whole_blocks": True},
    ],
)
def test_options_of_other_forms_are_refused(options):
    with pytest.raises(InputError):
        plan(hybrid_problem(rate=50.0), **options)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"microbatches": 1}, "microbatches"),
        ({"speeds": (1.0,)}, "two devices"),
        ({"first_stage": ["n1/cpu:0"]}, "first layer; the pins allow n1/cpu:0"),
        ({"memory": [500.0] * 3 + [10.0]}, "hold every layer twice"),
        ({"memory": [1e7, 100.0, 100.0, 100.0]}, "no two pipelines fit"),
    ],
)
def test_what_does_not_fit_is_said(options, words):
    with pytest.raises(InfeasibleError, match=words):
        plan(hybrid_problem(**options))


def test_a_plan_of_one_pipeline_is_no_hybrid():
    problem = hybrid_problem(rate=50.0)
    planned = plan(problem.model_copy(update={"parallel": "pipeline"}))
    with pytest.raises(InputError, match="one pipeline"):
        predict(problem, planned)


def test_more_devices_are_searched_for_as_long_as_is_said():
    problem = random_hybrid_problem(1, devices=(14, 14), layers=(24, 24), microbatches=(24, 24))
    planned = plan(problem, time_limit_s=2.0)
    assert planned.certificate.status in ("bounded", "feasible")
    assert predict(problem, planned) == planned.predicted
    assert verify(problem, planned).ok
    try:
        data = plan(problem.model_copy(update={"parallel": "data"}))
    except InfeasibleError:
        return
    model = HybridModel(problem)
    whole = tuple(
        (StageAssignment(model.base.index(stage.device), 0, model.layers),) for stage in data.placed_stages
    )
    step = model.step(Draft(whole, tuple(pipeline.microbatches for pipeline in data.pipelines)))
    assert step is None or planned.predicted.iteration_s <= step.iteration_s * (1 + 1e-9)


def test_the_same_problem_has_the_same_plan():
    problem = random_hybrid_problem(2, devices=(5, 5), layers=(6, 6))
    first, second = (plan(problem, "heuristic", time_limit_s=60) for _ in range(2))
    assert first.pipelines == second.pipelines


def uncertain(problem, uncertainty):
    devices = (d.model_copy(update={"time_uncertainty": uncertainty}) for d in problem.devices)
    return problem.model_copy(update={"devices": tuple(devices)})


def test_the_predicted_step_has_an_interval():
    planned = with_interval(plan(uncertain(hybrid_problem(rate=50.0), 0.1)))
    interval = planned.predicted.interval
    assert interval.low_s <= planned.predicted.iteration_s < interval.high_s
    sure = with_interval(plan(uncertain(hybrid_problem(rate=50.0), 0.01))).predicted.interval
    assert sure.high_s - sure.low_s < interval.high_s - interval.low_s
    low, high = ratio_interval(planned, planned)
    assert low == pytest.approx(1.0)
    assert high == pytest.approx(1.0)


def test_where_only_computing_counts_the_interval_is_that_of_all_computing():
    planned = with_interval(plan(uncertain(hybrid_problem((1.0, 3.0)), 1e-6)))
    interval = planned.predicted.interval
    width = (interval.high_s - interval.low_s) / planned.predicted.iteration_s
    assert width == pytest.approx(2 * 1.2816 * COMMON_UNCERTAINTY, rel=0.1)  # from p10 to p90


def test_buffers_of_sums_have_to_fit():
    """Each of two devices receives from the other: two chunks."""
    free = plan(data_problem(rate=100.0, parallel="hybrid"))
    need = [replica.memory_bytes for replica in free.predicted.replicas]
    exactly = data_problem(rate=100.0, parallel="hybrid", memory=need)
    assert verify(exactly, plan(exactly)).ok
    short = data_problem(rate=100.0, parallel="hybrid", memory=[x - 1.0 for x in need])
    with pytest.raises(InfeasibleError):
        plan(short)


@pytest.mark.parametrize("delay", [0, 1])
@pytest.mark.parametrize("count", [2, 3])
def test_the_bound_by_prices_knows_what_processors_send(count, delay):
    """Links are free, and a byte takes a processor long: each sends and receives it once at least."""
    problem = hybrid_problem((1.0,) * count, microbatches=2 * count, rhythm=Rhythm(delay=delay))
    devices = tuple(device.model_copy(update={"message_byte_s": 0.05}) for device in problem.devices)
    problem = problem.model_copy(update={"devices": devices})
    planned, bound = plan(problem), hybrid_bound(problem)
    assert 0.5 * planned.certificate.value_s < bound.bound_s <= planned.certificate.value_s


def test_the_bound_by_prices_counts_an_optimizer_once():
    problem = hybrid_problem((1.0,) * 2)
    times = LayerTimes(forward_s=(1.0, 1.0), backward_s=(2.0, 2.0), optimizer_s=(9.0, 9.0))
    problem = problem.model_copy(update={"times": {device.id: times for device in problem.devices}})
    planned, bound = plan(problem), hybrid_bound(problem)
    assert planned.certificate.value_s == pytest.approx(4 * 6.0 + 18.0)
    assert 0.9 * planned.certificate.value_s < bound.bound_s <= planned.certificate.value_s


def test_a_bound_that_there_is_no_time_for_is_said(monkeypatch):
    """All lines of very many devices take longer to look at than what is left of the limit."""
    monkeypatch.setattr(hybrid_plan, "PAIR_S", 1e9)
    problem = sites(3, 4, layers=12)
    planned = plan(problem, time_limit_s=1.0)
    assert (planned.certificate.status, planned.certificate.lower_bound_s) == ("feasible", None)
    assert planned.certificate.method.endswith("bound by prices left out for lack of time")
    assert verify(problem, planned).ok
