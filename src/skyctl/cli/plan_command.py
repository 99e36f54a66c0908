"""``skyctl plan``: give each device the share that lets all finish together."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from skyctl.cli.command_output import Output
from skyctl.cli.command_runner import check_output, command
from skyctl.cli.option_values import (
    OBJECTIVES,
    STRATEGIES,
    complete_choices,
    complete_run,
    parse_helpers,
    parse_objective,
    require_choice,
    select_node_names,
)
from skyctl.cli.options import (
    ClusterOptions,
    DryRunOption,
    MicrobatchesOption,
    OutputOption,
    ProfileOption,
    TimeLimitOption,
    WorkloadArgument,
    WorkloadOptions,
)
from skyctl.cli.placement_options import PlacementOptions
from skyctl.cli.run_options import DEFAULT_STEPS
from skyctl.cli.shared_step import say_shared_step
from skyctl.errors import InputError

if TYPE_CHECKING:
    from skyctl.planning.plan_options import PlanOptions
    from skyctl.planning.steps_without import StepWithout
    from skyctl.records.plan import Plan
    from skyctl.records.profile import Profile
    from skyctl.supervision.shared_devices import SharedStep

TRAINERS = ("torchtitan", "megatron")
MAX_PAIRS = 3
"""Pairs without a link that are named, at most."""
TIME_LIMIT_SHARE = 0.9
"""Planning that took this share of the time limit was ended by it."""
ADVICE_SHARE = 0.05
"""Share of the time limit, but at least a third of a second, for advice where the search has used it up."""


@dataclass(frozen=True, kw_only=True)
class PlanSourceOptions(ClusterOptions):
    """Options that say where a plan's figures come from: a problem file, a profile, or an earlier run."""

    problem: Annotated[
        Path | None,
        typer.Option("--problem", metavar="FILE", help="Plan offline, from a problem file instead."),
    ] = None
    profile: ProfileOption = None
    from_run: Annotated[
        str | None,
        typer.Option(
            "--from-run",
            metavar="RUN",
            autocompletion=complete_run,
            help="Plan again what that run (its id, or its folder) trained, from what was seen there.",
        ),
    ] = None
    no_learn: Annotated[
        bool,
        typer.Option("--no-learn", help="Plan from the probe alone, not from what runs have seen."),
    ] = False


@dataclass(frozen=True, kw_only=True)
class PlanSearchOptions:
    """The strategy and objective of the search, and its time limit."""

    strategy: Annotated[
        str | None,
        typer.Option(
            "--strategy",
            metavar="NAME",
            autocompletion=complete_choices(*STRATEGIES),
            help="even, alone (the fastest device), heuristic, or optimal (default: proved or bounded).",
        ),
    ] = None
    assign: Annotated[
        str | None,
        typer.Option(
            "--assign",
            metavar="LIST",
            help='Your own plan: "n1=0:5,n2=5:12" (half-open ranges of layers), or with --parallel data '
            '"n1=5,n2=3" (microbatches).',
        ),
    ] = None
    microbatches: MicrobatchesOption = None
    objective: Annotated[
        str | None,
        typer.Option(
            "--objective",
            metavar="NAME",
            autocompletion=complete_choices(*OBJECTIVES),
            help="iteration (default: a step's time) or bottleneck (busiest stage).",
        ),
    ] = None
    time_limit: TimeLimitOption = 30.0
    whole_blocks: Annotated[
        bool,
        typer.Option("--whole-blocks", help="Cut between blocks only, not between attention and MLP."),
    ] = False


@dataclass(frozen=True, kw_only=True)
class PlanResultOptions:
    """Options that say where the plan goes: a file, another trainer's setting, a picture."""

    export: Annotated[
        str | None,
        typer.Option(
            "--export",
            metavar="TRAINER",
            autocompletion=complete_choices(*TRAINERS),
            help="Print the stages as torchtitan or megatron (Megatron-core) takes them, in place of the "
            "plan.",
        ),
    ] = None
    plot: Annotated[
        Path | None,
        typer.Option(
            "--plot",
            metavar="FILE.svg",
            help="Draw the routes over which gradients are summed, as a picture (with --parallel data).",
        ),
    ] = None
    output: OutputOption = None
    dry_run: DryRunOption = False


