"""A run of a script from its first attempt to its end: who takes part, restarts, lost nodes, output files.

As with torchrun a failed rank ends all of them, and all are started anew where restarts are left. A node that
is lost is left out, where enough others are there.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from statistics import fmean

from skyctl.errors import SkyctlError
from skyctl.files import RunPaths
from skyctl.records.base import timestamp
from skyctl.records.cluster import device_id, node_of
from skyctl.records.run_state import SCRIPT, RunAttempt
from skyctl.records.script_request import ScriptRequest
from skyctl.remote.peer_addresses import find_peer_addresses, interface_with_address
from skyctl.remote.remote_task import RemoteTask
from skyctl.run.journal import update_attempt
from skyctl.run.live_run import LiveRun
from skyctl.run.operator_requests import OperatorRequests, StopRequested
from skyctl.run.scripts.node_watch import NodeWatch
from skyctl.run.scripts.peer_links import PeerLinks
from skyctl.run.scripts.rank_orders import RankOrders
from skyctl.run.scripts.script_attempt import ScriptAttempt
from skyctl.run.scripts.script_files import find_script_files, read_script_files
from skyctl.run.scripts.script_outcome import ScriptOutcome
from skyctl.run.scripts.script_outputs import ScriptOutputs
from skyctl.run.scripts.script_ranks import (
    ScriptRank,
    describe_shares,
    divide_batch,
    place_ranks,
    relative_speeds,
    sum_by_node,
)
from skyctl.run.scripts.share_trials import ShareTrials, equal_shares, middle_mean
from skyctl.script.script_orders import BeginScript, ScriptOrder, Workplace

RANKS_END_S = 15.0
"""For an attempt's ranks to be gone before the next one's begin."""
UNTIMED_STEPS = 1
"""Steps that a trial leaves out, after the first, which the step clock never times: caches are cold."""


class ScriptRunner:
    """Plays a run of a script, with its restarts; make one for each run, and call ``run`` once."""

    def __init__(self, run: LiveRun, request: ScriptRequest) -> None:
        self._run, self._request = run, request
        self._sessions, self._callbacks, self._journal = run.sessions, run.callbacks, run.journal
        self._counts = dict(request.ranks)
        self._number = len(run.journal.state.attempts) or 1
        self._restarts = self._failed = 0
        self._is_counted = True
        self._is_trial = False
        self._trees: dict[str, str | None] = {}
        self._files: dict[str, bytes] | None = None
        self._attempt: ScriptAttempt | None = None
        self._ranks: list[ScriptRank] = []
        self._requests = OperatorRequests(run.journal)
        self._watch = NodeWatch(run.sessions, run.callbacks)
        self._outputs: ScriptOutputs | None = None
        if request.output is not None:
            self._outputs = ScriptOutputs(Path(request.output), self._workplace(None), run.callbacks.warn)
        self._came = 0

    def run(self, tasks: Mapping[int, RemoteTask] | None = None) -> ScriptOutcome:
        """Plays attempts until the script has ended.

        Args:
            tasks: by rank, those of the last attempt, which another process had started.

        Raises:
            SkyctlError: the first cause of the last failure, when no restart is left.
            KeyboardInterrupt: it was stopped (``Detached``: it goes on without this process).
        """
        with self._run.until_it_ends(self._end, self._stop, self._watch.close):
            return self._play_attempts(tasks)

    def _play_attempts(self, tasks: Mapping[int, RemoteTask] | None) -> ScriptOutcome:
        why = "launched"
        if self._request.balance_steps is not None and tasks is None:
            why = self._balance(self._request.balance_steps)
        while True:
            try:
                attempt = self._start(why) if tasks is None else self._adopt(tasks)
                self._journal.update(status="running", detail=None)
                attempt.watch()
            except SkyctlError as exc:
                why = self._recover(exc)
            else:
                return self._finished(attempt)
            tasks = None

    def _balance(self, steps: int) -> str:
        """Runs the script's first steps in a copy of its own, to learn how fast ranks are.

        Returns:
            what the next attempt is begun for.
        """
        self._request = self._request.model_copy(update={"speeds": None})
        trials = ShareTrials()
        following: Sequence[int] | None = ()
        while following is not None:
            timed = self._time_steps(steps)
            if timed is None:
                break
            times_s, asked = timed
            shares = divide_batch(self._request, self._ranks) or equal_shares(asked, len(self._ranks))
            trials.add(shares, times_s)
            following = trials.next_shares()
            if following is not None:
                self._request = self._request.model_copy(
                    update={"shares": sum_by_node(following, self._ranks)}
                )
        first, best = trials.first, trials.best
        if first is None or best is None:
            self._settle(self._request.model_copy(update={"balance_steps": None}))
            self._callbacks.warn("too few steps to learn from: shares stay equal")
            return "nothing was timed"
        speeds = {
            node: fmean(
                s for rank, s in zip(self._ranks, best.samples_per_s, strict=True) if rank.node == node
            )
            for node in self._counts
        }
        update = {"shares": sum_by_node(best.shares, self._ranks), "speeds": speeds, "balance_steps": None}
        self._settle(self._request.model_copy(update=update))
        self._callbacks.note(
            f"shares {describe_shares(self._ranks, best.shares)}: the slowest rank's own part of a step "
            f"took {best.slowest_s * 1000:.0f} ms, with equal shares it took {first.slowest_s * 1000:.0f} ms"
        )
        return "shares by measured speed"

    def _time_steps(self, steps: int) -> tuple[list[float], int | None] | None:
        """A trial: by rank, the seconds of its own of a step, and the batch that the script asks shares of.

        None: it ended before each rank made a step.
        """
        self._is_trial = True
        attempt = self._start(f"timing {steps} steps")
        wanted = steps + UNTIMED_STEPS
        attempt.watch_steps(lambda: all(len(times) >= wanted for times in attempt.steps_s))
        self._end_attempt([])
        self._is_trial = False
        update_attempt(self._journal, ended=timestamp())
        timed = [times[UNTIMED_STEPS:wanted] for times in attempt.steps_s]
        return ([middle_mean(times) for times in timed], attempt.batch) if all(timed) else None

    def _settle(self, request: ScriptRequest) -> None:
        """Goes on with that request, and writes it down for whoever takes the run over."""
        self._request = request
        self._journal.update(order={**self._journal.state.order, SCRIPT: request.model_dump(mode="json")})

    # --- an attempt

    def _start(self, why: str) -> ScriptAttempt:
        request, paths = self._request, self._journal.paths
        if self._journal.state.attempts:
            self._number += 1
            paths = RunPaths(paths.run_id, self._number).create()
        addresses = self._addresses()
        master = self._find_master(addresses)
        order = [master, *(node for node in self._counts if node != master)]
        self._ranks = place_ranks({node: self._counts[node] for node in order})
        shares = divide_batch(self._request, self._ranks)
        self._journal.begin(paths, None)
        entry = RunAttempt(
            number=self._number,
            began=timestamp(),
            why=why,
            from_step=0,
            planned=not self._is_counted or self._is_trial,
            trial=self._is_trial,
            devices=tuple(device_id(rank.node, "cpu") for rank in self._ranks),
        )
        status = "starting" if self._number == 1 else "restarting"
        self._journal.update(attempts=(*self._journal.state.attempts, entry), status=status, detail=why)
        self._ship()
        if self._outputs is not None and not self._is_trial:
            sent = self._outputs.send(self._ranks, self._sessions, self._trees)
            if sent:
                self._callbacks.note(f"{sent} files of {request.output} are on every node")
        if shares is not None and len(set(shares)) > 1 and not self._is_trial:
            self._callbacks.note(
                "ranks have unlike shares: gradients have to be weighted by them, which DDP alone does not "
                "do (docs/scripts.md, Unequal shares in your framework)"
            )
        self._callbacks.phase(f"starting {len(self._ranks)} ranks")
        orders = RankOrders(
            request,
            paths.run_id,
            self._restarts,
            shares,
            relative_speeds(request, self._ranks),
            times_steps=self._is_trial,
            secret=secrets.token_hex(32) if self._run.cluster.backend == "skyctl" else None,
        )
        attempt = self._attempt = self._new_attempt()
        attempt.start(
            [self._order(orders, rank, addresses[rank.node]) for rank in self._ranks],
            lambda port: BeginScript({"MASTER_ADDR": addresses[master], "MASTER_PORT": str(port)}),
        )
        self._callbacks.phase(f"{len(self._ranks)} ranks run; rank 0 is on {master}")
        return attempt

    def _order(self, orders: RankOrders, rank: ScriptRank, address: str) -> ScriptOrder:
        interface = interface_with_address(self._sessions[rank.node], address)
        return orders.order(rank, self._run.cluster.node(rank.node), self._workplace(rank.node), interface)

    def _adopt(self, tasks: Mapping[int, RemoteTask]) -> ScriptAttempt:
        attempts = self._journal.state.attempts
        nodes = [node_of(device) for device in attempts[-1].devices]
        played = [before for before in attempts if not before.trial]
        self._restarts = len(played) - 1
        self._failed = self._restarts - sum(before.planned for before in played)
        counts = {node: nodes.count(node) for node in nodes}
        self._counts = {node: count for node, count in self._counts.items() if node in counts}
        self._ranks = place_ranks(counts)
        attempt = self._attempt = self._new_attempt()
        attempt.adopt(tasks)
        with suppress(SkyctlError):
            self._find_master(self._addresses())
        return attempt

    def _new_attempt(self) -> ScriptAttempt:
        return ScriptAttempt(self._run, self._ranks, self._tick, self._request.stall_s or None)

    def _addresses(self) -> dict[str, str]:
        outcomes = find_peer_addresses({node: self._sessions[node] for node in self._counts})
        for outcome in outcomes.values():
            if isinstance(outcome, SkyctlError):
                raise outcome
        return {node: address for node, address in outcomes.items() if isinstance(address, str)}

    def _find_master(self, addresses: Mapping[str, str]) -> str:
        """The node of rank 0: the first that all others reach. On one machine nobody has to be asked."""
        self._watch.close()
        order = list(self._counts)
        if len(set(addresses.values())) == 1:
            return order[0]
        self._callbacks.phase("seeing which nodes reach each other")
        links = self._watch.links = PeerLinks(self._sessions, addresses)
        return links.reached_by_all(order)

    def _ship(self) -> None:
        """Sends the script's folder to the nodes that do not have it; later attempts send the same files."""
        request = self._request
        if request.folder is None or request.workdir is not None:
            self._trees = dict.fromkeys(self._counts)
            return
        if self._files is None:
            folder = Path(request.folder)
            output = Path(request.output) if request.output is not None else folder
            left_out = output if output != folder else None
            paths = find_script_files(folder, request.ship, left_out=left_out)
            self._files = read_script_files(folder, paths)
            if self._outputs is not None:
                self._outputs.note_shipped(self._files)
            size = sum(map(len, self._files.values()))
            self._callbacks.note(f"{len(paths)} files of {folder}, {size / 2**20:.1f} MiB, go to every node")
        files = self._files
        with ThreadPoolExecutor(max_workers=len(self._counts)) as pool:
            nodes = list(self._counts)
            trees = pool.map(lambda node: self._sessions[node].push_tree(files), nodes)
            self._trees = dict(zip(nodes, trees, strict=True))

    def _workplace(self, node: str | None) -> Workplace:
        tree = self._trees.get(node) if node is not None else None
        name = f"trial-{self._number}" if self._is_trial else "work"
        return Workplace(tree, self._request.workdir, self._request.output_name, name)

    # --- while it is watched

    def _tick(self) -> None:
        for _ in self._requests.take():
            self._callbacks.warn("a script's nodes are those it began with: a request to join is dropped")
        if self._requests.stop is not None:
            raise StopRequested
        self._watch.look(self._counts)

    # --- after an attempt

    def _recover(self, error: SkyctlError) -> str:
        """After a failure: ends what is left of the attempt. Raises the error where there is no next one.

        Returns:
            what the next attempt is begun for.
        """
        if self._attempt is None:
            raise error
        error = self._watch.cause_of(error, self._counts)
        lost = self._watch.lost_nodes(error, self._counts)
        if lost:
            why_lost = dict.fromkeys(lost, error.message)
            self._journal.update(lost={**self._journal.state.lost, **why_lost})
        self._end_attempt(lost)
        self._gather(without=lost)
        update_attempt(self._journal, ended=timestamp(), error=error.message)
        if lost:
            left = {node: count for node, count in self._counts.items() if node not in lost}
            least = len(self._request.ranks) if self._request.min_nodes is None else self._request.min_nodes
            if len(left) < max(1, least):
                raise error
            self._counts = left
            for node in lost:
                self._sessions.pop(node, None)
            self._is_counted = False
            which = f"node {lost[0]} was" if len(lost) == 1 else f"nodes {', '.join(lost)} were"
            why = f"{which} lost"
        elif self._failed < self._request.max_restarts:
            self._failed += 1
            self._is_counted = True
            why = f"restart {self._failed} of {self._request.max_restarts}"
        else:
            raise error
        self._restarts += 1
        self._callbacks.warn(f"{error.message}\n  {why}: all ranks are started anew")
        return why

    def _finished(self, attempt: ScriptAttempt) -> ScriptOutcome:
        returncodes = tuple(attempt.returncodes)
        if without := attempt.without_turns:
            self._callbacks.warn(
                f"{'rank' if len(without) == 1 else 'ranks'} {', '.join(map(str, without))} took no turn: no "
                "torch.nn.Module was called there, so what they computed was beside other runs"
            )
        self._end_attempt([])
        self._gather()
        return ScriptOutcome(
            self._journal.paths.run_id,
            tuple(self._ranks),
            returncodes,
            self._restarts,
            self._request.output,
            self._came,
        )

    def _gather(self, without: Sequence[str] = ()) -> None:
        if self._outputs is None or not self._ranks or self._is_trial:
            return
        sessions = {
            node: session
            for node, session in self._sessions.items()
            if node not in without and session.lost is None
        }
        self._callbacks.phase(f"bringing home what ranks have written to {self._request.output_name}")
        self._came += self._outputs.gather(self._ranks, sessions)
        for node in without:
            self._callbacks.warn(f"what node {node} had written since is lost with it")

    def _end_attempt(self, lost: list[str]) -> None:
        attempt, self._attempt = self._attempt, None
        if attempt is not None:
            attempt.end(RANKS_END_S, lost)

    def _stop(self, exc: KeyboardInterrupt) -> None:
        self._end()
        if self._request.output is not None:
            exc.add_note(f"{self._came} output files have come to {self._request.output}")
        exc.add_note(f"the run's folder: {self._journal.paths.folder}")

    def _end(self) -> None:
        """Nothing runs any more; what was written comes home even where the run was stopped."""
        had = self._attempt is not None
        self._end_attempt([])
        if had:
            with suppress(SkyctlError):
                self._gather()
        self._watch.close()
