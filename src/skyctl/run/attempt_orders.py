"""The orders that the ranks of an attempt are given, and the code that is sent to their nodes before."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from skyctl.checkpoint.launcher import policy
from skyctl.checkpoint.launcher.replicator_group import run_folder_on_node
from skyctl.checkpoint.node.recovery import RestorePoint
from skyctl.device.cgroup import read_limits
from skyctl.device.process_memory import private_bytes
from skyctl.errors import SkyctlError
from skyctl.jobs.training_request import TrainingRequest, send_workload, shipped_data_changed
from skyctl.learning.cluster_changes import local_memory_changes, refuse_changes
from skyctl.records.cluster import node_of
from skyctl.records.plan import Plan
from skyctl.records.plan_nodes import layers_by_node, nodes_in
from skyctl.remote.agent_session import Session
from skyctl.remote.peer_addresses import find_peer_addresses
from skyctl.run.elastic_spec import elastic_order, entering_spec, is_elastic
from skyctl.run.expert_spec import ExpertHosting, hosting_again, place_hosts
from skyctl.run.expert_step import predict_hosted
from skyctl.run.journal import update_attempt
from skyctl.run.live_run import LiveRun
from skyctl.run.rank_spec import AttemptCheckpoints, RankSpec, rank_specs, used_nodes
from skyctl.run.run_options import RunOptions
from skyctl.run.sum_claims import planned_numels
from skyctl.worker.rank_order import BestValidation, ElasticOrder
from skyctl.workload.shipped_files import digest_workload, files_to_ship
from skyctl.workload.workload_spec import WorkloadSpec


@dataclass(frozen=True)
class HostedExperts:
    """The hosts of experts of one attempt, as they are told of it.

    Attributes:
        addresses: by node of a host, where ranks reach it.
        workload: by node of a host, as it is told it.
    """

    places: ExpertHosting
    addresses: Mapping[str, str]
    workload: Mapping[str, WorkloadSpec]


@dataclass(frozen=True)
class AttemptOrders:
    """One attempt, as its ranks are told it.

    Attributes:
        number: counted from 1 over all attempts of the run.
        specs: by rank.
        first: the first step that they make.
        experts: on hosts; None: there are none.
    """

    plan: Plan
    number: int
    specs: list[RankSpec]
    first: int
    experts: HostedExperts | None = None


@dataclass(frozen=True)
class NodeToEnter:
    """A node that is ready to enter an attempt under way.

    Attributes:
        workload: as the node is told it.
        addresses: by node, where its peers reach it; of the members, and of that node.
    """

    workload: WorkloadSpec
    addresses: Mapping[str, str]


class OrderMaker:
    """Makes the orders of a run's attempts. For every attempt it ships the code of the first one here.

    So whoever edits that while the run goes on changes nothing of it. A process that has taken the run over
    has it as it is then, and says where it has changed.
    """

    def __init__(self, run: LiveRun, request: TrainingRequest, options: RunOptions) -> None:
        self._run, self._request, self._options = run, request, options
        self._files: Mapping[str, bytes] | None = None

    def make(self, plan: Plan, number: int, origin: RestorePoint | None) -> AttemptOrders:
        """The orders of an attempt that is about to be started; what its nodes need for them is there then.

        Args:
            origin: the checkpoint that its ranks go on from.

        Raises:
            ClusterChangedError: ranks on this machine need more memory together than is free.
            SkyctlError: a node could not say its address, or did not take the code.
        """
        if refuses_changes(self._options, number) and self._options.turns is None:
            self._refuse_local_shortage(plan)
        plan, places = self._place_experts(plan)
        hosting = () if places is None else places.nodes
        addresses = self._run.addresses((*nodes_in(plan), *hosting))
        self._run.callbacks.phase("shipping the workload")
        workload = self._ship_workload(plan, restored=origin is not None, places=places)
        checkpoints = self._checkpoints(plan, number, origin, layers_by_node(plan))
        specs = self._specs(plan, workload, addresses, checkpoints, places)
        experts = None if places is None else HostedExperts(places, addresses, workload)
        return AttemptOrders(plan, number, specs, 0 if origin is None else origin.step, experts)

    def make_again(self, plan: Plan, number: int) -> AttemptOrders:
        """The orders of an attempt that another process has started.

        They lack what only that process knew: paths on nodes, and addresses.
        """
        nodes, attempts = nodes_in(plan), self._run.journal.state.attempts
        workload = dict.fromkeys(nodes, self._request.spec)
        setting, places = self._options.experts, None
        if setting is not None and attempts:
            places = hosting_again(setting, attempts[-1].expert_hosts)
            if places is not None:
                known = {"iteration_s": attempts[-1].predicted_iteration_s, "interval": None}
                plan = plan.model_copy(update={"predicted": plan.predicted.model_copy(update=known)})
        specs = self._specs(plan, workload, dict.fromkeys(nodes, ""), AttemptCheckpoints(), places)
        for device in attempts[-1].devices[len(specs) :] if attempts else ():
            before, node = dict.fromkeys(range(len(specs)), ""), self._run.cluster.node(node_of(device))
            specs.append(entering_spec(specs[0], plan, node, device, before, len(specs)))
        first = attempts[-1].from_step if attempts else 0
        experts = None if places is None else HostedExperts(places, {}, {})
        return AttemptOrders(plan, number, specs, first, experts)

    def prepare(self, plan: Plan, name: str, sessions: Mapping[str, Session]) -> NodeToEnter:
        """Sends a node all that it needs to enter an attempt under way; this may take its time.

        ``files_to_ship`` is to have been called before. Any thread may call this.

        Args:
            sessions: of the members' nodes, and of that one.

        Raises:
            SkyctlError: a node could not say its address, or that one did not take the code.
        """
        addresses: dict[str, str] = {}
        for node, found in find_peer_addresses(sessions).items():
            if isinstance(found, SkyctlError):
                raise found
            addresses[node] = found
        layers = set(range(len(plan.problem.layers)))
        sent = self._send({name: sessions[name]}, {name}, {name: layers}, restored=True)
        return NodeToEnter(sent[name], addresses)

    def entering(
        self,
        orders: AttemptOrders,
        device: str,
        members: Mapping[int, str],
        prepared: NodeToEnter,
        pace_s: float | None,
    ) -> RankSpec:
        """The next rank of an attempt under way, whose node is prepared.

        Args:
            members: by rank, the node of each that makes steps.
        """
        name, rank = node_of(device), len(orders.specs)
        return entering_spec(
            orders.specs[0],
            orders.plan,
            self._run.cluster.node(name),
            device,
            {member: prepared.addresses[node] for member, node in members.items()},
            rank,
            address=prepared.addresses[name],
            workload=prepared.workload,
            checkpoints=self._checkpoints(orders.plan, orders.number, None, [name]),
            folder=Path(self._run.sessions[name].hello.folder) / f"given-to-{rank}",
            pace_s=pace_s,
        )

    def files_to_ship(self) -> Mapping[str, bytes]:
        """The user's code, and the data files that go along."""
        if self._files is None:
            spec = self._request.spec
            self._files = files_to_ship(spec)
            began = self._run.journal.state.order.get("digest")
            changed = ["the code"] if began is not None and digest_workload(spec) != began else []
            changed += ["the data files that are shipped"] if shipped_data_changed(spec) else []
            if changed:
                self._run.callbacks.warn(
                    f"{' and '.join(changed)} of {spec.source} are not those that the run began with; it "
                    "goes on with what is here now"
                )
        return self._files

    def _specs(
        self,
        plan: Plan,
        workload: Mapping[str, WorkloadSpec],
        addresses: Mapping[str, str],
        checkpoints: AttemptCheckpoints,
        places: ExpertHosting | None,
    ) -> list[RankSpec]:
        made = rank_specs(
            plan,
            self._run.cluster,
            run_id=self._run.run_id,
            steps=self._options.steps,
            workload=workload,
            addresses=addresses,
            weights=self._options.weights,
            recipe=self._request.recipe,
            trace=self._options.trace,
            checkpoints=checkpoints,
            elastic=self._elastic(plan),
            turns=self._options.turns,
        )
        limits, numels = policy.shard_limits(plan.problem), planned_numels(plan.problem)
        return [
            replace(
                spec,
                shard_limits={n: limits[n] for n in spec.layers},
                summed_numels=numels,
                experts=None if places is None else places.of_layers(spec.layers),
            )
            for spec in made
        ]

    def _place_experts(self, plan: Plan) -> tuple[Plan, ExpertHosting | None]:
        """Places the experts on hosts for an attempt that is about to be started, and says where.

        The plan is returned with the prediction of a step with these hosts.
        """
        setting = self._options.experts
        if setting is None:
            return plan, None
        callbacks = self._run.callbacks
        callbacks.phase("placing experts")
        places = place_hosts(plan, setting, self._run.sessions)
        if places is None:
            callbacks.warn(
                "no node that was to host experts is left: they are computed where their layers are"
            )
            return plan, None
        predicted = predict_hosted(plan, setting, places)
        callbacks.note(places.describe(predicted.iteration_s))
        update_attempt(self._run.journal, predicted_iteration_s=predicted.iteration_s)
        return plan.model_copy(update={"predicted": predicted}), places

    def _elastic(self, plan: Plan) -> ElasticOrder | None:
        """The order to go on if a rank is lost; None: not asked for, or a later plan doesn't allow it."""
        options = self._options
        is_first = len(self._run.journal.state.attempts) <= 1
        if not options.elastic or not (is_first or is_elastic(plan, options)):
            return None
        least = min(options.min_pipelines, len(plan.pipelines))
        return elastic_order(plan, least, dynamic=options.dynamic)

    def _ship_workload(
        self, plan: Plan, *, restored: bool, places: ExpertHosting | None
    ) -> dict[str, WorkloadSpec]:
        """By node that holds a stage or hosts experts, the workload as that node is told it.

        Weights to start from are not sent to ranks that go on from a checkpoint: they may be gone by then.
        One of adapters lacks the frozen weights, so these are.
        """
        run, held = self._run, layers_by_node(plan)
        nodes = used_nodes(plan, run.cluster)
        layers = {node.name: held[node.name] for node in nodes if node.name in held}  # in inventory order
        if places is not None:
            for name in places.nodes:
                layers[name] = layers.get(name, set()) | {*places.counts}
        ends = {node_of(p.stages[i].device) for p in plan.pipelines for i in (0, -1)}
        sessions = {name: run.sessions[name] for name in layers}
        return self._send(sessions, ends, layers, restored=restored)

    def _send(
        self,
        sessions: Mapping[str, Session],
        with_data: Collection[str],
        layers: Mapping[str, Collection[int]],
        *,
        restored: bool,
    ) -> dict[str, WorkloadSpec]:
        spec, note = self._request.spec, self._run.callbacks.note
        alone = restored and spec.init_from is not None and spec.lora is None
        stored = None if alone else layers
        return send_workload(
            spec, sessions, with_data=with_data, layers=stored, files=self.files_to_ship(), note=note
        )

    def _checkpoints(
        self, plan: Plan, number: int, origin: RestorePoint | None, holding: Collection[str]
    ) -> AttemptCheckpoints:
        """The attempt's checkpoints, on the nodes that hold layers."""
        rules, every = self._options.checkpoints, None
        if rules.writes:
            every = self._options.checkpoint_every
            if every is None:
                every = policy.checkpoint_interval(plan, rules.replicas)
        run, best = self._run, self._run.journal.state.best
        return AttemptCheckpoints(
            attempt=number,
            folders={node: str(run_folder_on_node(run.sessions[node], run.run_id)) for node in holding},
            origin=origin,
            every=every,
            keep=rules.kept_steps,
            best=None if best is None else BestValidation(best.step, best.loss),
        )

    def _refuse_local_shortage(self, plan: Plan) -> None:
        """Of ranks on this machine, before they are started: many of them fill its memory by being there."""
        from skyctl.device.node_environment import host_memory

        nodes = [node.name for node in self._run.cluster.nodes if node.transport == "local"]
        free = host_memory(read_limits())["available_bytes"] - private_bytes()  # this process stays
        refuse_changes(plan, local_memory_changes(plan, nodes, free))


def refuses_changes(options: RunOptions, number: int) -> bool:
    """Whether an attempt is refused where nodes have changed.

    Only the first one is: later ones train on what is there, and it is said.
    """
    return number == 1 and not options.ignore_changes
