"""Another user of a node, who may write where skyctl used to put what it runs (umask 002, a shared group).

The tests' own user is the victim, root. The other one is a child process with the ids of ``daemon``, a user
that every system has and whose group ``daemon`` stands for the shared one. Any code that the other one
plants would, if it ran, write into a folder that anybody may write to.
"""

from __future__ import annotations

import json
import os
import pwd
import py_compile  # noqa: F401 - forks that are another user may not be able to read where it lies
import shutil
import socket
import struct
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from skyctl.agent.node_cache import NodeCache, pack_archive
from skyctl.device.dtype_support import FILE_NAME
from skyctl.errors import SkyctlError, UnfitError
from skyctl.files import make_private
from skyctl.inventory.environment_registry import read_environments
from skyctl.private_folder import (
    ACL_ATTRIBUTE,
    UnsafeFolderError,
    check_private_folder,
    make_private_folder,
)
from skyctl.records.cluster import Node
from skyctl.remote.base import ConnectOptions
from skyctl.remote.node_archive import node_package_archive
from skyctl.remote.session_factory import open_session
from skyctl.setup.node.environment_builder import release_environments
from skyctl.setup.node.environment_store import lock_environments
from skyctl.setup.node.setup_orders import LookOrder
from skyctl.setup.node.setup_task import _inspect
from skyctl.supervision.run_status import ProcessCounts

pytestmark = [
    pytest.mark.lab,
    pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as two users"),
]
OTHER = pwd.getpwnam("daemon")
OPTIONS = ConnectOptions(grace_s=0.3)


@dataclass
class Machine:
    """A machine with two users. ``home``: the victim's, ``traces``: where planted code would write."""

    folder: Path
    home: Path
    traces: Path

    @property
    def cache(self) -> Path:
        return self.home / ".cache" / "skyctl"

    @property
    def evil(self) -> str:
        """Python that leaves a trace of who has run it."""
        return f"import os, pathlib; pathlib.Path({str(self.traces)!r}, str(os.geteuid())).touch()\n"

    @property
    def node(self) -> Node:
        env = {"HOME": str(self.home), "XDG_CACHE_HOME": str(self.home / ".cache")}
        return Node(name="elm", transport="local", env=env)

    def share(self, *folders: Path) -> None:
        """As under umask 002 with a shared group: its members may write there."""
        for folder in folders:
            folder.mkdir(parents=True, exist_ok=True)
            os.chown(folder, -1, OTHER.pw_gid)
            folder.chmod(0o775)

    def as_other(self, act: Callable[[], object]) -> None:
        """Does it as the other user."""
        pid = os.fork()
        if pid == 0:
            try:
                os.setgroups([])
                os.setgid(OTHER.pw_gid)
                os.setuid(OTHER.pw_uid)
                os.umask(0o002)
                act()
            except BaseException as exc:
                os.write(2, f"{type(exc).__name__}: {exc}\n".encode())
                os._exit(1)
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0

    def open(self) -> None:
        """A session on the node, and the import of what a task imports first."""
        with open_session(self.node, OPTIONS) as session:
            session.run_task(
                "skyctl.agent.process_tree", {"sessions": [], "module": "x"}, 30, answer=ProcessCounts
            )

    def assert_nothing_ran(self) -> None:
        assert [path.name for path in self.traces.iterdir()] == []


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    folder = Path(tempfile.mkdtemp(prefix="other-", dir="/tmp"))  # not in pytest's own, which is root's alone
    folder.chmod(0o755)
    made = Machine(folder, folder / "home", folder / "traces")
    made.home.mkdir(mode=0o755)
    made.traces.mkdir()
    made.traces.chmod(0o1777)
    for name, value in {
        "HOME": made.home,
        "XDG_CACHE_HOME": made.home / ".cache",
        "XDG_DATA_HOME": made.home / "data",
        "SKYCTL_HOME": made.home / "state",
    }.items():
        monkeypatch.setenv(name, str(value))
    umask = os.umask(0o002)
    try:
        yield made
        made.assert_nothing_ran()
    finally:
        os.umask(umask)
        shutil.rmtree(folder)


def poisoned_package(machine: Machine, cache: Path) -> None:
    """A cache as skyctl makes it, and its package with bytecode and modules of another's."""
    poison(machine, NodeCache(cache).add_tree("packages", *node_package_archive()))


def poison(machine: Machine, tree: Path) -> None:
    (tree / "sitecustomize.py").write_text(machine.evil)
    (tree / "torch.py").write_text(machine.evil)
    source = tree / "skyctl" / "agent" / "node_agent.py"
    cached = source.parent / "__pycache__" / f"node_agent.{sys.implementation.cache_tag}.pyc"
    cached.unlink()
    code = compile(machine.evil, str(source), "exec")
    import importlib._bootstrap_external as external

    found = source.stat()
    data = external._code_to_timestamp_pyc(code, int(found.st_mtime), found.st_size)
    cached.write_bytes(data)


