"""A hook of mkdocs: links to lines of source become plain code, since the site holds the documents alone."""

from __future__ import annotations

import re

SOURCE_LINK = re.compile(r"\[(`[^`\]]+`)\]\((?:\.\./)+src/[^()\s]+\)")


def on_page_markdown(markdown: str, **_: object) -> str:
    """The page's text without its links to source."""
    return SOURCE_LINK.sub(r"\1", markdown)
