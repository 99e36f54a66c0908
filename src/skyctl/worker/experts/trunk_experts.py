"""The experts of a rank's layers, which hosts hold: who lives in a step, and who moves where.

The rank's own modules are the experts' last copies (``last_copies``). They are fetched before a checkpoint
and at the end. In between, one after the other is copied, at a small part of a step's traffic.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from skyctl.errors import RunError
from skyctl.experts.host_client import HostCall, HostClient
from skyctl.experts.host_gate import connect_to_host
from skyctl.experts.host_messages import BeginStep, EndStep, HandOver, NotDone, StepEnded
from skyctl.experts.routed import RoutedExperts
from skyctl.experts.step_record import ExpertMove, StepRecord
from skyctl.transport.tls_identity import TlsIdentity
from skyctl.worker.expert_orders import ExpertsOrder, handshake_purpose
from skyctl.worker.experts.expert_loads import WINDOW_STEPS, ExpertLoads
from skyctl.worker.experts.held_experts import ExpertKey, LayerExperts
from skyctl.worker.experts.last_copies import LastCopies
from skyctl.worker.experts.remote_dispatch import RemoteDispatch
from skyctl.worker.progress import Progress
from skyctl.workload.workload import Workload

CONNECT_S = HOLD_S = 300.0
"""To a host; for it to build an expert that it is given, after the one before."""


class TrunkExperts:
    """A rank's experts and their hosts: ``connect`` once, then ``begin`` and ``end`` each step.

    Make it while layers and optimizer are new.

    Attributes:
        record: of the steps that were made.

    Args:
        layers: the rank's, from ``start`` on.
        steps: of the whole run.
        optimizer: over all their parameters.
        progress: of the rank, which is told when it waits for hosts.
        skip: the options of the optimizer's groups that a scheduler moves.
    """

    def __init__(
        self,
        order: ExpertsOrder,
        layers: Sequence[nn.Module],
        start: int,
        workload: Workload,
        steps: int,
        optimizer: torch.optim.Optimizer | None,
        progress: Progress,
        skip: Collection[str] = (),
    ) -> None:
        self._order, self._workload, self._steps = order, workload, steps
        self._progress = progress
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
        self._loads = ExpertLoads(self._holders, len(order.hosts))
        self.record = StepRecord()
        self._replayed = None if order.record is None else StepRecord.from_dict(order.record)
        self._hosts: list[HostClient] = []
        self._lost_hosts: dict[int, tuple[int, str]] = {}
        self._ending: list[tuple[HostClient, HostCall]] = []
        self._traffic = 0
        self._step = self._number = self._done = 0
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
        self._step = self._done = first_step
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
        self._step, self._done, self._number = step, step, 0
        self._take_ended()
        self._copies.take(wait=self.is_patient)
        self._await_hosts()
        self._bring_back(step)
        self.begin_again()
        self._fix_masks(step)

    def begin_again(self) -> None:
        """The step's microbatches are made again: what hosts have done for it counts nothing."""
        for host in self._hosts:
            host.ask(BeginStep(host.next_call, self._step))

    def end(self) -> None:
        """The step's gradients are complete: hosts update their experts, and some of these move."""
        if self._is_own:
            return
        self._done = self._step + 1
        moves = self._due_moves()
        for key, place in moves.items():
            self._epochs[key] += 1
            for host, arrives in ((self._hosts[self._holders[key]], False), (self._hosts[place], True)):
                host.ask(HandOver(host.next_call, *key, self._epochs[key], arrives))
        ended = [(host, host.ask(EndStep(host.next_call, self._step))) for host in self._hosts]
        if self._replayed is not None:
            for key in self._replayed.copied(self._done):
                self._ask_copy(key)
        else:
            self._copies.ask_paid(self._traffic, self._holder)
        self._traffic = 0
        with self._progress.waits(f"step {self._step}, the updates of experts on hosts"):
            for host, call in ended:
                host.awaits(call, patient=self.is_patient)
        self._ending += ended
        heard = self._take_ended()
        self._make_moves(moves)
        for key in heard:  # else a call to one that is still to come might be late
            self._ask_copy(key)
        self._copies.take(wait=bool(heard))

    def fetch(self) -> None:
        """Makes the rank's own modules what the hosts have; of a lost expert they keep the last copy."""
        with self._progress.waits():
            for host, call in self._ending:
                if not call.is_over(host.patience_s if self._order.alone else None):
                    host.lose("it has not ended its step")
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
        """All that was seen, as JSON values: tokens by expert and by host, lost hosts, and the record."""
        lost = {
            self._order.hosts[place].node: {"step": step, "why": why}
            for place, (step, why) in self._lost_hosts.items()
        }
        seen = self._loads.figures([host.node for host in self._order.hosts])
        return {**seen, "lost": lost, "record": self.record.to_dict()}

    def _count_dropped(self, module: nn.Module) -> None:
        assert isinstance(module, RoutedExperts)
        self._loads.dropped += module.dropped

    # --- what a dispatch asks (``remote_dispatch.Switchboard``)

    @property
    def is_patient(self) -> bool:
        """Whether hosts are waited for as long as they are there: a step is made again as it was."""
        return self._replayed is not None

    def host_of(self, layer: int, expert: int) -> HostClient | None:
        """The host that holds an expert; None: it is lost or late, or this rank computes the expert."""
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
            self._loads.note((layer, number), self._holders[layer, number], count)

    # --- who lives

    def _fix_masks(self, step: int) -> None:
        for host in self._hosts:
            host.is_late = host.owes
        for layer, found in self._layers.items():
            for module, first in found.numbered():
                name = f"{layer}.{first}"
                if self._is_own:
                    alive = (True,) * module.count
                elif self._replayed is not None:
                    alive = self._replayed.mask(name, step)
                else:
                    numbers = range(first, first + module.count)
                    alive = tuple(self.host_of(layer, number) is not None for number in numbers)
                module.alive = alive if any(alive) else [True] * len(alive)  # then calls fail, one by one
                self.record.note_mask(name, step, alive)

    def _await_hosts(self) -> None:
        """Waits for one of a layer's hosts if all that are left are late; in the end they are lost.

        If other ranks hold the layer too, hosts may wait for these: then the launcher judges who is lost.
        """
        began = time.monotonic()
        if not (late := self._late_alone()):
            return
        names = ", ".join(host.name for host in late)
        with self._progress.waits(f"step {self._step}, {names}, all late"):
            while late := self._late_alone():
                waited_s = time.monotonic() - began
                if self._order.alone and waited_s > max(host.patience_s for host in late):
                    for host in late:
                        host.lose(f"it has not answered for {waited_s:.0f} s, and no other host is in time")
                time.sleep(0.01)

    def _late_alone(self) -> list[HostClient]:
        """The hosts that are left of a layer's experts, if all owe answers; of the first such layer."""
        for layer, found in self._layers.items():
            for module, first in found.numbered():
                places = {self._holders[layer, first + number] for number in range(module.count)}
                left = [self._hosts[place] for place in sorted(places) if self._hosts[place].lost is None]
                if left and all(host.owes for host in left):
                    return left
        return []

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
            places = [host.place for host in prompt or left]
            for key, place in self._loads.dealt(lost, self._order.hosts, self._holders, places).items():
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
        moves = self._replayed.brought_back(step)
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

    # --- who moves as loads drift

    def _due_moves(self) -> dict[ExpertKey, int]:
        """By expert that this rank leads and that moves at the end of the step, its new host."""
        if self._replayed is not None:
            moves = self._replayed.handed_over(self._done)
            # One was on its way to a host that then was lost, and came back to where it had been.
            return {key: place for key, place in moves.items() if self._holders[key] != place}
        if self._done % WINDOW_STEPS or self._done == self._steps:
            return {}
        prompt = [host.place for host in self._hosts if host.lost is None and not host.is_late]
        return self._loads.moves(
            self._order, self._holders, prompt, self._copies.nbytes, self._steps - self._done
        )

    def _make_moves(self, moves: Mapping[ExpertKey, int]) -> None:
        """Takes the experts from their hosts after the update, and gives them to the new ones.

        An expert whose host is lost by now comes back from its last copy (``_bring_back``).
        """
        for key in moves:
            self._ask_copy(key)
        self._copies.take(wait=bool(moves))
        taken = [key for key in moves if self._copies.steps[key] == self._done]
        for key in taken:
            self._holders[key] = moves[key]
        self._adopt(taken)
        for key in taken:
            if self._holder(key) is not None:
                self._note_move(self._done, key, self._holders[key])

    # --- states, to hosts and back

    def _adopt(self, keys: Sequence[ExpertKey]) -> None:
        """Gives experts to their holders from the rank's copies, and waits until they hold them."""
        phase, self._progress.phase = self._progress.phase, f"step {self._step}, giving experts to hosts"
        calls = []
        for key in keys:
            host = self._hosts[self._holders[key]]
            calls.append((host, self._copies.give(key, host, self._epochs[key], self._done)))
        for host, call in calls:
            if not call.is_over(HOLD_S):
                host.lose(f"it has not taken an expert within {HOLD_S:.0f} s")
            elif isinstance(call.answer, NotDone):
                host.lose(f"it does not take an expert: {call.answer.reason}")
        self._progress.phase = phase

    def _ask_copy(self, key: ExpertKey) -> None:
        if (host := self._holder(key)) is not None:
            self._copies.ask(key, host)

    def _holder(self, key: ExpertKey) -> HostClient | None:
        """The host that holds an expert, late or not; None: it is lost, or this rank computes the expert."""
        host = self._hosts[self._holders[key]]
        return host if host.lost is None and not self._is_own else None

    def _take_ended(self) -> list[ExpertKey]:
        """Takes what hosts said at the ends of steps; returns the experts that other ranks placed anew."""
        left, heard = [], []
        for host, call in self._ending:
            if not call.is_over():
                left.append((host, call))
            elif isinstance(call.answer, StepEnded):
                for layer, expert, epoch in call.answer.held:
                    if epoch > self._epochs.get((layer, expert), epoch):
                        self._epochs[layer, expert] = epoch
                        self._holders[layer, expert] = host.place
                        heard.append((layer, expert))
        self._ending = left
        return heard

    def _log(self, line: str) -> None:
        print(line, file=sys.stderr, flush=True)
