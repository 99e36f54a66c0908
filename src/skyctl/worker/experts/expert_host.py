"""The experts that a host holds, and what it does for the ranks that use them. Knows nothing of sockets.

Requests of one rank are done in their order. The host keeps the sum of each rank's gradients by itself, and
adds these sums in the ranks' order, so an update has the same bits whenever messages arrive. It updates the
experts of some layers once all ranks that hold these layers have ended their step. An expert that changes
its host does so with an update, too: the old one keeps its state for a step, and the new one lets ranks wait.
"""

from __future__ import annotations

import random
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from skyctl.agent.frames import FrameError
from skyctl.checkpoint.node.shards import check_stamp
from skyctl.device.accelerator import seed_function
from skyctl.device.device_timer import DeviceTimer
from skyctl.errors import RecordError, SkyctlError, WorkloadError
from skyctl.experts.host_messages import (
    Adopt,
    Adopted,
    Backward,
    BeginStep,
    EndStep,
    ExpertState,
    Forward,
    HandOver,
    HostAnswer,
    NotDone,
    Result,
    StateWanted,
    StepEnded,
    TrunkRequest,
)
from skyctl.experts.layer import expert_answer
from skyctl.worker.experts.held_experts import ExpertKey, HeldExpert, LayerExperts, expert_stamp
from skyctl.workload.mixed_precision import master_of
from skyctl.workload.recipe import Recipe
from skyctl.workload.workload import Workload

Send = Callable[[int, HostAnswer, Sequence[Tensor]], None]


@dataclass
class _Trunk:
    """A rank that the host computes for.

    Attributes:
        calls: its forwards whose backward may come: expert, tokens, outputs.
        gradients: by expert, the sum of its gradients in this step, by trained parameter.
        ending: it has ended its step, and waits for the update.
        behind: its requests that came after that, or after one for an expert that is still to come.
        done: so many steps it has ended.
    """

    layers: frozenset[int]
    calls: dict[int, tuple[ExpertKey, Tensor, Tensor]] = field(default_factory=dict)
    gradients: dict[ExpertKey, list[Tensor | None]] = field(default_factory=dict)
    ending: EndStep | None = None
    behind: deque[tuple[TrunkRequest, list[Tensor]]] = field(default_factory=deque)
    done: int = 0


