"""A cluster set up, or rid of what setup made: sessions, one outcome a node, and what is kept of it here."""

from __future__ import annotations

import socket
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from skyctl.control.connect import connected
from skyctl.errors import SkyctlError
from skyctl.files import home
from skyctl.inventory.setups import read_setups
from skyctl.records.cluster import Cluster
from skyctl.remote.base import ConnectOptions
from skyctl.remote.session import Session
from skyctl.setup.fleet import OnNode, each_node
from skyctl.setup.mending import Job, Mending, entry_of, unset
from skyctl.setup.report import NodeOutcome, SetupReport, failed
from skyctl.setup.wheels import Wheels


def torch_here() -> str:
    """This machine's torch, without what stands after its ``+`` (that is the node's own affair).

    Raises:
        SkyctlError: there is none here.
    """
    try:
        return version("torch").partition("+")[0]
    except PackageNotFoundError as exc:
        raise SkyctlError(
            "there is no torch here, so no version for the nodes to have", hint="pip install torch"
        ) from exc


def launcher() -> str:
    """What this launcher is called on nodes: its environments are told from other launchers' by that."""
    return f"{socket.gethostname()}:{home()}"


def set_up(
    cluster: Cluster,
    options: ConnectOptions,
    job: Job,
    wheels: Path | None = None,
    *,
    remove: bool = False,
    progress: Callable[[str], None] | None = None,
    on_node: OnNode | None = None,
) -> SetupReport:
    """Brings every node what it lacks, or removes what was brought.

    Args:
        cluster: as its file describes it, without what setup has made.
        wheels: the user's folder of wheels, in place of any index.

    Raises:
        InputError: ``wheels`` is no folder, or what is kept of earlier setups can't be read.
    """
    tell = on_node or (lambda *_: None)
    kept = read_setups(cluster.name).nodes
    with Wheels(wheels, job.index) as fetched, connected(cluster.nodes, options, progress) as there:

        def work(session: Session) -> NodeOutcome:
            name = session.node.name

            def say(what: str, share: float) -> None:
                tell(name, what, share)

            entry = entry_of(kept, session.node)
            if remove:
                return unset(session, entry, job, say)
            return Mending(session, entry, job, fetched, say).mend()

        for name, failure in there.failures.items():
            tell(name, failure.message, -1)
        found = each_node(there.sessions, work, tell)
    outcomes = tuple(
        found[node.name] if node.name in found else failed(node.name, there.failures[node.name])
        for node in cluster.nodes
    )
    return SetupReport(
        cluster=cluster.name,
        ok=all(outcome.status != "failed" for outcome in outcomes),
        torch=job.torch,
        requirements=job.requirements.lines,
        nodes=outcomes,
    )
