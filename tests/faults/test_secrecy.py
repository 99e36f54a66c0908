"""The places that never hold a run's secret or its TLS key: argument lists, environments, files, logs."""

from __future__ import annotations

import json
import re
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ..helpers.processes import files, until

NOTING = """
import dataclasses, json, os
from pathlib import Path
import skyctl.remote.credentials as made
note, real = Path(os.environ.pop("NOTE")), made.make_credentials
def noted(*ranks, **how):
    got = real(*ranks, **how)
    note.write_text(json.dumps([dataclasses.asdict(one) for one in got]))
    return got
made.make_credentials = noted
from skyctl.cli.app import main
main()
"""


def marks(note: list[dict[str, Any]]) -> list[bytes]:
    """The texts that must be nowhere: the secrets, and each line of the key."""
    lines = note[0]["tls"]["key"].splitlines()[1:-1]
    secrets = [secret for rank in note for secret in rank["secrets"].values()]
    return [text.encode() for text in (*secrets, *lines)]


def processes(name: str) -> Iterator[tuple[int, bytes]]:
    """Of all that may be read: their ``cmdline``, or their ``environ``."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                yield int(entry.name), (entry / name).read_bytes()
            except OSError:
                continue


def holding(folder: Path, marks: list[bytes]) -> list[Path]:
    """The files that have one of them in it."""
    found = []
    for path in files(folder, "**/*"):
        if path.is_file() and not path.is_symlink():
            try:
                data = path.read_bytes()
            except OSError:  # a session's, gone meanwhile
                continue
            if any(mark in data for mark in marks):
                found.append(path)
    return found


@pytest.mark.slow
def test_a_runs_secrets_are_in_no_argument_environment_or_file(probed, tmp_path: Path) -> None:
    note = tmp_path / "note"
    everything = Path(probed.env["TMPDIR"])  # state, caches, sessions and temporary files
    assert all(everything in Path(probed.env[name]).parents for name in ("SKYCTL_HOME", "XDG_CACHE_HOME"))
    words = ("launch", "plan.json", "--steps", "100000", "--encrypt", "-v")
    child = probed.start(*words, program=("-c", NOTING), NOTE=str(note))
    until(lambda: re.search(r"step \d+", child.err), lambda: child.text)
    secret = marks(json.loads(note.read_text()))
    for name in ("cmdline", "environ"):
        assert [pid for pid, data in processes(name) if any(mark in data for mark in secret)] == []
    assert holding(everything, secret) == [note]
    assert Path(f"/proc/{child.process.pid}/environ").stat().st_mode & 0o077 == 0
    child.interrupt()  # it was still training: all of it was there to be seen
    done = child.end(130)
    assert holding(everything, secret) == [note]
    assert all(mark.decode() not in done.stdout + done.stderr for mark in secret)


@pytest.mark.slow
def test_state_is_for_its_user_alone(probed) -> None:
    """No file of it can be read by others: it is closed to them, or a folder above it is."""
    done = probed.run_inside("launch", "plan.json", "--steps", "2")
    assert done.returncode == 0, done.stderr
    (run,) = [path for path in (probed.state / "runs").iterdir() if (path / "measurement.json").exists()][-1:]
    for folder in (probed.state, run, run / "logs", probed.state / "profiles"):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700, folder
    for name in ("plan.json", "measurement.json"):
        assert stat.S_IMODE((run / name).stat().st_mode) == 0o600
    cache = Path(probed.env["XDG_CACHE_HOME"]) / "skyctl"
    for folder in ("sessions", "trees", "packages", "blobs"):
        assert stat.S_IMODE((cache / folder).stat().st_mode) == 0o700


def test_a_dry_run_shows_no_secret(probed) -> None:
    done = probed.run_inside("launch", "plan.json", "--dry-run", "--json", "--encrypt")
    assert done.returncode == 0, done.stderr
    for rank in json.loads(done.stdout)["ranks"]:
        assert rank["payload"]["world"]["secrets"] == {}
        assert "tls" not in rank["payload"]["world"]
