"""Runs the tests' own tasks (``node_tasks``) to their results."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from skyctl.remote.agent_session import Session


@dataclass(frozen=True)
class TaskAnswer:
    """The answer that such a task may give."""

    kind: ClassVar[str] = "result"
    lines: int | None = None
    path: str | None = None
    torch: bool | None = None
    threads: int | None = None
    private_mib: float | None = None
    cuda: bool | None = None


def run_node_task(
    session: Session, payload: dict[str, Any], timeout_s: float, env: dict[str, str]
) -> dict[str, Any]:
    return session.run_task("node_tasks", payload, timeout_s, env=env, answer=TaskAnswer)
