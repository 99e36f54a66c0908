"""``skyctl checkpoint``: what is kept of a run's state on its nodes; one file of it; its end."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from skyctl.cli import common
from skyctl.cli.common import Output, command
from skyctl.cli.examples import epilog
from skyctl.cli.naming import complete
from skyctl.errors import InputError

if TYPE_CHECKING:
    from skyctl.remote.session import Session
    from skyctl.supervise.attempts.keepers import Keepers
    from skyctl.supervise.custody.checkpoints import Known

app = typer.Typer(no_args_is_help=True, help="The checkpoints of a run: ls, export, rm.")

RunArgument = Annotated[
    str, typer.Argument(metavar="RUN", help="A run's id, or its folder.", autocompletion=complete)
]
OfflineOption = Annotated[
    bool, typer.Option("--offline", help="Only the copies on this machine (launch --keep-here).")
]


@app.command("ls", epilog=epilog("checkpoint ls"))
@command
def ls(
    out: Output,
    run: RunArgument,
    cluster: common.ClusterOption = None,
    offline: OfflineOption = False,
    accept_new_host_keys: common.AcceptNewHostKeysOption = False,
    timeout: common.TimeoutOption = common.DEFAULT_TIMEOUT_S,
) -> int:
    """The steps of which something is left, and on which nodes. Exit 1 where none is there in full."""
    from skyctl.supervise.custody.checkpoints import holdings_of, known_run, table_of

    known = known_run(run)
    with _asked(out, known, cluster, offline, accept_new_host_keys, timeout) as (keepers, _, missing):
        found = table_of(known, holdings_of(known, keepers))
    rows = [
        (
            held.step,
            "yes" if held.whole else "no",
            f"{held.size_bytes / 2**20:.1f}",
            ", ".join(f"{node} ({count})" for node, count in held.nodes.items()),
        )
        for held in found
    ]
    out.table(("step", "whole", "MiB", "layers on"), rows)
    out.json(
        {
            "run_id": known.paths.run_id,
            "layers": known.layers,
            "steps": [
                {"step": h.step, "whole": h.whole, "bytes": h.size_bytes, "nodes": dict(h.nodes)}
                for h in found
            ],
            "unreachable": missing,
        }
    )
    return 0 if any(held.whole for held in found) else 1


@app.command("export", epilog=epilog("checkpoint export"))
@command
def export(
    out: Output,
    run: RunArgument,
    step: Annotated[
        int | None, typer.Option("--step", min=1, metavar="S", help="Default: the newest that is whole.")
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option("-o", "--output", metavar="PATH", help="A file, or for hf: workloads a new folder."),
    ] = None,
    cluster: common.ClusterOption = None,
    offline: OfflineOption = False,
    accept_new_host_keys: common.AcceptNewHostKeysOption = False,
    timeout: common.TimeoutOption = common.DEFAULT_TIMEOUT_S,
) -> None:
    """The weights of a checkpoint as one safetensors file; of hf: workloads as a from_pretrained folder."""
    from skyctl.supervise.custody.checkpoints import export as gathered
    from skyctl.supervise.custody.checkpoints import known_run

    known = known_run(run)
    name = f"{known.paths.run_id}" if known.state.workload.startswith("hf:") else "weights.safetensors"
    target = output or Path(name)
    if not known.state.workload.startswith("hf:"):
        common.check_output(target)
    with _asked(out, known, cluster, offline, accept_new_host_keys, timeout) as (keepers, sessions, _):
        done, written = gathered(known, keepers, sessions, step, target)
    out.line(f"step {done}: {written}")
    out.json({"run_id": known.paths.run_id, "step": done, "path": str(written)})


@app.command("rm", epilog=epilog("checkpoint rm"))
@command
def rm(
    out: Output,
    run: RunArgument,
    cluster: common.ClusterOption = None,
    yes: common.YesOption = False,
    accept_new_host_keys: common.AcceptNewHostKeysOption = False,
    timeout: common.TimeoutOption = common.DEFAULT_TIMEOUT_S,
) -> int:
    """Removes a run's checkpoints from all nodes, and from here. Exit 4 where a node did not answer."""
    from skyctl.supervise.custody.checkpoints import known_run, refuse_running, remove

    known = known_run(run)
    refuse_running(known, "its checkpoints can be removed")
    question = f"remove all checkpoints of run {known.paths.run_id}? It can't be resumed then"
    if not common.confirm(out, question, yes=yes, otherwise=True):
        return 0
    with _asked(out, known, cluster, False, accept_new_host_keys, timeout) as (keepers, _, missing):
        failures = remove(known, keepers) if keepers is not None else {}
    for node, failure in failures.items():
        out.warn(f"{node}: {failure.message}")
    left = sorted({*failures, *missing})
    out.line(f"removed{f', but not on {chr(44).join(left)}' if left else ''}")
    out.json({"run_id": known.paths.run_id, "left_on": left})
    return 4 if left else 0


@contextmanager
def _asked(
    out: Output, known: Known, cluster: Path | None, offline: bool, accept_new: bool, timeout_s: float
) -> Iterator[tuple[Keepers | None, dict[str, Session], list[str]]]:
    """Keepers on the run's nodes that answer, their sessions, and who did not answer."""
    from skyctl.control.connect import connected, need_all
    from skyctl.supervise.attempts.replanning import node_of
    from skyctl.supervise.custody.checkpoints import keepers_of

    if offline:
        yield None, {}, []
        return
    given = cluster or (Path(known.state.cluster_file) if known.state.cluster_file else None)
    target = common.load_target(given)
    options = common.connect_options(target.path, accept_new_host_keys=accept_new, timeout_s=timeout_s)
    wanted = {node_of(device.id) for device in known.plan.problem.devices}
    wanted |= {one.partition("/")[0] for attempt in known.state.attempts for one in attempt.devices}
    nodes = [node for node in target.cluster.nodes if node.name in wanted]
    if not nodes:
        raise InputError(
            f"cluster {target.cluster.name!r} has none of the run's nodes ({', '.join(sorted(wanted))})",
            hint="give the cluster file that it was launched with: -c FILE",
        )
    with out.progress("checkpoint") as progress, connected(nodes, options, progress) as links:
        if not links.sessions:
            need_all(links.failures)
        for name, failure in links.failures.items():
            out.warn(f"{name}: {failure.message}")
        with keepers_of(known.paths.run_id, links.sessions) as keepers:
            yield keepers, dict(links.sessions), sorted(links.failures)


__all__: list[Any] = ["app"]
