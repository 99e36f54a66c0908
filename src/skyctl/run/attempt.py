"""One attempt of a run: what its ranks are told, the checkpoints they write, and what is kept of them."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

from skyctl.checkpoint.launcher import policy, restore
from skyctl.checkpoint.launcher.replicator_group import run_folder_on_node
from skyctl.checkpoint.node.recovery import RestorePoint
from skyctl.checkpoint.node.replicator_events import ShardDigest
from skyctl.compare.timeline import plan_timeline
from skyctl.device.cgroup import read_limits
from skyctl.device.process_memory import private_bytes
from skyctl.jobs.training_request import send_workload
from skyctl.learning.cluster_changes import (
    change_table,
    local_memory_changes,
    plan_changes,
    refuse_changes,
)
from skyctl.planner.plan_record import pipeline_simulations
from skyctl.records.cluster import node_of
from skyctl.records.measurement import Measurement
from skyctl.records.plan import Plan
from skyctl.remote.remote_task import RemoteTask
from skyctl.run.artifacts import gather_weights, write_trace
from skyctl.run.callbacks import EventHistory, RankGroupHooks, RunCallbacks
from skyctl.run.first_steps import with_first_steps
from skyctl.run.plan_update import nodes_in, observed_slowdowns
from skyctl.run.rank_failure import FailureReport
from skyctl.run.rank_group import RankGroup
from skyctl.run.rank_spec import (
    AttemptCheckpoints,
    RankSpec,
    holding_specs,
    rank_specs,
    rank_task_name,
    used_nodes,
)
from skyctl.run.run_context import RunContext
from skyctl.run.slow_owner import with_slow_owner_note
from skyctl.run.step_metrics import (
    StepCollector,
    StepHistory,
    build_measurement,
    with_differences,
)
from skyctl.run.sum_claims import planned_numels
from skyctl.worker.rank_events import EnvironmentEvent
from skyctl.workload.workload_spec import WorkloadSpec

LAST_CHECKPOINT_STEPS = 3.0
"""How many steps' time the ranks have to end after the one under way: all are to finish it, and to write."""


@dataclass(frozen=True)
class AdoptedRanks:
    """Ranks that another process has started, as ``RankGroup.adopt`` takes them over."""

    tasks: Mapping[int, RemoteTask]
    past: EventHistory
    reported: int = 0