def test_what_is_made_under_umask_002_is_closed_to_the_group(machine: Machine) -> None:
    machine.open()
    for folder in (machine.home / ".cache", machine.cache, *machine.cache.iterdir()):
        assert folder.stat().st_mode & 0o777 == 0o700, folder

    def look() -> None:
        with pytest.raises(PermissionError):
            os.listdir(machine.cache)

    machine.as_other(look)


def test_a_cache_that_a_shared_group_may_write_to_is_refused(machine: Machine) -> None:
    """As skyctl made it under umask 002: another user put bytecode beside what had been sent."""
    poisoned_package(machine, machine.cache)
    machine.share(machine.home / ".cache", machine.cache)
    with pytest.raises(
        UnfitError, match=r"elm .*\.cache: group daemon may write to it, which has daemon"
    ) as caught:
        machine.open()
    assert "chmod go-w" in str(caught.value.hint)
    assert "XDG_CACHE_HOME" in str(caught.value.hint)
    (machine.home / ".cache").chmod(0o755)
    with pytest.raises(UnfitError, match=r"elm .*\.cache/skyctl: group daemon") as caught:
        machine.open()
    assert f"`rm -r {machine.cache}`" in str(caught.value.hint)


def test_a_folder_that_another_user_has_put_in_the_caches_place_is_refused(machine: Machine) -> None:
    machine.share(machine.home / ".cache")
    machine.as_other(lambda: poisoned_package(machine, machine.cache))
    for mode in (0o775, 0o755):
        (machine.home / ".cache").chmod(mode)
        with pytest.raises(
            UnfitError, match="group daemon may" if mode == 0o775 else "it belongs to daemon, not"
        ):
            machine.open()


def test_in_a_folder_that_anybody_may_use_only_ones_own_counts(machine: Machine) -> None:
    """A sticky folder, as /tmp: another user was there first, with a folder or with a link."""
    shared = machine.folder / "tmp"
    shared.mkdir()
    shared.chmod(0o1777)
    ours = machine.folder / "ours"
    make_private_folder(ours)
    plants: dict[str, Callable[[Path], object]] = {
        "folder": lambda path: path.mkdir(),
        "link": lambda path: path.symlink_to(ours),
    }
    for name, plant in plants.items():
        path = shared / name
        machine.as_other(lambda plant=plant, path=path: plant(path))
        with pytest.raises(UnsafeFolderError, match=f"it belongs to daemon.*{path}"):
            make_private_folder(path / "skyctl")
    make_private_folder(shared / "mine" / "skyctl")
    (shared / "own-link").symlink_to(ours)
    make_private_folder(shared / "own-link" / "skyctl")
    shared.chmod(0o777)
    with pytest.raises(UnsafeFolderError, match=f"anybody may write to it.*{shared}'"):
        make_private_folder(shared / "mine" / "skyctl")


def test_what_was_planted_in_a_tree_while_it_was_open_is_gone(machine: Machine) -> None:
    """Afterwards its owner has closed the cache, and trusts it again."""
    machine.open()
    package = next((machine.cache / "packages").iterdir())
    inside = [folder for folder in package.rglob("*") if folder.is_dir()]
    opened = (machine.home / ".cache", machine.cache, machine.cache / "packages")
    machine.share(*opened, package, *inside)
    machine.as_other(lambda: poison(machine, package))
    for folder in opened:
        folder.chmod(0o700)
    assert package.joinpath("sitecustomize.py").exists()
    machine.open()
    assert not package.joinpath("sitecustomize.py").exists()
    assert all(path.lstat().st_uid == 0 for path in package.rglob("*"))


