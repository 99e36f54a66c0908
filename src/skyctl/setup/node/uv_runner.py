"""uv, here and on nodes: how it is run, and which settings it is told of.

uv reads nothing of pip's, which people have set up for their indexes, so that is translated. Of uv's own
settings those of indexes, connections and Pythons count; others could lead what it installs elsewhere.
"""

from __future__ import annotations

import configparser
import contextlib
import os
import re
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

RETRIES = 2
TIMEOUT_S = 15
"""For a connection to an index, and between two pieces of an answer; tried again ``RETRIES`` times."""
REACH_TIMEOUT_S = 5.0
KEPT_LINES = 400
NO_SOLUTION = 1
"""uv's status where packages don't fit the requirements; else the machine or its network failed."""
DISK_FULL_ERRORS = {28, 122}  # ENOSPC, EDQUOT
CERTIFICATES = (
    "/etc/ssl/certs/ca-certificates.crt",
    "/etc/pki/tls/certs/ca-bundle.crt",
    "/etc/ssl/ca-bundle.pem",
)
"""Files of authorities that Linux systems trust, their owners' own too; uv brings some for the others."""

_OWN_SETTINGS = re.compile(
    r"UV_((DEFAULT_)?INDEX|(EXTRA_)?INDEX_URL|INDEX_\w+_(USERNAME|PASSWORD)|FIND_LINKS|HTTP_\w+|INSECURE_HOST"
    r"|KEYRING_PROVIDER|SYSTEM_CERTS|PYTHON_INSTALL_MIRROR|PYTHON_DOWNLOADS_JSON_URL)"
)
_PIP_SETTINGS = {
    "index-url": ("UV_DEFAULT_INDEX",),
    "extra-index-url": ("UV_INDEX",),
    "find-links": ("UV_FIND_LINKS",),
    "trusted-host": ("UV_INSECURE_HOST",),
    "keyring-provider": ("UV_KEYRING_PROVIDER",),
    "constraint": ("UV_CONSTRAINT",),
    "cert": ("SSL_CERT_FILE",),
    "client-cert": ("SSL_CLIENT_CERT",),
    "proxy": ("HTTP_PROXY", "HTTPS_PROXY"),
    "timeout": ("UV_HTTP_TIMEOUT",),
    "default-timeout": ("UV_HTTP_TIMEOUT",),
    "retries": ("UV_HTTP_RETRIES",),
}
_NOT_IN_UV = ("--prefer-binary", "--use-feature")


def uv_environment(
    temporary: Path, index: Mapping[str, str | None] | None, cpu_index: str | None = None
) -> dict[str, str]:
    """The variables for uv: this machine's settings of indexes and connections, none that lead elsewhere.

    Args:
        temporary: where it unpacks and caches; beside the result, which it links to.
        index: ``index_url`` and ``extra_index_url``, where given. They may hold a password, so they go this
            way and not into an argument. None: no index is asked, and none of the settings count.
        cpu_index: asked, too, where it can be reached.
    """
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("UV_", "PYTHON"))}
    found = kept | {"UV_HTTP_TIMEOUT": str(TIMEOUT_S), "UV_HTTP_RETRIES": str(RETRIES)}
    if any(map(os.path.exists, CERTIFICATES)):
        found["UV_SYSTEM_CERTS"] = "1"
    if index is None:
        found["UV_OFFLINE"] = "1"
    else:
        for option, words in _pip_settings().items():
            joined = ("," if option == "find-links" else " ").join(words.split())
            found |= dict.fromkeys(_PIP_SETTINGS.get(option, ()), joined)
        found |= {key: value for key, value in os.environ.items() if _OWN_SETTINGS.fullmatch(key)}
        given = {"UV_DEFAULT_INDEX": index.get("index_url"), "UV_INDEX": index.get("extra_index_url")}
        found |= {key: value for key, value in given.items() if value}
        if cpu_index is not None and is_url_reachable(cpu_index):
            found["UV_INDEX"] = f"{found.get('UV_INDEX', '')} {cpu_index}".strip()
    return found | {
        "UV_CACHE_DIR": str(temporary / "cache"),
        "TMPDIR": str(temporary),
        "UV_NO_CONFIG": "1",
        "UV_NO_PROGRESS": "1",
        "UV_INDEX_STRATEGY": "unsafe-best-match",  # as pip: the newest of all indexes
        "UV_PYTHON_DOWNLOADS": "never",
        "NO_COLOR": "1",
    }


