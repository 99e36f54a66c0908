"""Sums the gradients of pipelines side by side, layer by layer while the last backward still runs.

Each pipeline's gradients are of its own microbatches, weighted by their samples' share of the whole batch, so
their sum is the batch's gradient; nothing is averaged. The sums go over the plan's routes (``route_sum``),
the last layers first. A layer is summed as soon as the last microbatch's backward has passed it: gradients
are accumulated in the order of the layers, so once an earlier layer's is, no later layer's changes any more.

Stages of one pipeline that hold copies of a parameter which several layers share (tied embeddings) sum its
gradients in the same way, after their last backwards: a group with ``tie``, of those parameters alone.

A gradient that is None stays None only where every holder has none. Batch norms train with the figures of
their own microbatches; their running figures are averaged before they are saved or validated with.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

from skyctl.errors import WorkloadError
from skyctl.transport.peer_connection import FIRST_TAG
from skyctl.worker.rank_events import SumSizes
from skyctl.worker.route_sum import RoutePlace, RouteSum, SumRound
from skyctl.worker.stage_io import Neighbour
from skyctl.worker.sum_layout import SumLayout, make_layout
from skyctl.worker.sum_messages import FIGURES, GRADIENTS
from skyctl.workload.mixed_precision import master_of
from skyctl.workload.optimizers import weight_name

Tensor = torch.Tensor
SYNC_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
"""By a plan's ``sync.format``, what chunks are sent as; they are added in float32."""
PIPELINE_HINT = "a pipeline (skyctl plan … --parallel pipeline) trains it as it is"


class SyncReport(NamedTuple):
    """One step's sum, as one rank saw it.

    Attributes:
        idle_s: waiting for other holders to end their backwards, from this rank's last one on.
        transfer_s: from then until the sum was there.
        is_last: some holder was told that the run ends with this step.
    """

    idle_s: float
    transfer_s: float
    is_last: bool

    @property
    def sync_s(self) -> float:
        """From this rank's last backward to the end of the sum."""
        return self.idle_s + self.transfer_s


@dataclass(frozen=True)
class _Entry:
    """A parameter that is trained; ``layer``: its first, counted in the stage."""

    layer: int
    master: nn.Parameter


class GradientSync:
    """One stage's part: ``begin`` before the step's last backward, ``finish`` after it.

    Args:
        layers: the stage's, [start, start + len(layers)) of the model.
        groups: ``sync.groups`` of the rank's payload: those of its layers, or of parameters it shares.
        peers: the connections to every rank on their routes, by rank.
        format: one of ``SYNC_DTYPES``.
        chunk_bytes: the most bytes of gradients in a message, in that format.
        share: of the step's microbatches that this pipeline computes.
        tied: by ``tie`` of a group, the layers that share them, the parameters; their gradients are summed.

    Raises:
        WorkloadError: a layer's gradients are sparse or complex, and can't be summed.
    """

    def __init__(
        self,
        layers: Sequence[nn.Module],
        start: int,
        groups: Sequence[Mapping[str, Any]],
        peers: Mapping[int, Neighbour],
        *,
        format: str = "float32",  # noqa: A002 — as the plan calls it
        chunk_bytes: int = 262144,
        share: float,
        tied: Mapping[tuple[int, ...], Sequence[nn.Parameter]] | None = None,
    ) -> None:
        entries: list[_Entry] = []
        hooked: list[tuple[int, nn.Parameter]] = []
        if any("tie" not in values for values in groups):
            check_summable(layers)
            entries, hooked = _find_entries(layers), _parameters_of_one_layer(layers)
        self._travel_s = 2 * max((peer.latency_s for peer in peers.values()), default=0.0)
        self._watching, self._reached, self._layers = False, 0, len(layers)
        connections = {rank: peer.connection for rank, peer in peers.items()}
        self._groups: list[_GroupSync] = []
        tag = FIRST_TAG
        for values in groups:
            routes = [RoutePlace.from_payload(route) for route in values["routes"]]
            if "tie" in values:  # ranks have different ones of them, so their tags follow from their numbers
                shared = [_Entry(0, master_of(p)) for p in (tied or {})[tuple(values["tie"])]]
                sums = RouteSum(
                    int(values["number"]), routes, connections, FIRST_TAG + 4 * int(values["number"])
                )
                dtype = SYNC_DTYPES[format]
                self._groups.append(_GroupSync(sums, [shared], 0, [], dtype, chunk_bytes, share))
                continue
            first, stop = int(values["start"]) - start, int(values["stop"]) - start
            self._groups.append(
                _GroupSync(
                    RouteSum(
                        int(values["number"]),
                        routes,
                        connections,
                        tag,
                        RoutePlace.from_payload(values["agreement"]) if "agreement" in values else None,
                    ),
                    [[e for e in entries if e.layer == layer] for layer in range(first, stop)],
                    first,
                    [_RunningFigures(module) for layer in layers[first:stop] for module in _norms(layer)],
                    SYNC_DTYPES[format],
                    chunk_bytes,
                    share,
                )
            )
            tag += 2 + 2 * len(routes)
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(self._make_hook(layer))  # type: ignore[no-untyped-call]
            for layer, parameter in hooked
        ]

    @property
    def sizes(self) -> SumSizes:
        """What a helper has to know of the sums of the first group."""
        return self._groups[0].sizes

    def begin(self, step: int, *, early: bool = True) -> None:
        """The step's last backward is next.

        Args:
            early: layers are summed as soon as it has passed them; False: all of them after it.
        """
        for group in self._groups:
            group.begin(step)
        self._watching, self._reached = early, self._layers

    def finish(self, *, is_last: bool) -> SyncReport:
        """The last backward is over: returns once all gradients are the sums of all holders'.

        Args:
            is_last: whether this pipeline was told that the run ends with this step.

        Raises:
            PeerLostError: a holder is gone.
            RunError: a holder has sent something else than what was expected.
            WorkloadError: a gradient is sparse.
        """
        ended = time.perf_counter()
        self._watching = False
        for group in self._groups:
            group.add_ready(0)
        agreed = [group.agree(is_last) for group in self._groups]
        announced = time.perf_counter()
        for group in self._groups:
            group.finish()
        waited_s = announced - ended
        travelling_s = min(waited_s, self._travel_s)
        transfer_s = time.perf_counter() - announced + travelling_s
        return SyncReport(waited_s - travelling_s, transfer_s, any(agreed))

    def average_figures(self, step: int) -> None:
        """Gives every holder the mean of all holders' running figures, weighted by microbatches.

        How many batches a norm has seen becomes the number that all have seen together.
        """
        for group in self._groups:
            group.average_figures(step)

    def close(self) -> None:
        """Ends the threads; the connections must be closed before."""
        self._watching = False
        for hook in self._hooks:
            hook.remove()
        for group in self._groups:
            group.close()

    def _make_hook(self, layer: int) -> Callable[[Tensor], None]:
        def hook(_parameter: Tensor) -> None:
            if self._watching and layer + 1 < self._reached:
                self._reached = layer + 1
                for group in self._groups:
                    group.add_ready(layer + 1)

        return hook


