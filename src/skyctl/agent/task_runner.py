"""A task's process: ``python -m skyctl.agent.task_runner MODULE`` runs ``MODULE.main(payload, channel)``.

Messages go over a socket of their own, so that nothing printed can get between them. The value that main
returns is the result; an exception is an error event. An end without either (a signal, ``sys.exit``) is
reported by the agent.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import select
import socket
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import Any

from skyctl.agent.frames import FrameParser, write_frame
from skyctl.agent.process_tree import die_with_parent
from skyctl.errors import SkyctlError

CONTROL_FD_VARIABLE = "SKYCTL_CONTROL"


class AgentGoneError(EOFError):
    """The node agent has closed the channel: nobody is left to work for."""


class TaskChannel:
    """A task's channel to the launcher.

    ``folder``: the session's private folder on the node, removed at its end. ``cache``: the node's, which is
    kept.
    """

    def __init__(self, sock: socket.socket, folder: Path, cache: Path) -> None:
        self.folder = folder
        self.cache = cache
        self._sock = sock
        self._file = sock.makefile("wb", buffering=0)
        self._parser = FrameParser()
        self._send_lock = threading.Lock()
        self._receive_lock = threading.Lock()

    def send(self, message: dict[str, Any], body: bytes = b"") -> None:
        """Sends a message; may be called from any thread. Raises AgentGoneError when the agent is gone."""
        with self._send_lock:
            try:
                write_frame(self._file, message, body)  # type: ignore[arg-type]
            except OSError as exc:
                raise AgentGoneError("the node agent is gone") from exc

    def recv(self, timeout_s: float | None = None) -> tuple[dict[str, Any], bytes] | None:
        """The next message, or None when the time is over. Raises AgentGoneError when the agent is gone."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        with self._receive_lock:
            while (frame := self._parser.next_frame()) is None:
                left = None if deadline is None else max(0.0, deadline - time.monotonic())
                if not select.select([self._sock], [], [], left)[0]:
                    return None
                try:
                    data = self._sock.recv(256 << 10)
                except OSError as exc:
                    raise AgentGoneError("the node agent is gone") from exc
                if not data:
                    raise AgentGoneError("the node agent is gone")
                self._parser.feed(data)
        return frame

    def close(self) -> None:
        """Closes the channel to the agent."""
        self._file.close()
        self._sock.close()


def make_error_event(exc: BaseException) -> dict[str, Any]:
    """The event that reports an exception; ``remote/remote_task.py`` reads it."""
    cause = exc.__cause__ if isinstance(exc, SkyctlError) else exc  # the user's own import, say
    return {
        "event": "error",
        "type": type(exc).__name__,
        "message": exc.message if isinstance(exc, SkyctlError) else str(exc),
        "traceback": "".join(traceback.format_exception(exc)),
        "skyctl": isinstance(exc, SkyctlError),
        "exit_code": exc.exit_code if isinstance(exc, SkyctlError) else 1,
        "hint": exc.hint if isinstance(exc, SkyctlError) else None,
        "python": sys.executable,
        "module": cause.name if isinstance(cause, ImportError) else None,
        "errno": exc.errno if isinstance(exc, OSError) else None,
        "out_of_memory": _is_out_of_memory(exc),
        "peer_rank": getattr(exc, "peer_rank", None),
    }


def _is_out_of_memory(exc: BaseException) -> bool:
    """Whether memory was short. Of the host's, torch says so in the text of a plain RuntimeError only."""
    if isinstance(exc, MemoryError) or type(exc).__name__ == "OutOfMemoryError":
        return True
    return isinstance(exc, RuntimeError) and "can't allocate memory" in str(exc)


def main() -> int:
    """Runs the module named on the command line; the exit status is 1 after an error event."""
    die_with_parent(int(os.environ["SKYCTL_AGENT"]))
    sock = socket.socket(fileno=int(os.environ.pop(CONTROL_FD_VARIABLE)))
    sock.setblocking(True)
    os.set_inheritable(sock.fileno(), False)
    channel = TaskChannel(sock, Path(os.environ["SKYCTL_FOLDER"]), Path(os.environ["SKYCTL_CACHE"]))
    try:
        first = channel.recv()
        assert first is not None
        module = importlib.import_module(sys.argv[1])
        result = module.main(first[0]["payload"], channel)
        channel.send({**(result or {}), "event": "result"})
    except AgentGoneError:
        return 1  # nobody is left to be told
    except (SystemExit, GeneratorExit):
        raise
    except BaseException as exc:  # noqa: BLE001 - whatever the user's code raises is theirs to see
        with contextlib.suppress(AgentGoneError):
            channel.send(make_error_event(exc))
        return 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        channel.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
