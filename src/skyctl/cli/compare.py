"""``skyctl compare``: even, heuristic and optimal side by side, predicted and measured."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from skyctl.cli import common, training
from skyctl.cli.common import Output, command
from skyctl.errors import InputError


@command
def compare(
    out: Output,
    context: typer.Context,
    workload: Annotated[str | None, typer.Argument(metavar="[WORKLOAD]", help=training.WORKLOAD_HELP)] = None,
    paper: Annotated[
        bool,
        typer.Option("--paper", help="Sky Computing's published experiment, simulated: no cluster needed."),
    ] = False,
    measure: Annotated[bool, typer.Option("--measure", help="Run each strategy for real.")] = False,
    trace: training.TraceOption = False,
    steps: training.StepsOption = 10,
    strategy: Annotated[
        str, typer.Option("--strategy", metavar="LIST", help="Which to compare, comma-separated.")
    ] = ",".join(training.STRATEGIES),
    cluster: common.ClusterOption = None,
    limit: common.LimitOption = None,
    profile: training.ProfileOption = None,
    batch_size: training.BatchSizeOption = training.DEFAULT_BATCH_SIZE,
    microbatches: training.MicrobatchesOption = None,
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
    output: Annotated[
        Path | None,
        typer.Option("-o", "--output", metavar="DIR", help="Folder for plots, plans and comparison.json."),
    ] = None,
    yes: common.YesOption = False,
    accept_new_host_keys: common.AcceptNewHostKeysOption = False,
    timeout: common.TimeoutOption = common.DEFAULT_TIMEOUT_S,
) -> int | None:
    """Even, heuristic and optimal for one workload: predicted, and with --measure run for real.

    Uses the newest profile that fits; with --measure a cluster that has none is probed first.
    """
    if paper:
        from skyctl.cli.paper import compare_paper

        compare_paper(out, context, output, time_limit)
        return None
    if workload is None:
        raise InputError(
            "give a workload, or --paper", hint="skyctl compare gpt:layers=8,hidden=256,heads=8,context=128"
        )
    from skyctl.cli.show_comparison import show_comparison
    from skyctl.cli.watching import watcher
    from skyctl.control.comparing import Comparing
    from skyctl.control.connect import connected, need_all
    from skyctl.control.planning import PlanOptions
    from skyctl.control.running import RunOptions

    if trace and not measure:
        raise InputError("--trace records real runs: it needs --measure")
    target = common.load_target(cluster, limit)
    strategies = [training.one_of("--strategy", s.strip(), training.STRATEGIES) for s in strategy.split(",")]
    asked, loaded = training.make_request(
        workload,
        batch_size=batch_size,
        microbatches=microbatches,
        seed=seed,
        dtype=dtype,
        learning_rate=learning_rate,
        data=data,
        random_inputs=random_inputs,
        encrypt=encrypt,
    )
    training.say_notes(out, loaded)
    options = PlanOptions(
        schedule=training.schedule_of(schedule),
        first_stage=training.nodes_of(target.cluster, pin_first),
        last_stage=training.nodes_of(target.cluster, pin_last),
        microbatches=microbatches,
        time_limit_s=time_limit,
        only_nodes=[node.name for node in target.cluster.nodes],
        link_dtype=training.link_dtypes_of(link_dtype, target.cluster),
    )
    job = Comparing(
        target.cluster,
        asked,
        loaded,
        options,
        strategies,
        RunOptions(steps=steps, weights=False, trace=trace),
    )
    connect = common.connect_options(
        target.path, accept_new_host_keys=accept_new_host_keys, timeout_s=timeout
    )
    with out.progress("compare") as progress:
        if measure:
            with connected(target.cluster.nodes, connect, progress, target.everyone) as links:
                need_all(links.failures)
                found = job.profile(links, profile, progress)
                training.warn_left_out(out, found, target.cluster)
                progress("planning")
                outcomes = job.measured(
                    job.plans(found),
                    links,
                    lambda name: watcher(out, progress, title=name, show_logs=False, yes=yes),
                )
        else:
            progress("planning")
            found = job.known_profile(profile)
            training.warn_left_out(out, found, target.cluster)
            outcomes = job.plans(found)
    show_comparison(out, outcomes, output, cluster=target.cluster.name, workload=workload)
    failed = [outcome for outcome in outcomes if outcome.plan is not None and outcome.error is not None]
    for outcome in failed:
        out.warn(f"{outcome.strategy} did not run to its end: {outcome.error}")
    return 1 if failed else None
