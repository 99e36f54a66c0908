"""Plays a plan on a cluster: starts the ranks, brings the pairs together, watches, gathers, stops.

The launcher relays the rendezvous: a rank with a successor listens and says where; the successor is told.
No rank needs to reach any other than its neighbours. Every rank says every few seconds that it is alive and
what it is at; one that falls silent is named, and so are all of them when each only waits for another.
However a run ends, its tasks are killed before this module returns.
"""

from __future__ import annotations

import math
import queue
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from skyctl.errors import RunError, SkyctlError
from skyctl.files import RunPaths
from skyctl.launch.events import Collected, Watcher
from skyctl.launch.spec import RankSpec
from skyctl.remote.credentials import credentials
from skyctl.remote.session import Session, Task, translate

MODULE = "skyctl.worker.rank"
TAIL_LINES = 6
"""A failed rank's last lines that go into the message."""

FIRST_CAUSE_GRACE_S = 1.5
"""How long after the first failure others may still report one that came earlier or says more."""

Check = Callable[[Mapping[int, Mapping[str, Any]]], None]
"""Told by rank what each found where it was sent; raises where the plan does not go with that."""

INTERRUPT = -1
TICK_S = 0.5


@dataclass(frozen=True)
class Deadlines:
    """Seconds of patience.

    ``start_s``: for a rank's first word (its Python must import torch). ``silence_s``: between two words.
    ``stall_s``: for ranks that all wait for each other and get nowhere, or ``stall_steps`` predicted steps if
    that is more. A rank that computes may take as long as it needs.
    """

    start_s: float = 180.0
    silence_s: float = 45.0
    stall_s: float = 60.0
    stall_steps: float = 5.0


@dataclass
class _Rank:
    spec: RankSpec
    task: Task
    phase: str = "starting"
    waiting: bool = False
    heard: float | None = None
    moved: float = field(default_factory=time.monotonic)
    result: dict[str, Any] | None = None
    failure: dict[str, Any] | None = None
    tail: list[str] = field(default_factory=list)

    @property
    def name(self) -> str:
        return f"rank {self.spec.rank} on {self.spec.device} (node {self.spec.node})"

    def at(self, phase: str, *, waiting: bool = False) -> None:
        """Notes what it is at; ``moved`` is when that last changed."""
        if (phase, waiting) != (self.phase, self.waiting):
            self.phase, self.waiting, self.moved = phase, waiting, time.monotonic()


