"""Plans with a parameter server: the root, memory, what staleness gains, verify on changed records."""

from __future__ import annotations

import pytest
from tests.planner.data_problems import data_problem, random_data_problem

from skyctl import InfeasibleError, plan, predict, verify
from skyctl.errors import InputError
from skyctl.planner.api import assigned
from skyctl.records.base import parse
from skyctl.records.plan import Plan
from skyctl.records.problem import Problem
from skyctl.records.rhythm import Rhythm

STALLS = (*[1.0] * 18, *[10.0] * 2)


def stale_problem(
    staleness: int | None = 3, factors=STALLS, speeds=(60.0, 60.0, 60.0, 60.0), **more
) -> Problem:
    """Microbatches of 0.1 s on a device of speed 60, of which a tenth take a second."""
    problem = data_problem(speeds, microbatches=len(speeds), rhythm=Rhythm(staleness=staleness), **more)
    devices = tuple(d.model_copy(update={"step_factors": factors}) for d in problem.devices)
    return problem.model_copy(update={"devices": devices})


@pytest.mark.parametrize(
    ("staleness", "gain"), [(1, 205 / 168), (3, 205 / 137), (10, 205 / 111), (None, 205 / 95)]
)
def test_what_staleness_gains_is_predicted_from_measured_steps(staleness: int | None, gain: float) -> None:
    planned = plan(stale_problem(staleness))
    stale = planned.predicted.stale
    assert stale is not None
    assert stale.synchronous_s / planned.predicted.iteration_s == pytest.approx(gain, rel=0.06)
    assert stale.bound_s == pytest.approx(0.19)
    assert (stale.helps, stale.unknown) == (True, ())
    assert planned.certificate.status == "feasible"
    assert verify(planned.problem, planned).ok
    assert predict(planned.problem, planned) == planned.predicted
    again = parse(Plan, planned.to_json(), "plan")
    assert again == planned


@pytest.mark.parametrize("strategy", ["even", "alone", "heuristic", "optimal"])
def test_a_plan_is_checked_against_the_problem_that_it_was_made_for(strategy: str) -> None:
    given = stale_problem(3)
    assert given.sync == "auto"
    planned = plan(given, strategy)
    assert verify(given, planned).ok
    other = given.model_copy(update={"rhythm": Rhythm(staleness=2)})
    assert not verify(other, planned).ok


def test_a_device_that_is_always_slow_can_not_be_helped() -> None:
    planned = assigned(
        stale_problem(3, factors=(), speeds=(60.0, 60.0, 20.0)),
        [("n0/cpu:0", 1), ("n1/cpu:0", 1), ("n2/cpu:0", 1)],
    )
    stale = planned.predicted.stale
    assert stale is not None
    assert (stale.helps, stale.slowest, stale.unknown) == (
        False,
        "n2/cpu:0",
        ("n0/cpu:0", "n1/cpu:0", "n2/cpu:0"),
    )
    assert planned.predicted.iteration_s == pytest.approx(stale.bound_s)
    assert planned.predicted.iteration_s == pytest.approx(stale.synchronous_s)
    assert verify(planned.problem, planned).ok


def test_the_root_comes_first_and_has_memory_for_weights_and_a_buffer_for_each() -> None:
    """Only the third device has the memory for the weights that pushes are applied to."""
    size = 2e6
    needs = 4 * 2 * size  # state
    worker, root = needs + 2 * size, needs + 2 * size * (1 + 1 + 2) + 2 * (2 << 20)
    memory = [worker, worker, root]
    problem = data_problem(
        (60.0, 60.0, 60.0), rate=1e9, gradient=size, microbatches=3, memory=memory, rhythm=Rhythm(staleness=1)
    )
    planned = plan(problem)
    assert [p.stages[0].device for p in planned.pipelines] == ["n2/cpu:0", "n0/cpu:0", "n1/cpu:0"]
    assert planned.sync.groups[0].routes[0].root == "n2/cpu:0"
    assert [r.memory_bytes for r in planned.predicted.replicas] == pytest.approx([root, worker, worker])
    assert verify(planned.problem, planned).ok
    short = [room - 1e5 for room in memory]
    with pytest.raises(InfeasibleError):
        assigned(
            problem.model_copy(
                update={
                    "devices": tuple(
                        d.model_copy(update={"memory_bytes": room})
                        for d, room in zip(problem.devices, short, strict=True)
                    )
                }
            ),
            [("n0/cpu:0", 1), ("n1/cpu:0", 1), ("n2/cpu:0", 1)],
        )


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"sync": "ring"}, "not --sync ring"),
        ({"sync": "trees"}, "not --sync trees"),
        ({"sync": "server"}, "not --sync server"),
        ({"helpers": ("n1/cpu:0",)}, "n1/cpu:0 can't help"),
        ({"sync_format": "bfloat16"}, "not as bfloat16"),
        ({"parallel": "pipeline"}, "parallel is pipeline"),
        ({"parallel": "hybrid"}, "parallel is hybrid"),
    ],
)
def test_what_does_not_go_with_it_is_refused(changes: dict[str, object], words: str) -> None:
    problem = stale_problem().model_copy(update=changes)
    with pytest.raises(InputError, match=words):
        plan(problem)


def test_verify_finds_what_was_changed() -> None:
    planned = plan(stale_problem(rate=1e6))

    def fails(**changes: object) -> set[str]:
        changed = planned.model_copy(update=changes)
        return {check.name for check in verify(changed.problem, changed).checks if not check.ok}

    stale = planned.predicted.stale
    assert stale is not None
    assert fails() == set()
    for changes in (
        {"bound_s": stale.bound_s / 2},
        {"synchronous_s": planned.predicted.iteration_s / 2},
        {"slowest": "n9/cpu:0"},
        {"unknown": ("n1/cpu:0",)},
    ):
        wrong = planned.predicted.model_copy(update={"stale": stale.model_copy(update=changes)})
        assert fails(predicted=wrong) == {"value"}, changes
    quick = stale.bound_s / 2
    wrong = planned.predicted.model_copy(update={"iteration_s": quick})
    proof = planned.certificate.model_copy(update={"value_s": quick})
    assert "value" in fails(predicted=wrong, certificate=proof)
    assert "value" in fails(predicted=planned.predicted.model_copy(update={"stale": None}))
    pipelines = (*planned.pipelines[1:], planned.pipelines[0])
    replicas = planned.predicted.replicas
    moved = planned.predicted.model_copy(update={"replicas": (*replicas[1:], replicas[0])})
    assert fails(pipelines=pipelines, predicted=moved) == {"server"}


def test_random_problems_are_planned_as_they_verify() -> None:
    several = 0
    for seed in range(40):
        asked = {
            "rhythm": Rhythm(staleness=seed % 4 or None),
            "sync": "auto",
            "sync_format": "float32",
            "helpers": None,
        }
        problem = random_data_problem(seed).model_copy(update=asked)
        try:
            planned = plan(problem)
        except InfeasibleError:
            continue
        verdict = verify(planned.problem, planned)
        assert verdict.ok, (seed, [check for check in verdict.checks if not check.ok])
        several += len(planned.pipelines) > 1
    assert several > 10
