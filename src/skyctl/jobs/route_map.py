"""A plan's routes over its links, as charts. Which devices are near each other is found as a probe does."""

from __future__ import annotations

from skyctl.compare.charts.chart import ChartGroup
from skyctl.compare.charts.route_charts import route_charts
from skyctl.planner.routes.route_names import name_routes
from skyctl.probe.site_clustering import find_sites
from skyctl.records.plan import Plan
from skyctl.records.profile import LinkProfile


def map_routes(plan: Plan) -> ChartGroup:
    """The charts of ``route_charts``; none for a plan that sums nothing."""
    return route_charts(plan, _sites(plan))


def _sites(plan: Plan) -> list[list[str]]:
    """The devices of all routes by site. Those of one site are in a ring's order, else in the problem's."""
    if plan.sync is None:
        return []
    routes = plan.sync.groups[0].routes
    devices = {name for route in routes for edge in (*route.up, *route.down) for name in edge}
    names = [device.id for device in plan.problem.devices if device.id in devices]
    named = name_routes(routes)
    if named.kind in ("ring", "two-way ring"):
        names = list(named.devices)
    links = {
        (link.source, link.target): LinkProfile(
            source=link.source,
            target=link.target,
            latency_s=link.latency_s,
            bandwidth_bytes_per_s=link.bandwidth_bytes_per_s,
        )
        for link in plan.problem.links
        if {link.source, link.target} <= devices
    }
    joined = {name for pair in links for name in pair}
    if joined < devices:  # what has no link is free, and so as near as can be
        return [names]
    return find_sites(names, links)
