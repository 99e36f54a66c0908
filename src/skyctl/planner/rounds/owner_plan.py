"""The pipeline of an owner that has several machines.

Beside other owners no cut divides layers that share parameters: a stage would have to sum their gradients
with another one in every local step, and its weights with other owners after them.
"""

from __future__ import annotations

from collections.abc import Sequence

from skyctl.errors import InfeasibleError
from skyctl.planner.pipeline_plan import plan_pipeline
from skyctl.planner.problem_parts import with_layers_joined
from skyctl.records.pipeline import PlacedStage
from skyctl.records.plan import Strategy
from skyctl.records.problem import Problem

TIES_HINT = (
    "give the owner a machine with room for these layers, or train parameters of their own in each "
    "(hf:DIR,untie)"
)


def plan_owner(
    problem: Problem, name: str, strategy: Strategy, time_limit_s: float, *, alone: bool
) -> tuple[PlacedStage, ...]:
    """The stages of an owner's pipeline.

    Args:
        problem: of one local step, with the owner's devices only.
        name: what the owner is called.
        alone: there are no other owners.

    Raises:
        InfeasibleError: its devices can't hold the layers, or not without dividing some that share
            parameters (``even``: its cut would divide them).
        UndecidedError: no pipeline was found in time.
    """
    groups = [[layer] for layer in range(len(problem.layers))] if alone else tied_groups(problem)
    joined = len(groups) < len(problem.layers)
    whole = problem
    if joined and strategy != "even":
        whole = with_layers_joined(problem, groups, [_group_name(problem, group) for group in groups])
    try:
        stages = plan_pipeline(whole, strategy, time_limit_s).pipelines[0].stages
    except InfeasibleError as exc:
        exc.message = f"owner {name}: {exc.message}"
        if whole is not problem:
            exc.message += f"; {_tied_text(problem)}"
            exc.hint = TIES_HINT
        raise
    if whole is not problem:
        starts = [*(group[0] for group in groups), len(problem.layers)]
        return tuple(
            stage.model_copy(update={"start": starts[stage.start], "stop": starts[stage.stop]})
            for stage in stages
        )
    if any(group[0] < stage.stop <= group[-1] for group in groups for stage in stages):
        raise InfeasibleError(
            f"owner {name}: an even cut is not possible: {_tied_text(problem)}",
            hint="--strategy optimal",
        )
    return stages


def tied_groups(problem: Problem) -> list[list[int]]:
    """All layers in their order, those together that one stage must hold because they share parameters.

    That is all from the first to the last layer of a tie, and of ties that overlap.
    """
    groups: list[list[int]] = []
    last = -1
    for layer in range(len(problem.layers)):
        if layer <= last:
            groups[-1].append(layer)
        else:
            groups.append([layer])
        last = max([last, *(tie.layers[-1] for tie in problem.ties if tie.layers[0] == layer)])
    return groups


def _group_name(problem: Problem, group: Sequence[int]) -> str:
    first, last = problem.layers[group[0]].name, problem.layers[group[-1]].name
    return first if len(group) == 1 else f"{first} … {last}"


def _tied_text(problem: Problem) -> str:
    """Which layers have to be in one stage, and why."""
    ties = [" and ".join(f"{i} ({problem.layers[i].name})" for i in tie.layers) for tie in problem.ties]
    return (
        f"layers {'; '.join(ties)} share parameters, and beside other owners one stage holds these and all "
        "between them"
    )
