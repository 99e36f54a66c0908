"""One attempt of a supervised run: its ranks, the checkpoints they write, and what is kept of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from skyctl.checkpoint.choosing import Chosen
from skyctl.compare.stats import quantiles
from skyctl.control.changes import Facts, of_plan, refuse, table
from skyctl.control.explaining import explained, with_early_word
from skyctl.control.running import prepare
from skyctl.control.tracing import write_trace
from skyctl.launch.causes import Evidence
from skyctl.launch.events import Collected, measurement
from skyctl.launch.run import Hooks, Past, Run
from skyctl.launch.spec import RankSpec
from skyctl.launch.weights import gather_weights
from skyctl.planner.playing import play_of
from skyctl.records.cluster import split_device_id
from skyctl.records.measurement import Measurement
from skyctl.records.plan import Plan
from skyctl.remote.session import Task
from skyctl.supervise.attempts import cadence, recovery
from skyctl.supervise.attempts.ground import Ground
from skyctl.supervise.attempts.history import History
from skyctl.supervise.attempts.keepers import run_folder_on
from skyctl.supervise.attempts.replanning import nodes_in, seen_times

LAST_STEPS = 3.0
"""How many steps' time the ranks have to end after the one under way: all are to finish it, and to write."""


class Stopped(KeyboardInterrupt):
    """Somebody asked for the run's end."""


@dataclass(frozen=True)
class Adopted:
    """Ranks that another process has started: see ``Run.adopt``."""

    tasks: Mapping[int, Task]
    past: Past
    told: int = 0


