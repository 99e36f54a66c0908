"""A terminal's display while a command works: a live line, and one line a node; plain lines when piped."""

from __future__ import annotations

import re
import textwrap
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TextIO

from skyctl.terminal import ignoring_closed_terminal

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.progress import Progress, TaskID

PLAIN_PROGRESS_INTERVAL_S = 5.0
"""Without a terminal, a progress that changes often is written this often; what lasts is written, too."""
BAR_WIDTH = 16
LINK_ROWS = ("links", "lines", "uplinks")
"""Rows of what is measured between nodes; they are not counted as nodes."""
RESERVED_LINES = 3
"""Lines of the terminal kept free: the live line, and the cursor's."""

# Text from a node is shown to a person: it must neither control their terminal nor turn a line's direction.
_STRING_END = r"(?:\x07|\x1b\\|\x9c|\Z)"
_CONTROL = re.compile(
    r"(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]"  # CSI: colours, the cursor, the screen
    rf"|(?:\x1b[\]PX^_]|[\x9d\x90\x98\x9e\x9f])[^\x07\x1b\x9c]*{_STRING_END}"  # OSC, DCS, …: title, clipboard
    r"|[\x00-\x08\x0b-\x1f\x7f-\x9f]|[\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]"
)


def strip_control(text: str) -> str:
    """``text`` without terminal control sequences and bidirectional controls; line breaks and tabs stay."""
    return _CONTROL.sub("", text)


def make_console(stream: TextIO, *, markup: bool = False) -> Console:
    """A rich console on ``stream`` that colours nothing by itself and prints no control of others."""
    from rich.console import Console, ConsoleOptions
    from rich.segment import Segment

    class CleaningConsole(Console):
        """Cleans each segment that it draws: some hold names and messages of nodes."""

        def render(
            self, renderable: RenderableType, options: ConsoleOptions | None = None
        ) -> Iterable[Segment]:
            for text, style, control in super().render(renderable, options):
                yield Segment(text if control else strip_control(text), style, control)

    return CleaningConsole(file=stream, highlight=False, markup=markup, emoji=False)


def wrap_words(text: str, width: int) -> str:
    """``text`` with each line broken between words to ``width`` columns; a longer word stays whole."""
    return "\n".join(
        textwrap.fill(line, width, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)
        for line in text.splitlines()
    )


def _escape(text: str) -> str:
    from rich.markup import escape

    return escape(text)


class ProgressDisplay:
    """A command's progress. Call it with a text, and with how much of how much is done where known.

    ``above``: what is drawn over the live line on a terminal, asked for each time that it is drawn.
    """

    def __init__(self, title: str, *, show: bool, stream: TextIO) -> None:
        self.title = strip_control(title)
        self.show = show
        self.stream = stream
        self._rich: Progress | None = None
        self._bar: TaskID | None = None
        self._last = ("", float("-inf"))
        self._held: tuple[str, str] | None = None
        self._timer: threading.Timer | None = None
        self._lock = threading.RLock()
        self._stopped = False
        self._rows = NodeProgress()
        self.above: Callable[[], RenderableType] | None = None
        if show and stream.isatty():
            self._start()

    @property
    def drawn(self) -> bool:
        """Whether it is drawn live, not printed as lines."""
        return self.show and self.stream.isatty()

    def __call__(self, text: str, done: float | None = None, total: float | None = None) -> None:
        """Shows what is going on now. Thread-safe."""
        if not self.show or self._stopped:
            return
        text = strip_control(text)
        if self._rich is None and self.stream.isatty():
            self._start()
        if self._rich is not None and self._bar is not None:
            share = f" ({done:g}/{total:g})" if done is not None and total else ""
            self._rich.update(self._bar, description=_escape(f"{self.title}: {text}{share}"))
            return
        share = f" ({done:g}/{total:g})" if done is not None and total else ""
        with self._lock:
            wait_s = self._last[1] + PLAIN_PROGRESS_INTERVAL_S - time.monotonic()
            if text == self._last[0]:
                self._held = None
            elif wait_s <= 0 or (done is not None and done == total):
                self._print_line(text, share)
            else:
                self._hold(text, share, wait_s)

    def _print_line(self, text: str, share: str) -> None:
        self._held, self._last = None, (text, time.monotonic())
        print(f"{self.title}: {text}{share}", file=self.stream, flush=True)

    def _hold(self, text: str, share: str, wait_s: float) -> None:
        """Prints it when it is due, or what has come in its place by then."""
        self._held = (text, share)
        if self._timer is None:
            self._timer = threading.Timer(wait_s, self._print_held)
            self._timer.daemon = True
            self._timer.start()

    def _print_held(self) -> None:
        with self._lock, suppress(ValueError):  # the stream is closed
            self._timer = None
            if self._held is not None:
                self._print_line(*self._held)

    def node(self, name: str, what: str, share: float) -> None:
        """Shows what one of several nodes is doing.

        Args:
            what: its work; how it ended; why it failed.
            share: below 1 what is done, 1 it has ended, below 0 it has failed.
        """
        if not self.show or self._stopped:
            return
        what = strip_control(what)
        ended = self._rows.note(strip_control(name), what, share)
        if self._rich is None and self.stream.isatty():
            self._start()
        if self._rich is not None:
            with ignoring_closed_terminal():
                self._rows.draw(self._rich)
        elif ended is not None:
            with self._lock:
                self._held = None
                print(f"{self.title}: {ended}", file=self.stream, flush=True)
        elif share >= 0:
            self(f"{name}: {what}" + (f" {share:.0%}" if share else ""))

    def print(self, text: str, style: str | None, *, wrap: bool) -> bool:
        """Prints a line above the live one; False where there is no live one."""
        if self._rich is None or self._stopped:
            return False
        from rich.text import Text

        console = self._rich.console
        text = wrap_words(text, console.width) if wrap else text  # else the terminal breaks it, for copying
        console.print(Text(text, style=style or ""), soft_wrap=True)
        return True

    def stop(self) -> None:
        """Ends the live line. May be called twice."""
        with self._lock:
            self._stopped, self._held = True, None
            if self._timer is not None:
                self._timer.cancel()
        self.pause()

    def pause(self) -> None:
        """Takes the live line away until it is called again."""
        rich, self._rich = self._rich, None
        if rich is not None:
            with ignoring_closed_terminal():
                rich.stop()
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
            console=make_console(self.stream),
            transient=True,
            # Results go where they belong, not to the console of the live line.
            redirect_stdout=False,
            redirect_stderr=False,
        )
        self._bar = self._rich.add_task(_escape(self.title), total=None)
        with ignoring_closed_terminal():
            self._rich.start()


