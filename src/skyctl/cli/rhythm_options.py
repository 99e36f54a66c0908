"""The options of rhythms: when what several pipelines sum takes effect. Each rhythm changes training."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from skyctl.errors import InputError

if TYPE_CHECKING:
    from skyctl.records.rhythm import Rhythm

ALL_OWNERS: Literal["all"] = "all"
OwnersChoice = tuple[tuple[str, ...], ...] | Literal["all"]
"""By owner, its nodes; ``all``: each node is an owner."""
MOST_DIGITS = 9
OUTER_LR, OUTER_MOMENTUM = 0.7, 0.9
"""Of DiLoCo's paper: what one of the two is where only the other is given."""


@dataclass(frozen=True, kw_only=True)
class RhythmOptions:
    """The rhythm asked for. None: what a problem or run says, else each sum before the next step."""

    sync_delay: Annotated[
        int | None,
        typer.Option(
            "--sync-delay",
            min=0,
            max=1,
            metavar="N",
            help="1: sum a step's gradients while the next step computes, and apply them after it (changes "
            "training; --parallel data or hybrid).",
        ),
    ] = None
    undelayed_steps: Annotated[
        int | None,
        typer.Option(
            "--undelayed-steps",
            min=0,
            metavar="N",
            help="With --sync-delay 1: make the first N steps without the delay.",
        ),
    ] = None
    staleness: Annotated[
        str | None,
        typer.Option(
            "--staleness",
            metavar="N|async",
            help="Push gradients to one device, which holds weights and optimizer and applies them as they "
            "come, and let each device run up to N steps ahead of the slowest, or any number: async (changes "
            "training; --parallel data).",
        ),
    ] = None
    local_steps: Annotated[
        str | None,
        typer.Option(
            "--local-steps",
            metavar="H|auto",
            help="Have each device make H steps by itself, then average weights: a round, counted as one of "
            "the run's steps. One number for all, one for each owner (20,5,5), or auto: in proportion to "
            "speed (changes training).",
        ),
    ] = None
    owners: Annotated[
        str | None,
        typer.Option(
            "--owners",
            metavar="NODES",
            help="With --local-steps: have each owner train on data of its own, which never leaves its "
            "nodes: a,b,c+d (c and d are one owner's), or all: each node is an owner (changes training).",
        ),
    ] = None
    prox_mu: Annotated[
        float | None,
        typer.Option(
            "--prox-mu",
            metavar="MU",
            help="With --local-steps: hold local weights near the round's first ones, by FedProx's proximal "
            "term times MU (changes training).",
        ),
    ] = None
    outer_lr: Annotated[
        float | None,
        typer.Option(
            "--outer-lr",
            metavar="LR",
            help="With --local-steps: treat what a round's average changes as a gradient, and step along it "
            "with Nesterov momentum, as DiLoCo does; the learning rate of that step (0.7 with "
            "--outer-momentum; else 1, the average; changes training).",
        ),
    ] = None
    outer_momentum: Annotated[
        float | None,
        typer.Option(
            "--outer-momentum",
            metavar="M",
            help="With --local-steps: the Nesterov momentum of that step, at least 0 and below 1 (0.9 with "
            "--outer-lr; else 0; changes training).",
        ),
    ] = None
    clients_per_round: Annotated[
        int | None,
        typer.Option(
            "--clients-per-round",
            min=1,
            metavar="K",
            help="With --owners: have K of them, drawn by the seed, take part in each round (changes "
            "training).",
        ),
    ] = None
    drop_stragglers: Annotated[
        bool,
        typer.Option(
            "--drop-stragglers",
            help="With --owners: leave out the work of those that make fewer local steps than asked; "
            "default: it counts, by its samples (changes training).",
        ),
    ] = False
    round_deadline: Annotated[
        float | None,
        typer.Option(
            "--round-deadline",
            metavar="SECONDS",
            help="With --owners: end an owner's part of a round with the local step in which that time is up "
            "(changes training).",
        ),
    ] = None

    def make_rhythm(self) -> Rhythm | None:
        """The rhythm as typed; None where nothing was.

        Raises:
            InputError: options that contradict each other, or a value that can't be.
        """
        from skyctl.records.rhythm import Rhythm

        if self.undelayed_steps and not self.sync_delay:
            raise InputError(
                "--undelayed-steps goes with --sync-delay 1",
                hint="add --sync-delay 1, or leave --undelayed-steps out",
            )
        stale = None if self.staleness is None else parse_staleness(self.staleness)
        if stale is not None and not stale.is_synchronous:
            others = {"--sync-delay": bool(self.sync_delay), "--local-steps": self.local_steps is not None}
            for name, is_given in others.items():
                if is_given:
                    raise InputError(
                        f"--staleness and {name} contradict each other: with staleness nothing is summed",
                        hint=f"leave --staleness or {name} out",
                    )
        if self.local_steps is not None:
            return self._make_rounds()
        for name, given in self.given_rounds().items():
            if given is not None:
                raise InputError(
                    f"{name} goes with --local-steps", hint=f"add --local-steps 10, or leave {name} out"
                )
        if self.sync_delay:
            return Rhythm(delay=1, undelayed_steps=self.undelayed_steps or 0)
        return Rhythm() if stale is None and self.sync_delay is not None else stale

    def given_rounds(self) -> dict[str, object]:
        """By option of rounds, what was typed; None where nothing was."""
        return {
            "--local-steps": self.local_steps,
            "--owners": self.owners,
            "--prox-mu": self.prox_mu,
            "--outer-lr": self.outer_lr,
            "--outer-momentum": self.outer_momentum,
            "--clients-per-round": self.clients_per_round,
            "--drop-stragglers": True if self.drop_stragglers else None,
            "--round-deadline": self.round_deadline,
        }

    def make_owners(self) -> OwnersChoice | None:
        """The owners' nodes as typed; None where there are none.

        Raises:
            InputError: an owner without a node, or a node that is named twice.
        """
        if self.owners is None:
            return None
        if self.owners.strip() == ALL_OWNERS:
            return ALL_OWNERS
        owners = tuple(tuple(name.strip() for name in text.split("+")) for text in self.owners.split(","))
        named = [name for owner in owners for name in owner]
        if not all(named):
            raise InputError(
                f"--owners {self.owners!r}: an owner has no node",
                hint="name each owner's nodes, as in --owners a,b,c+d, or all",
            )
        if twice := next((name for name in named if named.count(name) > 1), None):
            raise InputError(
                f"--owners names {twice} twice", hint="a node has one owner, as in --owners a,b,c+d"
            )
        return owners

    def _make_rounds(self) -> Rhythm:
        from skyctl.records.rhythm import Rhythm

        if self.sync_delay:
            raise InputError(
                "--sync-delay sums gradients a step later, and with --local-steps none are summed",
                hint="leave --sync-delay or --local-steps out",
            )
        for name, given in (
            ("--clients-per-round", self.clients_per_round is not None),
            ("--drop-stragglers", self.drop_stragglers),
            ("--round-deadline", self.round_deadline is not None),
        ):
            if given and self.owners is None:
                raise InputError(
                    f"{name} goes with --owners",
                    hint=f"add --owners all (each node is an owner), or leave {name} out",
                )
        if self.prox_mu is not None and not 0 <= self.prox_mu < math.inf:
            raise InputError(
                f"--prox-mu must be a number of at least 0, not {self.prox_mu}",
                hint="--prox-mu 0.1; 0 is without the term",
            )
        outer_lr, outer_momentum = self._outer_step()
        if self.round_deadline is not None and not 0 < self.round_deadline < math.inf:
            raise InputError(
                f"--round-deadline must be a positive number of seconds, not {self.round_deadline}",
                hint="--round-deadline 60; without a deadline leave it out",
            )
        return Rhythm(
            local_steps=_parse_local_steps(self.local_steps or "", owners=self.owners is not None),
            prox_mu=self.prox_mu or 0.0,
            outer_lr=outer_lr,
            outer_momentum=outer_momentum,
            clients_per_round=self.clients_per_round,
            drop_stragglers=self.drop_stragglers,
            round_deadline_s=self.round_deadline,
        )

    def _outer_step(self) -> tuple[float, float]:
        """Learning rate and momentum of the outer step; without one those that leave the average as it is."""
        if self.outer_lr is None and self.outer_momentum is None:
            return 1.0, 0.0
        lr = OUTER_LR if self.outer_lr is None else self.outer_lr
        momentum = OUTER_MOMENTUM if self.outer_momentum is None else self.outer_momentum
        if not 0 < lr < math.inf:
            raise InputError(
                f"--outer-lr must be a positive number, not {lr}",
                hint="--outer-lr 0.7; 1 with --outer-momentum 0 is the average itself",
            )
        if not 0 <= momentum < 1:
            raise InputError(
                f"--outer-momentum must be at least 0 and below 1, not {momentum}",
                hint="--outer-momentum 0.9; 0 is without momentum",
            )
        return lr, momentum


