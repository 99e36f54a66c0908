"""The node agent, one for each node and command: starts tasks, carries their messages, leaves nothing behind.

One thread, one poll loop, nothing in it blocks. Frames arrive on standard input and leave on what was
standard output; descriptors 1 and 2 are both standard error from then on. The agent ends when it is told to,
on SIGTERM, when standard input ends, or when the launcher was not heard for the lease: then every process it
started, whatever they started, and whatever carries its tag gets TERM and, after a grace, KILL, and the
folder is removed. With ``hold_s`` it goes on without a connection, until no launcher has connected for that
long (``launcher_connection``). SIGHUP and SIGINT are left to the launcher.
"""

from __future__ import annotations

import os
import platform
import select
import signal
import socket
import sys
import time
from pathlib import Path

from skyctl.agent import process_tree
from skyctl.agent.file_server import FileServer
from skyctl.agent.frames import FrameError, Message, read_available, write_frame
from skyctl.agent.launcher_connection import LauncherConnection, ResumableLauncherConnection
from skyctl.agent.network_interfaces import interface_addresses
from skyctl.agent.node_cache import NodeCache
from skyctl.agent.session_folder import SessionFolder
from skyctl.agent.task_process import TaskProcess

KILL_TIMEOUT_S = 5.0
EXIT_AFTER_RESULT_S = 10.0
MOST_OPEN_FILES = 1 << 16
"""No more is asked for where a node allows more: there are programs that close every number they may have."""


