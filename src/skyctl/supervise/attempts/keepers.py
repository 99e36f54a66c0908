"""The keepers of a run's checkpoints, one a node: what they hold, who follows whom, files brought together.

Keepers take files from each other directly. Where two can't reach each other, what is needed goes over this
process's sessions.
"""

from __future__ import annotations

import itertools
import queue
import secrets
import tempfile
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from skyctl.checkpoint import layout
from skyctl.checkpoint.choosing import Chosen, Pull, pulls, replica_peers
from skyctl.errors import RunError, SkyctlError
from skyctl.files import home, make_private, safe_name
from skyctl.remote.session import Session, Task, translate

MODULE = "skyctl.checkpoint.keeper"
NAME = "keeper"
START_S = 60.0
LIST_S = 20.0
PULL_S = 600.0
STOP_S = 3.0
HERE = ""
"""Stands for this machine's own copies, where a node's name is expected: no node is called so."""

Heard = Callable[[str, str, Mapping[str, Any]], bool]
"""Told (node, task's name, event) of everything; False: it was heard before."""
Message = dict[str, Any]


def run_folder_on(session: Session, run_id: str) -> Path:
    """Where the run's checkpoints lie on that node. Its own: local nodes share one cache."""
    return Path(str(session.hello["cache"])) / "runs" / f"{run_id}@{safe_name(session.node.name)}"