def test_links_and_files_of_others_are_no_part_of_the_cache(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("skyctl.agent.node_cache.VERIFY_BLOB_BYTES", 1)
    elsewhere = machine.folder / "elsewhere"
    machine.share(machine.home / ".cache")
    machine.share(machine.cache, machine.cache / "trees", machine.cache / "blobs", elsewhere)
    digest, archive = pack_archive({"train.py": b"pass\n"})

    def plant() -> None:
        (elsewhere / "train.py").write_text(machine.evil)
        (machine.cache / "trees" / digest).symlink_to(elsewhere)
        (machine.cache / "blobs" / ("1" * 64)).write_bytes(b"evil")

    machine.as_other(plant)
    for name in ("..", "", "trees", "blobs"):
        (machine.cache / name).chmod(0o700)
    store = NodeCache(machine.cache)
    assert store.tree("trees", digest) is None
    assert store.blob("1" * 64, 4) is None
    path = store.add_tree("trees", digest, archive)
    assert not path.is_symlink()
    assert (path / "train.py").read_bytes() == b"pass\n"
    assert (elsewhere / "train.py").read_text() == machine.evil
    store.close()
    machine.share(elsewhere)
    shutil.rmtree(machine.cache / "trees")
    (machine.cache / "trees").symlink_to(elsewhere)
    with pytest.raises(UnsafeFolderError, match="group daemon may write"):
        NodeCache(machine.cache)


def test_a_planted_environment_is_never_run(machine: Machine) -> None:
    root = machine.home / "data" / "skyctl" / "env"
    environment = root / "py3.11-torch2-0123456789"
    machine.share(machine.home / "data", machine.home / "data" / "skyctl", root)

    def plant() -> None:
        (environment / "bin").mkdir(parents=True)
        (environment / "skyctl.json").write_text(json.dumps({"owners": ["x"], "requirements": []}))
        python = environment / "bin" / "python"
        python.write_text(f"#!{sys.executable}\n{machine.evil}")
        python.chmod(0o755)

    machine.as_other(plant)
    look = LookOrder(str(environment / "bin" / "python"))
    for closed, who in (
        ((), "data: group daemon may write to it"),
        ((machine.home / "data", machine.home / "data" / "skyctl", root), "0123456789: it belongs to daemon"),
    ):
        for folder in closed:
            folder.chmod(0o755)
        with pytest.raises(UnfitError, match=who):
            _inspect(look)
    (machine.home / "data").chmod(0o775)
    with pytest.raises(UnfitError, match="group daemon may write to it"), lock_environments(lambda *_: None):
        pass
    with pytest.raises(UnfitError, match="group daemon may write to it"):
        release_environments(["x"], None, lambda *_: None)


def test_an_environment_that_others_could_replace_is_refused_when_it_is_used(machine: Machine) -> None:
    """Its Python is what runs first there, so this warns before it was replaced."""
    environment = machine.home / "data" / "skyctl" / "env" / "py"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(environment)], check=True)
    (environment / "skyctl.json").write_text("{}")
    node = machine.node.model_copy(update={"python": str(environment / "bin" / "python")})
    environment.chmod(0o700)
    with open_session(node, OPTIONS):
        pass
    machine.share(environment.parent)
    with pytest.raises(UnfitError, match=r"data/skyctl/env: group daemon may write") as caught:
        open_session(node, OPTIONS)
    assert "XDG_DATA_HOME" in str(caught.value.hint)


def test_what_the_launcher_keeps_is_refused_where_others_could_write_it(machine: Machine) -> None:
    """It says which Python runs on a node."""
    state = machine.home / "state"
    machine.share(state)

    def plant() -> None:
        (state / "setups").mkdir()
        (state / "setups" / "home.json").write_text("{}")

    machine.as_other(plant)
    with pytest.raises(SkyctlError, match="state: group daemon may write to it") as caught:
        read_environments("home")
    assert "SKYCTL_HOME" in str(caught.value.hint)
    state.chmod(0o755)
    with pytest.raises(SkyctlError, match="state/setups: it belongs to daemon, not to root"):
        read_environments("home")
    make_private(machine.folder / "out")  # what the user names is the user's business
    assert state.stat().st_mode & 0o777 == 0o755


def test_a_socket_and_a_trial_of_another_users_are_not_believed(machine: Machine) -> None:
    machine.share(machine.home / ".cache", machine.cache, machine.cache / "sessions")

    def plant() -> None:
        (machine.cache / FILE_NAME).write_text("{}")
        (machine.cache / "sessions" / "s-evil").mkdir()
        with socket.socket(socket.AF_UNIX) as sock:
            sock.bind(str(machine.cache / "sessions" / "s-evil" / "line"))

    machine.as_other(plant)
    (machine.home / ".cache").chmod(0o700)
    with pytest.raises(UnfitError, match=r"\.cache/skyctl: group daemon may write to it"):
        machine.open()


def test_what_users_really_have_goes_on_working(machine: Machine) -> None:
    """Groups without another member, readable homes, links and parents of root's, what others may read."""
    for folder in (machine.home, machine.home / ".cache", machine.cache):
        folder.mkdir(exist_ok=True)
        folder.chmod(0o775)  # of group root, which has root alone: as a user's own group under umask 002
    (machine.folder / "way").symlink_to(machine.home)
    make_private_folder(machine.folder / "way" / ".cache" / ".." / ".cache" / "skyctl")
    assert machine.cache.stat().st_mode & 0o777 == 0o700
    machine.cache.chmod(0o755)
    check_private_folder(machine.cache)
    machine.open()
    assert machine.cache.stat().st_mode & 0o777 == 0o700
    with pytest.raises(FileNotFoundError, match="missing"):
        check_private_folder(machine.home / "missing" / "x")


def test_an_access_control_list_counts(machine: Machine) -> None:
    """As `setfacl -m u:daemon:rwx` makes it: the group, which is root's, seems to be who may write."""
    entries = ((0x01, 7, -1), (0x02, 7, OTHER.pw_uid), (0x04, 5, -1), (0x10, 7, -1), (0x20, 5, -1))
    packed = b"".join(struct.pack("<HHi", *entry) for entry in entries)
    try:
        os.setxattr(machine.home, ACL_ATTRIBUTE, struct.pack("<I", 2) + packed)
    except OSError as exc:
        pytest.skip(f"no access control lists here: {exc}")
    with pytest.raises(UnfitError, match="its access control list may let others write"):
        machine.open()
