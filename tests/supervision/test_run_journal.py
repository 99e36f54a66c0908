"""The journal of a run: its writer may be killed at any instant, nothing is missing or twice."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from skyctl.errors import RecordError, SkyctlError
from skyctl.files import RunPaths, read_record
from skyctl.records.base import timestamp
from skyctl.records.run_state import RunAttempt, RunState
from skyctl.run.callbacks import StepProgress
from skyctl.supervision.background_supervisor import BACKGROUND_MODULE
from skyctl.supervision.commit_log import CommitLog
from skyctl.supervision.run_journal import RunJournal


def state(paths: RunPaths, **more: object) -> RunState:
    return RunState(
        run_id=paths.run_id,
        created=timestamp("milliseconds"),
        written=timestamp("milliseconds"),
        workload="gpt:layers=1",
        cluster="here",
        steps=100,
        attempts=(RunAttempt(number=1, began=timestamp("milliseconds"), why="the beginning", from_step=0),),
        **more,
    )


def progress(step: int) -> StepProgress:
    return StepProgress(
        step=step, steps=100, loss=1.0 / (step + 1), iteration_s=0.1, samples_per_s=80.0, left_s=None
    )


class Line:
    """A node's session as the ledger sees it: it keeps events until they are handled."""

    def __init__(self, folder: Path, name: str = "s-one") -> None:
        self.id = name
        self._told = folder / f"{name}.handled"
        self.watermark = int(self._told.read_text()) if self._told.exists() else 0
        self._beyond: set[int] = set()

    def acknowledge(self, seq: int) -> None:
        self._beyond.add(seq)
        while self.watermark + 1 in self._beyond:
            self.watermark += 1
        draft = self._told.with_suffix(".new")
        draft.write_text(str(self.watermark))
        draft.replace(self._told)


def write(folder: Path, run_id: str) -> None:
    """As a supervisor does: what the nodes still keep is taken, from where the last one got."""
    ledger = RunJournal.open(run_id, lambda _: None)
    lines = {name: Line(folder, f"s-{name}") for name in ("one", "two")}
    ledger.sessions = lines
    starts = {name: ledger.upto(line.id) for name, line in lines.items()}
    for name, line in lines.items():
        assert line.watermark <= starts[name], (name, line.watermark, starts[name])
    for rank, event in ledger.past():
        if rank == 1 and event["step"] >= ledger.reported:
            ledger.step(progress(event["step"]))
    for node, rank, event in script():
        if event["seq"] <= starts[node]:
            continue
        if ledger.heard(node, f"rank-{rank}", event) and event["event"] == "step" and rank == 1:
            ledger.step(progress(event["step"]))
        time.sleep(0.0001)
    ledger.close()


DRIVER = """
import os, random, signal, sys, time
from pathlib import Path
sys.path.insert(0, sys.argv[2])
import test_run_journal
from skyctl.supervision import run_journal

run_journal.FLUSH_INTERVAL_S = 0.001
order = random.Random()
for kills in range(51):
    pid = os.fork()
    if not pid:
        try:
            test_run_journal.write(Path(sys.argv[1]), sys.argv[3])
        except BaseException as exc:
            print(repr(exc), flush=True)
            os._exit(1)
        os._exit(0)
    if kills < 50:
        time.sleep(order.uniform(0, 0.03))
        os.kill(pid, signal.SIGKILL)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert status in (0, -signal.SIGKILL), status
"""


def script() -> list[tuple[str, int, dict]]:
    """The events of two nodes, each in its own order, some of them a little out of order."""
    said = []
    for step in range(100):
        for rank, node in enumerate(("one", "two")):
            for kind in ("alive", "log", "log", "step"):
                said.append((node, rank, {"event": kind, "step": step, "loss": 1.0}))
    order = random.Random(5)
    numbers = {"one": 0, "two": 0}
    out = []
    for node, rank, event in said:
        numbers[node] += 1
        seq = numbers[node]
        text = {"text": f"{node} says {seq}"} if event["event"] == "log" else {}
        out.append((node, rank, {**event, **text, "seq": seq}))
    for at in range(0, len(out) - 1, 7):
        if order.random() < 0.5 and out[at][0] == out[at + 1][0]:
            out[at], out[at + 1] = out[at + 1], out[at]
    return out


