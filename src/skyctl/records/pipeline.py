"""A pipeline: a row of stages, each on one device."""

from __future__ import annotations

from pydantic import Field, model_validator

from skyctl.records.base import Count, Index, Name, Record, Seq


class PlacedStage(Record):
    """Layers [start, stop) on one device, and how many microbatches it keeps in flight.

    ``recompute``: keeps only its layers' inputs and computes the rest again in the backward.
    ``weights_behind``: under ``zero-bubble``, by how many microbatches weight gradients follow the backward.
    """

    start: Index
    stop: Count
    device: Name
    in_flight: Count
    recompute: bool = False
    weights_behind: Index = 0

    @model_validator(mode="after")
    def _not_empty(self) -> PlacedStage:
        if self.stop <= self.start:
            raise ValueError(f"a stage's range [{self.start}, {self.stop}) is empty")
        return self


class Pipeline(Record):
    """A row of stages over all layers, and how many of a step's microbatches go through it.

    ``local_steps``: steps that it makes by itself in a round; None: gradients are summed in every step.
    """

    stages: Seq[PlacedStage] = Field(min_length=1)
    microbatches: Count
    local_steps: Count | None = None

    @model_validator(mode="after")
    def _in_order(self) -> Pipeline:
        at = 0
        for stage in self.stages:
            if stage.start != at:
                raise ValueError(f"stages must follow each other: one starts at {stage.start}, expected {at}")
            at = stage.stop
        return self
