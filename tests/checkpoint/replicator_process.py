"""Replicators in processes of their own, for tests, and what ranks would have written."""

from __future__ import annotations

import contextlib
import hashlib
import queue
import random
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from skyctl.agent.frames import read_frame, write_frame
from skyctl.agent.task_orders import write_order
from skyctl.checkpoint.node import layout
from skyctl.checkpoint.node.atomic_file import FileDigest
from skyctl.checkpoint.node.replicator_order import ReplicatorOrder
from skyctl.checkpoint.node.shard_client import ReplicatorCredentials
from skyctl.transport.tls_identity import TlsIdentity

SECRET = "between the two of us"
PATIENCE_S = 240.0
LIMITS = {str(layer): 1 << 30 for layer in range(20)}
"""How large each layer's file may be."""
CHILD = """
import socket, sys
from pathlib import Path
from skyctl.agent.task_runner import TaskChannel, make_error_event
from skyctl.agent.frames import write_frame
from skyctl.checkpoint.node import replicator
channel = TaskChannel(socket.socket(fileno=int(sys.argv[1])), Path("."), Path("."))
try:
    result = replicator.main(channel.recv()[0]["payload"], channel)
    channel.send({"event": "result", "torch": "torch" in sys.modules, **result})
except EOFError:
    pass
except Exception as exc:
    channel.send(make_error_event(exc))
channel.close()
"""


class Node:
    """A replicator's process, and the launcher's side of its line."""

    def __init__(self, name: str, folder: Path, tls: TlsIdentity | None = None) -> None:
        ours, theirs = socket.socketpair()
        self.name, self.folder = name, folder
        self.events: list[dict[str, Any]] = []
        self._news: queue.Queue[dict[str, Any]] = queue.Queue()
        self.popen = subprocess.Popen(
            [sys.executable, "-W", "error", "-c", CHILD, str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            stderr=subprocess.PIPE,
        )
        theirs.close()
        self._socket, self._file = ours, ours.makefile("rwb", buffering=0)
        self._thread = threading.Thread(target=self._pump, daemon=True)
        self._thread.start()
        self.port = 0
        self._printed: str | None = None
        self._order = ReplicatorOrder("r", name, folder, SECRET, address="127.0.0.1", poll_s=0.05, tls=tls)

    def start(self) -> None:
        """Returns once it listens."""
        self.send({"payload": write_order(self._order)})
        self.port = int(self.wait("listening")["port"])

    @property
    def address(self) -> dict[str, Any]:
        return {"host": "127.0.0.1", "port": self.port, "node": self.name}

    def send(self, message: dict[str, Any]) -> None:
        write_frame(self._file, message)  # type: ignore[arg-type]

    def wait(self, kind: str, fits: Callable[[dict[str, Any]], bool] = lambda _event: True) -> dict[str, Any]:
        deadline = time.monotonic() + PATIENCE_S
        while (left_s := deadline - time.monotonic()) > 0:
            with contextlib.suppress(queue.Empty):
                event = self._news.get(timeout=left_s)
                self.events.append(event)
                if event["event"] == kind and fits(event):
                    return event
        raise AssertionError(f"{self.name}: no {kind} within {PATIENCE_S:.0f} s, only {self.events}")

    def ask(self, op: str, **more: Any) -> dict[str, Any]:
        number = random.randrange(10**8)
        self.send(request(op, id=number, **more))
        return self.wait("answer", lambda event: event["id"] == number)

    def close(self) -> str:
        """Ends the process, and returns its standard error. Idempotent."""
        if self._printed is not None:
            return self._printed
        if self.popen.poll() is None:
            with contextlib.suppress(OSError):
                self.send({"op": "stop"})
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.popen.wait(10)
        self.popen.kill()
        _, printed = self.popen.communicate()
        self._thread.join(5)
        self._file.close()
        self._socket.close()
        self._printed = printed.decode()
        return self._printed

    def _pump(self) -> None:
        with contextlib.suppress(OSError, ValueError, EOFError):
            while (frame := read_frame(self._file)) is not None:  # type: ignore[arg-type]
                self._news.put(frame[0])


Nodes = Callable[..., Node]


def request(op: str, **more: Any) -> dict[str, Any]:
    """A request as the launcher makes it, without limits that matter."""
    usual = {"pull": {"limits": LIMITS, "attempt": 0}, "adopt": {"attempt": 0}, "follow": {"limits": LIMITS}}
    return {"op": op, **usual.get(op, {}), **more}


def put(
    folder: Path, step: int, layers: range, *, rank: int = 0, size: int = 100_000, seed: int = 0
) -> dict[str, str]:
    """Random files as a rank would write them; by layer, their SHA-256."""
    chance = random.Random(f"{seed} {step} {layers}")
    layout.make_step_folder(folder, step)
    files = {}
    for layer in layers:
        data = chance.randbytes(size + layer)
        layout.layer_path(folder, step, layer).write_bytes(data)
        files[layer] = FileDigest(len(data), hashlib.sha256(data).hexdigest())
    layout.write_manifest(
        folder, layout.ShardManifest("r", rank, step, 0, layers.start, layers.stop, "w", files)
    )
    return {str(layer): file.sha256 for layer, file in files.items()}


def whole(folder: Path, step: int, shas: dict[str, str]) -> bool:
    return not any(layout.find_fault(folder, step, int(layer), sha) for layer, sha in shas.items())


def credentials(
    secret: str = SECRET, run_id: str = "r", identity: TlsIdentity | None = None
) -> ReplicatorCredentials:
    return ReplicatorCredentials(run_id, secret, identity)
