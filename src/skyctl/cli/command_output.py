"""A command's output: results on stdout, all else on stderr; rich on a terminal, plain when piped."""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TextIO

from skyctl.cli.progress_display import ProgressDisplay, make_console, strip_control, wrap_words
from skyctl.errors import SkyctlError
from skyctl.terminal import ignoring_closed_terminal

if TYPE_CHECKING:
    from rich.console import RenderableType

_CONTROL_IN_JSON = re.compile("[\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]")
"""Characters that JSON need not escape, but that would control a terminal that shows the document."""
MIN_CELL_WIDTH = 10
"""Characters left of a shortened cell, at least."""


def format_count(number: int, noun: str) -> str:
    """A number and its noun: ``1 node``, ``2 nodes``."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


class ReaderGoneError(Exception):
    """The reader of stdout has closed it (``skyctl … | head``)."""


class Output:
    """The output of one command.

    ``line`` and ``table`` are results (stdout; stderr with ``--json``); ``json`` is the one document. On
    stderr: ``note`` (dropped with ``-q``), ``detail`` (only with ``-v``), ``warn`` and ``error`` always.
    """

    def __init__(self, *, as_json: bool = False, quiet: bool = False, verbose: bool = False) -> None:
        self.as_json = as_json
        self.quiet = quiet
        self.verbose = verbose
        self.has_document = False
        self._stdout = sys.stdout
        self._live: ProgressDisplay | None = None

    @property
    def width(self) -> int | None:
        """Columns of the terminal that results go to; None where they go to a file or pipe."""
        return make_console(self._results).width if self._results.isatty() else None

    def line(self, text: str = "", *, style: str | None = None, wrap: bool = False) -> None:
        """Prints a line of the result. ``wrap``: breaks it between words where the terminal is too narrow."""
        self.pause()
        if wrap and self.width is not None:
            text = wrap_words(strip_control(text), self.width)
        self._print(self._results, text, style)

    def stream(self, text: str) -> None:
        """Prints a piece of a text that comes bit by bit, as it is but for what would control a terminal."""
        self.pause()
        with self._piped(self._results):
            encoding = self._results.encoding or "utf-8"
            clean = "\n".join(strip_control(line) for line in text.split("\n"))
            self._results.write(clean.encode(encoding, "replace").decode(encoding))
            self._results.flush()

    def table(
        self,
        columns: Sequence[str],
        rows: Sequence[Sequence[object]],
        *,
        title: str | None = None,
        optional: Sequence[str] = (),
        shorten: str | None = None,
    ) -> None:
        """A table of the result. A column whose cells are all numbers, or empty, is aligned to the right.

        Args:
            columns: the headings.
            rows: cells, made text with ``str`` (None: empty). No cell loses its end.
            optional: columns left out where a terminal is too narrow, the first of them first.
            shorten: the column whose cells then lose their middle.
        """
        self.pause()
        cells = [["" if cell is None else strip_control(str(cell)) for cell in row] for row in rows]
        stream = self._results
        if stream.isatty():
            columns, cells = _fit_columns(columns, cells, optional, shorten, make_console(stream).width)
        right = [_is_numeric([row[i] for row in cells]) for i in range(len(columns))]
        if stream.isatty():
            from rich import box
            from rich.table import Table
            from rich.text import Text

            table = Table(box=box.SIMPLE_HEAD, title=title, title_justify="left", pad_edge=False)
            for name, to_right in zip(columns, right, strict=True):
                table.add_column(Text(name), justify="right" if to_right else "left", no_wrap=True)
            for row in cells:
                table.add_row(*(Text(cell) for cell in row))
            with self._piped(stream):
                console = make_console(stream)
                console.width = max(console.width, _table_width(columns, cells))
                console.print(table, crop=False)
            return
        widths = [max(len(name), *(len(row[i]) for row in cells), 0) for i, name in enumerate(columns)]
        if title:
            self.line(title)
        for row in [list(columns), *cells]:
            aligned = [
                cell.rjust(width) if to_right else cell.ljust(width)
                for cell, width, to_right in zip(row, widths, right, strict=True)
            ]
            self.line("  ".join(aligned).rstrip())

    def show(self, drawn: RenderableType, plain: Sequence[str]) -> None:
        """Prints a result that rich draws on a terminal; elsewhere its ``plain`` lines."""
        self.pause()
        stream = self._results
        if stream.isatty():
            with self._piped(stream):
                make_console(stream, markup=True).print(drawn)
            return
        for text in plain:
            self.line(text)

    def json(self, document: Any) -> None:
        """Prints the one JSON document, where ``--json`` was given. A record, or plain values; no NaN."""
        if not self.as_json:
            return
        if self.has_document:
            raise RuntimeError("a command prints one JSON document only")
        dump = getattr(document, "model_dump", None)
        value = dump(mode="json") if dump else document
        text = json.dumps(value, indent=2, allow_nan=False, ensure_ascii=False)
        self.has_document = True
        with self._piped(self._stdout):
            # A lone surrogate (a file name that is no UTF-8) must not break the document.
            text = text.encode("utf-8", "replace").decode()
            print(_CONTROL_IN_JSON.sub(_escaped, text), file=self._stdout, flush=True)

    def note(self, text: str, *, wrap: bool = True) -> None:
        """Prints something by the way on stderr; not with ``-q``. ``wrap``: breaks it between words."""
        if not self.quiet:
            self._print(sys.stderr, text, "dim", wrap=wrap)

    def detail(self, text: str) -> None:
        """Prints a detail on stderr, only with ``-v``."""
        if self.verbose:
            self._print(sys.stderr, text, "dim")

    def notes(self, texts: Iterable[str]) -> None:
        """Prints several notes, a line each."""
        for text in texts:
            self.note(text)

    def warn(self, text: str) -> None:
        """Prints ``warning: …`` on stderr, also with ``-q``."""
        self._print(sys.stderr, f"warning: {text}", "yellow", wrap=True)

    def error(self, error: SkyctlError) -> None:
        """Ends the live display and prints ``error: …`` with hint and log on stderr."""
        self.pause()
        self._print(sys.stderr, f"error: {error}", "red")

    def trace(self, text: str) -> None:
        """Prints a traceback on stderr."""
        self._print(sys.stderr, text.rstrip(), None)

    @contextlib.contextmanager
    def progress(self, title: str, *, plain: bool = True) -> Iterator[ProgressDisplay]:
        """A live line on stderr while the block runs (plain lines without a terminal, if ``plain``)."""
        show = not self.quiet and (plain or sys.stderr.isatty())
        display = ProgressDisplay(title, show=show, stream=sys.stderr)
        self._live, before = display, self._live
        try:
            yield display
        finally:
            display.stop()
            self._live = before

    def pause(self) -> None:
        """Hides the live display, so that what follows (a question, an error) begins a line of its own."""
        if self._live:
            self._live.pause()

    def finish(self) -> None:
        """Flushes stdout. Raises ReaderGoneError where nobody reads it any more."""
        with self._piped(self._stdout):
            self._stdout.flush()

    def discard(self) -> None:
        """Sends the rest of stdout nowhere, so that the interpreter's own last flush does not fail, too."""
        with contextlib.suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), self._stdout.fileno())

    @property
    def _results(self) -> TextIO:
        return sys.stderr if self.as_json else sys.stdout

    def _print(self, stream: TextIO, text: str, style: str | None, *, wrap: bool = False) -> None:
        text = strip_control(text)
        with self._piped(stream):
            if self._live and stream.isatty() and self._live.print(text, style, wrap=wrap):
                return
            if stream.isatty() and style:
                from rich.text import Text

                console = make_console(stream)
                text = wrap_words(text, console.width) if wrap else text
                console.print(Text(text, style=style), soft_wrap=True)
            else:
                encoding = stream.encoding or "utf-8"
                print(text.encode(encoding, "replace").decode(encoding), file=stream, flush=True)

    @contextlib.contextmanager
    def _piped(self, stream: TextIO) -> Iterator[None]:
        try:
            with ignoring_closed_terminal():
                yield
        except BrokenPipeError as exc:
            if stream is self._stdout:
                raise ReaderGoneError from exc
            # Nobody reads stderr any more: the work goes on, its result may still be wanted.
            with contextlib.suppress(OSError, ValueError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())


