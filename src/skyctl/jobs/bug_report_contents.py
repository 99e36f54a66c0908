"""The contents of a bug report: versions, cluster file, profile and a run, all redacted (``redaction.py``).

Nothing is sent anywhere and no node is asked. A model's code and its data are never in it.
"""

from __future__ import annotations

import getpass
import importlib.metadata
import io
import json
import os
import platform
import re
import socket
import sys
import zipfile
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from skyctl import __version__
from skyctl.errors import SkyctlError
from skyctl.files import newest_profile, run_folder
from skyctl.inventory.cluster_file import read_cluster
from skyctl.jobs.redaction import Redactor, names_a_secret
from skyctl.records.cluster import Cluster

PACKAGES = (
    *("torch", "pydantic", "paramiko", "cryptography", "ortools", "numpy", "typer", "rich", "PyYAML"),
    *("transformers", "peft", "safetensors", "tensorboard"),
)
DEVICE_ID = re.compile(r"[^/]+/[a-z]+:\d+")
_PLAIN_VALUE = re.compile(r"[-+0-9._e]*|true|false|none", re.IGNORECASE)
"""A script's argument that identifies nobody."""
LOG_LINES = 200
"""Last lines of each log that are included."""
FIGURE_LINES = 50
MAX_FILE_BYTES = 4 * 2**20
"""A larger file is left out, and named in the notes."""

ABOUT = """\
A bug report of skyctl {version}.

{files}

Replaced, everywhere: names of nodes, hosts, groups, users and of the cluster (node1, host1, …), paths of
keys and of other files outside of the system's folders, addresses, environment variables' values, and what
looks like a password, a token or a key. The same name is always replaced by the same word.

Not in it: your model's code, its data, weights and checkpoints, ssh configuration, keys.

Logs hold what your own code has printed, and tracebacks quote lines of it: look through them before you
send this (unzip -p FILE | less), or leave them out (skyctl bug-report --no-logs).
{notes}"""


@dataclass
class BugReport:
    """The files of a report (name → redacted text), and notes on what was left out."""

    files: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def zipped(self) -> bytes:
        """All files as the bytes of one zip file."""
        buffer = io.BytesIO()
        with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
            for name, text in self.files.items():
                archive.writestr(name, text)
        return buffer.getvalue()


def collect_bug_report(cluster_file: Path | None, run: str | None, *, logs: bool = True) -> BugReport:
    """The report's files, redacted.

    Args:
        cluster_file: the file that ``-c`` names; one that can't be read is left out, with the reason.
        run: a run's id, its beginning or end; None: the newest, if there is one.

    Raises:
        InputError: there is no such run.
    """
    report = BugReport()
    redactor = Redactor()
    _know_this_machine(redactor)
    folder = _folder_of(run)
    state = _json_of(folder / "state.json") if folder is not None else None
    cluster, fault = _cluster(cluster_file, state)
    newest = newest_profile(cluster.name) if cluster is not None else None
    profile = newest[1].model_dump(mode="json") if newest is not None else None
    plan = _json_of(folder / "plan.json") if folder is not None else None
    if cluster is not None:
        _know_cluster(redactor, cluster)
    if isinstance(state, dict):
        _know_run(redactor, state)
    for document in (plan, profile):
        redactor.know("node", _nodes_in(document))
    for document in (profile, state, *(_events_in(folder) if folder is not None else ())):
        redactor.know("host", _hosts_in(document))
    _add(report, redactor, "versions.json", collect_versions())
    if cluster is not None:
        _add(report, redactor, "cluster.json", cluster.model_dump(mode="json"))
        if profile is not None:
            _add(report, redactor, "profile.json", profile)
    elif fault is not None:
        report.notes.append(redactor.text(f"no cluster file: {fault}"))
    if folder is not None:
        _add_run(report, redactor, folder, logs=logs)
    listed = "\n".join(f"  {name}  {len(text.encode())} bytes" for name, text in report.files.items())
    notes = "".join(f"\nLeft out: {note}" for note in report.notes)
    about = ABOUT.format(version=__version__, files=listed, notes=notes + "\n" if notes else "")
    report.files = {"ABOUT.txt": about, **report.files}
    return report


