"""``skyctl setup`` on nodes of this machine: real environments, real uv, wheels that stand for torch."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import pytest
from tests.helpers.processes import PATIENCE_S, until

from skyctl.inventory.cluster_file import read_cluster
from skyctl.inventory.environment_registry import with_prepared_environments

TORCH = version("torch").partition("+")[0]
TRAIN = "def model():\n    return []\n"


def run_in(python: str, code: str) -> str:
    return subprocess.run([python, "-c", code], check=True, capture_output=True, text=True).stdout.strip()


def used(site, monkeypatch: pytest.MonkeyPatch, name: str) -> str:
    """The Python that skyctl uses on a node."""
    monkeypatch.setenv("SKYCTL_HOME", str(site.state))
    return with_prepared_environments(read_cluster(site.folder / "cluster.yaml")).node(name).python


def test_made_used_and_removed(site, monkeypatch: pytest.MonkeyPatch) -> None:
    site.torch()
    bare = site.bare("bare")
    site.cluster(a=bare, here={})
    found = site.setup("--wheels", "wheels", "--dry-run")
    assert (found["a"]["status"], found["a"]["lacks"]) == ("lacking", ["torch"])
    assert found["here"]["status"] == "fine"
    assert site.environments == []
    assert site.kept == {}

    found = site.setup("--wheels", "wheels")
    assert (found["a"]["status"], found["a"]["torch"]) == ("made", f"{TORCH}+stub")
    assert found["a"]["pushed"]
    assert found["here"]["status"] == "fine"
    python = used(site, monkeypatch, "a")
    assert python == found["a"]["python"] != str(bare)
    assert used(site, monkeypatch, "here") == sys.executable
    assert run_in(python, "import torch, stubdep; print(torch.__version__)") == f"{TORCH}+stub"
    made = site.environments
    assert [path.stat().st_mode & 0o777 for path in made] == [0o700]
    assert list(made[0].glob(".tmp*")) == []
    assert list(site.state.glob("wheels-*")) == []

    before = made[0].stat().st_mtime_ns
    assert site.setup("--wheels", "wheels")["a"]["status"] == "ready"
    assert site.environments == made
    assert made[0].stat().st_mtime_ns == before

    found = site.setup("--remove")
    assert found["a"]["status"] == "removed"
    assert found["a"]["size_bytes"] > 0
    assert found["here"]["status"] == "nothing"
    assert not (site.data / "skyctl").exists()
    assert site.kept == {}
    assert used(site, monkeypatch, "a") == str(bare)
    assert site.setup("--remove")["a"]["status"] == "nothing"


@pytest.mark.slow
def test_two_nodes_that_share_a_home(site, index) -> None:
    site.torch()
    bare = site.bare("bare")
    site.cluster(a=bare, b=bare)
    found = site.setup("--index-url", index.url)
    assert sorted((found["a"]["status"], found["b"]["status"])) == ["made", "ready"]
    assert len(site.environments) == 1
    assert site.setup("--remove", "--limit", "a")["a"]["status"] == "removed"
    assert list(site.kept) == ["b"]
    assert site.setup("--limit", "b")["b"]["status"] == "ready"
    before = site.environments
    for words in (("--dry-run",), ()):
        assert site.environments == before
        done = site.run("clean", "b", "--environments", "--json", *words)
        assert done.returncode == 0, done.stderr
        cleaned = {kind["what"]: kind for kind in json.loads(done.stdout)["nodes"][0]["cleaned"]}
        assert cleaned["environments"]["removed"] == 1
        assert cleaned["environments"]["freed_bytes"] > 10_000
    assert site.kept == {}
    assert not (site.data / "skyctl").exists()


@pytest.mark.slow
def test_what_a_workload_requires(site, index, wheel: Callable[..., Path]) -> None:
    site.torch()
    wheel(site.wheels, "tinylib", "1.2", {"tinylib.py": b"x = 1\n"})
    wheel(site.wheels, "otherlib", "3.0", {"otherlib.py": b"x = 1\n"})
    site.cluster(a=site.bare("bare"))
    for name, file, text in (
        ("one", "requirements.txt", "# what it needs\ntinylib>=1.1  # this\n"),
        ("two", "pyproject.toml", "[project]\ndependencies = [\"otherlib ; python_version>'3'\"]\n"),
    ):
        (site.folder / name).mkdir()
        (site.folder / name / "train.py").write_text(TRAIN)
        (site.folder / name / file).write_text(text)
    found = site.setup("one/train.py", "--index-url", index.url)
    assert found["a"]["lacks"] == ["torch", "tinylib>=1.1"]
    assert site.setup("--index-url", index.url)["a"]["status"] == "ready"
    found = site.setup("two/train.py", "--index-url", index.url)
    assert (found["a"]["status"], found["a"]["lacks"][0]) == ("made", "torch")
    # One environment serves both, and the one before is gone.
    assert [path.name for path in site.environments] == [Path(found["a"]["environment"]).name]
    assert run_in(found["a"]["python"], "import tinylib, otherlib; print('both')") == "both"
    assert site.setup("one/train.py", "--index-url", index.url)["a"]["status"] == "ready"


@pytest.mark.slow
def test_a_requirement_that_does_not_exist(site, index) -> None:
    site.torch()
    site.cluster(a=site.bare("bare"), here={})
    (site.folder / "train.py").write_text(TRAIN)
    (site.folder / "requirements.txt").write_text("nosuchthing==1.0\n")
    found = site.setup("train.py", "--index-url", index.url, "--limit", "a", code=4)
    for word in ("node a", "nosuchthing==1.0", "requirements.txt"):
        assert word in found["a"]["error"]
    assert site.environments == []
    (site.folder / "requirements.txt").unlink()
    assert site.setup("train.py", "--index-url", index.url)["a"]["status"] == "made"


def test_no_python_there_and_no_venv(site) -> None:
    """A Debian without python3-venv has no module venv that works, and no ensurepip."""
    site.torch()
    poor = site.bare("poor", "import sys\nsys.modules['ensurepip'] = sys.modules['venv'] = None\n")
    # A home of its own: else it finds what b has made.
    own = {"XDG_DATA_HOME": str(site.folder / "own")}
    site.cluster(a="/nowhere/python3", b=site.bare("bare"), c={"python": str(poor), "env": own})
    found = site.setup("--wheels", "wheels", code=4)
    assert "/nowhere/python3" in found["a"]["error"]
    assert [found[name]["status"] for name in "bc"] == ["made", "made"]
    assert len(site.environments) == 1


@pytest.mark.slow
def test_what_is_pushed_is_what_the_nodes_python_needs(site, index, wheel: Callable[..., Path]) -> None:
    """Also a package with an address, which the node does not fetch."""
    python = next(Path(sys.base_prefix).parent.glob("3.12.*/bin/python3.12"), None)
    if python is None:
        pytest.skip("no Python 3.12 beside this one")
    site.torch()
    for name in ("older", "newer"):
        wheel(site.wheels, name, "1.0", {f"{name}.py": b""})
    (site.folder / "train.py").write_text(TRAIN)
    (site.folder / "requirements.txt").write_text(
        "older ; python_version < '3.12'\n"
        f"newer @ {index.file_url('newer-1.0-py3-none-any.whl')} ; python_version >= '3.12'\n"
    )
    venv = site.folder / "venv"
    subprocess.run([python, "-m", "venv", "--without-pip", str(venv)], check=True)
    site.cluster(a=venv / "bin" / "python")
    how = ("train.py", "--push", "--index-url", index.url)
    found = site.setup(*how)
    assert (found["a"]["status"], found["a"]["pushed"]) == ("made", True)
    code = "import importlib.util as u; print([u.find_spec(n) is not None for n in ('older', 'newer')])"
    assert run_in(found["a"]["python"], code) == "[False, True]"
    assert site.setup(*how)["a"]["status"] == "ready"


@pytest.fixture
def old(site, index) -> dict:
    """A node whose Python is too old, and which gets Pythons from the index's server."""
    script = "import sys; sys.version_info = (3, 8, 10); exec(sys.argv[1])"
    path = site.folder / "old"
    path.write_text(f"#!/bin/sh\nexec {sys.executable} -c '{script}' \"$3\"\n")
    path.chmod(0o755)
    site.make_python_archive(index)
    return {"python": str(path), "env": {"UV_PYTHON_DOWNLOADS_JSON_URL": index.file_url("pythons.json")}}


