"""What a command prints: results on stdout, all else on stderr; rich on a terminal, plain when piped."""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
import textwrap
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TextIO

from skyctl.cli.rows import Rows
from skyctl.errors import SkyctlError

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.progress import Progress, TaskID

PLAIN_PROGRESS_EVERY_S = 5.0
"""Without a terminal, a progress that changes often is written this often."""
SHORTEST = 10
"""Characters that are left of a shortened cell at least."""

# What a node sends is shown to a person: nothing in it may steer their terminal.
_CONTROL = re.compile(
    r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)?|[\x00-\x08\x0b-\x1f\x7f-\x9f]"
)


class ReaderGoneError(Exception):
    """Whoever read our stdout has closed it (``skyctl … | head``)."""


def clean(text: str) -> str:
    """``text`` without terminal control sequences; line breaks and tabs stay."""
    return _CONTROL.sub("", text)


class Output:
    """One command's output.

    ``line`` and ``table`` are results (stdout; stderr with ``--json``); ``json`` is the one document;
    ``note`` is by the way (dropped with ``-q``), ``detail`` only with ``-v``, ``warn`` always on stderr.
    """

    def __init__(self, *, as_json: bool = False, quiet: bool = False, verbose: bool = False) -> None:
        self.as_json = as_json
        self.quiet = quiet
        self.verbose = verbose
        self.has_document = False
        self._stdout = sys.stdout
        self._live: Ticker | None = None

    # results

    @property
    def width(self) -> int | None:
        """How many columns the result's terminal has; None where it goes elsewhere."""
        return _console(self._results).width if self._results.isatty() else None

    def line(self, text: str = "", *, style: str | None = None, wrap: bool = False) -> None:
        """A line of the result. ``wrap``: on a terminal that is too narrow it is broken between words."""
        self.pause()
        if wrap and self.width is not None:
            text = textwrap.fill(
                clean(text),
                self.width,
                subsequent_indent="  ",
                break_long_words=False,
                break_on_hyphens=False,
            )
        self._print(self._results, text, style)

    def table(
        self,
        columns: Sequence[str],
        rows: Sequence[Sequence[object]],
        *,
        title: str | None = None,
        spare: Sequence[str] = (),
        shorten: str | None = None,
    ) -> None:
        """A table of the result. A column whose cells are all numbers, or empty, is set to the right.

        ``columns`` are headings; cells are made text with ``str`` (None: empty). Nothing is cut off: where a
        terminal is too narrow, the columns ``spare`` are left out, the first of them first, then the cells of
        the column ``shorten`` lose their middle.
        """
        self.pause()
        cells = [["" if cell is None else clean(str(cell)) for cell in row] for row in rows]
        stream = self._results
        if stream.isatty():
            columns, cells = _fitting(columns, cells, spare, shorten, _console(stream).width)
        right = [_numeric([row[i] for row in cells]) for i in range(len(columns))]
        if stream.isatty():
            from rich import box
            from rich.table import Table
            from rich.text import Text

            made = Table(box=box.SIMPLE_HEAD, title=title, title_justify="left", pad_edge=False)
            for name, to_right in zip(columns, right, strict=True):
                made.add_column(Text(name), justify="right" if to_right else "left", no_wrap=True)
            for row in cells:
                made.add_row(*(Text(cell) for cell in row))
            with self._piped(stream):
                console = _console(stream)
                console.width = max(console.width, _table_width(columns, cells))
                console.print(made, crop=False)
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
        """A result drawn with rich on a terminal, as plain lines elsewhere."""
        self.pause()
        stream = self._results
        if stream.isatty():
            with self._piped(stream):
                _console(stream, markup=True).print(drawn)
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
            print(text.encode("utf-8", "replace").decode(), file=self._stdout, flush=True)

    # beside the result

    def note(self, text: str) -> None:
        """By the way; dropped with ``-q``."""
        if not self.quiet:
            self._print(sys.stderr, text, "dim")

    def detail(self, text: str) -> None:
        """Only with ``-v``."""
        if self.verbose:
            self._print(sys.stderr, text, "dim")

    def warn(self, text: str) -> None:
        """``warning: …``."""
        self._print(sys.stderr, f"warning: {text}", "yellow")

    def error(self, error: SkyctlError) -> None:
        """``error: …`` with hint and log, and the live display ended."""
        self.pause()
        self._print(sys.stderr, f"error: {error}", "red")

    def trace(self, text: str) -> None:
        """A traceback."""
        self._print(sys.stderr, text.rstrip(), None)

    @contextlib.contextmanager
    def progress(self, title: str, *, plain: bool = True) -> Iterator[Ticker]:
        """While the block runs, a live line on stderr (no terminal: plain lines, if ``plain``)."""
        show = not self.quiet and (plain or sys.stderr.isatty())
        ticker = Ticker(title, show=show, stream=sys.stderr)
        self._live, before = ticker, self._live
        try:
            yield ticker
        finally:
            ticker.stop()
            self._live = before

    # housekeeping

    def pause(self) -> None:
        """Hides the live display, so that what follows (a question, an error) stands on a clean line."""
        if self._live:
            self._live.pause()

    def finish(self) -> None:
        """Everything written has reached its reader. Raises ReaderGoneError where there is none."""
        with self._piped(self._stdout):
            self._stdout.flush()

    def discard(self) -> None:
        """The reader has gone: the interpreter's own last flush must not complain again."""
        with contextlib.suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), self._stdout.fileno())

    @property
    def _results(self) -> TextIO:
        return sys.stderr if self.as_json else sys.stdout

    def _print(self, stream: TextIO, text: str, style: str | None) -> None:
        text = clean(text)
        with self._piped(stream):
            if self._live and stream.isatty() and self._live.print(text, style):
                return
            if stream.isatty() and style:
                from rich.text import Text

                _console(stream).print(Text(text, style=style), soft_wrap=True)
            else:
                encoding = stream.encoding or "utf-8"
                print(text.encode(encoding, "replace").decode(encoding), file=stream, flush=True)

    @contextlib.contextmanager
    def _piped(self, stream: TextIO) -> Iterator[None]:
        try:
            yield
        except BrokenPipeError as exc:
            if stream is self._stdout:
                raise ReaderGoneError from exc
            # Nobody reads stderr any more: the work goes on, its result may still be wanted.
            with contextlib.suppress(OSError, ValueError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())


