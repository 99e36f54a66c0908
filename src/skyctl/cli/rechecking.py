"""``skyctl probe --quick``: does the newest profile still hold?"""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import TYPE_CHECKING

from skyctl.cli.common import Output, Target
from skyctl.errors import InputError

if TYPE_CHECKING:
    from skyctl.control.request import Request
    from skyctl.records.profile import Profile
    from skyctl.remote.base import ConnectOptions
    from skyctl.workload.workload import Workload


def quick(
    out: Output, target: Target, options: ConnectOptions, request: Request | None, loaded: Workload | None
) -> int | None:
    """Prints a table of differences. Exit 5 where there are any, 4 where a node could not be looked at."""
    from skyctl.control.connect import connected
    from skyctl.control.rechecking import differences, recheck_cluster

    then, request, loaded = _profile(target, request, loaded)
    with (
        out.progress("quick probe") as progress,
        connected(target.cluster.nodes, options, progress, target.everyone) as links,
    ):
        now = recheck_cluster(target.cluster, links, then, request, loaded, progress)
    found = differences(then, now)
    source = then.workload.source if then.workload is not None else None
    if found:
        rows = [tuple(asdict(change).values()) for change in found]
        out.table(("where", "what", "then", "now", "change"), rows)
        out.note(f"next: measure it again: skyctl probe {source or ''}".rstrip())
    else:
        what = f" of {source}" if source is not None else ""
        where = " where it could be looked at" if now.failures else ""
        out.line(f"the profile{what} of {then.created} still holds{where}")
    for failure in now.failures:
        hint = f" ({failure.hint})" if failure.hint else ""
        out.warn(f"{failure.node} could not be looked at: {failure.error}{hint}")
    told = {"profile": then.created, "holds": not found, "differences": [asdict(one) for one in found]}
    out.json(told | {"failures": [failure.model_dump() for failure in now.failures]})
    if now.failures:
        return 4
    return 5 if found else None


def say_what(out: Output, target: Target, request: Request | None, loaded: Workload | None) -> None:
    """What would be looked at."""
    then, request, _ = _profile(target, request, loaded)
    nodes = [node.name for node in target.cluster.nodes]
    source = request.spec.source if request is not None else None
    layer = f", the costliest layer of {source} on each device" if source is not None else ""
    ring = ", and a ring of links" if len(nodes) > 1 else ""
    out.line(
        f"would look whether the profile of {then.created} still holds on {', '.join(nodes)}: versions, "
        f"devices, processors, memory{layer}{ring}"
    )
    out.json({"nodes": nodes, "workload": source, "profile": then.created, "links": "ring"})


def _profile(
    target: Target, request: Request | None, loaded: Workload | None
) -> tuple[Profile, Request | None, Workload | None]:
    """The newest profile (of that workload), and what to time of it."""
    from skyctl.control.probing import find_profile
    from skyctl.control.rechecking import most_microbatches, request_of_profile
    from skyctl.files import newest_profile

    if request is not None and loaded is not None:
        then, _ = find_profile(target.cluster, None, request, loaded)
        return then, replace(request, microbatches=most_microbatches(then)), loaded
    newest = newest_profile(target.cluster.name)
    if newest is None:
        raise InputError(
            f"cluster {target.cluster.name!r} has no profile yet", hint="measure it: skyctl probe WORKLOAD"
        )
    return newest[1], *request_of_profile(newest[1])
