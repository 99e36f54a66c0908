"""Stored weights on their way to nodes: what a node has itself it reads there, and the rest is sent."""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Callable, Collection, Mapping
from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING

from skyctl.agent.node_cache import file_digest
from skyctl.agent.task_events import read_event
from skyctl.agent.task_orders import write_order
from skyctl.errors import SkyctlError
from skyctl.files import home, make_private
from skyctl.planner.stage_memory import human_bytes
from skyctl.remote.agent_session import Session
from skyctl.remote.task_group import TaskGroup
from skyctl.workload.held_weights import (
    FindWeights,
    HeldFile,
    HeldFiles,
    WantedFile,
    digest_pieces,
    possible_places,
)

if TYPE_CHECKING:
    from skyctl.workload.stored_weights import StoredWeights

Place = tuple[Path, str]
"""A safetensors file, and a tensor's name there."""
_MODULE = "skyctl.workload.held_weights"
_LEAST_S, _BYTE_S = 120.0, 1e-7
"""How long a node may take to look at its files: this, and 10 MB each second."""


def send_weights(
    sessions: Mapping[str, Session],
    stored: StoredWeights,
    layers: Mapping[str, Collection[int]],
    note: Callable[[str], None],
) -> dict[str, str]:
    """Gives each node the stored weights of its layers; what is sent is removed when the session ends.

    A node that has a file with the same values reads it there: under the same path, under the same one below
    its home, or in its Hub cache.

    Args:
        layers: by node, those it will hold.
        note: told which nodes over SSH read weights of their own.

    Returns:
        By node, the path there of a file that ``shipped_weights.ShippedWeights`` reads.
    """
    places = {
        node: {f"{i}.{own}": place for i in sorted(held) for own, place in stored.places(i).items()}
        for node, held in layers.items()
    }
    wanted = {node: _wanted_files(filter(None, named.values())) for node, named in places.items()}
    group: TaskGroup[str] = TaskGroup("weights")
    for node, files in wanted.items():
        group.run(node, partial(_ask, sessions[node], files))
    held: dict[str, dict[Path, HeldFile]] = {}
    for _ in wanted:
        node, answer = group.wait_outcome()
        if isinstance(answer, SkyctlError):
            raise answer
        held[node] = {path: file for path, file in answer.items() if _is_same(wanted[node][path], path, file)}
    told = [node for node in layers if held[node] and sessions[node].node.transport != "local"]
    if told:
        nbytes = sum(stop - start for n in told for path in held[n] for start, stop in wanted[n][path].pieces)
        note(
            f"{', '.join(told)}: the model's weights are there and are read in place; "
            f"{human_bytes(nbytes)} need not be sent"
        )
    return {node: _push(sessions[node], stored, layers[node], places[node], held[node]) for node in layers}


def _wanted_files(places: filter[Place]) -> dict[Path, WantedFile]:
    from skyctl.checkpoint.node.safetensors import read_header

    names: dict[Path, set[str]] = {}
    for path, name in places:
        names.setdefault(path, set()).add(name)
    found = {}
    for path, held in names.items():
        tensors = read_header(path).tensors
        header = (0, min(entry.start for entry in tensors.values()))
        pieces = sorted((tensors[name].start, tensors[name].stop) for name in held)
        found[path] = WantedFile(possible_places(path), path.stat().st_size, (header, *pieces))
    return found


def _ask(session: Session, files: Mapping[Path, WantedFile]) -> dict[Path, HeldFile]:
    if not files:
        return {}
    order = write_order(FindWeights(tuple(files.values())))
    nbytes = sum(stop - start for file in files.values() for start, stop in file.pieces)
    said = session.run_task(_MODULE, order, _LEAST_S + nbytes * _BYTE_S, answer=HeldFiles)
    answers = read_event(HeldFiles, said, session.node.name).files
    return {path: file for path, file in zip(files, answers, strict=False) if file is not None}


def _is_same(wanted: WantedFile, path: Path, file: HeldFile) -> bool:
    found = path.stat()
    return file.sha256 == _digest(path, found.st_size, found.st_mtime_ns, wanted.pieces)


@lru_cache(maxsize=1024)
def _digest(path: Path, _size: int, _modified_ns: int, pieces: tuple[tuple[int, int], ...]) -> str:
    return digest_pieces(path, pieces)


def _push(
    session: Session,
    stored: StoredWeights,
    layers: Collection[int],
    places: Mapping[str, Place | None],
    held: Mapping[Path, HeldFile],
) -> str:
    from skyctl.workload.shipped_weights import write_layer_weights, write_weight_list

    there: dict[str, tuple[str, str]] = {}
    for name, place in places.items():
        if place is not None and place[0] in held:
            there[name] = (held[place[0]].path, place[1])
    sent = [name for name in places if name not in there]
    part = None
    if sent or not there:
        with tempfile.TemporaryDirectory(prefix="weights-", dir=make_private(home())) as folder:
            path = Path(folder) / "part.safetensors"
            write_layer_weights(stored, sorted(layers), path, without=there)
            part = session.push(path, file_digest(path), keep=False)
    if not there:
        assert part is not None
        return part
    times = {file.path: file.modified_ns for file in held.values()}
    listed = write_weight_list(there | {name: (str(part), name) for name in sent}, times)
    return session.push(listed, hashlib.sha256(listed).hexdigest(), keep=False)
