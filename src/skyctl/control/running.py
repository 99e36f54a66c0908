"""A plan, run for real on a cluster: folder, shipping, ranks, weights, measurement."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from skyctl.compare.stats import quantiles
from skyctl.control.changes import Facts, of_plan, refuse, table
from skyctl.control.explaining import explained, with_early_word
from skyctl.control.request import Request, send_workload
from skyctl.control.tracing import write_trace
from skyctl.errors import SkyctlError
from skyctl.files import RunPaths, write_atomic
from skyctl.launch.events import Watcher, measurement
from skyctl.launch.metrics import Metrics
from skyctl.launch.run import Deadlines, Run
from skyctl.launch.spec import RankSpec, check_fits, rank_specs, used_nodes
from skyctl.launch.weights import gather_weights
from skyctl.planner.playing import play_of
from skyctl.records.cluster import Cluster, split_device_id
from skyctl.records.measurement import Measurement
from skyctl.records.plan import Plan
from skyctl.remote.addresses import peer_addresses
from skyctl.remote.session import Session


@dataclass(frozen=True)
class RunOptions:
    """How long to train and what to keep. ``trace``: record what every rank does when.

    ``ignore_changes``: train on a cluster that is not what the plan was made for, too. ``encrypt``: what
    passes between the stages, and checkpoints between nodes, go through TLS (a plan that was made so is
    always run so).

    Of supervised runs alone: ``checkpoint_every``: steps from one to the next (0: none; None: chosen, see
    ``cadence``). ``keep``: so many are kept. ``replicas``: other nodes with a copy of each (None: two, or all
    there are). ``keep_here``: copies on this machine, too. ``max_restarts``: attempts after a fault, counted
    anew after each checkpoint.
    """

    steps: int = 10
    weights: bool = True
    trace: bool = False
    ignore_changes: bool = False
    encrypt: bool = False
    deadlines: Deadlines = field(default_factory=Deadlines)
    checkpoint_every: int | None = None
    keep: int = 2
    replicas: int | None = None
    keep_here: bool = False
    max_restarts: int = 3


def run_plan(
    plan: Plan,
    cluster: Cluster,
    request: Request,
    sessions: Mapping[str, Session],
    options: RunOptions,
    watcher: Watcher,
) -> tuple[Measurement, RunPaths]:
    """Trains ``options.steps`` steps and writes the run's folder.

    Raises:
        InputError: the plan's stages don't fit its problem.
        MismatchError: the plan names devices that the cluster does not have, or the cluster has changed.
        RunError: a rank failed; its logs stay in the run's folder.
    """
    check_fits(plan, cluster)
    play = play_of(plan)
    paths = RunPaths.new()
    paths.keep_plan(plan.to_json())
    run = None
    metrics = Metrics(paths, watcher.note)
    try:
        watcher = metrics.beside(watcher)
        specs = prepare(plan, cluster, request, sessions, options, paths.run_id, watcher)

        def figures(weights: str | None = None) -> Measurement:
            assert run is not None
            done = measurement(paths.run_id, plan, specs, run.collected, quantiles, weights, play)
            return explained(play, done)

        def check(facts: Mapping[int, Facts]) -> None:
            if not options.ignore_changes:
                refuse(plan, facts)
            elif found := of_plan(plan, facts):
                watcher.warn("the cluster is not what the plan was made for:\n" + "\n".join(table(found)))

        run = Run(
            paths,
            specs,
            sessions,
            with_early_word(watcher, figures),
            options.deadlines,
            check,
            encrypt=options.encrypt or plan.encrypted,
        )
        run.start()
        run.watch(plan.predicted.iteration_s)
        watcher.phase("gathering the trained weights")
        weights = gather_weights(run, sessions) if options.weights else None
        done = figures(str(weights) if weights else None)
        write_atomic(paths.measurement, done.to_json())
        if options.trace:  # whatever becomes of it, the figures are kept
            done = done.model_copy(update={"trace": write_trace(run, sessions, play, watcher)})
            write_atomic(paths.measurement, done.to_json())
        return done, paths
    except KeyboardInterrupt as exc:
        done_steps = run.collected.reported if run is not None else 0
        exc.add_note(
            f"stopped after {done_steps} steps, no weights were kept; the run's folder: {paths.folder}"
        )
        raise
    except SkyctlError as exc:
        if exc.log is None:
            exc.log = str(paths.folder)
        raise
    finally:
        if run is not None:
            run.stop()
        metrics.close()


def prepare(
    plan: Plan,
    cluster: Cluster,
    request: Request,
    sessions: Mapping[str, Session],
    options: RunOptions,
    run_id: str,
    watcher: Watcher,
    addresses: Mapping[str, str] | None = None,
) -> list[RankSpec]:
    """Ships what the ranks need and says what each is told.

    Args:
        addresses: by node, where its peers reach it; None: found out.
    """
    watcher.phase("shipping the workload")
    used = [node.name for node in used_nodes(plan, cluster)]
    mine = {name: sessions[name] for name in used}
    ends = {split_device_id(plan.stages[i].replicas[0].device)[0] for i in (0, -1)}
    holds: dict[str, set[int]] = {name: set() for name in used}
    for stage in plan.stages:
        for replica in stage.replicas:
            holds[split_device_id(replica.device)[0]].update(range(stage.start, stage.stop))
    told = send_workload(request.spec, mine, with_data=ends, layers=holds)
    return rank_specs(
        plan,
        cluster,
        run_id=run_id,
        steps=options.steps,
        workload=told,
        addresses=addresses or peer_addresses(mine),
        weights=options.weights,
        recipe=request.recipe.to_dict(),
        trace=options.trace,
    )
