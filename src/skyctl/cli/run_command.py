"""``skyctl run``: any script on the cluster's nodes, with torchrun's contract."""

from __future__ import annotations

import signal
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from skyctl.cli.command_output import Output, format_count
from skyctl.cli.command_runner import command
from skyctl.cli.mistyped_words import AFTER_DASHES
from skyctl.cli.node_numbers import numbers_by_node, ranks_by_node, speeds_by_node, uncounted_nodes
from skyctl.cli.options import (
    ClusterOptions,
    ClusterTarget,
    ConnectionOptions,
    DryRunOption,
    YesOption,
)
from skyctl.cli.run_options import HoldOption
from skyctl.cli.script_words import ScriptSourceOptions, read_environment, shipped_words
from skyctl.errors import InputError

if TYPE_CHECKING:
    from skyctl.records.cluster import Cluster, Node
    from skyctl.records.script_request import ScriptKind, ScriptRequest


@dataclass(frozen=True, kw_only=True)
class ScriptOptions(ScriptSourceOptions, ConnectionOptions, ClusterOptions):
    """All options of ``run``; they stand before the script, whose own come after it."""

    per_node: Annotated[
        str | None,
        typer.Option(
            "--per-node",
            metavar="gpu|N|NODE=N,…",
            help="Ranks of each node; default: its GPUs as cluster.yaml or a probe knows them, else 1; gpu "
            "asks the node where neither does.",
        ),
    ] = None
    shares: Annotated[
        str | None,
        typer.Option(
            "--shares",
            metavar="NODE=SAMPLES,…",
            help="Samples of a step by node, in place of shares by measured speed.",
        ),
    ] = None
    balance: Annotated[
        int | None,
        typer.Option(
            "--balance",
            min=1,
            metavar="STEPS",
            help="Time so many steps of the script with equal shares first, then start it with shares that "
            "let all ranks finish together.",
        ),
    ] = None
    workdir: Annotated[
        str | None,
        typer.Option(
            "--workdir", metavar="DIR", help="Work in this folder of the nodes; nothing is sent then."
        ),
    ] = None
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            metavar="DIR",
            help="What ranks write to this folder comes home to it, at the end and at Ctrl-C; . is all of "
            "what they write where they work.",
        ),
    ] = None
    min_nodes: Annotated[
        int | None,
        typer.Option(
            "--min-nodes",
            min=1,
            metavar="N",
            help="Go on without nodes that are lost while so many are left; default: all are needed.",
        ),
    ] = None
    max_restarts: Annotated[
        int,
        typer.Option("--max-restarts", min=0, metavar="N", help="Start all ranks anew after one has failed."),
    ] = 0
    master_port: Annotated[
        int | None,
        typer.Option(
            "--master-port", min=1, max=65535, metavar="PORT", help="Default: one that is free there."
        ),
    ] = None
    turns: Annotated[
        str | None,
        typer.Option(
            "--turns",
            metavar="POLICY",
            help="Each step of a Python script takes its device's turn, beside other runs that say so, too: "
            "fifo, fair, pack or priority=N.",
        ),
    ] = None
    detach: Annotated[
        bool, typer.Option("--detach", help="Leave the run to the background once it runs, and return.")
    ] = False
    hold: HoldOption = 43_200.0
    yes: YesOption = False
    dry_run: DryRunOption = False


@command
def run(
    out: Output,
    context: typer.Context,
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="SCRIPT|-m MODULE|-- COMMAND [ARGS]…",
            help="A Python file, a module, or any command, with its own arguments.",
            show_default=False,
        ),
    ] = None,
    *,
    options: ScriptOptions,
) -> None:
    """Run a script on the cluster's nodes, with torchrun's environment.

    Each rank gets RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT and all else that torchrun sets.
    In ARGS {share:64} is this rank's part of 64 samples, by measured speed; {rank}, {local_rank},
    {world_size}, {node} and {node_rank} are replaced as well; {{ is a brace.
    The folder that you are in is sent to the nodes, where each rank works in a copy of it.
    """
    after_dashes, is_there = bool(context.meta.get(AFTER_DASHES)), options.workdir is not None
    words = words or []
    kind = options.kind("run", words, after_dashes=after_dashes, is_there=is_there)
    target = options.load()

    def request_with(counted: Mapping[str, int]) -> ScriptRequest:
        return make_request(kind, words, options, target.cluster, counted)

    if options.dry_run:
        _show_ranks(out, request_with({}))
        return
    uncounted = uncounted_nodes(options.per_node, target.cluster)
    _run(out, target, request_with, uncounted, options)


