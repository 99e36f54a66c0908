"""The experts of a rank's layers, which hosts hold: who lives in a step, and who comes back where.

The rank's own modules are the experts' last copies (``last_copies``). They are fetched before a checkpoint
and at the end. In between, one after the other is copied, at a small part of a step's traffic.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import nn

from skyctl.errors import RunError
from skyctl.experts.host_client import HostCall, HostClient
from skyctl.experts.host_gate import connect_to_host
from skyctl.experts.host_messages import (
    Adopt,
    BeginStep,
    EndStep,
    NotDone,
    StepEnded,
)
from skyctl.experts.routed import RoutedExperts
from skyctl.experts.step_record import ExpertMove, StepRecord
from skyctl.transport.tls_identity import TlsIdentity
from skyctl.worker.expert_orders import ExpertsOrder, handshake_purpose
from skyctl.worker.experts.held_experts import ExpertKey, LayerExperts
from skyctl.worker.experts.last_copies import LastCopies
from skyctl.worker.experts.remote_dispatch import RemoteDispatch
from skyctl.workload.workload import Workload

CONNECT_S = 300.0


class TrunkExperts:
    """A rank's experts and their hosts: ``connect`` once, then ``begin`` and ``end`` each step.

    Make it while layers and optimizer are new.

    Attributes:
        record: of the steps that were made.

    Args:
        layers: the rank's, from ``start`` on.
        optimizer: over all their parameters.
        skip: the options of the optimizer's groups that a scheduler moves.
    """

    def __init__(
        self,
        order: ExpertsOrder,
        layers: Sequence[nn.Module],
        start: int,
        workload: Workload,
        optimizer: torch.optim.Optimizer | None,
        skip: Collection[str] = (),
    ) -> None:
        self._order, self._workload = order, workload
        self._layers = {
            number: LayerExperts.of(layer)
            for number, layer in enumerate(layers, start)
            if number in order.holders
        }
        for layer, found in self._layers.items():
            if (count := len(found.features)) != len(order.holders[layer]):
                raise RunError(f"layer {layer} has {count} experts, {len(order.holders[layer])} are placed")
        self._copies = LastCopies(self._layers, workload, optimizer, skip)
        self._holders = {
            (layer, number): host
            for layer in self._layers
            for number, host in enumerate(order.holders[layer])
        }
        self._epochs = dict.fromkeys(self._holders, 0)
        self._loads = dict.fromkeys(self._holders, 0)
        self._sent = dict.fromkeys(range(len(order.hosts)), 0)
        self._dropped = 0
        self.record = StepRecord()
        self._replayed = None if order.record is None else StepRecord.from_dict(order.record)
        self._hosts: list[HostClient] = []
        self._lost_hosts: dict[int, tuple[int, str]] = {}
        self._ending: list[tuple[HostClient, HostCall]] = []
        self._traffic = 0
        self._step = self._number = 0
        self._is_own = False

    # --- from the start to the end

    def connect(self, run_id: str, identity: TlsIdentity | None, first_step: int) -> None:
        """Connects to all hosts, and gives them the experts that this rank leads, as they are now.

        Raises:
            RunError: a host can't be reached, or does not take an expert.
        """
        for place, address in enumerate(self._order.hosts):
            name = f"the experts of {address.node}"
            link = connect_to_host(
                address.host,
                address.port,
                address.secret,
                purpose=handshake_purpose(run_id, address.node),
                name=name,
                identity=identity,
                limit_s=CONNECT_S,
            )
            self._hosts.append(HostClient(place, name, link, self._order.least_wait_s))
        self._step = first_step
        self._copies.steps = dict.fromkeys(self._holders, first_step)
        self._copies.release()
        self._adopt([key for key in self._holders if key[0] in self._order.leads])
        for host in self._hosts:
            if host.lost is not None:
                raise RunError(f"{host.name} are lost before the first step: {host.lost}")
        for layer, found in self._layers.items():
            for module, first in found.numbered():
                module.dispatch = RemoteDispatch(self, layer, first)
                module.register_forward_hook(lambda module, *_: self._count_dropped(module))  # can be copied

    def begin(self, step: int) -> None:
        """The step's first forward is next: lost experts come back, and the step's masks are fixed.

        Raises:
            RunError: no host is left, and other ranks hold these layers too; or the record can't be followed.
        """
        self._step, self._number = step, 0
        self._take_ended()
        self._copies.take(wait=self.is_patient)
        self._bring_back(step)
        self.begin_again()
        self._fix_masks(step)

    def begin_again(self) -> None:
        """The step's microbatches are made again: what hosts have done for it counts nothing."""
        for host in self._hosts:
            host.ask(BeginStep(host.next_call, self._step))

    def end(self) -> None:
        """The step's gradients are complete: hosts update their experts."""
        if self._is_own:
            return
        ended = [(host, host.ask(EndStep(host.next_call, self._step))) for host in self._hosts]
        if self._replayed is not None:
            moves = self._replayed.moves
            needed = {(move.layer, move.expert) for move in moves if move.copied == self._step + 1}
            for key in sorted(needed):
                self._ask_copy(key)
        else:
            self._copies.ask_paid(self._traffic, self._holder)
        self._traffic = 0
        for host, call in ended:
            host.awaits(call, patient=self.is_patient)
        self._ending += ended
        self._take_ended()

    def fetch(self) -> None:
        """Makes the rank's own modules what the hosts have; of a lost expert they keep the last copy."""
        self._take_ended()
        self._copies.take(wait=True)
        for key in self._holders:
            self._ask_copy(key)
        self._copies.take(wait=True)
        if not self._is_own:
            self._copies.settle()

    def close(self) -> None:
        """Ends the connections. Idempotent."""
        for host in self._hosts:
            host.close()

    def figures(self) -> dict[str, Any]:
        """What was seen, as JSON values: tokens by expert and by host, lost hosts, and the record."""
        loads: dict[str, list[int]] = {}
        for (layer, _), load in sorted(self._loads.items()):
            loads.setdefault(str(layer), []).append(load)
        lost = {
            self._order.hosts[place].node: {"step": step, "why": why}
            for place, (step, why) in self._lost_hosts.items()
        }
        sent = {self._order.hosts[place].node: count for place, count in self._sent.items()}
        return {
            "tokens": loads,
            "hosts": sent,
            "dropped": self._dropped,
            "lost": lost,
            "record": self.record.to_dict(),
        }

    def _count_dropped(self, module: nn.Module) -> None:
        assert isinstance(module, RoutedExperts)
        self._dropped += module.dropped

    # --- what a dispatch asks (``remote_dispatch.Switchboard``)

    @property
    def is_patient(self) -> bool:
        """Whether hosts are waited for as long as they are there: a step is made again as it was."""
        return self._replayed is not None

    def host_of(self, layer: int, expert: int) -> HostClient | None:
        """Who holds an expert; None: its host is lost or late, or this rank computes it."""
        host = self._holder((layer, expert))
        return None if host is None or host.is_late else host

    def next_number(self) -> int:
        """The number of the next call in its step."""
        self._number += 1
        return self._number - 1

    def fails(self, number: int, *, backward: bool) -> bool:
        """Whether the record, that this step is made again from, has that call as failed."""
        if self._replayed is None:
            return False
        calls = self._replayed.backwards if backward else self._replayed.forwards
        return number in calls.get(self._step, ())

    def note_failed(self, number: int, *, backward: bool) -> None:
        """A call has brought nothing back. Raises RunError where a record has it otherwise."""
        if self._replayed is not None and not self.fails(number, backward=backward):
            raise RunError(
                f"step {self._step} can't be made again as it was: call {number} is not answered now"
            )
        calls = self.record.backwards if backward else self.record.forwards
        calls.setdefault(self._step, []).append(number)

    def note_tokens(self, layer: int, first: int, counts: Sequence[int], nbytes: int) -> None:
        """As of ``Switchboard``: adds to the experts' loads, and to the step's traffic there and back."""
        self._traffic += 4 * nbytes
        for number, count in enumerate(counts, first):
            self._loads[layer, number] += count
            self._sent[self._holders[layer, number]] += count

    # --- who lives

    def _fix_masks(self, step: int) -> None:
        for layer, found in self._layers.items():
            for module, first in found.numbered():
                name = f"{layer}.{first}"
                if self._is_own:
                    alive = (True,) * module.count
                elif self._replayed is not None:
                    alive = self._replayed.mask(name, step)
                else:
                    alive = self._living(layer, range(first, first + module.count))
                module.alive = alive if any(alive) else [True] * len(alive)  # then calls fail, one by one
                self.record.note_mask(name, step, alive)

    def _living(self, layer: int, numbers: range) -> tuple[bool, ...]:
        """Which answer in time, as far as is known; if only late ones are left, waits for one of them."""
        while True:
            hosts = [self._hosts[self._holders[layer, number]] for number in numbers]
            for host in hosts:
                host.is_late = host.owes
            alive = tuple(self.host_of(layer, number) is not None for number in numbers)
            if any(alive) or all(host.lost is not None for host in hosts):
                return alive
            time.sleep(0.01)

    def _bring_back(self, step: int) -> None:
        """Experts of lost hosts come back: on other hosts, from the last copy; without any, on this rank."""
        for host in self._hosts:
            if host.lost is not None and host.place not in self._lost_hosts:
                self._lost_hosts[host.place] = (step, host.lost)
                self._log(f"{host.name} are lost in step {step}: {host.lost}")
        if self._is_own:
            return
        if self._replayed is not None:
            self._follow_moves(step)
            return
        while lost := self._lost_experts():
            left = [host for host in self._hosts if host.lost is None]
            if not left:
                self._compute_here(step)
                return
            prompt = [host for host in left if not host.owes]
            loads = {host.place: 0.0 for host in prompt or left}
            for key, place in self._holders.items():
                if place in loads:
                    loads[place] += self._cost(key, place)
            for key in sorted(lost, key=lambda key: (-self._loads[key], key)):
                place = min(loads, key=lambda place: (loads[place] + self._cost(key, place), place))
                loads[place] += self._cost(key, place)
                self._move(key, place)
            self._adopt(lost)
            for key in lost:
                if self._holder(key) is not None:
                    self._note_move(step, key, self._holders[key])

    def _lost_experts(self) -> list[ExpertKey]:
        """Those that this rank brings back; all, where no host is left."""
        if all(host.lost is not None for host in self._hosts):
            return list(self._holders)
        return [key for key in self._holders if key[0] in self._order.leads and self._holder(key) is None]

    def _cost(self, key: ExpertKey, place: int) -> float:
        return (1 + self._loads[key]) * self._order.hosts[place].token_s

    def _move(self, key: ExpertKey, place: int) -> None:
        self._holders[key] = place
        self._epochs[key] += 1

    def _note_move(self, step: int, key: ExpertKey, place: int | None) -> None:
        self.record.moves.append(ExpertMove(step, *key, self._copies.steps[key], place))

    def _compute_here(self, step: int) -> None:
        if not self._order.alone:
            raise RunError(
                "no host of experts is left, and several pipelines would each train copies of their own",
                hint="go on from the last checkpoint, with other hosts",
            )
        self._log(f"no host of experts is left: this rank computes them itself from step {step} on")
        self._is_own = True
        self._copies.take_over()
        for key in self._holders:
            self._note_move(step, key, None)
        for found in self._layers.values():
            for module in found.modules:
                module.dispatch = None

    def _follow_moves(self, step: int) -> None:
        assert self._replayed is not None
        moves = [move for move in self._replayed.moves if move.step == step]
        for move in moves:
            key = (move.layer, move.expert)
            if self._copies.steps.get(key) != move.copied:
                raise RunError(
                    f"step {step} can't be made again as it was: the copy of expert {move.expert} of layer "
                    f"{move.layer} was of step {move.copied}, here it is of {self._copies.steps.get(key)}"
                )
            if move.host is not None:
                self._move(key, move.host)
                self._adopt([key])
                self._note_move(step, key, move.host)
        if any(move.host is None for move in moves):
            self._compute_here(step)

    # --- states, to hosts and back

    def _adopt(self, keys: Sequence[ExpertKey]) -> None:
        """Gives experts to their holders from the rank's copies, and waits until they hold them."""
        calls = []
        for key in keys:
            host = self._hosts[self._holders[key]]
            tensors, metadata = self._copies.state(key)
            request = Adopt(
                host.next_call,
                *key,
                self._epochs[key],
                self._copies.steps[key],
                self._step,
                tuple(tensors),
                metadata,
            )
            calls.append((host, host.ask(request, list(tensors.values()))))
        for host, call in calls:
            call.is_over(None)
            if isinstance(call.answer, NotDone):
                host.lose(f"it does not take an expert: {call.answer.reason}")

    def _ask_copy(self, key: ExpertKey) -> None:
        if (host := self._holder(key)) is not None:
            self._copies.ask(key, host)

    def _holder(self, key: ExpertKey) -> HostClient | None:
        """Who holds an expert, late or not; None: its host is lost, or this rank computes it."""
        host = self._hosts[self._holders[key]]
        return host if host.lost is None and not self._is_own else None

    def _take_ended(self) -> None:
        """What hosts have said at the ends of steps: an expert that was placed anew is elsewhere now."""
        left = []
        for host, call in self._ending:
            if not call.is_over():
                left.append((host, call))
            elif isinstance(call.answer, StepEnded):
                for layer, expert, epoch in call.answer.held:
                    if epoch > self._epochs.get((layer, expert), epoch):
                        self._epochs[layer, expert] = epoch
                        self._holders[layer, expert] = host.place
        self._ending = left

    def _log(self, line: str) -> None:
        print(line, file=sys.stderr, flush=True)
