"""``skyctl launch``: train on the cluster with a plan."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from skyctl.cli import common, surviving, training
from skyctl.cli.common import Output, Target, command
from skyctl.errors import InputError

if TYPE_CHECKING:
    from skyctl.cli.output import Ticker
    from skyctl.control.connect import Connected
    from skyctl.control.planning import PlanOptions
    from skyctl.control.request import Request
    from skyctl.records.measurement import Measurement
    from skyctl.records.plan import Plan
    from skyctl.workload.recipe import Recipe
    from skyctl.workload.workload import Workload

SHORT_STEP_S = 0.1


@command
def launch(
    out: Output,
    plan: Annotated[
        str | None,
        typer.Argument(
            metavar="PLAN|WORKLOAD",
            help=f"A plan file, or a workload to probe and plan: {training.WORKLOAD_HELP}",
        ),
    ] = None,
    cluster: common.ClusterOption = None,
    limit: common.LimitOption = None,
    steps: surviving.StepsOption = None,
    resume: surviving.ResumeOption = None,
    checkpoint_every: surviving.EveryOption = None,
    keep: surviving.KeepOption = 2,
    replicas: surviving.ReplicasOption = None,
    keep_here: surviving.KeepHereOption = False,
    max_restarts: surviving.MaxRestartsOption = 3,
    strategy: training.GivenStrategyOption = None,
    pin_first: training.PinFirstOption = None,
    pin_last: training.PinLastOption = None,
    batch_size: training.GivenBatchSizeOption = None,
    microbatches: training.MicrobatchesOption = None,
    schedule: training.ScheduleOption = None,
    seed: training.GivenSeedOption = None,
    dtype: training.GivenDtypeOption = None,
    link_dtype: training.LinkDtypeOption = None,
    learning_rate: training.LearningRateOption = None,
    data: training.DataOption = None,
    random_inputs: training.RandomInputsOption = False,
    clip_norm: training.ClipNormOption = None,
    lr_schedule: training.LrScheduleOption = "constant",
    warmup_steps: training.WarmupStepsOption = 0,
    min_learning_rate: training.MinLearningRateOption = 0.0,
    validate_every: training.ValidateEveryOption = None,
    validate_batches: training.ValidateBatchesOption = training.VALIDATE_BATCHES,
    trace: training.TraceOption = False,
    encrypt: training.EncryptOption = False,
    ignore_changes: training.IgnoreChangesOption = False,
    detach: surviving.DetachOption = False,
    hold: surviving.HoldOption = surviving.HOLD_S,
    output: common.OutputOption = None,
    yes: common.YesOption = False,
    dry_run: common.DryRunOption = False,
    accept_new_host_keys: common.AcceptNewHostKeysOption = False,
    timeout: common.TimeoutOption = common.DEFAULT_TIMEOUT_S,
) -> None:
    """Train on the cluster. A bare workload is probed and planned first.

    A plan whose devices, versions or free memory are no longer as measured is refused (exit 5).
    What fails on the way is tried again, from the newest checkpoint, without nodes that were lost.
    Batch size, number of microbatches, dtype and seed of a plan file are the plan's own. The run's folder
    holds its plan, logs, metrics (a line a step), measurement and weights; -o copies measurement.json.
    """
    from skyctl.control.connect import connected, need_all
    from skyctl.control.planning import PlanOptions
    from skyctl.control.running import RunOptions
    from skyctl.launch.spec import check_fits, used_nodes
    from skyctl.supervise.custody.charge import begun
    from skyctl.supervise.custody.orders import order_of
    from skyctl.workload.recipe import Recipe

    common.check_output(output)
    if resume is not None:
        _refuse_with_resume(plan, resume)
        connect = common.connect_options(
            cluster, accept_new_host_keys=accept_new_host_keys, timeout_s=timeout
        )
        connect = surviving.held(connect, hold)
        surviving.resume_run(
            out,
            resume,
            cluster,
            connect,
            steps=steps,
            max_restarts=max_restarts,
            yes=yes,
            detach=detach,
            output=output,
        )
        return
    if plan is None:
        raise InputError("what to train? give a PLAN.json, a WORKLOAD, or --resume RUN")
    steps = steps or surviving.STEPS
    target = common.load_target(cluster, limit)
    options = common.connect_options(
        target.path, accept_new_host_keys=accept_new_host_keys, timeout_s=timeout
    )
    options = surviving.held(options, hold)
    recipe = Recipe(
        clip_norm=clip_norm,
        lr_schedule=lr_schedule,
        warmup_steps=warmup_steps,
        min_learning_rate=min_learning_rate,
        validate_every=validate_every,
        validate_batches=validate_batches,
        total_steps=steps,
    )
    given = _read_plan(plan)
    if given is None:
        request, loaded = training.make_request(
            plan,
            batch_size=batch_size or training.DEFAULT_BATCH_SIZE,
            microbatches=microbatches,
            seed=seed or 0,
            dtype=dtype or "float32",
            learning_rate=learning_rate,
            data=data,
            random_inputs=random_inputs,
            recipe=recipe,
            encrypt=encrypt,
        )
        nodes = target.cluster.nodes
        choice = PlanOptions(
            strategy=training.one_of("--strategy", strategy or "optimal", training.STRATEGIES),
            microbatches=microbatches,
            schedule=training.schedule_of(schedule),
            first_stage=training.nodes_of(target.cluster, pin_first),
            last_stage=training.nodes_of(target.cluster, pin_last),
            link_dtype=training.link_dtypes_of(link_dtype, target.cluster),
        )
    else:
        _refuse_given(
            plan,
            {
                "--strategy": strategy,
                "--pin-first": pin_first,
                "--pin-last": pin_last,
                "--batch-size": batch_size,
                "--microbatches": microbatches,
                "--schedule": schedule,
                "--seed": seed,
                "--dtype": dtype,
                "--link-dtype": ", ".join(link_dtype) if link_dtype else None,
            },
        )
        choice = PlanOptions()
        check_fits(given, target.cluster)
        request, loaded = _request_of(given, plan, learning_rate, data, random_inputs, recipe)
        nodes = tuple(used_nodes(given, target.cluster))
    training.say_notes(out, loaded)
    if dry_run:
        _show_dry_run(out, given, target, request, steps, trace=trace)
        return
    unplanned = encrypt and given is not None and not given.encrypted
    if unplanned:
        out.note("the plan was made for links without TLS; with it: skyctl probe --encrypt, plan --encrypt")
    run = RunOptions(
        steps=steps,
        trace=trace,
        ignore_changes=ignore_changes,
        encrypt=encrypt,
        checkpoint_every=checkpoint_every,
        keep=keep,
        replicas=replicas,
        keep_here=keep_here,
        max_restarts=max_restarts,
    )
    with (
        out.progress("launch") as progress,
        connected(nodes, options, progress, target.everyone) as links,
    ):
        need_all(links.failures)
        order = order_of(request, run, options, digest=loaded.digest, limit=limit, output=output)
        with begun(
            target.cluster,
            links.sessions,
            out.note,
            workload=request.spec.source,
            steps=steps,
            cluster_file=str(target.path.absolute()),
            order=order,
        ) as charge:

            def made() -> Plan:
                return given or _make_plan(out, progress, target, links, request, loaded, choice)

            over = surviving.watched(out, progress, charge, made, yes=yes, detach=detach)
    surviving.show_over(out, charge.run_id, over)


def _show_dry_run(
    out: Output, plan: Plan | None, target: Target, request: Request, steps: int, *, trace: bool
) -> None:
    """What each rank would be told; addresses and the nodes' own paths are known only once connected."""
    if plan is None:
        names = ", ".join(node.name for node in target.cluster.nodes)
        out.line(f"would probe {names} with {request.spec.source}, plan, and train {steps} steps")
        out.json({"ranks": None})
        return
    from skyctl.launch.spec import rank_specs

    nodes = target.cluster.nodes
    specs = rank_specs(
        plan,
        target.cluster,
        run_id="dry-run",
        steps=steps,
        workload={node.name: request.spec.to_dict() for node in nodes},
        addresses={node.name: node.host or "127.0.0.1" for node in nodes},
        recipe=request.recipe.to_dict(),
        trace=trace,
    )
    for spec in specs:
        start, stop = spec.payload["layers"]
        out.line(
            f"rank {spec.rank} on {spec.device}: layers {start}–{stop}, {spec.payload['microbatches']} "
            f"microbatches ({spec.payload['schedule']}, {spec.payload['in_flight']} in flight), {steps} steps"
        )
    out.note("the whole of what each rank is told: --json")
    out.json({"ranks": [{"rank": s.rank, "device": s.device, "payload": s.payload} for s in specs]})


