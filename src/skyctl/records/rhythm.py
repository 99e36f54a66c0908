"""The rhythm of a problem: when what several pipelines sum takes effect."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from skyctl.records.base import Count, Index, Positive, Record, Seq

AUTO_STEPS: Literal["auto"] = "auto"
"""Local steps in proportion to speed, so many that averages take little of a round."""


class Rhythm(Record):
    """When what several pipelines sum takes effect; by default each sum before the next step.

    A delay, local steps and a staleness exclude each other.

    Attributes:
        delay: 1: a step's gradients are summed while the next step computes, and applied after it (delayed
            parameter updates, DeDLOC, arXiv 2106.10207).
        undelayed_steps: how many steps at the start of the run are made without that delay.
        local_steps: each pipeline makes so many steps by itself, then their weights are averaged by samples:
            a *round*, which is what the run counts as a step (local SGD, arXiv 1805.09767; FedAvg, arXiv
            1602.05629). One number for all, one for each owner in their order, or ``auto``: in proportion to
            speed. None: gradients are summed in every step.
        prox_mu: µ of the term µ/2 · ‖w − w₀‖² in every local loss, w₀ being the weights at the round's start
            (FedProx, arXiv 1812.06127).
        outer_lr, outer_momentum: learning rate and Nesterov momentum of the outer optimizer, whose gradient
            is what a round's average changes (DiLoCo, arXiv 2311.08105). 1 and 0: the average itself.
        clients_per_round: so many owners, drawn anew, take part in each round; None: all.
        drop_stragglers: the work of owners that make fewer local steps than asked is not averaged.
        round_deadline_s: an owner ends its part of a round with the local step in which so many seconds of
            it have passed.
        staleness: other than 0: one device holds weights and optimizer and applies each pipeline's gradients
            as they come, and a pipeline may be that many steps ahead of the slowest (stale synchronous
            parallel, Ho et al., NIPS 2013); None: any number.
    """

    delay: Literal[0, 1] = 0
    undelayed_steps: Index = 0
    local_steps: Count | Annotated[Seq[Count], Field(min_length=1)] | Literal["auto"] | None = None
    prox_mu: float = Field(default=0.0, ge=0)
    outer_lr: float = Field(default=1.0, gt=0)
    outer_momentum: float = Field(default=0.0, ge=0, lt=1)
    clients_per_round: Count | None = None
    drop_stragglers: bool = False
    round_deadline_s: Positive | None = None
    staleness: Index | None = 0

    @property
    def is_synchronous(self) -> bool:
        """Whether each step's sum takes effect before the next step begins."""
        return self == Rhythm()

    @property
    def is_rounds(self) -> bool:
        """Whether weights are averaged once a round, and not gradients summed every step."""
        return self.local_steps is not None

    @property
    def has_outer_step(self) -> bool:
        """Whether a round's average is not yet the weights: an outer optimizer makes them of it."""
        return self.outer_lr != 1 or self.outer_momentum > 0

    @property
    def unit(self) -> Literal["step", "round"]:
        """People's word for the unit that the run counts; files say step for both."""
        return "round" if self.is_rounds else "step"

    @property
    def is_stale(self) -> bool:
        """Whether a parameter server takes the place of sums."""
        return self.staleness != 0

    @model_validator(mode="after")
    def _means_something(self) -> Rhythm:
        if self.undelayed_steps and not self.delay:
            raise ValueError("undelayed_steps is of a rhythm whose delay is 1")
        of_rounds = {
            "prox_mu": self.prox_mu > 0,
            "outer_lr": self.outer_lr != 1,
            "outer_momentum": self.outer_momentum > 0,
            "clients_per_round": self.clients_per_round is not None,
            "drop_stragglers": self.drop_stragglers,
            "round_deadline_s": self.round_deadline_s is not None,
        }
        given = [name for name, value in of_rounds.items() if value]
        if given and not self.is_rounds:
            raise ValueError(f"{given[0]} is of a rhythm with local_steps")
        if self.delay and self.is_rounds:
            raise ValueError("a rhythm with local_steps sums no gradients, so it has no delay")
        if self.is_stale and (self.delay or self.is_rounds):
            other = "delay" if self.delay else "local_steps"
            raise ValueError(f"with staleness other than 0 nothing is summed, so it has no {other}")
        return self