class Ticker:
    """A command's progress. Call it with a text, and with how much of how much is done where known.

    ``above``: what is drawn over the live line on a terminal, asked for each time that it is drawn.
    """

    def __init__(self, title: str, *, show: bool, stream: TextIO) -> None:
        self.title = title
        self.show = show
        self.stream = stream
        self._rich: Progress | None = None
        self._bar: TaskID | None = None
        self._last = ("", float("-inf"))
        self._stopped = False
        self._rows = Rows()
        self.above: Callable[[], RenderableType] | None = None
        if show and stream.isatty():
            self._start()

    @property
    def drawn(self) -> bool:
        """Whether it is a live display, not lines."""
        return self.show and self.stream.isatty()

    def __call__(self, text: str, done: float | None = None, total: float | None = None) -> None:
        """Says what is going on now. Thread-safe."""
        if not self.show or self._stopped:
            return
        text = clean(text)
        if self._rich is None and self.stream.isatty():
            self._start()
        if self._rich is not None and self._bar is not None:
            share = f" ({done:g}/{total:g})" if done is not None and total else ""
            self._rich.update(self._bar, description=_escape(f"{self.title}: {text}{share}"))
            return
        now = time.monotonic()
        finished = done is not None and done == total
        if text != self._last[0] and (now - self._last[1] >= PLAIN_PROGRESS_EVERY_S or finished):
            self._last = (text, now)
            share = f" ({done:g}/{total:g})" if done is not None and total else ""
            print(f"{self.title}: {text}{share}", file=self.stream, flush=True)

    def node(self, name: str, what: str, share: float) -> None:
        """One of several nodes: what it is at, and how much is done (below 0: it failed; ``what`` is why)."""
        if not self.show or self._stopped:
            return
        what = clean(what)
        ended = self._rows.note(clean(name), what, share)
        if self._rich is None and self.stream.isatty():
            self._start()
        if self._rich is not None:
            self._rows.draw(self._rich)
        elif ended is not None:
            print(f"{self.title}: {ended}", file=self.stream, flush=True)
        elif share >= 0:
            self(f"{name}: {what}" + (f" {share:.0%}" if share else ""))

    def print(self, text: str, style: str | None) -> bool:
        """A line that stays, above the live one; False where there is no live one."""
        if self._rich is None or self._stopped:
            return False
        from rich.text import Text

        self._rich.console.print(Text(text, style=style or ""), soft_wrap=True)
        return True

    def stop(self) -> None:
        """Ends the live line. May be called twice."""
        self._stopped = True
        self.pause()

    def pause(self) -> None:
        """Takes the live line away until it is called again."""
        if self._rich is not None:
            self._rich.stop()
            self._rich = None
            self._rows.undraw()

    def _start(self) -> None:
        from rich.progress import Progress, SpinnerColumn, TextColumn
        from rich.progress import TimeElapsedColumn as Elapsed
        from rich.table import Column

        ticker = self

        class Live(Progress):
            def get_renderables(self) -> Iterator[RenderableType]:
                if ticker.above is not None:
                    yield ticker.above()
                yield from super().get_renderables()

        self._rich = Live(
            SpinnerColumn(),
            TextColumn("{task.description}", table_column=Column(no_wrap=True, overflow="ellipsis")),
            Elapsed(),
            console=_console(self.stream),
            transient=True,
            # Results go where they belong, not to the console of the live line.
            redirect_stdout=False,
            redirect_stderr=False,
        )
        self._bar = self._rich.add_task(_escape(self.title), total=None)
        self._rich.start()


