"""HTML and SVG as text. What is not markup already is escaped, so a node's name stays a name."""

from __future__ import annotations

import html
import re
import unicodedata
from collections.abc import Iterable

VOID = frozenset({"meta", "link", "br", "hr", "wbr", "col"})
"""Elements of HTML that have no end."""


class Markup(str):
    """Text that is markup already, and goes in as it is."""

    __slots__ = ()


def el(tag: str, /, *inside: object, **attributes: object) -> Markup:
    """An element. ``inside``: see ``join``.

    ``attributes``: underscores become hyphens, a last one is dropped (``class_``); None and False are left
    out, True has no value; ``view_box`` and ``preserve_aspect_ratio`` get SVG's own spelling.
    """
    said = "".join(
        f" {_named(key)}" + ("" if value is True else f'="{html.escape(_text(value))}"')
        for key, value in attributes.items()
        if value is not None and value is not False
    )
    if tag in VOID:
        return Markup(f"<{tag}{said}>")
    return Markup(f"<{tag}{said}>{join(*inside)}</{tag}>")


def join(*parts: object) -> Markup:
    """Parts in a row: markup as it is, other values as text, sequences part by part, None as nothing."""
    out: list[str] = []
    for part in parts:
        if isinstance(part, Markup):
            out.append(part)
        elif part is None:
            continue
        elif isinstance(part, Iterable) and not isinstance(part, str):
            out.append(join(*part))
        else:
            out.append(html.escape(_text(part)))
    return Markup("".join(out))


def name(text: str) -> Markup:
    """A name that somebody gave: in a direction of its own, whatever its letters."""
    return el("bdi", text)


_UNIT = re.compile(r"(\d) (%|s|ms|µs|[KMGT]?i?B)(?!\w)")
"""A figure and its unit, which no line break may part."""
_SPELLED = {"view_box": "viewBox", "preserve_aspect_ratio": "preserveAspectRatio"}


def _named(key: str) -> str:
    return _SPELLED.get(key) or key.rstrip("_").replace("_", "-")


def _text(value: object) -> str:
    """Numbers as short as they can be; no control characters, which HTML does not allow."""
    if isinstance(value, float):
        return f"{value:.3f}".rstrip("0").rstrip(".")
    clean = "".join(
        c if c in "\n\t" or unicodedata.category(c) not in ("Cc", "Cs") else "�" for c in str(value)
    )
    return _UNIT.sub("\\1\u00a0\\2", clean)
