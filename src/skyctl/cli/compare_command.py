"""``skyctl compare``: even, one device alone, heuristic and optimal side by side, predicted and measured."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from skyctl.cli.command_output import Output
from skyctl.cli.command_runner import command, is_given
from skyctl.cli.form_trial import TrialOption
from skyctl.cli.option_pairs import PAPER_PARAMETERS
from skyctl.cli.option_values import STRATEGIES, parse_node_counts, parse_numbers, require_choice
from skyctl.cli.options import (
    ClusterOptions,
    ClusterTarget,
    ConnectionOptions,
    DefaultedWorkloadOptions,
    LearningRateOption,
    ProfileOption,
    StepsOption,
    TimeLimitOption,
    TraceOption,
    WorkloadArgument,
    YesOption,
)
from skyctl.cli.placement_options import PlacementOptions
from skyctl.cli.run_options import ValidateBatchesOption, ValidateEveryOption
from skyctl.cli.show_records import show_records
from skyctl.errors import InputError
from skyctl.workload.recipe import VALIDATE_BATCHES, Recipe

if TYPE_CHECKING:
    from skyctl.cli.progress_display import ProgressDisplay
    from skyctl.compare.outcome import StrategyOutcome
    from skyctl.compare.sweeps import ComparisonSweep, NodesPoint
    from skyctl.jobs.comparison_job import ComparisonJob
    from skyctl.records.profile import Profile

COMPARED_ROUNDS = ("--local-steps", "--prox-mu", "--outer-lr", "--outer-momentum", "--owners")
"""Options of rounds in which all make all of their local steps: then it is known how many samples count."""


@dataclass(frozen=True, kw_only=True)
class ComparisonOptions:
    """Which strategies, numbers of microbatches and of nodes are compared, predicted or measured."""

    paper: Annotated[
        bool,
        typer.Option("--paper", help="Sky Computing's published experiment, simulated: no cluster needed."),
    ] = False
    measure: Annotated[bool, typer.Option("--measure", help="Run each strategy for real.")] = False
    trial: TrialOption = True
    trace: TraceOption = False
    steps: StepsOption = 10
    strategy: Annotated[
        str, typer.Option("--strategy", metavar="LIST", help="Which to compare, comma-separated.")
    ] = ",".join(STRATEGIES)
    microbatches: Annotated[
        str | None,
        typer.Option(
            "--microbatches",
            metavar="N[,N…]",
            help="Parts a batch is cut into; several numbers are compared, and the best one is what is "
            "measured. Left out, the planner chooses among measured numbers.",
        ),
    ] = None
    nodes: Annotated[
        str | None,
        typer.Option(
            "--nodes",
            metavar="A..B",
            help="What the first nodes by speed give: 2..N (N: all of them), or 1,2,4; with --measure each "
            "number's best plan is run, too.",
        ),
    ] = None
    validate_every: ValidateEveryOption = None
    validate_batches: ValidateBatchesOption = VALIDATE_BATCHES

    def check(self) -> None:
        """Raises InputError for values that can't be, or that contradict each other."""
        if self.trace and not self.measure:
            raise InputError("--trace records real runs: it needs --measure")
        if self.validate_every is not None and not self.measure:
            raise InputError("--validate-every looks at what real runs have learnt: it needs --measure")
        _ = self.microbatch_counts, self.node_counts

    @property
    def strategies(self) -> list[str]:
        """The strategies that are compared. Raises InputError where there is none of that name."""
        names = [name.strip() for name in self.strategy.split(",")]
        return [require_choice("--strategy", name, STRATEGIES) for name in names]

    @property
    def microbatch_counts(self) -> tuple[int, ...]:
        """The numbers of microbatches that were given. Raises InputError for anything else."""
        return parse_numbers("--microbatches", self.microbatches) if self.microbatches is not None else ()

    @property
    def recipe(self) -> Recipe | None:
        """How each strategy's run trains; None: there is none. Raises InputError for a bad value."""
        if not self.measure:
            return None
        return Recipe(
            validate_every=self.validate_every,
            validate_batches=self.validate_batches,
            total_steps=self.steps,
        )

    @property
    def node_counts(self) -> Callable[[int], tuple[int, ...]] | None:
        """The function from how many nodes there are to the numbers of nodes; None: not asked for."""
        return parse_node_counts("--nodes", self.nodes) if self.nodes is not None else None


