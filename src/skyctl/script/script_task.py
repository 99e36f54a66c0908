"""One rank of a script: ``skyctl.agent.task_runner``'s module for ``skyctl run``. Needs no torch.

The script is a process of its own below this one, which prints into the same log. This one says how it ended.
"""

from __future__ import annotations

import errno
import json
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from skyctl.agent.process_tree import die_with_parent, find_descendants, process_table
from skyctl.agent.task_events import to_message
from skyctl.agent.task_orders import read_order, read_request
from skyctl.agent.task_process import ALLOCATOR_ENV
from skyctl.agent.task_runner import AgentGoneError, TaskChannel
from skyctl.device.cgroup import read_limits
from skyctl.device.host import usable_cpus
from skyctl.errors import RecordError, RunError
from skyctl.script.script_events import (
    MAX_TRACEBACK_CHARS,
    ScriptIdle,
    ScriptReady,
    ScriptResult,
    ScriptStarted,
    ScriptStep,
    ScriptTraceback,
)
from skyctl.script.script_orders import AbortScript, BeginScript, ScriptOrder, ScriptTurns
from skyctl.script.workplace import enter_workplace, remove_copies

RENDEZVOUS_PORTS = (20_000, 32_000)
"""Ports are sought here: Linux gives outgoing connections higher ones, so nobody takes one by chance."""
_PORT_TRIES = 200
INJECTED_FOLDER = Path(__file__).resolve().parent.parent / "torch" / "injected"
STEPS_LOOK_S = 0.1
IDLE_SAMPLE_S = 0.5
IDLE_SHARE = 0.05
"""A rank that uses less of one processor than this is idle: a library's threads look around now and then."""
IDLE_TOLD_S = 5.0
_OURS = ("SKYCTL_AGENT", "SKYCTL_CONTROL", "SKYCTL_FOLDER", "SKYCTL_CACHE")
"""Variables by which an agent and its tasks find each other; a script has nothing to do with them."""


def main(message: dict[str, Any], channel: TaskChannel) -> dict[str, Any]:
    """Runs the rank's process to its end.

    Raises:
        MismatchError, RecordError: it can't follow the order.
        RunError: the process can't be started, and why.
    """
    order = read_order([ScriptOrder], message)
    remove_copies(order.ended, channel.folder)
    folder = enter_workplace(order.workplace, channel.folder)
    port = find_port(order.port) if order.finds_port else None
    channel.send(to_message(ScriptReady(port)))
    received = channel.recv()
    assert received is not None
    begin = read_request([BeginScript], received[0])
    error_file = channel.folder / f"error-{order.rank}.json"
    environment = make_environment(order, begin.environment, error_file)
    if order.times_steps:
        environment["SKYCTL_STEP_TIMES"] = str(_steps_file(order, channel.folder))
    mark = channel.folder / f"turns-{order.rank}"
    mark.unlink(missing_ok=True)  # of the attempt before
    if order.turns is not None:
        environment["SKYCTL_TURNS"] = _turns_text(order.turns, channel.cache, mark)
    if order.times_steps or order.secret is not None or order.turns is not None:
        environment["PYTHONPATH"] = _with_injected(environment.get("PYTHONPATH", ""))
    process = _start(order, folder, environment)
    channel.send(to_message(ScriptStarted()))
    threading.Thread(target=_follow_requests, args=(channel, process), daemon=True).start()
    if order.times_steps:
        steps = _steps_file(order, channel.folder)
        threading.Thread(target=_tell_of_steps, args=(channel, steps), daemon=True).start()
    threading.Thread(target=_tell_of_idleness, args=(channel, process.pid), daemon=True).start()
    status = process.wait()
    took_turns = None if order.turns is None else mark.exists()
    return to_message(ScriptResult(status, read_error_file(error_file), took_turns))


