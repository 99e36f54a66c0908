"""The options of ``launch``: what is trained how long, how it survives, who watches it."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Annotated, Any

import typer

from skyctl.cli.form_trial import TrialOption
from skyctl.cli.option_values import STRATEGIES, complete_choices, complete_run
from skyctl.cli.options import (
    ClusterOptions,
    ConnectionOptions,
    DryRunOption,
    LearningRateOption,
    MicrobatchesOption,
    OutputOption,
    TraceOption,
    WorkloadOptions,
    YesOption,
)
from skyctl.cli.placement_options import PlacementOptions
from skyctl.errors import InputError
from skyctl.workload.recipe import LR_SCHEDULES, VALIDATE_BATCHES, Recipe

if TYPE_CHECKING:
    from skyctl.cli.command_output import Output
    from skyctl.records.backend import Backend, BackendRequest
    from skyctl.records.cluster import Cluster
    from skyctl.records.plan import Plan
    from skyctl.run.expert_spec import ExpertSetting
    from skyctl.run.run_options import RunOptions

DEFAULT_STEPS = 100
HoldOption = Annotated[
    float,
    typer.Option(
        "--hold",
        min=60,
        metavar="SECONDS",
        help="How long nodes keep training without a supervisor before they end what runs there.",
    ),
]
ValidateEveryOption = Annotated[
    int | None,
    typer.Option(
        "--validate-every",
        "--eval-every",
        min=1,
        metavar="N",
        help="Loss over held-out data every N steps, and at the end; or: --eval-every N.",
    ),
]
ValidateBatchesOption = Annotated[
    int,
    typer.Option("--validate-batches", min=1, metavar="K", help="Held-out batches of one validation."),
]


@dataclass(frozen=True, kw_only=True)
class LengthOptions:
    """How many steps are trained, by a new run or one that is resumed, and from which weights."""

    steps: Annotated[
        int | None,
        typer.Option(
            "--steps",
            min=1,
            metavar="N",
            help=f"Training steps; default {DEFAULT_STEPS}. With --resume: so many MORE than its checkpoint "
            "has.",
        ),
    ] = None
    resume: Annotated[
        str | None,
        typer.Option(
            "--resume",
            metavar="RUN",
            autocompletion=complete_run,
            help="Go on with a run from its newest checkpoint, on the nodes that answer, or with PLAN on "
            "others; with one that has ended well for --steps MORE.",
        ),
    ] = None
    init_from: Annotated[
        str | None,
        typer.Option(
            "--init-from",
            metavar="FILE|RUN|FOLDER",
            help="Begin at step 0 with these weights: a run's, a .safetensors or .pt file's, or those in a "
            "Hugging Face folder.",
        ),
    ] = None

    @property
    def steps_wanted(self) -> int:
        """The steps that a new run trains; those of ``--steps``, or the default."""
        return self.steps or DEFAULT_STEPS


@dataclass(frozen=True, kw_only=True)
class FaultToleranceOptions:
    """How a run survives faults: its checkpoints, their copies, its restarts."""

    checkpoint_every: Annotated[
        int | None,
        typer.Option(
            "--checkpoint-every",
            min=0,
            metavar="N",
            help="Steps from one checkpoint to the next; 0: none. Default: as often as costs little, and "
            "every 5 minutes at least.",
        ),
    ] = None
    keep: Annotated[int, typer.Option("--keep", min=2, metavar="K", help="Checkpoints that are kept.")] = 2
    replicas: Annotated[
        int | None,
        typer.Option(
            "--replicas",
            min=0,
            metavar="R",
            help="Other nodes that keep a copy of each node's checkpoints; default 2.",
        ),
    ] = None
    keep_here: Annotated[
        bool,
        typer.Option("--keep-here", help="Copy checkpoints to this machine, too, in the background."),
    ] = False
    max_restarts: Annotated[
        int,
        typer.Option(
            "--max-restarts",
            min=0,
            metavar="N",
            help="Restarts after faults, counted anew after each checkpoint.",
        ),
    ] = 3
    elastic: Annotated[
        bool,
        typer.Option(
            "--elastic",
            help="Where a device is lost, the others end the step with its microbatches, and go on.",
        ),
    ] = False
    dynamic: Annotated[
        bool,
        typer.Option(
            "--dynamic",
            help="With --elastic: deal microbatches anew whenever devices' paces have changed.",
        ),
    ] = False
    min_pipelines: Annotated[
        int,
        typer.Option(
            "--min-pipelines",
            min=1,
            metavar="K",
            help="With --elastic: with fewer devices the run goes on from its checkpoint instead.",
        ),
    ] = 1


@dataclass(frozen=True, kw_only=True)
class WorkloadPlanOptions(PlacementOptions):
    """How a workload is planned that was given without a plan file."""

    strategy: Annotated[
        str | None,
        typer.Option(
            "--strategy",
            metavar="NAME",
            autocompletion=complete_choices(*STRATEGIES),
            help="For a bare workload; default optimal.",
        ),
    ] = None
    microbatches: MicrobatchesOption = None


@dataclass(frozen=True, kw_only=True)
class RecipeOptions:
    """How the optimizer steps, and how the model is validated."""

    learning_rate: LearningRateOption = None
    clip_norm: Annotated[
        float | None,
        typer.Option("--clip-norm", metavar="NORM", help="Scale gradients down to this global norm."),
    ] = None
    lr_schedule: Annotated[
        str,
        typer.Option(
            "--lr-schedule",
            metavar="NAME",
            autocompletion=complete_choices(*LR_SCHEDULES),
            help="How the learning rate falls: constant, linear or cosine.",
        ),
    ] = "constant"
    warmup_steps: Annotated[
        int,
        typer.Option("--warmup-steps", min=0, metavar="N", help="Steps in which the learning rate rises."),
    ] = 0
    min_learning_rate: Annotated[
        float,
        typer.Option("--min-learning-rate", metavar="RATE", help="Where a falling learning rate ends."),
    ] = 0.0
    validate_every: ValidateEveryOption = None
    validate_batches: ValidateBatchesOption = VALIDATE_BATCHES
    patience: Annotated[
        int | None,
        typer.Option(
            "--patience",
            min=1,
            metavar="K",
            help="End the run after K validations in a row without a lower loss.",
        ),
    ] = None

    def recipe(self, total_steps: int) -> Recipe:
        """The recipe of a run of so many steps. Raises InputError for a value that can't be."""
        return Recipe(
            clip_norm=self.clip_norm,
            lr_schedule=self.lr_schedule,
            warmup_steps=self.warmup_steps,
            min_learning_rate=self.min_learning_rate,
            validate_every=self.validate_every,
            validate_batches=self.validate_batches,
            total_steps=total_steps,
            patience=self.patience,
        )


