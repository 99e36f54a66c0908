"""How a keeper takes layers' files from another node's keeper: verified, whole or not at all."""

from __future__ import annotations

import socket
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from skyctl.agent.wire import WireError, read_frame, write_frame
from skyctl.checkpoint import layout
from skyctl.checkpoint.atomic import Written, writing
from skyctl.checkpoint.serving import PROOF_S, purpose
from skyctl.errors import RecordError, SkyctlError
from skyctl.transport.gate import enter, words
from skyctl.transport.identity import Identity

CONNECT_S = 5.0
ANSWER_S = 60.0
"""For the next bytes of an answer."""


class PeerError(SkyctlError):
    """The other keeper can't be reached, is gone, or does not speak as it should."""


class MissingError(SkyctlError):
    """The other keeper does not have that file, or not any more."""


@dataclass(frozen=True)
class Address:
    """Where a keeper listens. ``node``: what to call it in an error."""

    host: str
    port: int
    node: str = ""

    def __str__(self) -> str:
        """As an error names it."""
        where = f"{self.host}:{self.port}"
        return f"the keeper of {self.node} ({where})" if self.node else f"the keeper at {where}"


@dataclass(frozen=True)
class Credentials:
    """What all keepers of one run share."""

    run_id: str
    secret: str
    identity: Identity | None = None


class Peer:
    """A connection to another node's keeper; ``with`` closes it.

    Raises:
        PeerError: no connection, or what answers there does not know the secret.
    """

    def __init__(self, address: Address, credentials: Credentials, timeout_s: float = CONNECT_S) -> None:
        self._address = address
        self.closed = False
        try:
            self._sock: socket.socket = enter(
                address.host,
                address.port,
                credentials.secret,
                purpose=purpose(credentials.run_id),
                timeout_s=timeout_s,
            ).sock
            try:
                if credentials.identity is not None:
                    self._sock = credentials.identity.wrap(self._sock, server=False, timeout_s=PROOF_S)
                self._sock.settimeout(ANSWER_S)
                self._file = self._sock.makefile("rwb", buffering=0)
            except BaseException:
                self._sock.close()
                raise
        except OSError as exc:
            raise PeerError(f"no connection with {address}: {words(exc)}") from exc

    def __enter__(self) -> Peer:
        """Itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Closes the connection."""
        self.close()

    def close(self) -> None:
        """Idempotent; what waits for an answer in another thread is woken."""
        self.closed = True
        with suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        self._file.close()
        self._sock.close()

    def list(self, newest: int = 0, steps: Collection[int] = ()) -> dict[int, dict[int, layout.Held]]:
        """What it holds, by step and layer; ``newest``: of so many steps only, and of ``steps`` (0: all).

        Raises:
            PeerError: it is gone, or what came is not an answer.
        """
        answer, _ = self._ask({"op": "list", "newest": newest, "steps": sorted(steps)})
        try:
            return parse_listed(answer.get("steps"))
        except ValueError as exc:
            raise PeerError(f"{self._address} gave an answer that is none: {exc}") from exc

    def get(self, folder: Path, step: int, layer: int, sha256: str) -> Written:
        """Takes one file into its place in ``folder``, where the step's folder must be there.

        Raises:
            MissingError: it does not have it.
            RecordError: what came is not what the SHA-256 says; nothing is kept of it.
            PeerError: it is gone, or what came is not an answer.
            SkyctlError: the disk is full or not writable.
        """
        answer, _ = self._ask({"op": "get", "step": step, "layer": layer})
        if "missing" in answer:
            raise MissingError(f"{self._address} does not have {str(answer['missing'])[:200]}")
        path = layout.layer_path(folder, step, layer)
        try:
            left = layout.natural(answer.get("bytes"), 1 << 62)
        except ValueError as exc:
            raise PeerError(f"{self._address} gave an answer that is none: {exc}") from exc
        try:
            with writing(path, 0o600) as out:
                while left:
                    _, chunk = self._frame()
                    if not 0 < len(chunk) <= left:
                        raise PeerError(f"{self._address} sent more or less of {path.name} than it said")
                    out.write(chunk)
                    left -= len(chunk)
                if out.written.sha256 != sha256:
                    raise RecordError(
                        f"{path.parent.name}/{path.name} of {self._address} is damaged: its SHA-256 is "
                        f"{out.written.sha256[:12]}…, it must be {sha256[:12]}…"
                    )
        except SkyctlError as exc:
            if not isinstance(exc, PeerError | RecordError):
                self.close()  # the rest of the file is still on its way
            raise
        return out.written

    def _ask(self, question: dict[str, Any]) -> tuple[dict[str, Any], bytes]:
        try:
            write_frame(self._file, question)  # type: ignore[arg-type]
        except (OSError, ValueError) as exc:
            raise PeerError(f"{self._address} is gone: {exc}") from exc
        return self._frame()

    def _frame(self) -> tuple[dict[str, Any], bytes]:
        try:
            frame = read_frame(self._file)  # type: ignore[arg-type]
        except TimeoutError as exc:
            raise PeerError(f"{self._address} said nothing for {ANSWER_S:.0f} s") from exc
        except (OSError, EOFError, WireError, ValueError) as exc:
            raise PeerError(f"{self._address} is gone: {exc}") from exc
        if frame is None:
            raise PeerError(f"{self._address} is gone: it closed the connection")
        return frame