@dataclass(frozen=True, kw_only=True)
class CompareOptions(
    DefaultedWorkloadOptions, PlacementOptions, ConnectionOptions, ClusterOptions, ComparisonOptions
):
    """All options of ``compare``. Help lists the groups from the last one to the first, own ones last."""

    profile: ProfileOption = None
    learning_rate: LearningRateOption = None
    time_limit: TimeLimitOption = 30.0
    output: Annotated[
        Path | None,
        typer.Option(
            "-o", "--output", metavar="DIR", help="Folder for report, plots, plans and comparison.json."
        ),
    ] = None
    yes: YesOption = False

    def check(self) -> None:
        """As ``ComparisonOptions.check``; no rounds in which some owners do less, and no traces of rounds."""
        from skyctl.run.round_spec import refuse_trace

        super().check()
        for name, given in self.given_rounds().items():
            if given is not None and name not in COMPARED_ROUNDS:
                raise _fewer_steps_error(name, name)
        if self.owners is not None and self.nodes is not None:
            raise InputError(
                "--nodes leaves machines out, and with --owners their data would be left out, too",
                hint="leave --nodes out; or other --owners",
            )
        refuse_trace(self.make_rhythm(), trace=self.trace)

    def job(self, out: Output, workload: str, target: ClusterTarget) -> ComparisonJob:
        """The comparison that is asked for. Raises InputError, WorkloadError."""
        from skyctl.compare.outcome import ALONE
        from skyctl.jobs.comparison_job import ComparisonJob
        from skyctl.planning.parallelism_choice import DATA, HYBRID, parallelisms_left_out_by
        from skyctl.planning.schedule_choice import AUTO
        from skyctl.worker.sums.summed_gradients import check_summable

        counts = self.microbatch_counts
        only = counts[0] if len(counts) == 1 else None
        # what an owner has nobody else may train on, one device alone neither
        strategies = [name for name in self.strategies if self.owners is None or name != ALONE]
        if not strategies:
            raise InputError(
                "--strategy alone is one device that trains on everything, and with --owners none may",
                hint="--strategy even,optimal",
            )
        request, loaded = self.make_request(
            workload,
            microbatches=only,
            sweep=counts if only is None else (),
            learning_rate=self.learning_rate,
            recipe=self.recipe,
        )
        out.notes(loaded.notes)
        if self.measure:
            show_records(out, loaded)
        if self.owners is not None and "local_steps" in loaded.model.functions:
            name = "local_steps()"
            raise _fewer_steps_error(f"{name} of {loaded.model.source_name}", name)
        options = self.plan_options(
            target.cluster,
            microbatches=only,
            time_limit_s=self.time_limit,
            only_nodes=[node.name for node in target.cluster.nodes],
            backend=self.placement_backend(target.cluster, encrypt=self.encrypt),
        )
        options = options.resolved_parallelism()  # of rounds there is one form
        # who asks for shares of samples wants to know whether they pay
        shared = options.parallel in (DATA, HYBRID)
        other_form = shared and options.owners is None
        if shared:
            check_summable(loaded.model.layers)
        elif options.parallel == AUTO:
            options = replace(options, left_out=parallelisms_left_out_by(loaded.model.layers))
        return ComparisonJob(target.cluster, request, loaded, options, strategies, other_form=other_form)


def _fewer_steps_error(what: str, short: str) -> InputError:
    """The error of what has owners make other numbers of local steps than a plan says."""
    return InputError(
        f"compare counts the samples of all local steps of all owners, and with {what} some make none, or "
        "fewer",
        hint=f"leave {short} out; skyctl launch trains with it",
    )


