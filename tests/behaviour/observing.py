"""Recordings of skyctl: how a command is run, what of its answer is kept, how two answers differ.

Nothing of skyctl is imported here: modules, classes and functions may all be renamed without a change here.
"""

from __future__ import annotations

import json
import math
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
COMMAND_S = 600.0
"""When a command is given up."""
NOT_THERE = "(not there)"
RELATIVE = 1e-9
"""How far figures of the planner may be off."""


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


SENTENCES = _words("""
    reason method detail hint found note notes why message memory_from verdict skipped help summary
    mark caption sentence warning warnings text explanation left_out
""")
"""Keys whose texts are for people: whether there is one is recorded, not its words."""
MACHINE = _words("""
    wall_s created written measured_at began ended hostname platform python torch cpu_model cpus
    memory_total_bytes memory_available_bytes fingerprint skyctl numa_nodes pid host address
    interface cluster_digest then now
""")
"""Keys that differ between machines and moments: only the type is recorded."""
LOSSES = frozenset(("loss", "final_loss", "validation_loss"))
SETTLED = _words("""
    version batch_size threads slowdown microbatches microbatch_size flops state_bytes output_bytes
    step steps number attempts rank exit_code seed replicas_wanted port in_flight layers from_step
    value order
""")
"""Numbers that are no measurement, where all else is recorded by its shape."""
VARYING = frozenset(("differences", "notes", "failures", "changes", "conditions"))
"""Lists and maps of which a measurement decides how much stands in them."""
MAY_BE_NULL = _words("""
    interval split_s weight_s spread peak_memory_bytes source_byte_s target_byte_s handling_byte_s
    action_s input_message_s gradient_message_s prediction_error error_s neighbour_s connect_s gap
    lower_bound_s bound_s checkpoint memory_bytes iteration_s loss clock_error_s share others_cpus
    own_cpus reduce_byte_s message_byte_s
""")
"""Measured figures that are not always there."""

_ID = re.compile(r"\d{8}-\d{6}-[0-9a-f]{4}")
_TIME = re.compile(r"\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d(\.\d+)?(\+\d\d:\d\d|Z)?")
_TEMPORARY = re.compile(r"(/[\w.-]+)*/b-[\w]{6,12}\b")


def skyctl_environment(folder: Path) -> dict[str, str]:
    """State, HOME and caches in that folder; a terminal of 200 columns without colours."""
    env = {k: v for k, v in os.environ.items() if not k.startswith(("SKYCTL_C", "XDG_", "_TYPER", "FORCE_"))}
    home = folder / "home"
    home.mkdir(exist_ok=True)
    env.update(SKYCTL_HOME=str(folder / "state"), HOME=str(home), NO_COLOR="1", COLUMNS="200", TERM="dumb")
    env.update(XDG_CACHE_HOME=str(folder / "cache"))
    pyenv = Path.home() / ".pyenv"
    if "PYENV_ROOT" not in env and pyenv.is_dir():
        env["PYENV_ROOT"] = str(pyenv)
    return env


class Room:
    """A folder with a state folder of its own, and skyctl in it. Gone at the end, and what runs in it."""

    def __init__(self) -> None:
        self.top = Path(tempfile.mkdtemp(prefix="b-", dir=os.environ.get("TMPDIR", "/tmp")))
        self.folder = self.top / "w"
        self.folder.mkdir()
        self.env = skyctl_environment(self.top)

    def __enter__(self) -> Room:
        return self

    def __exit__(self, *_: object) -> None:
        if any((self.top / "state" / "runs").glob("*")):
            self.run("stop", "--all", "--now")
        shutil.rmtree(self.top, ignore_errors=True)

    def write(self, name: str, content: Any) -> Path:
        """A file; what is no text is written as JSON."""
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content if isinstance(content, str) else json.dumps(content))
        return path

    def read(self, name: str) -> Any:
        """A JSON file."""
        return json.loads((self.folder / name).read_text())

    def run(self, *words: str) -> subprocess.CompletedProcess[str]:
        """To its end. Its output goes to files: processes left in the background may hold on to them."""
        argv = [sys.executable, "-m", "skyctl", *words]
        with tempfile.TemporaryFile(dir=self.top) as out, tempfile.TemporaryFile(dir=self.top) as err:
            child = subprocess.Popen(
                argv, cwd=self.folder, env=self.env, stdin=subprocess.DEVNULL, stdout=out, stderr=err
            )
            try:
                code = child.wait(COMMAND_S)
            finally:
                child.kill()
                child.wait()
            for file in (out, err):
                file.seek(0)
            told = (out.read().decode(), err.read().decode())
        return subprocess.CompletedProcess(argv, code, *told)

    def observe(self, *words: str, shape: bool = False) -> dict[str, Any]:
        """The command's answer. ``shape``: its figures are measured, only their types are kept."""
        return self.observed(self.run(*words), shape=shape)

    def observed(self, done: subprocess.CompletedProcess[str], *, shape: bool = False) -> dict[str, Any]:
        found: dict[str, Any] = {"exit": done.returncode, "says": bool(done.stderr.strip())}
        if "Traceback" in done.stderr:
            found["traceback"] = done.stderr[-300:]
        try:
            document = json.loads(done.stdout)
        except ValueError:
            found["stdout"] = "text" if done.stdout.strip() else "nothing"
        else:
            found["json"] = self.normal(document, shape=shape)
        return found

    def normal(self, document: Any, *, shape: bool = False) -> Any:
        return normal(document, shape=shape)


