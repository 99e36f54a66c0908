"""Plays a plan on a cluster: starts the ranks, brings the pairs together, watches, gathers, stops.

The launcher relays the rendezvous: a rank with a successor listens and says where; the successor is told.
No rank needs to reach any other than its neighbours. Every wait has a deadline that names the rank it waits
for. However a run ends, its tasks are killed and their sessions' folders removed before this module returns.
"""

from __future__ import annotations

import math
import queue
import secrets
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from skyctl.errors import RunError, SkyctlError
from skyctl.files import RunPaths
from skyctl.launch.events import Collected, Watcher
from skyctl.launch.spec import RankSpec
from skyctl.remote.session import Session, Task, translate

MODULE = "skyctl.worker.rank"
TAIL_LINES = 6
"""A failed rank's last lines that go into the message."""

FIRST_CAUSE_GRACE_S = 1.5
"""How long after the first failure others may still report one that came earlier or says more."""


@dataclass(frozen=True)
class Deadlines:
    """Seconds a run may stay without news. ``step_factor``: times the predicted step."""

    ready_s: float = 180.0
    step_s: float = 90.0
    step_factor: float = 20.0


@dataclass
class _Rank:
    spec: RankSpec
    task: Task
    phase: str = "starting"
    heard: float = field(default_factory=time.monotonic)
    result: dict[str, Any] | None = None
    failure: dict[str, Any] | None = None
    tail: list[str] = field(default_factory=list)


