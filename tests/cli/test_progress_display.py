"""One line a node while a cluster is measured."""

import io
import time
from types import SimpleNamespace

import pytest
from rich.console import Console
from rich.progress import Progress, TextColumn
from tests.helpers.processes import until

from skyctl.cli import progress_display
from skyctl.cli.progress_display import NodeProgress, ProgressDisplay, wrap_words


def drawn(rows: NodeProgress, height: int = 20) -> str:
    stream = io.StringIO()
    console = Console(file=stream, force_terminal=True, width=90, height=height, color_system=None)
    progress = Progress(TextColumn("{task.description}"), console=console, auto_refresh=False)
    rows.draw(progress)
    rows.draw(progress)
    console.print(progress.get_renderable())
    rows.undraw()
    return stream.getvalue()


def test_busy_done_and_failed() -> None:
    rows = NodeProgress()
    assert rows.note("n1", "block.0.mlp", 0.5) is None
    assert rows.note("node2", "starting", 0.0) is None
    assert rows.note("n3", "ready", 0.0) is None
    assert rows.note("node2", "the disk is [full]\nmore", -1.0) == "node2: failed: the disk is [full]"
    assert rows.note("node2", "late news", 0.3) is None
    assert rows.note("n3", "measured", 1.0) == "n3: measured (1 of 3)"
    assert rows.note("n3", "measured", 1.0) is None
    assert rows.note("links", "measured", 1.0) == "links: measured"
    lines = drawn(rows).split("\n")
    assert "n1    ████████░░░░░░░░  50% block.0.mlp" in lines[0]
    assert "✗ node2 the disk is [full]" in lines[1]
    assert "✓ n3    measured" in lines[2]
    assert drawn(rows).count("n1") == 1, "drawn again after a pause"


def test_where_there_is_no_room_what_is_done_makes_it() -> None:
    rows = NodeProgress()
    for number in range(30):
        rows.note(f"n{number:02}", *(("measured", 1.0) if number < 25 else ("starting", 0.0)))
    shown = drawn(rows, height=10)
    assert "n25" in shown
    assert "n00" not in shown


def test_piped_there_is_a_line_for_each_end() -> None:
    stream = io.StringIO()
    ticker = ProgressDisplay("probe", show=True, stream=stream)
    for step in range(100):
        ticker.node("n1", f"layer {step}", step / 100)
    ticker.node("n1", "measured", 1.0)
    ticker.node("n2", "unreachable\x1b[2J", -1.0)
    assert stream.getvalue().splitlines() == [
        "probe: n1: layer 0",
        "probe: n1: measured (1 of 1)",
        "probe: n2: failed: unreachable",
    ]


def test_quiet_says_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    stream = io.StringIO()
    ProgressDisplay("probe", show=False, stream=stream).node("n1", "measured", 1.0)
    assert stream.getvalue() == ""
    assert capsys.readouterr().out == ""


def test_a_long_note_is_broken_between_words_and_a_path_is_left_whole() -> None:
    path = "/home/ada/.local/state/skyctl/runs/20261121-063012-ab12/attempts/1/logs"
    text = f"what is said of a run that has ended stands in\n{path}, a file for each rank"
    assert wrap_words(text, 30).split("\n") == [
        "what is said of a run that has",
        "  ended stands in",
        f"{path},",
        "  a file for each rank",
    ]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_notes_beside_the_live_line_are_broken_between_words(monkeypatch: pytest.MonkeyPatch) -> None:
    """A command to be copied is not: the terminal breaks that."""
    monkeypatch.setenv("COLUMNS", "30")
    stream = Terminal()
    display = ProgressDisplay("probe", show=True, stream=stream)
    try:
        assert display.print("what is said of a run that has ended", None, wrap=True)
        assert display.print("next: skyctl plan train.py -o plan.json", None, wrap=False)
    finally:
        display.stop()
    assert "what is said of a run that has\n  ended\n" in stream.getvalue()
    assert "next: skyctl plan train.py -o plan.json\n" in stream.getvalue()


def test_piped_what_lasts_is_written_although_it_came_soon_after_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its clock stands still: soon is soon on a busy machine, too."""
    monkeypatch.setattr(progress_display, "PLAIN_PROGRESS_INTERVAL_S", 0.5)
    monkeypatch.setattr(progress_display, "time", SimpleNamespace(monotonic=lambda: 0.0))
    stream = io.StringIO()
    ticker = ProgressDisplay("launch", show=True, stream=stream)
    for text in ("step 40", "gathering the trained weights", "copying the last checkpoint"):
        ticker(text)
    until(lambda: "copying" in stream.getvalue())
    ticker("the end")
    ticker.stop()
    time.sleep(0.6)
    assert stream.getvalue().splitlines() == ["launch: step 40", "launch: copying the last checkpoint"]