@command
def compare(
    out: Output, context: typer.Context, workload: WorkloadArgument = None, *, options: CompareOptions
) -> int | None:
    """Even, one device alone, heuristic and optimal for one workload: predicted, with --measure run for real.

    Uses the newest profile that fits; with --measure a cluster that has none is probed first. Writes a report
    (one HTML file that needs nothing else), and says where.
    """
    if options.paper:
        _compare_paper(out, context, options.output, options.time_limit)
        return None
    if workload is None:
        raise InputError(
            "give a workload, or --paper", hint="skyctl compare gpt:layers=8,hidden=256,heads=8,context=128"
        )
    from skyctl.cli.show_comparison import describe_reproduction, show_comparison
    from skyctl.cli.show_plan import show_backend
    from skyctl.jobs.report_builder import build_report

    options.check()
    target = options.load()
    with out.progress("compare") as progress:
        progress("loading the workload")
        job = options.job(out, workload, target)
        if options.measure:
            job, profile, outcomes, sweeps = _measured(out, progress, job, target, options)
        else:
            profile = job.known_profile(options.profile)
            job = job.with_backend(profile)
            outcomes, sweeps, points = _planned(out, progress, job, profile, options)
            sweeps += _nodes_sweeps(points, outcomes)
        if job.options.parallel in ("data", "auto"):
            progress("planning each way to sum gradients")
        syncs = job.syncs(profile, outcomes)
        progress("writing the report")
        reproduction = describe_reproduction(
            context,
            job.request,
            profile,
            outcomes,
            steps=options.steps if options.measure else None,
            cluster_file=target.path.name,
        )
        report = build_report(
            outcomes,
            profile,
            cluster=target.cluster,
            workload=workload,
            reproduction=reproduction,
            sweeps=sweeps,
            syncs=syncs,
        )
        show_comparison(out, report, options.output, workload=workload)
        show_backend(out, [outcome.plan for outcome in outcomes])
    failed = {
        outcome.strategy: outcome.error for outcome in outcomes if outcome.plan is not None and outcome.error
    }
    failed |= {
        f"{cell.strategy} with {point.value} {sweep.kind}": cell.error
        for sweep in sweeps
        for point in sweep.points
        for cell in point.cells
        if cell.predicted_s is not None and cell.error and point.value != sweep.chosen
    }
    for name, error in failed.items():
        out.warn(f"{name} did not run to its end: {error}")
    return 1 if failed else None


def _measured(
    out: Output, progress: ProgressDisplay, job: ComparisonJob, target: ClusterTarget, options: CompareOptions
) -> tuple[ComparisonJob, Profile, list[StrategyOutcome], list[ComparisonSweep]]:
    """The job with its backend, the profile (probed, where none fits), and what each plan was run to."""
    from skyctl.cli.run_display import measure_with_progress
    from skyctl.jobs.comparison_sweeps import measure_nodes
    from skyctl.jobs.contradiction_recheck import recheck_contradictions
    from skyctl.jobs.node_sessions import connect_nodes, require_all
    from skyctl.learning.observations import keep_observations
    from skyctl.run.run_options import RunOptions

    connect = options.connect_options(target.path)
    with connect_nodes(target.cluster.nodes, connect, progress, target.everyone) as sessions:
        require_all(sessions.failures)
        profile = job.profile(sessions, options.profile, progress, out.note)
        asked = (job.cluster, sessions, profile, job.request, job.workload)
        profile = recheck_contradictions(*asked, progress, out.warn)
        job = job.with_backend(profile)
        planned, sweeps, points = _planned(out, progress, job, profile, options)
        run = RunOptions(steps=options.steps, weights=False, trace=options.trace)

        def measure(
            planned: list[StrategyOutcome], earlier: Sequence[StrategyOutcome] = ()
        ) -> list[StrategyOutcome]:
            asked = (out, progress, job.cluster, job.request, planned, sessions, run)
            return measure_with_progress(*asked, yes=options.yes, earlier=earlier)

        outcomes = measure(planned)
        for outcome in outcomes:
            if outcome.plan is not None and outcome.measurement is not None:
                keep_observations(job.cluster.name, outcome.plan, job.workload.digest, outcome.measurement)
        if options.trial:
            outcomes = job.chosen_by_measurement(outcomes)
        if points:
            points = measure_nodes(points, planned, outcomes, lambda grown: measure(grown, outcomes))
        sweeps += _nodes_sweeps(points, outcomes)
    return job, profile, outcomes, sweeps


