"""How uneven devices' steps are: from what runs measured into the planner's problem.

Only a parameter server's plan depends on it, so only its problem has these figures.
"""

from __future__ import annotations

from collections.abc import Mapping

from skyctl.learning.problem_from_profile import measured_shape, measured_workload
from skyctl.records.measurement import Measurement, ReplicaMeasurement, median
from skyctl.records.problem import Problem
from skyctl.records.profile import Profile


def step_factors(replica: ReplicaMeasurement) -> tuple[float, ...]:
    """A device's seconds in its layers, step by step, ÷ their median: equally likely. Empty: not known."""
    steps = replica.layer_steps_s
    middle = median(steps) if steps else 0.0
    return tuple(step / middle for step in steps) if middle > 0 and min(steps) > 0 else ()


def with_observed_factors(problem: Problem, profile: Profile, corrections: Mapping[str, float]) -> Problem:
    """The problem with what the newest run of the same layers showed of each device's steps.

    Unchanged where the rhythm has no parameter server. They are factors of the problem's times: those of the
    probe, which are means and hold stalls, multiplied by what runs that were even have shown.

    Args:
        corrections: by device, what the probe's times were multiplied by; a device that is left out: by 1.
    """
    if not problem.rhythm.is_stale:
        return problem
    about = (
        measured_workload(profile).digest,
        measured_shape(profile, problem.microbatches).microbatch_size,
    )
    by_device: dict[str, tuple[float, ...]] = {}
    for observation in sorted(profile.observations, key=lambda observation: observation.seen):
        if observation.step_factors and (observation.digest, observation.microbatch_size) == about:
            middle = observation.seen_s / observation.probed_s / corrections.get(observation.device, 1.0)
            by_device[observation.device] = tuple(factor * middle for factor in observation.step_factors)
    return _with_factors(problem, by_device)


def with_measured_factors(problem: Problem, done: Measurement) -> Problem:
    """As ``with_observed_factors``, from the measurement of one run."""
    if not problem.rhythm.is_stale:
        return problem
    return _with_factors(problem, {replica.device: step_factors(replica) for replica in done.replicas})


def _with_factors(problem: Problem, by_device: dict[str, tuple[float, ...]]) -> Problem:
    devices = tuple(
        device.model_copy(update={"step_factors": by_device.get(device.id) or device.step_factors})
        for device in problem.devices
    )
    return problem.model_copy(update={"devices": devices})
