"""The options that say what a plan is to be like: its form, rhythm, routes, end stages and schedule."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from skyctl.cli.option_values import (
    PARALLEL,
    SCHEDULES,
    SYNC_FORMATS,
    SYNC_ROUTES,
    complete_choices,
    complete_nodes,
    parse_helpers,
    parse_link_dtypes,
    parse_parallel,
    parse_schedule,
    parse_sync,
    parse_sync_format,
    select_node_names,
)
from skyctl.cli.options import BackendOptions
from skyctl.cli.rhythm_options import RhythmOptions

if TYPE_CHECKING:
    from skyctl.planning.parallelism_choice import ParallelChoice
    from skyctl.planning.plan_options import PlanOptions
    from skyctl.records.backend import BackendRequest
    from skyctl.records.cluster import Cluster


@dataclass(frozen=True, kw_only=True)
class PlacementOptions(RhythmOptions, BackendOptions):
    """The user's demands on a plan: its form, rhythm, routes, end stages, schedule, and links' dtypes."""

    parallel: Annotated[
        str | None,
        typer.Option(
            "--parallel",
            metavar="FORM",
            autocompletion=complete_choices(*PARALLEL),
            help="auto (default: of these the simplest within 1% of the fastest), pipeline (a part of the "
            "layers each), data (all of them, shares of samples), or hybrid (several pipelines).",
        ),
    ] = None
    sync_format: Annotated[
        str | None,
        typer.Option(
            "--sync-format",
            metavar="FORMAT",
            autocompletion=complete_choices(*SYNC_FORMATS),
            help="With --parallel data or hybrid: sum gradients as float32 (default), fixed32 (integers: the "
            "same bits whatever the plan), bfloat16 or int8 (half and a quarter of the bytes; changes "
            "training), or powersgd:R (rank R with error feedback: a few percent of them; changes training). "
            "With --local-steps: average weights as float32, bfloat16 or int8.",
        ),
    ] = None
    uncompressed_steps: Annotated[
        int | None,
        typer.Option(
            "--uncompressed-steps",
            min=0,
            metavar="N",
            help="With --sync-format powersgd:R: sum the first N steps in float32.",
        ),
    ] = None
    sync: Annotated[
        str | None,
        typer.Option(
            "--sync",
            metavar="ROUTES",
            autocompletion=complete_choices(*SYNC_ROUTES),
            help="With --parallel data or hybrid: sum over a ring, a star, or auto (default: the fastest; "
            "trees where they save a twentieth of a step); with data also over a server (a star whose root "
            "may be a helper) or packed trees.",
        ),
    ] = None
    helper: Annotated[
        list[str] | None,
        typer.Option(
            "--helper",
            metavar="NODE",
            autocompletion=complete_nodes,
            help="With --parallel data: a node that holds no layers and only helps to sum gradients. "
            "Repeatable. Default: any that holds none may.",
        ),
    ] = None
    pin_first: Annotated[
        str | None,
        typer.Option(
            "--pin-first",
            metavar="NODES",
            autocompletion=complete_nodes,
            help="Only these may hold the first stage (the inputs).",
        ),
    ] = None
    pin_last: Annotated[
        str | None,
        typer.Option(
            "--pin-last",
            metavar="NODES",
            autocompletion=complete_nodes,
            help="Only these may hold the last stage (the targets).",
        ),
    ] = None
    schedule: Annotated[
        str | None,
        typer.Option(
            "--schedule",
            metavar="NAME",
            autocompletion=complete_choices(*SCHEDULES),
            help="auto, 1f1b, eager-1f1b, zero-bubble, gpipe or sequential (default: auto; with --problem "
            "what the file says).",
        ),
    ] = None
    link_dtype: Annotated[
        list[str] | None,
        typer.Option(
            "--link-dtype",
            metavar="DTYPE[@WHERE]",
            help="Send activations and gradients as float32, bfloat16 or int8: over all links, @slow ones "
            "(below 200 Mbit/s as measured), or between two nodes (int8@tower-laptop). Repeatable; the last "
            "one that names a link counts. Default: as they are.",
        ),
    ] = None

    def placement_backend(self, cluster: Cluster | None, *, encrypt: bool) -> BackendRequest | None:
        """``requested_backend``, checked against what is asked of end stages and helpers."""
        pins = self.pin_first is not None or self.pin_last is not None
        return self.requested_backend(cluster, encrypt=encrypt, pins=pins, helpers=bool(self.helper))

    def plan_options(
        self, cluster: Cluster | None, *, default_form: ParallelChoice | None = "auto", **more: Any
    ) -> PlanOptions:
        """How to plan.

        Args:
            cluster: has the nodes that patterns name; None (a problem file): the pins are left out.
            default_form: where --parallel is not given; None: what a problem or a run says.
            more: further fields of ``PlanOptions``.

        Raises:
            InputError: no such schedule or dtype, a pattern or an owner that names no node, or options that
                do not go with local steps.
        """
        from skyctl.planning.plan_options import PlanOptions
        from skyctl.planning.round_owners import check_owners_parallelism, check_rounds

        options = PlanOptions(
            parallel=parse_parallel(self.parallel) or default_form,
            sync_format=parse_sync_format(self.sync_format),
            uncompressed_steps=self.uncompressed_steps,
            sync=parse_sync(self.sync),
            rhythm=self.make_rhythm(),
            owners=self.make_owners(),
            helpers=parse_helpers(self.helper, cluster),
            schedule=parse_schedule(self.schedule),
            first_stage=None if cluster is None else select_node_names(cluster, self.pin_first),
            last_stage=None if cluster is None else select_node_names(cluster, self.pin_last),
            link_dtype=parse_link_dtypes(self.link_dtype, cluster),
            **more,
        )
        check_owners_parallelism(options)
        check_rounds(options, None if cluster is None else [node.name for node in cluster.nodes])
        return options
