"""Wheels for nodes that reach no package index, found and fetched here for their system and Python.

uv resolves for another system and Python than this machine's, and says which wheels that takes. Its own
program is such a wheel, for nodes of another system.
"""

from __future__ import annotations

import base64
import hashlib
import os
import platform
import shutil
import ssl
import subprocess
import sys
import tempfile
import threading
import tomllib
import urllib.request
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import uv

from skyctl.agent.node_cache import file_digest
from skyctl.errors import InputError, SkyctlError, UnfitError
from skyctl.files import home, make_private
from skyctl.setup.node import uv_runner

WHEEL_FOLDER_PREFIX = "wheels-"
"""Of the folder's name in SKYCTL_HOME; the process's number follows."""
END_TIMEOUT_S = 5.0
GLIBC_MINORS = (40, 39, 38, 37, 36, 35, 34, 33, 32, 31, 28, 17)
"""Of glibc 2: those that uv has a name for; newest first."""


@dataclass(frozen=True)
class WheelTarget:
    """A target for wheels: a node's Python (``3.11.7``), system, processor, and glibc (``2.35``), if any."""

    version: str
    system: str
    machine: str
    glibc: str | None

    @property
    def is_this_machine(self) -> bool:
        """Whether programs of this machine run there."""
        return (self.system, self.machine) == (platform.system(), platform.machine())

    @property
    def platform(self) -> str | None:
        """uv's name of it; None where it has none."""
        if self.system == "Darwin":
            return f"{'aarch64' if self.machine == 'arm64' else self.machine}-apple-darwin"
        if self.glibc is None or self.machine not in ("x86_64", "aarch64"):
            return None
        major, minor = map(int, self.glibc.split("."))
        fits = [one for one in GLIBC_MINORS if (2, one) <= (major, minor)]
        return f"{self.machine}-manylinux_2_{fits[0]}" if fits else None


def unpacked_bytes(path: Path) -> int:
    """Bytes of what a wheel holds, unpacked."""
    with zipfile.ZipFile(path) as wheel:
        return sum(entry.file_size for entry in wheel.infolist())


