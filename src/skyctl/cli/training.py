"""What the commands that train (or plan to) share: the workload's options, and the request they make."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

from skyctl.cli.naming import choices, complete, complete_nodes, did_you_mean
from skyctl.errors import InputError

if TYPE_CHECKING:
    from skyctl.cli.output import Output
    from skyctl.control.choosing import ScheduleChoice
    from skyctl.control.linking import LinkChoice
    from skyctl.control.request import Request
    from skyctl.records.cluster import Cluster
    from skyctl.records.problem import Objective
    from skyctl.records.profile import Profile
    from skyctl.workload.recipe import Recipe
    from skyctl.workload.workload import Workload

WORKLOAD_HELP = "gpt:layers=8,hidden=256,heads=8,context=128 | bert:… | hf:DIR | train.py"
DEFAULT_BATCH_SIZE = 32  # as in control.request, which imports torch
VALIDATE_BATCHES = 4  # as in workload.recipe
UNSTEADY = 1.0
"""A layer's (p90 − p10) / median from which on the user is warned."""

SCHEDULES = ("auto", "1f1b", "eager-1f1b", "zero-bubble", "gpipe", "sequential")
OBJECTIVES = ("iteration", "bottleneck")
STRATEGIES = ("even", "heuristic", "optimal")
TRAINERS = ("torchtitan", "megatron")
DTYPES = ("float32", "bfloat16")
LR_SCHEDULES = ("constant", "linear", "cosine")

GivenBatchSizeOption = Annotated[
    int | None,
    typer.Option(
        "--batch-size", min=1, metavar="N", help="Samples a step; default 32, or the plan's or run's."
    ),
]
GivenSeedOption = Annotated[
    int | None, typer.Option("--seed", metavar="N", help="Default 0, or the plan's or run's.")
]
GivenDtypeOption = Annotated[
    str | None,
    typer.Option(
        "--dtype",
        metavar="NAME",
        autocompletion=choices(*DTYPES),
        help="Default float32, or the plan's or run's.",
    ),
]
GivenStrategyOption = Annotated[
    str | None,
    typer.Option(
        "--strategy",
        metavar="NAME",
        autocompletion=choices(*STRATEGIES),
        help="For a bare workload; default optimal.",
    ),
]
EncryptOption = Annotated[
    bool,
    typer.Option("--encrypt", help="Send what passes between stages through TLS; measure and plan it so."),
]
BatchSizeOption = Annotated[int, typer.Option("--batch-size", min=1, metavar="N", help="Samples a step.")]
MicrobatchesOption = Annotated[
    int | None,
    typer.Option(
        "--microbatches",
        min=1,
        metavar="N",
        help="Parts a batch is cut into; left out, the planner chooses among measured numbers.",
    ),
]
SeveralMicrobatchesOption = Annotated[
    str | None,
    typer.Option(
        "--microbatches",
        metavar="N[,N…]",
        help="Parts a batch is cut into, one number or several; left out, up to three powers of two.",
    ),
]
SeedOption = Annotated[int, typer.Option("--seed", metavar="N", help="Of initial weights and data.")]
DtypeOption = Annotated[
    str,
    typer.Option(
        "--dtype",
        metavar="NAME",
        autocompletion=choices(*DTYPES),
        help="float32, or bfloat16 (mixed precision).",
    ),
]
LearningRateOption = Annotated[
    float | None, typer.Option("--learning-rate", metavar="RATE", help="Default: the workload's own.")
]
DataOption = Annotated[
    Path | None,
    typer.Option("--data", metavar="FILE", help="Text to train on; default: the standard library's sources."),
]
RandomInputsOption = Annotated[
    bool, typer.Option("--random-inputs", help="Random inputs, for a train.py without data().")
]
ClipNormOption = Annotated[
    float | None,
    typer.Option("--clip-norm", metavar="NORM", help="Scale gradients down to this global norm."),
]
LrScheduleOption = Annotated[
    str,
    typer.Option(
        "--lr-schedule",
        metavar="NAME",
        autocompletion=choices(*LR_SCHEDULES),
        help="How the learning rate falls: constant, linear or cosine.",
    ),
]
WarmupStepsOption = Annotated[
    int, typer.Option("--warmup-steps", min=0, metavar="N", help="Steps in which the learning rate rises.")
]
MinLearningRateOption = Annotated[
    float, typer.Option("--min-learning-rate", metavar="RATE", help="Where a falling learning rate ends.")
]
ValidateEveryOption = Annotated[
    int | None,
    typer.Option(
        "--validate-every", min=1, metavar="N", help="Loss over held-out data every N steps, and at the end."
    ),
]
ValidateBatchesOption = Annotated[
    int, typer.Option("--validate-batches", min=1, metavar="K", help="Held-out batches of one validation.")
]
StepsOption = Annotated[int, typer.Option("--steps", min=1, metavar="N", help="Training steps.")]
TraceOption = Annotated[
    bool,
    typer.Option("--trace", help="Record what every stage does when: trace.json and trace.png of the run."),
]
FromRunOption = Annotated[
    str | None,
    typer.Option(
        "--from-run",
        metavar="RUN",
        autocompletion=complete,
        help="Plan again what that run (its id, or its folder) trained, from what was seen there.",
    ),
]
NoLearnOption = Annotated[
    bool,
    typer.Option("--no-learn", help="Plan from the probe alone, not from what runs have seen."),
]
IgnoreChangesOption = Annotated[
    bool,
    typer.Option(
        "--ignore-changes",
        help="Train even where devices, versions or memory are not what they were when measured.",
    ),
]
StrategyOption = Annotated[
    str,
    typer.Option(
        "--strategy",
        metavar="NAME",
        autocompletion=choices(*STRATEGIES),
        help="even, heuristic, or optimal (proved or bounded).",
    ),
]
ProfileOption = Annotated[
    str | None,
    typer.Option("--profile", metavar="FILE", help="Default: the newest that fits cluster and workload."),
]
PinFirstOption = Annotated[
    str | None,
    typer.Option(
        "--pin-first",
        metavar="NODES",
        autocompletion=complete_nodes,
        help="Only these may hold the first stage (the inputs).",
    ),
]
PinLastOption = Annotated[
    str | None,
    typer.Option(
        "--pin-last",
        metavar="NODES",
        autocompletion=complete_nodes,
        help="Only these may hold the last stage (the targets).",
    ),
]
ScheduleOption = Annotated[
    str | None,
    typer.Option(
        "--schedule",
        metavar="NAME",
        autocompletion=choices(*SCHEDULES),
        help="auto, 1f1b, eager-1f1b, zero-bubble, gpipe or sequential (default: auto; with --problem what "
        "the file says).",
    ),
]
ObjectiveOption = Annotated[
    str | None,
    typer.Option(
        "--objective",
        metavar="NAME",
        autocompletion=choices(*OBJECTIVES),
        help="iteration (default: a step's time) or bottleneck (busiest stage).",
    ),
]
TimeLimitOption = Annotated[
    float, typer.Option("--time-limit", min=0.1, metavar="SECONDS", help="For the search of `optimal`.")
]

