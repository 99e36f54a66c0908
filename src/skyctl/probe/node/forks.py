"""Forks of the process that measures: a program of its own would first load torch, seconds on a slow node."""

from __future__ import annotations

import multiprocessing
import os
import signal
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import IO, TypeVar

import torch

from skyctl.agent.process_tree import die_with_parent
from skyctl.errors import RunError, SkyctlError

Result = TypeVar("Result")


@contextmanager
def fork_beside(action: Callable[[], None]) -> Iterator[None]:
    """A fork of this process that does that beside the block, and has ended after it."""
    parent = os.getpid()
    with _forks_beside_threads():
        pid = os.fork()
    if not pid:
        try:
            _begin_fork(parent)
            action()
        finally:
            os._exit(0)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def result_of_fork(measure: Callable[[], Result]) -> Result:
    """The result of a fork of this process; where a library aborts the fork, this process lives on.

    Only for a process in which torch knows no accelerator: its threads for one forbid a backward in a fork.

    Raises:
        RunError: the fork's exception, in words; or how the fork was ended, with its last line.
    """
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    parent = os.getpid()

    def run() -> None:
        _begin_fork(parent)
        for standard in (1, 2):
            os.dup2(printed.fileno(), standard)
        try:
            theirs.send((measure(), None))
        except Exception as exc:  # noqa: BLE001 — raised by the one who waits
            theirs.send((None, error_text(exc)))

    with tempfile.TemporaryFile() as printed, ours:
        fork = context.Process(target=run)
        with _forks_beside_threads(), theirs:
            fork.start()
        answer = None
        try:
            with suppress(EOFError):
                answer = ours.recv()
        finally:
            if answer is not None:
                fork.kill()
            fork.join()
        if answer is None:
            raise RunError(_how_it_ended(fork.exitcode, printed))
    result, error = answer
    if error is not None:
        raise RunError(error)
    return result  # type: ignore[no-any-return]


def error_text(exc: Exception) -> str:
    """An exception in one line, for a figure's place."""
    return exc.message if isinstance(exc, SkyctlError) else f"{type(exc).__name__}: {exc}"


def _how_it_ended(status: int | None, printed: IO[bytes]) -> str:
    how = "ended without a result"
    if status is not None and status < 0:
        how = f"was ended by {signal.Signals(-status).name}"
    printed.seek(0)
    lines = [line.strip() for line in printed.read().decode(errors="replace").splitlines()]
    last = next((line for line in reversed(lines) if line), None)
    return f"the process that measured it {how}" + (f"; its last line: {last[:300]}" if last else "")


def _begin_fork(parent: int) -> None:
    die_with_parent(parent)
    torch.set_num_threads(1)  # its other threads are not in the fork


@contextmanager
def _forks_beside_threads() -> Iterator[None]:
    """No warning of forks beside threads: what their locks guard, the forks' actions do not use."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        yield
