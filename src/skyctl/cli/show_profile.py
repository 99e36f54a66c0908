"""A profile as a person reads it: tables on a terminal, plain lines when piped."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from skyctl.cli.command_output import Output
from skyctl.errors import InputError, SkyctlError
from skyctl.probe.profile_tables import ProfileDetail, profile_lines, profile_tables
from skyctl.records.profile import NodeFailure, Profile

if TYPE_CHECKING:
    from skyctl.records.cluster import Cluster

UNSTEADY_SPREAD = 1.0
"""A layer's (p90 − p10) / median from which on the user is warned."""


def show_profile(out: Output, profile: Profile) -> None:
    """Prints devices, layer times and links; with ``-v`` each layer's times, with ``-q`` devices alone."""
    detail: ProfileDetail = "each layer" if out.verbose else "devices" if out.quiet else "largest layers"
    out.show(profile_tables(profile, out.width, detail), profile_lines(profile, detail))


def warn_unsteady_times(out: Output, profile: Profile) -> None:
    """Says of which devices little is known: times that did not settle, or another load beside the probe."""
    from skyctl.probe.profile_tables import condition_notes
    from skyctl.records.profile import unconverged

    for device in profile.devices:
        rough = unconverged(device.timings)
        if rough:
            worst = max(timing.interval or 0.0 for timing in rough)
            spread = f" (±{worst:.0%})" if worst else ""
            out.warn(
                f"{device.id}: {len(rough)} of {len(device.timings)} layer times did not settle"
                f"{spread}: it is busy, or shares its cores; probe again when it is quiet"
            )
            continue
        worst = max((timing.spread or 0.0 for timing in device.timings), default=0.0)
        if worst > UNSTEADY_SPREAD:
            out.warn(
                f"{device.id}: its times are unsteady (spread {worst:.0%}): it is busy, or shares its cores; "
                "set `threads` in cluster.yaml, or probe again when it is quiet"
            )
    for ids, note in condition_notes(profile):
        out.warn(f"{ids}: {note}")


def show_reused(out: Output, profile: Profile) -> None:
    """Says what of a new profile was measured by an earlier probe."""
    from skyctl.probe.profile_cache import reused_figures

    words = reused_figures(profile)
    if words:
        out.note(f"{'; '.join(words)} (--refresh measures them again)")


def show_learned(out: Output, profile: Profile, microbatches: int) -> None:
    """Says which runs a plan with so many microbatches learned from, and what of them it leaves out."""
    from skyctl.learning.corrections import learn_corrections
    from skyctl.learning.evidence_notes import learned_notes

    out.notes(learned_notes(learn_corrections(profile, microbatches)))


def describe_failure(failure: NodeFailure) -> str:
    """Why a node was not measured, and what to do about it."""
    return f"{failure.error} ({failure.hint})" if failure.hint else failure.error


def warn_unmeasured(out: Output, profile: Profile, cluster: Cluster) -> None:
    """Says which nodes have no figures and so get no layers, and what else a plan may be wrong for."""
    from skyctl.jobs.profiles import lacks_links, unmeasured_nodes
    from skyctl.learning.figure_uncertainty import hardly_known_devices

    names = unmeasured_nodes(profile, cluster.nodes)
    for failure in profile.failures:
        if failure.node in names:
            out.warn(f"{failure.node} was not measured, so it is left out: {describe_failure(failure)}")
            names.remove(failure.node)
    if names:
        out.warn(f"not measured, so left out: {', '.join(names)} (skyctl check shows why)")
    if unsure := hardly_known_devices(profile):
        out.warn(
            f"the layer times of {', '.join(unsure)} are hardly known, so a plan may be far off: "
            "probe again when they are quiet"
        )
    if lacks_links(profile):
        out.warn(
            "this profile has no links (skyctl probe --links none): the plan takes every transfer as free; "
            "for a plan that counts them: skyctl probe --links all"
        )


# The links in ``skyctl probe``, beside the tables: which were measured, and the map as a picture.

LINK_SELECTIONS = ("all", "sites", "none")


def check_plot(path: Path | None) -> None:
    """Raises InputError, before any work is done, where the picture could not be written."""
    if path is None:
        return
    if path.suffix.lower() != ".svg":
        svg = path.with_suffix(".svg") if path.name.strip(".") else path / "chart.svg"
        raise InputError(f"--plot {path}: charts are SVG files", hint=f"--plot {svg}")
    if not path.absolute().parent.is_dir():
        raise InputError(f"--plot {path}: the folder {path.absolute().parent} does not exist")


def show_link_notes(out: Output, profile: Profile, how: str | None, plot: Path | None) -> None:
    """Which links were filled in and why, and the picture where one is asked for."""
    from skyctl.probe.link_measurement import default_link_selection

    filled = sum(link.estimated for link in profile.links)
    if how is None and default_link_selection(len(profile.nodes)) == "sites":
        out.note(
            f"{len(profile.nodes)} nodes: all links within a site were measured, and one between every two "
            "sites (--links all measures every pair)"
        )
    if filled:
        out.note(
            f"{filled} of {len(profile.links)} links are filled in from one measured between their sites"
        )
    if how == "none":
        out.note("no link was measured: a plan from this profile takes every transfer as free")
    if plot is not None:
        out.note(f"picture: {draw_link_matrix(profile, plot)}")


def draw_link_matrix(profile: Profile, path: Path) -> Path:
    """Writes the map of the links as an SVG (SkyctlError where no link was measured)."""
    from dataclasses import replace

    from skyctl.compare.charts.chart import ChartGroup
    from skyctl.compare.charts.svg_file import write_svg
    from skyctl.jobs.report_builder import link_chart
    from skyctl.probe.link_matrix import MOST_NODES, summarize_links

    if not profile.links:
        raise SkyctlError("there are no links to draw", hint="skyctl probe --links all measures them")
    summary = summarize_links(profile)
    if len(summary.names) == 1:  # one square would hide a slow pair; by colour alone all nodes fit
        summary = summarize_links(profile, len(profile.nodes))
    what = "site" if summary.by_site else "node"
    key = "Mbit/s, below it ms one way; yellow is fast, violet slow; ~ filled in; ✗ no connection"
    chart = link_chart(
        summary, f"Links of {profile.cluster}, from row to column, by {what}", key, summary.span()
    )
    if len(summary.names) > MOST_NODES:
        cells = tuple(tuple(cell and replace(cell, lines=()) for cell in row) for row in chart.cells)
        chart = replace(chart, cells=cells)
    return write_svg(path, ChartGroup(((chart,),)))