def _pip_settings() -> dict[str, str]:
    """pip's settings here by option: of its files, in its order, then of ``PIP_…``."""
    own = os.environ.get("PIP_CONFIG_FILE", "")
    folders = [*os.environ.get("XDG_CONFIG_DIRS", "/etc/xdg").split(":")[::-1]]
    user = os.environ.get("XDG_CONFIG_HOME") or "~/.config"
    files = [*(f"{folder}/pip/pip.conf" for folder in folders), "/etc/pip.conf", "~/.pip/pip.conf"]
    found: dict[str, str] = {}
    for path in [] if own == os.devnull else [*files, f"{user}/pip/pip.conf", f"{sys.prefix}/pip.conf", own]:
        parser = configparser.RawConfigParser()
        with contextlib.suppress(configparser.Error, OSError, UnicodeError):
            parser.read(os.path.expanduser(path))  # noqa: PTH111 - without a home "~" stays as it is
        for section in filter(parser.has_section, ("global", "install")):
            found |= parser.items(section)
    found |= {key[4:].lower(): value for key, value in os.environ.items() if key.startswith("PIP_")}
    return {key.replace("_", "-"): value for key, value in found.items()}


def split_options(options: Sequence[str]) -> tuple[list[str], list[str]]:
    """Options of a requirements file as (lines that uv reads there, arguments for the rest)."""
    lines, arguments = [], []
    for line in options:
        name, _, value = line.replace("=", " ", 1).partition(" ")
        if name == "--pre":
            arguments += ["--prerelease", "allow"]
        elif name == "--trusted-host":
            arguments += ["--allow-insecure-host", value.strip()]
        elif name not in _NOT_IN_UV:
            lines.append(line)
    return lines, arguments


@dataclass(frozen=True)
class UvResult:
    """How uv ended, and the last of what it said."""

    status: int
    lines: tuple[str, ...]

    @property
    def is_disk_full(self) -> bool:
        """Whether the disk was full, by the system's number of the error."""
        numbers = (int(n) for line in self.lines for n in re.findall(r"\(os error (\d+)\)", line))
        return bool(DISK_FULL_ERRORS.intersection(numbers))

    @property
    def words(self) -> str:
        """The message that uv gave of its failure, in one line, for people."""
        starts = [number for number, line in enumerate(self.lines) if line.startswith("error:")]
        said = " ".join(" ".join(self.lines[starts[0] if starts else -1 :]).split())
        return said.removeprefix("error: ")[:1000] or f"status {self.status}"


def run_uv(
    argv: Sequence[str],
    environment: Mapping[str, str],
    on_line: Callable[[str], None] = lambda _: None,
    on_start: Callable[[subprocess.Popen[str]], None] = lambda _: None,
) -> UvResult:
    """Runs it to its end; killed where we are. ``on_start``: called with the process."""
    lines: list[str] = []
    with subprocess.Popen(
        argv,
        env=dict(environment),
        cwd=environment["TMPDIR"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    ) as process:
        try:
            on_start(process)
            assert process.stdout is not None
            for line in process.stdout:
                lines.append(line.rstrip())
                del lines[:-KEPT_LINES]
                on_line(line.strip())
        except BaseException:
            process.kill()
            raise
    return UvResult(process.returncode, tuple(lines))


def is_url_reachable(url: str) -> bool:
    """Whether something answers there within a few seconds, whatever it says."""
    try:
        with urllib.request.urlopen(url, timeout=REACH_TIMEOUT_S):  # noqa: S310 - ours
            return True
    except urllib.error.HTTPError:
        return True
    except (OSError, ValueError):
        return False