class Attempt:
    """One set of ranks: ``start`` or ``adopt``, then ``watch`` and ``finish``; ``end`` in any case.

    Args:
        number: counted from 1 over all attempts of the run.
    """

    def __init__(self, context: RunContext, plan: Plan, number: int) -> None:
        self._context, self._plan, self._number = context, plan, number
        self._simulations = pipeline_simulations(plan)
        self._ranks: RankGroup | None = None
        self._specs: list[RankSpec] = []
        self._started = False

    @property
    def failure(self) -> FailureReport | None:
        """What is known of how the attempt ended."""
        return self._ranks.failure if self._ranks is not None else None

    @property
    def collected(self) -> StepCollector | None:
        """The figures so far; None before its ranks are started."""
        return self._ranks.collected if self._ranks is not None else None

    @property
    def has_begun(self) -> bool:
        """Whether its ranks have ended a step."""
        return self.collected is not None and self.collected.reported > self.collected.first

    @property
    def done_steps(self) -> int:
        """Steps that every rank has finished, those of earlier attempts included."""
        return self._ranks.collected.reported if self._ranks is not None else 0

    def restore(self, done: int) -> RestorePoint | None:
        """Brings the newest checkpoint that this plan can go on from to its nodes; None: there is none.

        Args:
            done: steps that the run has finished.
        """
        context = self._context
        context.callbacks.phase("looking for the newest checkpoint")
        here = context.sink.paths.checkpoints
        found = restore.restore_newest(
            context.start_replicators(nodes_in(self._plan), wait=True),
            self._plan,
            done=done,
            here=here if here.is_dir() else None,
            warn=context.callbacks.warn,
        )
        context.restarts_from(found.step if found is not None else None, self._plan)
        return found

    def start(self, origin: RestorePoint | None) -> None:
        """Ships what is needed, starts the ranks and brings them together. Raises as ``RankGroup.start``.

        Args:
            origin: the checkpoint that they go on from.

        Raises:
            ClusterChangedError: ranks on this machine need more memory together than is free; none begins.
        """
        context, plan = self._context, self._plan
        if self._refuses_changes:
            self._refuse_local_shortage()
        addresses = context.addresses(nodes_in(plan))
        context.callbacks.phase("shipping the workload")
        workload = self._ship_workload(origin)
        self._specs = self._rank_specs(workload, addresses, self._checkpoints(origin, workload))
        self._ranks = self._make_ranks(0 if origin is None else origin.step)
        self._ranks.start()
        self._started = True
        if context.options.writes_checkpoints:
            context.start_replicators(nodes_in(plan), wait=False)

    def adopt(self, adopted: AdoptedRanks) -> None:
        """Takes over ranks that another process has started.

        Their orders are made again, without what only that process knew: paths on nodes, and addresses.
        """
        context = self._context
        attempts = context.sink.state.attempts
        nodes = nodes_in(self._plan)
        workload = dict.fromkeys(nodes, context.request.spec)
        self._specs = self._rank_specs(workload, dict.fromkeys(nodes, ""), AttemptCheckpoints())
        self._ranks = self._make_ranks(attempts[-1].from_step if attempts else 0)
        self._ranks.adopt(adopted.tasks, adopted.past, adopted.reported)
        self._started = True
        if context.options.writes_checkpoints:
            context.start_replicators(nodes_in(self._plan), wait=False)

    def watch(self) -> None:
        """Until every rank has returned. Raises as ``RankGroup.watch``; after Ctrl-C a last checkpoint."""
        assert self._ranks is not None
        context = self._context
        try:
            self._ranks.watch(self._plan.predicted.iteration_s)
        except KeyboardInterrupt as exc:
            if type(exc) is KeyboardInterrupt and self.end_early():
                context.sink.update(status="stopping")
                context.callbacks.phase("stopping after a last checkpoint; Ctrl-C again stops at once")
                if not self._ranks.finish(self.last_checkpoint_s):
                    self.warn_no_last_checkpoint()
            raise

    @property
    def last_checkpoint_s(self) -> float:
        """How long the step under way and a last checkpoint may take."""
        step_s = max(self._plan.predicted.iteration_s, self._context.sink.state.iteration_s or 0.0)
        return max(self._context.options.deadlines.stop_s, LAST_CHECKPOINT_STEPS * step_s)

    def warn_no_last_checkpoint(self) -> None:
        """Says that the run has ended without the checkpoint that was to be its last."""
        self._context.callbacks.warn(
            "there is no last checkpoint: the ranks did not come to the end of a step within "
            f"{self.last_checkpoint_s:.0f} s"
        )

    @property
    def ending(self) -> bool:
        """Whether the ranks were told to end soon."""
        return self._ranks is not None and self._ranks.ending

    def end_early(self) -> bool:
        """Has the ranks end soon, with a checkpoint; False where they can't."""
        if self._ranks is None or not (self._started and self._context.options.writes_checkpoints):
            return False
        self._ranks.end_early()
        return True

    def finish(self, history: StepHistory) -> Measurement:
        """Gathers the weights and says what was measured, of all attempts."""
        assert self._ranks is not None
        context = self._context
        context.callbacks.phase("gathering the trained weights")
        weights = gather_weights(self._ranks, context.sessions) if context.options.weights else None
        path = str(weights) if weights else None
        collected = self._ranks.collected
        if collected.reported <= collected.first:  # its checkpoint was the last step's
            return history.alone(context.sink.paths.run_id, self._plan, path, self._number)
        done = history.of_all(self._measurement(path), self._number)
        if len(self._simulations) > 1 or self._plan.problem.rhythm.is_rounds:
            return done
        return with_differences(self._simulations[0], done)

    def with_trace(self, done: Measurement) -> Measurement:
        """The measurement with the trace of this attempt."""
        assert self._ranks is not None
        simulated = plan_timeline(self._plan, self._simulations)
        trace = write_trace(self._ranks, self._context.sessions, simulated, self._context.callbacks)
        return done.model_copy(update={"trace": trace})

    def slowdowns(self) -> dict[str, float]:
        """By device, measured ÷ predicted of its layers' time, as far as can be told."""
        collected = self.collected
        return {} if collected is None else observed_slowdowns(self._plan, collected.settled_events())

    def end(self, limit_s: float = 0.0) -> None:
        """Kills every rank that still runs; waits so long for them to be gone, on lost nodes excepted."""
        if self._ranks is not None:
            self._ranks.stop()
            if limit_s:
                lost = [spec.node for spec in self._specs if spec.node not in self._context.sessions]
                self._ranks.wait_gone(limit_s, lost)

    # --- what the ranks are told

    def _rank_specs(
        self,
        workload: Mapping[str, WorkloadSpec],
        addresses: Mapping[str, str],
        checkpoints: AttemptCheckpoints,
    ) -> list[RankSpec]:
        context = self._context
        made = rank_specs(
            self._plan,
            context.cluster,
            run_id=context.sink.paths.run_id,
            steps=context.options.steps,
            workload=workload,
            addresses=addresses,
            weights=context.options.weights,
            recipe=context.request.recipe,
            trace=context.options.trace,
            checkpoints=checkpoints,
        )
        limits = policy.shard_limits(self._plan.problem)
        numels = planned_numels(self._plan.problem)
        return [
            replace(spec, shard_limits={n: limits[n] for n in spec.layers}, summed_numels=numels)
            for spec in made
        ]

    def _ship_workload(self, origin: RestorePoint | None) -> dict[str, WorkloadSpec]:
        """By node that holds a stage, the workload as that node is told it.

        Weights to start from are not sent to ranks that go on from a checkpoint: they may be gone by then.
        """
        plan, context = self._plan, self._context
        spec = context.request.spec
        held = restore.layers_by_node(plan)
        nodes = used_nodes(plan, context.cluster)
        layers = {node.name: held[node.name] for node in nodes if node.name in held}  # in inventory order
        ends = {node_of(p.stages[i].device) for p in plan.pipelines for i in (0, -1)}
        sessions = {name: context.sessions[name] for name in layers}
        restored = origin is not None and spec.init_from is not None
        stored = None if restored else layers
        return send_workload(spec, sessions, with_data=ends, layers=stored, files=context.files_to_ship())

    def _checkpoints(self, origin: RestorePoint | None, holding: Collection[str]) -> AttemptCheckpoints:
        """The attempt's checkpoints, on the nodes that hold layers."""
        context = self._context
        every = None
        if context.options.writes_checkpoints:
            every = context.options.checkpoint_every
            if every is None:
                every = policy.checkpoint_interval(self._plan, context.options.replica_count)
        run_id = context.sink.paths.run_id
        return AttemptCheckpoints(
            attempt=self._number,
            folders={node: str(run_folder_on_node(context.sessions[node], run_id)) for node in holding},
            origin=origin,
            every=every,
            keep=context.options.kept_steps,
        )

    def _make_ranks(self, first: int) -> RankGroup:
        context = self._context
        hooks = RankGroupHooks(
            message=lambda spec, said: context.sink.heard(spec.node, rank_task_name(spec.rank), said),
            tick=self._tick,
            checkpoint=self._on_checkpoint,
            facts=self._check_facts,
        )
        return RankGroup(
            context.sink.paths,
            self._specs,
            dict(context.sessions),  # its own: a node that is given up still has to be told
            self._callbacks(first),
            context.options.deadlines,
            hooks,
            first=first,
            encrypt=context.options.encrypt or self._plan.encrypted,
        )

    def _callbacks(self, first: int) -> RunCallbacks:
        """Those that say early which part of a step is not as predicted.

        And which owner rounds have come to wait for, where there is no deadline for that.
        """
        context, callbacks = self._context, self._context.callbacks
        if self._plan.problem.rhythm.round_deadline_s is None:
            callbacks = with_slow_owner_note(callbacks, lambda: self.collected)
        if context.keep_part is None:
            return callbacks
        return with_first_steps(
            callbacks, self._plan, first, self._measurement, context.sink, context.keep_part
        )

    @property
    def _refuses_changes(self) -> bool:
        """Only the first attempt does: later ones train on what is there, and it is said."""
        return self._number == 1 and not self._context.options.ignore_changes

    def _refuse_local_shortage(self) -> None:
        """Of ranks on this machine, before they are started: many of them fill its memory by being there."""
        from skyctl.device.node_environment import host_memory

        nodes = [node.name for node in self._context.cluster.nodes if node.transport == "local"]
        free = host_memory(read_limits())["available_bytes"] - private_bytes()  # this process stays
        refuse_changes(self._plan, local_memory_changes(self._plan, nodes, free))

    def _check_facts(self, facts: Mapping[int, EnvironmentEvent]) -> None:
        found = plan_changes(self._plan, facts)
        if self._refuses_changes:
            refuse_changes(self._plan, found)
        elif found:
            lines = "\n".join(change_table(found))
            self._context.callbacks.warn(f"the cluster is not what the plan was made for:\n{lines}")

    def _tick(self) -> None:
        self._context.replicate(self._plan)
        self._context.on_tick()

    def _on_checkpoint(self, step: int, shards: dict[int, ShardDigest]) -> None:
        context = self._context
        context.written(step, self._plan)
        context.on_checkpoint(step)
        if context.options.keep_here:
            writers = [spec for spec in self._specs if spec.pipeline == 0]
            nodes = {layer: spec.node for spec in writers for layer in spec.layers}
            context.copy_here(step, {layer: nodes[layer] for layer in shards}, shards)

    def _measurement(self, weights: str | None = None) -> Measurement:
        assert self._ranks is not None
        run_id = self._context.sink.paths.run_id
        return build_measurement(
            run_id, self._plan, holding_specs(self._specs), self._ranks.collected, weights, self._simulations
        )
