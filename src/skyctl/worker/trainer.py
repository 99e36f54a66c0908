"""One rank of a run, from its order to its weights: build, connect, train, save."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from skyctl.agent.task_events import to_message
from skyctl.agent.task_runner import TaskChannel
from skyctl.checkpoint.node.shards import StageState
from skyctl.device.accelerator import empty_cache
from skyctl.device.device_timer import DeviceTimer
from skyctl.device.process_memory import give_back_freed_memory, give_back_large_blocks
from skyctl.schedule.actions import ZERO_BUBBLE
from skyctl.turns.memory_admission import MemoryNeed
from skyctl.turns.turn_client import NO_TURNS, DeviceTurns, NoTurns, open_turns
from skyctl.worker.batches.batch_sketch import sketch_layers
from skyctl.worker.batches.rank_batches import RankBatches
from skyctl.worker.batches.sample_batches import Prefetcher
from skyctl.worker.checkpointer import (
    Checkpointer,
    ShardOrigin,
    restore_stage,
    resumed_step,
    save_weights,
)
from skyctl.worker.elastic.elastic_rank import ElasticRank, check_elastic
from skyctl.worker.elastic.elastic_steps import ElasticBatches, ElasticSteps
from skyctl.worker.experts.expert_check import check_expert_modules, check_expert_order
from skyctl.worker.experts.trunk_experts import TrunkExperts
from skyctl.worker.launcher_link import LauncherLink
from skyctl.worker.peer import Neighbours, stage_group_tag
from skyctl.worker.pipeline.executor import Executor
from skyctl.worker.pipeline.layer_seeder import LayerSeeder
from skyctl.worker.pipeline.messages import MessageSpecs
from skyctl.worker.pipeline.stage import PipelineStage
from skyctl.worker.pipeline.stage_io import make_stage_io
from skyctl.worker.pipeline.stage_ties import StageTies
from skyctl.worker.pipeline.validation import make_validator
from skyctl.worker.progress import Progress
from skyctl.worker.rank_environment import peak_memory_bytes, use_device
from skyctl.worker.rank_errors import with_phase
from skyctl.worker.rank_events import (
    CONNECT_PHASE,
    RESTORE_PHASE,
    ReadyEvent,
    RoomEvent,
)
from skyctl.worker.rank_order import RankOrder, SumOrder
from skyctl.worker.rank_requests import StartRequest, StopTrainingRequest
from skyctl.worker.replicas import close_replicas, end_offer, offer_replicas
from skyctl.worker.rounds.local_rounds import make_outer_optimizer, make_rounds
from skyctl.worker.rounds.weight_average import WeightAverage
from skyctl.worker.stage_group import StageGroup
from skyctl.worker.sums.gradient_sync import GradientSync
from skyctl.worker.sums.summed_gradients import check_summable
from skyctl.worker.trace.trace_recorder import TraceRecorder
from skyctl.worker.training_loop import StepMaker, TrainingLoop
from skyctl.worker.updates.best_validation import BestSoFar
from skyctl.worker.updates.delayed_sync import DelayedSync
from skyctl.worker.updates.gradient_clipping import GradientClipper
from skyctl.worker.updates.lr_scheduler import LearningRateScheduler
from skyctl.worker.updates.parameter_root import RootWeights
from skyctl.worker.updates.predicted_weights import PredictedWeights
from skyctl.worker.updates.stage_update import StageUpdate
from skyctl.worker.updates.stale_sync import is_root, is_stale, leave_to_root, make_stale_sync
from skyctl.worker.updates.update_delay import UpdateDelay
from skyctl.worker.updates.update_rules import AsTheyCome, EachStep, OneLate
from skyctl.worker.world import World
from skyctl.workload.mixed_precision import master_of
from skyctl.workload.optimizers import make_users_lr_scheduler
from skyctl.workload.workload import load_workload


class Trainer:
    """One rank of a run: ``run`` once, then ``close`` in any case.

    Args:
        order: what this rank is to do.
        channel: the line to the launcher.
    """

    def __init__(self, order: RankOrder, channel: TaskChannel) -> None:
        self._order, self._channel = order, channel
        self._progress = Progress("build")
        self._link = LauncherLink(channel, self._progress)
        self._world: World | None = None
        self._rule: EachStep | None = None
        self._root_weights: RootWeights | None = None
        self._average: WeightAverage | None = None
        self._elastic: ElasticRank | None = None
        self._experts: TrunkExperts | None = None
        self._turns: DeviceTurns | NoTurns = NO_TURNS
        self._stop_requested = self._is_out_of_patience = False
        self._best = BestSoFar(order.best)
        first, _ = order.microbatch_range
        self._recorder = TraceRecorder(first_microbatch=first) if order.trace else None

    def run(self) -> dict[str, Any]:
        """Trains the stage from build to saved weights; returns the result of ``rank.main``."""
        order = self._order
        self._link.start()
        if order.threads is not None:
            torch.set_num_threads(order.threads)
        self._progress.phase = "telling what is here"
        if order.turns is not None:
            self._turns = open_turns(
                order.turns.policy, device=order.turns.device, job_id=order.run_id, cache=self._channel.cache
            )
        asks_room = order.turns is not None and order.turns.capacity_bytes is not None
        self._link.tell_environment(order.device, self._enter_device if asks_room else None)
        self._progress.phase = "build"
        self._device = use_device(order.device)
        self._spec, self._recipe = order.workload, order.recipe
        torch.manual_seed(self._spec.seed)
        ring = order.sync.ring if order.sync is not None else None
        check_elastic(order)
        check_expert_order(order)
        may_change = order.elastic is not None
        world = self._world = World(
            order.world, ring, self._link, self._device, self._recorder, may_change=may_change
        )
        world.join()  # a user's model() may ask torch.distributed which rank it is
        offer_replicas(world.store, order)
        self._workload = load_workload(self._spec)
        self._start, self._stop = order.layers
        batches = self._batches = RankBatches(order, self._workload)
        self._seeder = LayerSeeder(self._spec.seed, self._start, self._device, batches.first_microbatch)
        stage = self._build_stage()
        if order.elastic is not None:
            self._progress.phase = CONNECT_PHASE
            layers = len(self._workload.names)
            self._elastic = ElasticRank(order, order.elastic, world, self._channel, layers)
            order = self._order = self._elastic.enter()
        self._outer = make_outer_optimizer(order.rounds, stage.layers)
        parameters = stage.parameters
        optimizer = self._workload.optimizer(parameters) if parameters else None
        scheduler = self._make_scheduler(parameters, optimizer)
        self._experts = self._make_experts(stage, optimizer, scheduler)
        if is_root(order):
            self._root_weights = RootWeights(stage.layers, self._workload.optimizer, self._make_scheduler)
        first_step, checkpointer = self._restore(stage.layers, optimizer, scheduler)
        self._connect(world, first_step)
        ties = StageTies(self._workload.shared_parameters, stage.layers, self._start)
        tag = stage_group_tag(len(batches.streamed_sizes))
        stages = self._stages = StageGroup(world.neighbours, tag, self._progress)
        update = self._make_update(stage, optimizer, stages, ties)
        rule = self._rule = self._make_rule(update, stage, ties, scheduler, first_step, checkpointer)
        executor = self._make_executor(stage, world.neighbours, update.timer, rule)
        maker = self._make_maker(executor, update, first_step)
        steps_done = self._train(executor, maker, scheduler, first_step, checkpointer)
        self._leave(world)
        return self._result(stage, executor, steps_done)

    def _make_experts(
        self,
        stage: PipelineStage,
        optimizer: torch.optim.Optimizer | None,
        scheduler: LearningRateScheduler,
    ) -> TrunkExperts | None:
        if self._order.experts is None:
            return None
        check_expert_modules(stage.layers, self._start, self._workload.shared_parameters)
        return TrunkExperts(
            self._order.experts,
            stage.layers,
            self._start,
            self._workload,
            self._order.steps,
            optimizer,
            self._progress,
            scheduler.options,
        )

    def _connect(self, world: World, first_step: int) -> None:
        """Connects to other ranks, and to hosts of experts."""
        self._progress.phase = CONNECT_PHASE
        end_offer()
        world.connect()
        if self._experts is not None:
            self._experts.connect(self._order.run_id, self._order.world.tls, first_step)

    def _leave(self, world: World) -> None:
        """All steps are made: ends what there is with other ranks, once they have made theirs."""
        self._progress.phase = "end"
        if self._elastic is not None:
            self._elastic.leave()
        world.compare_clocks("end")
        close_replicas(graceful=True)
        world.close(graceful=True)

    def _result(self, stage: PipelineStage, executor: Executor, steps_done: int) -> dict[str, Any]:
        """Saves the weights; returns the result of ``rank.main``."""
        order = self._order
        self._progress.phase = "saving the weights"
        if self._experts is not None:
            self._experts.fetch()
        rank, folder = order.world.rank, self._channel.folder
        return {
            "weights": self._save_weights(stage, folder / f"weights-{rank}.safetensors"),
            "trace": self._recorder.save(folder / f"trace-{rank}.json") if self._recorder else None,
            "peak_memory_bytes": peak_memory_bytes(self._device),
            "steps": steps_done,
            "ended_by": order.world.before if executor.is_told_to_end else self._ended_by,
            "experts": self._experts.figures() if self._experts is not None else None,
            "stopped_early": self._is_out_of_patience and order.is_first and steps_done < order.steps,
        }

    def _enter_device(self) -> None:
        """Waits for the rank's memory on a device that other runs share, and tells of its place meanwhile."""
        turns = self._order.turns
        assert turns is not None
        assert turns.capacity_bytes is not None
        self._progress.phase = "waiting for memory"
        self._turns.enter(
            MemoryNeed(turns.persistent_bytes, turns.ephemeral_bytes),
            turns.capacity_bytes,
            lambda place: self._channel.send(to_message(RoomEvent(place))),
            self._free_memory,
        )

    def _free_memory(self) -> None:
        """Gives back what the rank has freed: others have it in their turns."""
        device = torch.device(self._order.device)
        if device.type == "cpu":
            give_back_freed_memory()
        else:
            empty_cache(device)

    def close(self) -> None:
        """Closes the connections to other ranks; whatever waits on them ends. Idempotent."""
        self._link.close()
        self._turns.close()
        close_replicas()
        if self._elastic is not None:
            self._elastic.close()
        if self._experts is not None:
            self._experts.close()
        if self._world is not None:
            self._world.close()
        for sums in (self._rule, self._average):
            if sums is not None:
                sums.close()

    @property
    def _ended_by(self) -> int | None:
        """The rank of another pipeline that has told this one that the run ends."""
        for sums in (self._rule, self._average):
            if sums is not None and sums.ended_by is not None:
                return sums.ended_by
        return None

    def explain(self, exc: Exception) -> Exception:
        """The error to report: with the phase it happened in, and the cause in the first line."""
        return with_phase(exc, self._progress.phase, self._order.device)

    def _build_stage(self) -> PipelineStage:
        is_last, recompute = self._order.is_last, self._order.recompute
        if recompute:
            give_back_large_blocks()
        return PipelineStage(
            self._workload.build(self._start, self._stop, self._device),
            input_specs=self._boundary(self._start),
            input_structure=self._workload.structure(self._start),
            output_specs=None if is_last else self._boundary(self._stop),
            output_structure=self._workload.structure(self._stop),
            loss_fn=self._workload.loss if is_last else None,
            before_layer=self._seeder,
            recompute=recompute,
            defer_weights=self._order.schedule == ZERO_BUBBLE and not recompute,
        )

    def _boundary(self, index: int) -> MessageSpecs:
        """The tensors before layer ``index``, by microbatch; there are at most two sizes of microbatch."""
        sizes = self._batches.streamed_sizes
        by_size = {size: tuple(self._workload.boundary(index, size)) for size in set(sizes)}
        return lambda microbatch: by_size[sizes[microbatch]]

    def _make_scheduler(
        self, parameters: list[nn.Parameter], optimizer: torch.optim.Optimizer | None
    ) -> LearningRateScheduler:
        """The rates from the first step that is made on."""
        trained = any(parameter.requires_grad for parameter in parameters)
        model, recipe, steps = self._workload.model, self._recipe, self._order.steps
        return LearningRateScheduler(
            optimizer if trained else None,
            recipe,
            resumed_step(self._order),
            lambda optimizer: make_users_lr_scheduler(model, optimizer, recipe, steps),
        )

    def _restore(
        self,
        layers: list[nn.Module],
        optimizer: torch.optim.Optimizer | None,
        scheduler: LearningRateScheduler,
    ) -> tuple[int, Checkpointer | None]:
        """(the first step to make, with layers and optimizer as they were then; who writes checkpoints)."""
        options = self._order.checkpoint
        if options is None and self._order.resume is None and self._elastic is None:
            return 0, None
        self._progress.phase = RESTORE_PHASE
        alone = self._workload.model.trains_adapters
        state = StageState(
            layers, optimizer, master_of, skip=scheduler.options, outer=self._outer, trained_alone=alone
        )
        if (root := self._root_weights) is not None:
            state = StageState(
                layers,
                root.optimizer,
                root.stands_for,
                skip=root.scheduler.options,
                trained_alone=alone,
            )
        origin = ShardOrigin(
            run_id=self._order.run_id,
            rank=self._order.world.rank,
            start=self._start,
            stop=self._stop,
            names=tuple(self._workload.names),
            workload=self._workload.digest,
            dtype=self._spec.dtype,
            seed=self._spec.seed,
            own_names=self._workload.model.ordinary,
        )
        first_step = restore_stage(self._order, state, origin)
        if self._elastic is not None:
            self._elastic.has_state(state, origin)
        if options is None:
            return first_step, None
        start, seed = self._start, self._spec.seed
        best = self._order.best.step if self._order.best is not None else None
        if self._batches.is_only_pipeline:
            return first_step, Checkpointer(options, state, origin, best=best)
        sketch = partial(sketch_layers, layers, start, seed)
        writes = None if self._order.elastic is None else self._is_first_member
        return first_step, Checkpointer(options, state, origin, sketch, best, writes)

    def _is_first_member(self) -> bool:
        return self._elastic is not None and self._elastic.is_first

    def _make_update(
        self,
        stage: PipelineStage,
        optimizer: torch.optim.Optimizer | None,
        stages: StageGroup,
        ties: StageTies,
    ) -> StageUpdate:
        """Returns the update of this stage's weights, for when its gradients are all there."""
        timer = DeviceTimer(
            self._order.slowdown,
            single_thread=torch.get_num_threads() == 1,
            device=self._device,
            turns=self._turns,
        )
        update = StageUpdate(optimizer, timer, self._progress, recorder=self._recorder)
        if self._recipe.clip_norm is not None:
            is_part = is_stale(self._order)  # a parameter server is pushed what each has clipped by itself
            update.clipper = GradientClipper(
                stage.parameters,
                self._recipe.clip_norm,
                share=sum(self._batches.sizes) / self._spec.batch_size if is_part else 1.0,
                stages=stages,
                timer=timer,
                layers=f"layers {self._start}–{self._stop}",
                recorder=self._recorder,
                counted_elsewhere=ties.counted_elsewhere,
            )
        return update

    def _make_rule(
        self,
        update: StageUpdate,
        stage: PipelineStage,
        ties: StageTies,
        scheduler: LearningRateScheduler,
        first_step: int,
        checkpointer: Checkpointer | None,
    ) -> EachStep:
        """When this stage's weights are updated, and with which other ranks' gradients."""
        order, batches = self._order, self._batches
        sums = order.sync
        ties.check(() if sums is None else sums.groups, self._workload.model.source_name)
        if sums is None:
            return EachStep(update)
        assert self._world is not None
        peers = self._world.peers if self._elastic is None else self._elastic.peers
        if not batches.is_only_pipeline:
            check_summable(stage.layers)
        if sums.staleness is not None:
            leave_to_root(update.optimizer)
            stale = make_stale_sync(
                order,
                sums,
                stage.layers,
                peers,
                self._root_weights,
                share=batches.share,
                first=first_step,
                recipe=self._recipe,
                checkpointer=checkpointer,
            )
            return AsTheyCome(update, stale)
        if order.rounds is not None and all(group.tie is None for group in sums.groups):
            self._average = WeightAverage(
                stage.layers,
                self._start,
                sums.groups,
                peers,
                format=sums.format,
                chunk_bytes=sums.chunk_bytes,
            )
            return EachStep(update)
        delay = self._update_delay(sums)
        sync = (GradientSync if delay is None else partial(DelayedSync, delay))(
            stage.layers,
            self._start,
            sums.groups,
            peers,
            format=sums.format,
            chunk_bytes=sums.chunk_bytes,
            share=batches.share,
            microbatches=len(batches.all_sizes),
            tied=ties.parameters,
            uncompressed_steps=sums.uncompressed_steps,
            seed=self._spec.seed,
            keeps=self._elastic is not None,
            shared_bytes=self._elastic.shared_bytes if self._elastic is not None else 0,
        )
        if self._elastic is not None:
            return self._elastic.make_rule(update, sync)
        if not isinstance(sync, DelayedSync):
            return EachStep(update, sync)
        predicted = PredictedWeights(stage.layers, update.optimizer) if update.optimizer else None
        return OneLate(update, sync, predicted, scheduler.advance)

    def _update_delay(self, sums: SumOrder) -> UpdateDelay | None:
        """Which steps settle; None: all do."""
        checkpoints = self._order.checkpoint
        every = self._recipe.validate_every, checkpoints.every if checkpoints else 0
        return UpdateDelay.from_order(sums, self._order.steps, every)

    def _make_executor(
        self, stage: PipelineStage, neighbours: Neighbours, timer: DeviceTimer, rule: EachStep
    ) -> Executor:
        order = self._order
        inputs = self._boundary(self._start)
        outputs = inputs if order.is_last else self._boundary(self._stop)
        return Executor(
            stage=stage,
            stage_io=make_stage_io(
                neighbours,
                inputs,
                outputs,
                microbatches=len(self._batches.streamed_sizes),
                device=self._device,
                link_dtypes=order.link_dtypes,
                asked_window=order.receive_window,
            ),
            timer=timer,
            microbatch_sizes=self._batches.sizes,
            batch_size=self._spec.batch_size if order.rounds is None else None,
            rule=rule,
            progress=self._progress,
            schedule=order.schedule,
            in_flight=order.in_flight,
            deferred_weights=order.weights_behind,
            is_last=order.is_last,
            device=self._device,
            recorder=self._recorder,
        )

    def _make_maker(self, executor: Executor, update: StageUpdate, first_step: int) -> StepMaker:
        """Returns the maker of the run's steps, or rounds."""
        if isinstance(executor.rule, ElasticSteps):
            executor.rule.attach(executor, self._batches, self._seeder, self._best)
            return executor.rule
        if self._order.rounds is None:
            return executor
        return make_rounds(
            self._order.rounds,
            executor,
            update,
            self._average,
            self._outer,
            self._workload,
            self._seeder,
            first_step,
            self._stages,
        )

    def _train(
        self,
        executor: Executor,
        maker: StepMaker,
        scheduler: LearningRateScheduler,
        first_step: int,
        checkpointer: Checkpointer | None,
    ) -> int:
        """Every step of the run; returns how many are done."""
        validator = None
        # the first pipeline validates, with all samples; owners do, each with data of its own
        if self._order.pipeline == 0 or self._batches.are_owned or self._elastic is not None:
            sizes = self._batches.all_sizes
            validator = make_validator(self._recipe, self._workload, executor, self._seeder, sizes)
        validation_batch = None
        if self._recipe.validate_every is not None and self._batches.compares_validation:
            self._progress.phase = "the first batch of validation()"
            validation_batch = self._batches.sketch_validation()
        sketcher = self._batches.sketcher(first_step)
        sums = None if self._batches.is_only_pipeline else executor.rule.sizes
        kept = [] if self._batches.is_only_pipeline else executor.stage.layers
        sketches = sketch_layers(kept, self._start, self._spec.seed)
        self._channel.send(to_message(ReadyEvent(sums, sketches)))
        if not (self._elastic is not None and self._elastic.has_joined):
            self._link.expect(StartRequest)
        loop = TrainingLoop(
            executor=executor,
            maker=maker,
            recipe=self._recipe,
            scheduler=scheduler,
            seeder=self._seeder,
            send=self._channel.send,
            stop_requested=self._check_for_stop if self._order.is_first else None,
            validator=validator,
            checkpointer=checkpointer,
            sketch_of=partial(self._batches.sketch_of, sketcher),
            validation_batch=validation_batch,
            stages=self._stages if validator is not None and not self._batches.are_owned else None,
            is_first=None if self._elastic is None else self._is_first_member,
            is_only_pipeline=self._batches.is_only_pipeline,
            best=self._best,
            turns=self._turns,
            experts=self._experts,
        )
        if self._experts is not None:
            executor.before_repeat = self._experts.begin_again
        self._progress.phase = "the first step"
        batches: Prefetcher | ElasticBatches = Prefetcher(sketcher)
        if self._elastic is not None and isinstance(executor.rule, ElasticSteps):
            batches = executor.rule.read(Prefetcher(sketcher))
            self._elastic.start()
        steps_done = loop.run(batches, first_step, self._order.steps)
        self._is_out_of_patience = loop.is_out_of_patience
        executor.drain()
        self._stages.drain()
        return steps_done

    def _check_for_stop(self) -> bool:
        if self._elastic is not None:
            return self._elastic.is_stop_requested
        while not self._stop_requested and (message := self._channel.recv(0.0)) is not None:
            self._stop_requested = message[0].get("op") == StopTrainingRequest.kind
        return self._stop_requested

    def _save_weights(self, stage: PipelineStage, path: Path) -> str | None:
        if not self._order.weights:
            return None
        return save_weights(path, stage.layers, self._start, self._workload.model)