def make_request(
    kind: ScriptKind,
    words: Sequence[str],
    options: ScriptOptions,
    cluster: Cluster,
    counted: Mapping[str, int] | None = None,
) -> ScriptRequest:
    """The typed words and options as a record.

    Args:
        counted: by node, accelerators that it has said itself, where it was asked.

    Raises:
        InputError: for what can't be.
    """
    from skyctl.records.script_request import ScriptRequest
    from skyctl.run.scripts.script_ranks import find_batch_size

    ranks = ranks_by_node(options.per_node, cluster, counted or {})
    total = find_batch_size(words)
    if total is not None and total < sum(ranks.values()):
        raise InputError(
            f"{{share:{total}}} can't give each of {sum(ranks.values())} ranks a sample",
            hint="use fewer ranks (--per-node, --limit) or a larger batch",
        )
    if options.balance is not None:
        _check_balance(kind, options)
    environment = read_environment(options.env or ())
    if options.turns is not None:
        _check_turns(options.turns, kind, environment)
    if options.min_nodes is not None and options.min_nodes > len(ranks):
        raise InputError(f"--min-nodes {options.min_nodes}: the run has {format_count(len(ranks), 'node')}")
    folder, words, ship = _shipped(kind, words, options)
    output, output_name = _output(options, folder)
    return ScriptRequest(
        kind=kind,
        words=tuple(words),
        folder=None if folder is None else str(folder),
        ship=tuple(ship),
        workdir=options.workdir,
        output=output,
        output_name=output_name,
        env=environment,
        ranks=ranks,
        shares=None if options.shares is None else numbers_by_node("--shares", options.shares, ranks),
        speeds=speeds_by_node(cluster),
        balance_steps=options.balance,
        min_nodes=options.min_nodes,
        max_restarts=options.max_restarts,
        stall_s=options.stall,
        master_port=options.master_port,
        turns=options.turns,
    )


def _check_balance(kind: ScriptKind, options: ScriptOptions) -> None:
    """Raises InputError where steps can't be timed, or shares are given already."""
    if kind == "command":
        raise InputError(
            "--balance times steps of a Python script's optimizer, and a command has none that is known",
            hint="give shares by hand: --shares",
        )
    if options.shares is not None:
        raise InputError("--balance finds shares, and --shares gives them", hint="leave one of them out")


def _check_turns(turns: str, kind: ScriptKind, environment: Mapping[str, str]) -> None:
    """Raises InputError where steps, how many are left, or their device can't be known."""
    from skyctl.sweep.trial_devices import VISIBLE
    from skyctl.turns.turn_policy import SRTF, parse_turns

    policy = parse_turns(turns)
    if kind == "command":
        raise InputError(
            "--turns takes a turn for each step of a Python script's optimizer, and a command has none that "
            "is known",
            hint="start it under less priority than runs beside it: skyctl run -- nice -n 19 COMMAND",
        )
    if policy.kind == SRTF:
        raise InputError(
            "--turns srtf goes by what runs have left to do, and a script does not say how many steps it "
            "makes",
            hint="--turns fifo, fair, pack or priority=N, for all runs on the device",
        )
    for name in VISIBLE.values():
        if environment.get(name):
            raise InputError(
                f"--turns needs the node's own numbers of its devices, and --env {name} gives them others",
                hint="leave it out, and have the script choose by LOCAL_RANK",
            )