@dataclass(frozen=True, kw_only=True)
class PlanCommandOptions(
    PlanResultOptions, WorkloadOptions, PlacementOptions, PlanSearchOptions, PlanSourceOptions
):
    """All options of ``plan``. Help lists the groups from the last one to the first."""

    def checked(self) -> PlanOptions:
        """How to plan. Raises InputError for values that can't be, or that contradict each other."""
        from skyctl.cli.show_profile import check_plot
        from skyctl.planning.assignment import parse_assign, parse_assigned_shares
        from skyctl.planning.parallelism_choice import parallelisms_not_exported

        check_output(self.output)
        check_plot(self.plot)
        shares = None if self.assign is None else parse_assigned_shares(self.assign)
        options = self.plan_options(
            None,
            default_form="auto" if self.problem is None and self.from_run is None else None,
            strategy=require_choice("--strategy", self.strategy or "optimal", STRATEGIES),
            objective=parse_objective(self.objective),
            microbatches=self.microbatches,
            time_limit_s=self.time_limit,
            assign=parse_assign(self.assign) if self.assign is not None and shares is None else None,
            assign_shares=shares,
            whole_blocks=self.whole_blocks,
            named=self.export is not None,
            learn=not self.no_learn,
            beside_pipeline=True,
            left_out={} if self.export is None else parallelisms_not_exported(self.export),
        )
        if self.export is not None:
            require_choice("--export", self.export, TRAINERS)
        return options


@command
def plan(out: Output, workload: WorkloadArgument = None, *, options: PlanCommandOptions) -> None:
    """Assign layers to devices, from the newest profile that fits cluster and workload.

    The plan is a pipeline, devices that hold all layers each and share the samples, or several pipelines:
    the simplest of those that are hardly slower than the fastest (see --parallel).

    Figures from runs since the probe count more than the probe's (see --no-learn).

    Prints which device holds which layers, and how sure it is that no plan is better (the certificate);
    -o writes the plan for `skyctl launch`.
    --export prints the stages for another trainer instead, alone on stdout (with --json: as the document).
    """
    from skyctl.cli.show_plan import show_export
    from skyctl.files import write_atomic
    from skyctl.planner.trainer_export import export_plan
    from skyctl.planning.steps_without import steps_without

    search = options.checked()
    with out.progress("plan") as progress:
        progress("searching")
        profile = None
        began = time.perf_counter()
        options.placement_backend(None, encrypt=options.encrypt)  # a mistyped one needs no cluster to be told
        if options.problem is not None:
            result = _plan_problem(options.problem, options, search)
        elif workload is not None and options.from_run is not None:
            result = _plan_from_run(out, workload, options.from_run, options, search)
        elif workload is not None:
            result, profile = _plan_from_profile(out, workload, options, search)
        else:
            raise InputError(
                "give a workload, or --problem FILE",
                hint="skyctl plan gpt:layers=8,hidden=256,heads=8,context=128",
            )
    took_s = time.perf_counter() - began
    without = steps_without(result)
    exported = None if options.export is None else export_plan(result, options.export)
    if options.output is not None and not options.dry_run:
        write_atomic(options.output, result.to_json(), mode=None)
    if exported is None:
        _show(out, result, without, profile, took_s, options.time_limit)
    else:
        show_export(out, exported, result)
    if options.plot is not None:
        _draw_routes(out, result, options.plot)
    if options.output is not None:
        out.note(f"plan: {options.output}" + (" (not written: --dry-run)" if options.dry_run else ""))
    if workload is not None and exported is None:
        out.note(_next_step(options))
    shared = None
    if profile is not None and exported is None:
        shared = say_shared_step(out, result, DEFAULT_STEPS, None, options.load().path)
    out.json(_document(result, without, shared) if exported is None else exported.document())


def _document(plan: Plan, without: Sequence[StepWithout], shared: SharedStep | None) -> dict[str, object]:
    """The plan's file, with what a step takes without each node, and next to other runs, if that is said."""
    from skyctl.records.plan import SHARED_STEP, WITHOUT

    document = plan.model_dump(mode="json")
    if without:
        document[WITHOUT] = [asdict(step) for step in without]
    if shared is not None:
        document[SHARED_STEP] = asdict(shared)
    return document


def _draw_routes(out: Output, plan: Plan, path: Path) -> None:
    """Writes the picture of the routes; of a plan that has none there is a note instead."""
    from skyctl.compare.charts.svg_file import write_svg
    from skyctl.jobs.route_map import map_routes

    route_map = map_routes(plan)
    if route_map.rows:
        out.note(f"picture: {write_svg(path, route_map)}")
    else:
        out.note(f"no picture {path}: this plan sums no gradients, so it has no routes")


def _next_step(options: PlanCommandOptions) -> str:
    """The note on what to do next with a workload's plan."""
    if options.output is None:
        return "next: add -o plan.json to keep it"
    words = [str(options.output)]
    words += [] if options.data is None else ["--data", str(options.data)]
    for name in options.ship or ():
        words += ["--ship", name]
    words += ["--random-inputs"] if options.random_inputs else []
    return f"next: skyctl launch {options.format_arguments(words)}"


