"""Faults drawn by a seed, done to a run's nodes, and undone."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from surviving import lab
from surviving.backends import NODES, Backend

KINDS: dict[str, tuple[str, ...]] = {
    "link down": ("whole", "to the launcher"),
    "frozen": ("rank", "agent", "both"),
    "killed": ("rank", "agent", "launcher", "connections", "node"),
    "disk full": ("",),
    "clock jump": ("",),
    "slow": ("",),
}
"""By kind of fault, what of it there is."""
OF_A_LAB = {"link down", "connections", "node"}
"""Faults of things that local nodes lack: links, SSH connections, an sshd to be killed with all the rest."""
LASTS_S = {
    "link down": (3.0, 30.0),
    "frozen": (2.0, 25.0),
    "disk full": (3.0, 20.0),
    "slow": (3.0, 15.0),
    "clock jump": (3.0, 20.0),
}
LAUNCHER_BACK_S, NODE_BACK_S = 5.0, (2.0, 30.0)
FOR_GOOD = 0.3
"""So often a process that is frozen, a full disk or a clock stays so until the run has ended."""
SLOW_TO = 0.1
PERIOD_S = 0.2
"""Local nodes have no quota: their processes are stopped for nine tenths of it."""
STEP_S = 0.3
"""A step takes less: while none is told of, faults come when they would have come by this."""
LAST_STEPS = 6
"""No fault begins when fewer are left."""
CLOCK_JUMP_S = 900.0
Undo = Callable[[], None]


@dataclass(frozen=True)
class Strike:
    """One fault: ``after_s`` after so many steps, for ``lasts_s`` (None: to the run's end)."""

    kind: str
    part: str
    node: str
    step: int
    after_s: float
    lasts_s: float | None
    size: float = 0.0

    def to_dict(self) -> dict[str, Any]:
        """As it is recorded."""
        return {key: value for key, value in asdict(self).items() if value not in ("", 0.0)}


def draw(
    seed: int,
    backend: str,
    steps: int,
    faults: tuple[int, int],
    kinds: Mapping[str, tuple[str, ...]] = KINDS,
) -> list[Strike]:
    """The seed's faults, of these kinds, in the order of their steps."""
    chance = random.Random(f"{seed} {backend}")
    drawn = (_draw_one(chance, backend, steps, kinds) for _ in range(chance.randint(*faults)))
    return sorted(drawn, key=lambda one: one.step)


def _draw_one(
    chance: random.Random, backend: str, steps: int, kinds: Mapping[str, tuple[str, ...]]
) -> Strike:
    there = [kind for kind in kinds if backend == "lab" or kind not in OF_A_LAB]
    kind = chance.choice(there)
    part = chance.choice([one for one in kinds[kind] if backend == "lab" or one not in OF_A_LAB])
    step = chance.randint(0, steps - LAST_STEPS)
    after_s = chance.uniform(0.0, 4.0 if step == 0 else 0.3)
    shortest, longest = LASTS_S.get(kind, NODE_BACK_S if part == "node" else (0.0, LAUNCHER_BACK_S))
    lasts_s: float | None = round(chance.uniform(shortest, longest), 1)
    if kind in ("frozen", "disk full", "clock jump") and chance.random() < FOR_GOOD:
        lasts_s = None
    size = round(chance.uniform(-CLOCK_JUMP_S, CLOCK_JUMP_S)) if kind == "clock jump" else 0.0
    return Strike(kind, part, chance.choice(NODES), step, round(after_s, 2), lasts_s, size)


class Striker:
    """Does a run's faults when their time has come, and undoes them; ``act`` is called all the while."""

    def __init__(self, backend: Backend, run: Any, strikes: list[Strike]) -> None:
        self._backend, self._run = backend, run
        self._waiting = list(strikes)
        self._due: list[tuple[float, Strike]] = []
        self._undo: list[tuple[float, Undo]] = []
        self._pulsed: list[int] = []
        self._first_step_at: float | None = None
        self.done: list[dict[str, Any]] = []
        self.launcher_gone = False

    @property
    def busy(self) -> bool:
        """Whether something is still to be undone at its time."""
        return bool(self._undo)

    def act(self, steps: int) -> None:
        """Begins what is due after so many steps, ends what has lasted."""
        now = time.monotonic()
        if steps and self._first_step_at is None:
            self._first_step_at = now
        passed = 0.0 if self._first_step_at is None else (now - self._first_step_at) / STEP_S
        for strike in [one for one in self._waiting if one.step <= max(steps, passed)]:
            self._waiting.remove(strike)
            self._due.append((now + strike.after_s, strike))
        for at, strike in [one for one in self._due if one[0] <= now]:
            self._due.remove((at, strike))
            self._begin(strike, steps)
        for at, undo in [one for one in self._undo if one[0] <= now]:
            self._undo.remove((at, undo))
            undo()
        phase = now % PERIOD_S
        for pid in self._pulsed:
            _send([pid], signal.SIGCONT if phase < PERIOD_S * SLOW_TO else signal.SIGSTOP)

    def end(self) -> None:
        """Undoes all that lasts, at once."""
        while self._undo:
            self._undo.pop()[1]()

    def _begin(self, strike: Strike, steps: int) -> None:
        try:
            undo: Undo | None = getattr(self, f"_{strike.kind.replace(' ', '_')}")(strike)
        except (LookupError, StopIteration, ValueError, OSError):  # it has no process there now
            self.done.append({**strike.to_dict(), "missed": True})
            return
        self.done.append({**strike.to_dict(), "struck_at": steps, "at": time.time()})
        if undo is not None:
            lasts_s = float("inf") if strike.lasts_s is None else strike.lasts_s
            self._undo.append((time.monotonic() + lasts_s, undo))

    # --- faults

    def _link_down(self, strike: Strike) -> Undo:
        inject = lab.of_tests("lab.fault_injection")
        cut = inject.disconnect if strike.part == "whole" else inject.disconnect_launcher
        cut(self._backend.lab, strike.node)
        return lambda: inject.reconnect(self._backend.lab, strike.node)

    def _frozen(self, strike: Strike) -> Undo:
        pids = self._pids(strike)
        _send(pids, signal.SIGSTOP)
        return lambda: _send(pids, signal.SIGCONT)

    def _killed(self, strike: Strike) -> Undo | None:
        harm, there = lab.harm(), self._backend.lab
        if strike.part == "launcher":
            self.launcher_gone = True
            self._run.child.kill()
            return self._attach
        if strike.part == "node":
            harm.switch_off(there, strike.node)
            return lambda: harm.switch_on(there, strike.node)
        if strike.part == "connections":
            pids = [pid for node in NODES for pid in harm.connections(there, node)]
        else:
            pids = self._pids(strike)
        _send(pids, signal.SIGKILL)
        return None

    def _attach(self) -> None:
        self._run.attach()
        self.launcher_gone = False

    def _disk_full(self, strike: Strike) -> Undo:
        ballast = self._backend.disks[strike.node] / "ballast"
        _fill(ballast)
        return lambda: ballast.unlink(missing_ok=True)

    def _clock_jump(self, strike: Strike) -> Undo:
        clock = self._backend.clocks[strike.node]
        clock.write_text(str(strike.size))
        return lambda: clock.unlink(missing_ok=True)

    def _slow(self, strike: Strike) -> Undo:
        there = self._backend.lab
        if there is not None:
            inject = lab.of_tests("lab.fault_injection")
            (cpus,) = [node.cpus for node in there.spec.nodes if node.name == strike.node]
            inject.set_cpus(there, strike.node, cpus * SLOW_TO)
            return lambda: inject.set_cpus(there, strike.node, cpus)
        pids = self._pids(replace(strike, part="both"))
        self._pulsed += pids

        def undo() -> None:
            self._pulsed = [pid for pid in self._pulsed if pid not in pids]
            _send(pids, signal.SIGCONT)

        return undo

    def _ranks(self, node: str) -> list[int]:
        """The rank of that node and what it has started. Raises LookupError: there is none now."""
        found: list[int] = self._run.processes(node, "skyctl.worker.rank")
        if not found:
            raise LookupError(node)
        return found

    def _pids(self, strike: Strike) -> list[int]:
        ranks = self._ranks(strike.node)
        agent = lab.of_tests("helpers.processes").parent(min(ranks))
        return {"rank": ranks, "agent": [agent], "both": [*ranks, agent]}[strike.part]


def _send(pids: list[int], number: int) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)


def _fill(ballast: Path) -> None:
    """Until the disk has no room left."""
    fd = os.open(ballast, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    try:
        for size in (1 << 20, 1 << 12):
            with suppress(OSError):
                while True:
                    os.write(fd, b"\0" * size)
    finally:
        os.close(fd)