def collect_versions() -> dict[str, Any]:
    """The launcher's versions and system, and the names (not the values) of relevant variables."""
    packages = {}
    for name in PACKAGES:
        with suppress(importlib.metadata.PackageNotFoundError):
            packages[name] = importlib.metadata.version(name)
    prefixes = (
        "SKYCTL_",
        "OMP_",
        "MKL_",
        "CUDA_",
        "NCCL_",
        "GLOO_",
        "TORCH_",
        "PYTORCH_",
        "PYTHON",
        "NO_COLOR",
    )
    return {
        "skyctl": __version__,
        "python": sys.version.split()[0],
        "implementation": platform.python_implementation(),
        "system": platform.system(),
        "release": platform.release(),
        "machine": platform.machine(),
        "libc": " ".join(platform.libc_ver()),
        "cpus": os.cpu_count(),
        "packages": packages,
        "variables_set": sorted(name for name in os.environ if name.startswith(prefixes)),
        "terminal": sys.stderr.isatty() if sys.stderr else False,
    }


LEAST_DIGITS = 6
"""A number of a variable's value is looked for in all texts if it has at least so many digits."""


def _know_this_machine(redactor: Redactor) -> None:
    home = str(Path.home())
    redactor.know_as(home if len(home) > 1 else "", "~")
    with suppress(OSError, KeyError):
        user = getpass.getuser()
        redactor.know_as("" if user == "root" else user, "me")
    name = socket.gethostname()
    for host in (name, name.partition(".")[0]):
        redactor.know_as("" if host == "localhost" else host, "this-host")
    for key, value in os.environ.items():
        if len(value) >= 4 and names_a_secret(key):
            redactor.know_as(value, "[removed]")


def _know_cluster(redactor: Redactor, cluster: Cluster) -> None:
    nodes = cluster.nodes
    for node in nodes:
        for value in node.env.values():
            # Elsewhere a short number is no secret (a thread count), and would be replaced in every figure.
            redactor.know_as("" if value.isdigit() and len(value) < LEAST_DIGITS else value, "[removed]")
    redactor.know("node", [node.name for node in nodes])
    redactor.know("host", [node.host for node in nodes])
    redactor.know("user", [node.user for node in nodes if node.user != "root"])
    keys = [node.identity_file for node in nodes if node.identity_file]
    redactor.know("key", [*keys, *(str(Path(key).expanduser()) for key in keys)])
    jumps = [part for node in nodes if node.proxy_jump for part in node.proxy_jump.split(",")]
    for jump in jumps:
        user, _, host = jump.rpartition("@")
        redactor.know("user", [user])
        redactor.know("host", [host.rsplit(":", 1)[0].strip("[]")])
    redactor.know("group", cluster.groups)
    redactor.know_as(cluster.name, "the-cluster")


def _know_run(redactor: Redactor, state: dict[str, Any]) -> None:
    """Redacts what a run's state names: its nodes, and the user's model (a built-in model names nobody)."""
    source = state.get("workload")
    if isinstance(source, str) and not source.startswith(("gpt:", "bert:")):
        path, *arguments = source.removeprefix("hf:").split(",")
        redactor.know_as(path, "[workload]")
        redactor.know_as(Path(path).stem, "[workload]")
        values = [argument.partition("=")[2].strip() for argument in arguments]
        redactor.know("argument", [value for value in values if not _PLAIN_VALUE.fullmatch(value)])
    redactor.know_as(str(state.get("cluster") or ""), "the-cluster")
    with suppress(TypeError, AttributeError, KeyError):
        redactor.know("node", [session["node"] for session in state.get("sessions", ())])
        devices = [device for attempt in state.get("attempts", ()) for device in attempt.get("devices", ())]
        redactor.know("node", [device.partition("/")[0] for device in devices])