@pytest.mark.slow
def test_a_python_is_brought_where_the_nodes_is_too_old(site, old: dict) -> None:
    site.torch()
    site.cluster(a=old)
    found = site.setup("--wheels", "wheels", "--dry-run")["a"]
    assert (found["status"], found["lacks"]) == ("lacking", ["Python 3.10 or newer (it has 3.8.10)", "torch"])
    assert not site.data.exists()
    found = site.setup("--wheels", "wheels")["a"]
    assert (found["status"], found["torch"]) == ("made", f"{TORCH}+stub")
    pythons = site.data / "skyctl" / "python"
    assert list(pythons.glob("cpython-*/bin/python3*"))
    assert not list(pythons.glob(".new*"))
    assert site.setup("--wheels", "wheels")["a"]["status"] == "ready"
    done = site.run("check", "--json")
    ticks = {tick["name"]: tick for tick in json.loads(done.stdout)["nodes"][0]["ticks"]}
    assert "set up by skyctl" in ticks["python"]["found"]
    assert site.setup("--remove")["a"]["status"] == "removed"
    assert not (site.data / "skyctl").exists()
    assert site.kept == {}
    assert site.setup("--remove")["a"]["status"] == "nothing"


@pytest.mark.slow
def test_a_python_that_nothing_could_be_made_with_goes(site, old: dict) -> None:
    site.cluster(a=old)
    found = site.setup("--wheels", "wheels", code=4)["a"]
    assert "torch" in found["error"]
    assert not (site.data / "skyctl").exists()
    old["env"]["UV_PYTHON_DOWNLOADS_JSON_URL"] = "http://127.0.0.1:1/pythons.json"
    site.cluster(a=old)
    found = site.setup("--wheels", "wheels", code=4)["a"]
    assert "Python 3.8.10" in found["error"]
    assert "127.0.0.1:1" in found["error"]
    assert "UV_PYTHON_INSTALL_MIRROR" in found["hint"]
    assert not (site.data / "skyctl").exists()
    site.data.mkdir(exist_ok=True)
    site.data.chmod(0o777)
    found = site.setup("--wheels", "wheels", code=4)["a"]
    assert f"others can write to {site.data}" in found["error"]


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_interrupted_while_a_python_is_brought(site, index, old: dict, number: signal.Signals) -> None:
    site.torch()
    site.cluster(a=old)
    index.go_on.clear()
    child = site.start("setup", "--wheels", "wheels")
    assert index.wheel_asked.wait(PATIENCE_S)
    child.send_signal(number)
    site.wait_end(child)
    until(lambda: not (site.data / "skyctl").exists())


