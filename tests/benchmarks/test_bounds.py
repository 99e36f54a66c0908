"""The runtime benchmark's own bounds: never above what the simulator plays, and met by one device alone."""

import json
import random

import pytest
from runs.bounds import bound_s, data_bound_s, utilisation

from skyctl import Problem, plan


def _problem(seed: int, schedule: str) -> Problem:
    chance = random.Random(seed)
    layers, names = chance.randint(4, 9), [f"n{i}/cpu:0" for i in range(chance.randint(1, 4))]
    times = {}
    for name in names:
        backward = [chance.uniform(0.01, 0.1) for _ in range(layers)]
        times[name] = {
            "forward_s": [chance.uniform(0.01, 0.05) for _ in range(layers)],
            "backward_s": backward,
            "optimizer_s": [0.001] * layers,
            "weight_s": [chance.uniform(0.0, 0.5) * b for b in backward],
        }
    return Problem.model_validate(
        {
            "kind": "skyctl/problem",
            "version": 2,
            "layers": [
                {"name": f"l{i}", "flops": 1.0, "state_bytes": 1.0, "activation_bytes": 1.0}
                | {"output_bytes": chance.uniform(1e4, 1e5)}
                for i in range(layers)
            ],
            "devices": [{"id": name, "flops_per_s": 1.0, "memory_bytes": None} for name in names],
            "times": times,
            "links": [
                {"source": a, "target": b, "latency_s": chance.uniform(0, 0.01)}
                | {"bandwidth_bytes_per_s": chance.uniform(5e5, 5e6)}
                for a in names
                for b in names
                if a != b
            ],
            "microbatches": chance.choice((1, 4, 16)),
            "schedule": schedule,
        }
    )


@pytest.mark.parametrize("schedule", ["1f1b", "eager-1f1b", "zero-bubble"])
@pytest.mark.parametrize("seed", range(12))
def test_no_plan_is_below_its_bound(seed: int, schedule: str) -> None:
    made = plan(_problem(seed, schedule), "heuristic")
    bound = bound_s(json.loads(made.to_json()))
    assert 0 < bound <= made.predicted.iteration_s * (1 + 1e-9)
    if len(made.stages) == 1:
        assert bound == pytest.approx(made.predicted.iteration_s)


@pytest.mark.parametrize("seed", range(12))
def test_no_data_plan_is_below_its_bound(seed: int) -> None:
    given = _problem(seed, "1f1b")
    sized = [layer.model_copy(update={"gradient_bytes": layer.output_bytes}) for layer in given.layers]
    problem = given.model_validate({**dict(given), "parallel": "data", "layers": sized, "microbatches": 16})
    made = plan(problem, "even")
    bound = data_bound_s(json.loads(problem.to_json()))
    assert 0 < bound <= made.predicted.iteration_s * (1 + 1e-9)
    if len(given.devices) == 1:
        assert bound == pytest.approx(made.predicted.iteration_s - 0.001 * len(given.layers))


def test_utilisation_is_one_where_all_devices_work_all_the_time() -> None:
    given = _problem(3, "1f1b").model_copy(update={"links": ()})
    alone = given.devices[:1]
    one = given.model_validate(
        {**dict(given), "devices": alone, "times": {alone[0].id: given.times[alone[0].id]}}
    )
    made = plan(one, "heuristic")
    assert utilisation(json.loads(made.to_json()), made.predicted.iteration_s) == pytest.approx(1.0)