@dataclass(frozen=True, kw_only=True)
class SupervisionOptions:
    """How a run is begun and watched, and what is left of it."""

    trial: TrialOption = True
    trace: TraceOption = False
    turns: Annotated[
        str | None,
        typer.Option(
            "--turns",
            metavar="POLICY",
            help="Share devices by turns with other runs that say so, too: fifo, fair, srtf, pack or "
            "priority=N.",
        ),
    ] = None
    expert_hosts: Annotated[
        str | None,
        typer.Option(
            "--expert-hosts",
            metavar="NODES",
            help="Nodes that hold the experts of mixtures, by their speeds: names, patterns, or all.",
        ),
    ] = None
    ignore_changes: Annotated[
        bool,
        typer.Option(
            "--ignore-changes",
            help="Train even where devices, versions or memory are not what they were when measured.",
        ),
    ] = False
    detach: Annotated[
        bool, typer.Option("--detach", help="Leave the run to the background once it trains, and return.")
    ] = False
    hold: HoldOption = 43_200.0
    wandb: Annotated[
        str | None,
        typer.Option(
            "--wandb",
            metavar="PROJECT",
            help="Send each step's figures to this project of Weights & Biases (pip install wandb), or "
            "ENTITY/PROJECT.",
        ),
    ] = None
    output: OutputOption = None
    yes: YesOption = False
    dry_run: DryRunOption = False