def _nodes_in(document: Any) -> Iterator[str]:
    """The nodes of all device ids (``tower/cuda:0``) anywhere in a document."""
    if isinstance(document, str):
        if DEVICE_ID.fullmatch(document):
            yield document.rpartition("/")[0]
    elif isinstance(document, list):
        for item in document:
            yield from _nodes_in(item)
    elif isinstance(document, dict):
        for key, item in document.items():
            yield from _nodes_in(key)
            yield from _nodes_in(item)


def _hosts_in(document: Any) -> Iterator[str]:
    """The host names that machines give themselves, anywhere in a document."""
    if isinstance(document, dict):
        for key, item in document.items():
            if key in ("host", "hostname") and isinstance(item, str) and item != "localhost":
                yield from (item, item.partition(".")[0])
            yield from _hosts_in(item)
    elif isinstance(document, list):
        for item in document:
            yield from _hosts_in(item)


def _events_in(folder: Path) -> Iterator[Any]:
    for attempt in (folder / "attempts").glob("*"):
        for line in (_tail(attempt / "events.jsonl", FIGURE_LINES) or "").splitlines():
            with suppress(ValueError):
                yield json.loads(line)


def _cluster(given: Path | None, state: Any) -> tuple[Cluster | None, str | None]:
    """The cluster file that was given, else the run's own; or why there is none."""
    kept = state.get("cluster_file") if isinstance(state, dict) else None
    for path in (given, Path(kept) if isinstance(kept, str) else None):
        if path is not None:
            try:
                return read_cluster(path), None
            except SkyctlError as exc:
                return None, exc.message
    return None, None


def _folder_of(run: str | None) -> Path | None:
    try:
        return run_folder(run)
    except SkyctlError:
        if run is not None:
            raise
        return None


def _add_run(report: BugReport, redactor: Redactor, folder: Path, *, logs: bool) -> None:
    for name in ("state.json", "plan.json", "measurement.json"):
        path = folder / name
        document = _json_of(path)
        if document is not None:
            _add(report, redactor, f"run/{name}", document)
        elif path.exists():
            report.notes.append(f"run/{name} can't be read as JSON")
    tails = [("metrics.jsonl", folder / "metrics.jsonl", FIGURE_LINES)]
    if logs:
        tails += [("supervisor.log", folder / "supervisor.log", LOG_LINES), *_log_files(folder)]
    for name, path, lines in tails:
        text = _tail(path, lines)
        if text is not None:
            report.files[f"run/{name}"] = redactor.text(text)


def _log_files(folder: Path) -> Iterator[tuple[str, Path, int]]:
    for attempt in sorted((folder / "attempts").glob("*")):
        yield f"attempts/{attempt.name}/events.jsonl", attempt / "events.jsonl", FIGURE_LINES
        for log in sorted(attempt.glob("logs/rank-*.log")):
            yield f"attempts/{attempt.name}/logs/{log.name}", log, LOG_LINES


def _add(report: BugReport, redactor: Redactor, name: str, document: Any) -> None:
    text = json.dumps(redactor.value(document), indent=1, ensure_ascii=False)
    if len(text) > MAX_FILE_BYTES:
        report.notes.append(f"{name}: {len(text) / 2**20:.0f} MiB, more than {MAX_FILE_BYTES / 2**20:.0f}")
    else:
        report.files[name] = text + "\n"


def _json_of(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None


def _tail(path: Path, lines: int) -> str | None:
    """The last lines of a text file, from its last MiB; None where it can't be read."""
    try:
        with path.open("rb") as fp:
            fp.seek(max(0, path.stat().st_size - 2**20))
            text = fp.read().decode("utf-8", "replace")
    except OSError:
        return None
    return "\n".join(text.splitlines()[-lines:]) + "\n"
