"""The planner's answer: which device holds which layers, the predicted time, and how certain that is."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, SerializerFunctionWrapHandler, model_serializer, model_validator

from skyctl.errors import InputError
from skyctl.records.backend import BackendChoice
from skyctl.records.base import Bytes, Count, FileRecord, Index, Name, Record, Seconds, Seq
from skyctl.records.cluster import node_of
from skyctl.records.interval import Interval
from skyctl.records.pipeline import Pipeline, PlacedStage
from skyctl.records.problem import Parallel, Problem, Schedule
from skyctl.records.stale_prediction import StalePrediction
from skyctl.records.sync import RoutePrices, Sync, check_sync

WITHOUT, SHARED_STEP = "without", "shared_step"
"""Keys that ``plan --json`` adds to a plan and no file keeps: a step's time without each node, and next to
runs that are under way."""
Strategy = Literal["even", "alone", "heuristic", "optimal", "assigned"]


class WorkloadRef(Record):
    """The workload that a plan was made for; ``batch_size`` in samples per step.

    ``lora``: the adapters that alone are trained, as ``--lora`` takes them; None: the model is.
    ``uncompared``: why it is not known that it trains, cut into layers, as in plain torch; None: it is.
    """

    source: str
    digest: str
    batch_size: Count
    dtype: str
    seed: int
    lora: str | None = None
    uncompared: str | None = None


class Machine(Record):
    """A device as it was measured; launch refuses a plan whose devices have changed since.

    ``cpus``: processors it may use, a fraction under a quota; ``threads``: of a CPU device.
    """

    device: Name
    name: str
    cpu_model: str
    cpus: float
    threads: Count | None
    python: str
    torch: str


class GridReplica(Record):
    """The one device of a stage, as files of the form ``grid`` have it."""

    device: Name
    microbatches: Count
    in_flight: Count
    recompute: bool
    weights_behind: Index


class GridStage(Record):
    """A stage, as files of the form ``grid`` have it: layers [start, stop), and their device."""

    start: Index
    stop: Count
    replicas: Seq[GridReplica] = Field(min_length=1, max_length=1)


class Unused(Record):
    """A device that the plan leaves out, and a sentence that says why."""

    device: Name
    reason: str


class ReplicaPrediction(Record):
    """The prediction of one step on one device: busy and idle seconds, and peak memory."""

    device: Name
    compute_s: Seconds
    idle_s: Seconds
    memory_bytes: Bytes


class Prediction(Record):
    """The simulator's prediction of one step. ``bottleneck_s``: the largest stage's Σ(forward + backward).

    ``interval``: of ``iteration_s``; None where the problem does not say how sure its figures are.
    ``sync_s``: from the last backward of all to the last byte of the summed gradients; 0 where nothing is.
    ``stale``: with a parameter server, whose ``iteration_s`` is a step in the long run.
    """

    iteration_s: Seconds
    bottleneck_s: Seconds
    replicas: Seq[ReplicaPrediction]
    interval: Interval | None = None
    sync_s: Seconds = 0.0
    stale: StalePrediction | None = None


class Witness(Record):
    """Dual prices that prove a certificate's bound, evaluated by ``verify`` (``proof_by_witness``).

    Attributes:
        layer_prices: one per layer, of any sign; none where devices hold all layers each.
        place_prices: one per place in a pipeline, from the last stage on, none negative; 0 beyond them.
        route_prices: by set of replicas, of what their routes use; at most one for each set.
    """

    layer_prices: Seq[float] = ()
    place_prices: Seq[Annotated[float, Field(ge=0)]] = ()
    route_prices: Seq[RoutePrices] = ()

    @model_validator(mode="after")
    def _prices_something(self) -> Witness:
        if not self.layer_prices and not self.route_prices:
            raise ValueError("a witness has prices of layers or of routes, this one has none")
        sets = [frozenset(price.devices) for price in self.route_prices]
        if len(set(sets)) != len(sets):
            raise ValueError("route_prices names a set of devices twice")
        return self


ProofStatus = Literal["optimal", "bounded", "feasible"]


class WholeBlocksProof(Record):
    """The proof among plans that cut between transformer blocks only; fields as in ``Certificate``."""

    status: ProofStatus
    lower_bound_s: Seconds | None
    method: str


class Certificate(Record):
    """How sure: ``value_s`` and ``lower_bound_s`` in the problem's objective; gap = value / bound − 1.

    ``optimal``: proved, gap ≤ 1e-9. ``bounded``: a valid lower bound. ``feasible``: no bound claimed.
    ``whole_blocks``: set where only plans that cut between transformer blocks were searched.
    """

    status: ProofStatus
    value_s: Seconds
    lower_bound_s: Seconds | None
    gap: float | None
    method: str
    wall_s: Seconds
    witness: Witness | None = None
    whole_blocks: WholeBlocksProof | None = None


class ParallelismOutcome(Record):
    """The outcome of one parallelism, if several were looked at for the same batch.

    Attributes:
        fits: False: proved that no plan of it fits the devices.
        iteration_s: the predicted step of the best plan found; None: none was found.
        lower_bound_s: no plan of it is faster; None: nothing is claimed.
        schedule: of the plans that the bound speaks of; None: that of the plan's problem.
        witness: prices that prove the bound, as in a certificate, or None.
        reason: why there is no plan of it, for people; None where there is one.
        measured_s: the median of ten steps of that plan, run to choose the parallelism; None: it was not.
    """

    parallel: Parallel
    fits: bool
    iteration_s: Seconds | None
    lower_bound_s: Seconds | None
    schedule: Schedule | None = None
    witness: Witness | None = None
    reason: str | None = None
    measured_s: Seconds | None = None


class Contradiction(Record):
    """A run that saw a device, or the link to ``target``, much slower than is known: not planned with.

    ``seen``: when (ISO). ``factor``: seconds as seen ÷ as probed; ``believed``: the same of what the plan
    reckons with.
    """

    run_id: Name
    seen: str
    device: Name
    target: Name | None = None
    factor: float
    believed: float


class Plan(FileRecord):
    """An envelope (problem, prediction, certificate) around pipelines, side by side where there are several.

    A plan of one pipeline is written in the form ``grid`` (``stages``).
    ``encrypted``: its links were measured through TLS, and it is run so. ``contradictions``: what runs saw
    and nothing has settled yet; the next launch or comparison of the workload measures those nodes again.
    ``pipeline_iteration_s``: the predicted step of a pipeline for the same batch, beside which a plan whose
    devices hold all layers each was looked at; None: it was not, or none was found.
    ``forms``: what each parallelism came to, where the plan was chosen among several.
    ``backend``: what carries tensors between its ranks; None: the plan does not say, and ``skyctl`` does.
    """

    kind: Literal["skyctl/plan"] = "skyctl/plan"
    version: Literal[15] = 15
    form: Literal["grid", "pipelines"] = "grid"
    strategy: Strategy
    problem: Problem
    workload: WorkloadRef | None = None
    pipelines: Seq[Pipeline] = Field(min_length=1)
    unused: Seq[Unused] = ()
    predicted: Prediction
    certificate: Certificate
    machines: Seq[Machine] = ()
    encrypted: bool = False
    contradictions: Seq[Contradiction] = ()
    sync: Sync | None = None
    pipeline_iteration_s: Seconds | None = None
    forms: Seq[ParallelismOutcome] = ()
    backend: BackendChoice | None = None

    @property
    def stages(self) -> tuple[GridStage, ...]:
        """The stages of a plan of one pipeline, as in its file.

        Raises:
            InputError: the plan has several pipelines.
        """
        if len(self.pipelines) != 1:
            raise InputError(
                f"the plan has {len(self.pipelines)} pipelines, and so no stages of its own",
                hint="read Plan.pipelines",
            )
        return tuple(
            GridStage(
                start=stage.start,
                stop=stage.stop,
                replicas=(
                    GridReplica(
                        device=stage.device,
                        microbatches=self.pipelines[0].microbatches,
                        in_flight=stage.in_flight,
                        recompute=stage.recompute,
                        weights_behind=stage.weights_behind,
                    ),
                ),
            )
            for stage in self.pipelines[0].stages
        )

    @property
    def placed_stages(self) -> tuple[PlacedStage, ...]:
        """All stages in the order of ranks: by pipeline, then from the first layers to the last."""
        return tuple(stage for pipeline in self.pipelines for stage in pipeline.stages)

    @property
    def helpers(self) -> tuple[str, ...]:
        """The devices that gradients' routes go over and that hold no layers, in the problem's order."""
        routes = [route for group in self.sync.groups for route in group.routes] if self.sync else []
        there = {route.root for route in routes}
        there |= {device for route in routes for edge in (*route.up, *route.down) for device in edge}
        there -= {stage.device for stage in self.placed_stages}
        return tuple(device.id for device in self.problem.devices if device.id in there)

    @property
    def steps_per_iteration(self) -> float:
        """How many synchronous steps' samples an iteration trains on: 1, and a round as many as it has steps.

        Local steps count by their pipeline's part of the problem's microbatches, so with unequal ones it need
        not be a whole number. Of owners all are taken to make all of their steps.
        """
        if not self.problem.rhythm.is_rounds:
            return 1.0
        microbatches = sum(pipeline.microbatches * (pipeline.local_steps or 1) for pipeline in self.pipelines)
        return microbatches / self.problem.microbatches

    @property
    def step_s(self) -> float:
        """Predicted seconds for the samples of a synchronous step, comparable between rhythms."""
        return self.predicted.iteration_s / self.steps_per_iteration

    @model_validator(mode="before")
    @classmethod
    def _from_command(cls, raw: Any) -> Any:
        """Takes the output of ``plan --json`` for a plan's file, too."""
        if not isinstance(raw, dict):
            return raw
        return {name: value for name, value in raw.items() if name not in (WITHOUT, SHARED_STEP)}

    @model_validator(mode="before")
    @classmethod
    def _from_grid(cls, raw: Any) -> Any:
        if not isinstance(raw, dict) or raw.get("form", "grid") != "grid" or "stages" not in raw:
            return raw
        if "pipelines" in raw:
            raise ValueError("a plan of the form 'grid' has stages and no pipelines")
        grid = [_as_mapping(stage) for stage in _as_list(raw["stages"], "stages")]
        stages, microbatches = [], []
        for number, stage in enumerate(grid):
            replicas = _as_list(stage.pop("replicas", ()), f"stages.{number}.replicas")
            if len(replicas) != 1:
                raise ValueError(f"stages.{number}.replicas: a stage has one device, not {len(replicas)}")
            replica = _as_mapping(replicas[0])
            microbatches.append(replica.pop("microbatches", None))
            stages.append({**stage, **replica})
        # where stages disagree, the number that is not the problem's stands for all: verify refuses it
        problem = raw.get("problem")
        wanted = (
            problem.get("microbatches")
            if isinstance(problem, dict)
            else getattr(problem, "microbatches", None)
        )
        microbatches.sort(key=lambda number: number == wanted)
        rest = {name: value for name, value in raw.items() if name != "stages"}
        pipeline = {"stages": stages, "microbatches": microbatches[0] if microbatches else None}
        return {**rest, "form": "grid", "pipelines": [pipeline]}

    @model_serializer(mode="wrap")
    def _dump(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        out: dict[str, Any] = handler(self)
        if isinstance(self, Plan) and self.form == "grid" and "pipelines" in out:
            at = {"stages": [stage.model_dump() for stage in self.stages]}
            out = dict(
                item
                for key, value in out.items()
                for item in ((at if key == "pipelines" else {key: value}).items())
            )
        return out

    @model_validator(mode="after")
    def _covers(self) -> Plan:
        layers = len(self.problem.layers)
        seen: set[str] = set()
        for stage in self.placed_stages:
            if stage.device in seen:
                raise ValueError(f"device {stage.device!r} holds more than one stage")
            seen.add(stage.device)
        for pipeline in self.pipelines:
            if pipeline.stages[-1].stop != layers:
                raise ValueError(f"stages cover {pipeline.stages[-1].stop} layers, the problem has {layers}")
        unknown = seen - {device.id for device in self.problem.devices}
        if unknown:
            raise ValueError(f"stages name device {sorted(unknown)[0]!r}, which is not in the problem")
        if seen != {replica.device for replica in self.predicted.replicas}:
            raise ValueError("predicted.replicas must name the devices that hold a stage")
        if self.form == "grid" and len(self.pipelines) > 1:
            raise ValueError("a plan of several pipelines has the form 'pipelines'")
        total = sum(pipeline.microbatches for pipeline in self.pipelines)
        if self.form == "pipelines" and self.problem.owners is None and total != self.problem.microbatches:
            raise ValueError(
                f"the pipelines take {total} microbatches, the problem has {self.problem.microbatches}"
            )
        check_sync(self.sync, self.pipelines, self.problem)
        _check_local_steps(self)
        return self


def _check_local_steps(plan: Plan) -> None:
    """Raises ValueError where a plan's local steps, sum or pipelines are not what its problem asks for."""
    rounds = plan.problem.rhythm.is_rounds
    if any((pipeline.local_steps is not None) != rounds for pipeline in plan.pipelines):
        raise ValueError("pipelines have local_steps where the problem's rhythm has them, and only there")
    if plan.sync is not None and (plan.sync.of == "weights") != rounds:
        raise ValueError(f"the plan sums {plan.sync.of}, and local steps end with a sum of weights")
    owners = plan.problem.owners
    if owners is not None and len(owners) != len(plan.pipelines):
        raise ValueError(f"the plan has {len(plan.pipelines)} pipelines for {len(owners)} owners")
    for number, (owner, pipeline) in enumerate(zip(owners or (), plan.pipelines, strict=False)):
        if pipeline.microbatches != plan.problem.microbatches:
            raise ValueError(
                f"pipeline {number} takes {pipeline.microbatches} microbatches; of its own batches an owner "
                f"computes all {plan.problem.microbatches}"
            )
        for stage in pipeline.stages:
            if node_of(stage.device) not in owner:
                raise ValueError(
                    f"pipeline {number} trains on the data of {'+'.join(owner)}, and "
                    f"{stage.device!r} is not its owner's"
                )


def _as_list(value: object, where: str) -> list[Any]:
    if not isinstance(value, list | tuple):
        raise ValueError(f"{where}: should be a list (it is {value!r:.60})")
    return list(value)


def _as_mapping(value: object) -> dict[str, Any]:
    """A record's, or a JSON object's, fields; a copy."""
    if isinstance(value, Record):
        return {name: getattr(value, name) for name in type(value).model_fields}
    if not isinstance(value, dict):
        raise ValueError(f"a stage and its replica are JSON objects (one is {value!r:.60})")
    return dict(value)
