"""A run's files, read while another process writes them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from skyctl.errors import InputError
from skyctl.files import RunPaths, run_folder, write_atomic
from skyctl.records.base import timestamp
from skyctl.records.run_state import RunAttempt, RunState
from skyctl.run.callbacks import RunCallbacks
from skyctl.supervision.run_logs import (
    FileTail,
    LogFollower,
    MetricsFollower,
    SupervisorLogLine,
    log_supervisor,
    parse_supervisor_line,
    with_supervisor_log,
)


def state(paths: RunPaths, *attempts: tuple[str, ...]) -> RunState:
    return RunState(
        run_id=paths.run_id,
        created=timestamp("milliseconds"),
        written=timestamp("milliseconds"),
        workload="w",
        cluster="here",
        steps=10,
        attempts=tuple(
            RunAttempt(number=n, began=timestamp("milliseconds"), why="x", from_step=0, devices=devices)
            for n, devices in enumerate(attempts, 1)
        ),
    )


def test_a_tail_gives_whole_lines_as_they_come(tmp_path: Path) -> None:
    path = tmp_path / "log"
    tail = FileTail(path)
    assert tail.lines() == []
    path.write_text("one\ntwo\nth")
    assert tail.lines() == ["one", "two"]
    path.write_text("one\ntwo\nthree\n")
    assert tail.lines() == ["three"]
    path.write_text("one\n")  # cut, and written again
    assert tail.lines() == []
    path.write_text("one\ntwo\nthree\nfour\n")
    assert tail.lines() == ["four"]


@pytest.mark.parametrize(("last", "wanted"), [(0, []), (1, ["c"]), (2, ["b", "c"]), (9, ["a", "b", "c"])])
def test_the_last_lines(tmp_path: Path, last: int, wanted: list[str]) -> None:
    path = tmp_path / "log"
    path.write_text("a\nb\nc\n")
    assert FileTail(path, last).lines() == wanted
    path.write_text("x" * 70_000 + "\n" + "".join(f"{n}\n" for n in range(40_000)))
    assert FileTail(path, 40_000).lines()[0] == "0"
    assert FileTail(tmp_path / "none", last).lines() == []


def test_logs_over_attempts() -> None:
    paths = RunPaths.new()
    paths.log(0).write_text("zero\n")
    paths.log(1).write_text("one\n")
    (paths.logs / "keeper-b.log").write_text("kept\n")
    first = state(paths, ("a/cpu:0", "b/cpu:0"))
    logs = LogFollower(paths, first)
    assert [(line.rank, line.node, line.text) for line in logs.lines()] == [
        (None, "b", "kept"),
        (0, "a", "zero"),
        (1, "b", "one"),
    ]
    second = RunPaths(paths.run_id, 2).create()
    second.log(0).write_text("again\n")
    logs.update(state(second, ("a/cpu:0", "b/cpu:0"), ("b/cpu:0",)))
    assert [(line.attempt, line.rank, line.node, line.text) for line in logs.lines()] == [
        (2, 0, "b", "again")
    ]
    both = state(second, ("a/cpu:0", "b/cpu:0"), ("b/cpu:0",))
    assert [line.text for line in LogFollower(second, both, only="1", attempt=1).lines()] == ["one"]
    assert [line.text for line in LogFollower(second, both, only="b", attempt=1).lines()] == ["kept", "one"]
    assert [line.text for line in LogFollower(second, both).lines()] == ["again"]
    with pytest.raises(InputError, match="ranks 0 to 1 on a, b"):
        LogFollower(second, both, only="c")
    with pytest.raises(InputError, match="no attempt 7; its newest is 2"):
        LogFollower(second, both, attempt=7)


def test_figures_that_begin_again_earlier() -> None:
    paths = RunPaths.new()
    figures = MetricsFollower(paths)
    assert figures.lines() == []
    lines = [json.dumps({"step": step, "loss": 1.0}) + "\n" for step in range(6)]
    paths.metrics.write_text("".join(lines[:5]) + '{"step": 5, "lo')
    assert [line["step"] for line in figures.lines()] == [0, 1, 2, 3, 4]
    write_atomic(paths.metrics, "".join(lines[:3]))
    assert figures.lines() == []
    with paths.metrics.open("a") as file:
        file.writelines(lines[3:])
    assert [line["step"] for line in figures.lines()] == [3, 4, 5]


def test_what_a_supervisor_says_is_kept(tmp_path: Path) -> None:
    told: list[str] = []
    path = tmp_path / "supervisor.log"
    watcher = with_supervisor_log(RunCallbacks(phase=told.append, warn=told.append), path)
    watcher.phase("training")
    watcher.warn("node b: away\nsince a while")
    log_supervisor(path, "error", "over: out")
    lines = [parse_supervisor_line(line) for line in FileTail(path).lines()]
    assert [(one.kind, one.text) for one in lines] == [
        ("phase", "training"),
        ("warning", "node b: away"),
        ("", "    since a while"),
        ("error", "over: out"),
    ]
    assert told == ["training", "node b: away\nsince a while"]
    assert parse_supervisor_line("Traceback (most recent call last):") == SupervisorLogLine(
        "", "", "Traceback (most recent call last):"
    )
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_run_is_named_by_its_beginning_or_end(tmp_path: Path) -> None:
    made = [RunPaths(name).create() for name in ("20261121-063012-ab12", "20261121-063012-cd34")]
    assert run_folder("20261121-063012-ab12") == made[0].folder
    assert run_folder("cd34") == made[1].folder
    assert run_folder("20261121-063012-c") == made[1].folder
    assert run_folder() == made[1].folder
    assert run_folder(str(tmp_path)) == tmp_path
    with pytest.raises(InputError, match="any of 2 runs: 20261121-063012-ab12, 20261121-063012-cd34"):
        run_folder("2026")
    with pytest.raises(InputError, match="no run 'zz'"):
        run_folder("zz")
    with pytest.raises(InputError):
        run_folder("")