def make_environment(order: ScriptOrder, begun: Mapping[str, str], error_file: Path) -> dict[str, str]:
    """The process's variables: this node's, then the order's.

    ``OMP_NUM_THREADS``, ``PYTHONUNBUFFERED`` and ``PYTHONFAULTHANDLER`` stay as they are where the node or
    the user has set them.
    """
    mine = ALLOCATOR_ENV.items()
    made = {name: v for name, v in os.environ.items() if name not in _OURS and (name, v) not in mine}
    made |= {**order.environment, **begun, "TORCHELASTIC_ERROR_FILE": str(error_file)}
    threads = order.threads or max(1, usable_processors() // max(1, order.local_ranks))
    made.setdefault("OMP_NUM_THREADS", str(threads))
    made.setdefault("PYTHONUNBUFFERED", "1")  # else a pipe gets what is printed in blocks, much later
    if not has_accelerator():  # else accelerate, and all that is built on it, makes no process group on CPUs
        made.setdefault("ACCELERATE_USE_CPU", "true")
    made.setdefault("PYTHONFAULTHANDLER", "1")  # a rank that crashes, or is aborted, says where it was
    return made


def has_accelerator(devices: Path = Path("/dev")) -> bool:
    """Whether the system has a device that may be an accelerator: NVIDIA's, AMD's, Intel's or another."""
    names = ("nvidia[0-9]*", "kfd", "dri/render*", "accel*", "davinci[0-9]*")
    return sys.platform == "darwin" or any(next(devices.glob(name), None) for name in names)


def usable_processors() -> int:
    """How many processors this process may use: its affinity and its cgroups' quota, at least 1."""
    quota = read_limits().quota
    return usable_cpus() if quota is None else max(1, min(usable_cpus(), int(quota.cpus)))


def find_port(wanted: int | None) -> int:
    """A port that nothing on this node listens at: the one wanted, or any.

    Raises:
        RunError: the one wanted is taken, or none was found.
    """
    tried = [wanted] if wanted is not None else random.sample(range(*RENDEZVOUS_PORTS), _PORT_TRIES)
    for port in tried:
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                sock.bind(("", port))
                sock.listen(1)  # of two that bind with SO_REUSEADDR only one can listen
            except OSError as exc:
                if wanted is not None and exc.errno not in (errno.EADDRINUSE, errno.EACCES):
                    raise
                continue
            return port
    which = f"port {wanted} is" if wanted is not None else f"{_PORT_TRIES} ports tried are"
    raise RunError(
        f"{which} not free on this node, where rank 0 listens for the others",
        hint="give another --master-port, or none: a free one is found",
    )


def _start(order: ScriptOrder, folder: Path, environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
    words = [sys.executable, *order.words] if order.is_python else list(order.words)
    parent = os.getpid()
    passed: list[int] = []
    if order.secret is not None:  # in a pipe: in no file, argument or variable
        passed.append(_pipe_with(order.secret))
        environment = {**environment, "SKYCTL_SECRET_FD": str(passed[0])}
    try:
        return subprocess.Popen(
            words,
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            pass_fds=passed,
            preexec_fn=lambda: die_with_parent(parent),  # noqa: PLW1509 - no other thread runs yet
        )
    except FileNotFoundError as exc:
        raise RunError(
            f"there is no program {words[0]!r} on this node",
            hint="install it there, or send it: a program of this folder is named with its path, ./NAME",
        ) from exc
    except PermissionError as exc:
        raise RunError(f"{words[0]!r} can't be run on this node: {exc.strerror}") from exc
    finally:
        for descriptor in passed:
            os.close(descriptor)


def _pipe_with(text: str) -> int:
    """The descriptor of a pipe that has that text, which is short, to be read once."""
    read_end, write_end = os.pipe()
    with os.fdopen(write_end, "w") as file:
        file.write(text)
    return read_end


def _follow_requests(channel: TaskChannel, process: subprocess.Popen[bytes]) -> None:
    """Aborts the process when told to; ends it when the agent is gone."""
    with suppress(AgentGoneError, RecordError):
        while (received := channel.recv()) is not None:
            read_request([AbortScript], received[0])
            with suppress(OSError):
                process.send_signal(signal.SIGABRT)
    with suppress(OSError):
        process.send_signal(signal.SIGKILL)


def _steps_file(order: ScriptOrder, session: Path) -> Path:
    return session / f"steps-{order.workplace.name}-{order.rank}.jsonl"  # each trial has a place of its own


def _with_injected(python_path: str) -> str:
    """A ``PYTHONPATH`` by which Python starts what a script that knows nothing of skyctl is to have."""
    return os.pathsep.join(path for path in (str(INJECTED_FOLDER), python_path) if path)


def _turns_text(turns: ScriptTurns, cache: Path, mark: Path) -> str:
    """The value of ``SKYCTL_TURNS`` (``skyctl.torch.step_turns``)."""
    said = {"turns": turns.policy, "node": turns.node, "job": turns.run_id}
    return json.dumps({**said, "cache": str(cache), "mark": str(mark)})


def _tell_of_steps(channel: TaskChannel, file: Path) -> None:
    """Passes on the lines of the step clock's file (``skyctl.torch.step_clock``) as they come."""
    rest = ""
    with suppress(AgentGoneError):
        while True:
            time.sleep(STEPS_LOOK_S)
            if not file.exists():
                continue
            with file.open() as lines:
                while True:
                    rest += lines.read()
                    *whole, rest = rest.split("\n")
                    for line in whole:
                        line_of_step = json.loads(line)
                        event = ScriptStep(
                            line_of_step["step"], line_of_step["compute_s"], line_of_step["batch"]
                        )
                        channel.send(to_message(event))
                    time.sleep(STEPS_LOOK_S)


def _tell_of_idleness(channel: TaskChannel, pid: int) -> None:
    """Tells, every ``IDLE_TOLD_S``, for how long the rank's processes have hardly used a processor."""
    used_s, at = busy_seconds(pid), time.monotonic()
    active_at = told_at = at
    was_told = False
    with suppress(AgentGoneError):
        while True:
            time.sleep(IDLE_SAMPLE_S)
            now, now_used_s = time.monotonic(), busy_seconds(pid)
            is_busy = now_used_s - used_s > IDLE_SHARE * (now - at)
            used_s, at = now_used_s, now
            if is_busy:
                active_at = now
                if was_told:
                    channel.send(to_message(ScriptIdle(0.0)))
                was_told = False
            elif now - max(active_at, told_at) >= IDLE_TOLD_S:
                channel.send(to_message(ScriptIdle(now - active_at)))
                told_at, was_told = now, True


def busy_seconds(pid: int) -> float:
    """Processor seconds that a process and all below it have used, those of children that ended included."""
    ticks = 0
    for member in _family(pid):
        with suppress(OSError, ValueError, IndexError):
            text = Path(f"/proc/{member}/stat").read_text(errors="replace")
            ticks += sum(int(field) for field in text.rpartition(")")[2].split()[11:15])
    return ticks / os.sysconf("SC_CLK_TCK")


def _family(pid: int) -> set[int]:
    """A process and all below it, by the lists of children that most kernels keep."""
    family, todo = {pid}, [pid]
    try:
        while todo:
            tasks = Path(f"/proc/{todo.pop()}/task")
            for thread in os.listdir(tasks):  # noqa: PTH208
                children = {int(text) for text in (tasks / thread / "children").read_text().split()}
                todo += children - family
                family |= children
    except OSError:  # gone meanwhile, or a kernel without these lists
        return family | find_descendants(process_table(), pid)
    return family


def read_error_file(path: Path) -> ScriptTraceback | None:
    """The exception that ``torch.distributed.elastic``'s ``@record`` has written; None: nothing usable."""
    try:
        recorded = json.loads(path.read_bytes()[: 4 * MAX_TRACEBACK_CHARS])["message"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    if isinstance(recorded, str):  # as early versions wrote it
        return ScriptTraceback(recorded[:MAX_TRACEBACK_CHARS])
    if not isinstance(recorded, dict):
        return None
    more = recorded.get("extraInfo")
    stack = more.get("py_callstack", "") if isinstance(more, dict) else ""
    message = str(recorded.get("message", ""))[:MAX_TRACEBACK_CHARS]
    return ScriptTraceback(message, str(stack)[-MAX_TRACEBACK_CHARS:])
