"""``skyctl checkpoint``: list the checkpoints of a run on its nodes, export one, remove them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from skyctl.cli.command_output import Output
from skyctl.cli.command_runner import check_output, command, confirm
from skyctl.cli.examples import format_examples
from skyctl.cli.mistyped_words import SkyctlCommand, SkyctlGroup
from skyctl.cli.options import (
    ClusterOption,
    ClusterOptions,
    ConnectionOptions,
    GivenRunArgument,
    RunArgument,
    YesOption,
)
from skyctl.errors import InputError

if TYPE_CHECKING:
    from skyctl.checkpoint.launcher.replicator_group import ReplicatorGroup
    from skyctl.checkpoint.launcher.stored_run import StoredRun
    from skyctl.remote.agent_session import Session

app = typer.Typer(cls=SkyctlGroup, no_args_is_help=True, help="The checkpoints of a run: ls, export, rm.")

OfflineOption = Annotated[
    bool, typer.Option("--offline", help="Only the copies on this machine (launch --keep-here).")
]


class ReachedNodes(NamedTuple):
    """A run's nodes: replicators (None: nobody was asked) and sessions of those that answer, the others."""

    replicators: ReplicatorGroup | None
    sessions: dict[str, Session]
    unreached: list[str]


@app.command("ls", cls=SkyctlCommand, epilog=format_examples("checkpoint ls"))
@command
def ls(
    out: Output,
    run: RunArgument = None,
    *,
    cluster: ClusterOption = None,
    offline: OfflineOption = False,
    connection: ConnectionOptions,
) -> int:
    """List the steps that have checkpoints, and their nodes. Exit 1 where no checkpoint is whole.

    It also says which one has the lowest validation loss.
    """
    from skyctl.checkpoint.launcher.stored_checkpoints import checkpoint_holdings, checkpoint_table
    from skyctl.supervision.run_status import load_run

    stored_run = load_run(run)
    if run is None:
        out.note(f"run {stored_run.paths.run_id}")
    with connect_replicators(out, stored_run, cluster, connection, offline=offline) as nodes:
        stored = checkpoint_table(stored_run, checkpoint_holdings(stored_run, nodes.replicators))
    best = stored_run.state.best
    rows = [
        (
            checkpoint.step,
            "yes" if checkpoint.whole else "no",
            f"{checkpoint.size_bytes / 2**20:.1f}",
            ", ".join(f"{node} ({count})" for node, count in checkpoint.nodes.items()),
        )
        for checkpoint in stored
    ]
    if not stored:
        out.note("it has no checkpoint" + (" on the nodes that answer" if nodes.unreached else ""))
    out.table(("step", "whole", "MiB", "layers on"), rows)
    if best is not None:
        out.line(f"best: step {best.step}, validation loss {best.loss:.4f}")
    out.json(
        {
            "run_id": stored_run.paths.run_id,
            "layers": stored_run.layers,
            "steps": [
                {
                    "step": checkpoint.step,
                    "whole": checkpoint.whole,
                    "bytes": checkpoint.size_bytes,
                    "nodes": dict(checkpoint.nodes),
                }
                for checkpoint in stored
            ],
            "best": None if best is None else best.model_dump(mode="json"),
            "unreachable": nodes.unreached,
        }
    )
    return 0 if any(checkpoint.whole for checkpoint in stored) else 1


@app.command("export", cls=SkyctlCommand, epilog=format_examples("checkpoint export"))
@command
def export(
    out: Output,
    run: RunArgument = None,
    *,
    step: Annotated[
        int | None, typer.Option("--step", min=1, metavar="S", help="Default: the newest that is whole.")
    ] = None,
    best: Annotated[
        bool, typer.Option("--best", help="The checkpoint with the lowest validation loss.")
    ] = False,
    output: Annotated[
        Path | None,
        typer.Option(
            "-o",
            "--output",
            metavar="PATH",
            help="A .safetensors file, a .pt file (a plain state dict), or for hf: workloads a new folder.",
        ),
    ] = None,
    merge: Annotated[
        bool, typer.Option("--merge", help="Of a run with --lora: the model with its adapters merged in.")
    ] = False,
    cluster: ClusterOption = None,
    offline: OfflineOption = False,
    connection: ConnectionOptions,
) -> None:
    """Write a run's weights as one file; for hf: workloads as a from_pretrained folder.

    Those that it has ended with, or of its newest checkpoint that is whole, or of --step or --best. Of a run
    with --lora they are its adapters, as a folder of peft's. A folder has a README.md that says how it was
    trained.
    """
    from skyctl.supervision.run_status import load_run

    stored_run = load_run(run)
    if run is None:
        out.note(f"run {stored_run.paths.run_id}")
    if best:
        step = _best_step(stored_run, step)
    as_folder = stored_run.state.workload.startswith("hf:")
    if merge and (stored_run.plan.workload is None or stored_run.plan.workload.lora is None):
        raise InputError(
            f"--merge: run {stored_run.paths.run_id} has trained the model itself, and no adapters",
            hint="leave it out",
        )
    target = output or Path(stored_run.paths.run_id if as_folder else "weights.safetensors")
    if not as_folder:
        check_output(target)
    nodes = connect_replicators(out, stored_run, cluster, connection, offline=offline)
    path, exported_step = _export_step(stored_run, nodes, target, step, merge=merge)
    out.line(f"step {exported_step}: {path}")
    out.json({"run_id": stored_run.paths.run_id, "step": exported_step, "path": str(path)})


