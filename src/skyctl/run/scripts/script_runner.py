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
from typing import Any

from skyctl.errors import SkyctlError
from skyctl.files import RunPaths
from skyctl.records.base import timestamp
from skyctl.records.cluster import Cluster, device_id
from skyctl.records.run_state import SCRIPT, RunAttempt
from skyctl.records.script_request import ScriptRequest
from skyctl.remote.agent_session import Session
from skyctl.remote.peer_addresses import find_peer_addresses, interface_with_address
from skyctl.remote.remote_task import RemoteTask
from skyctl.run.callbacks import Detached, EventHistory, RunCallbacks
from skyctl.run.event_sink import EventSink, update_attempt
from skyctl.run.operator_requests import JoinRequest, StopRequested, take_requests
from skyctl.run.rank_spec import rank_task_name
from skyctl.run.scripts.node_watch import NodeWatch
from skyctl.run.scripts.peer_links import PeerLinks
from skyctl.run.scripts.rank_orders import RankOrders
from skyctl.run.scripts.script_files import find_script_files, read_script_files
from skyctl.run.scripts.script_group import ScriptGroup
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
    """One run; ``run`` may be called once.

    Args:
        sessions: by node, those that can be used; nodes that are lost are taken out.
        sink: writes everything down.
    """

    def __init__(
        self,
        request: ScriptRequest,
        cluster: Cluster,
        sessions: dict[str, Session],
        callbacks: RunCallbacks,
        sink: EventSink,
    ) -> None:
        self._request, self._cluster, self._sessions = request, cluster, sessions
        self._callbacks, self._sink = callbacks, sink
        self._counts = dict(request.ranks)
        self._number = len(sink.state.attempts) or 1
        self._restarts = self._failed = 0
        self._is_counted = True
        self._is_trial = False
        self._trees: dict[str, str | None] = {}
        self._files: dict[str, bytes] | None = None
        self._group: ScriptGroup | None = None
        self._ranks: list[ScriptRank] = []
        self._watch = NodeWatch(sessions, callbacks)
        self._outputs: ScriptOutputs | None = None
        if request.output is not None:
            self._outputs = ScriptOutputs(Path(request.output), self._workplace(None), callbacks.warn)
        self._came = 0

    def run(self, adopted: Mapping[int, RemoteTask] | None = None, past: EventHistory = ()) -> ScriptOutcome:
        """Plays attempts until the script has ended.

        Args:
            adopted: by rank, tasks that another process had started, of the sink's last attempt.
            past: what that process had written down of them.

        Raises:
            SkyctlError: the first cause of the last failure, when no restart is left.
            KeyboardInterrupt: it was stopped (``Detached``: it goes on without this process).
        """
        try:
            done = self._play_attempts(adopted, past)
        except Detached:
            self._watch.close()
            raise
        except KeyboardInterrupt as exc:
            self._close("stopped")
            if self._request.output is not None:
                exc.add_note(f"{self._came} output files have come to {self._request.output}")
            exc.add_note(f"the run's folder: {self._sink.paths.folder}")
            raise
        except SkyctlError as exc:
            exc.log = exc.log or str(self._sink.paths.folder)
            self._close("failed", exc.message)
            raise
        except BaseException as exc:
            self._close("failed", f"{type(exc).__name__}: {exc}")
            raise
        self._close("done")
        return done

    def _play_attempts(self, adopted: Mapping[int, RemoteTask] | None, past: EventHistory) -> ScriptOutcome:
        why = "launched"
        if self._request.balance_steps is not None and adopted is None:
            why = self._balance(self._request.balance_steps)
        while True:
            try:
                if adopted is not None:
                    self._adopt(adopted, past)
                else:
                    self._start(why)
                assert self._group is not None
                self._sink.update(status="running", detail=None)
                self._group.watch()
            except SkyctlError as exc:
                why = self._recover(exc)
            else:
                return self._finished()
            adopted = None

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
        self._start(f"timing {steps} steps")
        group = self._group
        assert group is not None
        wanted = steps + UNTIMED_STEPS
        group.watch_steps(lambda: all(len(times) >= wanted for times in group.steps_s))
        self._end_group([])
        self._is_trial = False
        update_attempt(self._sink, ended=timestamp())
        timed = [times[UNTIMED_STEPS:wanted] for times in group.steps_s]
        return ([middle_mean(times) for times in timed], group.batch) if all(timed) else None

    def _settle(self, request: ScriptRequest) -> None:
        """Goes on with that request, and writes it down for whoever takes the run over."""
        self._request = request
        self._sink.update(order={**self._sink.state.order, SCRIPT: request.model_dump(mode="json")})

    # --- an attempt

    def _start(self, why: str) -> None:
        request, paths = self._request, self._sink.paths
        if self._sink.state.attempts:
            self._number += 1
            paths = RunPaths(paths.run_id, self._number).create()
        addresses = self._addresses()
        master = self._find_master(addresses)
        order = [master, *(node for node in self._counts if node != master)]
        self._ranks = place_ranks({node: self._counts[node] for node in order})
        shares = divide_batch(self._request, self._ranks)
        self._sink.begin(paths, None)
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
        self._sink.update(attempts=(*self._sink.state.attempts, entry), status=status, detail=why)
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
            secret=secrets.token_hex(32) if self._cluster.backend == "skyctl" else None,
        )
        self._group = self._make_group()
        self._group.start(
            [self._order(orders, rank, addresses[rank.node]) for rank in self._ranks],
            lambda port: BeginScript({"MASTER_ADDR": addresses[master], "MASTER_PORT": str(port)}),
        )
        self._callbacks.phase(f"{len(self._ranks)} ranks run; rank 0 is on {master}")

    def _order(self, orders: RankOrders, rank: ScriptRank, address: str) -> ScriptOrder:
        interface = interface_with_address(self._sessions[rank.node], address)
        return orders.order(rank, self._cluster.node(rank.node), self._workplace(rank.node), interface)

    def _adopt(self, tasks: Mapping[int, RemoteTask], past: EventHistory) -> None:
        nodes = [device.rpartition("/")[0] for device in self._sink.state.attempts[-1].devices]
        played = [attempt for attempt in self._sink.state.attempts if not attempt.trial]
        self._restarts = len(played) - 1
        self._failed = self._restarts - sum(attempt.planned for attempt in played)
        counts = {node: nodes.count(node) for node in nodes}
        self._counts = {node: count for node, count in self._counts.items() if node in counts}
        self._ranks = place_ranks(counts)
        self._group = self._make_group()
        self._group.adopt(tasks, past)
        with suppress(SkyctlError):
            self._find_master(self._addresses())

    def _make_group(self) -> ScriptGroup:
        def heard(rank: ScriptRank, message: Mapping[str, Any]) -> bool:
            return self._sink.heard(rank.node, rank_task_name(rank.rank), message)

        def log_of(rank: int) -> str | None:
            path = self._sink.paths.log(rank)
            return str(path) if path.exists() else None

        stall_s = self._request.stall_s or None
        return ScriptGroup(self._ranks, self._sessions, self._callbacks, heard, self._tick, log_of, stall_s)

    def _addresses(self) -> dict[str, str]:
        found = find_peer_addresses({node: self._sessions[node] for node in self._counts})
        for outcome in found.values():
            if isinstance(outcome, SkyctlError):
                raise outcome
        return {node: address for node, address in found.items() if isinstance(address, str)}

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
            found = find_script_files(folder, request.ship, left_out=left_out)
            self._files = read_script_files(folder, found)
            if self._outputs is not None:
                self._outputs.note_shipped(self._files)
            size = sum(map(len, self._files.values()))
            self._callbacks.note(f"{len(found)} files of {folder}, {size / 2**20:.1f} MiB, go to every node")
        files = self._files
        with ThreadPoolExecutor(max_workers=len(self._counts)) as pool:
            nodes = list(self._counts)
            paths = pool.map(lambda node: self._sessions[node].push_tree(files), nodes)
            self._trees = dict(zip(nodes, paths, strict=True))

    def _workplace(self, node: str | None) -> Workplace:
        tree = self._trees.get(node) if node is not None else None
        name = f"trial-{self._number}" if self._is_trial else "work"
        return Workplace(tree, self._request.workdir, self._request.output_name, name)

    # --- while it is watched

    def _tick(self) -> None:
        for request in take_requests(self._sink.paths):
            if isinstance(request, JoinRequest):
                self._callbacks.warn("a script's nodes are those it began with: a request to join is dropped")
                continue
            self._sink.update(status="stopping")
            raise StopRequested
        self._watch.look(self._counts)

    # --- after an attempt

    def _recover(self, error: SkyctlError) -> str:
        """After a failure: ends what is left of the attempt. Raises the error where there is no next one.

        Returns:
            what the next attempt is begun for.
        """
        if self._group is None:
            raise error
        error = self._watch.cause_of(error, self._counts)
        lost = self._watch.lost_nodes(error, self._counts)
        if lost:
            told = dict.fromkeys(lost, error.message)
            self._sink.update(lost={**self._sink.state.lost, **told})
        self._end_group(lost)
        self._gather(without=lost)
        update_attempt(self._sink, ended=timestamp(), error=error.message)
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

    def _finished(self) -> ScriptOutcome:
        assert self._group is not None
        returncodes = tuple(self._group.returncodes)
        self._end_group([])
        self._gather()
        return ScriptOutcome(
            self._sink.paths.run_id,
            tuple(self._ranks),
            returncodes,
            self._restarts,
            self._request.output,
            self._came,
        )

    def _gather(self, without: Sequence[str] = ()) -> None:
        if self._outputs is None or not self._ranks or self._is_trial:
            return
        there = {node: one for node, one in self._sessions.items() if node not in without}
        sessions = {node: one for node, one in there.items() if one.lost is None}
        self._callbacks.phase(f"bringing home what ranks have written to {self._request.output_name}")
        self._came += self._outputs.gather(self._ranks, sessions)
        for node in without:
            self._callbacks.warn(f"what node {node} had written since is lost with it")

    def _end_group(self, lost: list[str]) -> None:
        group, self._group = self._group, None
        if group is not None:
            group.end(RANKS_END_S, lost)

    def _close(self, status: str, detail: str | None = None) -> None:
        """The last word of the state; what was written comes home even where the run was stopped."""
        had = self._group is not None
        self._end_group([])
        if had:
            with suppress(SkyctlError):
                self._gather()
        self._watch.close()
        with suppress(SkyctlError):
            update_attempt(self._sink, ended=timestamp(), error=detail)
            self._sink.update(status=status, detail=detail)
            self._sink.close()