class NodeAgent:
    """The poll loop, and the tasks and transfers that it serves."""

    def __init__(
        self, config: Message, package: Path, folder: SessionFolder, store: NodeCache, out_fd: int
    ) -> None:
        self._grace_s = float(config["grace_s"])
        self._package, self._folder, self._cache_root = package, folder, store.root
        self._timeouts = {key: config[key] for key in ("lease_s", "hold_s") if key in config}
        self._launcher = (
            ResumableLauncherConnection(config, 0, out_fd, folder.path, self._describe, self._on_adopted)
            if config.get("hold_s")
            else LauncherConnection(float(config["lease_s"]), 0, out_fd)
        )
        self._file_server = FileServer(store, folder.path, self._launcher.replies)
        self._tasks: dict[int, TaskProcess] = {}
        self._task_records: dict[int, Message] = {}  # every task so far, as hello lists it
        self._highest_number = 0
        self._terminated_at: dict[int, float] = {}  # task → when TERM was sent
        self._exit_deadlines: dict[int, float] = {}  # task → when to end it, its result being out
        self._ending_at: float | None = None
        self._got_sigterm = False
        self._end_reason: str | None = None
        self._wake_fd, wake = os.pipe()
        for fd in (self._wake_fd, wake):
            os.set_blocking(fd, False)
        signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
        for number in (signal.SIGINT, signal.SIGHUP, signal.SIGCHLD):
            signal.signal(number, lambda *_: None)  # a handler, not SIG_IGN: tasks must not inherit it
        signal.signal(signal.SIGTERM, self._on_sigterm)

    def _on_sigterm(self, *_: object) -> None:
        self._got_sigterm = True

    def run(self) -> None:
        """Runs the loop until the agent is told to end, then ends everything."""
        self._launcher.send_if_connected({"op": "hello", **self._describe()})
        while not self._is_finished():
            self._run_once()
        left = sorted(self._find_remaining())
        self._reap_children()
        for task in list(self._tasks.values()):
            self._report_exit(task)
        self._launcher.flush_for_exit()
        self._folder.remove()
        self._reap_children()
        self._launcher.send_final({"op": "bye", "left": left})

    def _describe(self) -> Message:
        tasks = {"tasks": list(self._task_records.values()), "highest": self._highest_number}
        return describe_node(self._folder, self._cache_root) | self._timeouts | tasks

    def _on_adopted(self) -> None:
        """Another launcher has taken over: nobody waits for the former one's files."""
        self._file_server.cancel_all()

    def _run_once(self) -> None:
        self._file_server.send_chunks()
        self._flush_all()
        poll = select.poll()
        for fd, mask in self._poll_events().items():
            poll.register(fd, mask)
        ready = dict(poll.poll(self._poll_timeout_s() * 1000))
        read_available(self._wake_fd)
        for message, body in self._launcher.read_messages(ready):
            self._handle(message, body)
        for task in list(self._tasks.values()):
            if task.output_fd in ready:
                self._forward_output(task)
            if task.control_fd in ready:
                self._forward_messages(task)
        self._reap_children()
        self._launcher.check_timeouts()
        self._finish_terminations()
        if self._got_sigterm:
            self._begin_shutdown("somebody sent it SIGTERM")
        if self._launcher.failure is not None:
            self._begin_shutdown(self._launcher.failure)
        if self._ending_at is not None and time.monotonic() - self._ending_at > self._grace_s:
            process_tree.send_signal(self._find_remaining(), signal.SIGKILL)

    def _poll_events(self) -> dict[int, int]:
        wanted = {self._wake_fd: select.POLLIN, **self._launcher.poll_events()}
        for task in self._tasks.values():
            if task.output_fd >= 0:
                wanted[task.output_fd] = select.POLLIN
            mask = 0 if self._launcher.pauses_tasks else select.POLLIN
            mask |= select.POLLOUT if task.outgoing.unsent_bytes else 0
            if task.is_channel_open and mask:
                wanted[task.control_fd] = mask
        return wanted

    def _poll_timeout_s(self) -> float:
        if self._ending_at is not None or self._terminated_at:
            return 0.05
        if self._file_server.has_work():
            return 0.0
        return self._launcher.max_sleep_s

    # --- the launcher

    def _handle(self, message: Message, body: bytes) -> None:
        op = message.get("op")
        self._highest_number = max(self._highest_number, message.get("task", 0), message.get("id", 0))
        if op == "shutdown":
            self._begin_shutdown("it was told to")
        elif op == "task":
            self._start_task(message)
        elif op in ("send", "kill"):
            task = self._tasks.get(message["task"])
            if task is None:
                return
            if op == "kill":
                self._terminate_task(task)
            elif not task.send(message["message"], body):
                self._forward_line(task, "[skyctl: ended, it does not read what is sent to it]")
                self._terminate_task(task)
        elif op == "more":
            self._file_server.grant_chunk(message["id"])
        elif op == "cancel":
            self._file_server.cancel(message["id"])
        else:
            self._file_server.handle_request(op, message, body)

    def _flush_all(self) -> None:
        self._launcher.flush()
        for task in self._tasks.values():
            try:
                task.outgoing.flush()
            except OSError:
                task.outgoing.clear()

    # --- tasks

    def _start_task(self, message: Message) -> None:
        number = message["task"]
        if self._ending_at is not None:
            return
        self._task_records[number] = {"task": number, "name": message["name"], "module": message["module"]}
        try:
            task = TaskProcess(
                number, message["name"], message["module"], message["env"], self._folder.path, self._package
            )
        except OSError as exc:
            event = {"event": "error", "type": type(exc).__name__, "message": str(exc), "errno": exc.errno}
            self._launcher.send({"op": "event", "task": number, "message": event})
            self._report_gone(number, {"returncode": None, "signal": None})
            return
        self._tasks[number] = task
        task.send({"payload": message["payload"]}, b"")

    def _forward_messages(self, task: TaskProcess) -> bool:
        """Passes on what the task has sent; False where there was nothing."""
        try:
            messages = task.read_messages()
        except FrameError as exc:
            task.close_channel()
            self._forward_line(task, f"[skyctl: its channel to the launcher is broken: {exc}]")
            return False
        for message, body in messages:
            if message.get("event") in ("result", "error") and not task.has_reported:
                task.has_reported = True
                self._exit_deadlines[task.number] = time.monotonic() + EXIT_AFTER_RESULT_S
            self._launcher.send({"op": "event", "task": task.number, "message": message}, body)
        return bool(messages)

    def _forward_output(self, task: TaskProcess) -> None:
        for line in task.read_output():
            self._forward_line(task, line)

    def _forward_line(self, task: TaskProcess, line: str) -> None:
        if self._launcher.drops_output:
            task.dropped_lines += 1
            return
        if task.dropped_lines:
            line = f"[skyctl: {task.dropped_lines} lines left out here]\n{line}"
            task.dropped_lines = 0
        for text in line.split("\n"):
            event = {"event": "log", "text": text}
            self._launcher.send({"op": "event", "task": task.number, "message": event})

    def _reap_children(self) -> None:
        """Collects every child that has ended, orphans of tasks included."""
        tasks_by_pid = {task.pid: task for task in self._tasks.values()}
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if not pid:
                return
            if pid in tasks_by_pid:
                task = tasks_by_pid[pid]
                task.mark_exited(os.waitstatus_to_exitcode(status))
                self._terminate_task(task)  # and what it may have left

    def _terminate_task(self, task: TaskProcess) -> None:
        if task.number not in self._terminated_at:
            self._terminated_at[task.number] = time.monotonic()
            process_tree.send_signal(self._find_task_pids(task, process_tree.process_table()), signal.SIGTERM)

    def _finish_terminations(self) -> None:
        now = time.monotonic()
        for number in [number for number, limit in self._exit_deadlines.items() if now > limit]:
            del self._exit_deadlines[number]
            if number in self._tasks:
                self._terminate_task(self._tasks[number])
        if not self._terminated_at:
            return
        rows = process_tree.process_table()
        for number, since in list(self._terminated_at.items()):
            task = self._tasks[number]
            left = self._find_task_pids(task, rows)
            if task.exit_status is not None and (not left or now - since > self._grace_s + KILL_TIMEOUT_S):
                self._report_exit(task)
            elif now - since > self._grace_s:
                process_tree.send_signal(left, signal.SIGKILL)

    def _find_task_pids(self, task: TaskProcess, rows: dict[int, process_tree.ProcessEntry]) -> set[int]:
        family = (
            {task.pid} | process_tree.find_descendants(rows, task.pid) if task.exit_status is None else set()
        )
        return process_tree.filter_running(
            rows, family | process_tree.find_tagged(rows, process_tree.TASK_TAG, task.tag)
        )

    def _report_exit(self, task: TaskProcess) -> None:
        """Passes on everything that an ended task still had to say, then that it is gone."""
        while self._forward_messages(task):
            pass
        for line in task.read_final_output():
            self._forward_line(task, line)
        if task.dropped_lines:
            self._forward_line(task, f"[skyctl: the last {task.dropped_lines} lines are left out]")
        if not task.has_reported:
            self._launcher.send(
                {"op": "event", "task": task.number, "message": task.exit_event(self._end_reason)}
            )
        self._report_gone(task.number, task.exit_outcome())
        task.close()
        del self._tasks[task.number]
        self._terminated_at.pop(task.number, None)
        self._exit_deadlines.pop(task.number, None)

    def _report_gone(self, number: int, outcome: Message) -> None:
        number_sent = self._launcher.send({"op": "gone", "task": number, **outcome})
        self._task_records[number] |= {**outcome, "gone": number_sent}

    # --- the end

    def _begin_shutdown(self, why: str) -> None:
        if self._ending_at is None:
            self._ending_at = time.monotonic()
            self._end_reason = why
            self._launcher.announced_end = why
            self._launcher.send_if_connected({"op": "ending", "why": why})
            process_tree.send_signal(self._find_remaining(), signal.SIGTERM)

    def _find_remaining(self) -> set[int]:
        """The running processes of this session, without the agent and its guardian."""
        rows = process_tree.process_table()
        ours = process_tree.find_descendants(rows, os.getpid())
        ours |= process_tree.find_tagged(rows, process_tree.SESSION_TAG, self._folder.id)
        ours |= {task.pid for task in self._tasks.values() if task.exit_status is None}
        return process_tree.filter_running(rows, ours) - {os.getpid(), self._folder.guardian or 0}

    def _is_finished(self) -> bool:
        if self._ending_at is None:
            return False
        waited_s = time.monotonic() - self._ending_at
        return not self._find_remaining() or waited_s > self._grace_s + KILL_TIMEOUT_S