@dataclass
class NodeStatus:
    """The state of a node: what it is doing, or how it ended.

    ``share``: below 1 what is done of its work, 1 it has ended, below 0 it has failed. ``task``: its line in
    the live display, where there is one.
    """

    what: str
    share: float
    task: TaskID | None = None

    @property
    def state(self) -> Literal["failed", "done", "busy"]:
        """The meaning of the share: the node has failed, is done, or is still busy."""
        if self.share < 0:
            return "failed"
        return "done" if self.share >= 1 else "busy"


class NodeProgress:
    """The lines of all nodes that have reported, in the order of their first report."""

    def __init__(self) -> None:
        self._rows: dict[str, NodeStatus] = {}

    def note(self, name: str, what: str, share: float) -> str | None:
        """Records what a node reports.

        Returns:
            A line to print where nothing is drawn: how the node ended, once. None: nothing to print.
        """
        row = self._rows.setdefault(name, NodeStatus("", 0.0))
        before = row.state
        if before == "failed":
            return None
        first, *_ = what.splitlines() or [""]
        row.what, row.share = first, share
        if row.state in (before, "busy"):
            return None
        if row.state == "failed":
            return f"{name}: failed: {first}"
        nodes = [other for key, other in self._rows.items() if key not in LINK_ROWS]
        done = sum(1 for other in nodes if other.state == "done")
        return f"{name}: {row.what}" + (f" ({done} of {len(nodes)})" if name not in LINK_ROWS else "")

    def draw(self, progress: Progress) -> None:
        """Draws every node's line; leaves out finished nodes if the terminal has too few lines."""
        room = progress.console.height - RESERVED_LINES
        crowded = len(self._rows) > room
        for name, row in self._rows.items():
            if row.task is None:
                row.task = progress.add_task("", total=1)
            progress.update(
                row.task,
                description=_format_row(name, row, max(map(len, self._rows))),
                completed=0 if row.state == "busy" else 1,
                visible=not (crowded and row.state == "done"),
            )

    def undraw(self) -> None:
        """Forgets the lines of a display that was taken away; the next ``draw`` adds new ones."""
        for row in self._rows.values():
            row.task = None


def _format_row(name: str, row: NodeStatus, width: int) -> str:
    label = _escape(f"{name:<{width}}")
    if row.state == "failed":
        return f"[red]✗[/red] {label} {_escape(row.what)}"
    if row.state == "done":
        return f"[green]✓[/green] {label} {_escape(row.what)}"
    full = round(max(0.0, min(1.0, row.share)) * BAR_WIDTH)
    return f"  {label} {'█' * full}{'░' * (BAR_WIDTH - full)} {row.share:4.0%} {_escape(row.what)}"
