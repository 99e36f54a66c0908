"""The task that replicates a node's checkpoints of a run, as its ``ReplicatorOrder`` says. Needs no torch.

::

    replicator → ReplicatorListening
    → replicator ListRequest
    replicator → ReplicatorAnswer with "steps": {STEP: {LAYER: {"sha256", "bytes", "attempt", "own"}}}
    → replicator VerifyRequest
    replicator → ReplicatorAnswer with "whole": [LAYER], "damaged": {LAYER: why}
    → replicator PullRequest, AdoptRequest
    replicator → ReplicatorAnswer with "done": [LAYER], "failed": {LAYER: why}, "unwritable"
    → replicator FollowRequest
    replicator → LayersReplicated
    replicator → ReplicationFailed                           it keeps trying
    → replicator PinRequest, PruneRequest, ForgetRequest
    replicator → ReplicatorAnswer with "removed": [STEP]
    → replicator StopReplicatorRequest                       ends the task

The requests are in ``replicator_requests``, the events in ``replicator_events``. The answer to a request that
fails has ``error``. Followed nodes are copied from while no launcher is connected, too.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from skyctl.agent.frames import CHUNK_BYTES
from skyctl.agent.task_events import to_message
from skyctl.agent.task_orders import read_order, read_request
from skyctl.agent.task_runner import AgentGoneError, TaskChannel
from skyctl.checkpoint.node import layout
from skyctl.checkpoint.node.atomic_file import UnwritableError, atomic_writer
from skyctl.checkpoint.node.replicator_events import ReplicatorListening
from skyctl.checkpoint.node.replicator_order import ReplicatorOrder
from skyctl.checkpoint.node.replicator_requests import (
    REPLICATOR_REQUESTS,
    AdoptRequest,
    FollowRequest,
    ListRequest,
    PinRequest,
    PruneRequest,
    PullRequest,
    ReplicatorRequest,
    StopReplicatorRequest,
    VerifyRequest,
)
from skyctl.checkpoint.node.shard_client import (
    ReplicatorAddress,
    ReplicatorCredentials,
    ShardClient,
    fetch_shards,
)
from skyctl.checkpoint.node.shard_follower import ShardFollower
from skyctl.checkpoint.node.shard_server import ShardServer, list_holdings
from skyctl.errors import RecordError, SkyctlError

MAX_TRANSFERS = 4
"""Pulls and verifications that run at a time; others wait for their turn."""
MAX_FOLLOWED = 2
"""Followed nodes that are copied from at a time."""

Message = dict[str, Any]


class CheckpointReplicator:
    """The replicator of one node and run: ``run`` once, then ``close`` in any case."""

    def __init__(self, order: ReplicatorOrder, channel: TaskChannel) -> None:
        self._channel = channel
        self._folder = order.folder
        self._credentials = ReplicatorCredentials(order.run_id, order.secret, order.tls)
        self._poll_s = order.poll_s
        self._transfer_slots = threading.BoundedSemaphore(MAX_TRANSFERS)
        self._follower_slots = threading.BoundedSemaphore(MAX_FOLLOWED)
        self._followers: list[ShardFollower] = []
        layout.remove_leftovers(self._folder)
        self._server = ShardServer(
            self._folder,
            run_id=self._credentials.run_id,
            node=order.node,
            secret=order.secret,
            address=order.address,
            identity=order.tls,
        )

    def run(self) -> None:
        """Answers requests until it is told to stop, or the agent is gone."""
        pinned = tuple(sorted(layout.pinned_steps(self._folder)))
        self._channel.send(to_message(ReplicatorListening(self._server.address, self._server.port, pinned)))
        while True:
            received = self._channel.recv(None)
            if received is None:
                continue
            try:
                request = read_request(REPLICATOR_REQUESTS, received[0])
            except RecordError as exc:
                self._channel.send({"event": "answer", "id": received[0].get("id"), "error": exc.message})
                continue
            if isinstance(request, StopReplicatorRequest):
                return
            if isinstance(request, VerifyRequest | PullRequest | AdoptRequest):
                name = f"replicator: {request.kind}"
                threading.Thread(
                    target=self._answer_in_thread, args=(request,), daemon=True, name=name
                ).start()
            else:
                self._answer(request)

    def close(self) -> None:
        """Stops listening and following. Idempotent."""
        for follower in self._followers:
            follower.close()
        self._server.close()

    def _answer_in_thread(self, request: ReplicatorRequest) -> None:
        with self._transfer_slots, suppress(AgentGoneError):
            self._answer(request)

    def _answer(self, request: ReplicatorRequest) -> None:
        try:
            answer = self._act(request)
        except SkyctlError as exc:
            answer = {"error": exc.message}
        except OSError as exc:
            answer = {"error": f"{request.kind!r} could not be done: {type(exc).__name__}: {exc}"}
        if request.id is not None or "error" in answer:
            self._channel.send({"event": "answer", "id": request.id, **answer})

    def _act(self, request: ReplicatorRequest) -> Message:
        if isinstance(request, ListRequest):
            return {"steps": list_holdings(self._folder, named=request.named)}
        if isinstance(request, VerifyRequest):
            return self._verify(request)
        if isinstance(request, PullRequest):
            return self._pull(request)
        if isinstance(request, AdoptRequest):
            return self._adopt(request)
        if isinstance(request, FollowRequest):
            return self._follow(request)
        if isinstance(request, PinRequest):
            return self._pin(request)
        if isinstance(request, PruneRequest):
            return {"removed": layout.retain_steps(self._folder, set(request.keep_steps))}
        return self._forget()

    def _verify(self, request: VerifyRequest) -> Message:
        intact, damaged = [], {}
        for layer, sha256 in request.layers.items():
            fault = layout.find_fault(self._folder, request.step, layer, sha256)
            if fault is None:
                intact.append(layer)
            else:
                damaged[str(layer)] = fault
        return {"whole": intact, "damaged": damaged}

    def _pull(self, request: PullRequest) -> Message:
        step = request.step
        wanted = {layer: (sha256, request.attempt) for layer, sha256 in request.layers.items()}
        address = ReplicatorAddress(request.host, request.port, request.node)
        failed: dict[int, SkyctlError] = {}
        self._clear_damaged(step, wanted)
        try:
            with ShardClient(address, self._credentials) as client:
                run_id = self._credentials.run_id
                _, failed = fetch_shards(client, self._folder, step, wanted, request.limits, run_id)
        except SkyctlError as exc:
            here = layout.held_shards(self._folder, [step]).get(step, {})
            for layer, (sha256, _) in wanted.items():
                if layer not in here or here[layer].sha256 != sha256:
                    failed.setdefault(layer, exc)
        return _transfer_answer(wanted, failed)

    def _clear_damaged(self, step: int, wanted: Mapping[int, tuple[str, int]]) -> None:
        """Removes shards that differ from their manifests; else they would not be fetched again."""
        here = layout.held_shards(self._folder, [step]).get(step, {})
        for layer, (sha256, _) in wanted.items():
            listed = layer in here and here[layer].sha256 == sha256
            if listed and layout.find_fault(self._folder, step, layer, sha256) is not None:
                layout.layer_path(self._folder, step, layer).unlink(missing_ok=True)

    def _adopt(self, request: AdoptRequest) -> Message:
        step, attempt = request.step, request.attempt
        failed: dict[int, SkyctlError] = {}
        layout.make_step_folder(self._folder, step)
        for layer, file in request.layers.items():
            source = file.path
            try:
                with (
                    source.open("rb") as given,
                    atomic_writer(layout.layer_path(self._folder, step, layer), 0o600) as out,
                ):
                    while chunk := given.read(CHUNK_BYTES):
                        out.write(chunk)
                    if out.digest.sha256 != file.sha256:
                        raise RecordError(f"{source} is damaged: its SHA-256 is {out.digest.sha256[:12]}…")
                layout.write_copy_manifest(
                    self._folder, step, layer, out.digest, attempt, self._credentials.run_id
                )
                source.unlink(missing_ok=True)
            except OSError as exc:
                failed[layer] = SkyctlError(f"{source} can't be read: {exc.strerror or exc}")
            except SkyctlError as exc:
                failed[layer] = exc
        return _transfer_answer(request.layers, failed)

    def _follow(self, request: FollowRequest) -> Message:
        peers = [ReplicatorAddress(peer.host, peer.port, peer.node) for peer in request.peers]
        for follower in self._followers:
            follower.close()
        self._followers = [
            ShardFollower(
                self._folder,
                peer,
                self._credentials,
                keep=request.keep,
                limits=request.limits,
                slots=self._follower_slots,
                send=self._channel.send,
                poll_s=self._poll_s,
            )
            for peer in peers
        ]
        return {"following": [peer.node for peer in peers]}

    def _pin(self, request: PinRequest) -> Message:
        layout.make_folder(self._folder)
        layout.pin_steps(self._folder, request.steps)
        return {"pinned": sorted(layout.pinned_steps(self._folder))}

    def _forget(self) -> Message:
        for follower in self._followers:
            follower.close()
        self._followers = []
        removed = layout.list_steps(self._folder)
        layout.remove_run_folder(self._folder)
        return {"removed": removed}


def _transfer_answer(wanted: Mapping[int, Any], failed: Mapping[int, SkyctlError]) -> Message:
    # a step that was pruned meanwhile has no folder any more: nothing is wrong with the disk then
    of_disk = [
        exc.message
        for exc in failed.values()
        if isinstance(exc, UnwritableError) and not isinstance(exc.__cause__, FileNotFoundError)
    ]
    return {
        "done": [layer for layer in wanted if layer not in failed],
        "failed": {str(layer): exc.message for layer, exc in failed.items()},
        "unwritable": next(iter(of_disk), None),
    }


def main(message: Message, channel: TaskChannel) -> Message:
    """Serves, copies and verifies shards until it is told to stop.

    Args:
        message: a ``ReplicatorOrder``.

    Raises:
        MismatchError, RecordError: it can't follow the order.
        SkyctlError: it can't listen on the address it was given.
    """
    replicator = CheckpointReplicator(read_order([ReplicatorOrder], message), channel)
    try:
        replicator.run()
    finally:
        replicator.close()
    return {}
