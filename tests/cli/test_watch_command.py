"""``skyctl watch`` as a process of its own: its address, its end, its exit code."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.request import urlopen

import pytest

from ..helpers.processes import PATIENCE_S
from ..helpers.watched_runs import RUN_ID, add_steps, write_state


@contextmanager
def watching(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-m", "skyctl", "watch", *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    with process:
        try:
            yield process
        finally:
            process.kill()


def address(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def get(url: str) -> str:
    with urlopen(url, timeout=PATIENCE_S) as answer:
        return str(answer.read().decode())


def test_it_ends_with_the_run_once_the_page_was_looked_at() -> None:
    paths = write_state(step=2)
    add_steps(paths, range(2))
    with watching(RUN_ID[-4:]) as process:
        url = address(process)
        assert "step 2 of 20" in get(url)
        assert process.poll() is None
        write_state(step=20, status="done")
        assert process.stderr is not None
        while "has ended: done" not in process.stderr.readline():
            assert process.poll() is None
        while "Done: step 20 of 20" not in get(url):
            assert process.poll() is None
        out, _ = process.communicate(timeout=PATIENCE_S)
        assert process.returncode == 0
        assert "was done after 20 of 20" in out


@pytest.mark.parametrize(("status", "code", "message"), [("failed", 1, "rank 0 died"), ("stopped", 1, "")])
def test_json_is_the_address_and_the_exit_code_is_attachs(status: str, code: int, message: str) -> None:
    write_state(status=status, detail=message or None)
    with watching("--json") as process:
        assert process.stdout is not None
        lines = [process.stdout.readline() for _ in range(4)]
        document = json.loads("".join(lines))
        assert document["run_id"] == RUN_ID
        get(document["url"])
        out, err = process.communicate(timeout=PATIENCE_S)
        assert (process.returncode, out) == (code, "")
        assert message in err


def test_ctrl_c_ends_the_page_and_leaves_the_run() -> None:
    paths = write_state()
    with watching("--no-open") as process:
        assert address(process).startswith("http://127.0.0.1:")
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=PATIENCE_S)
        assert process.returncode == 130
        assert f"run {RUN_ID} is left as it is" in err
    assert not list(paths.requests.glob("*"))


def test_a_run_that_is_not_there_is_bad_usage() -> None:
    with watching() as process:
        _, err = process.communicate(timeout=PATIENCE_S)
        assert process.returncode == 2
        assert "there is no run yet" in err
