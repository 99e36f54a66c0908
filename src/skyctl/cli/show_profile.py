"""A profile as a person reads it: tables on a terminal, plain lines when piped."""

from __future__ import annotations

from skyctl.cli.output import Output
from skyctl.probe.show import plain_lines, tables
from skyctl.records.profile import Profile


def show_profile(out: Output, profile: Profile) -> None:
    """Devices, layer times and links."""
    out.show(tables(profile, out.width), plain_lines(profile))
