"""A run as the one process has it that plays it: its journal, its nodes' sessions, and whoever watches."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

from skyctl.errors import SkyctlError
from skyctl.records.base import timestamp
from skyctl.records.cluster import Cluster
from skyctl.records.run_state import NodeSession
from skyctl.remote.agent_session import Session
from skyctl.remote.peer_addresses import find_peer_addresses
from skyctl.remote.session_factory import ignore_interrupts
from skyctl.run.callbacks import Detached, RunCallbacks
from skyctl.run.journal import Journal, update_attempt
from skyctl.run.run_lock import RunLock


@dataclass
class LiveRun:
    """A run of a plan or of a script, until it has ended or is left to another process.

    Attributes:
        journal: everything is written down there first; it has the run's state and the attempt's files.
        cluster: the nodes that it may use; one that joins is added.
        sessions: by node, those in use; nodes that are lost are taken out, nodes that come are put in.
            The code that opened them closes them.
        callbacks: whoever watches; nobody until the run is played.
        lock: the right to play it; None: no other process knows of it.
        replaced: earlier sessions of nodes that are back, to be closed with the others.
        missing: the nodes of a run taken over that are not in ``sessions``, and why.
        unreached: the sessions of those whose agents may still be there.
        left: it was left to another process.
    """

    journal: Journal
    cluster: Cluster
    sessions: dict[str, Session]
    callbacks: RunCallbacks = field(default_factory=RunCallbacks)
    lock: RunLock | None = None
    replaced: list[Session] = field(default_factory=list)
    missing: dict[str, SkyctlError] = field(default_factory=dict)
    unreached: tuple[NodeSession, ...] = ()
    left: bool = False
    _addresses: dict[str, str] = field(default_factory=dict)

    @property
    def run_id(self) -> str:
        """The name of the run, and of its folder."""
        return self.journal.paths.run_id

    def addresses(self, needed: tuple[str, ...]) -> dict[str, str]:
        """By node, the address where its peers reach it; found out again when the nodes have changed.

        Raises:
            SkyctlError: a node that is needed could not say.
        """
        if set(self._addresses) != set(self.sessions):
            outcomes = find_peer_addresses(self.sessions)
            for name in needed:
                outcome = outcomes.get(name)
                if isinstance(outcome, SkyctlError):
                    raise outcome
            self._addresses = {n: a for n, a in outcomes.items() if isinstance(a, str)}
        return self._addresses

    def take_out(self, name: str) -> Session | None:
        """A node is lost: nothing is asked of it any more. Its session, where it had one."""
        self._addresses.pop(name, None)
        return self.sessions.pop(name, None)

    def log_of(self, rank: int) -> str | None:
        """The path of what a rank of the attempt under way has printed, where there is any."""
        path = self.journal.paths.log(rank)
        return str(path) if path.exists() else None

    def leave(self, *, for_itself: bool = False) -> None:
        """Detaches from the sessions, writes everything down and releases the lock. Idempotent.

        Args:
            for_itself: this process will take it over again, and keeps the lock meanwhile.
        """
        if self.left:
            return
        self.left = True
        with ignore_interrupts():  # else Ctrl-C would close those that are not detached yet
            for session in self.sessions.values():
                with suppress(SkyctlError, ValueError):
                    session.detach()
        if not for_itself:
            self.journal.update(supervisor=None)
        self.journal.close()
        if self.lock is not None and not for_itself:
            self.lock.release()

    @contextmanager
    def until_it_ends(
        self,
        end: Callable[[], None],
        stop: Callable[[KeyboardInterrupt], None],
        leave: Callable[[], None] = lambda: None,
    ) -> Iterator[None]:
        """Writes down how the run has ended, unless it goes on without this process (``Detached``).

        Args:
            end: ends what there still is of it on nodes.
            stop: called before that where it was stopped.
            leave: called where it goes on.
        """
        try:
            yield
        except Detached:
            leave()
            raise
        except KeyboardInterrupt as exc:
            stop(exc)
            self._close(end, "stopped")
            raise
        except SkyctlError as exc:
            exc.log = exc.log or str(self.journal.paths.folder)
            self._close(end, "failed", exc.message)
            raise
        except BaseException as exc:
            self._close(end, "failed", f"{type(exc).__name__}: {exc}")
            raise
        self._close(end, "done")

    def _close(self, end: Callable[[], None], status: str, detail: str | None = None) -> None:
        """The last word of the state."""
        end()
        with suppress(SkyctlError):
            update_attempt(self.journal, ended=timestamp(), error=detail)
            self.journal.update(status=status, detail=detail)
            self.journal.close()
