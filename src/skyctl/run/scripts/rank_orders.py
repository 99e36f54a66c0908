"""The order of each rank of an attempt at a script: its command line, its environment, its folder. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from skyctl.records.cluster import Node
from skyctl.records.script_request import ScriptRequest
from skyctl.run.scripts.script_ranks import ScriptRank, fill_placeholders, torchrun_environment
from skyctl.script.script_orders import ScriptOrder, ScriptTurns, Workplace


@dataclass(frozen=True)
class RankOrders:
    """The orders of one attempt.

    Attributes:
        restarts: how often ranks were started anew before.
        shares: by rank, its samples of a step; None: there are no shares.
        speeds: by rank, how fast it is by the fastest one; None: it is not known, or shares were named.
        times_steps: whether the attempt is a trial, whose steps are timed.
        secret: for the backend ``skyctl`` in the script; None: it is not there.
    """

    request: ScriptRequest
    run_id: str
    restarts: int
    shares: list[int] | None
    speeds: list[float] | None
    times_steps: bool
    secret: str | None = None

    def order(self, rank: ScriptRank, node: Node, workplace: Workplace, interface: str | None) -> ScriptOrder:
        """One rank's.

        Args:
            node: the rank's node.
            interface: that node's, by which others reach it; None: it is not known.
        """
        request = self.request
        share = None if self.shares is None else self.shares[rank.rank]
        words = [fill_placeholders(word, rank, share) for word in request.words]
        return ScriptOrder(
            rank=rank.rank,
            words=("-m", *words) if request.kind == "module" else tuple(words),
            is_python=request.kind != "command",
            environment=self._environment(rank, share, interface),
            workplace=workplace,
            local_ranks=rank.local_world_size,
            threads=None if node.threads is None else max(1, node.threads // rank.local_world_size),
            finds_port=rank.rank == 0,
            port=request.master_port,
            times_steps=self.times_steps,
            secret=self.secret,
            turns=None if request.turns is None else ScriptTurns(request.turns, node.name, self.run_id),
        )

    def _environment(self, rank: ScriptRank, share: int | None, interface: str | None) -> dict[str, str]:
        request = self.request
        environment = torchrun_environment(
            rank, run_id=self.run_id, restarts=self.restarts, max_restarts=request.max_restarts
        )
        if interface is not None:
            environment |= {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": interface}
        if self.shares is not None:
            environment |= {"SKYCTL_SHARE": str(share), "SKYCTL_SHARES": ",".join(map(str, self.shares))}
        if self.speeds is not None:
            environment["SKYCTL_SPEEDS"] = ",".join(f"{speed:.6g}" for speed in self.speeds)
        if request.output_name is not None:
            environment["SKYCTL_OUTPUT"] = request.output_name
        return environment | request.env
