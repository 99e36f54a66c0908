"""The options that several commands take, each defined once, and what they mean together.

Options that go together are the fields of a frozen dataclass, whose values are used through its methods; a
single one is an alias. A command takes either as a parameter (see ``command_runner.command``); typer makes
flags, help and completion from the annotations.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple, cast

import typer

from skyctl.cli.option_values import DTYPES, complete_choices, complete_nodes, complete_run, require_choice

if TYPE_CHECKING:
    from skyctl.jobs.training_request import TrainingRequest
    from skyctl.records.backend import BackendRequest
    from skyctl.records.cluster import Cluster, Node
    from skyctl.records.run_state import InitialWeights
    from skyctl.remote.base import ConnectOptions
    from skyctl.workload.datasets.checked_options import RecordChoices
    from skyctl.workload.recipe import Recipe
    from skyctl.workload.workload import Workload

WORKLOAD_HELP = (
    "gpt:layers=8,hidden=256,heads=8,context=128 | bert:… | hf:DIR | train.py | train.py,width=512"
)
DEFAULT_BATCH_SIZE = 32  # as in control.training_request, which imports torch
DEFAULT_DTYPE = "float32"
DEFAULT_TIMEOUT_S = 15.0

WorkloadArgument = Annotated[str | None, typer.Argument(metavar="WORKLOAD", help=WORKLOAD_HELP)]
RunArgument = Annotated[
    str | None,
    typer.Argument(
        metavar="RUN",
        help="The run's id, or its beginning or end; default: the newest.",
        autocompletion=complete_run,
        show_default=False,
    ),
]
GivenRunArgument = Annotated[
    str, typer.Argument(metavar="RUN", help="A run's id, or its folder.", autocompletion=complete_run)
]

ClusterOption = Annotated[
    Path | None,
    typer.Option(
        "-c",
        "--cluster",
        envvar="SKYCTL_CLUSTER",
        metavar="FILE",
        help="The cluster file; default ./cluster.yaml.",
    ),
]
DryRunOption = Annotated[bool, typer.Option("--dry-run", help="Say what would be done; change nothing.")]
YesOption = Annotated[bool, typer.Option("-y", "--yes", help="Ask nothing.")]
OutputOption = Annotated[
    Path | None, typer.Option("-o", "--output", metavar="FILE", help="Where to write the result.")
]
ProfileOption = Annotated[
    str | None,
    typer.Option("--profile", metavar="FILE", help="Default: the newest that fits cluster and workload."),
]
MicrobatchesOption = Annotated[
    int | None,
    typer.Option(
        "--microbatches",
        min=1,
        metavar="N",
        help="Parts a batch is cut into; left out, the planner chooses among measured numbers.",
    ),
]
TimeLimitOption = Annotated[
    float, typer.Option("--time-limit", min=0.1, metavar="SECONDS", help="For the search of `optimal`.")
]
LearningRateOption = Annotated[
    float | None, typer.Option("--learning-rate", metavar="RATE", help="Default: the workload's own.")
]
StepsOption = Annotated[int, typer.Option("--steps", min=1, metavar="N", help="Training steps.")]
TraceOption = Annotated[
    bool,
    typer.Option("--trace", help="Record what every stage does when: trace.json and trace.svg of the run."),
]


class ClusterTarget(NamedTuple):
    """The cluster in use, the file it came from, and all nodes of that file."""

    path: Path
    cluster: Cluster
    everyone: Sequence[Node]


@dataclass(frozen=True, kw_only=True)
class ClusterOptions:
    """Which cluster file is read, and which of its nodes are used."""

    cluster: ClusterOption = None
    limit: Annotated[
        str | None,
        typer.Option(
            "--limit",
            metavar="PATTERN",
            help="Only these nodes: names, globs, groups, !left-out.",
            autocompletion=complete_nodes,
        ),
    ] = None

    def load(self, *, set_up: bool = True) -> ClusterTarget:
        """The cluster file in use, read and limited.

        Args:
            set_up: nodes run the Python that `skyctl setup` has installed there; else the one that the file
                names.

        Raises:
            InputError: no such file, a fault in it, or a limit that matches nothing.
        """
        from skyctl.inventory.cluster_file import cluster_path, read_cluster
        from skyctl.inventory.environment_registry import with_prepared_environments
        from skyctl.inventory.node_patterns import select_nodes

        path = cluster_path(self.cluster)
        whole = read_cluster(path)
        if set_up:
            whole = with_prepared_environments(whole)
        return ClusterTarget(path, select_nodes(whole, self.limit), whole.nodes)

    def format_arguments(self, words: Sequence[str], *, limited: bool = False) -> str:
        """``words`` and the same cluster, as arguments of the next command, ready to be typed.

        Args:
            limited: with the same ``--limit``, too.
        """
        same = ["-c", str(self.cluster)] if self.cluster is not None else []
        same += ["--limit", self.limit] if limited and self.limit is not None else []
        return shlex.join([*words, *same])


@dataclass(frozen=True, kw_only=True)
class ConnectionOptions:
    """Which host keys are accepted, and how long a node is waited for."""

    accept_new_host_keys: Annotated[
        bool,
        typer.Option(
            "--accept-new-host-keys",
            help="Trust and remember hosts never seen before (changed keys: never).",
        ),
    ] = False
    timeout: Annotated[
        float,
        typer.Option("--timeout", metavar="SECONDS", min=0.1, help="How long to wait for a node to answer."),
    ] = DEFAULT_TIMEOUT_S

    def connect_options(self, cluster_file: Path | None) -> ConnectOptions:
        """How to connect. A ``known_hosts`` file next to the cluster file is read too (labs write one)."""
        from skyctl.remote.base import ConnectOptions

        known_hosts = cluster_file.parent / "known_hosts" if cluster_file else None
        return ConnectOptions(
            accept_new_host_keys=self.accept_new_host_keys,
            timeout_s=self.timeout,
            known_hosts=str(known_hosts) if known_hosts and known_hosts.is_file() else None,
        )

    def supervised_connection(self, cluster_file: Path | None, hold_s: float) -> ConnectOptions:
        """Sessions that outlive their connections and this process, so that nothing they say is lost.

        Args:
            hold_s: how long a node keeps one that nobody has come back to.
        """
        connect = self.connect_options(cluster_file)
        return replace(connect, hold_s=hold_s, redial_s=hold_s, manual_ack=True)


@dataclass(frozen=True, kw_only=True)
class BackendOptions:
    """The option that says what carries tensors between ranks."""

    backend: Annotated[
        str | None,
        typer.Option(
            "--backend",
            metavar="auto|gloo|nccl|skyctl",
            autocompletion=complete_choices("auto", "gloo", "nccl", "skyctl"),
            help="What carries tensors between ranks: skyctl's own connections, torch's Gloo between CPUs or "
            "NCCL between CUDA devices (both in the clear), or auto: Gloo or NCCL where they do. Default: "
            "backend: in cluster.yaml, else auto.",
        ),
    ] = None

    def requested_backend(
        self, cluster: Cluster | None, *, encrypt: bool, pins: bool = False, helpers: bool = False
    ) -> BackendRequest:
        """The backend asked for, on the command line or in the cluster file, or the default.

        Raises:
            InputError: there is none of that name, or it can't do what else was asked for.
        """
        from skyctl.planning.backend_choice import check_backend, check_backend_of_cluster
        from skyctl.records.backend import BACKEND_REQUESTS, DEFAULT_BACKEND

        if self.backend is not None:
            asked = cast("BackendRequest", require_choice("--backend", self.backend, BACKEND_REQUESTS))
        else:
            asked = (cluster.backend if cluster is not None else None) or DEFAULT_BACKEND
        check_backend(asked, encrypt=encrypt, pins=pins, helpers=helpers)
        if cluster is not None:
            check_backend_of_cluster(asked, cluster)
        return asked


@dataclass(frozen=True, kw_only=True)
class WorkloadOptions:
    """How a workload is trained. None: the default, or what the plan or run at hand says."""

    batch_size: Annotated[
        int | None,
        typer.Option(
            "--batch-size", min=1, metavar="N", help="Samples a step; default 32, or the plan's or run's."
        ),
    ] = None
    seed: Annotated[
        int | None, typer.Option("--seed", metavar="N", help="Default 0, or the plan's or run's.")
    ] = None
    dtype: Annotated[
        str | None,
        typer.Option(
            "--dtype",
            metavar="NAME",
            autocompletion=complete_choices(*DTYPES),
            help="Default float32, or the plan's or run's.",
        ),
    ] = None
    lora: Annotated[
        str | None,
        typer.Option(
            "--lora",
            metavar="r=16,alpha=32,…",
            help="Train low-rank adapters of an hf: model alone: r, alpha, dropout, targets (default "
            "all-linear), and other names of peft's LoraConfig.",
        ),
    ] = None
    data: Annotated[
        Path | None,
        typer.Option(
            "--data",
            metavar="FILE",
            help="Text to train on, or for hf: a file or folder of records (chats, prompts with completions, "
            "texts); default: the standard library's sources.",
        ),
    ] = None
    packing: Annotated[
        bool | None,
        typer.Option(
            "--packing/--no-packing",
            help="Several records share a row of a hf: model's context, without attention across them; "
            "default: they do.",
            show_default=False,
        ),
    ] = None
    train_on_inputs: Annotated[
        bool,
        typer.Option("--train-on-inputs", help="Of records, learn prompts and the user's words, too."),
    ] = False
    skip_bad: Annotated[
        bool, typer.Option("--skip-bad", help="Leave out records that can't be used, and count them.")
    ] = False
    ship: Annotated[
        list[str] | None,
        typer.Option(
            "--ship",
            metavar="NAME",
            help="A data file or folder beside train.py that goes along to the nodes. Repeatable; or "
            'ship = ["NAME"] in the file.',
        ),
    ] = None
    random_inputs: Annotated[
        bool, typer.Option("--random-inputs", help="Random inputs, for a train.py without data().")
    ] = False
    encrypt: Annotated[
        bool,
        typer.Option(
            "--encrypt", help="Send what passes between stages through TLS; measure and plan it so."
        ),
    ] = False
    no_compare: Annotated[
        bool,
        typer.Option(
            "--no-compare",
            help="Don't compare the layers with the model itself in plain torch; each run says so.",
        ),
    ] = False

    @property
    def record_choices(self) -> RecordChoices:
        """How records are to be used, if ``--data`` names some."""
        from skyctl.workload.datasets.checked_options import RecordChoices

        return RecordChoices(self.packing, self.train_on_inputs, self.skip_bad)

    def parse_request(
        self,
        source: str,
        *,
        microbatches: int | None,
        sweep: Sequence[int] = (),
        learning_rate: float | None = None,
        recipe: Recipe | None = None,
        init: InitialWeights | None = None,
    ) -> TrainingRequest:
        """The request as typed: neither torch nor the user's code runs for it.

        Args:
            sweep: the numbers of microbatches to measure and compare, where there are several.
            init: the weights to start from; None: random ones, or the folder's.

        Raises:
            WorkloadError: anything wrong with the source, the options, or how they fit together.
        """
        from skyctl.jobs.training_request import TrainingRequest
        from skyctl.workload.recipe import Recipe
        from skyctl.workload.user_code import refuse_without_model
        from skyctl.workload.workload_spec import make_spec, parse_source

        parsed = parse_source(source)
        if parsed.kind == "file" and parsed.path is not None:
            refuse_without_model(parsed.path)  # before anything is looked for, connected to or run
        spec = make_spec(
            source,
            batch_size=self.batch_size or DEFAULT_BATCH_SIZE,
            seed=self.seed or 0,
            dtype=self.dtype or DEFAULT_DTYPE,
            lora=self.lora,
            learning_rate=learning_rate,
            data_path=str(self.data) if self.data is not None else None,
            ship=tuple(self.ship or ()),
            record_choices=self.record_choices,
            random_inputs=self.random_inputs,
            validated=recipe is not None and recipe.validate_every is not None,
            **(init.spec_fields() if init is not None else {}),
        )
        return TrainingRequest(
            spec, microbatches, recipe or Recipe(), self.encrypt, tuple(sweep), not self.no_compare
        )

    def make_request(
        self,
        source: str,
        *,
        microbatches: int | None,
        sweep: Sequence[int] = (),
        learning_rate: float | None = None,
        recipe: Recipe | None = None,
        init: InitialWeights | None = None,
    ) -> tuple[TrainingRequest, Workload]:
        """``parse_request``, and its workload loaded and checked (on the meta device: nothing is computed).

        Raises:
            WorkloadError: as ``parse_request``, or the workload's own code is wrong.
        """
        from skyctl.workload.workload import load_workload

        request = self.parse_request(
            source,
            microbatches=microbatches,
            sweep=sweep,
            learning_rate=learning_rate,
            recipe=recipe,
            init=init,
        )
        workload = load_workload(request.spec)
        if recipe is not None:
            workload.check_recipe(recipe)
        return replace(request, spec=workload.spec), workload


@dataclass(frozen=True, kw_only=True)
class DefaultedWorkloadOptions(WorkloadOptions):
    """The same where no plan and no run is at hand: every option has its default."""

    batch_size: Annotated[int, typer.Option("--batch-size", min=1, metavar="N", help="Samples a step.")] = (
        DEFAULT_BATCH_SIZE
    )
    seed: Annotated[int, typer.Option("--seed", metavar="N", help="Of initial weights and data.")] = 0
    dtype: Annotated[
        str,
        typer.Option(
            "--dtype",
            metavar="NAME",
            autocompletion=complete_choices(*DTYPES),
            help="float32, or bfloat16 (mixed precision).",
        ),
    ] = DEFAULT_DTYPE
