"""Data parallelism with a delay: plans that can be worked out by hand, what is kept, what is refused."""

import pytest
from tests.planner.data_problems import data_problem, delayed

from skyctl import plan, predict, verify
from skyctl.errors import InputError
from skyctl.planner.prediction_interval import with_interval
from skyctl.records.plan import Plan
from skyctl.records.problem import Problem
from skyctl.records.rhythm import Rhythm


def test_the_longer_of_computing_and_sums():
    problem = data_problem(rate=100.0)  # 24 s of computing, 2 s of sums
    planned = plan(delayed(problem))
    assert planned.predicted.iteration_s == pytest.approx(24)
    assert planned.predicted.sync_s == 0
    slow = delayed(data_problem(rate=100.0, gradient=1400.0))  # 28 s of sums
    planned = plan(slow)
    assert len(planned.pipelines) == 2
    assert planned.predicted.iteration_s == pytest.approx(28)
    assert planned.predicted.sync_s == pytest.approx(4)
    assert [replica.compute_s for replica in planned.predicted.replicas] == [pytest.approx(24)] * 2
    assert planned.certificate.status == "optimal"
    assert verify(slow, planned).ok
    alone = plan(delayed(data_problem(rate=100.0, gradient=2500.0)))  # 50 s of sums, 48 alone
    assert len(alone.pipelines) == 1
    assert alone.predicted.iteration_s == pytest.approx(48)


def test_optimizer_and_processor_come_to_the_computing():
    problem = data_problem(rate=1000.0)
    times = {"forward_s": [1.0, 1.0], "backward_s": [2.0, 2.0], "optimizer_s": [0.5, 0.5]}
    update = {
        "devices": [{**dict(d), "reduce_byte_s": 0.01, "message_byte_s": 0.005} for d in problem.devices],
        "times": {d.id: times for d in problem.devices},
        "sync": "ring",
    }
    changed = delayed(Problem.model_validate({**dict(problem), **update}))
    planned = plan(changed)
    # of a ring of two each adds half of 200 bytes, and sends and receives two halves each, in short messages;
    # predicting weights takes as long as adding 600
    assert planned.predicted.iteration_s == pytest.approx(24 + 1 + 700 * 0.01 + 2 * 400 * 0.005)
    assert verify(changed, planned).ok


def test_a_second_set_of_gradients_and_of_weights_is_kept():
    problem = data_problem(rate=100.0)
    plain, late = plan(problem), plan(delayed(problem))
    more = [b.memory_bytes - a.memory_bytes for a, b in
            zip(plain.predicted.replicas, late.predicted.replicas, strict=True)]  # fmt: skip
    assert more == [400.0, 400.0]
    halved = delayed(problem.model_copy(update={"sync_format": "bfloat16"}))
    assert plan(halved).predicted.replicas[0].memory_bytes == late.predicted.replicas[0].memory_bytes


def test_the_interval_is_of_the_same_step():
    for gradient in (100.0, 1400.0):
        problem = delayed(data_problem(rate=100.0, gradient=gradient))
        sure = problem.model_copy(
            update={
                "devices": tuple(
                    d.model_copy(update={"time_uncertainty": 1e-6, "overhead_uncertainty": 1e-6})
                    for d in problem.devices
                ),
                "links": tuple(x.model_copy(update={"uncertainty": 1e-6}) for x in problem.links),
            }
        )
        planned = with_interval(plan(sure))
        interval, step_s = planned.predicted.interval, planned.predicted.iteration_s
        assert interval.low_s < step_s < interval.high_s
        assert interval.high_s < 1.2 * step_s


def test_a_changed_step_is_found():
    problem = delayed(data_problem(rate=100.0, gradient=1400.0))
    planned = plan(problem)
    for field, value in (("iteration_s", 30.0), ("sync_s", 0.0)):
        wrong = planned.model_copy(update={"predicted": planned.predicted.model_copy(update={field: value})})
        assert not verify(problem, wrong).ok
    plain = problem.model_copy(update={"rhythm": Rhythm()})
    assert predict(plain, planned).iteration_s > planned.predicted.iteration_s


def test_the_rhythm_is_in_the_plan_and_read_again():
    planned = plan(delayed(data_problem(rate=100.0)))
    assert Plan.model_validate_json(planned.to_json()).problem.rhythm == Rhythm(delay=1)


@pytest.mark.parametrize("parallel", ["data", "hybrid", "pipeline"])
def test_what_does_not_go_with_it(parallel):
    problem = data_problem(rate=100.0, parallel=parallel, rhythm=Rhythm(delay=1), sync_format="fixed32")
    with pytest.raises(InputError, match="one pipeline sums none" if parallel == "pipeline" else "fixed32"):
        plan(problem)