@pytest.mark.slow
def test_a_node_without_an_index_is_pushed_wheels(site, index) -> None:
    site.torch()
    # devices: no asking of torch's own CPU index, which is on the internet
    there = {
        "python": str(site.bare("bare")),
        "devices": ["cuda:0"],
        "env": {"PIP_INDEX_URL": "http://127.0.0.1:1/"},
    }
    site.cluster(a=there)
    found = site.setup(PIP_INDEX_URL=index.url)
    assert (found["a"]["status"], found["a"]["pushed"]) == ("made", True)
    found = site.setup("--remove")
    found = site.setup(PIP_INDEX_URL="http://127.0.0.1:1/", code=4)
    assert "neither node a nor this machine" in found["a"]["error"]
    assert site.environments == []


def test_a_password_of_the_index_is_nowhere(site, index) -> None:
    """It goes through pip's environment: no argument but the user's own holds it, no file, no output."""
    site.torch()
    site.cluster(a=site.bare("bare"))
    index.password = "s3cr3t"
    seen: set[bytes] = set()

    def look() -> None:
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            try:
                text = path.read_bytes()
            except OSError:
                continue
            if b"s3cr3t" in text:
                seen.add(text)

    index.on_request = look
    url = f"http://ada:s3cr3t@127.0.0.1:{index.port}/simple"
    done = site.run("setup", "--index-url", url, "-v")
    assert done.returncode == 0, done.stderr
    assert all(b"skyctl\0setup" in line for line in seen)
    assert "s3cr3t" not in done.stdout + done.stderr
    for folder in (site.state, site.data, Path(os.environ["XDG_CACHE_HOME"])):
        for path in folder.rglob("*"):
            if path.is_file():
                assert b"s3cr3t" not in path.read_bytes(), path


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_interrupted_half_way(site, index, number: signal.Signals) -> None:
    site.torch()
    site.cluster(a=site.bare("bare"))
    index.go_on.clear()
    child = site.start("setup", "--index-url", index.url)
    assert index.wheel_asked.wait(PATIENCE_S)
    assert len(site.environments) == 1  # half made
    child.send_signal(number)
    site.wait_end(child)
    assert child.returncode == (-number if number == signal.SIGKILL else 128 + number)
    until(lambda: site.environments == [])
    assert site.kept == {}
    index.go_on.set()
    assert site.setup("--index-url", index.url)["a"]["status"] == "made"


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_interrupted_while_wheels_are_fetched(site, index, number: signal.Signals) -> None:
    site.torch()
    site.cluster(a=site.bare("bare"))
    index.go_on.clear()
    child = site.start("setup", "--index-url", index.url, "--push")
    assert index.wheel_asked.wait(PATIENCE_S)
    child.send_signal(number)
    index.go_on.set()  # after a kill, its uv ends by itself
    site.wait_end(child)
    assert bool(list(site.state.glob("wheels-*"))) == (number == signal.SIGKILL)
    assert site.setup("--index-url", index.url, "--push")["a"]["status"] == "made"
    assert list(site.state.glob("wheels-*")) == []


