"""The request to ``skyctl run``: the run's state keeps it, so that another process can go on."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from skyctl.records.base import Count, Name, Record, Seconds, Seq

ScriptKind = Literal["script", "module", "command"]


class ScriptRequest(Record):
    """A script, and how its ranks are started.

    Attributes:
        kind: a Python file, a module (``python -m``), or any command.
        words: the file, module or program, then its arguments, placeholders not yet replaced.
        folder: the absolute path here of the folder whose files are sent; None: none are.
        ship: files that are sent beside a command, by name in ``folder``; of the other kinds all are.
        workdir: a folder of the nodes to work in, in place of a copy of what was sent.
        output: the absolute path here of the folder where the ranks' output files go; None: none do.
        output_name: that folder's path on the nodes, in the folder they work in.
        env: variables that every rank gets.
        ranks: by node, in the order of ranks, how many it has.
        shares: by node, the samples of a step that its ranks have together; None: by speed.
        speeds: by node, how fast a rank of it is, in any unit; None: all alike.
        balance_steps: so many steps of the script are timed with equal shares, for ``speeds``; None: none.
        min_nodes: with fewer the run ends; None: with fewer than all.
        max_restarts: how often all ranks are started anew after one has failed.
        stall_s: ranks that have all done nothing for so long hang; 0: they are waited for.
        master_port: where rank 0 listens for the others; None: a free one is found.
        turns: the policy by which its steps take turns with other runs (``--turns``); None: they take none.
    """

    kind: ScriptKind
    words: Seq[str] = Field(min_length=1)
    folder: str | None = None
    ship: Seq[str] = ()
    workdir: str | None = None
    output: str | None = None
    output_name: str | None = None
    env: dict[str, str] = Field(default_factory=dict)
    ranks: dict[Name, Count]
    shares: dict[Name, Count] | None = None
    speeds: dict[Name, float] | None = None
    balance_steps: Count | None = None
    min_nodes: Count | None = None
    max_restarts: int = Field(default=0, ge=0)
    stall_s: Seconds = 0.0
    master_port: int | None = Field(default=None, ge=1, le=65535)
    turns: Name | None = None

    @property
    def source(self) -> str:
        """The script as people name it: its file, its module, or its program."""
        return self.words[0]
