"""The task that is a host of experts: ``main(message, channel)``, and the protocol it speaks.

::

    → host ExpertHostOrder                 what ``main`` gets
    host → ExpertHostListening
    → host StopHostRequest                 ends it

Requests of ranks come over connections of their own (``experts.host_messages``).
"""

from __future__ import annotations

import threading
import warnings
from typing import TYPE_CHECKING, Any

from skyctl.agent.task_events import to_message
from skyctl.agent.task_orders import read_order, read_request
from skyctl.agent.task_runner import AgentGoneError, TaskChannel
from skyctl.device.process_memory import keep_freed_memory
from skyctl.device.torch_import import import_torch
from skyctl.worker.expert_orders import ExpertHostListening, ExpertHostOrder, StopHostRequest

if TYPE_CHECKING:
    from skyctl.worker.experts.host_server import HostServer


def main(message: dict[str, Any], channel: TaskChannel) -> dict[str, Any]:
    """Holds experts until it is told to stop.

    Args:
        message: an ``ExpertHostOrder``.

    Raises:
        MismatchError, RecordError: it can't follow the order.
        SkyctlError: it can't listen on the address it was given; the workload's own errors.
    """
    order = read_order([ExpertHostOrder], message)
    keep_freed_memory()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Failed to initialize NumPy")
        import_torch()
        from skyctl.device.dtype_support import prepare_dtype
        from skyctl.worker.experts.host_server import HostServer

        prepare_dtype(order.workload.dtype, order.device, channel.cache)
        server = HostServer(order)
        try:
            channel.send(to_message(ExpertHostListening(server.address, server.port)))
            threading.Thread(
                target=_until_told, args=(channel, server), daemon=True, name="expert host: is told"
            ).start()
            server.run()
        finally:
            server.close()
    return {}


def _until_told(channel: TaskChannel, server: HostServer) -> None:
    try:
        while (received := channel.recv(None)) is None:
            pass
        read_request([StopHostRequest], received[0])
    except AgentGoneError:
        pass
    finally:
        server.stop()