def show_measurement(out: Output, done: Measurement) -> None:
    """Per device, what was predicted and what was measured; then the step and the loss."""
    rows = [
        (
            rank,
            r.device,
            f"{r.predicted.compute_s:.3f}",
            f"{r.compute_s:.3f}",
            f"{r.transfer_s:.3f}",
            f"{r.idle_s:.3f}",
            "" if r.peak_memory_bytes is None else f"{r.peak_memory_bytes / 2**30:.2f}",
        )
        for rank, r in enumerate(done.replicas)
    ]
    out.table(
        ("rank", "device", "predicted busy s", "busy s", "transfer s", "idle s", "peak GiB"),
        rows,
    )
    took = done.iteration_s
    error = done.predicted_iteration_s / took.median - 1 if took.median else 0.0
    out.line(
        f"step: {took.median:.4f} s (p10 {took.p10:.4f}, p90 {took.p90:.4f}); "
        f"predicted {done.predicted_iteration_s:.4f} s, off by {error:+.1%}"
    )
    if took.median < SHORT_STEP_S and abs(error) > 0.25:
        out.line(
            f"note: a step under {SHORT_STEP_S * 1000:.0f} ms is mostly what messages and layers cost beside "
            "their computing, which the prediction knows only roughly"
        )
    out.line(f"loss: {done.steps[0].loss:.4f} → {done.final_loss:.4f} in {len(done.steps)} steps")
    if done.validation:
        first, last = done.validation[0], done.validation[-1]
        before = f"{first.loss:.4f} after step {first.step + 1} → " if len(done.validation) > 1 else ""
        out.line(f"validation loss: {before}{last.loss:.4f} after step {last.step + 1}")
    if done.weights is not None:
        out.line(f"weights: {done.weights}")


