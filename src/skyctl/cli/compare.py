"""``skyctl compare``: even, heuristic and optimal side by side, predicted and measured."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from skyctl.cli import common, training
from skyctl.cli.common import Output, command
from skyctl.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from skyctl.cli.output import Ticker
    from skyctl.compare.rows import Outcome
    from skyctl.compare.sweeps import Sweep
    from skyctl.control.comparing import Comparing
    from skyctl.records.profile import Profile

ALL = ",".join(training.STRATEGIES)

PaperOption = Annotated[
    bool,
    typer.Option("--paper", help="Sky Computing's published experiment, simulated: no cluster needed."),
]
MeasureOption = Annotated[bool, typer.Option("--measure", help="Run each strategy for real.")]
StrategiesOption = Annotated[
    str, typer.Option("--strategy", metavar="LIST", help="Which to compare, comma-separated.")
]
MicrobatchesOption = Annotated[
    str | None,
    typer.Option(
        "--microbatches",
        metavar="N[,N…]",
        help="Parts a batch is cut into; several numbers are compared, and the best one is what is measured. "
        "Left out, the planner chooses among measured numbers.",
    ),
]
NodesOption = Annotated[
    str | None,
    typer.Option(
        "--nodes",
        metavar="A..B",
        help="What the first nodes by speed would give: 2..N (N: all of them), or 1,2,4. Predicted only.",
    ),
]
OutputOption = Annotated[
    Path | None,
    typer.Option(
        "-o", "--output", metavar="DIR", help="Folder for report, plots, plans and comparison.json."
    ),
]


@command
def compare(
    out: Output,
    context: typer.Context,
    workload: Annotated[str | None, typer.Argument(metavar="[WORKLOAD]", help=training.WORKLOAD_HELP)] = None,
    # what is compared
    paper: PaperOption = False,
    measure: MeasureOption = False,
    trace: training.TraceOption = False,
    steps: training.StepsOption = 10,
    strategy: StrategiesOption = ALL,
    microbatches: MicrobatchesOption = None,
    nodes: NodesOption = None,
    # where
    cluster: common.ClusterOption = None,
    limit: common.LimitOption = None,
    profile: training.ProfileOption = None,
    # how it is planned and trained
    batch_size: training.BatchSizeOption = training.DEFAULT_BATCH_SIZE,
    pin_first: training.PinFirstOption = None,
    pin_last: training.PinLastOption = None,
    schedule: training.ScheduleOption = None,
    link_dtype: training.LinkDtypeOption = None,
    seed: training.SeedOption = 0,
    dtype: training.DtypeOption = "float32",
    learning_rate: training.LearningRateOption = None,
    data: training.DataOption = None,
    random_inputs: training.RandomInputsOption = False,
    encrypt: training.EncryptOption = False,
    time_limit: training.TimeLimitOption = 30.0,
    # the rest
    output: OutputOption = None,
    yes: common.YesOption = False,
    accept_new_host_keys: common.AcceptNewHostKeysOption = False,
    timeout: common.TimeoutOption = common.DEFAULT_TIMEOUT_S,
) -> int | None:
    """Even, heuristic and optimal for one workload: predicted, and with --measure run for real.

    Uses the newest profile that fits; with --measure a cluster that has none is probed first. Writes a report
    (one HTML file that needs nothing else), and says where.
    """
    if paper:
        from skyctl.cli.paper import compare_paper

        compare_paper(out, context, output, time_limit)
        return None
    if workload is None:
        raise InputError(
            "give a workload, or --paper", hint="skyctl compare gpt:layers=8,hidden=256,heads=8,context=128"
        )
    from skyctl.cli.again import again
    from skyctl.cli.live import run_all
    from skyctl.cli.ranges import counts, numbers
    from skyctl.cli.show_comparison import show_comparison
    from skyctl.control.comparing import Comparing
    from skyctl.control.connect import connected, need_all
    from skyctl.control.planning import PlanOptions
    from skyctl.control.reporting import gather
    from skyctl.control.running import RunOptions

    if trace and not measure:
        raise InputError("--trace records real runs: it needs --measure")
    several = numbers("--microbatches", microbatches) if microbatches is not None else ()
    machines = counts("--nodes", nodes) if nodes is not None else None
    one = several[0] if len(several) == 1 else None
    target = common.load_target(cluster, limit)
    strategies = [training.one_of("--strategy", s.strip(), training.STRATEGIES) for s in strategy.split(",")]
    asked, loaded = training.make_request(
        workload,
        batch_size=batch_size,
        microbatches=one,
        seed=seed,
        dtype=dtype,
        learning_rate=learning_rate,
        data=data,
        random_inputs=random_inputs,
        encrypt=encrypt,
        sweep=several if one is None else (),
    )
    training.say_notes(out, loaded)
    options = PlanOptions(
        schedule=training.schedule_of(schedule),
        first_stage=training.nodes_of(target.cluster, pin_first),
        last_stage=training.nodes_of(target.cluster, pin_last),
        microbatches=one,
        time_limit_s=time_limit,
        only_nodes=[node.name for node in target.cluster.nodes],
        link_dtype=training.link_dtypes_of(link_dtype, target.cluster),
    )
    run = RunOptions(steps=steps, weights=False, trace=trace)
    job = Comparing(target.cluster, asked, loaded, options, strategies, run)
    connect = common.connect_options(
        target.path, accept_new_host_keys=accept_new_host_keys, timeout_s=timeout
    )
    with out.progress("compare") as progress:
        planning = functools.partial(_planned, job, several=several, machines=machines, progress=progress)
        if measure:
            with connected(target.cluster.nodes, connect, progress, target.everyone) as links:
                need_all(links.failures)
                found = job.profile(links, profile, progress)
                training.warn_left_out(out, found, target.cluster)
                planned, sweeps = planning(found)
                outcomes = run_all(out, progress, job, planned, links, yes=yes)
        else:
            found = job.known_profile(profile)
            training.warn_left_out(out, found, target.cluster)
            outcomes, sweeps = planning(found)
        progress("writing the report")
        way = again(
            context, asked, found, outcomes, steps=steps if measure else None, cluster_file=target.path.name
        )
        report = gather(outcomes, found, cluster=target.cluster, workload=workload, again=way, sweeps=sweeps)
        show_comparison(out, report, output, workload=workload)
    failed = [outcome for outcome in outcomes if outcome.plan is not None and outcome.error is not None]
    for outcome in failed:
        out.warn(f"{outcome.strategy} did not run to its end: {outcome.error}")
    return 1 if failed else None


def _planned(
    job: Comparing,
    profile: Profile,
    *,
    several: Sequence[int],
    machines: Callable[[int], tuple[int, ...]] | None,
    progress: Ticker,
) -> tuple[list[Outcome], list[Sweep]]:
    """The plans that are compared, and the sweeps that were asked for."""
    from skyctl.control.sweeping import by_speed, sweep_microbatches, sweep_nodes

    sweeps = []
    progress("planning")
    if len(several) > 1:
        outcomes, sweep = sweep_microbatches(job, profile, several, progress)
        sweeps.append(sweep)
    else:
        outcomes = job.plans(profile)
    if machines is not None:
        counts = machines(len(by_speed(outcomes)))
        sweeps.append(sweep_nodes(job, profile, outcomes, counts, progress))
    return outcomes, sweeps