ExportOption = Annotated[
    str | None,
    typer.Option(
        "--export",
        metavar="TRAINER",
        autocompletion=choices(*TRAINERS),
        help="Print the stages as torchtitan or megatron (Megatron-core) takes them, in place of the plan.",
    ),
]
WholeBlocksOption = Annotated[
    bool, typer.Option("--whole-blocks", help="Cut between blocks only, not between attention and MLP.")
]
LinkDtypeOption = Annotated[
    list[str] | None,
    typer.Option(
        "--link-dtype",
        metavar="DTYPE[@WHERE]",
        help="Send activations and gradients as float32, bfloat16 or int8: over all links, @slow ones (below "
        "200 Mbit/s as measured), or between two nodes (int8@tower-laptop). Repeatable; the last one that "
        "names a link counts. Default: as they are.",
    ),
]


def make_request(
    source: str,
    *,
    batch_size: int,
    microbatches: int | None,
    seed: int,
    dtype: str,
    learning_rate: float | None = None,
    data: Path | None = None,
    random_inputs: bool = False,
    recipe: Recipe | None = None,
    encrypt: bool = False,
    sweep: Sequence[int] = (),
) -> tuple[Request, Workload]:
    """The request, and its workload loaded and looked through (on the meta device: nothing is computed).

    Raises:
        WorkloadError: anything wrong with the source, the options, or how they fit together.
    """
    from skyctl.control.request import Request
    from skyctl.workload.recipe import Recipe
    from skyctl.workload.spec import make_spec
    from skyctl.workload.workload import load

    spec = make_spec(
        source,
        batch_size=batch_size,
        seed=seed,
        dtype=dtype,
        learning_rate=learning_rate,
        data_path=str(data) if data is not None else None,
        random_inputs=random_inputs,
        validated=recipe is not None and recipe.validate_every is not None,
    )
    workload = load(spec)
    if spec.validated:
        workload.check_validation()
    return Request(workload.spec, microbatches, recipe or Recipe(), encrypt, tuple(sweep)), workload