def _console(stream: TextIO, *, markup: bool = False) -> Console:
    from rich.console import Console

    return Console(file=stream, highlight=False, markup=markup, emoji=False)


def _escape(text: str) -> str:
    from rich.markup import escape

    return escape(text)


def _table_width(columns: Sequence[str], cells: Sequence[Sequence[str]]) -> int:
    """How many columns of a terminal rich's table takes: a blank at each side, three between."""
    from rich.cells import cell_len

    widest = [max(cell_len(text) for text in texts) for texts in zip(columns, *cells, strict=True)]
    return sum(widest) + 3 * (len(columns) - 1) + 2


def _fitting(
    columns: Sequence[str], cells: list[list[str]], spare: Sequence[str], shorten: str | None, width: int
) -> tuple[list[str], list[list[str]]]:
    """(columns, cells) without what has no room in ``width``."""
    kept = list(columns)
    for name in spare:
        if _table_width(kept, cells) <= width:
            break
        if name in kept:
            at = kept.index(name)
            kept.pop(at)
            cells = [row[:at] + row[at + 1 :] for row in cells]
    over = _table_width(kept, cells) - width
    if over > 0 and shorten in kept:
        at = kept.index(shorten)
        room = max(SHORTEST, max(len(row[at]) for row in cells) - over)
        cells = [[*row[:at], _without_middle(row[at], room), *row[at + 1 :]] for row in cells]
    return kept, cells


def _without_middle(text: str, room: int) -> str:
    if len(text) <= room:
        return text
    front = room // 3
    return f"{text[:front]}…{text[front + 1 - room :]}"


def _numeric(cells: Sequence[str]) -> bool:
    filled = [cell for cell in cells if cell not in ("", "-", "–", "—")]
    return bool(filled) and all(re.match(r"^[-+]?[\d.,]+(e[-+]?\d+)?\s*[%×x]?$", cell) for cell in filled)