def _refuse_with_resume(plan: str | None, resume: str) -> None:
    if plan is not None:
        raise InputError(
            f"--resume {resume} goes on with that run's own plan; {plan} does not go with it",
            hint="leave one of them out",
        )


def _refuse_given(plan: str, given: dict[str, object]) -> None:
    """A plan file has settled these; giving them again would be ignored, so it is an error."""
    for flag, value in given.items():
        if value is not None:
            raise InputError(
                f"{flag} {value} does not go with the plan {plan}, which has settled that",
                hint="plan again with it, or launch the workload itself",
            )


def _read_plan(argument: str) -> Plan | None:
    """The plan, where the argument names a JSON file; None where it is a workload."""
    if not argument.endswith(".json"):
        return None
    from skyctl.files import read_record
    from skyctl.records.plan import Plan

    return read_record(Plan, Path(argument))


def _request_of(
    plan: Plan,
    name: str,
    learning_rate: float | None,
    data: Path | None,
    random_inputs: bool,
    recipe: Recipe,
) -> tuple[Request, Workload]:
    from skyctl.control.request import request_of_plan

    if plan.workload is None:
        raise InputError(
            f"{name} was made from a problem file: it has no workload to train",
            hint="plan a workload: skyctl plan WORKLOAD -o plan.json",
        )
    return request_of_plan(
        plan.workload,
        plan.problem.microbatches,
        learning_rate=learning_rate,
        data_path=str(data) if data is not None else None,
        random_inputs=random_inputs,
        recipe=recipe,
    )


def _make_plan(
    out: Output,
    progress: Ticker,
    target: Target,
    links: Connected,
    request: Request,
    loaded: Workload,
    choice: PlanOptions,
) -> Plan:
    """Probes (what earlier probes say that still holds is taken over) and plans."""
    from skyctl.cli.show_links import show_link_dtypes
    from skyctl.cli.show_plan import show_plan
    from skyctl.control.planning import plan_profile
    from skyctl.control.probing import probe_cluster

    profile, _ = probe_cluster(
        target.cluster, links, request, loaded, progress, progress.node, encrypt=request.encrypt
    )
    progress("planning")
    training.say_taken_over(out, profile)
    training.warn_left_out(out, profile, target.cluster)
    made = plan_profile(profile, choice, request.ref(loaded))
    show_plan(out, made)
    show_link_dtypes(out, made)
    return made
