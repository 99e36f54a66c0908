"""A rank that holds no layers and helps others to sum: it adds what it receives, and passes on.

It is told no workload, and sees neither inputs nor weights: only chunks of the sums that go over its routes.
How these are cut it is told with the word to start, as ranks that hold layers have said it (``SumSizes``).
It keeps a few chunks for each of its edges, however large the model is.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from skyctl.agent.task_events import to_message
from skyctl.agent.task_runner import TaskChannel
from skyctl.errors import RunError
from skyctl.worker.checkpointer import resumed_step
from skyctl.worker.launcher_link import LauncherLink
from skyctl.worker.peer import Peer
from skyctl.worker.progress import Progress
from skyctl.worker.rank_environment import peak_memory_bytes
from skyctl.worker.rank_errors import with_phase
from skyctl.worker.rank_events import CONNECT_PHASE, ReadyEvent, SumSizes
from skyctl.worker.rank_order import HelperOrder, SumOrder
from skyctl.worker.rank_requests import StartRequest
from skyctl.worker.sums.pass_layouts import PassLayouts
from skyctl.worker.sums.route_sum import RouteSum
from skyctl.worker.sums.sum_codecs import FIXED32, chunk_numel
from skyctl.worker.sums.sum_layout import make_layout
from skyctl.worker.sums.sum_messages import FACTORS, FIGURES, GRADIENTS
from skyctl.worker.sums.sum_work import SumWork
from skyctl.worker.sums.summed_gradients import AGREED_FLAGS, FloatGradients, IntegerGradients
from skyctl.worker.trace.trace_recorder import TraceRecorder
from skyctl.worker.updates.update_delay import UpdateDelay
from skyctl.worker.world import World


class SumHelper:
    """A helper's part in the sums of one group: ``sum_gradients`` once a step.

    Args:
        sync: its sums, of one group.
        sizes: how they are cut.
        peers: the connections to every rank on its routes, by rank.
    """

    def __init__(self, sync: SumOrder, sizes: SumSizes, peers: Mapping[int, Peer]) -> None:
        (group,) = sync.groups
        self._sums = RouteSum.from_order(group, peers)
        shares = [route.share for route in self._sums.routes]
        whole, first, second = (
            [[numel] for numel in numels] for numels in (sizes.layers, sizes.first, sizes.second)
        )
        self._passes = PassLayouts(
            sync.format, sync.chunk_bytes, shares, whole, first, second, sync.uncompressed_steps
        )
        kind = IntegerGradients if self._passes.format == FIXED32 else FloatGradients
        self._largest_code = kind.largest_code
        self._next_layout = make_layout([], shares, 1) if self._passes.format == FIXED32 else None
        self._agreed_bytes = AGREED_FLAGS + sizes.parameters
        self._figures_layout = (
            make_layout([[sizes.figures]], shares, chunk_numel("float32", sync.chunk_bytes))
            if sizes.figures
            else None
        )

    @property
    def ended_by(self) -> int | None:
        """As ``GradientSync.ended_by``."""
        return self._sums.ended_by

    def sum_gradients(self, step: int) -> bool:
        """Helps with one step's sum; whether a replica was told that the run ends.

        Raises as ``SumWork.wait``.

        With ``fixed32`` there is nothing to be summed before replicas have agreed for the first time, and
        a step that they make again is summed again.
        """
        repeats = True
        while repeats:
            layout = self._next_layout or self._passes.first(step)
            sum_work = SumWork(layout, step, kind=GRADIENTS, format=self._passes.format, helps=True)
            self._sums.begin(sum_work, self._agreed_bytes)
            is_last, repeats, *_ = map(bool, self._sums.agree(bytes(self._agreed_bytes), self._largest_code))
            sum_work.wait()
            self._next_layout = None
        if (second := self._passes.second(step)) is not None:
            sum_work = SumWork(second, step, kind=FACTORS, format=self._passes.format, helps=True)
            self._sums.begin(sum_work)
            sum_work.wait()
        return is_last

    def average_figures(self, step: int) -> None:
        """Helps with the sum of running figures, where layers have any."""
        if self._figures_layout is not None:
            sum_work = SumWork(self._figures_layout, step, kind=FIGURES, helps=True)
            self._sums.begin(sum_work)
            sum_work.wait()

    def close(self) -> None:
        """Ends the threads; the connections must be closed before."""
        self._sums.close()


class HelperRank:
    """A helper from its order to the run's end: ``run`` once, then ``close`` in any case.

    Args:
        order: what this rank is to do.
        channel: the line to the launcher.
    """

    def __init__(self, order: HelperOrder, channel: TaskChannel) -> None:
        self._order = order
        self._progress = Progress("starting")
        self._link = LauncherLink(channel, self._progress)
        self._recorder = TraceRecorder() if order.trace else None
        self._world: World | None = None
        self._helper: SumHelper | None = None

    def run(self) -> dict[str, Any]:
        """Helps with every step's sum; returns the result of ``rank.main``."""
        order, link = self._order, self._link
        link.start()
        torch.set_num_threads(1)  # parts are too small for more (``sum_layout.SERIAL_NUMEL``)
        self._progress.phase = "telling what is here"
        link.tell_environment(order.device)
        self._progress.phase = CONNECT_PHASE
        ring = order.sync.ring
        world = self._world = World(order.world, ring, link, torch.device("cpu"), self._recorder)
        world.join()
        world.connect()
        link.channel.send(to_message(ReadyEvent()))
        sizes = link.expect(StartRequest).sums
        if sizes is None:
            raise RunError("the launcher does not say how the sums are cut")
        self._helper = SumHelper(order.sync, sizes, world.peers)
        done = self._help(self._helper)
        self._progress.phase = "end"
        world.compare_clocks("end")
        world.close(graceful=True)
        trace = link.channel.folder / f"trace-{order.world.rank}.json"
        return {
            "weights": None,
            "trace": self._recorder.save(trace) if self._recorder else None,
            "peak_memory_bytes": peak_memory_bytes(torch.device("cpu")),
            "steps": done,
            "ended_by": self._helper.ended_by,
        }

    def _help(self, helper: SumHelper) -> int:
        """Every step of the run, until all agree to end; how many of the run's steps are done.

        If a step does not settle, replicas know after the next step what is agreed on in its sum.
        """
        steps, every = self._order.steps, self._order.figures_every
        delay = UpdateDelay.from_order(self._order.sync, steps, every)
        was_ending = False
        for step in range(resumed_step(self._order), steps):
            with self._progress.waits(f"step {step}, helping to sum gradients"):
                is_ending = helper.sum_gradients(step)
            is_last = was_ending or (is_ending and (delay is None or delay.settles(step)))
            was_ending = is_ending
            last = is_last or step + 1 == steps
            if last or any((step + 1) % each == 0 for each in every):
                with self._progress.waits(f"averaging running figures after step {step}"):
                    helper.average_figures(step)
            if is_last:
                return step + 1
        return steps

    def close(self) -> None:
        """Closes the connections to other ranks; whatever waits on them ends. Idempotent."""
        self._link.close()
        if self._world is not None:
            self._world.close()
        if self._helper is not None:
            self._helper.close()

    def explain(self, exc: Exception) -> Exception:
        """The error to report: with the phase it happened in, and the cause in the first line."""
        return with_phase(exc, self._progress.phase, self._order.device)