def _shipped(
    kind: ScriptKind, words: Sequence[str], options: ScriptOptions
) -> tuple[Path | None, Sequence[str], Sequence[str]]:
    """As ``shipped_words``; nothing is sent where ranks work in a folder that their nodes have."""
    if options.workdir is not None:
        if options.ship:
            raise InputError("--workdir sends nothing, so --ship does not go with it")
        return None, words, ()
    return shipped_words(kind, words, options.ship or ())


def _output(options: ScriptOptions, folder: Path | None) -> tuple[str | None, str | None]:
    """The folder that output comes to, and its name in the folder that ranks work in."""
    if options.output is None:
        return None, None
    here = options.output.absolute()
    if here.exists() and not here.is_dir():
        raise InputError(f"--output {options.output} is a file; give a folder")
    home = folder or Path.cwd()
    return str(here), here.relative_to(home).as_posix() if here.is_relative_to(home) else here.name


def _show_ranks(out: Output, request: ScriptRequest) -> None:
    """Prints what each rank would be told, as far as it is known without connecting."""
    from skyctl.run.scripts.script_ranks import place_ranks

    ranks = place_ranks(request.ranks)
    for rank in ranks:
        out.line(f"rank {rank.rank} on {rank.node}, local rank {rank.local_rank} of {rank.local_world_size}")
    out.json(
        {"ranks": [{"rank": rank.rank, "node": rank.node, "local_rank": rank.local_rank} for rank in ranks]}
    )


def _run(
    out: Output,
    target: ClusterTarget,
    request_with: Callable[[Mapping[str, int]], ScriptRequest],
    uncounted: Sequence[str],
    options: ScriptOptions,
) -> None:
    """Connects, begins a run, and supervises it until it ends or is detached from.

    Args:
        request_with: the request, by the accelerators that ``uncounted`` nodes say they have.
    """
    from skyctl.check.accelerator_counts import count_accelerators
    from skyctl.cli.run_display import detachable_callbacks
    from skyctl.cli.show_run import show_outcome
    from skyctl.jobs.node_sessions import connect_nodes, require_all
    from skyctl.remote.session_factory import make_connector
    from skyctl.run.scripts.script_attempt import SCRIPT_MODULE
    from skyctl.run.scripts.script_ranks import find_batch_size
    from skyctl.supervision.background_supervisor import hand_over
    from skyctl.supervision.opened_runs import new_run
    from skyctl.supervision.run_settings import script_settings
    from skyctl.supervision.script_supervision import supervise_script

    request = request_with(dict.fromkeys(uncounted, 1))  # mistakes are said before anything is asked
    is_divided = find_batch_size(request.words) is not None
    if is_divided and request.speeds is None and request.shares is None and request.balance_steps is None:
        out.note(
            "no node's speed is known, so shares are equal: skyctl probe measures it, or give --balance or "
            "--shares"
        )
    nodes: list[Node] = [node for node in target.cluster.nodes if node.name in request.ranks]
    connect = options.supervised_connection(target.path, options.hold)
    with ExitStack() as stack:
        progress = stack.enter_context(out.progress("run"))
        connector = stack.enter_context(make_connector(nodes, preloaded=(SCRIPT_MODULE,)))
        sessions = stack.enter_context(connect_nodes(nodes, connect, progress, nodes, connector))
        require_all(sessions.failures)
        if uncounted:
            request = request_with(count_accelerators({n: sessions.sessions[n] for n in uncounted}))
        with (
            new_run(
                target.cluster,
                sessions.sessions,
                out.note,
                workload=request.source,
                steps=None,
                cluster_file=str(target.path.absolute()),
                order=script_settings(request, connect, limit=options.limit),
            ) as run,
            detachable_callbacks(
                out, progress, (signal.SIGHUP,), yes=options.yes, detach=options.detach, prints_results=True
            ) as callbacks,
        ):
            outcome = supervise_script(run, callbacks, lambda left: hand_over(left, callbacks.phase))
    show_outcome(out, run.run_id, outcome)
