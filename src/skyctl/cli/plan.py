"""``skyctl plan``: give each device the share that lets all finish together."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from skyctl.cli import common, training
from skyctl.cli.common import Output, command
from skyctl.errors import InputError

if TYPE_CHECKING:
    from skyctl.control.planning import PlanOptions
    from skyctl.records.plan import Plan

MOST_PAIRS = 3
"""So many pairs without a link are named."""
OUT_OF_TIME = 0.9
"""Planning that took this share of the time limit was ended by it."""


@command
def plan(
    out: Output,
    workload: Annotated[str | None, typer.Argument(metavar="[WORKLOAD]", help=training.WORKLOAD_HELP)] = None,
    problem: Annotated[
        Path | None,
        typer.Option("--problem", metavar="FILE", help="Plan offline, from a problem file instead."),
    ] = None,
    strategy: training.StrategyOption = "optimal",
    assign: Annotated[
        str | None,
        typer.Option("--assign", metavar="LIST", help='Your own plan: "n1=0:5,n2=5:12" (half-open ranges).'),
    ] = None,
    cluster: common.ClusterOption = None,
    limit: common.LimitOption = None,
    profile: training.ProfileOption = None,
    pin_first: training.PinFirstOption = None,
    pin_last: training.PinLastOption = None,
    batch_size: training.GivenBatchSizeOption = None,
    microbatches: training.MicrobatchesOption = None,
    schedule: training.ScheduleOption = None,
    objective: training.ObjectiveOption = None,
    link_dtype: training.LinkDtypeOption = None,
    dtype: training.GivenDtypeOption = None,
    seed: training.GivenSeedOption = None,
    data: training.DataOption = None,
    random_inputs: training.RandomInputsOption = False,
    encrypt: training.EncryptOption = False,
    time_limit: training.TimeLimitOption = 30.0,
    whole_blocks: training.WholeBlocksOption = False,
    export: training.ExportOption = None,
    from_run: training.FromRunOption = None,
    no_learn: training.NoLearnOption = False,
    output: common.OutputOption = None,
    dry_run: common.DryRunOption = False,
) -> None:
    """Assign layers to devices, from the newest profile that fits cluster and workload.

    What runs have seen since the probe counts more than the probe's figures (see --no-learn).

    Prints who holds what and how sure that is (the certificate); -o writes the plan for `skyctl launch`.
    --export prints the stages for another trainer instead, alone on stdout (with --json: as the document).
    """
    from skyctl.cli.show_plan import show_export
    from skyctl.control.planning import PlanOptions, parse_assign
    from skyctl.files import write_atomic
    from skyctl.planner.export import export as export_plan

    common.check_output(output)
    options = PlanOptions(
        strategy=training.one_of("--strategy", strategy, training.STRATEGIES),
        schedule=training.schedule_of(schedule),
        objective=training.objective_of(objective),
        microbatches=microbatches,
        time_limit_s=time_limit,
        assign=parse_assign(assign) if assign is not None else None,
        whole_blocks=whole_blocks,
        named=export is not None,
        link_dtype=training.link_dtypes_of(link_dtype),
        learn=not no_learn,
    )
    if export is not None:
        training.one_of("--export", export, training.TRAINERS)
    if whole_blocks and assign is not None:
        raise InputError("--whole-blocks does not go with --assign: your ranges are used as they are")
    if encrypt and (problem is not None or from_run is not None):
        raise InputError("--encrypt chooses a profile; with --problem or --from-run there is none to choose")
    pins = (pin_first, pin_last)
    with out.progress("plan") as progress:
        progress("searching")
        began = time.perf_counter()
        if problem is not None:
            made = _offline(problem, options, pins, forbidden=(workload, limit, profile, from_run))
        elif workload is not None and from_run is not None:
            given = {"--limit": limit, "--profile": profile, "--batch-size": batch_size, "--dtype": dtype}
            given |= {"--seed": seed, "--no-learn": no_learn or None}
            _refuse(f"--from-run {from_run}", tuple(given), tuple(given.values()))
            made = _from_run(out, workload, from_run, options, pins)
        elif workload is not None:
            request = {
                "batch_size": batch_size or training.DEFAULT_BATCH_SIZE,
                "microbatches": microbatches,
                "seed": seed or 0,
                "dtype": dtype or "float32",
                "data": data,
                "random_inputs": random_inputs,
                "encrypt": encrypt,
            }
            target = common.load_target(cluster, limit)
            made = _from_profile(out, workload, options, target, profile, pins, request)
        else:
            raise InputError(
                "give a workload, or --problem FILE",
                hint="skyctl plan gpt:layers=8,hidden=256,heads=8,context=128",
            )
    took_s = time.perf_counter() - began
    exported = None if export is None else export_plan(made, export)
    if output is not None and not dry_run:
        write_atomic(output, made.to_json(), mode=None)
    if exported is None:
        _show(out, made, time_limit_reached=took_s >= OUT_OF_TIME * time_limit)
    else:
        show_export(out, exported, made)
    if output is not None:
        out.note(f"plan: {output}" + (" (not written: --dry-run)" if dry_run else ""))
    if workload is not None and exported is None:
        words = [str(output)] if data is None else [str(output), "--data", str(data)]
        flags = training.again([*words, "--random-inputs"] if random_inputs else words, cluster)
        out.note("next: add -o plan.json to keep it" if output is None else f"next: skyctl launch {flags}")
    out.json(made if exported is None else exported.document())


def _show(out: Output, made: Plan, *, time_limit_reached: bool) -> None:
    """The plan, and what would help most; with --json nobody waits for that."""
    from skyctl.cli.show_links import show_link_dtypes
    from skyctl.cli.show_plan import show_advice, show_plan
    from skyctl.control.planning import unlinked
    from skyctl.planner.advice import advise

    show_plan(out, made, time_limit_reached=time_limit_reached)
    show_link_dtypes(out, made)
    if missing := unlinked(made):
        some = ", ".join(f"{source} → {target}" for source, target in missing[:MOST_PAIRS])
        more = f" and {len(missing) - MOST_PAIRS} more" if len(missing) > MOST_PAIRS else ""
        out.note(f"no link is given for {some}{more}: taken as free")
    if not out.as_json:
        with out.progress("advice", plain=False) as progress:
            progress("what would help most")
            advice = advise(made)
        show_advice(out, advice)


def _offline(
    path: Path, options: PlanOptions, pins: tuple[str | None, str | None], *, forbidden: tuple[Any, ...]
) -> Plan:
    """From a problem file; what is given on the command line wins over what it says."""
    from skyctl.control.planning import override, plan_best
    from skyctl.files import read_record
    from skyctl.records.problem import Problem

    _refuse(f"--problem {path}", ("a workload", "--limit", "--profile", "--from-run"), forbidden)
    return plan_best([override(read_record(Problem, path), options, *pins)], options)


def _refuse(beside: str, flags: Sequence[str], given: Sequence[object]) -> None:
    for flag, value in zip(flags, given, strict=True):
        if value is not None:
            raise InputError(f"{flag} does not go with {beside}, which says it all")


def _from_run(
    out: Output, workload: str, run: str, options: PlanOptions, pins: tuple[str | None, str | None]
) -> Plan:
    """From the problem that a run's plan answered, and what was seen there."""
    from skyctl.control.learning import steady
    from skyctl.control.planning import plan_run
    from skyctl.files import read_record, run_folder
    from skyctl.records.measurement import Measurement
    from skyctl.records.plan import Plan

    folder = run_folder(run)
    had = read_record(Plan, folder / "plan.json", hint="give the folder of a run, or its id")
    done = read_record(
        Measurement, folder / "measurement.json", hint="that run did not end well: take one that did"
    )
    source = had.workload.source if had.workload is not None else "a problem file"
    if source != workload:
        raise InputError(f"run {done.run_id} trained {source}, not {workload}")
    if not steady(done):
        out.warn(f"run {done.run_id} was disturbed: its steps' p90 is far above their p10")
    made, words = plan_run(had, done, options, *pins)
    for text in words:
        out.note(f"as seen in run {done.run_id}: {text}")
    return made


def _from_profile(
    out: Output,
    workload: str,
    options: PlanOptions,
    target: common.Target,
    profile: str | None,
    pins: tuple[str | None, str | None],
    request: dict[str, Any],
) -> Plan:
    from skyctl.control.fitting import learned
    from skyctl.control.planning import plan_profile
    from skyctl.control.probing import find_profile

    asked, loaded = training.make_request(workload, **request)
    training.say_notes(out, loaded)
    found, path = find_profile(target.cluster, profile, asked, loaded)
    out.detail(f"profile: {path}")
    training.warn_left_out(out, found, target.cluster)
    options = replace(
        options,
        first_stage=training.nodes_of(target.cluster, pins[0]),
        last_stage=training.nodes_of(target.cluster, pins[1]),
        only_nodes=[node.name for node in target.cluster.nodes],
    )
    made = plan_profile(found, options, asked.ref(loaded))
    if options.learn:
        for text in learned(found, made.problem.microbatches).words:
            out.note(text)
    return made
