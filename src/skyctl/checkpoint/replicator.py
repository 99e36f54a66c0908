"""The task that replicates a node's checkpoints of a run, as its ``ReplicatorOrder`` says. Needs no torch.

::

    replicator → ReplicatorListening
    → replicator {"op": "list", "id", "named"}               named: all that manifests name, present or not
    replicator → ReplicatorAnswer with "steps": {STEP: {LAYER: {"sha256", "bytes", "attempt", "own"}}}
    → replicator {"op": "verify", "id", "step", "layers": {LAYER: sha256 or null}}    null: as in its manifest
    replicator → ReplicatorAnswer with "whole": [LAYER], "damaged": {LAYER: why}
    → replicator {"op": "pull", "id", "host", "port", "node", "step", "layers": {LAYER: sha256}, "attempt"}
    → replicator {"op": "adopt", "id", "step", "layers": {LAYER: {"path", "sha256"}}, "attempt"}
    replicator → ReplicatorAnswer with "done": [LAYER], "failed": {LAYER: why}, "unwritable"
    → replicator {"op": "follow", "peers": [{"host", "port", "node"}], "keep": K}      replaces the last one
    replicator → LayersReplicated
    replicator → ReplicationFailed                           it keeps trying
    → replicator {"op": "pin", "id", "steps": [STEP]}        followed first, never pruned
    → replicator {"op": "prune", "id", "keep_steps": [STEP]}
    replicator → ReplicatorAnswer with "removed": [STEP]
    → replicator {"op": "forget", "id"}                      removes the run's folder
    → replicator {"op": "stop"}                              ends the task

``adopt`` moves files that arrived over the launcher's sessions into their place. The answer to a request that
fails has ``error``. The events are in ``replicator_events``. Followed nodes are copied from while no launcher
is connected, too.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from skyctl.agent.frames import CHUNK_BYTES
from skyctl.agent.task_events import to_message
from skyctl.agent.task_orders import read_order
from skyctl.agent.task_runner import AgentGoneError, TaskChannel
from skyctl.checkpoint import layout
from skyctl.checkpoint.atomic_file import UnwritableError, atomic_writer
from skyctl.checkpoint.replicator_events import ReplicatorListening
from skyctl.checkpoint.replicator_order import ReplicatorOrder
from skyctl.checkpoint.shard_client import (
    ReplicatorAddress,
    ReplicatorCredentials,
    ShardClient,
    ShardFollower,
    fetch_shards,
)
from skyctl.checkpoint.shard_server import ShardServer, list_holdings
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
        in_thread: dict[str, Callable[[Message], Message]] = {
            "verify": self._verify,
            "pull": self._pull,
            "adopt": self._adopt,
        }
        immediately: dict[str, Callable[[Message], Message]] = {
            "list": lambda message: {"steps": list_holdings(self._folder, named=bool(message.get("named")))},
            "follow": self._follow,
            "pin": self._pin,
            "prune": self._prune,
            "forget": self._forget,
        }
        while True:
            received = self._channel.recv(None)
            if received is None:
                continue
            message = received[0]
            op = str(message.get("op"))
            if op == "stop":
                return
            if op in in_thread:
                work = (in_thread[op], message)
                name = f"replicator: {op}"
                threading.Thread(target=self._answer_in_thread, args=work, daemon=True, name=name).start()
            else:
                self._answer(immediately.get(op, _answer_unknown), message)

    def close(self) -> None:
        """Stops listening and following. Idempotent."""
        for follower in self._followers:
            follower.close()
        self._server.close()

    def _answer_in_thread(self, act: Callable[[Message], Message], message: Message) -> None:
        with self._transfer_slots, suppress(AgentGoneError):
            self._answer(act, message)

    def _answer(self, act: Callable[[Message], Message], message: Message) -> None:
        try:
            answer = act(message)
        except SkyctlError as exc:
            answer = {"error": exc.message}
        except (KeyError, ValueError, TypeError, AttributeError, OSError) as exc:
            answer = {"error": f"{message.get('op')!r:.40} could not be done: {type(exc).__name__}: {exc}"}
        if "id" in message or "error" in answer:
            self._channel.send({"event": "answer", "id": message.get("id"), **answer})

    def _verify(self, message: Message) -> Message:
        step = layout.parse_natural(message["step"])
        intact, damaged = [], {}
        for key, sha256 in message["layers"].items():
            fault = layout.find_fault(self._folder, step, layout.parse_index(key), sha256)
            if fault is None:
                intact.append(layout.parse_index(key))
            else:
                damaged[key] = fault
        return {"whole": intact, "damaged": damaged}

    def _pull(self, message: Message) -> Message:
        step, attempt = layout.parse_natural(message["step"]), layout.parse_natural(message.get("attempt", 0))
        wanted = {
            layout.parse_index(key): (str(sha256), attempt) for key, sha256 in message["layers"].items()
        }
        address = _parse_address(message)
        failed: dict[int, SkyctlError] = {}
        self._clear_damaged(step, wanted)
        try:
            with ShardClient(address, self._credentials) as client:
                limits = _parse_limits(message)
                run_id = self._credentials.run_id
                _, failed = fetch_shards(client, self._folder, step, wanted, limits, run_id)
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

    def _adopt(self, message: Message) -> Message:
        step, attempt = layout.parse_natural(message["step"]), layout.parse_natural(message.get("attempt", 0))
        failed: dict[int, SkyctlError] = {}
        wanted = {layout.parse_index(key): file for key, file in message["layers"].items()}
        layout.make_step_folder(self._folder, step)
        for layer, file in wanted.items():
            source = Path(file["path"])
            try:
                with (
                    source.open("rb") as given,
                    atomic_writer(layout.layer_path(self._folder, step, layer), 0o600) as out,
                ):
                    while chunk := given.read(CHUNK_BYTES):
                        out.write(chunk)
                    if out.digest.sha256 != file["sha256"]:
                        raise RecordError(f"{source} is damaged: its SHA-256 is {out.digest.sha256[:12]}…")
                layout.write_copy_manifest(
                    self._folder, step, layer, out.digest, attempt, self._credentials.run_id
                )
                source.unlink(missing_ok=True)
            except OSError as exc:
                failed[layer] = SkyctlError(f"{source} can't be read: {exc.strerror or exc}")
            except SkyctlError as exc:
                failed[layer] = exc
        return _transfer_answer(wanted, failed)

    def _follow(self, message: Message) -> Message:
        peers = [_parse_address(peer) for peer in message["peers"]]
        keep = layout.parse_natural(message.get("keep", 2))
        limits = _parse_limits(message)
        for follower in self._followers:
            follower.close()
        self._followers = [
            ShardFollower(
                self._folder,
                peer,
                self._credentials,
                keep=keep,
                limits=limits,
                slots=self._follower_slots,
                send=self._channel.send,
                poll_s=self._poll_s,
            )
            for peer in peers
        ]
        return {"following": [peer.node for peer in peers]}

    def _pin(self, message: Message) -> Message:
        layout.make_folder(self._folder)
        layout.pin_steps(self._folder, message["steps"])
        return {"pinned": sorted(layout.pinned_steps(self._folder))}

    def _prune(self, message: Message) -> Message:
        kept = {layout.parse_natural(step) for step in message["keep_steps"]}
        return {"removed": layout.retain_steps(self._folder, kept)}

    def _forget(self, _message: Message) -> Message:
        for follower in self._followers:
            follower.close()
        self._followers = []
        removed = layout.list_steps(self._folder)
        layout.remove_run_folder(self._folder)
        return {"removed": removed}


def _answer_unknown(message: Message) -> Message:
    return {"error": f"a checkpoint replicator knows no {message.get('op')!r:.40}"}


def _parse_address(values: Mapping[str, Any]) -> ReplicatorAddress:
    return ReplicatorAddress(
        str(values["host"]), layout.parse_natural(values["port"], 65536), str(values["node"])
    )


def _parse_limits(message: Mapping[str, Any]) -> dict[int, int]:
    """By layer, the most bytes that its shard can have."""
    return {
        layout.parse_index(layer): layout.parse_natural(size, 1 << 62)
        for layer, size in message["limits"].items()
    }


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