class Run:
    """One attempt. ``start`` once, then ``watch`` once; ``stop`` may be called at any time, often."""

    def __init__(
        self,
        paths: RunPaths,
        specs: list[RankSpec],
        sessions: Mapping[str, Session],
        watcher: Watcher,
        deadlines: Deadlines | None = None,
        check: Check = lambda _facts: None,
        *,
        encrypt: bool = False,
    ) -> None:
        self.paths = paths
        self._encrypt = encrypt
        self._check = check
        self.specs = specs
        self.sessions = sessions
        self.watcher = watcher
        self.deadlines = deadlines or Deadlines()
        self.collected = Collected(len(specs), specs[0].payload["steps"])
        self._ranks: list[_Rank] = []
        self._news: queue.SimpleQueue[tuple[int, dict[str, Any] | SkyctlError]] = queue.SimpleQueue()
        self._began = time.monotonic()
        self._stall_s = self.deadlines.stall_s
        self._asking = False
        self._stopped = False

    def start(self) -> None:
        """Starts every rank and brings the pairs together; returns when all are ready and told to go.

        Raises:
            MismatchError: what the ranks found is not what the plan was made for.
            RunError: a rank failed or fell silent.
        """
        self.watcher.phase(f"starting {len(self.specs)} ranks")
        self._began = time.monotonic()
        shared = credentials(encrypt=self._encrypt)  # over the sessions only: not in argv, logs or files
        for spec in self.specs:
            payload = {**spec.payload, **shared}
            task = self.sessions[spec.node].task(MODULE, payload, name=f"rank-{spec.rank}")
            rank = _Rank(spec, task)
            self._ranks.append(rank)
            threading.Thread(target=self._pump, args=(rank,), daemon=True, name=task.name).start()
        unready = set(range(len(self._ranks)))
        facts: dict[int, Mapping[str, Any]] = {}
        while unready:
            rank, event = self._next()
            if event.get("event") == "facts":
                facts[rank.spec.rank] = event
                if len(facts) == len(self._ranks):
                    self._check(facts)
                    for told in self._ranks:
                        told.task.send({"op": "build"})
            elif event.get("event") == "listening":
                peer = self._ranks[rank.spec.rank + 1]
                peer.task.send({"op": "connect", "host": event["address"], "port": event["port"]})
            elif event.get("event") == "ready":
                unready.discard(rank.spec.rank)
        for rank in self._ranks:
            rank.task.send({"op": "start"})
            rank.at("step 0")

    def watch(self, predicted_iteration_s: float) -> None:
        """Handles events until every rank has returned.

        Raises:
            RunError: the first cause, by time, where a rank failed, fell silent or all stalled.
            KeyboardInterrupt: the user, or a signal, ends it.
        """
        self.watcher.phase("training")
        self._stall_s = max(self.deadlines.stall_s, self.deadlines.stall_steps * predicted_iteration_s)
        with self._interrupts_as_events():
            while any(rank.result is None for rank in self._ranks):
                rank, event = self._next()
                if event.get("event") == "step":
                    self._step(rank, event)
                elif event.get("event") == "validation":
                    self._validated(int(event["step"]), float(event["loss"]))
                elif event.get("event") == "result":
                    rank.result = event

    def _step(self, rank: _Rank, event: dict[str, Any]) -> None:
        self.collected.add(rank.spec.rank, event)
        rank.at(f"step {int(event['step']) + 1}")
        self._tell()

    def _validated(self, step: int, loss: float) -> None:
        if not math.isfinite(loss):
            raise RunError(
                f"the validation loss after step {step + 1} is {loss}",
                hint="the training loss is finite: look at what validation() gives, and at layers that "
                "behave differently in eval()",
            )
        self.collected.validation[step] = loss
        self._tell()

    def _tell(self) -> None:
        """Hands out the steps that have ended."""
        for progress in self.collected.complete():
            if not math.isfinite(progress.loss):
                raise RunError(
                    f"the loss of step {progress.step + 1} is {progress.loss}: training has diverged",
                    hint="try a lower --learning-rate"
                    if progress.step
                    else "no weight has changed yet: look at model() and data()",
                )
            self.watcher.step(progress)

    def weights(self) -> dict[int, str]:
        """By rank, where its part of the trained weights lies on its node."""
        return self._left("weights")

    def traces(self) -> dict[int, str]:
        """By rank, where what it recorded lies on its node (``trace``)."""
        return self._left("trace")

    def _left(self, key: str) -> dict[int, str]:
        return {
            rank.spec.rank: str(rank.result[key])
            for rank in self._ranks
            if rank.result is not None and rank.result.get(key)
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

    @contextmanager
    def _interrupts_as_events(self) -> Iterator[None]:
        """Ctrl-C becomes an event, so that it cuts no other one in two; while asking it is itself."""
        ours = (
            threading.current_thread() is threading.main_thread()
            and signal.getsignal(signal.SIGINT) is signal.default_int_handler
        )

        def note(signum: int, frame: Any) -> None:
            if self._asking:
                signal.default_int_handler(signum, frame)
            self._news.put((INTERRUPT, {}))

        if ours:
            signal.signal(signal.SIGINT, note)
        try:
            yield
        finally:
            if ours:
                signal.signal(signal.SIGINT, signal.default_int_handler)

    def _ask(self) -> None:
        self._asking = True
        try:
            answer = self.watcher.interrupted()
        finally:
            self._asking = False
        if answer != "go on":
            raise KeyboardInterrupt

    def _next(self) -> tuple[_Rank, dict[str, Any]]:
        """The next event that is more than a sign of life; a failure becomes the error of its first cause."""
        while True:
            try:
                number, news = self._news.get(timeout=TICK_S)
            except queue.Empty:
                self._check_life()
                continue
            if number == INTERRUPT:
                self._ask()
                continue
            rank = self._ranks[number]
            if isinstance(news, SkyctlError):
                rank.failure = {"raised": news}
                raise self._first_cause(rank)
            rank.heard = time.monotonic()
            kind = news.get("event")
            if kind == "log":
                self._log(rank, str(news.get("text", "")))
            elif kind == "alive":
                rank.at(str(news.get("phase")), waiting=bool(news.get("waiting")))
                self._check_life()
            elif kind in ("error", "exit"):
                rank.failure = news
                raise self._first_cause(rank)
            else:
                return rank, news

    def _check_life(self) -> None:
        """Raises RunError where a rank has fallen silent, or where all wait for each other and none moves."""
        now = time.monotonic()
        running = [rank for rank in self._ranks if rank.result is None]
        for rank in running:
            patience_s = self.deadlines.start_s if rank.heard is None else self.deadlines.silence_s
            quiet_s = now - (self._began if rank.heard is None else rank.heard)
            if quiet_s > patience_s:
                raise RunError(
                    f"no sign of life from {rank.name} for {quiet_s:.0f} s, last heard in {rank.phase}",
                    hint="see whether the node sleeps, swaps or lost its network; then launch again",
                    log=self._log_of(rank),
                )
        if running and all(r.waiting and now - r.moved > self._stall_s for r in running):
            lines = "".join(f"\n  {r.name} waits in {r.phase}" for r in running)
            raise RunError(
                f"every rank has waited for another for {self._stall_s:.0f} s:{lines}",
                hint="a network that drops packets without a word looks like this: skyctl check",
            )

    def _log_of(self, rank: _Rank) -> str | None:
        path = self.paths.log(rank.spec.rank)
        return str(path) if path.exists() else None

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
            if number == INTERRUPT:
                raise KeyboardInterrupt
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
        who = f"rank {spec.rank} on {spec.device} (node {spec.node}, {self.sessions[spec.node].host})"
        raised = failure.get("raised")
        if isinstance(raised, SkyctlError):
            return raised
        printed = "".join(f"\n    {line}" for line in rank.tail[-TAIL_LINES:])
        if failure.get("traceback"):
            with suppress(SkyctlError):
                self._write_log(spec, str(failure["traceback"]).splitlines())
        cause = translate(self.sessions[spec.node].node, failure)
        where = "" if failure.get("skyctl") else f" in {rank.phase}"  # ours say it themselves
        message = cause.message.removeprefix(f"on node {spec.node}: ")
        cause.message = f"{who} failed{where}: {message}{printed}"
        cause.log = self._log_of(rank)
        return cause


def _follows(failure: dict[str, Any]) -> bool:
    """Whether a failure only follows from another: a neighbour is gone, or the agent was ending its tasks."""
    return failure.get("type") == "PeerLostError" or bool(failure.get("agent_ended"))


def gather_weights(run: Run, sessions: Mapping[str, Session]) -> Path | None:
    """Fetches every rank's part and merges them into the run's one safetensors file."""
    from skyctl.checkpoint.safetensors import merge

    parts: list[Path] = []
    try:
        for rank, remote in sorted(run.weights().items()):
            part = run.paths.weights_part(rank)
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