@pytest.mark.slow
def test_what_a_kill_left_is_swept_up(site) -> None:
    site.torch()
    site.cluster(a=site.bare("bare"))
    root = site.data / "skyctl" / "env"
    for name in ("py3.11-torch1.0-0123456789", ".old-abcd"):
        (root / name / "lib").mkdir(parents=True)
    (root / "mine").mkdir()  # not ours to touch
    site.setup("--wheels", "wheels")
    left = sorted(path.name.partition("-")[0] for path in site.environments)
    assert left[0] == "mine"
    assert len(left) == 2
    site.setup("--remove")
    assert [path.name for path in site.environments] == ["mine"]


@pytest.mark.slow
def test_an_environment_in_use_stays(site) -> None:
    site.torch()
    site.cluster(a=site.bare("bare"))
    python = site.setup("--wheels", "wheels")["a"]["python"]
    with subprocess.Popen(
        [python, "-c", "print('up', flush=True); input()"], stdin=-1, stdout=-1, text=True
    ) as user:
        assert user.stdout is not None
        user.stdout.readline()
        found = site.setup("--remove", code=4)
        assert str(user.pid) in found["a"]["error"]
        assert len(site.environments) == 1
        assert list(site.kept) == ["a"]
        user.kill()
    assert site.setup("--remove")["a"]["status"] == "removed"


@pytest.mark.slow
def test_a_broken_environment_is_made_again(site) -> None:
    site.torch()
    site.cluster(a=site.bare("bare"))
    python = Path(site.setup("--wheels", "wheels")["a"]["python"])
    next(python.parent.parent.glob("lib/python3*/site-packages/torch/__init__.py")).unlink()
    found = site.setup("--wheels", "wheels")
    assert found["a"]["status"] == "made"
    assert run_in(found["a"]["python"], "import torch; print(torch.__version__)") == f"{TORCH}+stub"


@pytest.mark.slow
def test_something_else_in_the_place_of_an_environment(site) -> None:
    """It is named, and stays: skyctl removes what it has made, and nothing else."""
    site.torch()
    site.cluster(a=site.bare("bare"))
    path = Path(site.setup("--wheels", "wheels", "--dry-run")["a"]["environment"])
    path.parent.mkdir(parents=True, mode=0o700)
    kept = site.folder / "mine"
    for what in ("file", "link to nothing", "link"):
        if what == "file":
            path.write_text("mine")
        else:
            path.symlink_to(kept)
        if what == "link":
            kept.mkdir()
            (kept / "notes").write_text("mine")
        found = site.setup("--wheels", "wheels", code=4)
        assert str(path) in found["a"]["error"], what
        assert "XDG_DATA_HOME" in found["a"]["hint"]
        assert site.environments == [path]
        path.unlink()
    assert (kept / "notes").read_text() == "mine"
    assert site.setup("--wheels", "wheels")["a"]["status"] == "made"


@pytest.mark.slow
def test_an_environment_that_was_moved_and_linked_to(site) -> None:
    """It is used; what goes with ``--remove`` is the link."""
    site.torch()
    site.cluster(a=site.bare("bare"))
    path = Path(site.setup("--wheels", "wheels")["a"]["environment"])
    moved = site.folder / "moved"
    path.rename(moved)
    path.symlink_to(moved)
    assert site.setup("--wheels", "wheels")["a"]["status"] == "ready"
    assert site.setup("--remove")["a"]["status"] == "removed"
    assert site.environments == []
    assert (moved / "skyctl.json").is_file()


