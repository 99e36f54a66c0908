"""The output folder of a script's ranks on this node: what is in it, and what is put there."""

from __future__ import annotations

from typing import Any

from skyctl.agent.task_events import DoneEvent, to_message
from skyctl.agent.task_orders import read_order
from skyctl.agent.task_runner import TaskChannel
from skyctl.script.script_orders import OUTPUT_ORDERS, PlaceOutput
from skyctl.script.workplace import list_output, place_output


def main(message: dict[str, Any], channel: TaskChannel) -> dict[str, Any]:
    """Answers with an ``OutputListing``, or does as ``PlaceOutput`` says.

    Raises:
        MismatchError, RecordError: it can't follow the order.
        RunError: a file can't be placed.
    """
    order = read_order(OUTPUT_ORDERS, message)
    if isinstance(order, PlaceOutput):
        place_output(order, channel.folder)
        return to_message(DoneEvent())
    return to_message(list_output(order.workplace, channel.folder))