class Keepers:
    """All methods are for one thread; what comes is read in threads of its own.

    ``pinned``: what nodes had pinned when their keepers began.

    Args:
        sessions: by node; may change, ``start`` and ``drop`` follow it.
        heard: gets every event, in the calling thread.
        on_event: gets what is no answer (``replicated``, ``unreplicated``), with the node.
        tls: the run's certificate and key, or None.
    """

    def __init__(
        self,
        run_id: str,
        sessions: Mapping[str, Session],
        heard: Heard = lambda _node, _who, _event: True,
        on_event: Callable[[str, Message], None] = lambda _node, _event: None,
        tls: Mapping[str, str] | None = None,
    ) -> None:
        self.run_id = run_id
        self._sessions, self._heard, self._on_event, self._tls = sessions, heard, on_event, tls
        self._secret = secrets.token_hex(16)  # over the sessions only
        self._tasks: dict[str, Task] = {}
        self._where: dict[str, tuple[str, int]] = {}
        self.pinned: frozenset[int] = frozenset()
        self._numbers = itertools.count(1)
        self._asked: dict[int, str] = {}
        self._answers: dict[int, Message | SkyctlError] = {}
        self._news: queue.SimpleQueue[tuple[str, Task, Message | SkyctlError | None]] = queue.SimpleQueue()

    @property
    def nodes(self) -> list[str]:
        """Those whose keepers can be asked."""
        return [name for name in self._where if name in self._tasks]

    def start(self, addresses: Mapping[str, str]) -> None:
        """A keeper on each of those nodes that has none; does not wait for it.

        Args:
            addresses: by node, where its peers reach it.
        """
        for name in addresses:
            if name in self._tasks or name not in self._sessions:
                continue
            session = self._sessions[name]
            payload = {
                "run_id": self.run_id,
                "folder": str(run_folder_on(session, self.run_id)),
                "secret": self._secret,
                "address": addresses[name],
                "interface": session.node.interface,
                "tls": None if self._tls is None else dict(self._tls),
            }
            try:
                task = session.task(MODULE, payload, name=NAME)
            except SkyctlError as exc:
                self._on_event(name, {"event": "ended", "error": exc.message})
                continue
            self._tasks[name] = task
            threading.Thread(target=self._pump, args=(name, task), daemon=True, name=f"keeper {name}").start()

    @property
    def starting(self) -> bool:
        """Whether one was started and has not said yet where it listens."""
        return any(name not in self._where for name in self._tasks)

    def ready(self, limit_s: float = START_S) -> None:
        """Waits until all that were started listen; those that don't in time are let go."""
        deadline = time.monotonic() + limit_s
        while self.starting and self._take(deadline - time.monotonic()):
            pass
        for name in [name for name in self._tasks if name not in self._where]:
            self._on_event(name, {"event": "ended", "error": f"it did not start within {limit_s:.0f} s"})
            self.drop(name)

    def drop(self, name: str) -> None:
        """That node is lost: it is asked no more, and ended if it ever hears of it."""
        task = self._tasks.pop(name, None)
        if task is not None:
            self._end(name, task)
        self._where.pop(name, None)

    def turn(self) -> None:
        """Takes in what has come, without waiting."""
        while self._take(0.0):
            pass

    def follow(
        self, order: Iterable[str], replicas: int, keep: int, sites: Mapping[str, str] | None = None
    ) -> None:
        """Says who copies whose checkpoints: each is to be on ``replicas`` other nodes, if there are so many.

        Args:
            order: nodes with ranks, in the pipeline's order, then others that may keep copies.
        """
        nodes = [name for name in order if name in self._where]
        for name, owners in replica_peers(nodes, replicas + 1, sites).items():
            peers = [
                {"host": self._where[owner][0], "port": self._where[owner][1], "node": owner}
                for owner in owners
            ]
            with suppress(SkyctlError):
                self._tasks[name].send({"op": "follow", "peers": peers, "keep": keep})

    def holdings(
        self, limit_s: float = LIST_S, *, named: bool = False
    ) -> dict[str, dict[int, dict[int, layout.Held]]]:
        """By node, step and layer, what there is; nodes that do not answer hold nothing.

        Args:
            named: also files that are gone or truncated: ``damaged`` and ``bring`` say so.
        """
        orders = {name: {"op": "list", "named": named} for name in self.nodes}
        found: dict[str, dict[int, dict[int, layout.Held]]] = {}
        for name, answer in self._ask_all(orders, limit_s).items():
            if not isinstance(answer, SkyctlError):
                found[name] = {
                    int(step): {int(i): layout.Held.from_dict(file) for i, file in layers.items()}
                    for step, layers in answer["steps"].items()
                }
        return found

    def damaged(
        self, chosen: Chosen, used: Mapping[str, Collection[int]], limit_s: float = PULL_S
    ) -> dict[str, dict[int, str]]:
        """By node, which of those layers are not whole there, in words (each file is read).

        A node that does not answer has none of them.
        """
        orders = {
            name: {
                "op": "verify",
                "step": chosen.step,
                "layers": {str(i): chosen.layers[i].sha256 for i in layers},
            }
            for name, layers in used.items()
            if layers
        }
        found: dict[str, dict[int, str]] = {}
        for name, answer in self._ask_all(orders, limit_s).items():
            if isinstance(answer, SkyctlError):
                found[name] = dict.fromkeys(used[name], answer.message)
            elif answer.get("damaged"):
                found[name] = {int(layer): str(why) for layer, why in answer["damaged"].items()}
        return found

    def bring(
        self,
        chosen: Chosen,
        wanted: Mapping[str, Collection[int]],
        rates: Mapping[tuple[str, str], float] | None = None,
        here: Path | None = None,
        limit_s: float = PULL_S,
    ) -> dict[str, dict[int, tuple[str, str]]]:
        """Brings the layers that each node needs to it; what could not be had, from where, and why.

        Args:
            rates: bytes a second between nodes.
            here: this machine's own copies (``HERE`` among the sources).
        """
        plan = pulls(chosen, wanted, rates)
        orders: dict[str, list[tuple[str, list[Pull]]]] = {}
        for name, needs in plan.items():
            by_source: dict[str, list[Pull]] = {}
            for need in needs:
                by_source.setdefault(need.source, []).append(need)
            orders[name] = list(by_source.items())
        ids: dict[int, tuple[str, str, list[Pull]]] = {}
        missing: list[tuple[str, Pull, str]] = []
        for name, sources in orders.items():
            for source, needs in sources:
                if source not in self._where:
                    missing += [(name, need, "") for need in needs]
                    continue
                order = {
                    "op": "pull",
                    "host": self._where[source][0],
                    "port": self._where[source][1],
                    "node": source,
                    "step": chosen.step,
                    "attempt": chosen.attempt,
                    "layers": {str(need.layer): need.sha256 for need in needs},
                }
                ids[self._send(name, order)] = (name, source, needs)
        for number, answer in self._gather(list(ids), limit_s).items():
            name, source, needs = ids[number]
            failed = (
                {str(need.layer): answer.message for need in needs}
                if isinstance(answer, SkyctlError)
                else answer.get("failed", {})
            )
            missing += [(name, need, failed[str(need.layer)]) for need in needs if str(need.layer) in failed]
        lacking: dict[str, dict[int, tuple[str, str]]] = {}
        for name, need, why in missing:
            over = self._over_here(chosen, name, need, here)
            if over is not None:
                told = "; ".join(words for words in (why, over) if words)
                lacking.setdefault(name, {})[need.layer] = (need.source, told)
        return lacking

    def _over_here(self, chosen: Chosen, name: str, need: Pull, here: Path | None) -> str | None:
        """One file by way of this machine; why not, or None."""
        try:
            with tempfile.TemporaryDirectory(prefix="shard-", dir=make_private(home())) as folder:
                if need.source == HERE and here is not None:
                    local = layout.layer_path(here, chosen.step, need.layer)
                else:
                    session = self._sessions[need.source]
                    there = run_folder_on(session, self.run_id)
                    local = Path(folder) / "layer"
                    session.fetch(str(layout.layer_path(there, chosen.step, need.layer)), local)
                path = self._sessions[name].push(local, need.sha256, keep=False)
                file = {"path": path, "sha256": need.sha256}
                order = {
                    "op": "adopt",
                    "step": chosen.step,
                    "attempt": chosen.attempt,
                    "layers": {str(need.layer): file},
                }
                answer = self._ask_all({name: order}, PULL_S)[name]
        except (SkyctlError, KeyError, OSError) as exc:
            return exc.message if isinstance(exc, SkyctlError) else f"{type(exc).__name__}: {exc}"
        if isinstance(answer, SkyctlError):
            return answer.message
        return next(iter(answer.get("failed", {}).values()), None)

    def prune(self, kept: Collection[int], limit_s: float = LIST_S) -> None:
        """Removes all other steps everywhere."""
        self._ask_all({n: {"op": "prune", "keep_steps": sorted(kept)} for n in self.nodes}, limit_s)

    def pin(self, steps: Collection[int]) -> None:
        """Those are kept whatever nodes prune by themselves, and no others any more. Does not wait."""
        for name in self.nodes:
            with suppress(SkyctlError):
                self._tasks[name].send({"op": "pin", "steps": sorted(steps)})

    def forget(self, limit_s: float = LIST_S) -> dict[str, SkyctlError]:
        """Removes the run's folder on every node; where that failed, and why."""
        answers = self._ask_all({name: {"op": "forget"} for name in self.nodes}, limit_s)
        return {name: answer for name, answer in answers.items() if isinstance(answer, SkyctlError)}

    def close(self) -> None:
        """Ends them all. What they hold stays; of what they were just taking nothing is left."""
        for task in self._tasks.values():
            with suppress(SkyctlError):
                task.send({"op": "stop"})
        deadline = time.monotonic() + STOP_S
        while not all(task.ended for task in self._tasks.values()) and time.monotonic() < deadline:
            time.sleep(0.02)
        for name, task in self._tasks.items():
            self._end(name, task)
        self._tasks.clear()
        self._where.clear()

    def _end(self, name: str, task: Task) -> None:
        with suppress(SkyctlError):
            task.kill()
        if name in self._sessions:
            self._sessions[name].discard(task)

    # --- what comes and goes

    def _pump(self, name: str, task: Task) -> None:
        while True:
            try:
                got = task.recv(None)
            except SkyctlError as exc:
                self._news.put((name, task, exc))
                return
            self._news.put((name, task, None if got is None else got[0]))
            if got is None:
                return

    def _take(self, wait_s: float) -> bool:
        """Takes in one thing; False: there was none."""
        try:
            name, task, news = self._news.get(timeout=wait_s) if wait_s > 0 else self._news.get_nowait()
        except queue.Empty:
            return False
        if self._tasks.get(name) is not task:  # one that was dropped
            if isinstance(news, dict) and name in self._sessions:
                self._sessions[name].handled(int(news.get("seq", 0)))
            return True
        if news is None or isinstance(news, SkyctlError):
            self.drop(name)
            return True
        if not self._heard(name, NAME, news):
            return True
        kind = news.get("event")
        if kind == "listening":
            self._where[name] = (str(news["address"]), int(news["port"]))
            self.pinned |= {int(step) for step in news.get("pinned", [])}
        elif kind == "answer":
            known = SkyctlError(str(news["error"])) if news.get("error") else news
            if news.get("id") is not None:
                self._answers[int(news["id"])] = known
        elif kind in ("error", "exit"):
            failure = translate(self._sessions[name].node, news)
            self._on_event(name, {"event": "ended", "error": failure.message})
            self.drop(name)
        elif kind != "log":
            self._on_event(name, news)
        return True

    def _send(self, name: str, order: Message) -> int:
        number = next(self._numbers)
        task = self._tasks.get(name)
        try:
            if task is None:
                raise RunError(f"node {name} has no keeper of checkpoints any more")
            task.send({**order, "id": number})
        except SkyctlError as exc:
            self._answers[number] = exc
        else:
            self._asked[number] = name
        return number

    def _gather(self, numbers: Collection[int], limit_s: float) -> dict[int, Message | SkyctlError]:
        deadline = time.monotonic() + limit_s
        while any(number not in self._answers for number in numbers):
            self._take(min(0.5, max(0.0, deadline - time.monotonic())))
            for number in numbers:
                name = self._asked.get(number)
                if number in self._answers or name is None:
                    continue
                if name not in self._tasks:
                    self._answers[number] = RunError(f"the keeper of node {name} is gone")
                elif time.monotonic() > deadline:
                    self._answers[number] = RunError(f"node {name} gave no answer within {limit_s:.0f} s")
        for number in numbers:
            self._asked.pop(number, None)
        return {number: self._answers.pop(number) for number in numbers}

    def _ask_all(self, orders: Mapping[str, Message], limit_s: float) -> dict[str, Message | SkyctlError]:
        ids = {self._send(name, order): name for name, order in orders.items()}
        return {ids[number]: answer for number, answer in self._gather(list(ids), limit_s).items()}
