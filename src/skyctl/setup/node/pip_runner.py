"""pip without installing pip: a wheel of it is run as it is, and what it says is told apart.

Every Python that has ``ensurepip`` has such a wheel; Debian keeps it elsewhere, or leaves it out.
"""

from __future__ import annotations

import os
import re
import subprocess
import sysconfig
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

RETRIES = 2
TIMEOUT_S = 15
"""For a connection to an index, and between two pieces of an answer; tried again ``RETRIES`` times."""
KEPT_LINES = 400

_OFFLINE = re.compile(
    r"connection broken by|NewConnectionError|ConnectTimeoutError|Max retries exceeded|ProxyError|"
    r"Temporary failure in name resolution|Network is unreachable|connection error:|ReadTimeoutError|SSLError"
)
_DISK_FULL = re.compile(r"No space left on device|Disk quota exceeded|Errno 28\b|Errno 122\b")
_NO_MATCH = re.compile(r"No matching distribution found for (.+?)(?: \(from .*)?$")
_REDIRECTING_SETTINGS = (
    "TARGET",
    "PREFIX",
    "ROOT",
    "USER",
    "DRY_RUN",
    "NO_DEPS",
    "REQUIRE_VIRTUALENV",
    "PYTHON",
    "SRC",
)
"""pip's settings that would send what it installs somewhere else than into the environment."""


@dataclass(frozen=True)
class PipResult:
    """How pip ended, and the last of what it said."""

    status: int
    lines: tuple[str, ...]

    @property
    def offline(self) -> str | None:
        """The line that says that an index could not be reached, if one does."""
        return next((line for line in self.lines if _OFFLINE.search(line)), None)

    @property
    def disk_full(self) -> bool:
        """Whether the disk was full."""
        return any(_DISK_FULL.search(line) for line in self.lines)

    @property
    def unmatched(self) -> str | None:
        """The requirement that nothing was found for, if that is what was wrong."""
        found = (match[1] for line in self.lines if (match := _NO_MATCH.search(line)))
        return next(found, None)

    @property
    def why(self) -> str:
        """The errors, or the last line."""
        errors = [line.removeprefix("ERROR: ") for line in self.lines if line.startswith("ERROR: ")]
        conflict = [
            line.strip() for line in self.lines if re.match(r"\s+.* depends on |\s+The user requested", line)
        ]
        said = [line for line in self.lines if line.strip()]
        return " ".join([*errors[:3], *conflict[:4]]) or (said[-1] if said else f"status {self.status}")


def bundled_pip_wheel() -> str | None:
    """The newest wheel of pip that this Python brings with itself, if any."""
    folders = [sysconfig.get_config_var("WHEEL_PKG_DIR")]
    spec = find_spec("ensurepip")
    if spec is not None and spec.origin is not None:
        folders.append(str(Path(spec.origin).parent / "_bundled"))
    wheels = [wheel for folder in folders if folder for wheel in Path(folder).glob("pip-*.whl")]
    newest = max(wheels, key=lambda wheel: [int(n) for n in re.findall(r"\d+", wheel.name)], default=None)
    return str(newest) if newest is not None else None


def pip_environment(temporary: Path, index: Mapping[str, str | None], *, offline: bool) -> dict[str, str]:
    """What pip is run with: the node's own settings, less those that lead it elsewhere.

    Args:
        temporary: where it unpacks; beside the result, because /tmp may be small.
        index: ``index_url`` and ``extra_index_url``, where given. They may hold a password, so they go this
            way and not into an argument.
        offline: none of the node's settings count, and no index.
    """
    kept = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "PYTHONHOME")}
    if offline:
        kept = {key: value for key, value in kept.items() if not key.startswith("PIP_")}
        kept["PIP_CONFIG_FILE"] = os.devnull
    for switch in _REDIRECTING_SETTINGS:
        kept.pop(f"PIP_{switch}", None)
    for key, value in index.items():
        if value and not offline:
            kept[f"PIP_{key.upper()}"] = value
    return {**kept, "TMPDIR": str(temporary), "PIP_NO_INPUT": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}


def run_pip(argv: Sequence[str], env: Mapping[str, str], on_line: Callable[[str], None]) -> PipResult:
    """Runs it to its end; killed where we are."""
    lines: list[str] = []
    with subprocess.Popen(
        argv,
        env=dict(env),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    ) as process:
        try:
            assert process.stdout is not None
            for line in process.stdout:
                text = line.rstrip()
                lines.append(text)
                del lines[:-KEPT_LINES]
                on_line(text)
        except BaseException:
            process.kill()
            raise
    return PipResult(process.returncode, tuple(lines))


class PipActivity(NamedTuple):
    """What pip is doing: in words, and whether it has everything and now installs it."""

    description: str
    installs: bool


def parse_pip_activity(line: str) -> PipActivity | None:
    """What one line of pip's output says it is doing; None for most lines."""
    if found := re.match(r"\s*(Collecting|Downloading|Processing) ([^\s;(]+)", line):
        name = found[2].rpartition("/")[2]
        size = re.search(r"\(([\d.]+ [kMG]?B)\)", line)
        verb = {"Collecting": "looking for", "Downloading": "downloading", "Processing": "reading"}[found[1]]
        return PipActivity(f"{verb} {name}" + (f" ({size[1]})" if size else ""), installs=False)
    if found := re.match(r"Installing collected packages: (.*)", line):
        return PipActivity(f"installing {found[1].count(',') + 1} packages", installs=True)
    return None