def say_notes(out: Output, workload: Workload) -> None:
    """How an ``hf:`` model was taken, where that is not what one would expect."""
    for note in workload.notes:
        out.note(note)


def one_of(flag: str, value: str, allowed: Sequence[str]) -> str:
    """``value`` where it is allowed.

    Raises:
        InputError: naming what is.
    """
    if value not in allowed:
        raise InputError(f"{flag} {value!r} is not one of {', '.join(allowed)}{did_you_mean(value, allowed)}")
    return value


def again(words: Sequence[str], cluster: Path | None, limit: str | None = None) -> str:
    """``words`` with the same cluster and limit, as arguments of the next command, ready to be typed."""
    here = ["-c", str(cluster)] if cluster is not None else []
    here += ["--limit", limit] if limit is not None else []
    return shlex.join([*words, *here])


def warn_unsteady(out: Output, profile: Profile) -> None:
    """Says of which devices little is known: times that did not settle, or another load beside the probe."""
    from skyctl.probe.settled import unsettled
    from skyctl.probe.show import condition_notes

    for device in profile.devices:
        rough = unsettled(device.timings)
        if rough:
            worst = max(timing.interval or 0.0 for timing in rough)
            known = f" (±{worst:.0%})" if worst else ""
            out.warn(
                f"{device.id}: {len(rough)} of {len(device.timings)} layer times did not settle"
                f"{known}: it is busy, or shares its cores; probe again when it is quiet"
            )
            continue
        worst = max((timing.spread or 0.0 for timing in device.timings), default=0.0)
        if worst > UNSTEADY:
            out.warn(
                f"{device.id}: its times are unsteady (spread {worst:.0%}): it is busy, or shares its cores; "
                "set `threads` in cluster.yaml, or probe again when it is quiet"
            )
    for name, note in condition_notes(profile):
        out.warn(f"{name}: {note}")


def say_taken_over(out: Output, profile: Profile) -> None:
    """Says what of a new profile was measured by an earlier probe."""
    from skyctl.probe.earlier import taken_over

    words = taken_over(profile)
    if words:
        out.note(f"{'; '.join(words)} (--refresh measures them again)")


def warn_left_out(out: Output, profile: Profile, cluster: Cluster) -> None:
    """Says which nodes have no figures and so get no layers, and whether the links have any."""
    from skyctl.control.probing import left_out, links_unknown

    names = left_out(profile, cluster.nodes)
    if names:
        out.warn(f"not measured, so left out: {', '.join(names)} (skyctl check shows why)")
    if links_unknown(profile):
        out.warn(
            "this profile has no links (skyctl probe --links none): the plan takes every transfer as free; "
            "for a plan that counts them: skyctl probe --links all"
        )


def schedule_of(name: str | None) -> ScheduleChoice | None:
    """The schedule that --schedule names (InputError where there is none of that name)."""
    return None if name is None else cast("ScheduleChoice", one_of("--schedule", name, SCHEDULES))


def objective_of(name: str | None) -> Objective | None:
    """The objective that --objective names (InputError where there is none of that name)."""
    return None if name is None else cast("Objective", one_of("--objective", name, OBJECTIVES))


def link_dtypes_of(given: Sequence[str] | None, cluster: Cluster | None = None) -> list[LinkChoice]:
    """What --link-dtype asks for (InputError where that is no dtype, or names no node of the cluster)."""
    from skyctl.control.linking import parse_link_dtype

    nodes = None if cluster is None else [node.name for node in cluster.nodes]
    return [parse_link_dtype(text, nodes) for text in given or ()]


def nodes_of(cluster: Cluster, pattern: str | None) -> list[str] | None:
    """The nodes that a pattern names (names, globs, groups); None where there is no pattern."""
    if pattern is None:
        return None
    from skyctl.inventory.read import select

    return [node.name for node in select(cluster, pattern).nodes]
