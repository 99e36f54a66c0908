"""Real jobs in processes of their own, which share a device by turns over a real socket."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from tests.helpers.processes import after_a_moment, until
from tests.turns.jobs import DEVICE

from skyctl.agent.cache_cleanup import clean_cache
from skyctl.agent.frames import encode_frame
from skyctl.agent.unix_socket import connect_in_folder
from skyctl.errors import InputError, MismatchError, RunError
from skyctl.turns.device_folder import connect_to_arbiter, device_folder
from skyctl.turns.turn_client import list_shared_devices, open_turns
from skyctl.turns.turn_messages import ListedJob

Span = tuple[float, float]


class Job:
    """A process that computes when it is told to."""

    def __init__(self, cache: Path, turns: str, name: str) -> None:
        script = Path(__file__).with_name("jobs.py")
        self.process = subprocess.Popen(
            [sys.executable, "-P", str(script), str(cache), turns, name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
        )
        self.first = self.line()

    def line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def begin(self, count: int, seconds: float, gap: float = 0.0) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{count} {seconds} {gap}\n")
        self.process.stdin.flush()

    def span(self) -> Span:
        begin, end = map(float, self.line().split())
        return begin, end

    def spans(self) -> list[Span]:
        found = []
        while (line := self.line()) and line != "done":
            begin, end = map(float, line.split())
            found.append((begin, end))
        assert line == "done"
        return found

    def leave(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        assert self.line() == "closed"

    def end(self) -> None:
        for stream in (self.process.stdin, self.process.stdout):
            assert stream is not None
            stream.close()
        self.process.kill()
        self.process.wait()


Start = Callable[..., Job]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts jobs; at the end no arbiter is left."""
    jobs: list[Job] = []

    def start_one(turns: str = "fair", name: str = "job") -> Job:
        jobs.append(Job(tmp_path, turns, name))
        return jobs[-1]

    yield start_one
    for job in jobs:
        job.end()
    assert not after_a_moment(lambda: arbiters(tmp_path))


