"""Wheels for nodes that reach no package index: fetched here for their system and Python, to be pushed there.

``pip download`` takes the node's tags, but judges markers (``; sys_platform == …``) by this machine; what the
node's own pip then misses is fetched too (``fleet.py``).
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import io
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import zipfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from skyctl.agent.module_command import module_command
from skyctl.errors import InputError, SkyctlError, UnfitError
from skyctl.files import home, make_private
from skyctl.setup.node import environment_store, pip_runner

WHEEL_FOLDER_PREFIX = "wheels-"
"""Of the folder's name in SKYCTL_HOME; the process's number follows."""


@dataclass(frozen=True)
class WheelTarget:
    """What wheels must fit: a node's Python (``3.11.7``) and system, in pip's terms."""

    version: str
    implementation: str
    abis: tuple[str, ...]
    platforms: tuple[str, ...]


@dataclass(frozen=True)
class FetchedWheels:
    """Wheels here. ``unpacked_bytes``: what they hold."""

    paths: tuple[Path, ...]

    @property
    def unpacked_bytes(self) -> int:
        """Bytes of what all wheels hold, unpacked."""
        total = 0
        for path in self.paths:
            with zipfile.ZipFile(path) as wheel:
                total += sum(entry.file_size for entry in wheel.infolist())
        return total


class WheelFetcher:
    """A folder of wheels for the time of one command; leave it, and the folder and a running pip are gone.

    Args:
        own: the user's folder of wheels, asked in place of any index.
        index: ``index_url`` and ``extra_index_url``, where given.
    """

    def __init__(self, own: Path | None, index: Mapping[str, str | None]) -> None:
        if own is not None and not own.is_dir():
            raise InputError(f"--wheels {own} is no folder")
        self._own = own.resolve() if own is not None else None
        self._index = index
        self._folder: Path | None = None
        self._lock = threading.Lock()  # one download at a time: they share this machine's line
        self._running: subprocess.Popen[str] | None = None
        self._closed = False

    def __enter__(self) -> WheelFetcher:
        return self

    def __exit__(self, *_: object) -> None:
        self._closed = True
        running = self._running
        if running is not None:
            with suppress(OSError):
                running.kill()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    def fetch(
        self,
        node: str,
        target: WheelTarget,
        wanted: Sequence[str],
        options: Sequence[str],
        cpu_index: str | None,
    ) -> FetchedWheels:
        """What is wanted, and what that requires, for that target. Nodes that are alike share it.

        Raises:
            UnfitError: for ``node`` there is no wheel of something, or no index was reached from here either.
            SkyctlError: no pip here, or no room.
        """
        digest = hashlib.sha256(repr((target, cpu_index)).encode()).hexdigest()[:10]
        with self._lock:
            folder = self._place() / digest
            asked = folder / hashlib.sha256(repr((tuple(wanted), tuple(options))).encode()).hexdigest()[:16]
            if not asked.exists():
                folder.mkdir(exist_ok=True)
                self._download(node, target, wanted, options, cpu_index, folder)
                asked.touch()
            return FetchedWheels(tuple(sorted(folder.glob("*.whl"))))

    def _place(self) -> Path:
        if self._folder is None:
            state = make_private(home())
            for old in state.glob(f"{WHEEL_FOLDER_PREFIX}*"):
                if not _is_process_alive(old.name.removeprefix(WHEEL_FOLDER_PREFIX).partition("-")[0]):
                    shutil.rmtree(old, ignore_errors=True)  # of a setup that was killed
            self._folder = Path(tempfile.mkdtemp(prefix=f"{WHEEL_FOLDER_PREFIX}{os.getpid()}-", dir=state))
        return self._folder

    def _download(
        self,
        node: str,
        target: WheelTarget,
        wanted: Sequence[str],
        options: Sequence[str],
        cpu_index: str | None,
        folder: Path,
    ) -> None:
        listed = folder / "requirements.txt"
        listed.write_text("\n".join([*([] if self._own else options), *wanted, ""]))
        argv = [
            *_local_pip_command(),
            "--retries",
            str(pip_runner.RETRIES),
            "--timeout",
            str(pip_runner.TIMEOUT_S),
            "download",
            "--only-binary=:all:",
            "--dest",
            str(folder),
            "-r",
            str(listed),
        ]
        argv += ["--python-version", target.version, "--implementation", target.implementation]
        argv += [part for abi in target.abis for part in ("--abi", abi)]
        argv += [part for platform in target.platforms for part in ("--platform", platform)]
        if self._own is not None:
            argv += ["--no-index", "--find-links", str(self._own)]
        elif cpu_index is not None:
            argv += ["--extra-index-url", cpu_index]
        environment = pip_runner.pip_environment(folder, self._index, offline=self._own is not None)
        done = self._run(argv, environment)
        if done.status == 0:
            return
        if done.disk_full:
            free = (environment_store.free_bytes(folder) or 0) / 2**20
            raise SkyctlError(
                f"no room for wheels in {folder.parent}: {free:.0f} MiB are free, more is needed",
                hint="make room there, or set SKYCTL_HOME to a folder on another disk",
            )
        where = f"in {self._own}" if self._own is not None else "on the package index"
        for_node = f"node {node}: Python {target.version} on {target.platforms[0]}"
        if done.offline is not None and self._own is None:
            raise UnfitError(
                f"neither node {node} nor this machine reaches a package index: {done.offline.strip()[:200]}",
                node=node,
                hint="give --index-url of one that can be reached, or --wheels DIR with what is needed",
            )
        if done.unmatched is not None:
            raise UnfitError(f"{where} there is no wheel of {done.unmatched} for {for_node}", node=node)
        raise UnfitError(f"pip found no wheels for {for_node}: {done.why[:600]}", node=node)

    def _run(self, argv: Sequence[str], environment: Mapping[str, str]) -> pip_runner.PipResult:
        if self._closed:
            raise SkyctlError("setup was ended")
        process = subprocess.Popen(
            argv,
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )
        self._running = process
        try:
            with process:
                assert process.stdout is not None
                lines = tuple(line.rstrip() for line in process.stdout)
        finally:
            self._running = None
        return pip_runner.PipResult(process.returncode, lines)


def _is_process_alive(pid: str) -> bool:
    """Whether that process is there (yes, where its number can't be read)."""
    try:
        os.kill(int(pid), 0)
    except ProcessLookupError:
        return False
    except (OSError, ValueError):
        return True
    return True


def _local_pip_command() -> list[str]:
    if find_spec("pip") is not None:
        return module_command(sys.executable, "pip")
    wheel = pip_runner.bundled_pip_wheel()
    if wheel is None:
        raise SkyctlError(
            f"{sys.executable} has no pip and no ensurepip, so no wheels can be fetched here",
            hint="install pip here",
        )
    return [sys.executable, os.path.join(wheel, "pip")]  # noqa: PTH118 - inside a zip


def pip_wheel(node: str) -> tuple[str, bytes]:
    """A pip that can be run as it is, as (digest, bytes), for a node whose Python brings none.

    Raises:
        UnfitError: there is none here either.
    """
    wheel = pip_runner.bundled_pip_wheel()
    data = Path(wheel).read_bytes() if wheel is not None else _repack_installed_pip()
    if data is None:
        raise UnfitError(
            f"node {node} has no ensurepip, and this machine has no pip that could be sent there",
            node=node,
            hint="install it there: sudo apt install python3-venv (Debian, Ubuntu)",
        )
    return hashlib.sha256(data).hexdigest(), data


def _repack_installed_pip() -> bytes | None:
    """The pip of this environment, packed as a wheel would be."""
    try:
        files = importlib.metadata.distribution("pip").files or []
    except importlib.metadata.PackageNotFoundError:
        return None
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        for file in files:
            if re.match(r"pip(-[^/]*\.dist-info)?/", str(file)) and not str(file).endswith(".pyc"):
                info = zipfile.ZipInfo(str(file), (1980, 1, 1, 0, 0, 0))  # the same bytes each time
                archive.writestr(info, Path(str(file.locate())).read_bytes())
    return packed.getvalue()