@pytest.mark.parametrize("what", ["file", "read-only"])
def test_a_place_that_can_not_be_written_to(site, what: str) -> None:
    site.torch()
    site.cluster(a=site.bare("bare"))
    if what == "file":
        site.data.write_text("")
        found = site.setup("--wheels", "wheels", code=4)
    else:
        site.data.mkdir()
        mounted = ["mount", "-t", "tmpfs", "-o", "ro", "none", str(site.data)]
        if os.geteuid() != 0 or subprocess.run(mounted, capture_output=True, check=False).returncode:
            pytest.skip("needs root to mount a read-only disk")
        try:
            found = site.setup("--wheels", "wheels", code=4)
        finally:
            subprocess.run(["umount", str(site.data)], check=True)
    assert str(site.data) in found["a"]["error"]
    assert "Error" not in found["a"]["error"]
    assert "XDG_DATA_HOME" in found["a"]["hint"]


@pytest.mark.slow
def test_a_launcher_that_has_changed_its_name(site) -> None:
    site.torch()
    site.cluster(a=site.bare("bare"))
    site.setup("--wheels", "wheels")
    marker = site.environments[0] / "skyctl.json"
    path = site.state / "setups" / "site.json"
    for file in (marker, path):
        file.write_text(file.read_text().replace("site/a of ", "site/a of former-"))
    assert site.setup("--remove")["a"]["status"] == "removed"
    assert site.environments == []


def test_the_cluster_file_wins(site, monkeypatch: pytest.MonkeyPatch) -> None:
    """An environment of setup's counts as long as the file names the Python that it was made for."""
    site.torch()
    site.cluster(a=site.bare("bare"))
    python = site.setup("--wheels", "wheels")["a"]["python"]
    assert used(site, monkeypatch, "a") == python
    other = site.bare("other")
    site.cluster(a=other)
    assert used(site, monkeypatch, "a") == str(other)
    site.cluster(a=site.folder / "bare/bin/python")
    assert used(site, monkeypatch, "a") == python
    done = site.run("check", "--json")
    ticks = {tick["name"]: tick for tick in json.loads(done.stdout)["nodes"][0]["ticks"]}
    assert "set up by skyctl" in ticks["python"]["found"]


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to make a small disk")
@pytest.mark.parametrize("pushed", [True, False])
def test_a_full_disk(site, index, pushed: bool) -> None:
    site.torch(padding_bytes=4 << 20)
    site.cluster(a=site.bare("bare"), here={})
    site.data.mkdir()
    mounted = ["mount", "-t", "tmpfs", "-o", "size=3m", "none", str(site.data)]
    if subprocess.run(mounted, capture_output=True, check=False).returncode:
        pytest.skip("no tmpfs can be mounted here")
    try:
        how = ("--wheels", "wheels") if pushed else ("--index-url", index.url)
        found = site.setup(*how, code=4)
        assert "MiB free" in found["a"]["error"]
        assert "needed" in found["a"]["error"]
        assert str(site.data) in found["a"]["error"]
        assert found["here"]["status"] == "fine"
        assert site.environments == []
    finally:
        subprocess.run(["umount", str(site.data)], check=True)


@pytest.mark.parametrize(
    "words",
    [
        ("--wheels", "nowhere"),
        ("--wheels", "wheels", "--index-url", "http://127.0.0.1:1"),
        ("--remove", "--push"),
        ("--remove", "train.py"),
        ("nothing.py",),
    ],
)
def test_options_that_make_no_sense(site, words: tuple[str, ...]) -> None:
    site.cluster(a={})
    done = site.run("setup", *words)
    assert done.returncode == 2, done.stderr
    assert done.stderr.count("error:") == 1


@pytest.mark.slow
def test_plain_lines_when_piped(site) -> None:
    site.torch()
    site.cluster(a=site.bare("bare"))
    done = site.run("setup", "--wheels", "wheels")
    assert done.returncode == 0, done.stderr
    assert "setup: a: set up (1 of 1)" in done.stderr
    assert "it lacked torch" in done.stdout
    assert "\x1b" not in done.stdout + done.stderr
    assert site.run("setup", "-q").stdout == ""
