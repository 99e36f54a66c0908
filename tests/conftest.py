"""Every test gets folders of its own and leaves nothing behind: process, file, namespace, cgroup, mount.

Processes are found by tags in their environment, which every descendant inherits: ``SKYCTL_TEST_TAG``, set
here for each test, and ``SKYCTL_SESSION``, which skyctl's agents give to all that they start. A tag does not
pass through sshd; what a lab starts is found by being new, and so is only held against this run where nothing
else can have made it, with ``SKYCTL_REQUIRE_LAB=1`` as in CI: at the end of all, by the process that runs it.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import tempfile
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import settings
from tests.helpers.warm_python import NAME, close_warm_python

from skyctl.device.dtype_support import FILE_NAME, ISA_VARIABLE, TRIED_DTYPES, find_dtype_support

TAG = "SKYCTL_TEST_TAG"
PATIENCE_S = 20.0
"""How long what was told to end may take to do so."""

PROC = Path("/proc")
ALONE = os.environ.get("SKYCTL_REQUIRE_LAB") == "1"
_KEPT = (b"multiprocessing.resource_tracker", b"multiprocessing.forkserver", f"-X\0{NAME}=".encode())
"""Helpers of the standard library and of ours, which live as long as the process that started them."""


TEMPORARY = pytest.StashKey[Path]()
BEFORE = pytest.StashKey[set[tuple[str, str]]]()
LEFT = pytest.StashKey[list[tuple[str, str]]]()
ALL = "folder_of_all"
"""The key of the folder in which processes of pytest-xdist find what one of them has made for all."""

LONG = {"accelerator", "scripts", "torch", "transport"}
"""Folders whose files take long, though none of their tests does: each starts processes that import torch."""

settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.load_profile("repeatable")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files that take long come first: where several run at a time, none of them is the last one alone."""
    slow = Counter(
        item.path
        for item in items
        if item.get_closest_marker("slow") and not item.get_closest_marker("matrix")
    )
    items.sort(key=lambda item: -max(slow[item.path], item.path.parent.name in LONG))


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """One folder for all temporary files of this process, pytest's own among them, gone at the end."""
    folder = Path(tempfile.mkdtemp(prefix="t-"))  # short: sockets' paths are limited to 107 bytes
    config.stash[TEMPORARY] = folder
    if hasattr(config, "workerinput") or not config.option.basetemp:
        config.option.basetemp = str(folder / "pytest")


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    node.workerinput[ALL] = str(node.config.stash[TEMPORARY])


def pytest_unconfigure(config: pytest.Config) -> None:
    shutil.rmtree(config.stash[TEMPORARY], ignore_errors=True)


@pytest.hookimpl(tryfirst=True)
def pytest_sessionstart(session: pytest.Session) -> None:
    if ALONE and not hasattr(session.config, "workerinput"):  # that is: not one of several (pytest-xdist)
        session.config.stash[BEFORE] = _system()


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    if BEFORE in session.config.stash:
        left = _wait(lambda: sorted(_system() - session.config.stash[BEFORE]))
        session.config.stash[LEFT] = left
        if left:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    for what in config.stash.get(LEFT, []):
        terminalreporter.line(f"ERROR the tests left behind: {' '.join(what)}", red=True)


@pytest.fixture(scope="session")
def session_tag() -> str:
    """The tag that every process that descends from this test session carries in its environment."""
    return uuid.uuid4().hex


@pytest.fixture(scope="session")
def made_once(pytestconfig: pytest.Config) -> Callable[[str, Callable[[Path], None]], Path]:
    """A folder, made by the first test process that asks: ``made_once("name", make)``; not to be changed."""
    of_all = Path(getattr(pytestconfig, "workerinput", {}).get(ALL, pytestconfig.stash[TEMPORARY]))

    def folder(name: str, make: Callable[[Path], None]) -> Path:
        with (of_all / f"{name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            done = of_all / name
            if not done.exists():
                making = Path(tempfile.mkdtemp(prefix=name, dir=of_all))
                make(making)
                making.rename(done)
        return done

    return folder


@pytest.fixture(scope="session", autouse=True)
def _clean_session(session_tag: str, pytestconfig: pytest.Config) -> Iterator[None]:
    """Nothing that this session made outlives it, whichever test made it."""
    temporary = pytestconfig.stash[TEMPORARY]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(TAG, session_tag)
        patch.setenv("TMPDIR", str(temporary))
        patch.setattr(tempfile, "tempdir", str(temporary))
        patch.setenv("SKYCTL_HOME", str(temporary / "state"))  # for fixtures wider than one test
        patch.setenv("XDG_CACHE_HOME", str(temporary / "cache"))
        patch.delenv("SKYCTL_CLUSTER", raising=False)
        yield
    close_warm_python()
    left = _wait(lambda: _carrying(f"{TAG}={session_tag}".encode(), _pids(), exact=False))
    faults = [f"process {_named(pid)}" for pid in left]
    _kill(left)
    if faults:
        pytest.fail("the test session left behind: " + "; ".join(faults), pytrace=False)


@pytest.fixture(scope="session", autouse=True)
def dtype_support(_clean_session: None, pytestconfig: pytest.Config) -> Path:
    """The file with what this processor computes in, tried once for all sessions on this machine.

    Tests that compute in this process, and all that they start, keep to the instructions that work.
    """
    folder = pytestconfig.rootpath / ".pytest_cache" / "dtype-support"
    for dtype in TRIED_DTYPES:
        cap = find_dtype_support(dtype, folder).max_cpu_isa
        if cap is not None:
            os.environ[ISA_VARIABLE] = cap
            find_dtype_support(dtype, folder)  # what nodes look for with that environment
    return folder / FILE_NAME


@pytest.fixture(autouse=True)
def _own_folders(
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
    dtype_support: Path,
    _no_leaks: None,
) -> None:
    """State, cache, configuration and HOME of this test alone."""
    home = tmp_path_factory.mktemp("home")
    pyenv = Path.home() / ".pyenv"
    if "PYENV_ROOT" not in os.environ and pyenv.is_dir():
        monkeypatch.setenv("PYENV_ROOT", str(pyenv))  # its shims look there, else in HOME
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("SKYCTL_HOME", str(home / "skyctl-state"))
    for name in ("STATE", "CACHE", "CONFIG", "DATA"):
        monkeypatch.setenv(f"XDG_{name}_HOME", str(home / name.lower()))
    if dtype_support.is_file():
        cache = home / "cache" / "skyctl"
        cache.mkdir(parents=True)
        shutil.copy(dtype_support, cache)


@pytest.fixture(autouse=True)
def _same_draws() -> None:
    """A test draws the same numbers each time, whichever tests ran before it in this process."""
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _no_leaks(session_tag: str, _clean_session: None) -> Iterator[None]:
    """Fails a test that leaves a process or a ``skyctl*`` temporary file, and removes what it left."""
    tag = f"{session_tag}.{uuid.uuid4().hex[:8]}"
    files = _temporary()
    before = set(_pids())
    children = set(_children())
    os.environ[TAG] = tag
    interrupt = signal.getsignal(signal.SIGINT)
    try:
        yield
    finally:
        os.environ[TAG] = session_tag
        signal.signal(signal.SIGINT, interrupt)  # a command that is run in this process ends with it ignored

    def leaked() -> list[int]:
        new = [pid for pid in _pids() if pid not in before]
        return sorted({*_carrying(f"{TAG}={tag}".encode(), new), *(set(_children()) - children)})

    left = _wait(leaked)
    faults = [f"process {_named(pid)}" for pid in left]
    _kill(left)
    for path in sorted(_temporary() - files):
        faults.append(f"file {path}")
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)
    if faults:
        pytest.fail("the test left behind: " + "; ".join(faults), pytrace=False)