@dataclass(frozen=True, kw_only=True)
class LaunchOptions(
    ConnectionOptions,
    SupervisionOptions,
    RecipeOptions,
    WorkloadOptions,
    WorkloadPlanOptions,
    FaultToleranceOptions,
    LengthOptions,
    ClusterOptions,
):
    """All options of ``launch``. Help lists the groups from the last one to the first."""

    def requested_backend(
        self, cluster: Cluster | None, *, encrypt: bool, pins: bool = False, helpers: bool = False
    ) -> BackendRequest:
        """As of ``BackendOptions``; only the backend skyctl connects anew where a device is lost."""
        asked = super().requested_backend(cluster, encrypt=encrypt, pins=pins, helpers=helpers)
        if not self.elastic:
            given = ["--min-pipelines"] * (self.min_pipelines > 1) + ["--dynamic"] * self.dynamic
            if given:
                raise InputError(
                    f"{given[0]} is of runs that go on in the same step where a device is lost",
                    hint="add --elastic, or leave it out",
                )
            return asked
        if asked not in ("auto", "skyctl"):
            raise InputError(
                f"--elastic needs the backend skyctl, and {asked} is asked for: it can't connect anew",
                hint="leave --backend out, and 'backend:' of the cluster file",
            )
        return "skyctl"

    def check_elastic(self, out: Output, plan: Plan) -> Plan:
        """The plan, where steps are to survive a lost device with what a step takes without each node.

        Raises:
            InfeasibleError, InputError: its steps do not survive that.
        """
        from skyctl.cli.show_pipelines import describe_steps_without
        from skyctl.planning.steps_without import steps_without
        from skyctl.run.elastic_spec import elastic_order

        if self.elastic:
            if self.trace:
                raise InputError(
                    "--trace compares clocks with all ranks at the end, and with --elastic some may be gone",
                    hint="leave one of them out",
                )
            elastic_order(plan, self.min_pipelines)
            if steps := steps_without(plan):
                out.note(describe_steps_without(steps))
        return plan

    def settled_by_plan(self) -> dict[str, object]:
        """By option that says how to plan, what was typed (None: nothing): a plan has settled all of them."""
        return {
            "--strategy": self.strategy,
            "--parallel": self.parallel,
            "--sync-format": self.sync_format,
            "--uncompressed-steps": self.uncompressed_steps,
            "--sync": self.sync,
            "--sync-delay": self.sync_delay,
            "--undelayed-steps": self.undelayed_steps,
            "--staleness": self.staleness,
            "--helper": ", ".join(self.helper) if self.helper else None,
            "--pin-first": self.pin_first,
            "--pin-last": self.pin_last,
            "--microbatches": self.microbatches,
            "--schedule": self.schedule,
            "--link-dtype": ", ".join(self.link_dtype) if self.link_dtype else None,
            **self.given_rounds(),
        }

    def expert_nodes(self, cluster: Cluster) -> tuple[str, ...]:
        """The nodes that are to hold experts; none: these are where their layers are.

        Raises:
            InputError: no node is called so.
        """
        from skyctl.inventory.node_patterns import match_nodes

        return () if self.expert_hosts is None else match_nodes(cluster, self.expert_hosts)

    def check_expert_hosts(self) -> None:
        """Raises InputError where experts are to be on hosts, and something else does not go with that."""
        if self.expert_hosts is not None:
            from skyctl.run.expert_spec import check_expert_options

            check_expert_options(clip_norm=self.clip_norm, elastic=self.elastic, turns=self.turns)

    def run_options(self, backend: Backend | None, experts: ExpertSetting | None = None) -> RunOptions:
        """The options of a new run, as the run room has them.

        Args:
            backend: what is to carry tensors whatever the plan says; None: what it says.
            experts: on hosts; None: they are where their layers are.
        """
        from skyctl.run.run_options import RunOptions

        return RunOptions(
            steps=self.steps_wanted,
            trace=self.trace,
            ignore_changes=self.ignore_changes,
            encrypt=self.encrypt,
            backend=backend,
            checkpoint_every=self.checkpoint_every,
            keep=self.keep,
            replicas=self.replicas,
            keep_here=self.keep_here,
            max_restarts=self.max_restarts,
            elastic=self.elastic,
            min_pipelines=self.min_pipelines,
            dynamic=self.dynamic,
            turns=self.turns,
            wandb=self.wandb,
            experts=experts,
        )

    def backend_of_run(self, plan: Plan, cluster: Cluster) -> Backend | None:
        """The backend that is to carry tensors in place of what a plan file says; None: no other.

        The option counts more than what the plan was asked for, that more than the cluster file, and this
        more than what was chosen for the plan.

        Raises:
            InputError: it can't do what else was asked for.
        """
        asked = self.requested_backend(cluster, encrypt=self.encrypt)
        if asked is None or asked == "auto":
            return None
        settled = plan.backend is not None and plan.backend.is_asked
        return None if self.backend is None and settled else asked

    def changed_run_options(self) -> dict[str, Any]:
        """How a run is played, by name in ``RunOptions``: what was given beside ``--resume``."""
        names = [option.name for option in fields(FaultToleranceOptions)]
        defaults = LaunchOptions()
        given = {name: getattr(self, name) for name in (*names, "trace", "ignore_changes", "turns", "wandb")}
        return {name: value for name, value in given.items() if value != getattr(defaults, name)}
