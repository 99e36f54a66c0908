"""Plays a plan on a cluster: starts the ranks, brings the pairs together, watches, gathers, stops.

The launcher relays the rendezvous: a rank with a successor listens and says where; the successor is told.
No rank needs to reach any other than its neighbours. Every rank says every few seconds that it is alive and
what it is at; who falls silent is named (``life``), and so are all of them when each only waits for another.
However a run ends, its tasks are killed before this module returns, unless it is to go on without us.
"""

from __future__ import annotations

import math
import queue
import signal
import threading
import time
from collections.abc import Collection, Mapping
from contextlib import suppress
from typing import Any

from skyctl.errors import RunError, SkyctlError
from skyctl.files import RunPaths
from skyctl.launch.causes import TAIL_LINES, Evidence, RankState
from skyctl.launch.events import Collected, Detached, Watcher
from skyctl.launch.hooks import Check, Hooks, Past
from skyctl.launch.interrupts import interrupts_go_to
from skyctl.launch.life import Deadlines
from skyctl.launch.logs import keep_log
from skyctl.launch.spec import RankSpec
from skyctl.launch.vigil import Vigil
from skyctl.remote.credentials import credentials
from skyctl.remote.session import Session, Task

__all__ = ["Deadlines", "Hooks", "Past", "Run"]

MODULE = "skyctl.worker.rank"

INTERRUPT = -1
TICK_S = 0.5