def export_best(
    out: Output, run: StoredRun, cluster: Path | None, connection: ConnectionOptions, target: Path
) -> int:
    """Writes the folder of a run's best checkpoint, adapters merged in; the step that it is of.

    Raises:
        InputError: the run has no such checkpoint.
    """
    nodes = connect_replicators(out, run, cluster, connection)
    return _export_step(run, nodes, target, _best_step(run, None), merge=True)[1]


def _export_step(
    run: StoredRun,
    nodes: AbstractContextManager[ReachedNodes],
    target: Path,
    step: int | None,
    *,
    merge: bool,
) -> tuple[Path, int]:
    """The file or folder of a step's weights, and that step; None: what the run ended with, or the newest.

    Args:
        nodes: entered only where the weights are not here.
    """
    from skyctl.checkpoint.launcher.stored_checkpoints import gather_checkpoint
    from skyctl.supervision.weight_files import export_last_weights, write_weights

    if step in (None, run.state.step):
        path = export_last_weights(run, target, merge=merge)
        if path is not None:
            return path, run.state.step
    with nodes as reached, gather_checkpoint(run, reached.replicators, reached.sessions, step) as found:
        exported_step, layers = found
        return write_weights(layers, target, run, merge=merge, step=exported_step), exported_step


def _best_step(run: StoredRun, step: int | None) -> int:
    """The step of ``--best``. Raises InputError where there is none, or ``--step`` was given, too."""
    if step is not None:
        raise InputError(f"--best and --step {step} each name a checkpoint", hint="leave one of them out")
    if run.state.best is None:
        raise InputError(
            f"run {run.paths.run_id} has no best checkpoint: none was written after a validation",
            hint="launch with --validate-every N, and without --checkpoint-every 0",
        )
    return run.state.best.step


@app.command("rm", cls=SkyctlCommand, epilog=format_examples("checkpoint rm"))
@command
def rm(
    out: Output,
    run: GivenRunArgument,
    *,
    cluster: ClusterOption = None,
    yes: YesOption = False,
    connection: ConnectionOptions,
) -> int:
    """Remove a run's checkpoints from all nodes, and from here. Exit 4 where a node did not answer."""
    from skyctl.checkpoint.launcher.stored_checkpoints import remove_checkpoints
    from skyctl.run.run_lock import acquire_run_lock
    from skyctl.supervision.run_status import load_run, refuse_running

    stored_run = load_run(run)
    refuse_running(stored_run, "its checkpoints can be removed")
    question = f"remove all checkpoints of run {stored_run.paths.run_id}? It can't be resumed then"
    if not confirm(out, question, yes=yes, otherwise=True):
        return 0
    failures = {}
    with (
        acquire_run_lock(stored_run.paths, attached=True),  # nobody resumes it meanwhile
        connect_replicators(out, stored_run, cluster, connection) as nodes,
    ):
        if nodes.replicators is not None:
            failures = remove_checkpoints(stored_run, nodes.replicators, nodes.unreached)
    for node, failure in failures.items():
        out.warn(f"{node}: {failure.message}")
    left = sorted({*failures, *nodes.unreached})
    out.line("removed" + (f", but not on {','.join(left)}" if left else ""))
    out.json({"run_id": stored_run.paths.run_id, "left_on": left})
    return 4 if left else 0


@contextmanager
def connect_replicators(
    out: Output,
    stored_run: StoredRun,
    cluster: Path | None,
    connection: ConnectionOptions,
    *,
    offline: bool = False,
) -> Iterator[ReachedNodes]:
    """The run's nodes, connected; those that do not answer are warned of."""
    from skyctl.checkpoint.launcher.replicator_group import REPLICATOR_MODULE
    from skyctl.checkpoint.launcher.stored_checkpoints import replicators_on
    from skyctl.jobs.node_sessions import connect_nodes, require_all
    from skyctl.records.cluster import node_of
    from skyctl.remote.session_factory import make_connector

    if offline:
        yield ReachedNodes(None, {}, [])
        return
    own_file = Path(stored_run.state.cluster_file) if stored_run.state.cluster_file else None
    target = ClusterOptions(cluster=cluster or own_file).load()
    connect = connection.connect_options(target.path)
    wanted = {node_of(device.id) for device in stored_run.plan.problem.devices}
    wanted |= {
        device_id.partition("/")[0] for attempt in stored_run.state.attempts for device_id in attempt.devices
    }
    chosen = [node for node in target.cluster.nodes if node.name in wanted]
    if not chosen:
        raise InputError(
            f"cluster {target.cluster.name!r} has none of the run's nodes ({', '.join(sorted(wanted))})",
            hint="give the cluster file that it was launched with: -c FILE",
        )
    with (
        out.progress("checkpoint") as progress,
        make_connector(chosen, preloaded=[REPLICATOR_MODULE]) as connector,  # and not torch
        connect_nodes(chosen, connect, progress, connector=connector) as reached,
    ):
        if not reached.sessions:
            require_all(reached.failures)
        for name, failure in reached.failures.items():
            out.warn(f"{name}: {failure.message}")
        with replicators_on(stored_run, reached.sessions) as replicators:
            yield ReachedNodes(replicators, dict(reached.sessions), sorted(reached.failures))
