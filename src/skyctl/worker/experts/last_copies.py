"""The last copies of a rank's experts: its own modules, and their states in its optimizer.

No gradient reaches them while hosts hold the experts, so the optimizer leaves them as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

import torch
from torch import Tensor, nn

from skyctl.checkpoint.node.shards import StageState, check_stamp
from skyctl.errors import RecordError
from skyctl.experts.host_client import HostCall, HostClient
from skyctl.experts.host_messages import Adopt, ExpertState, StateWanted
from skyctl.worker.experts.fused_states import FusedStates
from skyctl.worker.experts.held_experts import ExpertKey, LayerExperts, expert_stamp
from skyctl.workload.hf.fused_experts import FusedExpert, FusedExperts
from skyctl.workload.mixed_precision import master_of
from skyctl.workload.workload import Workload

COPY_S = 300.0
"""For a copy to come that is waited for, after the one before."""
COPY_SHARE = 0.05
"""Copies cost this part of the bytes that tokens and gradients take."""


class LastCopies:
    """The copies, and what is on its way to them. Make it while modules and optimizer are new.

    Attributes:
        steps: by expert, how many steps were done when its copy was made.
        nbytes: of each expert's state; first a guess of it.

    Args:
        layers: by number, the rank's that have experts on hosts.
        optimizer: over all the rank's parameters.
        skip: the options of the optimizer's groups that a scheduler moves.
    """

    def __init__(
        self,
        layers: Mapping[int, LayerExperts],
        workload: Workload,
        optimizer: torch.optim.Optimizer | None,
        skip: Collection[str],
    ) -> None:
        self._workload = workload
        experts: dict[ExpertKey, nn.Module] = {}
        fused = []
        for layer, found in layers.items():
            of_layer = found.experts
            experts |= {(layer, number): expert for number, expert in enumerate(of_layer)}
            for module, first in found.numbered():
                own = of_layer[first : first + module.count]
                if isinstance(module, FusedExperts):
                    fused.append((module, [expert for expert in own if isinstance(expert, FusedExpert)]))
        self._fused = FusedStates(fused, workload, optimizer) if fused and optimizer is not None else None
        self._places = {key: place for place, key in enumerate(experts)}
        modules = list(experts.values())
        if self._fused is not None:
            optimizer = self._fused.by_expert
        self._state = StageState(modules, optimizer, master_of, skip=skip)
        self._trained = [p for found in layers.values() for module in found.modules for p in module.trained]
        self.nbytes = {
            key: 3 * sum(p.numel() * p.element_size() for p in module.parameters())
            for key, module in experts.items()
        }
        self.steps = dict.fromkeys(experts, 0)
        self._coming: list[tuple[ExpertKey, HostClient, HostCall]] = []
        self._next, self._budget = 0, 0.0

    def release(self) -> None:
        """Hosts hold the experts from now on: no gradient reaches the rank's own modules."""
        if self._fused is not None:
            self._fused.split()
        self._train(False)

    def settle(self) -> None:
        """Makes the rank's optimizer hold the states that its copies have."""
        if self._fused is not None:
            self._fused.join()

    def take_over(self) -> None:
        """The rank's own modules are trained from now on, from the copies."""
        self.settle()
        self._train(True)

    def _train(self, trains: bool) -> None:
        for parameter in self._trained:
            parameter.requires_grad_(trains)

    def give(self, key: ExpertKey, host: HostClient, epoch: int, done: int) -> HostCall:
        """Gives a copy to a host. ``epoch``, ``done``: as of ``Adopt``."""
        stamp = expert_stamp(self._workload, key, self.steps[key])
        tensors, metadata = self._state.collect(self._places[key], stamp)
        given = Adopt(host.next_call, *key, epoch, self.steps[key], done, tuple(tensors), metadata)
        return host.ask(given, list(tensors.values()))

    def ask(self, key: ExpertKey, host: HostClient) -> None:
        """Asks the host for the expert's state after the rank's last step."""
        self._coming.append((key, host, host.ask(StateWanted(host.next_call, *key))))

    def ask_paid(self, traffic_bytes: int, host_of: Callable[[ExpertKey], HostClient | None]) -> None:
        """Asks for as many as the step's traffic pays for, one after the other, time and again."""
        keys, most = list(self._places), float(sum(self.nbytes.values()))
        self._budget = min(self._budget + COPY_SHARE * traffic_bytes, most)
        for _ in keys if not self._coming else ():  # else those before are still on their way
            key = keys[self._next % len(keys)]
            if self.nbytes[key] > self._budget:
                break
            self._budget -= self.nbytes[key]
            self._next += 1
            if (host := host_of(key)) is not None:
                self.ask(key, host)

    def take(self, *, wait: bool) -> None:
        """Puts the states that have come into the rank's modules. A host that sent none that fits is lost."""
        left = []
        for key, host, call in self._coming:
            if not call.is_over(COPY_S if wait else 0.0):
                if wait:
                    host.lose(f"it has not sent an expert within {COPY_S:.0f} s")
                else:
                    left.append((key, host, call))
            elif isinstance(call.answer, ExpertState):
                self._put(key, host, call.answer, call.tensors)
        self._coming = left

    def _put(self, key: ExpertKey, host: HostClient, answer: ExpertState, tensors: Sequence[Tensor]) -> None:
        stamp = expert_stamp(self._workload, key, answer.step)
        source = f"what {host.name} have of expert {key[1]} of layer {key[0]}"
        given = dict(zip(answer.names, tensors, strict=True))
        try:
            check_stamp(source, answer.metadata, stamp)
            with torch.no_grad():
                self._state.restore(self._places[key], given, answer.metadata, stamp, source)
        except RecordError as exc:
            host.lose(exc.message)
            return
        self.steps[key] = answer.step
        self.nbytes[key] = sum(t.numel() * t.element_size() for t in tensors)
