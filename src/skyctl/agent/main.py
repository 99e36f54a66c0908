"""The node agent: one a node and command. It starts tasks, carries their messages, and leaves nothing behind.

One thread, one poll loop, nothing in it blocks. Frames come on standard input and go out on what was
standard output; descriptors 1 and 2 are both standard error from then on. It ends when it is told to, on
SIGTERM, when standard input ends, or when the launcher has not been heard for the lease: then every process
it started, whatever they started, and whatever carries its tag gets TERM and, after a grace, KILL, and the
folder is removed. With ``hold_s`` the end of a connection is not the end (``held.py``): it goes on until
nobody has come for that long. SIGHUP and SIGINT are for the launcher to act on.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import time
from pathlib import Path

from skyctl.agent import facts, process
from skyctl.agent.child import Child
from skyctl.agent.folder import SessionFolder
from skyctl.agent.held import HeldLine
from skyctl.agent.line import Line, Message
from skyctl.agent.store import Store
from skyctl.agent.stream import read_some
from skyctl.agent.transfer import Files
from skyctl.agent.wire import WireError, write_frame

KILL_S = 5.0
AFTER_RESULT_S = 10.0


class Agent:
    """The loop and what it knows."""

    def __init__(
        self, config: Message, package: Path, folder: SessionFolder, store: Store, out_fd: int
    ) -> None:
        self._grace_s = float(config["grace_s"])
        self._package, self._folder, self._cache = package, folder, store.root
        self._limits_said = {key: config[key] for key in ("lease_s", "hold_s") if key in config}
        self._line = (
            HeldLine(config, 0, out_fd, folder.path, self._hello, self._adopted)
            if config.get("hold_s")
            else Line(float(config["lease_s"]), 0, out_fd)
        )
        self._files = Files(store, folder.path, self._line.replies)
        self._children: dict[int, Child] = {}
        self._known: dict[int, Message] = {}  # every task there was, as hello tells of it
        self._highest = 0
        self._endings: dict[int, float] = {}  # task → when TERM was sent
        self._limits: dict[int, float] = {}  # task → when to end it, its result being out
        self._ending_at: float | None = None
        self._told_to_end = False
        self._why: str | None = None
        self._wake_fd, wake = os.pipe()
        for fd in (self._wake_fd, wake):
            os.set_blocking(fd, False)
        signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
        for number in (signal.SIGINT, signal.SIGHUP, signal.SIGCHLD):
            signal.signal(number, lambda *_: None)  # a handler, not SIG_IGN: tasks must not inherit it
        signal.signal(signal.SIGTERM, self._on_term)

    def _on_term(self, *_: object) -> None:
        self._told_to_end = True

    def run(self) -> None:
        """Until the end."""
        self._line.tell({"op": "hello", **self._hello()})
        while not self._over():
            self._turn()
        left = sorted(self._survivors())
        self._reap()
        for child in list(self._children.values()):
            self._bury(child)
        self._line.drain()
        self._folder.remove()
        self._reap()
        self._line.finish({"op": "bye", "left": left})

    def _hello(self) -> Message:
        known = {"tasks": list(self._known.values()), "highest": self._highest}
        return facts.hello(self._folder, self._cache) | self._limits_said | known

    def _adopted(self) -> None:
        """Another launcher has come: nobody waits for the files of the last one."""
        self._files.forget_all()

    def _turn(self) -> None:
        self._files.pump()
        self._flush()
        poll = select.poll()
        for fd, mask in self._interests().items():
            poll.register(fd, mask)
        ready = dict(poll.poll(self._timeout_s() * 1000))
        read_some(self._wake_fd)
        for message, body in self._line.read(ready):
            self._act(message, body)
        for child in list(self._children.values()):
            if child.output_fd in ready:
                self._forward_output(child)
            if child.control_fd in ready:
                self._forward_messages(child)
        self._reap()
        self._line.watch()
        self._end_tasks()
        if self._told_to_end:
            self._end("somebody sent it SIGTERM")
        if self._line.over is not None:
            self._end(self._line.over)
        if self._ending_at is not None and time.monotonic() - self._ending_at > self._grace_s:
            process.send(self._survivors(), signal.SIGKILL)

    def _interests(self) -> dict[int, int]:
        wanted = {self._wake_fd: select.POLLIN, **self._line.interests()}
        for child in self._children.values():
            if child.output_fd >= 0:
                wanted[child.output_fd] = select.POLLIN
            mask = 0 if self._line.stuffed else select.POLLIN
            mask |= select.POLLOUT if child.outbox.size_bytes else 0
            if child.line_open and mask:
                wanted[child.control_fd] = mask
        return wanted

    def _timeout_s(self) -> float:
        if self._ending_at is not None or self._endings:
            return 0.05
        if self._files.ready():
            return 0.0
        return self._line.pause_s

    # --- the launcher

    def _act(self, message: Message, body: bytes) -> None:
        op = message.get("op")
        self._highest = max(self._highest, message.get("task", 0), message.get("id", 0))
        if op == "shutdown":
            self._end("it was told to")
        elif op == "task":
            self._start(message)
        elif op in ("send", "kill"):
            child = self._children.get(message["task"])
            if child is None:
                return
            if op == "kill":
                self._end_task(child)
            elif not child.deliver(message["message"], body):
                self._log(child, "[skyctl: ended, it does not read what is sent to it]")
                self._end_task(child)
        elif op == "more":
            self._files.more(message["id"])
        elif op == "cancel":
            self._files.forget(message["id"])
        else:
            self._files.request(op, message, body)

    def _flush(self) -> None:
        self._line.flush()
        for child in self._children.values():
            try:
                child.outbox.flush()
            except OSError:
                child.outbox.clear()

    # --- tasks

    def _start(self, message: Message) -> None:
        number = message["task"]
        if self._ending_at is not None:
            return
        self._known[number] = {"task": number, "name": message["name"], "module": message["module"]}
        try:
            child = Child(
                number, message["name"], message["module"], message["env"], self._folder.path, self._package
            )
        except OSError as exc:
            event = {"event": "error", "type": type(exc).__name__, "message": str(exc), "errno": exc.errno}
            self._line.push({"op": "event", "task": number, "message": event})
            self._gone(number, {"returncode": None, "signal": None})
            return
        self._children[number] = child
        child.deliver({"payload": message["payload"]}, b"")

    def _forward_messages(self, child: Child) -> bool:
        """Passes on what the task has sent; False when there was nothing."""
        try:
            messages = child.read_messages()
        except WireError as exc:
            child.close_control()
            self._log(child, f"[skyctl: its line to the launcher is broken: {exc}]")
            return False
        for message, body in messages:
            if message.get("event") in ("result", "error") and not child.spoke:
                child.spoke = True
                self._limits[child.number] = time.monotonic() + AFTER_RESULT_S
            self._line.push({"op": "event", "task": child.number, "message": message}, body)
        return bool(messages)

    def _forward_output(self, child: Child) -> None:
        for line in child.read_output():
            self._log(child, line)

    def _log(self, child: Child, line: str) -> None:
        if self._line.crowded:
            child.dropped_lines += 1
            return
        if child.dropped_lines:
            line = f"[skyctl: {child.dropped_lines} lines left out here]\n{line}"
            child.dropped_lines = 0
        for text in line.split("\n"):
            event = {"event": "log", "text": text}
            self._line.push({"op": "event", "task": child.number, "message": event})

    def _reap(self) -> None:
        """Every child that has ended, also those a task left to us."""
        by_pid = {child.pid: child for child in self._children.values()}
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if not pid:
                return
            if pid in by_pid:
                child = by_pid[pid]
                child.ended(os.waitstatus_to_exitcode(status))
                self._end_task(child)  # and what it may have left

    def _end_task(self, child: Child) -> None:
        if child.number not in self._endings:
            self._endings[child.number] = time.monotonic()
            process.send(self._of_task(child, process.table()), signal.SIGTERM)

    def _end_tasks(self) -> None:
        now = time.monotonic()
        for number in [number for number, limit in self._limits.items() if now > limit]:
            del self._limits[number]
            if number in self._children:
                self._end_task(self._children[number])
        if not self._endings:
            return
        rows = process.table()
        for number, since in list(self._endings.items()):
            child = self._children[number]
            left = self._of_task(child, rows)
            if child.status is not None and (not left or now - since > self._grace_s + KILL_S):
                self._bury(child)
            elif now - since > self._grace_s:
                process.send(left, signal.SIGKILL)

    def _of_task(self, child: Child, rows: dict[int, process.Entry]) -> set[int]:
        family = {child.pid} | process.descendants(rows, child.pid) if child.status is None else set()
        return process.alive(rows, family | process.tagged(rows, process.TASK_TAG, child.tag))

    def _bury(self, child: Child) -> None:
        """All of its last words, then that it is gone."""
        while self._forward_messages(child):
            pass
        for line in child.last_output():
            self._log(child, line)
        if child.dropped_lines:
            self._log(child, f"[skyctl: the last {child.dropped_lines} lines are left out]")
        if not child.spoke:
            self._line.push({"op": "event", "task": child.number, "message": child.exit_event(self._why)})
        self._gone(child.number, child.outcome())
        child.close()
        del self._children[child.number]
        self._endings.pop(child.number, None)
        self._limits.pop(child.number, None)

    def _gone(self, number: int, outcome: Message) -> None:
        said = self._line.push({"op": "gone", "task": number, **outcome})
        self._known[number] |= {**outcome, "gone": said}

    # --- the end

    def _end(self, why: str) -> None:
        if self._ending_at is None:
            self._ending_at = time.monotonic()
            self._why = why
            self._line.ending = why
            self._line.tell({"op": "ending", "why": why})
            process.send(self._survivors(), signal.SIGTERM)

    def _survivors(self) -> set[int]:
        """Everything that is ours and runs, without the agent and its guardian."""
        rows = process.table()
        ours = process.descendants(rows, os.getpid())
        ours |= process.tagged(rows, process.SESSION_TAG, self._folder.id)
        ours |= {child.pid for child in self._children.values() if child.status is None}
        return process.alive(rows, ours) - {os.getpid(), self._folder.guardian or 0}

    def _over(self) -> bool:
        if self._ending_at is None:
            return False
        waited_s = time.monotonic() - self._ending_at
        return not self._survivors() or waited_s > self._grace_s + KILL_S


def main(config: Message, package: Path, cache: Path) -> int:
    """Runs the agent on this process's standard input and output."""
    process.become_subreaper()
    out_fd = os.dup(1)
    os.dup2(2, 1)
    sys.stdout = sys.stderr
    try:
        store = Store(cache)
        folder = SessionFolder.create(cache / "sessions")
    except OSError as exc:
        return _give_up(out_fd, exc, cache)
    folder.guard()
    try:
        agent = Agent(config, package, folder, store, out_fd)
    except OSError as exc:
        folder.remove()
        return _give_up(out_fd, exc, folder.path)
    agent.run()
    return 0


def _give_up(out_fd: int, exc: OSError, path: Path) -> int:
    fault = {"op": "fault", "error": exc.strerror or str(exc), "path": str(exc.filename or path)}
    with os.fdopen(out_fd, "wb") as out:
        write_frame(out, fault)
    return 1