def _escaped(match: re.Match[str]) -> str:
    return f"\\u{ord(match[0]):04x}"


def _table_width(columns: Sequence[str], cells: Sequence[Sequence[str]]) -> int:
    """Terminal columns that rich's table takes: a blank at each side, three between columns."""
    from rich.cells import cell_len

    widest = [max(cell_len(text) for text in texts) for texts in zip(columns, *cells, strict=True)]
    return sum(widest) + 3 * (len(columns) - 1) + 2


def _fit_columns(
    columns: Sequence[str], cells: list[list[str]], optional: Sequence[str], shorten: str | None, width: int
) -> tuple[list[str], list[list[str]]]:
    """(columns, cells) as they fit into ``width``: without optional columns, then with shortened cells."""
    kept = list(columns)
    for name in optional:
        if _table_width(kept, cells) <= width:
            break
        if name in kept:
            at = kept.index(name)
            kept.pop(at)
            cells = [row[:at] + row[at + 1 :] for row in cells]
    over = _table_width(kept, cells) - width
    if over > 0 and shorten in kept:
        at = kept.index(shorten)
        room = max(MIN_CELL_WIDTH, max(len(row[at]) for row in cells) - over)
        cells = [[*row[:at], _shorten_middle(row[at], room), *row[at + 1 :]] for row in cells]
    return kept, cells


def _shorten_middle(text: str, room: int) -> str:
    """``text`` in at most ``room`` characters, an ellipsis in place of its middle."""
    if len(text) <= room:
        return text
    front = room // 3
    return f"{text[:front]}…{text[front + 1 - room :]}"


def _is_numeric(cells: Sequence[str]) -> bool:
    """Whether all cells but empty ones are numbers, so that the column is aligned to the right."""
    filled = [cell for cell in cells if cell not in ("", "-", "–", "—")]
    return bool(filled) and all(re.match(r"^[-+]?[\d.,]+(e[-+]?\d+)?\s*[%×x]?$", cell) for cell in filled)
