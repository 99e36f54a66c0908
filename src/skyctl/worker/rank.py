"""The task that is one rank of a run: ``main(message, channel)``, and the protocol it speaks.

::

    → rank RankOrder or HelperOrder             what ``main`` gets (GenerationOrder: see ``generator``)
    rank → EnvironmentEvent
    → rank BuildRequest                         then only does it build anything
    rank → StoredEvent, KeyWantedEvent          of the store over which ranks find each other
    → rank StoredRequest                        once that key is set
    rank → ReadyEvent                           built and connected
    → rank StartRequest
    rank → StepEvent, ValidationEvent, CheckpointEvent, …
    rank → HeartbeatEvent                       every few seconds, from the start to the end
    → rank StopTrainingRequest                  an early end: see below
    rank → RankResult                           what ``main`` returns

The orders are in ``rank_order``, the requests in ``rank_requests``; the events, and what their figures mean,
in ``rank_events``.

Rank 0 decides on an early end: told to stop, it marks the last activation of the step under way, or of the
next one, and every rank ends after that same step; other ranks need not be told.

With ``trace`` the result names a file with this rank's trace, on its own clock (``trace_recorder``). A rank
with a ``HelperOrder`` holds no layers and only helps others to sum (``sum_helper``): it tells of no steps.
"""

from __future__ import annotations

import os
import warnings
from typing import TYPE_CHECKING, Any

from skyctl.agent.task_orders import read_order
from skyctl.device.process_memory import keep_freed_memory
from skyctl.device.torch_import import import_torch
from skyctl.errors import SkyctlError
from skyctl.worker.rank_order import RANK_ORDERS, GenerationOrder, HelperOrder

if TYPE_CHECKING:
    from skyctl.agent.task_runner import TaskChannel
    from skyctl.worker.generator import Generator


def main(message: dict[str, Any], channel: TaskChannel) -> dict[str, Any]:
    """Trains one stage, or helps others to sum; returns the paths of its weights and trace, its peak memory
    and the steps done.

    Args:
        message: the order.

    Raises:
        MismatchError, RecordError: it can't follow the order.
        ModuleNotFoundError: this Python has no torch.
        PeerLostError: a neighbour is gone; some other rank has the cause.
        RunError: anything else that went wrong, with the phase it went wrong in.
        SkyctlError: the workload's own errors, unchanged.
        UnsupportedDtypeError: this processor can't compute in the workload's dtype.
    """
    order = read_order(RANK_ORDERS, message)
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # else it warns of every host without reverse DNS
    keep_freed_memory()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Failed to initialize NumPy")
        import_torch()  # where it is missing, that is the error to report

        from skyctl.device.dtype_support import prepare_dtype
        from skyctl.worker.sum_helper import HelperRank
        from skyctl.worker.trainer import Trainer

        rank: Generator | HelperRank | Trainer
        if isinstance(order, HelperOrder):
            rank = HelperRank(order, channel)
        elif isinstance(order, GenerationOrder):
            from skyctl.worker.generator import Generator  # late: it needs transformers

            prepare_dtype(order.workload.dtype, order.device, channel.cache)
            rank = Generator(order, channel)
        else:
            prepare_dtype(order.workload.dtype, order.device, channel.cache)
            rank = Trainer(order, channel)
        try:
            try:
                return rank.run()
            finally:
                rank.close()  # inside: torch raises here, too, when a DataLoader's worker dies
        except Exception as exc:
            explained = rank.explain(exc)
            if explained is exc:
                raise
            assert isinstance(explained, SkyctlError)
            raise explained from exc


def warm() -> None:
    """Imports what a rank needs, once for all processes that a forkserver (``agent/forkserver.py``) forks.

    Nothing is computed: a fork must find no thread of autograd's, nor that somebody has asked for an
    accelerator.
    """
    import_torch()
    from skyctl.worker import trainer  # noqa: F401 - imported once, for all ranks