def _show(
    out: Output,
    plan: Plan,
    without: Sequence[StepWithout],
    profile: Profile | None,
    took_s: float,
    limit_s: float,
) -> None:
    """The plan, which took so many seconds, and what would help most; with --json nobody waits for that.

    Args:
        without: what a step takes without each node.
        profile: which it was made from, if any.
    """
    from skyctl.cli.show_pipelines import describe_steps_without
    from skyctl.cli.show_plan import show_advice, show_link_dtypes, show_plan, show_training_changes
    from skyctl.planner.explanation.advice import advise
    from skyctl.planning.plan_pairs import unlinked_pairs
    from skyctl.planning.training_changes import find_training_changes

    show_plan(out, plan, time_limit_reached=took_s >= TIME_LIMIT_SHARE * limit_s)
    show_link_dtypes(out, plan)
    if without:
        out.line(describe_steps_without(without), wrap=True)
    if missing := unlinked_pairs(plan):
        some = ", ".join(f"{source} → {target}" for source, target in missing[:MAX_PAIRS])
        more = f" and {len(missing) - MAX_PAIRS} more" if len(missing) > MAX_PAIRS else ""
        out.note(f"no link is given for {some}{more}: taken as free")
    if out.as_json:
        return
    left_s = max(1 / 3, ADVICE_SHARE * limit_s, limit_s - took_s)
    with out.progress("advice", plain=False) as progress:
        progress("what would help most")
        advice = advise(plan, left_s) if plan.problem.parallel == "pipeline" else ()
        changes = find_training_changes(plan, left_s, profile)
    show_advice(out, advice)
    show_training_changes(out, plan, changes)


def _plan_problem(path: Path, options: PlanCommandOptions, search: PlanOptions) -> Plan:
    """From a problem file; what is given on the command line wins over what it says."""
    from skyctl.files import read_record
    from skyctl.planning.plan_creation import plan_best
    from skyctl.planning.problem_overrides import override_problem
    from skyctl.records.problem import Problem

    problem = override_problem(read_record(Problem, path), search, options.pin_first, options.pin_last)
    return plan_best([problem], search)


def _plan_from_run(
    out: Output, workload: str, run: str, options: PlanCommandOptions, search: PlanOptions
) -> Plan:
    """From the problem that a run's plan answered, and what was seen there."""
    from skyctl.files import read_record, run_folder
    from skyctl.learning.observations import is_steady
    from skyctl.planning.plan_creation import plan_run
    from skyctl.records.measurement import Measurement
    from skyctl.records.plan import Plan

    folder = run_folder(run)
    earlier = read_record(Plan, folder / "plan.json", hint="give the folder of a run, or its id")
    measured = read_record(
        Measurement, folder / "measurement.json", hint="that run did not end well: take one that did"
    )
    source = earlier.workload.source if earlier.workload is not None else "a problem file"
    if source != workload:
        raise InputError(f"run {measured.run_id} trained {source}, not {workload}")
    if not is_steady(measured):
        out.warn(f"run {measured.run_id} was disturbed: its steps' p90 is far above their p10")
    plan, notes = plan_run(earlier, measured, search, options.pin_first, options.pin_last)
    out.notes(f"as seen in run {measured.run_id}: {text}" for text in notes)
    return plan


def _plan_from_profile(
    out: Output, workload: str, options: PlanCommandOptions, search: PlanOptions
) -> tuple[Plan, Profile]:
    """From a profile, which is given as well, and what runs on the same machines have seen since."""
    from skyctl.cli.show_plan import show_full_training, show_left_out
    from skyctl.cli.show_profile import show_learned, warn_unmeasured
    from skyctl.jobs.profiles import find_profile
    from skyctl.planning.plan_from_profile import plan_profile
    from skyctl.workload.shipped_files import digest_workload

    target = options.load()
    backend = options.placement_backend(target.cluster, encrypt=options.encrypt)
    request = options.parse_request(workload, microbatches=options.microbatches)
    digest = digest_workload(request.spec)
    profile, path = find_profile(target.cluster, options.profile, request, digest)
    out.detail(f"profile: {path}")
    warn_unmeasured(out, profile, target.cluster)
    search = replace(
        search,
        first_stage=select_node_names(target.cluster, options.pin_first),
        last_stage=select_node_names(target.cluster, options.pin_last),
        helpers=parse_helpers(options.helper, target.cluster),
        only_nodes=[node.name for node in target.cluster.nodes],
        backend=backend,
    )
    plan = plan_profile(profile, search, request.ref(digest))
    show_left_out(out, plan, profile)
    show_full_training(out, plan, profile)
    if search.learn:
        show_learned(out, profile, plan.problem.microbatches)
    return plan, profile