class WheelFetcher:
    """A folder of wheels for the time of one command; leave it, and the folder and a running uv are gone.

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
        self._lock = threading.RLock()  # one download at a time: they share this machine's line
        self._found: dict[object, Sequence[Path]] = {}
        self._programs: dict[tuple[str, str], tuple[Path, str]] = {}
        self._running: subprocess.Popen[str] | None = None
        self._closed = False

    def __enter__(self) -> WheelFetcher:
        return self

    def __exit__(self, *_: object) -> None:
        self._closed = True
        if self._running is not None:
            with suppress(OSError):
                self._running.kill()
        ended = self._lock.acquire(timeout=END_TIMEOUT_S)  # then nothing is written there any more
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
        if ended:
            self._lock.release()

    def _require_open(self) -> None:
        if self._closed:
            raise SkyctlError("setup was ended")

    def fetch(
        self,
        node: str,
        target: WheelTarget,
        wanted: Sequence[str],
        options: Sequence[str] = (),
        cpu_index: str | None = None,
    ) -> Sequence[Path]:
        """The wheels wanted, and those that they require, for that target. Nodes that are alike share them.

        Raises:
            UnfitError: for ``node`` there is no wheel of something, or no index was reached from here either.
        """
        key = (target, tuple(wanted), tuple(options), cpu_index)
        with self._lock:
            self._require_open()
            if key not in self._found:
                folder = Path(tempfile.mkdtemp(dir=self._place()))
                self._found[key] = self._fetch(node, target, wanted, options, cpu_index, folder)
            return self._found[key]

    def program(self, node: str, target: WheelTarget) -> tuple[Path, str]:
        """uv's program for that target, as (file, digest).

        Raises:
            UnfitError, SkyctlError: as ``fetch``.
        """
        key = (target.system, target.machine)
        with self._lock:
            if key not in self._programs:
                path = _own_uv() if target.is_this_machine else self._unpack_uv(node, target)
                self._programs[key] = path, file_digest(path)
            return self._programs[key]

    def _unpack_uv(self, node: str, target: WheelTarget) -> Path:
        (found,) = self.fetch(node, target, [f"uv=={version('uv')}"])
        path = self._place() / f"uv-{target.system}-{target.machine}"
        with zipfile.ZipFile(found) as wheel:
            path.write_bytes(wheel.read(f"uv-{version('uv')}.data/scripts/uv"))
        return path

    def _place(self) -> Path:
        if self._folder is None:
            state = make_private(home())
            for old in state.glob(f"{WHEEL_FOLDER_PREFIX}*"):
                if not _is_process_alive(old.name.removeprefix(WHEEL_FOLDER_PREFIX).partition("-")[0]):
                    shutil.rmtree(old, ignore_errors=True)  # of a setup that was killed
            self._folder = Path(tempfile.mkdtemp(prefix=f"{WHEEL_FOLDER_PREFIX}{os.getpid()}-", dir=state))
        return self._folder

    def _fetch(
        self,
        node: str,
        target: WheelTarget,
        wanted: Sequence[str],
        options: Sequence[str],
        cpu_index: str | None,
        folder: Path,
    ) -> Sequence[Path]:
        for_node = f"node {node}: Python {target.version} on {target.system} {target.machine}"
        if target.platform is None:
            libc = f"glibc {target.glibc}" if target.glibc is not None else "no glibc"
            raise UnfitError(
                f"no wheels can be found here for {for_node}, {libc}",
                node=node,
                hint="they can for x86_64 and aarch64 with glibc; else name a `python:` that has torch",
            )
        lines, arguments = uv_runner.split_options(options if self._own is None else ())
        listed, locked = folder / "requirements.txt", folder / "pylock.toml"
        listed.write_text("\n".join([*lines, *wanted, ""]))
        arguments += ["--python-platform", target.platform, "--python-version", target.version]
        if self._own is not None:
            arguments += ["--no-index", "--find-links", str(self._own)]
        environment = uv_runner.uv_environment(folder, None if self._own else self._index, cpu_index)
        argv = [str(_own_uv()), "pip", "compile", "--quiet", *arguments, "--only-binary", ":all:"]
        argv += [
            "--python",
            sys.executable,
            "--format",
            "pylock.toml",
            "--output-file",
            str(locked),
            str(listed),
        ]
        done = uv_runner.run_uv(argv, environment, on_start=self._watch)
        if done.status == uv_runner.NO_SOLUTION or (done.status and self._own is not None):
            where = f"in {self._own}" if self._own is not None else "on the package index"
            raise UnfitError(f"{where} there are no wheels for {for_node}: {done.words}", node=node)
        if done.status:
            raise UnfitError(
                f"neither node {node} nor this machine gets packages from an index: {done.words}",
                node=node,
                hint="give --index-url of one that can be reached, or --wheels DIR with what is needed",
            )
        found = []
        for package in tomllib.loads(locked.read_text())["packages"]:
            wheel = next(iter(package.get("wheels", ())), package.get("archive", {}))
            name = Path(unquote(urlsplit(wheel.get("url", "")).path)).name
            if not name.endswith(".whl"):
                raise UnfitError(f"there is no wheel of {package['name']} for {for_node}", node=node)
            found.append(self._have(node, wheel, folder / name, environment))
        return sorted(found)

    def _watch(self, process: subprocess.Popen[str]) -> None:
        self._running = process
        self._require_open()

    def _have(self, node: str, wheel: Mapping[str, Any], path: Path, environment: Mapping[str, str]) -> Path:
        """The wheel's file: the user's own, else fetched to ``path``, and what its index says it is."""
        url = urlsplit(wheel["url"])
        if url.scheme == "file":
            return Path(unquote(url.path))
        digests = {kind: hashlib.new(kind) for kind in wheel.get("hashes", {})}
        try:
            with _open_url(wheel["url"], environment) as answer, path.open("wb") as file:
                while block := answer.read(1 << 20):
                    self._require_open()
                    file.write(block)
                    for digest in digests.values():
                        digest.update(block)
            why = "it is not what the index says it is"
        except OSError as exc:
            why, digests = str(exc), {"": hashlib.sha256()}
        listed = wheel.get("hashes", {})
        if any(digest.hexdigest() != listed.get(kind) for kind, digest in digests.items()):
            raise UnfitError(
                f"{path.name} for node {node} can't be fetched here: {why}",
                node=node,
                hint="try again, or --wheels DIR with what is needed; SKYCTL_HOME needs room for it",
            )
        return path


def _own_uv() -> Path:
    try:
        return Path(uv.find_uv_bin())
    except FileNotFoundError as exc:
        raise SkyctlError("uv's program is not in this environment", hint="pip install uv") from exc


@contextmanager
def _open_url(url: str, environment: Mapping[str, str]) -> Iterator[Any]:
    """Opens that URL, with uv's certificates and the passwords of its indexes.

    Raises:
        OSError: it can't be had.
    """
    host = urlsplit(url).netloc.rpartition("@")[2]
    request = urllib.request.Request(url)  # noqa: S310 - of the user's index
    keys = ("UV_DEFAULT_INDEX", "UV_INDEX_URL", "UV_INDEX", "UV_EXTRA_INDEX_URL")
    for index in (urlsplit(one) for key in keys for one in environment.get(key, "").split()):
        if index.username is not None and index.netloc.rpartition("@")[2] == host:
            pair = f"{unquote(index.username)}:{unquote(index.password or '')}".encode()
            request.add_unredirected_header("Authorization", f"Basic {base64.b64encode(pair).decode()}")
    context = ssl.create_default_context(cafile=environment.get("SSL_CERT_FILE"))
    with urllib.request.urlopen(request, timeout=uv_runner.TIMEOUT_S, context=context) as answer:  # noqa: S310
        yield answer


def _is_process_alive(pid: str) -> bool:
    """Whether that process is there (yes, where its number can't be read)."""
    try:
        os.kill(int(pid), 0)
    except ProcessLookupError:
        return False
    except (OSError, ValueError):
        return True
    return True
