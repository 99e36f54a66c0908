"""A node's words are shown, and control nothing: no title, clipboard, screen or direction of writing."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Callable

import pytest
from rich.table import Table

from skyctl.cli.command_output import Output
from skyctl.cli.progress_display import strip_control
from skyctl.errors import SkyctlError

Streams = Callable[[], tuple[io.StringIO, io.StringIO]]

ATTACKS = {
    "title": "\x1b]0;owned\x07",
    "clipboard": "\x1b]52;c;cm0gLXJmIH4=\x1b\\",
    "clipboard, C1": "\x9d52;c;cm0gLXJmIH4=\x9c",
    "screen": "\x1b[2J\x1b[H",
    "screen, C1": "\x9b2J",
    "device control": "\x1bPq#0\x1b\\",
    "without an end": "\x1b]52;c;cm0gLXJmIH4=",
    "direction": "\u202egnp.exe\u202c",
    "isolate": "\u2066a\u2069\u200f",
    "backspace": "GPU\x08\x08\x08",
}
C1 = [chr(i) for i in range(0x7F, 0xA0)]
FORBIDDEN = ["\x1b]", "\x1bP", "\x1b[2J", "\x1b[H", "\u202e", "\u2066", "\u200f", "\x08", *C1]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(params=[Terminal, io.StringIO], ids=["terminal", "pipe"])
def streams(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Streams:
    def redirect() -> tuple[io.StringIO, io.StringIO]:
        streams = request.param(), request.param()
        monkeypatch.setenv("TERM", "xterm-256color")
        monkeypatch.setattr(sys, "stdout", streams[0])
        monkeypatch.setattr(sys, "stderr", streams[1])
        return streams

    return redirect


@pytest.mark.parametrize("attack", ATTACKS.values(), ids=list(ATTACKS))
def test_nothing_printed_controls_the_terminal(attack: str, streams: Streams) -> None:
    name = f"RTX{attack}4090"
    stdout, stderr = streams()
    out = Output(verbose=True)
    out.line(name)
    out.line(name, style="bold")
    out.line(name, wrap=True)
    out.table(["device"], [[name]], title="devices")
    drawn = Table("device", title=name)
    drawn.add_row(name, style="red")
    out.show(drawn, [name])
    out.note(name)
    out.detail(name)
    out.warn(name)
    out.error(SkyctlError(name, hint=name))
    with out.progress(name) as progress:
        progress(name, 1, 2)
        progress.node(name, name, 0.5)
        progress.above = lambda: drawn
        progress(name)
        out.note(name)
    text = stdout.getvalue() + stderr.getvalue()
    assert "RTX" in text
    for sequence in FORBIDDEN:
        assert sequence not in text.replace("\x1b[2K", ""), f"{sequence!r} is printed"


@pytest.mark.parametrize("attack", ATTACKS.values(), ids=list(ATTACKS))
def test_json_carries_it_escaped(attack: str, streams: Streams) -> None:
    stdout, _ = streams()
    Output(as_json=True).json({"device": f"RTX{attack}4090 – µs 自"})
    text = stdout.getvalue()
    assert json.loads(text) == {"device": f"RTX{attack}4090 – µs 自"}
    assert "– µs 自" in text
    assert not any(sequence in text for sequence in FORBIDDEN)


def test_line_breaks_and_ordinary_letters_stay() -> None:
    text = "a\tb\nc é 自 \U0001f600 – \u00a0x"
    assert strip_control(text) == text