class Play:
    """One attempt. ``start`` or ``adopt``, ``watch``, ``finish``; ``end`` in any case."""

    def __init__(self, ground: Ground, plan: Plan, number: int) -> None:
        self._ground, self._plan, self._number = ground, plan, number
        self._play = play_of(plan)
        self._run: Run | None = None
        self._specs: list[RankSpec] = []
        self._started = False

    @property
    def evidence(self) -> Evidence | None:
        """What is known of its end."""
        return self._run.evidence if self._run is not None else None

    @property
    def collected(self) -> Collected | None:
        """The figures so far."""
        return self._run.collected if self._run is not None else None

    @property
    def done_steps(self) -> int:
        """Steps that every rank has finished, those of earlier attempts included."""
        return self._run.collected.reported if self._run is not None else 0

    def checkpoint(self, done: int) -> Chosen | None:
        """The newest one that this plan can go on from, brought to its nodes; None: there is none."""
        self._ground.watcher.phase("looking for the newest checkpoint")
        keepers = self._ground.with_keepers(nodes_in(self._plan), wait=True)
        here = self._ground.book.paths.checkpoints
        chosen = recovery.bring_newest(
            keepers,
            self._plan,
            done=done,
            here=here if here.is_dir() else None,
            warn=self._ground.watcher.warn,
        )
        self._ground.goes_on(chosen.step if chosen is not None else None, self._plan)
        return chosen

    def start(self, chosen: Chosen | None) -> None:
        """Ships what is needed, starts the ranks and brings them together. Raises what ``Run.start`` does."""
        ground, plan = self._ground, self._plan
        addresses = ground.addresses(nodes_in(plan))
        made = prepare(
            plan,
            ground.cluster,
            ground.request,
            ground.sessions,
            ground.options,
            ground.book.paths.run_id,
            ground.watcher,
            addresses,
        )
        self._specs = [self._with_checkpoints(spec, chosen) for spec in made]
        self._make_run()
        assert self._run is not None
        self._run.start()
        self._started = True
        if ground.checkpoints:
            ground.with_keepers(nodes_in(plan), wait=False)

    def adopt(self, adopted: Adopted) -> None:
        """Takes over ranks that another process has started."""
        first = self._ground.book.state.attempts[-1].from_step if self._ground.book.state.attempts else 0
        for rank, stage in enumerate(self._plan.stages):
            device = stage.replicas[0].device
            payload: dict[str, Any] = {
                "steps": self._ground.options.steps,
                "layers": [stage.start, stage.stop],
                "resume": {"step": first},
            }
            self._specs.append(RankSpec(rank, split_device_id(device)[0], device, payload))
        self._make_run()
        assert self._run is not None
        self._run.adopt(adopted.tasks, adopted.past, adopted.told)
        self._started = True
        if self._ground.checkpoints:
            self._ground.with_keepers(nodes_in(self._plan), wait=False)

    def _with_checkpoints(self, spec: RankSpec, chosen: Chosen | None) -> RankSpec:
        ground = self._ground
        folder = str(run_folder_on(ground.sessions[spec.node], ground.book.paths.run_id))
        start, stop = spec.payload["layers"]
        more: dict[str, Any] = {}
        if chosen is not None:
            more["resume"] = {"step": chosen.step, "folder": folder, "layers": chosen.sha256s(start, stop)}
        if ground.checkpoints:
            every = ground.options.checkpoint_every
            more["checkpoint"] = {
                "every": cadence.every(self._plan, ground.replicas) if every is None else every,
                "folder": folder,
                "keep": max(2, ground.options.keep),
                "at_end": False,
                "attempt": self._number,
            }
        return replace(spec, payload={**spec.payload, **more})

    def _make_run(self) -> None:
        ground = self._ground
        hooks = Hooks(
            heard=lambda spec, event: ground.book.heard(spec.node, f"rank-{spec.rank}", event),
            tick=self._tick,
            checkpoint=self._kept,
        )
        self._run = Run(
            ground.book.paths,
            self._specs,
            dict(ground.sessions),  # its own: a node that is given up still has to be told
            with_early_word(ground.watcher, self._figures),
            ground.options.deadlines,
            self._check,
            hooks,
            encrypt=ground.options.encrypt or self._plan.encrypted,
        )

    def _check(self, facts: Mapping[int, Facts]) -> None:
        """Only the first attempt refuses: later ones train on what is there."""
        if self._number == 1 and not self._ground.options.ignore_changes:
            refuse(self._plan, facts)
        elif found := of_plan(self._plan, facts):
            lines = "\n".join(table(found))
            self._ground.watcher.warn(f"the cluster is not what the plan was made for:\n{lines}")

    def _tick(self) -> None:
        self._ground.turn(self._plan)
        self._ground.tick()

    def _kept(self, step: int, layers: dict[int, dict[str, Any]]) -> None:
        self._ground.written(step, self._plan)
        self._ground.on_checkpoint(step)
        if self._ground.options.keep_here:
            where = {
                layer: spec.node
                for spec in self._specs
                for layer in range(*spec.payload["layers"])
                if layer in layers
            }
            self._ground.copy_here(step, where, layers)

    def watch(self) -> None:
        """Until every rank has returned. Raises what ``Run.watch`` does; after Ctrl-C a last checkpoint."""
        assert self._run is not None
        try:
            self._run.watch(self._plan.predicted.iteration_s)
        except KeyboardInterrupt as exc:
            if type(exc) is KeyboardInterrupt and self.early():
                self._ground.book.update(status="stopping")
                self._ground.watcher.phase("stopping after a last checkpoint; Ctrl-C again stops at once")
                if not self._run.finish(self.last_s):
                    self._ground.watcher.warn(no_last(self.last_s))
            raise

    @property
    def last_s(self) -> float:
        """How long the step under way and a last checkpoint may take."""
        step_s = max(self._plan.predicted.iteration_s, self._ground.book.state.iteration_s or 0.0)
        return max(self._ground.options.deadlines.stop_s, LAST_STEPS * step_s)

    @property
    def ending(self) -> bool:
        """Whether the ranks were told to end soon."""
        return self._run is not None and self._run.ending

    def early(self) -> bool:
        """Has the ranks end soon, with a checkpoint; False where they can't."""
        if not (self._started and self._ground.checkpoints and self._run is not None):
            return False
        self._run.end_early()
        return True

    def _figures(self, weights: str | None = None) -> Measurement:
        assert self._run is not None
        run_id = self._ground.book.paths.run_id
        collected = self._run.collected
        done = measurement(run_id, self._plan, self._specs, collected, quantiles, weights, self._play)
        return explained(self._play, done)

    def finish(self, history: History) -> Measurement:
        """Gathers the weights and says what was measured, of all attempts."""
        assert self._run is not None
        self._ground.watcher.phase("gathering the trained weights")
        weights = gather_weights(self._run, self._ground.sessions) if self._ground.options.weights else None
        path = str(weights) if weights else None
        if self._run.collected.reported <= self._run.collected.first:  # its checkpoint was the last step's
            return history.alone(self._ground.book.paths.run_id, self._plan, path, self._number)
        return history.of_all(self._figures(path), self._number)

    def traced(self, done: Measurement) -> Measurement:
        """With the trace of the last attempt."""
        assert self._run is not None
        trace = write_trace(self._run, self._ground.sessions, self._play, self._ground.watcher)
        return done.model_copy(update={"trace": trace})

    def seen(self) -> dict[str, float]:
        """By device, how many times its predicted time it took, as far as can be told."""
        collected = self.collected
        if collected is None:
            return {}
        return seen_times(self._plan, rank_events(collected, len(self._specs)))

    def end(self, limit_s: float = 0.0) -> None:
        """Kills every rank that still runs; waits so long for them to be gone, on lost nodes excepted."""
        if self._run is not None:
            self._run.stop()
            if limit_s:
                lost = [spec.node for spec in self._specs if spec.node not in self._ground.sessions]
                self._run.wait_gone(limit_s, lost)

    def forget(self) -> None:
        """The run has ended well: nodes keep no checkpoints of it."""
        keepers = self._ground.keepers
        if keepers.starting:
            keepers.ready()
        for name, failure in keepers.forget().items():
            self._ground.watcher.warn(f"checkpoints of this run are still on node {name}: {failure.message}")


def no_last(limit_s: float) -> str:
    """What is said where the run ended without the checkpoint that was to be its last."""
    return f"there is no last checkpoint: the ranks did not come to the end of a step within {limit_s:.0f} s"


def rank_events(collected: Collected, ranks: int) -> list[list[Mapping[str, Any]]]:
    """By rank, its steps of this attempt that all ranks have finished, without the first."""
    steps = range(collected.first + 1, collected.reported)
    return [[collected.by_rank[rank][step] for step in steps] for rank in range(ranks)]