def parse_listed(raw: Any) -> dict[int, dict[int, layout.Held]]:
    """What a keeper said it holds. Raises ValueError where it is something else."""
    if not isinstance(raw, dict):
        raise ValueError(f"not steps: {raw!r:.80}")
    found: dict[int, dict[int, layout.Held]] = {}
    for step, layers in raw.items():
        if not isinstance(layers, dict):
            raise ValueError(f"not layers: {layers!r:.80}")
        found[layout.index(step)] = {
            layout.index(layer): layout.Held.from_dict(file) for layer, file in layers.items()
        }
    return found


def take(
    peer: Peer,
    folder: Path,
    step: int,
    layers: Mapping[int, tuple[str, int]],
    run_id: str,
    over: Callable[[], bool] = lambda: False,
) -> tuple[dict[int, Written], dict[int, str]]:
    """Takes layers of one step, with a manifest for each; those that are there already are left.

    Args:
        layers: by layer, its SHA-256 and attempt.
        over: asked between two files.

    Returns:
        What was taken (nothing of what was there already), and why what was not. Where this node's disk was
        the reason the peer is ``closed`` afterwards.

    Raises:
        PeerError: the connection is no good any more; what was taken before is kept.
    """
    taken: dict[int, Written] = {}
    failed: dict[int, str] = {}
    here = layout.held(folder, [step]).get(step, {})
    layout.make_step(folder, step)
    for layer, (sha256, attempt) in layers.items():
        if over():
            break
        if layer in here and here[layer].sha256 == sha256:
            continue
        try:
            taken[layer] = peer.get(folder, step, layer, sha256)
            note_copy(folder, step, layer, taken[layer], attempt, run_id)
        except PeerError:
            raise
        except SkyctlError as exc:
            taken.pop(layer, None)
            failed[layer] = exc.message
        if peer.closed:  # it was this disk that failed: the others would fare no better
            why = failed.get(layer, "the connection was closed")
            rest = list(layers)[list(layers).index(layer) + 1 :]
            failed |= {n: why for n in rest if n not in here or here[n].sha256 != layers[n][0]}
            break
    return taken, failed


def note_copy(folder: Path, step: int, layer: int, file: Written, attempt: int, run_id: str) -> None:
    """Writes the manifest of one layer that came from elsewhere.

    Raises:
        SkyctlError: the disk is full or not writable, or the step was pruned meanwhile.
    """
    part = layout.Part(
        run_id=run_id,
        rank=0,
        step=step,
        attempt=attempt,
        start=layer,
        stop=layer + 1,
        workload="",
        layers={layer: file},
    )
    layout.write_part(folder, part, copied=layer)