def arbiters(cache: Path) -> list[int]:
    """The processes that give turns in that cache."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            words = (folder / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if b"skyctl.turns.turn_server" in words and words[-2].startswith(os.fsencode(cache)):
            found.append(int(folder.name))
    return found


def overlap(spans: list[Span], others: list[Span]) -> bool:
    return any(a < d and c < b for a, b in spans for c, d in others)


def test_one_computes_at_a_time(start: Start) -> None:
    jobs = [start(name=name) for name in "abc"]
    for job, seconds in zip(jobs, (0.002, 0.005, 0.011), strict=True):
        job.begin(40, seconds)
    spans = [job.spans() for job in jobs]
    assert [len(of_one) for of_one in spans] == [40, 40, 40]
    assert not any(overlap(spans[i], spans[j]) for i in range(3) for j in range(i))


def test_who_has_nothing_to_compute_is_in_nobodys_way(start: Start) -> None:
    idle, busy = start(name="idle"), start(name="busy")
    idle.begin(1, 0.01, gap=1000.0)
    idle.span()
    busy.begin(20, 0.01)
    assert len(busy.spans()) == 20
    assert idle.process.poll() is None


def test_packed_jobs_compute_at_once(start: Start, tmp_path: Path) -> None:
    turns = open_turns("pack", device=DEVICE, job_id="half", cache=tmp_path)
    turns.tell(demand=0.25)
    other = start("pack", "other")
    with turns.turn():
        other.begin(1, 1.2, gap=1.2)  # by then it was measured to use half
        until(lambda: [job for job in list_shared_devices(tmp_path)[0].jobs if job.waits_s is not None])
    other.spans()
    other.begin(1, 0.01)
    with turns.turn():
        assert len(other.spans()) == 1
    turns.close()


def test_a_dead_job_has_no_turn(start: Start) -> None:
    holder, waiting = start(name="holder"), start(name="waiting")
    holder.begin(2, 0.01)
    holder.spans()
    holder.begin(1, 1000.0)
    waiting.begin(1, 0.01)
    holder.process.send_signal(signal.SIGKILL)
    assert len(waiting.spans()) == 1


def test_others_go_on_beside_a_job_that_is_stopped_in_its_turn(start: Start, tmp_path: Path) -> None:
    holder, waiting = start(name="holder"), start(name="waiting")

    def late() -> list[str]:
        return [job.job for listed in list_shared_devices(tmp_path) for job in listed.jobs if job.is_late]

    holder.begin(1, 4.0)  # others wait longer than that until it is late
    until(lambda: [job for job in list_shared_devices(tmp_path)[0].jobs if job.holds])
    holder.process.send_signal(signal.SIGSTOP)
    waiting.begin(3, 0.01)
    assert len(waiting.spans()) == 3
    assert late() == ["holder"]
    holder.process.send_signal(signal.SIGCONT)
    assert len(holder.spans()) == 1
    for job in (holder, waiting):
        job.begin(20, 0.01)
    spans = [job.spans() for job in (holder, waiting)]
    assert not overlap(*spans)
    assert late() == []


def test_a_job_outlives_arbiters(start: Start, tmp_path: Path) -> None:
    one, two = start(name="one"), start(name="two")
    for _ in range(3):
        for job in (one, two):
            job.begin(20, 0.01)
        first = one.span()
        killed = until(lambda: arbiters(tmp_path))
        for pid in killed:
            os.kill(pid, signal.SIGKILL)
        until(lambda killed=killed: not set(killed) & set(arbiters(tmp_path)))
        spans = [[first, *one.spans()], two.spans()]
        assert [len(of_one) for of_one in spans] == [20, 20]
    for job in (one, two):
        job.begin(1, 0.001)
        assert len(job.spans()) == 1
    (listed,) = list_shared_devices(tmp_path)
    assert sorted(job.job for job in listed.jobs) == ["one", "two"]
    assert all(job.turns >= 60 for job in listed.jobs)


def test_many_first_jobs_find_one_arbiter(start: Start, tmp_path: Path) -> None:
    with ThreadPoolExecutor(6) as pool:
        jobs = list(pool.map(lambda number: start(name=f"job{number}"), range(6)))
    assert [job.first for job in jobs] == ["open"] * 6
    assert len(arbiters(tmp_path)) == 1
    (listed,) = list_shared_devices(tmp_path)
    assert (listed.device, listed.turns) == (DEVICE, "fair")
    assert sorted(job.job for job in listed.jobs) == [f"job{number}" for number in range(6)]


def test_the_arbiter_ends_with_its_last_job(start: Start, tmp_path: Path) -> None:
    for name in "ab":
        job = start(name=name)
        job.leave()
        assert not after_a_moment(lambda: arbiters(tmp_path))
        assert list_shared_devices(tmp_path) == []


def test_another_policy_is_refused(start: Start, tmp_path: Path) -> None:
    start("srtf", "first")
    with pytest.raises(MismatchError, match=r"turns 'srtf', as job first asked; job second asks for 'fair'"):
        open_turns("fair", device=DEVICE, job_id="second", cache=tmp_path)
    other = open_turns("fair", device="here/cpu:1", job_id="second", cache=tmp_path)
    assert [(listed.device, listed.turns) for listed in list_shared_devices(tmp_path)] == [
        (DEVICE, "srtf"),
        ("here/cpu:1", "fair"),
    ]
    other.close()


def test_who_was_launched_first_goes_first_whoever_came_first(start: Start, tmp_path: Path) -> None:
    holder = open_turns("fifo", device=DEVICE, job_id="20260101", cache=tmp_path)
    later, sooner = start("fifo", "20260103"), start("fifo", "20260102")
    with holder.turn():
        for job in (later, sooner):
            job.begin(30, 0.005)
        until(lambda: all(job.holds or job.waits_s is not None for job in jobs_there(tmp_path)))
    spans = [job.spans() for job in (later, sooner)]
    holder.close()
    assert spans[1][0][0] < spans[0][0][0]
    assert not overlap(*spans)


def jobs_there(cache: Path) -> list[ListedJob]:
    [listed] = list_shared_devices(cache)
    return list(listed.jobs)


def test_priorities_differ_under_one_policy(start: Start, tmp_path: Path) -> None:
    start("priority=1", "first")
    open_turns("priority=2", device=DEVICE, job_id="second", cache=tmp_path).close()


@pytest.mark.parametrize(
    "data",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        encode_frame({"op": "give", "used_s": 1.0, "count": 1}),
        encode_frame({"op": "open", "device": DEVICE, "job": "x", "turns": "nonsense"}),
        encode_frame({"op": "open", "device": DEVICE, "job": "x", "turns": "fair", "used_s": -1.0}),
        encode_frame({"op": "open", "device": DEVICE, "job": "x", "turns": "fair"})
        + encode_frame({"op": "?"}),
        encode_frame({"op": "open", "device": DEVICE, "job": "x", "turns": "fair"})
        + encode_frame({"op": "ask"})
        + encode_frame({"op": "ask"}),
    ],
)
def test_nonsense_ends_its_own_connection_only(start: Start, tmp_path: Path, data: bytes) -> None:
    job = start()
    with connect_in_folder(device_folder(tmp_path, DEVICE)) as sock:
        sock.settimeout(60)
        sock.sendall(data)
        while sock.recv(4096):
            pass
    job.begin(3, 0.001)
    assert len(job.spans()) == 3
    (listed,) = list_shared_devices(tmp_path)
    assert [one.job for one in listed.jobs] == ["job"]


def test_an_arbiter_that_is_none(tmp_path: Path) -> None:
    folder = device_folder(tmp_path, DEVICE)
    (folder / "line").write_text("no socket")
    connect_to_arbiter(folder).close()
    assert not after_a_moment(lambda: arbiters(tmp_path))


def test_names_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="characters"):
        open_turns("fair", device="x" * 300, job_id="a", cache=tmp_path)
    with pytest.raises(InputError):
        open_turns("none", device=DEVICE, job_id="a", cache=tmp_path)
    assert list_shared_devices(tmp_path) == []


def test_without_turns_nothing_is_made(tmp_path: Path) -> None:
    turns = open_turns(None, device=DEVICE, job_id="a", cache=tmp_path)
    with turns.turn():
        turns.tell(remaining_s=1.0)
    turns.close()
    assert list(tmp_path.iterdir()) == []


def test_an_error_within_a_turn_ends_it(start: Start, tmp_path: Path) -> None:
    turns = open_turns("fair", device=DEVICE, job_id="a", cache=tmp_path)
    with pytest.raises(ZeroDivisionError), turns.turn():
        raise ZeroDivisionError
    other = start(name="other")
    other.begin(2, 0.001)
    assert len(other.spans()) == 2
    turns.close()
    with pytest.raises(RunError, match="after it closed"), turns.turn():
        pass


def test_a_long_path(tmp_path: Path) -> None:
    cache = tmp_path / ("long" * 30)
    turns = open_turns("fair", device=DEVICE, job_id="a", cache=cache)
    with turns.turn():
        pass
    assert len(arbiters(cache)) == 1
    turns.close()
    assert not after_a_moment(lambda: arbiters(cache))


def test_a_device_in_use_is_not_cleaned_away(tmp_path: Path) -> None:
    turns = open_turns("fair", device=DEVICE, job_id="a", cache=tmp_path)
    clean = [kind for kind in clean_cache(tmp_path, dry_run=False) if kind["what"] == "turns"]
    assert [(kind["removed"], kind["kept"]) for kind in clean] == [(0, 1)]
    turns.close()
    assert not after_a_moment(lambda: arbiters(tmp_path))
    clean = [kind for kind in clean_cache(tmp_path, dry_run=False) if kind["what"] == "turns"]
    assert [(kind["removed"], kind["kept"]) for kind in clean] == [(1, 0)]
    assert not (tmp_path / "turns").exists()