def test_killed_at_any_instant_there_is_no_gap_and_no_repeat(tmp_path: Path) -> None:
    paths = RunPaths.new()
    RunJournal.create(paths, state(paths), lambda _: None).close()
    arguments = [str(tmp_path), str(Path(__file__).parent), paths.run_id]
    done = subprocess.run(
        [sys.executable, "-c", DRIVER, *arguments], check=False, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stdout + done.stderr
    wanted = {0: [], 1: []}
    for node, rank, event in script():
        if event["event"] == "log":
            wanted[rank].append(f"{node} says {event['seq']}")
    for rank in (0, 1):
        lines = paths.log(rank).read_text().splitlines()
        assert sorted(lines) == sorted(wanted[rank])
    seen = [json.loads(line) for line in paths.events.read_text().splitlines()]
    assert sorted((e["node"], e["seq"]) for e in seen) == sorted(
        (node, event["seq"]) for node, _, event in script() if event["event"] == "step"
    )
    steps = [json.loads(line)["step"] for line in paths.metrics.read_text().splitlines()]
    assert steps == list(range(100))


def test_a_node_is_named_in_its_own_script(tmp_path: Path) -> None:
    paths = RunPaths.new()
    ledger = RunJournal.create(paths, state(paths), lambda _: None)
    ledger.sessions = {"büro": Line(tmp_path)}
    ledger.heard("büro", "rank-0", {"event": "error", "message": "\u2028 \x9b \ud800", "seq": 1})
    ledger.close()
    (line,) = paths.events.read_text(encoding="utf-8").splitlines()
    assert '"node": "büro"' in line
    assert json.loads(line)["message"] == "\u2028 \x9b \ud800"


def test_a_resend_is_told_apart_and_handled_again(tmp_path: Path) -> None:
    paths = RunPaths.new()
    ledger = RunJournal.create(paths, state(paths), lambda _: None)
    line = Line(tmp_path)
    ledger.sessions = {"one": line}
    event = {"event": "log", "text": "hello\nthere", "seq": 1}
    assert ledger.heard("one", "rank-3", event)
    assert not ledger.heard("one", "rank-3", event)
    ledger.heard("one", "keeper", {"event": "log", "text": "kept", "seq": 2})
    ledger.heard("one", "rank-3", {"event": "error", "traceback": "Traceback\n  it", "seq": 3})
    ledger.close()
    ledger.close()
    assert line.watermark == 3
    assert paths.log(3).read_text() == "hello\nthere\nTraceback\n  it\n"
    assert (paths.logs / "keeper-one.log").read_text() == "kept\n"
    (only,) = [json.loads(text) for text in paths.events.read_text().splitlines()]
    assert (only["node"], only["who"], only["event"]) == ("one", "rank-3", "error")
    again = RunJournal.open(paths.run_id, lambda _: None)
    assert again.upto("s-one") == 3
    again.close()


def test_a_file_that_grew_after_the_last_save_is_cut() -> None:
    paths = RunPaths.new()
    ledger = RunJournal.create(paths, state(paths), lambda _: None)
    ledger.heard("one", "rank-0", {"event": "log", "text": "one"})
    ledger.close()
    with paths.log(0).open("a") as log:
        log.write("half a li")
    RunJournal.open(paths.run_id, lambda _: None).close()
    assert paths.log(0).read_text() == "one\n"


def test_a_step_done_again_replaces_what_came_after(tmp_path: Path) -> None:
    paths = RunPaths.new()
    ledger = RunJournal.create(paths, state(paths), lambda _: None)
    for step in range(5):
        ledger.step(progress(step))
    second = RunPaths(paths.run_id, 2).create()
    ledger.begin(second, "{}")
    attempts = (
        *ledger.state.attempts,
        RunAttempt(number=2, began=timestamp("milliseconds"), why="b was lost", from_step=2),
    )
    ledger.update(attempts=attempts)
    ledger.step(progress(2))
    ledger.step(progress(3))
    ledger.close()
    steps = [json.loads(line)["step"] for line in paths.metrics.read_text().splitlines()]
    assert steps == [0, 1, 2, 3]
    again = RunJournal.open(paths.run_id, lambda _: None)
    assert again.paths.attempt == 2
    again.step(progress(4))
    again.close()
    assert len(paths.metrics.read_text().splitlines()) == 5


def test_what_was_heard_is_known_again() -> None:
    paths = RunPaths.new()
    ledger = RunJournal.create(paths, state(paths), lambda _: None)
    events = [
        {"event": "step", "step": step, "loss": 1.0, "iteration_s": 0.1, "samples": 8, "seq": seq}
        for seq, step in enumerate(range(3), 1)
    ]
    for event in events:
        ledger.heard("one", "rank-0", event)
    ledger.step(progress(0))
    ledger.close()
    again = RunJournal.open(paths.run_id, lambda _: None)
    assert again.reported == 1
    assert [(rank, event["step"]) for rank, event in again.past()] == [(0, 0), (0, 1), (0, 2)]
    again.close()


def test_the_state_is_written_at_once_where_it_matters() -> None:
    paths = RunPaths.new()
    ledger = RunJournal.create(paths, state(paths), lambda _: None)
    ledger.update(status="running")
    assert read_record(RunState, paths.state).status == "running"
    ledger.update(step=7)
    assert read_record(RunState, paths.state).step == 0
    ledger.close()
    assert read_record(RunState, paths.state).step == 7


def test_a_folder_that_is_gone_is_said_by_the_next_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("skyctl.supervision.run_journal.FLUSH_INTERVAL_S", 0.01)
    paths = RunPaths.new()
    ledger = RunJournal.create(paths, state(paths), lambda _: None)
    moved = paths.folder.rename(paths.folder.with_name("moved"))
    paths.folder.write_text("in the way")
    ledger.heard("one", "rank-0", {"event": "log", "text": "lost?"})

    def go_on() -> None:
        for _ in range(500):
            ledger.heard("one", "rank-0", {"event": "alive"})
            time.sleep(0.01)

    with pytest.raises(SkyctlError, match=paths.run_id):
        go_on()
    paths.folder.unlink()
    moved.rename(paths.folder)
    ledger.close()
    assert paths.log(0).read_text() == "lost?\n"


def test_a_position_that_is_none(tmp_path: Path) -> None:
    (tmp_path / "position.json").write_text("[]")
    with pytest.raises(RecordError, match=r"position\.json"):
        CommitLog.open(tmp_path, lambda *_: None)


def test_threads_may_share_it() -> None:
    paths = RunPaths.new()
    ledger = RunJournal.create(paths, state(paths), lambda _: None)

    def say(rank: int) -> None:
        for number in range(200):
            ledger.heard(
                "one", f"rank-{rank}", {"event": "log", "text": str(number), "seq": 200 * rank + number + 1}
            )

    threads = [threading.Thread(target=say, args=(rank,)) for rank in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    ledger.close()
    for rank in range(4):
        assert paths.log(rank).read_text().splitlines() == [str(number) for number in range(200)]
    again = RunJournal.open(paths.run_id, lambda _: None)
    assert again.upto("one") == 800
    again.close()


def test_ctrl_c_while_lines_are_written_loses_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = CommitLog.open(tmp_path, lambda *_: None)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored, where tests run in the background
    sync = os.fdatasync

    def interrupted(fd: int) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.02)  # the waiting thread is interrupted before the write is over
        sync(fd)

    monkeypatch.setattr(os, "fdatasync", interrupted)
    for number in range(3):
        log.take("one", number + 1, "lines", f"{number}\n".encode())
        with pytest.raises(KeyboardInterrupt):
            log.flush()
    monkeypatch.undo()
    log.flush()
    assert (tmp_path / "lines").read_text() == "0\n1\n2\n"
    assert CommitLog.open(tmp_path, lambda *_: None).upto("one") == 3


def test_a_background_process_leaves_a_run_that_ended_before_it_came() -> None:
    paths = RunPaths.new()
    RunJournal.create(paths, state(paths, status="stopped"), lambda _: None).close()
    before = paths.state.read_text()
    subprocess.run([sys.executable, "-m", BACKGROUND_MODULE, paths.run_id], check=True)
    assert paths.state.read_text() == before
    assert "ended before" in paths.supervisor_log.read_text()