def describe_node(folder: SessionFolder, cache: Path) -> Message:
    """The fields of a hello that describe the node; ``addresses`` holds [interface, IPv4] pairs."""
    return {
        "hostname": socket.gethostname(),
        "python": sys.executable,
        "version": platform.python_version(),
        "platform": platform.platform(),
        "pid": os.getpid(),
        "guardian": folder.guardian,
        "session": folder.id,
        "folder": str(folder.path),
        "addresses": interface_addresses(),
        "home": os.path.expanduser("~"),  # noqa: PTH111 - Path.home() raises where there is none
        "cache": str(cache),
        "cwd": os.getcwd(),  # noqa: PTH109
    }


def raise_open_files_limit() -> None:
    """Takes what the node allows (its hard limit), for all tasks: strangers' connections cost descriptors."""
    try:
        import resource

        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        wanted = MOST_OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, MOST_OPEN_FILES)
        if soft != resource.RLIM_INFINITY and soft < wanted:
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    except (ImportError, OSError, ValueError):
        pass


def run_agent(config: Message, package: Path, cache: Path) -> int:
    """Runs the agent on this process's standard input and output; the exit status."""
    process_tree.become_subreaper()
    raise_open_files_limit()
    out_fd = os.dup(1)
    os.dup2(2, 1)
    sys.stdout = sys.stderr
    try:
        store = NodeCache(cache)
        folder = SessionFolder.create(cache / "sessions")
    except OSError as exc:
        return _report_start_failure(out_fd, exc, cache)
    folder.start_guardian()
    try:
        agent = NodeAgent(config, package, folder, store, out_fd)
    except OSError as exc:
        folder.remove()
        return _report_start_failure(out_fd, exc, folder.path)
    agent.run()
    return 0


def _report_start_failure(out_fd: int, exc: OSError, path: Path) -> int:
    fault: Message = {"op": "fault", "error": exc.strerror or str(exc), "path": str(exc.filename or path)}
    fault["hint"] = getattr(exc, "hint", None)
    with os.fdopen(out_fd, "wb") as out:
        write_frame(out, fault)
    return 1