class ExpertHost:
    """All that a host does; for one thread.

    Args:
        trunks: by rank, the layers with experts that it holds; all are waited for until they leave.
        steps: of the whole run.
        send: sends an answer to a rank; it may be gone.
        refuse: told of a rank that has sent what nobody would send, and why; the host leaves it.
    """

    def __init__(
        self,
        workload: Workload,
        recipe: Recipe,
        steps: int,
        device: torch.device,
        timer: DeviceTimer,
        trunks: Mapping[int, Sequence[int]],
        send: Send,
        refuse: Callable[[int, str], None],
    ) -> None:
        self._workload, self._recipe, self._steps, self._device = workload, recipe, steps, device
        self._timer, self._send, self._refuse = timer, send, refuse
        self._trunks = {rank: _Trunk(frozenset(trunks[rank])) for rank in sorted(trunks)}
        self._held: dict[ExpertKey, HeldExpert] = {}
        self._leaving: set[ExpertKey] = set()
        self._left: dict[ExpertKey, HeldExpert] = {}
        self._coming: dict[ExpertKey, tuple[int, int]] = {}  # the rank that sends it, and its epoch
        self._built: tuple[int, LayerExperts] | None = None
        self._seeders: list[Callable[[int], object]] = [torch.default_generator.manual_seed, random.seed]
        if device.type != "cpu":
            self._seeders.append(seed_function(device))

    def handle(self, rank: int, request: TrunkRequest, tensors: list[Tensor]) -> None:
        """Does what a rank asks for, now or after what it waits for: an update, or an expert."""
        trunk = self._trunks.get(rank)
        if trunk is None:
            return
        if trunk.ending is not None or trunk.behind or self._is_coming(rank, request):
            trunk.behind.append((request, tensors))
            return
        try:
            if isinstance(request, EndStep):
                _expect(tensors, 0)
                trunk.ending = request
            else:
                self._do(rank, trunk, request, tensors)
        except FrameError as exc:
            self._refuse(rank, str(exc))
            self.leave(rank)
            return
        if trunk.ending is not None:
            self._update_with(rank)
        elif isinstance(request, Adopt | BeginStep):
            self._go_on()

    def leave(self, rank: int) -> None:
        """A rank is gone: it loses what it has asked for, and is waited for no more."""
        if self._trunks.pop(rank, None) is not None:
            self._call_off(rank)
            for other in list(self._trunks):
                self._update_with(other)
            self._go_on()

    def _is_coming(self, rank: int, request: TrunkRequest) -> bool:
        """Whether it asks for an expert that another rank is about to send."""
        if not isinstance(request, Forward | StateWanted):
            return False
        sender, _ = self._coming.get((request.layer, request.expert), (rank, 0))
        return sender != rank

    def _call_off(self, rank: int) -> None:
        """Waits no longer for experts that the rank has not sent by now."""
        self._coming = {key: coming for key, coming in self._coming.items() if coming[0] != rank}

    def _go_on(self) -> None:
        """Ranks that wait for an expert try again."""
        for rank, trunk in list(self._trunks.items()):
            if trunk.ending is None and trunk.behind:
                waiting, trunk.behind = trunk.behind, deque()
                for request, tensors in waiting:
                    self.handle(rank, request, tensors)

    def _do(self, rank: int, trunk: _Trunk, request: TrunkRequest, tensors: list[Tensor]) -> None:
        if isinstance(request, BeginStep):
            _expect(tensors, 0)
            trunk.calls.clear()
            trunk.gradients.clear()
            self._built = None
            self._call_off(rank)
            return
        if isinstance(request, HandOver):
            _expect(tensors, 0)
            self._hand_over(rank, self._key(trunk, request), request)
            return
        answer: HostAnswer
        out: Sequence[Tensor] = ()
        try:
            if isinstance(request, Forward):
                answer, out = self._forward(trunk, request, tensors)
            elif isinstance(request, Backward):
                answer, out = self._backward(trunk, request, tensors)
            elif isinstance(request, StateWanted):
                answer, out = self._state(trunk, request)
            else:
                assert isinstance(request, Adopt)
                answer = self._adopt(trunk, request, tensors)
        except (FrameError, MemoryError, torch.OutOfMemoryError):
            raise
        except SkyctlError as exc:
            answer = NotDone(request.call, exc.message[:4000], by_expert=isinstance(exc, WorkloadError))
        except Exception as exc:  # noqa: BLE001 — the user's code may raise anything
            layer = getattr(request, "layer", None)
            where = "an expert" if layer is None else f"an expert of layer {layer}"
            reason = f"{where}: {type(exc).__name__}: {exc}"[:3000]
            answer = NotDone(request.call, reason, by_expert=True)
        self._send(rank, answer, out)

    def _forward(
        self, trunk: _Trunk, request: Forward, tensors: list[Tensor]
    ) -> tuple[HostAnswer, Sequence[Tensor]]:
        (tokens,) = _expect(tensors, 1)
        key = self._key(trunk, request)
        held = self._held.get(key)
        if held is None:
            return NotDone(request.call, f"it does not hold expert {key[1]} of layer {key[0]}"), ()
        if tokens.dim() != 2 or tokens.shape[1] != held.features or not tokens.is_floating_point():
            shape, kind = list(tokens.shape), str(tokens.dtype).removeprefix("torch.")
            raise FrameError(f"it sent tokens {kind}{shape}, the expert takes [tokens, {held.features}]")
        for seeder in self._seeders:
            seeder(request.seed)
        held.module.train(request.trains)
        given = tokens.to(self._device).requires_grad_(request.trains)
        with torch.set_grad_enabled(request.trains):
            output = self._timer.run(lambda: expert_answer(held.module, key[1], given)).result
        if request.trains:
            trunk.calls[request.call] = (key, given, output)
        return Result(request.call), (output,)

    def _backward(
        self, trunk: _Trunk, request: Backward, tensors: list[Tensor]
    ) -> tuple[HostAnswer, Sequence[Tensor]]:
        (gradient,) = _expect(tensors, 1)
        call = trunk.calls.pop(request.of, None)
        if call is None or call[0] not in self._held:
            return NotDone(request.call, f"it has not made the forward {request.of}"), ()
        key, tokens, output = call
        if (gradient.shape, gradient.dtype) != (output.shape, output.dtype):
            raise FrameError(f"it sent a gradient {list(gradient.shape)} of outputs {list(output.shape)}")
        trained = self._held[key].trained
        gradient = gradient.to(self._device)
        of_tokens, *found = self._timer.run(
            lambda: torch.autograd.grad(output, [tokens, *trained], gradient, allow_unused=True)
        ).result
        sums = trunk.gradients.setdefault(key, [None] * len(trained))
        for place, (parameter, part) in enumerate(zip(trained, found, strict=True)):
            if part is not None:
                wide, before = part.to(master_of(parameter).dtype), sums[place]
                sums[place] = wide if before is None else before + wide
        return Result(request.call), (torch.zeros_like(tokens) if of_tokens is None else of_tokens,)

    def _hand_over(self, rank: int, key: ExpertKey, request: HandOver) -> None:
        if request.arrives == (key in self._held):
            held = "holds" if request.arrives else "does not hold"
            raise FrameError(f"it hands over expert {key[1]} of layer {key[0]}, which this host {held}")
        if request.arrives:
            self._coming[key] = rank, request.epoch
        else:
            self._leaving.add(key)

    def _state(self, trunk: _Trunk, request: StateWanted) -> tuple[HostAnswer, Sequence[Tensor]]:
        key = self._key(trunk, request)
        held = self._held.get(key) or self._left.get(key)
        if held is None:
            return NotDone(request.call, f"it does not hold expert {key[1]} of layer {key[0]}"), ()
        stamp = expert_stamp(self._workload, key, trunk.done)
        tensors, metadata = held.state.collect(0, stamp)
        return ExpertState(request.call, trunk.done, tuple(tensors), metadata), tuple(tensors.values())

    def _adopt(self, trunk: _Trunk, request: Adopt, tensors: list[Tensor]) -> HostAnswer:
        key = self._key(trunk, request)
        _expect(tensors, len(request.names))
        stamp = expert_stamp(self._workload, key, request.step)
        source = f"the state of expert {key[1]} of layer {key[0]}"
        before = self._held.pop(key, None)
        module, features = (before.module, before.features) if before is not None else self._build(key)
        held = HeldExpert(
            module,
            self._workload,
            self._recipe,
            self._steps,
            features=features,
            epoch=request.epoch,
            done=request.done,
        )
        try:
            check_stamp(source, request.metadata, stamp)
            given = dict(zip(request.names, tensors, strict=True))
            with torch.no_grad():
                held.state.restore(0, given, request.metadata, stamp, source)
        except RecordError as exc:
            raise FrameError(exc.message) from exc
        self._held[key] = held
        self._coming.pop(key, None)
        self._left.pop(key, None)
        trunk.done = request.done
        for other in self._trunks.values():  # what was computed with the state before counts nothing
            other.gradients.pop(key, None)
            other.calls = {call: made for call, made in other.calls.items() if made[0] != key}
        return Adopted(request.call)

    def _build(self, key: ExpertKey) -> tuple[nn.Module, int]:
        """An expert as its layer is built with it; the others are kept until a step begins."""
        layer, number = key
        if self._built is None or self._built[0] != layer:
            self._built = (layer, LayerExperts.of(self._workload.build(layer, layer + 1, self._device)[0]))
        found = self._built[1]
        if number >= len(found.features):
            raise FrameError(f"layer {layer} has {len(found.features)} experts, none of number {number}")
        return found.alone(number), found.features[number]

    def _key(self, trunk: _Trunk, request: Forward | StateWanted | HandOver | Adopt) -> ExpertKey:
        if request.layer not in trunk.layers:
            raise FrameError(f"it does not hold layer {request.layer}")
        return request.layer, request.expert

    def _update_with(self, rank: int) -> None:
        """Updates the experts of the rank's layers, if all that hold any of these, too, have ended."""
        if rank not in self._trunks:
            return
        group, layers = {rank}, self._trunks[rank].layers
        while more := {r for r, t in self._trunks.items() if t.layers & layers} - group:
            group |= more
            layers = layers.union(*(self._trunks[r].layers for r in more))
        trunks = [(r, self._trunks[r]) for r in sorted(group)]
        if any(trunk.ending is None for _, trunk in trunks):
            return
        for key, held in self._held.items():
            if key[0] in layers:
                self._timer.run(
                    lambda key=key, held=held: held.update(  # type: ignore[misc]
                        [trunk.gradients[key] for _, trunk in trunks if key in trunk.gradients]
                    )
                )
        self._left = {key: held for key, held in self._left.items() if key[0] not in layers}
        for key in [key for key in self._leaving if key[0] in layers]:
            self._leaving.remove(key)
            self._left[key] = self._held.pop(key)
        now_held = (
            *((*key, held.epoch) for key, held in sorted(self._held.items())),
            *((*key, epoch) for key, (_, epoch) in sorted(self._coming.items())),
        )
        waiting: dict[int, deque[tuple[TrunkRequest, list[Tensor]]]] = defaultdict(deque)
        for r, trunk in trunks:
            assert trunk.ending is not None
            ended = trunk.ending
            fresh = replace(trunk, calls={}, gradients={}, ending=None, behind=deque(), done=ended.step + 1)
            self._trunks[r], waiting[r] = fresh, trunk.behind
            self._send(r, StepEnded(ended.call, now_held), ())
        for r, requests in waiting.items():
            for request, tensors in requests:
                self.handle(r, request, tensors)


def _expect(tensors: list[Tensor], count: int) -> list[Tensor]:
    if len(tensors) != count:
        raise FrameError(f"it sent {len(tensors)} tensors where {count} are expected")
    return tensors
