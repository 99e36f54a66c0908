"""How many accelerators nodes have, by what each of them says itself."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

from skyctl.agent.task_orders import write_order
from skyctl.check.check_answers import AcceleratorCount
from skyctl.check.check_orders import CountAcceleratorsOrder
from skyctl.check.node_questions import CHECK_TASK
from skyctl.errors import InputError
from skyctl.remote.agent_session import Session

COUNT_TIMEOUT_S = 120.0
"""For a slow disk to import torch from."""


def count_accelerators(sessions: Mapping[str, Session]) -> dict[str, int]:
    """By node, its accelerators: at least 1 each. All are asked at once.

    Raises:
        InputError: a node has none.
        SkyctlError: a node can't say, or is lost.
    """
    with ThreadPoolExecutor(max_workers=max(1, len(sessions))) as pool:
        answers = dict(zip(sessions, pool.map(_count, sessions.values()), strict=True))
    without = {node: source for node, (count, source) in answers.items() if count == 0}
    if without:
        nodes_text = ", ".join(f"{node} ({source} there finds none)" for node, source in without.items())
        raise InputError(
            f"--per-node gpu: there is no GPU on {nodes_text}",
            hint="leave nodes out with --limit, or give numbers: --per-node NODE=NUMBER,…",
        )
    return {node: count for node, (count, _) in answers.items()}


def _count(session: Session) -> tuple[int, str]:
    order = write_order(CountAcceleratorsOrder())
    counted = session.run_task(CHECK_TASK, order, COUNT_TIMEOUT_S, answer=AcceleratorCount)
    return int(counted["count"]), str(counted["source"])
