"""A run from its first attempt to its end: what fails is tried again, on what is left, from what was kept.

An attempt is one set of ranks. When it ends before the run does, its fault is named, nodes that are gone are
left out, the rest is planned anew, the newest whole checkpoint is brought to where its layers are needed, and
the next attempt goes on from there. Sessions of nodes that live are used again.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from skyctl.control.request import Request
from skyctl.control.running import RunOptions
from skyctl.errors import InfeasibleError, NodeError, SkyctlError
from skyctl.files import RunPaths, write_atomic
from skyctl.launch.events import Collected, Detached, Progress, Watcher
from skyctl.launch.spec import check_fits
from skyctl.records.cluster import Cluster
from skyctl.records.measurement import Measurement
from skyctl.records.plan import Plan
from skyctl.records.run import NodeSession, RunAttempt
from skyctl.remote.base import ConnectOptions
from skyctl.remote.credentials import certificate
from skyctl.remote.session import Session
from skyctl.supervise.attempts.book import Book, now
from skyctl.supervise.attempts.faults import Fault, Patience, classify, given_up, went, why_next
from skyctl.supervise.attempts.ground import Ground
from skyctl.supervise.attempts.history import History
from skyctl.supervise.attempts.moving import Move, Mover
from skyctl.supervise.attempts.playing import Adopted, Play, Stopped, no_last
from skyctl.supervise.attempts.replanning import as_seen, nodes_in, nodes_of, replan, without
from skyctl.supervise.attempts.requests import pending

GONE_S = 15.0
"""For an attempt's ranks to be gone before the next one's begin."""
LOOK_S = 0.25
"""Between two looks for requests while nothing else happens."""


@dataclass
class _Now:
    """The attempt that is about to be played. ``why``: what it is begun for."""

    plan: Plan
    why: str = "launched"
    planned: bool = False
    number: int = 1


class Supervisor:
    """One run's. ``run`` once.

    Args:
        sessions: by node, who can be used; changed in place as nodes are lost and come.
        book: writes everything down.
        connect: how nodes are connected to that come later; None: none do.
        resume: go on from the newest checkpoint that the nodes of ``sessions`` hold of the book's run.
    """

    def __init__(
        self,
        plan: Plan,
        cluster: Cluster,
        request: Request,
        sessions: dict[str, Session],
        options: RunOptions,
        watcher: Watcher,
        book: Book,
        *,
        connect: ConnectOptions | None = None,
        resume: bool = False,
    ) -> None:
        self._sessions, self._options = sessions, options
        self._book = book
        before = self._book.state.attempts
        self._now = _Now(plan, "resumed" if resume else "launched", number=len(before) + 1)
        self._history = History.read(self._book.paths.metrics) if before else History()
        self._from_checkpoint = resume
        self._watcher = replace(watcher, step=self._stepped)
        self._told = watcher
        self._patience = Patience(options.max_restarts)
        self._lost = {name: why for name, why in book.state.lost.items() if name not in sessions}
        self._stop: dict[str, Any] | None = None
        self._stop_at = 0.0
        self._noted: set[str] = set()
        self._play: Play | None = None
        self._before: Collected | None = None
        self._restart_began: float | None = None
        self._ground = Ground(
            cluster=cluster,
            request=request,
            sessions=sessions,
            options=options,
            watcher=self._watcher,
            book=self._book,
            on_checkpoint=self._kept,
            tick=self._tick,
            tls=certificate(),
        )
        file = self._book.state.cluster_file
        self._mover = Mover(cluster, request, sessions, connect, plan, watcher, file)
        self._mover.ask([name for name in book.state.lost if name in sessions])  # it came back meanwhile
        for name in self._lost:
            self._mover.gave_up(name, None, plan)

    @property
    def paths(self) -> RunPaths:
        """Of the attempt under way."""
        return self._book.paths

    def run(self, adopted: Adopted | None = None) -> tuple[Measurement, RunPaths]:
        """Plays attempts until the run has ended.

        Args:
            adopted: ranks that another process had started, of the ledger's last attempt.

        Raises:
            SkyctlError: the first cause of the last fault, when another attempt would not help.
            InfeasibleError: nothing fits on the nodes that are left.
            KeyboardInterrupt: it was stopped (``Detached``: it goes on without this process).
        """
        before = self._book.state.attempts
        if adopted is not None and before:
            last = before[-1]
            self._now = _Now(self._now.plan, last.why, last.planned, last.number)
        try:
            if self._from_checkpoint:
                self._now.plan = self._replanned({})
            done = self._attempts(adopted)
        except Detached:
            raise
        except KeyboardInterrupt as exc:
            exc.add_note(self._stopped_words())
            if type(exc) in (KeyboardInterrupt, Stopped):  # not a signal that is to end it at once
                self._settle()
            self._ended("stopped")
            raise
        except SkyctlError as exc:
            if exc.log is None:
                exc.log = str(self.paths.folder)
            self._ended("failed", detail=exc.message)
            raise
        except BaseException as exc:
            self._ended("failed", detail=f"{type(exc).__name__}: {exc}")
            raise
        self._ended("done")
        return done, self.paths

    def _attempts(self, adopted: Adopted | None) -> Measurement:
        while True:
            try:
                found = self._attempt(adopted)
            except SkyctlError as exc:
                self._recover(exc)
            else:
                if isinstance(found, Measurement):
                    return found
                self._moved(found)
            adopted = None

    def _attempt(self, adopted: Adopted | None) -> Measurement | Move:
        """Plays one attempt: the run's measurement, or what to go on with instead."""
        plan = self._now.plan
        self._ground.cluster = self._mover.cluster
        check_fits(plan, self._ground.cluster)
        if adopted is None:  # else a request to stop waits until the ranks can write a last checkpoint
            self._look_for_requests()
            self._begin(plan)
        self._play = Play(self._ground, plan, self._now.number)
        if adopted is not None:
            self._play.adopt(adopted)
        else:
            self._note_sessions()
            chosen = self._play.checkpoint(self._history.count) if self._resumes else None
            if self._resumes:
                what = f"step {chosen.step}" if chosen else "the start: no checkpoint is there in full"
                self._told.note(f"going on from {what}")
                self._update_attempt(from_step=chosen.step if chosen else 0)
                self._catch_up(chosen.step if chosen else 0)
            self._play.start(chosen)
        self._book.update(status="running", detail=None)
        self._play.watch()
        move, self._mover.decided = self._mover.decided, None
        if self._stop is not None and self._play.done_steps < self._options.steps:
            raise Stopped
        if move is not None and self._play.done_steps < self._options.steps:
            return move
        done = self._play.finish(self._history)
        write_atomic(self.paths.measurement, done.to_json())
        if self._options.trace:  # whatever becomes of it, the figures are kept
            done = self._play.traced(done)
            write_atomic(self.paths.measurement, done.to_json())
        self._play.end()
        self._play.forget()
        return done

    @property
    def _resumes(self) -> bool:
        return self._now.number > 1 or self._from_checkpoint

    def _begin(self, plan: Plan) -> None:
        """Folder and entry of a new attempt."""
        paths = self._book.paths
        if self._now.number > 1:
            paths = RunPaths(paths.run_id, self._now.number).create()
        self._book.begin(paths, plan.to_json())
        entry = RunAttempt(
            number=self._now.number,
            began=now(),
            why=self._now.why,
            from_step=0,
            planned=self._now.planned,
            devices=tuple(stage.replicas[0].device for stage in plan.stages),
            predicted_iteration_s=plan.predicted.iteration_s,
        )
        status = "starting" if self._now.number == 1 else "restarting"
        self._book.update(attempts=(*self._book.state.attempts, entry), status=status, detail=self._now.why)

    def _update_attempt(self, **changes: Any) -> None:
        attempts = self._book.state.attempts
        if attempts:
            self._book.update(attempts=(*attempts[:-1], attempts[-1].model_copy(update=changes)))

    def _note_sessions(self) -> None:
        """Those of lost nodes, too: their agents may hold there, and whoever comes next can end them."""
        known = [
            NodeSession(node=name, session=str(s.hello["session"]), cache=str(s.hello["cache"]))
            for name, s in {**self._mover.given_up, **self._sessions}.items()
        ]
        self._noted = set(self._sessions)
        lost = {name: why for name, why in self._lost.items() if name not in self._sessions}
        self._book.update(sessions=tuple(known), lost=lost)

    # --- while it goes on

    def _stepped(self, progress: Progress, *, now: bool = True) -> None:
        """A step that has ended (``now``: in this attempt): written down before anybody is told."""
        self._book.step(progress)
        self._history.add(progress)
        self._book.update(step=progress.step + 1, loss=progress.loss, iteration_s=progress.iteration_s)
        if now and self._restart_began is not None:
            self._mover.restart_s = time.monotonic() - self._restart_began
            self._told.note(
                f"the next step came {self._mover.restart_s:.1f} s after the attempt before ended"
            )
            self._restart_began = None
        self._told.step(progress)

    def _catch_up(self, step: int) -> None:
        """It goes on from beyond what all nodes have told of (nothing older is kept): what is known of it."""
        before, self._before = self._before, None
        for progress in before.heard(step) if before is not None else ():
            self._stepped(progress, now=False)

    def _kept(self, step: int) -> None:
        """Every rank has written its layers after so many steps."""
        self._book.update(checkpoint=step)
        if self._play is not None and self._stop is None:
            self._mover.checkpointed(self._now.plan, self._play.collected, self._options.steps)

    def _tick(self) -> None:
        """Twice a second while an attempt is watched."""
        self._look_for_requests()
        if set(self._sessions) != self._noted:  # a spare one has come
            self._note_sessions()
        away = tuple(sorted(name for name, s in self._sessions.items() if s.away_s > 0))
        if away != self._book.state.away:
            self._book.update(away=away)
        if self._play is None or self._stop is not None:
            return
        self._mover.look(self._now.plan, self._play.collected, self._options.steps, self._lost)
        if self._mover.decided is not None and not self._play.ending and self._play.early():
            self._told.note(f"{self._mover.decided.why}: going on with another plan")

    def _look_for_requests(self) -> None:
        for path, request in pending(self.paths):
            with suppress(OSError):
                path.unlink()
            if request.get("op") == "stop":
                if self._stop is None:
                    self._stop_at = time.monotonic()
                    self._book.update(status="stopping")
                if self._stop is None or not request.get("checkpoint", True):
                    self._stop = request
            elif request.get("op") == "join":
                self._mover.ask([str(name) for name in request.get("nodes", [])])
        if self._stop is None:
            return
        if self._play is None or not self._stop.get("checkpoint", True) or not self._play.early():
            raise Stopped
        if time.monotonic() - self._stop_at > self._play.last_s:
            self._told.warn(no_last(self._play.last_s))
            raise Stopped

    # --- after an attempt

    def _recover(self, error: SkyctlError) -> None:
        """After a fault: the next attempt's plan; raises the error where there is to be none."""
        self._restart_began = self._restart_began or time.monotonic()
        play, self._play = self._play, None
        evidence = play.evidence if play is not None else None
        fault = classify(error, evidence)
        if fault.kind == "node" and self._hopeless(error):
            fault = Fault("final")
        factors = play.seen() if play is not None else {}
        lost = dict.fromkeys(fault.lost, error.message)
        lost |= {name: s.lost.message for name, s in self._sessions.items() if s.lost is not None}
        for name, why in lost.items():
            self._lose(name, why)
        if play is not None:
            play.end(GONE_S)
            self._before = play.collected
        self._update_attempt(ended=now(), error=error.message)
        checkpoint = self._book.state.checkpoint
        wait_s = self._patience.wait_s(fault, checkpoint)
        if wait_s is None:
            raise given_up(error, fault, self._patience, self.paths.run_id, checkpoint) from None
        plan = self._replanned(factors)
        which = f"attempt {self._now.number} of run {self.paths.run_id} ended: {error.message}"
        soon = f" in {wait_s:.0f} s" if wait_s else ""
        self._told.warn(
            f"{which}\n  trying again{soon} on {', '.join(nodes_in(plan))} "
            f"({self._patience.failed} of {self._options.max_restarts} restarts)"
        )
        self._now = _Now(plan, why_next(fault, error), number=self._now.number + 1)
        self._book.update(status="restarting", detail=self._now.why)
        until = time.monotonic() + wait_s
        while time.monotonic() < until:
            self._look_for_requests()
            time.sleep(min(LOOK_S, max(0.0, until - time.monotonic())))

    def _hopeless(self, error: SkyctlError) -> bool:
        """Nothing was done yet, and what a node lacks is for its owner to mend."""
        begun = self._history.count > 0 or self._from_checkpoint
        return not begun and isinstance(error, NodeError) and not went(error)

    def _replanned(self, factors: Mapping[str, float]) -> Plan:
        """The same plan while all of its nodes are there, else the best one on those that are."""
        plan = self._now.plan
        gone = {name: self._lost.get(name, "not connected") for name in nodes_of(plan.problem)}
        gone = {name: why for name, why in gone.items() if name not in self._sessions}
        if not any(name in gone for name in nodes_in(plan)):
            return plan
        try:
            return replan(plan, without(as_seen(plan.problem, factors), gone))
        except InfeasibleError as exc:
            lost = ", ".join(gone)
            exc.message = f"without {lost} nothing fits: {exc.message}"
            kept = self._book.state.checkpoint
            if kept is not None:
                exc.hint = (
                    f"bring {lost} back or add a machine, then go on from step {kept}: "
                    f"skyctl launch --resume {self.paths.run_id}"
                )
            raise

    def _lose(self, name: str, why: str) -> None:
        """A node is given up; it may come back."""
        session = self._sessions.pop(name, None)
        self._lost[name] = why.splitlines()[0]
        self._ground.drop(name)
        self._mover.gave_up(name, session, self._now.plan)
        self._note_sessions()

    def _moved(self, move: Move) -> None:
        """The attempt has ended because there is a better plan."""
        self._restart_began = time.monotonic()
        play, self._play = self._play, None
        if play is not None:
            play.end(GONE_S)
        self._update_attempt(ended=now())
        for name in nodes_in(move.plan):
            self._lost.pop(name, None)
        self._now = _Now(move.plan, move.why, True, self._now.number + 1)

    # --- the end

    def _stopped_words(self) -> str:
        kept = self._book.state.checkpoint
        words = f"stopped after {self._history.count} steps"
        if kept is not None:
            words += f"; go on from step {kept}: skyctl launch --resume {self.paths.run_id}"
        return f"{words}, no weights were kept; the run's folder: {self.paths.folder}"

    def _settle(self) -> None:
        """After a stop that was to keep everything: the last checkpoint gets its copies, too."""
        if self._play is None or (self._stop is not None and not self._stop.get("checkpoint", True)):
            return
        self._play.end()
        if self._book.state.checkpoint == self._history.count:
            with suppress(KeyboardInterrupt):
                self._ground.settle(self._history.count)

    def _ended(self, status: str, detail: str | None = None) -> None:
        """The last word of the state; nothing of the run is left on any node but its checkpoints."""
        if self._play is not None:
            self._play.end()
            self._play = None
        self._ground.close()
        self._mover.close()
        with suppress(SkyctlError):
            self._update_attempt(ended=now(), error=detail)
            self._book.update(status=status, detail=detail)
            self._book.close()
