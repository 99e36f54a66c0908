"""Paths and atomic writes, with hostile names, full disks and damaged files."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tests.helpers.bare_records import OF_DEVICE, OF_PROFILE

from skyctl import files
from skyctl.errors import InputError, RecordError, SkyctlError
from skyctl.records.profile import DeviceProfile, Profile

YEAR_S = 365 * 86400.0
HOSTILE = ["home", "two words", "'; echo foo", 'a"=0"', "../../etc/passwd", ".", "..", ".hidden", "-rf", ""]
HOSTILE += ["%", "~", "trailing.", "ü" * 200, "a/b", "a%2Fb", "new\nline", "\udcff", "x" * 5000, "nul\0"]


def profile(cluster: str = "home", created: str = "2026-11-21T06:30:12Z") -> Profile:
    device = DeviceProfile(
        id="n/cpu:0",
        node="n",
        name="cpu",
        threads=1,
        slowdown=1.0,
        memory_bytes=1e9,
        memory_from="free memory",
        reserved_bytes=0.0,
        flops_per_s=1e9,
        **OF_DEVICE,
    )
    return Profile(
        cluster=cluster,
        cluster_digest="d",
        created=created,
        nodes=(),
        devices=(device,),
        links=(),
        **OF_PROFILE,
    )


def test_home_flag_order(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SKYCTL_HOME", str(tmp_path / "own"))
    assert files.home() == tmp_path / "own"
    monkeypatch.delenv("SKYCTL_HOME")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    assert files.home() == tmp_path / "state" / "skyctl"
    for bad in ("", "relative/path"):
        monkeypatch.setenv("XDG_STATE_HOME", bad)
        assert files.home() == Path.home() / ".local/state/skyctl"


def test_hostile_names_are_one_file_name_each() -> None:
    names = [files.safe_name(name) for name in HOSTILE]
    assert len({name.lower() for name in names}) == len(HOSTILE)
    for name in names:
        assert name not in (".", "..")
        assert "/" not in name
        assert "\0" not in name
        assert not name.startswith(("-", ".", "~"))
        assert len(name.encode()) < 200


@pytest.mark.parametrize("cluster", [n for n in HOSTILE if n and "\udcff" not in n])
def test_profiles_of_hostile_clusters(cluster: str) -> None:
    path = files.save_profile(profile(cluster))
    assert path.is_relative_to(files.home() / "profiles")
    assert files.newest_profile(cluster) == (path, profile(cluster))
    assert files.newest_profile(cluster + "x") is None


def test_newest_profile_that_fits_and_can_be_read() -> None:
    first = files.save_profile(profile(created="1"))
    second = files.save_profile(profile(created="2"))
    assert files.newest_profile("home") == (second, profile(created="2"))
    assert files.newest_profile("home", lambda p: p.created == "1") == (first, profile(created="1"))
    assert files.newest_profile("home", lambda p: False) is None
    second.write_text("{")
    assert files.newest_profile("home") == (first, profile(created="1"))


def test_profiles_saved_within_a_second_keep_their_order_and_a_bound() -> None:
    for number in range(files.PROFILES_KEPT + 3):
        files.save_profile(profile(created=str(number)))
        newest = files.newest_profile("home")
        assert newest is not None
        assert newest[1].created == str(number)
    assert len(list(files.profile_folder("home").iterdir())) == files.PROFILES_KEPT


def test_profiles_of_a_clock_that_was_ahead_are_the_oldest(monkeypatch: pytest.MonkeyPatch) -> None:
    """And names do not grow by a character with each profile until that date."""
    now = time.time()
    for number, moment in enumerate((now + 10 * YEAR_S, now - 7200, now - 3600, now)):
        monkeypatch.setattr(files.time, "time", lambda moment=moment: moment)
        path = files.save_profile(profile(created=str(number)))
        assert files.newest_profile("home") == (path, profile(created=str(number)))
        assert not path.stem.endswith("~")


def test_write_atomic_replaces_and_is_private(tmp_path: Path) -> None:
    path = tmp_path / "a file"
    assert files.write_atomic(path, "one") == path
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    files.write_atomic(path, b"two", mode=None)
    assert path.read_bytes() == b"two"
    umask = os.umask(0)
    os.umask(umask)
    assert stat.S_IMODE(path.stat().st_mode) == 0o666 & ~umask
    assert os.listdir(tmp_path) == ["a file"]


def test_what_a_killed_writer_leaves_is_found(tmp_path: Path) -> None:
    path = tmp_path / "a[1].json"
    code = (
        "import os, sys; from skyctl.files import write_atomic\n"
        "os.fsync = lambda fd: os.kill(os.getpid(), 9); write_atomic(sys.argv[1], 'half')"
    )
    assert subprocess.run([sys.executable, "-c", code, str(path)], check=False).returncode == -9
    (tmp_path / ".another.json.0123456789ab.tmp").touch()
    (tmp_path / ".a[1].json.mine.tmp").touch()
    (left,) = files.unfinished_writes(path)
    assert left.name.startswith(".a[1].json.")
    assert not path.exists()


def test_write_atomic_keeps_a_link_and_writes_to_a_pipe(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "real")
    files.write_atomic(tmp_path / "link", "x")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "real").read_text() == "x"
    code = "from skyctl.files import write_atomic; write_atomic('/dev/stdout', 'piped')"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout == b"piped"


@pytest.mark.parametrize(("path", "reason"), [("no/such/x", "No such file"), (".", "Is a directory")])
def test_write_atomic_to_a_place_that_cannot_be(tmp_path: Path, path: str, reason: str) -> None:
    with pytest.raises(InputError, match=reason):
        files.write_atomic(tmp_path / path, "x")
    assert os.listdir(tmp_path) == []


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_full_disk_names_path_and_reason() -> None:
    with pytest.raises(SkyctlError, match=r"can't write /dev/full: No space left") as caught:
        files.write_atomic("/dev/full", "x")
    assert caught.value.exit_code == 1
    assert caught.value.hint


def test_a_write_that_breaks_off_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    # A limit on file size breaks a write in the middle as a full disk does, and needs no root.
    code = (
        "import resource, sys; from skyctl.files import write_atomic; from skyctl.errors import SkyctlError\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))\n"
        "try: write_atomic(sys.argv[1], 'x' * 5000)\n"
        "except SkyctlError as exc: print(exc)"
    )
    path = tmp_path / "kept"
    path.write_text("old")
    done = subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, text=True, check=True)
    assert f"can't write {path}: File too large" in done.stdout
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["kept"]


def test_read_record(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    with pytest.raises(InputError, match="No such file") as caught:
        files.read_record(Profile, path)
    assert "skyctl probe" in str(caught.value)
    with pytest.raises(InputError, match="Is a directory"):
        files.read_record(Profile, tmp_path)
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(InputError, match="UTF-8"):
        files.read_record(Profile, path)
    path.write_text('{"kind": "skyctl/plan"}')
    with pytest.raises(RecordError, match="must be of kind 'skyctl/profile'"):
        files.read_record(Profile, path)
    files.write_atomic(path, profile().to_json())
    assert files.read_record(Profile, path) == profile()


def test_run_paths() -> None:
    paths = files.RunPaths.new()
    assert stat.S_IMODE(paths.folder.stat().st_mode) == 0o700
    assert paths.folder.parent == files.home() / "runs"
    assert files.RunPaths(paths.run_id).plan == paths.plan
    everything = [paths.plan, paths.measurement, paths.weights, paths.log(0), paths.log(12)]
    assert len(set(everything)) == len(everything)
    assert all(path.is_relative_to(paths.folder) for path in everything)
    assert all(path.parent.is_dir() for path in everything)


def test_run_ids_sort_by_time_and_hostile_ones_stay_inside() -> None:
    assert files.new_run_id() != files.new_run_id()
    assert files.RunPaths("../../etc").folder.parent == files.home() / "runs"


def test_runs_dated_ahead_of_the_clock_are_not_the_newest(monkeypatch: pytest.MonkeyPatch) -> None:
    """The launcher's clock was ten years ahead, and was set back."""
    now = time.time()
    run_ids = []
    for moment in (now + 10 * YEAR_S, now - 3600, now):
        monkeypatch.setattr(files.time, "time", lambda moment=moment: moment)
        run_ids.append(files.RunPaths.new().run_id)
        assert files.run_folder().name == run_ids[-1]
    assert files.run_ids() == run_ids


def test_home_that_cannot_be_made(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("SKYCTL_HOME", str(tmp_path / "file" / "inner"))
    with pytest.raises(SkyctlError, match="can't make folder"):
        files.RunPaths.new()


def test_importing_files_imports_no_pydantic() -> None:
    code = "import sys, skyctl.files; sys.exit('pydantic' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
