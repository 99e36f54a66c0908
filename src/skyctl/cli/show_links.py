"""Which of a plan's links carry their numbers in another form."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from skyctl.cli.common import Output
    from skyctl.records.plan import Plan


def show_link_dtypes(out: Output, plan: Plan) -> None:
    """One line, where there is any."""
    from skyctl.control.linking import encoded_links

    said = [
        f"{link.source} → {link.target} as {link.dtype} ({link.sent_share:.0%} of the bytes)"
        for link in encoded_links(plan)
    ]
    if said:
        out.line("sent: " + ", ".join(said))
