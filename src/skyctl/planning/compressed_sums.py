"""The data that a problem with compressed sums needs besides: the shapes of its layers' gradients."""

from __future__ import annotations

from skyctl.errors import InputError, InvalidRecordError
from skyctl.learning.problem_from_profile import measured_shape
from skyctl.records.base import describe
from skyctl.records.problem import Problem
from skyctl.records.profile import Profile
from skyctl.records.rhythm import Rhythm
from skyctl.records.sync_format import powersgd_rank


def refuse_contradictions(sync_format: str, uncompressed_steps: int, rhythm: Rhythm) -> None:
    """Raises InputError where a rhythm or uncompressed steps do not go with a format of sums."""
    if powersgd_rank(sync_format) is None:
        if uncompressed_steps:
            raise InputError(
                f"--uncompressed-steps {uncompressed_steps} is of --sync-format powersgd:R, and sums are "
                f"{sync_format}",
                hint="add --sync-format powersgd:4, or --uncompressed-steps 0",
            )
    elif not rhythm.is_synchronous:
        raise InputError(
            f"--sync-format {sync_format} goes with a synchronous rhythm only",
            hint="leave --sync-format out, or --sync-delay, --staleness and --local-steps",
        )


def with_matrices(problem: Problem, profile: Profile) -> Problem:
    """The problem with the shapes that its format of sums needs; as it is where that needs none.

    Raises:
        InputError: the problem contradicts itself.
    """
    refuse_contradictions(problem.sync_format, problem.sync_uncompressed_steps, problem.rhythm)
    if powersgd_rank(problem.sync_format) is None:
        return problem
    shape = measured_shape(profile, problem.microbatches)
    layers = [
        layer.model_copy(update={"gradient_matrices": measured.gradient_matrices})
        for layer, measured in zip(problem.layers, shape.layers, strict=True)
    ]
    try:
        return Problem.model_validate({**dict(problem), "layers": layers})
    except InvalidRecordError as exc:
        raise InputError(describe(exc, Problem)) from exc