class _GroupSync:
    """The sums of one group: whose gradients, in which order, and what becomes of those that are None."""

    def __init__(
        self,
        sums: RouteSum,
        layers: Sequence[Sequence[_Entry]],
        first: int,
        figures: Sequence[_RunningFigures],
        dtype: torch.dtype,
        chunk_bytes: int,
        share: float,
    ) -> None:
        self._sums, self._dtype, self._share, self._figures = sums, dtype, share, list(figures)
        self._first = first
        self._layers = list(reversed(layers))  # in the order in which they become ready
        self._shares = [route.share for route in sums.routes]
        numels = [[entry.master.numel() for entry in layer] for layer in self._layers]
        self._layout = make_layout(numels, self._shares, max(1, chunk_bytes // dtype.itemsize))
        self._figures_layout: SumLayout | None = None
        if self._figures:
            found = [figure.numel for figure in self._figures]
            self._figures_layout = make_layout([found], self._shares, max(1, chunk_bytes // 4))
        self._round: SumRound | None = None
        self._taken: list[tuple[_Entry, Tensor, bool]] = []
        self._ready_layers = 0
        self._open: list[Tensor] = []
        self._present = b""

    @property
    def sizes(self) -> SumSizes:
        """What a helper has to know of them."""
        numels = [sum(entry.master.numel() for entry in layer) for layer in self._layers]
        figures = sum(figure.numel for figure in self._figures)
        return SumSizes(tuple(numels), sum(map(len, self._layers)), figures)

    def begin(self, step: int) -> None:
        self._round = SumRound(self._layout, step, kind=GRADIENTS, dtype=self._dtype)
        self._taken, self._open, self._ready_layers = [], [], 0
        self._sums.begin(self._round, 1 + sum(map(len, self._layers)))

    def add_ready(self, layer: int) -> None:
        """The gradients of the stage's layers from that one on won't change any more."""
        assert self._round is not None
        ready = min(len(self._layers), len(self._layers) - (layer - self._first))
        while self._ready_layers < ready:
            for entry in self._layers[self._ready_layers]:
                self._take(entry)
            while self._is_bucket_full():
                self._round.add_bucket(self._open)
                self._open = []
            self._ready_layers += 1

    def agree(self, is_last: bool) -> bool:
        """Whether any holder ends with this step; which gradients any holder has is kept for ``finish``."""
        own = bytes([is_last, *(had for _, _, had in self._taken)])
        agreed = self._sums.agree(own)
        self._present = agreed[1:]
        return bool(agreed[0])

    def finish(self) -> None:
        """Waits for the sum, and puts it where it is not in place already."""
        assert self._round is not None
        self._round.wait()
        for (entry, flat, had), present in zip(self._taken, self._present, strict=True):
            gradient = entry.master.grad
            if not had and present:
                entry.master.grad = flat.view(entry.master.shape)
            elif had and gradient is not None and not gradient.is_contiguous():
                gradient.copy_(flat.view(gradient.shape))
        self._taken = []

    def average_figures(self, step: int) -> None:
        """As ``GradientSync.average_figures``."""
        if self._figures_layout is None:
            return
        round_ = SumRound(self._figures_layout, step, kind=FIGURES, dtype=torch.float32)
        values = [figure.weighted(self._share) for figure in self._figures]
        self._sums.begin(round_)
        round_.add_bucket(values)
        round_.wait()
        for figure, summed in zip(self._figures, values, strict=True):
            figure.set(summed)

    def close(self) -> None:
        self._sums.close()

    def _is_bucket_full(self) -> bool:
        assert self._round is not None
        bucket = self._round.ready_buckets
        ends = self._layout.last_layer_of
        return bucket < len(ends) and ends[bucket] == self._ready_layers

    def _take(self, entry: _Entry) -> None:
        """Takes a parameter's gradient as a flat tensor, in place where it is one; None as zeros."""
        master, gradient = entry.master, entry.master.grad
        if gradient is None:
            flat = torch.zeros(master.numel(), dtype=master.dtype, device=master.device)
        elif gradient.layout is not torch.strided:
            raise _sparse_error(f"the gradient of {weight_name(master) or 'a parameter'} is sparse")
        else:
            flat = gradient.detach().view(-1) if gradient.is_contiguous() else gradient.detach().reshape(-1)
        self._taken.append((entry, flat, gradient is not None))
        self._open.append(flat)


class _RunningFigures:
    """The running mean and variance of one norm, and how many batches it has seen."""

    def __init__(self, module: nn.Module) -> None:
        self._buffers = [b for b in (module.running_mean, module.running_var) if isinstance(b, Tensor)]
        count = module.num_batches_tracked
        self._count = count if isinstance(count, Tensor) else None
        self._counted = 0
        self.numel = sum(buffer.numel() for buffer in self._buffers) + 1
        self.mark()

    def mark(self) -> None:
        """Batches are counted from now on."""
        self._counted = 0 if self._count is None else int(self._count.item())

    def weighted(self, share: float) -> Tensor:
        """The figures times the share of the microbatches they are of, and the batches since ``mark``."""
        more = 0 if self._count is None else int(self._count.item()) - self._counted
        parts = [buffer.detach().float().cpu().reshape(-1) * share for buffer in self._buffers]
        return torch.cat([*parts, torch.tensor([float(more)])])

    def set(self, summed: Tensor) -> None:
        """Takes what all holders' figures sum to."""
        at = 0
        with torch.no_grad():
            for buffer in self._buffers:
                buffer.copy_(summed[at : at + buffer.numel()].view(buffer.shape))
                at += buffer.numel()
            if self._count is not None:
                self._count.fill_(self._counted + round(summed[at].item()))
        self.mark()


def _norms(layer: nn.Module) -> list[nn.Module]:
    """The layer's modules with running figures."""
    found = [m for m in layer.modules() if isinstance(m, nn.modules.batchnorm._NormBase)]
    return [module for module in found if isinstance(module.running_mean, Tensor)]


def _find_entries(layers: Sequence[nn.Module]) -> list[_Entry]:
    """What is trained, each parameter once: in its first layer."""
    seen: set[int] = set()
    entries = []
    for number, layer in enumerate(layers):
        for parameter in layer.parameters():
            if id(parameter) not in seen and parameter.requires_grad:
                seen.add(id(parameter))
                entries.append(_Entry(number, master_of(parameter)))
    return entries


def _parameters_of_one_layer(layers: Sequence[nn.Module]) -> list[tuple[int, nn.Parameter]]:
    """(layer, parameter) of what only one layer has: once its gradient is there, later layers are done."""
    users: dict[int, set[int]] = {}
    for number, layer in enumerate(layers):
        for parameter in layer.parameters():
            users.setdefault(id(parameter), set()).add(number)
    return [
        (number, parameter)
        for number, layer in enumerate(layers)
        for parameter in layer.parameters()
        if parameter.requires_grad and len(users[id(parameter)]) == 1
    ]


def check_summable(layers: Sequence[nn.Module]) -> None:
    """Raises WorkloadError where gradients of these layers will be sparse or complex, and can't be summed."""
    for layer in layers:
        kind = f"layer {type(layer).__name__}"
        for name, module in layer.named_modules():
            if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse:
                raise _sparse_error(f"{kind}{name and f': {name}'} is an embedding with sparse=True")
        for name, parameter in layer.named_parameters():
            if parameter.requires_grad and not parameter.is_floating_point():
                dtype = str(parameter.dtype).removeprefix("torch.")
                raise WorkloadError(
                    f"{kind}: {name} is {dtype}; gradients of several pipelines are summed as real numbers",
                    hint=PIPELINE_HINT,
                )


def _sparse_error(what: str) -> WorkloadError:
    return WorkloadError(
        f"{what}, and gradients of several pipelines can't be summed where they are sparse",
        hint=f"sparse=False makes it dense; {PIPELINE_HINT}",
    )