def _planned(
    out: Output, progress: ProgressDisplay, job: ComparisonJob, profile: Profile, options: CompareOptions
) -> tuple[list[StrategyOutcome], list[ComparisonSweep], list[NodesPoint]]:
    """The plans that are compared, and where asked for the sweep of microbatches and the points of nodes."""
    from skyctl.cli.show_profile import show_learned, warn_unmeasured
    from skyctl.compare.outcome import pipeline_problem
    from skyctl.jobs.comparison_sweeps import nodes_by_speed, plan_nodes, sweep_microbatches

    warn_unmeasured(out, profile, job.cluster)
    sweeps = []
    progress("planning")
    microbatches = options.microbatch_counts
    if len(microbatches) > 1:
        outcomes, sweep = sweep_microbatches(job, profile, microbatches, progress)
        sweeps.append(sweep)
    else:
        outcomes = job.plans(profile)
    if (problem := pipeline_problem(outcomes)) is not None:
        show_learned(out, profile, problem.microbatches)
    node_counts = options.node_counts
    points = []
    if node_counts is not None:
        counts = node_counts(len(nodes_by_speed(outcomes)))
        points = plan_nodes(job, profile, outcomes, counts, progress)
    return outcomes, sweeps, points


def _nodes_sweeps(points: list[NodesPoint], outcomes: list[StrategyOutcome]) -> list[ComparisonSweep]:
    """The sweep of nodes, where it was asked for."""
    from skyctl.compare.sweeps import nodes_sweep
    from skyctl.jobs.comparison_sweeps import nodes_by_speed

    return [nodes_sweep(points, len(nodes_by_speed(outcomes)))] if points else []


def _compare_paper(out: Output, context: typer.Context, folder: Path | None, time_limit_s: float) -> None:
    """Sky Computing's experiment, planned and simulated: tables; in ``folder`` a picture and ``paper.json``.

    ``time_limit_s`` counts where it was given; the default is shorter than that of other plans.

    Raises:
        InputError: an option that would do nothing was given.
    """
    _refuse_others(context)
    from skyctl.files import make_private, write_atomic
    from skyctl.paper.paper_experiment import LIMIT_S, run_experiment
    from skyctl.paper.paper_report import describe_paper, paper_tables, plot_paper

    with out.progress("paper") as progress:
        limit_s = time_limit_s if is_given(context, "time_limit", in_file=True) else LIMIT_S
        paper = run_experiment(limit_s=limit_s, on_progress=progress)
    for table in paper_tables(paper):
        out.table(table.head, table.rows, title=table.title)
        out.line()
    for text in describe_paper(paper):
        out.line(text, wrap=True)
    if folder is not None:
        place = make_private(folder)
        plot = plot_paper(paper, place / "paper.svg")
        files = {"figures": str(place / "paper.json"), "plot": str(plot)}
        paper = paper.model_copy(update={"files": files})
        write_atomic(place / "paper.json", paper.to_json(), mode=None)
        for name, path in files.items():
            out.note(f"{name}: {path}")
    out.note(f"{paper.wall_s:.0f} s; what it means: docs/paper.md")
    out.json(paper)


def _refuse_others(context: typer.Context) -> None:
    """Raises InputError for an option that would change nothing with --paper."""
    for parameter in context.command.params:
        name = parameter.name or ""
        if is_given(context, name) and name not in PAPER_PARAMETERS:
            given = parameter.opts[-1] if parameter.opts[-1].startswith("-") else name.upper()
            raise InputError(
                f"--paper simulates a published experiment: {given} has no meaning there",
                hint="skyctl compare --paper, with -o FOLDER for its plot",
            )