class Run:
    """One attempt. ``start`` once, then ``watch`` once; ``stop`` may be called at any time, often."""

    def __init__(
        self,
        paths: RunPaths,
        specs: list[RankSpec],
        sessions: Mapping[str, Session],
        watcher: Watcher,
        deadlines: Deadlines | None = None,
    ) -> None:
        self.paths = paths
        self.specs = specs
        self.sessions = sessions
        self.watcher = watcher
        self.deadlines = deadlines or Deadlines()
        self.collected = Collected(len(specs), specs[0].payload["steps"])
        self._ranks: list[_Rank] = []
        self._news: queue.Queue[tuple[int, dict[str, Any] | SkyctlError]] = queue.Queue()
        self._stopped = False

    def start(self) -> None:
        """Starts every rank and brings the pairs together; returns when all are ready and told to go.

        Raises:
            RunError: a rank failed or stayed silent.
        """
        self.watcher.phase(f"starting {len(self.specs)} ranks")
        secret = secrets.token_hex(16)  # over the sessions only: not in argv, logs or files
        for spec in self.specs:
            payload = {**spec.payload, "secret": secret}
            task = self.sessions[spec.node].task(MODULE, payload, name=f"rank-{spec.rank}")
            rank = _Rank(spec, task)
            self._ranks.append(rank)
            threading.Thread(target=self._pump, args=(rank,), daemon=True, name=task.name).start()
        waiting = set(range(len(self._ranks)))
        deadline = time.monotonic() + self.deadlines.ready_s
        while waiting:
            rank, event = self._next(deadline, waiting)
            kind = event.get("event")
            if kind == "listening":
                peer = self._ranks[rank.spec.rank + 1]
                peer.task.send({"op": "connect", "host": event["address"], "port": event["port"]})
                rank.phase = f"waiting for rank {peer.spec.rank} to connect"
            elif kind == "ready":
                waiting.discard(rank.spec.rank)
                rank.phase = "ready"
        for rank in self._ranks:
            rank.task.send({"op": "start"})
            rank.phase = "step 0"

    def watch(self, predicted_iteration_s: float) -> None:
        """Handles events until every rank has returned.

        Raises:
            RunError: the first cause, by time, where a rank failed or stalled.
            KeyboardInterrupt: the user, or a signal, ends it.
        """
        self.watcher.phase("training")
        patience_s = max(self.deadlines.step_s, self.deadlines.step_factor * predicted_iteration_s)
        while any(rank.result is None for rank in self._ranks):
            running = {r.spec.rank for r in self._ranks if r.result is None}
            try:
                oldest = min(self._ranks[i].heard for i in running)
                rank, event = self._next(oldest + patience_s, running)
            except KeyboardInterrupt as exc:
                if type(exc) is KeyboardInterrupt and self.watcher.interrupted() == "go on":
                    continue
                raise
            if event.get("event") == "step":
                self.collected.add(rank.spec.rank, event)
                rank.phase = f"step {int(event['step']) + 1}"
                for progress in self.collected.complete():
                    if not math.isfinite(progress.loss):
                        raise RunError(
                            f"the loss of step {progress.step} is {progress.loss}: training has diverged",
                            hint="try a lower --learning-rate",
                        )
                    self.watcher.step(progress)
            elif event.get("event") == "result":
                rank.result = event

    def weights(self) -> dict[int, str]:
        """By rank, where its part of the trained weights lies on its node."""
        return {
            rank.spec.rank: str(rank.result["weights"])
            for rank in self._ranks
            if rank.result is not None and rank.result.get("weights")
        }

    def stop(self) -> None:
        """Kills every rank that still runs. Idempotent; errors of dead connections don't matter here."""
        if self._stopped:
            return
        self._stopped = True
        for rank in self._ranks:
            if not rank.task.done:
                with suppress(SkyctlError, OSError):
                    rank.task.kill()

    def _pump(self, rank: _Rank) -> None:
        """Moves one task's events into the one queue; ends with the task or its connection."""
        while True:
            try:
                got = rank.task.recv(None)
            except SkyctlError as exc:
                self._news.put((rank.spec.rank, exc))
                return
            if got is None:
                return
            self._news.put((rank.spec.rank, got[0]))

    def _next(self, deadline: float, waiting: set[int]) -> tuple[_Rank, dict[str, Any]]:
        """The next event that is not a log line; a failure becomes the RunError of its first cause."""
        while True:
            left = deadline - time.monotonic()
            try:
                number, news = self._news.get(timeout=max(0.0, min(left, 0.5)))
            except queue.Empty:
                if left <= 0:
                    raise self._stalled(waiting) from None
                continue
            rank = self._ranks[number]
            if isinstance(news, SkyctlError):
                rank.failure = {"raised": news}
                raise self._first_cause(rank)
            kind = news.get("event")
            if kind == "log":
                self._log(rank, str(news.get("text", "")))
                continue
            rank.heard = time.monotonic()
            if kind in ("error", "exit"):
                rank.failure = news
                raise self._first_cause(rank)
            return rank, news

    def _log(self, rank: _Rank, text: str) -> None:
        lines = text.splitlines()
        rank.tail = (rank.tail + lines)[-TAIL_LINES:]
        self._write_log(rank.spec, lines)
        for line in lines:
            self.watcher.log(rank.spec, line)

    def _write_log(self, spec: RankSpec, lines: list[str]) -> None:
        path = self.paths.log(spec.rank)
        try:
            with path.open("a", encoding="utf-8") as log:
                log.writelines(line + "\n" for line in lines)
        except OSError as exc:
            raise SkyctlError(
                f"cannot write the log {path}: {exc.strerror or exc}",
                hint="free some space, or set SKYCTL_HOME to another disk",
            ) from exc

    def _first_cause(self, first: _Rank) -> SkyctlError:
        """Waits a moment for other failures, then picks the earliest that is not just a lost peer."""
        failed = [first]
        deadline = time.monotonic() + FIRST_CAUSE_GRACE_S
        while len(failed) < len(self._ranks):
            try:
                number, news = self._news.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                break
            rank = self._ranks[number]
            if isinstance(news, SkyctlError):
                rank.failure = rank.failure or {"raised": news}
                failed.append(rank)
            elif news.get("event") == "log":
                with suppress(SkyctlError):
                    self._log(rank, str(news.get("text", "")))
            elif news.get("event") in ("error", "exit") and rank.failure is None:
                rank.failure = news
                failed.append(rank)
        primary = [r for r in failed if r.failure is not None and not _follows(r.failure)]
        return self._explain((primary or failed)[0])

    def _explain(self, rank: _Rank) -> SkyctlError:
        spec, failure = rank.spec, rank.failure or {}
        log = self.paths.log(spec.rank)
        who = f"rank {spec.rank} on {spec.device} (node {spec.node}, {self.sessions[spec.node].host})"
        raised = failure.get("raised")
        if isinstance(raised, SkyctlError):
            return raised
        printed = "".join(f"\n    {line}" for line in rank.tail[-TAIL_LINES:])
        if failure.get("traceback"):
            with suppress(SkyctlError):
                self._write_log(spec, str(failure["traceback"]).splitlines())
        shown = str(log) if log.exists() else None
        cause = translate(self.sessions[spec.node].node, failure)
        cause.message = f"{who} failed in {rank.phase}: {cause.message}{printed}"
        cause.log = shown
        return cause

    def _stalled(self, waiting: set[int]) -> RunError:
        quiet = min((self._ranks[i] for i in waiting), key=lambda r: r.heard)
        spec = quiet.spec
        seconds = time.monotonic() - quiet.heard
        return RunError(
            f"no news from rank {spec.rank} on {spec.device} (node {spec.node}) "
            f"for {seconds:.0f} s in {quiet.phase}",
            hint="see whether the node sleeps, swaps or lost its network; then launch again",
            log=str(self.paths.log(spec.rank)) if self.paths.log(spec.rank).exists() else None,
        )


def _follows(failure: dict[str, Any]) -> bool:
    """Whether a failure only follows from another: a neighbour is gone, or the agent was ending its tasks."""
    return failure.get("type") == "PeerLostError" or bool(failure.get("agent_ended"))


def gather_weights(run: Run, sessions: Mapping[str, Session]) -> Path | None:
    """Fetches every rank's part and merges them into the run's one safetensors file."""
    from skyctl.checkpoint.safetensors import merge

    parts: list[Path] = []
    try:
        for rank, remote in sorted(run.weights().items()):
            part = run.paths.folder / f".weights-{rank}.safetensors"
            parts.append(part)
            sessions[run.specs[rank].node].fetch(remote, part)
        if not parts:
            return None
        merge(parts, run.paths.weights)
        return run.paths.weights
    except OSError as exc:
        raise SkyctlError(
            f"cannot write the trained weights to {run.paths.weights}: {exc.strerror or exc}",
            hint="free some space, or set SKYCTL_HOME to another disk",
        ) from exc
    finally:
        for part in parts:
            part.unlink(missing_ok=True)
