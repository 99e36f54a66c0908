"""The map of the links: its cells, by site where there are many nodes, its colours, its picture."""

from __future__ import annotations

import io
import itertools
from pathlib import Path

import pytest
from rich.console import Console
from tests.helpers.bare_records import OF_NODE

from skyctl.cli.show_profile import check_plot, draw_link_matrix
from skyctl.errors import InputError, SkyctlError
from skyctl.probe.link_matrix import (
    MOST_NODES,
    LinkSummaryCell,
    colour,
    failed_link_lines,
    matrix_lines,
    matrix_table,
    most_columns,
    rate_text,
    slow_link_lines,
    summarize_links,
    text_colour,
)
from skyctl.records.profile import LinkProfile, NodeProfile, Profile, SiteProfile


def profile(count: int, sites: int = 2) -> Profile:
    names = [f"n{number}" for number in range(count)]
    site = {name: number * sites // count for number, name in enumerate(names)}
    links = [
        LinkProfile(
            source=a,
            target=b,
            latency_s=0.0001 if site[a] == site[b] else 0.0123,
            bandwidth_bytes_per_s=125_000 * (98.4 if site[a] == site[b] else 5),
            estimated=site[a] != site[b] and a != "n0",
        )
        for a, b in itertools.permutations(names, 2)
    ]
    links[0] = LinkProfile(source=links[0].source, target=links[0].target, error="refused")
    return Profile(
        cluster="c",
        cluster_digest="d",
        created="2026-01-01T00:00:00Z",
        nodes=tuple(
            NodeProfile(
                name=name,
                hostname=name,
                platform="Linux",
                python="3.12",
                torch="2.9",
                cpu_model="cpu",
                cpus=1.0,
                memory_total_bytes=1.0,
                memory_available_bytes=1.0,
                address=None,
                interface=None,
                **OF_NODE,
            )
            for name in names
        ),
        devices=(),
        links=tuple(links),
        sites=tuple(
            SiteProfile(name=f"s{number}", nodes=tuple(n for n in names if site[n] == number))
            for number in range(sites)
        ),
        lines=(),
        uplinks=(),
        encrypted=False,
        interrupted=False,
    )


def test_every_figure_can_be_read_without_colour() -> None:
    out = io.StringIO()
    Console(file=out, width=100, no_color=True).print(matrix_table(summarize_links(profile(4))))
    for word in ("98.4", "0.10", "12.3", "~5", "✗", "n3"):
        assert word in out.getvalue()
    assert matrix_lines(summarize_links(profile(4))) == []


def test_many_nodes_are_shown_by_site() -> None:
    summary = summarize_links(profile(MOST_NODES + 1, sites=3))
    assert (summary.names, summary.by_site) == (("s0", "s1", "s2"), True)
    inside, across = summary.cells[1][1], summary.cells[1][2]
    assert inside == LinkSummaryCell(pytest.approx(98.4), pytest.approx(0.1), False)
    assert across == LinkSummaryCell(pytest.approx(5), pytest.approx(12.3), True)
    lines = matrix_lines(summary)
    assert "site link s0 -> s1: 12.30 ms, 5 Mbit/s (median)" in lines
    assert len(lines) == 9
    assert summarize_links(profile(6), most_columns(60)).by_site is False
    assert summarize_links(profile(20), most_columns(60)).by_site is True


def test_a_slow_pair_is_seen_among_many_nodes_of_one_site() -> None:
    whole = profile(MOST_NODES + 1, sites=1)
    slow = whole.links[7].model_copy(update={"bandwidth_bytes_per_s": 1.25e6})
    whole = whole.model_copy(update={"links": (*whole.links[:7], slow, *whole.links[8:])})
    summary = summarize_links(whole)
    assert summary.names == ("s0",)
    ends = f"{slow.source} → {slow.target}"
    assert slow_link_lines(whole, summary) == [f"within s0: 10 to 98.4 Mbit/s, median 98.4; slow: {ends} 10"]
    two = profile(MOST_NODES + 1)
    assert slow_link_lines(two, summarize_links(two)) == [], "nothing is slow"
    assert slow_link_lines(whole, summarize_links(profile(4))) == [], "a map by node hides nothing"


def test_what_failed_is_named_with_its_cause() -> None:
    whole = profile(5)
    first, *others = whole.links
    assert failed_link_lines(whole) == ["n0 → n1: refused"]
    both = others[3].model_copy(update={"error": "refused"})
    assert (both.source, both.target) == ("n1", "n0")
    assert failed_link_lines(whole.model_copy(update={"links": (first, both)})) == ["n0 ↔ n1: refused"]
    all_ = tuple(link.model_copy(update={"error": link.target}) for link in whole.links)
    lines = failed_link_lines(whole.model_copy(update={"links": all_}))
    assert (len(lines), lines[-1]) == (7, "and 14 more")


def test_colours_run_from_fast_to_slow_and_their_ink_can_be_read() -> None:
    assert colour(100, 1, 100) == (253, 231, 37)
    assert colour(1, 1, 100) == (68, 1, 84)
    assert colour(5, 5, 5) == (253, 231, 37)
    assert (text_colour(colour(100, 1, 100)), text_colour(colour(1, 1, 100))) == ("black", "white")
    assert [rate_text(mbit) for mbit in (4.984, 98.4, 945.2, 9400)] == ["4.98", "98.4", "945", "9.4G"]


def test_the_picture_is_an_svg(tmp_path: Path) -> None:
    for measured in (profile(5), profile(MOST_NODES + 1, sites=1)):
        path = draw_link_matrix(measured, tmp_path / "links.svg")
        assert path.read_text().startswith("<svg ")
    with pytest.raises(SkyctlError, match="no links to draw"):
        draw_link_matrix(profile(3).model_copy(update={"links": ()}), tmp_path / "none.svg")


def test_a_picture_that_could_not_be_written_is_refused_before_the_work(tmp_path: Path) -> None:
    check_plot(None)
    check_plot(tmp_path / "x.svg")
    for name in ("x.png", "x.pdf", "x"):
        with pytest.raises(InputError, match="charts are SVG files") as caught:
            check_plot(tmp_path / name)
        assert caught.value.hint == f"--plot {tmp_path / 'x.svg'}"
    with pytest.raises(InputError, match="charts are SVG files"):
        check_plot(Path())
    with pytest.raises(InputError, match="does not exist"):
        check_plot(tmp_path / "none" / "x.svg")
