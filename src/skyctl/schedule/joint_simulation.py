"""When the stages of pipelines side by side end, where messages of several occupy the same resources."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from skyctl.schedule.actions import actions
from skyctl.schedule.event_simulation import play_events
from skyctl.schedule.simulation_input import SimulationInput
from skyctl.schedule.steady_state import WHOLE_STEP
from skyctl.schedule.step_times import BoundaryTimes, StageTimes

StageEnds = Sequence[float]


def ends_together(
    pipelines: Sequence[SimulationInput], ends_alone: Sequence[StageEnds]
) -> list[tuple[float, ...]]:
    """By pipeline and stage, when its last action but the optimizer ends; seconds from the step's beginning.

    Those pipelines whose messages occupy a resource that another's occupy, too, are played together, all from
    the same instant; where several messages wait for a resource they are served as those of one pipeline
    are. A stage never ends before it would if its pipeline ran alone. Steps of more than ``WHOLE_STEP``
    microbatches are not played together.

    Args:
        pipelines: without deferred weight gradients.
        ends_alone: by pipeline and stage, what each of them comes to alone.
    """
    out = [tuple(ends) for ends in ends_alone]
    together = _sharing(pipelines)
    if not together or sum(pipeline.microbatches for pipeline in pipelines) > WHOLE_STEP:
        return out
    orders = []
    stages: list[StageTimes] = []
    boundaries: list[BoundaryTimes | None] = []
    for number in together:
        pipeline = pipelines[number]
        orders += [actions(pipeline.schedule, pipeline.microbatches, k, 0) for k in pipeline.in_flight]
        stages += pipeline.stages
        boundaries += [*pipeline.boundaries, None]
    free = iter(play_events(orders, stages, boundaries[:-1]).free)
    for number in together:
        out[number] = tuple(max(alone, next(free)) for alone in out[number])
    return out


def _sharing(pipelines: Sequence[SimulationInput]) -> list[int]:
    """The pipelines whose messages occupy a resource that another's do."""
    users: dict[Hashable, set[int]] = {}
    for number, pipeline in enumerate(pipelines):
        for boundary in pipeline.boundaries:
            for message in (boundary.forward, boundary.backward):
                for name, _ in message.shared:
                    users.setdefault(name, set()).add(number)
    return sorted(set().union(*(numbers for numbers in users.values() if len(numbers) > 1)))
