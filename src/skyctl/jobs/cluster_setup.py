"""Sets up a cluster's nodes, or removes what setup has installed: one outcome a node."""

from __future__ import annotations

import socket
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from skyctl.errors import SkyctlError
from skyctl.files import home, make_private
from skyctl.inventory.environment_registry import read_environments
from skyctl.jobs.node_sessions import connect_nodes
from skyctl.records.cluster import Cluster
from skyctl.remote.agent_session import Session
from skyctl.remote.base import ConnectOptions
from skyctl.setup.fleet import NodeOutcome, ReportNodeProgress, SetupReport, each_node, failed_outcome
from skyctl.setup.installer import NodeInstaller, SetupJob, current_environment, remove_environments
from skyctl.setup.wheels import WheelFetcher
from skyctl.setup.workload_requirements import read_workload_requirements


def find_torch_version() -> str:
    """This machine's torch version without its local part: ``2.13.0`` of ``2.13.0+cpu``.

    Raises:
        SkyctlError: torch is not installed here.
    """
    try:
        return version("torch").partition("+")[0]
    except PackageNotFoundError as exc:
        raise SkyctlError(
            "there is no torch here, so no version for the nodes to have", hint="pip install torch"
        ) from exc


def make_launcher_id() -> str:
    """This launcher's name on nodes, by which its environments are told from other launchers'."""
    return f"{socket.gethostname()}:{home()}"


def set_up_cluster(
    cluster: Cluster,
    options: ConnectOptions,
    job: SetupJob,
    wheels: Path | None = None,
    *,
    remove: bool = False,
    progress: Callable[[str], None] | None = None,
    on_node: ReportNodeProgress | None = None,
) -> SetupReport:
    """Installs on every node what it lacks, or removes what was installed.

    Args:
        cluster: as its file describes it, without what setup has installed.
        wheels: the user's folder of wheels, in place of any index.

    Raises:
        InputError: ``wheels`` is no folder, or what is kept of earlier setups can't be read.
        SkyctlError: what is made could not be kept here; nothing was made.
    """
    report = on_node or (lambda *_: None)
    if not (remove or job.dry_run):
        make_private(home())
    kept = read_environments(cluster.name).nodes
    with (
        WheelFetcher(wheels, job.index) as fetcher,
        connect_nodes(cluster.nodes, options, progress) as reached,
    ):

        def work(session: Session) -> NodeOutcome:
            name = session.node.name
            entry = current_environment(kept, session.node)

            def report_node(what: str, share: float) -> None:
                report(name, what, share)

            if remove:
                return remove_environments(session, entry, job, report_node)
            return NodeInstaller(session, entry, job, fetcher, report_node).install()

        for name, failure in reached.failures.items():
            report(name, failure.message, -1)
        results = each_node(reached.sessions, work, report)
    outcomes = tuple(
        results.get(node.name) or failed_outcome(node.name, reached.failures[node.name])
        for node in cluster.nodes
    )
    return SetupReport(
        cluster=cluster.name,
        ok=all(outcome.status != "failed" for outcome in outcomes),
        torch=job.torch,
        requirements=job.requirements.lines,
        nodes=outcomes,
    )


def remove_all_environments(
    cluster: Cluster,
    options: ConnectOptions,
    *,
    dry_run: bool,
    progress: Callable[[str], None] | None = None,
    on_node: ReportNodeProgress | None = None,
) -> dict[str, NodeOutcome]:
    """Removes what setup has installed on a cluster's nodes; by node, what became of that."""
    job = SetupJob(
        cluster=cluster.name,
        torch=find_torch_version(),
        requirements=read_workload_requirements(None),
        here=make_launcher_id(),
        dry_run=dry_run,
    )
    report = set_up_cluster(cluster, options, job, remove=True, progress=progress, on_node=on_node)
    return {node.node: node for node in report.nodes}
