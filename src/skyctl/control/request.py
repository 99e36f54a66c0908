"""What the user asked to train, on the launcher and as the nodes are told it."""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from skyctl.agent.store import file_digest
from skyctl.errors import MismatchError, WorkloadError
from skyctl.files import home, make_private
from skyctl.records.plan import WorkloadRef
from skyctl.remote.session import Session
from skyctl.workload.corpus import default_corpus
from skyctl.workload.recipe import Recipe
from skyctl.workload.spec import WorkloadSpec, make_spec, source_of
from skyctl.workload.workload import Workload, encoded, load, ship, shipped, stored_weights

if TYPE_CHECKING:
    from skyctl.workload.hf.stored import Stored

MOST_CHOICES = 3
DEFAULT_BATCH_SIZE = 32


@dataclass(frozen=True)
class Request:
    """A workload and how to train it. ``microbatches`` None: the planner chooses among measured ones.

    ``sweep``: the numbers of microbatches to measure and compare, where there are several. ``encrypt``: what
    passes between the stages goes through TLS.
    """

    spec: WorkloadSpec
    microbatches: int | None = None
    recipe: Recipe = field(default_factory=Recipe)
    encrypt: bool = False
    sweep: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        most = max((self.microbatches or 0, *self.sweep))
        if most > self.spec.batch_size:
            raise WorkloadError(
                f"--microbatches {most} is more than --batch-size {self.spec.batch_size}; "
                "a microbatch holds at least one sample",
                hint=f"use at most --microbatches {self.spec.batch_size}",
            )

    def choices(self) -> list[int]:
        """The numbers of microbatches to measure: the user's, or powers of two up to the batch."""
        if self.sweep:
            return list(self.sweep)
        if self.microbatches is not None:
            return [self.microbatches]
        powers = [m for m in (1, 2, 4, 8, 16, 32) if m <= self.spec.batch_size]
        return powers[-MOST_CHOICES:]

    def words(self) -> list[str]:
        """The arguments that ask for it again, as typed."""
        spec, words = self.spec, [self.spec.source]
        for flag, value, default in (
            ("--batch-size", spec.batch_size, DEFAULT_BATCH_SIZE),
            ("--microbatches", ",".join(map(str, self.sweep)) or self.microbatches, None),
            ("--dtype", spec.dtype, "float32"),
            ("--seed", spec.seed, 0),
            ("--data", spec.data_path, None),
        ):
            words += [flag, str(value)] if value != default else []
        words += ["--encrypt"] if self.encrypt else []
        return [*words, "--random-inputs"] if spec.random_inputs else words

    def ref(self, workload: Workload) -> WorkloadRef:
        """What a plan remembers of it."""
        return WorkloadRef(
            source=self.spec.source,
            digest=trained_digest(self.spec, workload),
            batch_size=self.spec.batch_size,
            dtype=self.spec.dtype,
            seed=self.spec.seed,
        )


def request_of_plan(
    ref: WorkloadRef,
    microbatches: int,
    *,
    learning_rate: float | None = None,
    data_path: str | None = None,
    random_inputs: bool = False,
    recipe: Recipe | None = None,
) -> tuple[Request, Workload]:
    """The request a plan was made for, and its workload, loaded again.

    Raises:
        MismatchError: the workload has changed since.
        WorkloadError: the recipe validates, and there is nothing to validate on.
    """
    recipe = recipe or Recipe()
    spec = make_spec(
        ref.source,
        batch_size=ref.batch_size,
        seed=ref.seed,
        dtype=ref.dtype,
        learning_rate=learning_rate,
        data_path=data_path,
        random_inputs=random_inputs,
        validated=recipe.validate_every is not None,
    )
    workload = load(spec)
    if spec.validated:
        workload.check_validation()
    digest = trained_digest(workload.spec, workload)
    if digest != ref.digest:
        data = f" with --data {data_path}" if data_path is not None else ""
        raise MismatchError(
            f"{ref.source}{data} is not what the plan was made for (its digest is {digest[:12]}, "
            f"the plan's {ref.digest[:12]})",
            hint=f"give the --data that the plan was made with, or plan again: skyctl plan {ref.source}",
        )
    return Request(workload.spec, microbatches, recipe), workload


def trained_digest(spec: WorkloadSpec, workload: Workload) -> str:
    """The workload's digest, and that of the user's own data where ``--data`` names some."""
    if spec.data_path is None:
        return workload.digest
    data = _data(spec) or b""
    return hashlib.sha256(workload.digest.encode() + hashlib.sha256(data).digest()).hexdigest()


def send_workload(
    spec: WorkloadSpec,
    sessions: Mapping[str, Session],
    with_data: Collection[str],
    layers: Mapping[str, Collection[int]] | None = None,
) -> dict[str, dict[str, Any]]:
    """Puts the user's code on every node, and the data on those that need it.

    Args:
        layers: by node, those it will hold: it gets their stored weights, where there are any. None: no node
            needs any.

    Returns:
        By node, the spec as that node is told it: paths are the node's own.
    """
    files = ship(spec)
    data = encoded(spec, _data(spec)) if with_data else None
    stored = stored_weights(spec) if layers is not None else None
    digest = hashlib.sha256(data).hexdigest() if data is not None else ""
    told = {}
    for name, session in sessions.items():
        there = replace(spec, path=None, data_path=None)
        if spec.path is not None:
            there = replace(there, path=shipped(spec, session.push_tree(files)))
        if data is not None and name in with_data:
            # What is the user's own stays on the node no longer than the session.
            path = session.push(data, digest, keep=spec.data_path is None)
            there = replace(there, data_path=path)
        if stored is not None and layers is not None:
            there = replace(there, weights=_push_weights(session, stored, sorted(layers[name])))
        told[name] = there.to_dict()
    return told


def _data(spec: WorkloadSpec) -> bytes | None:
    """The bytes that the built-in models read: the user's file, or the standard library's sources."""
    if spec.data_path is not None:
        path = Path(spec.data_path)
        try:
            return path.read_bytes()
        except OSError as exc:
            raise WorkloadError(
                f"cannot read --data {path}: {exc.strerror or exc}", hint="give a readable text file"
            ) from exc
    return default_corpus() if source_of(spec).kind != "file" else None


def _push_weights(session: Session, stored: Stored, layers: list[int]) -> str:
    """The stored weights of those layers as a file on the node, gone when the session ends."""
    from skyctl.workload.hf.stored import write_part

    with tempfile.TemporaryDirectory(prefix="weights-", dir=make_private(home())) as folder:
        path = Path(folder) / "part.safetensors"
        write_part(stored, layers, path)
        return session.push(path, file_digest(path), keep=False)
