"""How much of what tasks print is kept on this machine: a node that prints without end fills no disk.

A log (one task in one attempt) keeps its first ``LOG_LIMIT_BYTES``, all logs of a run together
``RUN_LOGS_LIMIT_BYTES``. When one is full, its last line says so, and the user is told once. The traceback of
a task's end is added to its log in any case.
"""

from __future__ import annotations

from collections.abc import Callable

LOG_LIMIT_BYTES = 64 << 20
RUN_LOGS_LIMIT_BYTES = 1 << 30


class LogLimits:
    """The sizes of a run's logs.

    Args:
        note: told once for each log that ends, and once for the run.
        log_bytes, run_bytes: what is kept of one log, and of all.
    """

    def __init__(
        self,
        note: Callable[[str], None],
        *,
        log_bytes: int = LOG_LIMIT_BYTES,
        run_bytes: int = RUN_LOGS_LIMIT_BYTES,
    ) -> None:
        self._note, self._log_bytes, self._run_bytes = note, log_bytes, run_bytes
        self._sizes: dict[str, int] = {}
        self._full: set[str] = set()

    def begin(self, name: str, size_bytes: int) -> None:
        """Counts the bytes of a log that an earlier process has written."""
        self._sizes[name] = size_bytes
        if size_bytes >= self._log_bytes:
            self._full.add(name)

    def fits(self, name: str, size_bytes: int) -> bool:
        """Whether so many more bytes of a task's events are kept; counted as one of the logs."""
        left = min(self._log_bytes - self._sizes.get(name, 0), self._run_bytes - sum(self._sizes.values()))
        if size_bytes <= left:
            self._sizes[name] = self._sizes.get(name, 0) + size_bytes
        elif name not in self._full:
            self._full.add(name)
            self._note(f"{name}: {self._sizes.get(name, 0) >> 20} MiB are kept, and no more")
        return size_bytes <= left

    def cut(self, name: str, data: bytes) -> bytes:
        """The part of ``data``, whole lines that a task has printed, that may be added to its log.

        If it is cut, a last line says so; once the log is full, it is empty.
        """
        if name in self._full:
            return b""
        size = self._sizes.get(name, 0)
        left = min(self._log_bytes - size, self._run_bytes - sum(self._sizes.values()))
        if len(data) > left:
            whole_run = self._log_bytes - size > left
            limit = (self._run_bytes if whole_run else self._log_bytes) >> 20
            self._full.add(name)
            self._note(
                f"{'all logs of this run have' if whole_run else f'{name} has'} reached {limit} MiB: "
                "no more of what it prints is kept"
            )
            end = f"[skyctl: the log ends here: {'the run' if whole_run else 'it'} has {limit} MiB]\n"
            data = data[: data.rfind(b"\n", 0, max(0, left)) + 1] + end.encode()
        self._sizes[name] = size + len(data)
        return data
