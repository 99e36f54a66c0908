"""Output files of a script's ranks: brought home when an attempt ends, and sent out before the next one."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from skyctl.agent.node_cache import check_relative_path, file_digest
from skyctl.agent.task_events import DoneEvent, read_event
from skyctl.agent.task_orders import write_order
from skyctl.errors import ProtocolError, SkyctlError
from skyctl.remote.agent_session import Session
from skyctl.run.scripts.script_files import is_always_ignored
from skyctl.run.scripts.script_ranks import ScriptRank
from skyctl.script.script_events import OutputFile, OutputListing
from skyctl.script.script_orders import ListOutput, PlacedFile, PlaceOutput, Workplace

OUTPUT_MODULE = "skyctl.script.output_task"
TASK_S = 600.0
WHOLE_FOLDER = "."
"""The output folder's name where it is the one that ranks work in."""


class ScriptOutputs:
    """The files of the output folder, here and on nodes.

    Here ``NAME`` is the file that the node of the lowest rank has written. If other nodes have written
    other files of that name, theirs are ``rank-R/NAME``, R being the first rank on that node. If the output
    folder is the one that ranks work in, what was shipped there is none of its files until it is changed.

    Args:
        here: the folder that they come to.
        place: where ranks work on their nodes.
    """

    def __init__(self, here: Path, place: Workplace, warn: Callable[[str], None]) -> None:
        self.here, self._place, self._warn = here, place, warn
        self._is_whole = place.output == WHOLE_FOLDER
        self._shipped: dict[str, str] = {}
        self._gathered: set[str] = set()
        self._placed: dict[str, dict[str, str]] = {}

    def note_shipped(self, files: Mapping[str, bytes]) -> None:
        """Notes the files that the folder that ranks work in began with, by path."""
        if self._is_whole:
            self._shipped = {name: hashlib.sha256(data).hexdigest() for name, data in files.items()}

    def gather(self, ranks: Sequence[ScriptRank], sessions: Mapping[str, Session]) -> int:
        """Brings home what the ranks' nodes have written since it was last sent to them.

        A node that does not answer is said, and left out.

        Returns:
            how many files came.
        """
        first = _first_ranks(ranks)
        nodes = [node for node in first if node in sessions]
        with ThreadPoolExecutor(max_workers=max(1, len(nodes))) as pool:
            listed = dict(zip(nodes, pool.map(lambda node: self._list(sessions[node]), nodes), strict=True))
        owners: dict[str, str] = {}
        came = 0
        for node in nodes:
            for file in listed[node]:
                sent = self._placed.get(node, {}).get(file.name, self._shipped.get(file.name))
                if sent == file.sha256 or is_always_ignored(file.name):
                    continue  # as it was sent there: another node may have written a newer one
                owner = owners.setdefault(file.name, file.sha256)
                name = file.name if owner == file.sha256 else f"rank-{first[node]}/{file.name}"
                self._gathered.add(name)
                came += self._fetch(sessions[node], file, self.here / name)
        return came

    def send(
        self, ranks: Sequence[ScriptRank], sessions: Mapping[str, Session], trees: Mapping[str, str | None]
    ) -> int:
        """Puts the files that are here where the ranks look for them; how many there are.

        Args:
            trees: by node, the shipped files in its cache.

        Raises:
            SkyctlError: a node can't take them.
        """
        if not self.here.is_dir():
            return 0
        if self._is_whole:  # all else was shipped
            paths = [self.here / name for name in sorted(self._gathered)]
        else:
            paths = sorted(self.here.rglob("*"))
        files = {path.relative_to(self.here).as_posix(): path for path in paths if path.is_file()}
        digests = {name: file_digest(path) for name, path in files.items()}
        if not files:
            return 0
        own = {f"rank-{rank}": rank for rank in _first_ranks(ranks).values()}
        common = {name: path for name, path in files.items() if name.partition("/")[0] not in own}
        for node, rank in _first_ranks(ranks).items():
            start = f"rank-{rank}/"
            theirs = {name.removeprefix(start): p for name, p in files.items() if name.startswith(start)}
            self._send(sessions[node], {**common, **theirs}, digests, files, trees[node])
        return len(files)

    def _send(
        self,
        session: Session,
        wanted: Mapping[str, Path],
        digests: Mapping[str, str],
        files: Mapping[str, Path],
        tree: str | None,
    ) -> None:
        digest_of = {path: digests[name] for name, path in files.items()}
        placed = {
            name: PlacedFile(session.push(path, digest_of[path], keep=False), digest_of[path])
            for name, path in wanted.items()
        }
        place = Workplace(tree, self._place.folder, self._place.output)
        order = write_order(PlaceOutput(place, placed))
        session.run_task(OUTPUT_MODULE, order, TASK_S, answer=DoneEvent)
        self._placed[session.node.name] = {name: file.sha256 for name, file in placed.items()}

    def _list(self, session: Session) -> tuple[OutputFile, ...]:
        name = session.node.name
        order = write_order(ListOutput(self._place))
        try:
            answer = session.run_task(OUTPUT_MODULE, order, TASK_S, answer=OutputListing)
            listing = read_event(OutputListing, answer, name)
            for file in listing.files:
                _check_name(file.name, name)
        except SkyctlError as exc:
            self._warn(f"what node {name} has written since is not brought home: {exc.message}")
            return ()
        if listing.skipped:
            self._warn(f"node {name}: {', '.join(listing.skipped[:5])} are no regular files, and stay there")
        return listing.files

    def _fetch(self, session: Session, file: OutputFile, target: Path) -> bool:
        try:
            if target.is_file() and file_digest(target) == file.sha256:
                return False
            target.parent.mkdir(parents=True, exist_ok=True)
            session.fetch(file.path, target, file.bytes)
        except (OSError, SkyctlError) as exc:
            reason = exc.message if isinstance(exc, SkyctlError) else (exc.strerror or str(exc))
            self._warn(f"{file.name} of node {session.node.name} is not brought home: {reason}")
            return False
        return True


def _first_ranks(ranks: Sequence[ScriptRank]) -> dict[str, int]:
    """By node, in the order of ranks, its first one."""
    first: dict[str, int] = {}
    for rank in ranks:
        first.setdefault(rank.node, rank.rank)
    return first


def _check_name(name: str, node: str) -> None:
    try:
        check_relative_path(name)
    except ValueError as exc:
        raise ProtocolError(f"node {node} names an output file that can't be one: {exc}", node=node) from None