def _parse_local_steps(text: str, *, owners: bool) -> int | tuple[int, ...] | Literal["auto"]:
    if text.strip() == "auto":
        return "auto"
    parts = [part.strip() for part in text.split(",")]
    if not all(re.fullmatch("[0-9]{1,9}", part) and int(part) for part in parts):
        raise InputError(
            f"--local-steps must be a whole number of at least 1, or auto, not {text!r}",
            hint="--local-steps 10; with --owners also one number for each: 20,5,5",
        )
    if len(parts) == 1:
        return int(parts[0])
    if not owners:
        raise InputError(
            "--local-steps with a number for each owner goes with --owners",
            hint="add --owners all (each node is an owner), or give one number",
        )
    return tuple(map(int, parts))


def parse_staleness(text: str) -> Rhythm:
    """The rhythm of ``--staleness N|async``. Raises InputError for anything else."""
    from skyctl.records.rhythm import Rhythm

    if text == "async":
        return Rhythm(staleness=None)
    if not (text.isascii() and text.isdecimal() and len(text) <= MOST_DIGITS):
        raise InputError(
            f"--staleness {text!r} is neither a number of steps nor async",
            hint="--staleness 3: at most three steps ahead of the slowest; async: any number",
        )
    return Rhythm(staleness=int(text))