def normal(value: Any, key: str = "", *, shape: bool = False) -> Any:
    """The part of a document that must stay the same."""
    if isinstance(value, dict):
        if shape and key in VARYING:
            return "<map>"
        if key == "files":  # a name's path, or its length
            return {_text(k): "<number>" if isinstance(v, int) else normal(v) for k, v in value.items()}
        return {
            _text(k): ("<any>" if k == "checked" and v is False else normal(v, k, shape=shape))
            for k, v in value.items()
        }
    if isinstance(value, list):
        return _list(value, key, shape)
    if value is None and not (shape and key in MAY_BE_NULL):
        return None
    if isinstance(value, bool):
        return value
    if isinstance(value, str):
        if key in SENTENCES or key == "error" or (key in MACHINE):
            return "<text>" if value else "<empty>"
        return _text(value)
    if key in MACHINE:
        return "<number>"
    if shape and key not in SETTLED and key not in LOSSES:
        return "<number or null>" if key in MAY_BE_NULL else "<number>"
    if value is None:
        return "<number or null>"
    return value


def _list(value: list[Any], key: str, shape: bool) -> Any:
    if key in SENTENCES or (shape and key in VARYING):
        return "<list>"
    found = [normal(item, key, shape=shape) for item in value]
    if not shape or len(found) < 2:
        return found
    distinct: list[Any] = []
    for item in found:
        if item not in distinct:
            distinct.append(item)
    return distinct


@cache
def processor() -> str:
    """The name that this machine's processor gives itself."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")


def _text(value: str) -> str:
    if value and value == processor():
        return "<processor>"
    value = _TEMPORARY.sub("<folder>", value)
    return _TIME.sub("<time>", _ID.sub("<id>", value))


def flat(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """All leaves with their paths; empty maps and lists are leaves."""
    if isinstance(value, dict) and value:
        for k, v in value.items():
            yield from flat(v, f"{path}/{k}")
    elif isinstance(value, list) and value:
        for i, v in enumerate(value):
            yield from flat(v, f"{path}/{i}")
    else:
        yield path, value


def differences(recorded: Any, present: Any, tolerance: Callable[[str], float]) -> list[str]:
    """One line for each leaf that differs: its key, what was recorded, what is there now."""
    before, after = dict(flat(recorded)), dict(flat(present))
    lines = []
    for path in sorted(before.keys() | after.keys()):
        old, new = before.get(path, NOT_THERE), after.get(path, NOT_THERE)
        if not same(old, new, tolerance(path)):
            lines.append(f"{path}: recorded {_shown(old)}, now {_shown(new)}")
    return lines


def same(old: Any, new: Any, relative: float) -> bool:
    numbers = all(isinstance(x, int | float) and not isinstance(x, bool) for x in (old, new))
    if numbers:
        return math.isclose(old, new, rel_tol=relative, abs_tol=1e-12)
    if old == NOT_THERE or new == NOT_THERE:
        return "<number or null>" in (old, new)  # a figure that is left out where it is zero
    return type(old) is type(new) and old == new


def _shown(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 200 else text[:200] + "…"