def _wait(left: Callable[[], list]) -> list:
    """The leftovers that are still there after a while. Returns at once where there is nothing."""
    deadline = time.monotonic() + PATIENCE_S
    while (found := left()) and time.monotonic() < deadline:
        time.sleep(0.05)
    return found


def _carrying(tag: bytes, pids: list[int], *, exact: bool = True) -> list[int]:
    """Those of these processes, other than this one, that have the tag in their environment."""
    found = []
    for pid in pids:
        if pid == os.getpid():
            continue
        variables = _read(pid, "environ").split(b"\0")
        if any(v == tag if exact else v.startswith(tag) for v in variables) and _counts(pid):
            found.append(pid)
    return found


def _children() -> list[int]:
    """This process's children, those included that were forked without a new environment."""
    for _ in range(100):
        try:
            tasks = list((PROC / "self" / "task").iterdir())
            pids = [int(pid) for task in tasks for pid in (task / "children").read_text().split()]
        except (FileNotFoundError, ProcessLookupError):
            continue  # a thread has ended meanwhile, its children are another one's now
        except OSError:
            break
        return [pid for pid in pids if _counts(pid)]
    return []


def _counts(pid: int) -> bool:
    """Whether it runs: a zombie has ended, and the standard library's helpers end with this process."""
    state = _read(pid, "stat").rpartition(b")")[2].split()
    command = _read(pid, "cmdline")
    return bool(state) and state[0] not in (b"Z", b"X") and not any(kept in command for kept in _KEPT)


def _pids() -> list[int]:
    """None where there is no /proc."""
    return [int(name) for name in os.listdir(PROC) if name.isdigit()] if PROC.is_dir() else []


def _read(pid: int, name: str) -> bytes:
    try:
        return (PROC / str(pid) / name).read_bytes()
    except OSError:
        return b""


def _named(pid: int) -> str:
    return f"{pid} ({_read(pid, 'cmdline').replace(bytes(1), b' ').decode(errors='replace').strip()[:160]})"


def _kill(pids: list[int]) -> None:
    for pid in pids:
        with suppress(OSError):
            os.kill(pid, signal.SIGKILL)


def _temporary() -> set[Path]:
    return set(Path(tempfile.gettempdir()).glob("skyctl*"))


def _system() -> set[tuple[str, str]]:
    """Everything that skyctl has on this machine outside its own folders: (what it is, its name)."""
    found = {
        ("process", str(pid)) for pid in _pids() if b"\0SKYCTL_SESSION=" in b"\0" + _read(pid, "environ")
    }
    netns = Path("/run/netns")
    if netns.is_dir():
        found |= {("network namespace", entry.name) for entry in netns.iterdir()}
    for pid in _pids():
        with suppress(OSError):
            found.add(("network namespace", str((PROC / str(pid) / "ns" / "net").readlink())))
    with suppress(OSError):
        found |= {("cgroup", str(path)) for path in Path("/sys/fs/cgroup").rglob("skyctl*") if path.is_dir()}
    try:
        mounts = (PROC / "self" / "mountinfo").read_text().splitlines()
    except OSError:
        mounts = []
    found |= {("mount", line.split()[4]) for line in mounts if "skyctl" in line}
    interfaces = Path("/sys/class/net")
    if interfaces.is_dir():
        found |= {("network interface", entry.name) for entry in interfaces.iterdir()}
    return found | {("file", str(path)) for path in Path("/tmp").glob("skyctl*")}
