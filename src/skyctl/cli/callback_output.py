"""A command's output, passed to a function line by line: for Python code that calls the command."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from skyctl.cli.command_output import Output
from skyctl.cli.progress_display import ProgressDisplay, strip_control


class CallbackOutput(Output):
    """An ``Output`` that prints nothing.

    Args:
        tell: told each line, without its line break; None: nobody is.
    """

    def __init__(self, tell: Callable[[str], None] | None) -> None:
        super().__init__(quiet=tell is None)
        self._stream = _LineStream(tell or (lambda _line: None))
        self._stdout = self._stream

    @contextmanager
    def progress(self, title: str, *, plain: bool = True) -> Iterator[ProgressDisplay]:
        """Yields a display that prints a line now and then, in place of a terminal's live line."""
        display = ProgressDisplay(title, show=plain and not self.quiet, stream=self._stream)
        try:
            yield display
        finally:
            display.stop()

    def _print(self, stream: object, text: str, style: str | None, *, wrap: bool = False) -> None:  # noqa: ARG002
        print(strip_control(text), file=self._stream)


class _LineStream(io.StringIO):
    """No terminal: each line that is written is told."""

    def __init__(self, tell: Callable[[str], None]) -> None:
        super().__init__()
        self._tell, self._rest = tell, ""

    def write(self, text: str) -> int:
        *lines, self._rest = (self._rest + text).split("\n")
        for line in lines:
            self._tell(line)
        return len(text)