class Run:
    """One attempt. ``start`` (or ``adopt``) once, then ``watch`` once; ``stop`` at any time, often.

    ``evidence``: what is known of its end, once ``start`` or ``watch`` has raised an error.
    """

    def __init__(
        self,
        paths: RunPaths,
        specs: list[RankSpec],
        sessions: Mapping[str, Session],
        watcher: Watcher,
        deadlines: Deadlines | None = None,
        check: Check = lambda _facts: None,
        hooks: Hooks | None = None,
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
        self.hooks = hooks or Hooks()
        first = int((specs[0].payload.get("resume") or {}).get("step", 0))
        self.collected = Collected(len(specs), specs[0].payload["steps"], first=first)
        self.evidence: Evidence | None = None
        self._ranks: list[RankState] = []
        self._news: queue.SimpleQueue[tuple[int, dict[str, Any] | SkyctlError]] = queue.SimpleQueue()
        self._vigil = Vigil(self._ranks, sessions, self.deadlines, watcher)
        self._ticked = 0.0
        self._asking = False
        self._stopped = False
        self.ending = False
        self._told_upto = 0

    def start(self) -> None:
        """Starts every rank and brings the pairs together; returns when all are ready and told to go.

        Raises:
            MismatchError: what the ranks found is not what the plan was made for.
            RunError: a rank failed or fell silent.
        """
        self.watcher.phase(f"starting {len(self.specs)} ranks")
        self._vigil.begin()
        shared = credentials(encrypt=self._encrypt)  # over the sessions only: not in argv, logs or files
        for spec in self.specs:
            payload = {**spec.payload, **shared}
            task = self.sessions[spec.node].task(MODULE, payload, name=f"rank-{spec.rank}")
            self._ranks.append(RankState(spec, task))
            self._listen(self._ranks[-1])
        unready = set(range(len(self._ranks)))
        facts: dict[int, Mapping[str, Any]] = {}
        while unready:
            rank, event = self._next()
            if event.get("event") == "facts":
                facts[rank.spec.rank] = event
                rank.at("telling what is here", waiting=True)
                if len(facts) == len(self._ranks):
                    self._check(facts)
                    for told in self._ranks:
                        told.task.send({"op": "build"})
                        told.at("build")
            elif event.get("event") == "listening":
                peer = self._ranks[rank.spec.rank + 1]
                peer.task.send({"op": "connect", "host": event["address"], "port": event["port"]})
            elif event.get("event") == "ready":
                unready.discard(rank.spec.rank)
                rank.at("connect", waiting=True)
        for rank in self._ranks:
            rank.task.send({"op": "start"})
            rank.at(f"step {self.collected.first}")

    def adopt(self, tasks: Mapping[int, Task], past: Past, told: int = 0) -> None:
        """In place of ``start``: ranks that another process has started.

        Args:
            tasks: by rank.
            past: (rank, event), what that process had heard and written down, in order.
            told: steps that it had told of.
        """
        self._told_upto = told
        for spec in self.specs:
            self._ranks.append(RankState(spec, tasks[spec.rank]))
        for number, event in past:
            rank = self._ranks[number]
            if event.get("event") in ("error", "exit"):
                rank.failure = event
            else:
                self._act(rank, event, told=False)
        for rank in self._ranks:
            rank.heard = time.monotonic()
            self._listen(rank)

    def _listen(self, rank: RankState) -> None:
        threading.Thread(target=self._pump, args=(rank,), daemon=True, name=rank.task.name).start()

    def watch(self, predicted_iteration_s: float) -> None:
        """Handles events until every rank has returned.

        Raises:
            RunError: the first cause, by time, where a rank failed, fell silent or all stalled.
            KeyboardInterrupt: the user, or a signal, ends it.
        """
        self.watcher.phase("training")
        self._vigil.predicted(predicted_iteration_s)
        if failed := [rank for rank in self._ranks if rank.failure is not None]:
            raise self._first_cause(failed[0])
        with interrupts_go_to(self._interrupted):
            self._until_all_returned()

    def finish(self, limit_s: float) -> bool:
        """After ``watch`` was interrupted: lets every rank end after the step under way, with a checkpoint.

        Returns:
            whether all did within ``limit_s``; an interrupt meanwhile is raised again.
        """
        self.end_early()
        try:
            self._until_all_returned(time.monotonic() + limit_s)
        except SkyctlError:
            return False
        return all(rank.result is not None for rank in self._ranks)

    def end_early(self) -> None:
        """Tells the first rank to end the run after the step under way, or the next one. Does not wait."""
        if not self.ending and self._ranks:
            self.ending = True
            with suppress(SkyctlError):
                self._ranks[0].task.send({"op": "stop"})

    def _until_all_returned(self, deadline: float = math.inf) -> None:
        while any(rank.result is None for rank in self._ranks) and time.monotonic() < deadline:
            self._tick()
            rank, event = self._next(deadline)
            self._act(rank, event)

    def _act(self, rank: RankState, event: dict[str, Any], *, told: bool = True) -> None:
        """What an event of a running rank means. ``told``: others hear of it."""
        kind = event.get("event")
        if kind == "step":
            self.collected.add(rank.spec.rank, event)
            rank.at(f"step {int(event['step']) + 1}")
            self._tell(told)
        elif kind == "validation":
            self._validated(int(event["step"]), float(event["loss"]), told)
        elif kind == "checkpoint":
            self._kept(rank, event, told)
        elif kind == "result":
            rank.result = event

    def _kept(self, rank: RankState, event: dict[str, Any], told: bool) -> None:
        if event.get("error") and told:
            self.watcher.warn(f"{rank.name} could not write its checkpoint: {event['error']}")
        layers = self.collected.kept(rank.spec.rank, event)
        if layers is not None and told:
            self.hooks.checkpoint(int(event["step"]), layers)

    def _validated(self, step: int, loss: float, told: bool) -> None:
        if not math.isfinite(loss):
            raise self._final(
                f"the validation loss after step {step + 1} is {loss}",
                "the training loss is finite: look at what validation() gives, and at layers that "
                "behave differently in eval()",
            )
        self.collected.validation[step] = loss
        self._tell(told)

    def _tell(self, told: bool) -> None:
        """Hands out the steps that have ended."""
        for progress in self.collected.complete():
            if not math.isfinite(progress.loss):
                raise self._final(
                    f"the loss of step {progress.step + 1} is {progress.loss}: training has diverged",
                    "try a lower --learning-rate"
                    if progress.step
                    else "no weight has changed yet: look at model() and data()",
                )
            if told or progress.step >= self._told_upto:
                self.watcher.step(progress)

    def _final(self, message: str, hint: str) -> RunError:
        """What would come again however often it was tried."""
        self.evidence = Evidence("raised", step=self.collected.reported, final=True)
        return RunError(message, hint=hint)

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

    def wait_gone(self, limit_s: float, lost: Collection[str] = ()) -> None:
        """After ``stop``: until every rank has ended on its node, those on ``lost`` nodes left out.

        What they had still said by then is taken in: steps and checkpoints that were done are done.
        """
        deadline = time.monotonic() + limit_s
        while time.monotonic() < deadline and any(
            not rank.task.done and rank.spec.node not in lost and self.sessions[rank.spec.node].lost is None
            for rank in self._ranks
        ):
            time.sleep(0.02)
        self._hear_the_last()
        for rank in self._ranks:
            self.sessions[rank.spec.node].discard(rank.task)
        self._hear_the_last()

    def _hear_the_last(self) -> None:
        with suppress(queue.Empty):
            while True:
                number, news = self._news.get_nowait()
                if number != INTERRUPT and not isinstance(news, SkyctlError):
                    self._late(self._ranks[number], news)

    def _late(self, rank: RankState, event: dict[str, Any]) -> None:
        """An event that came when the attempt was over already."""
        with suppress(SkyctlError):
            if not self._hear(rank, event):
                return
            if event.get("event") in ("error", "exit"):
                rank.failure = rank.failure or event
            else:
                self._act(rank, event)

    def _pump(self, rank: RankState) -> None:
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

    def _interrupted(self, signum: int, frame: Any) -> None:
        if self._asking:
            signal.default_int_handler(signum, frame)
        self._news.put((INTERRUPT, {}))

    def _ask(self) -> None:
        self._asking = True
        try:
            answer = self.watcher.interrupted()
        finally:
            self._asking = False
        if answer == "detach":
            raise Detached
        if answer != "go on":
            raise KeyboardInterrupt

    def _tick(self) -> None:
        now = time.monotonic()
        if now - self._ticked >= TICK_S:
            self._ticked = now
            self.hooks.tick()

    def _next(self, deadline: float = math.inf) -> tuple[RankState, dict[str, Any]]:
        """The next event that is more than a sign of life; a failure becomes the error of its first cause."""
        while True:
            try:
                number, news = self._news.get(timeout=TICK_S)
            except queue.Empty:
                self._check_life()
                self._tick()
                if time.monotonic() > deadline:
                    raise RunError("the ranks did not end in time") from None
                continue
            if number == INTERRUPT:
                self._ask()
                continue
            rank = self._ranks[number]
            if isinstance(news, SkyctlError):
                rank.failure = {"raised": news}
                raise self._first_cause(rank)
            if not self._hear(rank, news):
                continue
            kind = news.get("event")
            if kind == "alive":
                phase = str(news.get("phase"))
                rank.at(phase, waiting=bool(news.get("waiting")) or phase == "connect")
                self._check_life()
                self._tick()
            elif kind in ("error", "exit"):
                rank.failure = news
                raise self._first_cause(rank)
            elif kind != "log":
                return rank, news

    def _hear(self, rank: RankState, event: dict[str, Any]) -> bool:
        """Whatever came of a rank is written down before anything else; False: it was, long ago."""
        rank.heard = time.monotonic()
        if self.hooks.heard is None:
            keep_log(self.paths, rank.spec, event)
        elif not self.hooks.heard(rank.spec, event):
            return False
        if event.get("event") == "log":
            lines = str(event.get("text", "")).splitlines()
            rank.tail = (rank.tail + lines)[-TAIL_LINES:]
            for line in lines:
                self.watcher.log(rank.spec, line)
        return True

    def _check_life(self) -> None:
        """Says who has not been heard for a while; raises where that means that the attempt is over."""
        found = self._vigil.look(self.collected.reported, self._log_of)
        if found is not None:
            error, self.evidence = found
            raise error

    def _log_of(self, rank: RankState) -> str | None:
        path = self.paths.log(rank.spec.rank)
        return str(path) if path.exists() else None

    def _first_cause(self, first: RankState) -> SkyctlError:
        """Waits a moment for other failures, then picks the earliest that is not just a lost peer.

        Where there are only lost peers and some node is not heard, it waits until that one is, or is lost.
        """
        failed = [first]
        began = time.monotonic()
        while len(failed) < len(self._ranks):
            left_s = began + self._vigil.grace_s(failed) - time.monotonic()
            try:
                number, news = self._news.get(timeout=max(0.0, min(left_s, TICK_S)))
            except queue.Empty:
                if left_s <= 0:
                    break
                continue
            if number == INTERRUPT:
                self._ask()
                continue
            rank = self._ranks[number]
            if isinstance(news, SkyctlError):
                rank.failure = rank.failure or {"raised": news}
                failed.append(rank)
                continue
            self._late(rank, news)
            if rank.failure is not None and rank not in failed:
                failed.append(rank)
        error, self.evidence = self._vigil.cause(failed, self.collected.reported, self._log_of)
        return error
