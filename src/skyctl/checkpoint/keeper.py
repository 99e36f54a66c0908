"""The task that keeps a node's part of a run's checkpoints: ``main(payload, channel)``. Needs no torch.

Payload: ``run_id``; ``folder``, the run's on this node (``layout``); ``secret``, shared by the run's keepers;
``address`` to listen on (None: this machine's own on the route to ``towards``, over ``interface``); ``tls``,
``{"cert", "key"}`` or None; ``poll_s`` between two looks at a peer that is followed.

::

    keeper → {"event": "listening", "port", "address", "pinned": [STEP]}
    → keeper {"op": "list", "id", "named"}                   named: what its manifests name, there or not
    keeper → {"event": "answer", "id", "steps": {STEP: {LAYER: {"sha256", "bytes", "attempt", "own"}}}}
    → keeper {"op": "verify", "id", "step", "layers": {LAYER: sha256 or null}}     null: as its manifest says
    keeper → {"event": "answer", "id", "whole": [LAYER], "damaged": {LAYER: why}}
    → keeper {"op": "pull", "id", "host", "port", "node", "step", "layers": {LAYER: sha256}, "attempt"}
    → keeper {"op": "adopt", "id", "step", "layers": {LAYER: {"path", "sha256"}}, "attempt"}
    keeper → {"event": "answer", "id", "done": [LAYER], "failed": {LAYER: why}}
    → keeper {"op": "follow", "peers": [{"host", "port", "node"}], "keep": K}      in place of the one before
    keeper → {"event": "replicated", "step", "attempt", "from", "layers", "bytes", "wall_s"}
    keeper → {"event": "unreplicated", "from", "error"}      it goes on trying
    → keeper {"op": "pin", "id", "steps": [STEP]}            followed first, pruned by nobody
    → keeper {"op": "prune", "id", "keep_steps": [STEP]}
    keeper → {"event": "answer", "id", "removed": [STEP]}
    → keeper {"op": "forget", "id"}                          the run's folder
    → keeper {"op": "stop"}                                  its end

``adopt`` takes files that came another way (over the launcher's sessions) into their place. An answer to
what can't be done has ``error``. What is followed goes on while no launcher is there.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

from skyctl.agent.task import AgentGoneError
from skyctl.agent.wire import CHUNK_BYTES
from skyctl.checkpoint import layout
from skyctl.checkpoint.atomic import writing
from skyctl.checkpoint.fetching import Address, Credentials, Peer, note_copy, take
from skyctl.checkpoint.following import POLL_S, Follower
from skyctl.checkpoint.serving import Server, listed
from skyctl.errors import RecordError, SkyctlError
from skyctl.transport.addresses import address_towards
from skyctl.transport.identity import Identity

MOST_AT_ONCE = 4
"""Pulls and verifications that run at a time; others wait for their turn."""
FOLLOWED_AT_ONCE = 2

Message = dict[str, Any]


class Channel(Protocol):
    """The line to the launcher (``agent.task.TaskChannel``)."""

    def send(self, message: Message, body: bytes = b"") -> None: ...
    def recv(self, timeout_s: float | None = None) -> tuple[Message, bytes] | None: ...


class Keeper:
    """One node's, of one run. ``run`` once, then ``close`` in any case."""

    def __init__(self, payload: Message, channel: Channel) -> None:
        self._channel = channel
        self._folder = Path(payload["folder"])
        self._credentials = Credentials(
            str(payload["run_id"]), str(payload["secret"]), Identity.of(payload.get("tls"))
        )
        self._poll_s = float(payload.get("poll_s") or POLL_S)
        self._room = threading.BoundedSemaphore(MOST_AT_ONCE)
        self._following_room = threading.BoundedSemaphore(FOLLOWED_AT_ONCE)
        self._followers: list[Follower] = []
        layout.clean(self._folder)
        self._server = Server(
            self._folder,
            run_id=self._credentials.run_id,
            secret=self._credentials.secret,
            address=payload.get("address")
            or address_towards(str(payload.get("towards") or "127.0.0.1"), payload.get("interface")),
            identity=self._credentials.identity,
        )

    def run(self) -> None:
        """Until it is told to stop, or the agent is gone."""
        where = {"port": self._server.port, "address": self._server.address}
        self._channel.send({"event": "listening", **where, "pinned": sorted(layout.pinned(self._folder))})
        beside: dict[str, Callable[[Message], Message]] = {
            "verify": self._verify,
            "pull": self._pull,
            "adopt": self._adopt,
        }
        at_once: dict[str, Callable[[Message], Message]] = {
            "list": lambda message: {"steps": listed(self._folder, named=bool(message.get("named")))},
            "follow": self._follow,
            "pin": self._pin,
            "prune": self._prune,
            "forget": self._forget,
        }
        while True:
            got = self._channel.recv(None)
            if got is None:
                continue
            message = got[0]
            op = str(message.get("op"))
            if op == "stop":
                return
            if op in beside:
                threading.Thread(
                    target=self._beside, args=(beside[op], message), daemon=True, name=f"keeper: {op}"
                ).start()
            else:
                self._answer(at_once.get(op, _unknown), message)

    def close(self) -> None:
        """Listens and follows no more. Idempotent."""
        for follower in self._followers:
            follower.close()
        self._server.close()

    def _beside(self, act: Callable[[Message], Message], message: Message) -> None:
        with self._room, suppress(AgentGoneError):
            self._answer(act, message)

    def _answer(self, act: Callable[[Message], Message], message: Message) -> None:
        try:
            told = act(message)
        except SkyctlError as exc:
            told = {"error": exc.message}
        except (KeyError, ValueError, TypeError, AttributeError, OSError) as exc:
            told = {"error": f"{message.get('op')!r:.40} could not be done: {type(exc).__name__}: {exc}"}
        if "id" in message or "error" in told:
            self._channel.send({"event": "answer", "id": message.get("id"), **told})

    def _verify(self, message: Message) -> Message:
        step = layout.natural(message["step"])
        whole, damaged = [], {}
        for key, sha256 in message["layers"].items():
            found = layout.fault(self._folder, step, layout.index(key), sha256)
            if found is None:
                whole.append(layout.index(key))
            else:
                damaged[key] = found
        return {"whole": whole, "damaged": damaged}

    def _pull(self, message: Message) -> Message:
        step, attempt = layout.natural(message["step"]), layout.natural(message.get("attempt", 0))
        wanted = {layout.index(key): (str(sha256), attempt) for key, sha256 in message["layers"].items()}
        address = _address(message)
        failed: dict[int, str] = {}
        self._clear_damaged(step, wanted)
        try:
            with Peer(address, self._credentials) as peer:
                _, failed = take(peer, self._folder, step, wanted, self._credentials.run_id)
        except SkyctlError as exc:
            here = layout.held(self._folder, [step]).get(step, {})
            for layer, (sha256, _) in wanted.items():
                if layer not in here or here[layer].sha256 != sha256:
                    failed.setdefault(layer, exc.message)
        return _taken(wanted, failed)

    def _clear_damaged(self, step: int, wanted: Mapping[int, tuple[str, int]]) -> None:
        """Removes files that are not what their manifests say: what seems to be there is not taken again."""
        here = layout.held(self._folder, [step]).get(step, {})
        for layer, (sha256, _) in wanted.items():
            known = layer in here and here[layer].sha256 == sha256
            if known and layout.fault(self._folder, step, layer, sha256) is not None:
                layout.layer_path(self._folder, step, layer).unlink(missing_ok=True)

    def _adopt(self, message: Message) -> Message:
        step, attempt = layout.natural(message["step"]), layout.natural(message.get("attempt", 0))
        failed: dict[int, str] = {}
        wanted = {layout.index(key): file for key, file in message["layers"].items()}
        layout.make_step(self._folder, step)
        for layer, file in wanted.items():
            source = Path(file["path"])
            try:
                with (
                    source.open("rb") as given,
                    writing(layout.layer_path(self._folder, step, layer), 0o600) as out,
                ):
                    while chunk := given.read(CHUNK_BYTES):
                        out.write(chunk)
                    if out.written.sha256 != file["sha256"]:
                        raise RecordError(f"{source} is damaged: its SHA-256 is {out.written.sha256[:12]}…")
                note_copy(self._folder, step, layer, out.written, attempt, self._credentials.run_id)
                source.unlink(missing_ok=True)
            except OSError as exc:
                failed[layer] = f"{source} can't be read: {exc.strerror or exc}"
            except SkyctlError as exc:
                failed[layer] = exc.message
        return _taken(wanted, failed)

    def _follow(self, message: Message) -> Message:
        peers = [_address(peer) for peer in message["peers"]]
        keep = layout.natural(message.get("keep", 2))
        for follower in self._followers:
            follower.close()
        self._followers = [
            Follower(
                self._folder,
                peer,
                self._credentials,
                keep=keep,
                room=self._following_room,
                tell=self._channel.send,
                poll_s=self._poll_s,
            )
            for peer in peers
        ]
        return {"following": [peer.node for peer in peers]}

    def _pin(self, message: Message) -> Message:
        layout.make_folder(self._folder)
        layout.pin(self._folder, message["steps"])
        return {"pinned": sorted(layout.pinned(self._folder))}

    def _prune(self, message: Message) -> Message:
        kept = {layout.natural(step) for step in message["keep_steps"]}
        return {"removed": layout.retain(self._folder, kept)}

    def _forget(self, _message: Message) -> Message:
        for follower in self._followers:
            follower.close()
        self._followers = []
        removed = layout.steps(self._folder)
        layout.forget(self._folder)
        return {"removed": removed}


def _unknown(message: Message) -> Message:
    return {"error": f"a keeper knows no {message.get('op')!r:.40}"}


def _address(told: Mapping[str, Any]) -> Address:
    return Address(str(told["host"]), layout.natural(told["port"], 65536), str(told.get("node") or ""))


def _taken(wanted: Mapping[int, Any], failed: Mapping[int, str]) -> Message:
    return {
        "done": [layer for layer in wanted if layer not in failed],
        "failed": {str(layer): why for layer, why in failed.items()},
    }


def main(payload: Message, channel: Channel) -> Message:
    """Keeps, serves and takes until it is told to stop.

    Raises:
        SkyctlError: it can't listen there.
    """
    keeper = Keeper(payload, channel)
    try:
        keeper.run()
    finally:
        keeper.close()
    return {}
