"""How a run of a plan is to be played."""

from __future__ import annotations

from dataclasses import dataclass, field

from skyctl.checkpoint.launcher.policy import CheckpointRules
from skyctl.records.backend import Backend
from skyctl.run.expert_spec import ExpertSetting
from skyctl.run.health_monitor import Deadlines

DEFAULT_REPLICAS = 2


@dataclass(frozen=True)
class RunOptions:
    """How long to train and what to keep.

    Attributes:
        trace: record what every rank does when.
        ignore_changes: train on a cluster that is not what the plan was made for, too.
        encrypt: what passes between the stages, and checkpoints between nodes, go through TLS (a plan that
            was made so is always run so).
        backend: what is to carry tensors between ranks, whatever the plan says; None: what it says.
        checkpoint_every: steps from one checkpoint to the next; 0: none; None: chosen
            (``checkpoint.launcher.policy.checkpoint_interval``).
        keep: checkpoints that are kept.
        replicas: other nodes with a copy of each checkpoint; None: two, or all there are.
        keep_here: copy checkpoints to this machine, too.
        max_restarts: attempts after a fault, counted anew after each checkpoint.
        elastic: where a device is lost, the others go on in the same step.
        dynamic: shares follow devices' measured paces.
        min_pipelines: with fewer devices that hold all layers they don't.
        turns: the policy by which devices are shared with other runs; None: they are not.
        wandb: the project of Weights & Biases that each step's figures go to, too; None: to none.
        experts: hosts hold the experts of the model's layers; None: these are where their layers are.
    """

    steps: int = 10
    weights: bool = True
    trace: bool = False
    ignore_changes: bool = False
    encrypt: bool = False
    backend: Backend | None = None
    deadlines: Deadlines = field(default_factory=Deadlines)
    checkpoint_every: int | None = None
    keep: int = 2
    replicas: int | None = None
    keep_here: bool = False
    max_restarts: int = 3
    elastic: bool = False
    min_pipelines: int = 1
    dynamic: bool = False
    turns: str | None = None
    wandb: str | None = None
    experts: ExpertSetting | None = None

    @property
    def writes_checkpoints(self) -> bool:
        """Whether ranks write checkpoints, so that the run can be restarted and resumed."""
        return self.checkpoint_every != 0

    @property
    def checkpoints(self) -> CheckpointRules:
        """Which checkpoints are kept, and on how many nodes."""
        return CheckpointRules(
            steps=self.steps,
            writes=self.writes_checkpoints,
            keep=self.keep,
            replicas=DEFAULT_REPLICAS if self.replicas is None else self.replicas,
        )
