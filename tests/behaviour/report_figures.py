"""Every figure of a comparison's report, made of a profile whose figures are set."""

from __future__ import annotations

import html
import re
from html.parser import HTMLParser
from typing import Any

from tests.behaviour import offline
from tests.behaviour.observing import Room, normal

_FIGURE = re.compile(
    r"(?<![\w.])[-+−]?\d+(?:[.,]\d+)*(?:\s?(?:%|×|ms|µs|s|MB|GB|MiB|GiB|kB|Mbit/s|Gbit/s)\b)?"
)


class _Page(HTMLParser):
    """Cells of tables, row by row, and headings; all numbers of the text that is seen."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.rows: list[list[str]] = []
        self.ids: list[str] = []
        self.seen = ""
        self._hidden = 0
        self._cell = False
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.ids += [value or "" for key, value in attrs if key == "id"]
        if tag in ("style", "script", "title"):
            self._hidden += 1
        elif tag == "tr":
            self.rows.append([])
        elif tag in ("td", "th"):
            self._cell = True
            if self.rows:
                self.rows[-1].append("")

    def handle_endtag(self, tag: str) -> None:
        if tag in ("style", "script", "title"):
            self._hidden -= 1
        elif tag in ("td", "th"):
            self._cell = False

    def handle_data(self, data: str) -> None:
        if self._hidden:
            return
        self.seen += data + "\n"
        if self._cell and self.rows and self.rows[-1]:
            self.rows[-1][-1] += data


def figures(text: str) -> list[str]:
    """The numbers of a text with their units, in order."""
    return [re.sub(r"\s+", " ", x) for x in _FIGURE.findall(html.unescape(text).replace("\u00a0", " "))]


def report(room: Room) -> dict[str, Any]:
    """A comparison of a profile whose figures are set: every number of it."""
    offline.furnish(room)
    words = ("compare", offline.GPT, "--batch-size", "8", "--profile", "profile.json", "--schedule", "1f1b")
    swept = ("--microbatches", "2,4", "--nodes", "1..N", "--time-limit", "60", "-o", "out", "--json")
    found: dict[str, Any] = {"compare": room.observe(*words, *swept)}
    found["wrote"] = sorted(path.name for path in (room.folder / "out").iterdir())
    for strategy in ("even", "heuristic", "optimal"):
        plan = room.read(f"out/{strategy}.plan.json")
        found[f"{strategy} plan"] = {"certificate": normal(plan["certificate"]), "version": plan["version"]}
    text = (room.folder / "out" / "report.html").read_text()
    page = _Page(text)
    found["ids"] = page.ids
    found["tables"] = [" | ".join(" ".join(figures(cell)) for cell in row) for row in page.rows]
    # When it was written, by what, and how long the search took.
    passing = re.compile(r"(?m)^.*(skyctl |python|torch|20\d\d-| UTC).*$|\bin \S+\s(ms|s|µs)\b")
    text = passing.sub("", page.seen.replace("\u00a0", " "))
    counted: dict[str, int] = {}
    for figure in figures(text):
        if figure.count(".") > 1:  # a version
            continue
        counted[figure] = counted.get(figure, 0) + 1
    found["figures"] = dict(sorted(counted.items()))
    return found
