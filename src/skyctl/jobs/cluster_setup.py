"""Sets up a cluster's nodes, or removes what setup has installed: one outcome a node."""

from __future__ import annotations

import socket
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from skyctl.errors import PythonTooOldError, SkyctlError, UnfitError
from skyctl.files import home, make_private
from skyctl.inventory.environment_registry import read_environments
from skyctl.jobs.node_sessions import connect_nodes
from skyctl.records.cluster import Cluster, Node, PreparedEnvironment
from skyctl.remote.agent_session import Session
from skyctl.remote.base import ConnectOptions
from skyctl.remote.bootstrap import MIN_PYTHON_TEXT
from skyctl.remote.session_factory import open_session
from skyctl.setup.fleet import NodeOutcome, ReportNodeProgress, SetupReport, each_node, run_setup_task
from skyctl.setup.installer import NodeInstaller, SetupJob, current_environment, remove_environments
from skyctl.setup.node.setup_orders import RemoveOrder
from skyctl.setup.python_bringer import bring_python
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

        def work_on(node: Node) -> NodeOutcome:
            entry = current_environment(kept, node)
            say = partial(report, node.name)
            session, failure = reached.sessions.get(node.name), reached.failures.get(node.name)
            if session is not None and remove:
                return remove_environments(session, node, entry, job, say)
            if session is not None:
                return NodeInstaller(session, node, entry, job, fetcher, say).install()
            assert failure is not None
            if not isinstance(failure, PythonTooOldError):
                raise failure
            return _work_without_python(node, failure, entry, options, job, fetcher, say, remove=remove)

        results = each_node({node.name: partial(work_on, node) for node in cluster.nodes}, report)
    outcomes = tuple(results[node.name] for node in cluster.nodes)
    return SetupReport(
        cluster=cluster.name,
        ok=all(outcome.status != "failed" for outcome in outcomes),
        torch=job.torch,
        requirements=job.requirements.lines,
        nodes=outcomes,
    )


def _work_without_python(
    node: Node,
    failure: PythonTooOldError,
    entry: PreparedEnvironment | None,
    options: ConnectOptions,
    job: SetupJob,
    fetcher: WheelFetcher,
    say: Callable[[str, float], None],
    *,
    remove: bool,
) -> NodeOutcome:
    """The same where the node's own Python is too old: in that of an earlier setup, else in a new one."""

    def open_with(python: str) -> Session:
        return open_session(node.model_copy(update={"python": python}), options)

    session = None
    if entry is not None:
        with suppress(UnfitError):  # it is gone, or broken
            session = open_with(entry.python)
    if session is None and remove:
        if entry is not None:
            raise failure
        return NodeOutcome(node=node.name, status="nothing", python=node.python)
    if session is None and job.dry_run:
        lacks = (f"Python {MIN_PYTHON_TEXT} or newer (it has {failure.version})", "torch")
        return NodeOutcome(node=node.name, status="lacking", python=node.python, lacks=lacks)
    with session or open_with(bring_python(node, options, failure, fetcher, say)) as opened:
        if remove:
            return remove_environments(opened, node, entry, job, say)
        try:
            return NodeInstaller(opened, node, entry, job, fetcher, say).install()
        except SkyctlError:
            with suppress(SkyctlError):  # of a Python that nothing was made with
                run_setup_task(opened, RemoveOrder(()), say)
            raise


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
