"""The command line's values of a problem, in place of those of its file or the defaults."""

from __future__ import annotations

from collections.abc import Sequence

from skyctl.errors import InputError, InvalidRecordError
from skyctl.planning.compressed_sums import refuse_contradictions
from skyctl.planning.link_dtypes import with_link_dtypes
from skyctl.planning.parallelism_choice import DATA, HYBRID, PIPELINE, STAGE_ORDERS, ParallelChoice
from skyctl.planning.plan_options import PlanOptions
from skyctl.planning.round_owners import round_fields
from skyctl.planning.schedule_choice import AUTO
from skyctl.records.base import describe
from skyctl.records.cluster import split_device_id
from skyctl.records.problem import Problem


def override_problem(
    problem: Problem,
    options: PlanOptions,
    pin_first: str | None = None,
    pin_last: str | None = None,
    activations: str = "float32",
) -> Problem:
    """The problem with what the command line gives in place of what its file says.

    Args:
        options: ``helpers`` are device ids or node names.
        pin_first, pin_last: the same, comma-separated.
        activations: the dtype of what its layers give.

    Raises:
        InputError: a pin or a helper names no device of the problem.
    """
    options = options.resolved_parallelism()
    given = {
        "schedule": None if options.schedule == AUTO else options.schedule,
        "objective": options.objective,
        "microbatches": options.microbatches,
        "first_stage": _pins(problem, "--pin-first", pin_first),
        "last_stage": _pins(problem, "--pin-last", pin_last),
        "helpers": owned_devices(problem, "--helper", options.helpers),
        **parallelism_fields(options, options.parallel or problem.parallel),
        **round_fields(problem, options),
    }
    if options.parallel in (DATA, HYBRID) and problem.parallel == PIPELINE:
        given["schedule"] = given["schedule"] or "1f1b"  # what the file's pipeline would have is no matter
    changed = {key: value for key, value in given.items() if value is not None}
    refuse_contradictions(
        options.sync_format or problem.sync_format,
        problem.sync_uncompressed_steps if options.uncompressed_steps is None else options.uncompressed_steps,
        options.rhythm or problem.rhythm,
    )
    try:
        overridden = Problem.model_validate({**dict(problem), **changed})
    except InvalidRecordError as exc:
        raise InputError(describe(exc, Problem)) from exc
    return with_link_dtypes(overridden, options.link_dtype, activations)


def _pins(problem: Problem, flag: str, text: str | None) -> tuple[str, ...] | None:
    return owned_devices(problem, flag, None if text is None else text.split(","))


def owned_devices(problem: Problem, flag: str, names: Sequence[str] | None) -> tuple[str, ...] | None:
    """The problem's devices that have these names, or are on nodes that have them; None where none are given.

    Raises:
        InputError: a name is that of no device and of no node.
    """
    if names is None:
        return None
    pinned: list[str] = []
    for name in map(str.strip, names):
        owned = [d.id for d in problem.devices if name in (d.id, split_device_id(d.id)[0])]
        if not owned:
            devices = ", ".join(device.id for device in problem.devices)
            raise InputError(f"{flag} {name!r} is no device and no node of the problem; it has {devices}")
        pinned += owned
    return tuple(dict.fromkeys(pinned))


def parallelism_fields(options: PlanOptions, parallel: ParallelChoice) -> dict[str, object]:
    """The fields of a problem that the parallelism's options give; ``parallel``: the one that it comes to.

    Raises:
        InputError: what does not go with that parallelism (with ``auto`` parallelisms are left out instead).
    """
    asked = [*options.sum_options(), *(["--helper"] if options.helpers is not None else [])]
    if parallel == PIPELINE and asked:
        raise InputError(
            f"{asked[0]} is about what several pipelines sum, and with --parallel pipeline there is one",
            hint=f"--parallel data; or leave {asked[0]} out",
        )
    if parallel == HYBRID and options.helpers is not None:
        raise InputError(
            "--helper names devices that only help to sum gradients; with --parallel hybrid there are none",
            hint="--parallel data; or leave the device out with --limit",
        )
    if parallel == HYBRID and options.rhythm is not None and options.rhythm.is_stale:
        raise InputError(
            "--staleness: one device holds the weights, for others that hold all layers as well; with "
            "--parallel hybrid they are cut into stages",
            hint="--parallel data",
        )
    if options.parallel == DATA and options.schedule in STAGE_ORDERS:
        raise InputError(
            f"--schedule {options.schedule} orders a pipeline's stages; with --parallel data every device "
            "holds all layers",
            hint="leave --schedule out",
        )
    if options.parallel == HYBRID and options.schedule in STAGE_ORDERS:
        raise InputError(
            f"--schedule {options.schedule} goes with one pipeline; with --parallel hybrid each has 1f1b",
            hint="leave --schedule out, or --parallel pipeline",
        )
    if options.rhythm is not None and options.rhythm.is_rounds and options.parallel == HYBRID:
        raise InputError(
            "--local-steps goes with devices that hold all layers each, and with --owners",
            hint="--parallel data; or --owners a,b+c, where b and c become a pipeline",
        )
    parallelism = None if options.parallel == AUTO else options.parallel
    given = {
        "parallel": parallelism,
        "sync_format": options.sync_format,
        "sync_uncompressed_steps": options.uncompressed_steps,
        "sync": options.sync,
        "rhythm": options.rhythm,
    }
    return {name: value for name, value in given.items() if value is not None}
