"""Routes over the map of their links: a panel for the links, and one for each of the largest routes."""

from __future__ import annotations

from itertools import pairwise
from math import dist
from pathlib import Path

import pytest
from tests.planner.data_problems import data_problem

from skyctl.compare.charts.chart import ChartGroup
from skyctl.compare.charts.network_chart import NetworkChart
from skyctl.compare.charts.route_charts import MAX_ROUTES
from skyctl.compare.charts.svg_file import style, write_svg
from skyctl.jobs.route_map import map_routes
from skyctl.planner.api import plan
from skyctl.records.plan import Plan
from skyctl.records.problem import Link, Problem, SharedResource, SyncRoutes

MESH = {"n0 n1": 40, "n1 n2": 40, "n2 n3": 40, "n0 n3": 5, "n0 n2": 20, "n1 n3": 20}


def linked(problem: Problem, mbit: dict[str, float]) -> Problem:
    """The problem with these links, each both ways."""
    links = [
        Link(source=f"{a}/cpu:0", target=f"{b}/cpu:0", latency_s=1e-4, bandwidth_bytes_per_s=rate * 1e6 / 8)
        for pair, rate in mbit.items()
        for a, b in (pair.split(), pair.split()[::-1])
    ]
    return problem.model_copy(update={"links": tuple(links)})


def mesh(sync: SyncRoutes = "auto", strategy: str = "optimal") -> Plan:
    problem = data_problem(speeds=(1.0,) * 4, gradient=1e6, microbatches=400)
    return plan(linked(problem, MESH).model_copy(update={"sync": sync}), strategy)


def charts(group: ChartGroup) -> list[NetworkChart]:
    drawn = [chart for row in group.rows for chart in row]
    assert all(isinstance(chart, NetworkChart) for chart in drawn)
    return [chart for chart in drawn if isinstance(chart, NetworkChart)]


def test_the_links_have_their_rates_and_each_route_its_trees() -> None:
    mesh_plan = mesh("trees")
    assert mesh_plan.sync is not None
    routes = sorted(mesh_plan.sync.groups[0].routes, key=lambda route: -route.share)
    links, *panels = charts(map_routes(mesh_plan))
    figures = [text.text for text in links.texts if text.muted]
    assert sorted(figures) == ["20", "20", "40", "40", "40", "5"]
    assert {text.text for text in links.texts} >= {"n0", "n1", "n2", "n3"}
    assert len(panels) == len(routes) > 1
    for number, (route, panel) in enumerate(zip(routes, panels, strict=True)):
        assert panel.title == f"{100 * route.share:.3g}% at {route.root.partition('/')[0]}"
        arrows = [line for line in panel.lines if line.arrow]
        assert {line.look for line in arrows} == {f"route{number}"}
        assert [line.dashed for line in arrows] == [False] * len(route.up) + [True] * len(route.down)
        assert [node.look for node in panel.nodes].count(f"route{number}") == 1


@pytest.mark.parametrize("sync", ["ring", "star"])
def test_a_ring_and_a_star_are_drawn_likewise(sync: SyncRoutes) -> None:
    ring_plan = mesh(sync)
    assert ring_plan.sync is not None
    _, *panels = charts(map_routes(ring_plan))
    assert len(panels) == len(ring_plan.sync.groups[0].routes)


def test_what_comes_the_other_way_is_beside_it() -> None:
    """A star's way up and down is one link: the arrows of both do not lie on each other."""
    panel = charts(map_routes(mesh("star")))[1]
    up, down = ([line for line in panel.lines if line.arrow and line.dashed == way] for way in (False, True))
    for there, back in zip(up, down, strict=True):
        assert dist((there.x1, there.y1), (back.x2, back.y2)) > 4


def test_sites_are_apart_and_have_one_figure_between_them() -> None:
    names = [f"n{i}" for i in range(6)]
    rates = {
        f"{a} {b}": 80 if i // 3 == j // 3 else 10
        for i, a in enumerate(names)
        for j, b in enumerate(names)
        if i < j
    }
    problem = linked(data_problem(speeds=(1.0,) * 6, gradient=1e6, microbatches=600), rates)
    crossing = [["n0/cpu:0", f"n{i}/cpu:0"] for i in (3, 4, 5)]
    uplink = SharedResource(name="uplink", bandwidth_bytes_per_s=2.5e6, links=crossing)
    planned = plan(problem.model_copy(update={"shared": (uplink,), "sync": "ring"}), "even")
    group = map_routes(planned)
    links = charts(group)[0]
    assert sorted(text.text for text in links.texts if text.muted) == ["10", "80", "80"]
    places = [(node.x, node.y) for node in links.nodes]
    assert max(dist(a, b) for a, b in pairwise(places[:3])) < min(dist(places[0], x) for x in places[3:])
    assert group.notes == (
        "Not drawn: one more route, 16.7% of the bytes; none has a larger share than those drawn.",
        "Shared by several links, Mbit/s: uplink 20.",
    )


def test_of_many_the_largest_are_drawn_and_the_rest_is_said(tmp_path: Path) -> None:
    problem = data_problem(speeds=(1.0,) * 40, rate=1e6, microbatches=40)
    group = map_routes(plan(problem, "even"))
    assert len(charts(group)) == 1 + MAX_ROUTES
    assert group.notes[0].startswith("Not drawn: 35 more routes, 87.5% of the bytes")
    assert "only roots are named" in group.notes[-1]
    assert [text.text for text in charts(group)[1].texts] == ["n0"]
    assert write_svg(tmp_path / "many.svg", group).stat().st_size > 0


def test_a_pipeline_has_no_routes() -> None:
    assert map_routes(plan(data_problem(parallel="pipeline"))).rows == ()


def test_each_look_has_a_colour() -> None:
    group = map_routes(mesh("ring"))
    looks = {part.look for chart in charts(group) for part in (*chart.lines, *chart.nodes)}
    for look in looks | {"left-out", "helper"}:
        assert f".{look}{{" in style(), look
