"""The user's request to train: as the launcher keeps it, and as it is sent to nodes."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from skyctl.errors import MismatchError, WorkloadError
from skyctl.jobs.sent_weights import send_weights
from skyctl.records.plan import WorkloadRef
from skyctl.remote.agent_session import Session
from skyctl.workload.corpus import default_corpus
from skyctl.workload.datasets.checked_options import RecordChoices
from skyctl.workload.datasets.line_conversion import open_records
from skyctl.workload.datasets.record_files import (
    RecordOptions,
    digest_file,
    digest_records,
    find_record_files,
    write_file_list,
)
from skyctl.workload.recipe import Recipe, microbatch_sizes
from skyctl.workload.shipped_files import digest_data, encode_text, files_to_ship, shipped_path
from skyctl.workload.starting_weights import find_stored_weights
from skyctl.workload.text_files import read_text
from skyctl.workload.workload_spec import WorkloadSpec, make_spec, resolve_source

if TYPE_CHECKING:
    from skyctl.records.run_state import InitialWeights
    from skyctl.workload.workload import Workload

MICROBATCH_CHOICES = (1, 2, 4, 8, 16, 32)
MAX_MICROBATCH_CHOICES = 3
DEFAULT_BATCH_SIZE = 32


@dataclass(frozen=True)
class RefusedCount:
    """A number of microbatches that a model can't take, because some of them would have ``samples`` samples.

    ``reason``: names the layer and what it says of that size.
    """

    microbatches: int
    samples: int
    reason: str

    def __str__(self) -> str:
        cut = f"{self.microbatches} microbatch{'es' if self.microbatches > 1 else ''}"
        return f"{cut}: some would have {self.samples} sample{'s' if self.samples > 1 else ''}: {self.reason}"


@dataclass(frozen=True)
class TrainingRequest:
    """A workload and how to train it.

    Attributes:
        microbatches: parts that a batch is cut into; None: the planner chooses among measured numbers.
        encrypt: what passes between stages goes through TLS.
        sweep: the numbers of microbatches to measure and compare, where there are several.
        compare_cut: a probe compares the layers with the model itself.
    """

    spec: WorkloadSpec
    microbatches: int | None = None
    recipe: Recipe = field(default_factory=Recipe)
    encrypt: bool = False
    sweep: tuple[int, ...] = ()
    compare_cut: bool = True

    def __post_init__(self) -> None:
        most = max((self.microbatches or 0, *self.sweep))
        if most > self.spec.batch_size:
            raise WorkloadError(
                f"--microbatches {most} is more than --batch-size {self.spec.batch_size}; "
                "a microbatch holds at least one sample",
                hint=f"use at most --microbatches {self.spec.batch_size}",
            )

    def choices(self, workload: Workload) -> tuple[list[int], list[RefusedCount]]:
        """The numbers of microbatches to measure, and those left out because the model can't take them.

        The user's own numbers, or the largest powers of two within the batch that the model can take.

        Raises:
            WorkloadError: the model can't take a number that the user gave; the hint has those that it can.
        """
        powers = [m for m in MICROBATCH_CHOICES if m <= self.spec.batch_size]
        given = self.sweep or (() if self.microbatches is None else (self.microbatches,))
        for count in given:
            if (refused := _refusal(workload, self.spec.batch_size, count)) is not None:
                fine = [m for m in powers if _refusal(workload, self.spec.batch_size, m) is None]
                raise WorkloadError(
                    str(refused), hint=f"these work: --microbatches {', '.join(map(str, fine))}"
                )
        if given:
            return list(given), []
        fitting: list[int] = []
        left_out: list[RefusedCount] = []
        for count in reversed(powers):
            refused = _refusal(workload, self.spec.batch_size, count)
            if refused is not None:
                left_out.append(refused)
            else:
                fitting.append(count)
            if len(fitting) == MAX_MICROBATCH_CHOICES:
                break
        return sorted(fitting), left_out

    def with_more_microbatches(self, workload: Workload) -> TrainingRequest | None:
        """The request for more, smaller microbatches than before, as they take less memory.

        None: the user has said how many, or the model can't take more.
        """
        if self.microbatches is not None:
            return None
        most = max(self.sweep or self.choices(workload)[0], default=self.spec.batch_size)
        counts = [most << doubled for doubled in range(1, MAX_MICROBATCH_CHOICES + 1)]
        size = self.spec.batch_size
        fitting = [n for n in counts if n <= size and _refusal(workload, size, n) is None]
        return replace(self, sweep=tuple(fitting)) if fitting else None

    def words(self) -> list[str]:
        """The command-line arguments that make the same request."""
        spec, words = self.spec, [self.spec.source]
        for flag, value, default in (
            ("--batch-size", spec.batch_size, DEFAULT_BATCH_SIZE),
            ("--microbatches", ",".join(map(str, self.sweep)) or self.microbatches, None),
            ("--dtype", spec.dtype, "float32"),
            ("--lora", spec.lora_text, None),
            ("--seed", spec.seed, 0),
            ("--data", spec.data_path, None),
        ):
            words += [flag, str(value)] if value != default else []
        if spec.records is not None:
            words += RecordChoices.of(RecordOptions.from_dict(spec.records)).words()
        for name in spec.ship:
            words += ["--ship", name]
        words += ["--encrypt"] if self.encrypt else []
        words += [] if self.compare_cut else ["--no-compare"]
        return [*words, "--random-inputs"] if spec.random_inputs else words

    def ref(self, digest: str) -> WorkloadRef:
        """The part of the request that a plan records, to recognize its workload (of that digest) later."""
        return WorkloadRef(
            source=self.spec.source,
            digest=digest_training(self.spec, digest),
            batch_size=self.spec.batch_size,
            dtype=self.spec.dtype,
            lora=self.spec.lora_text,
            seed=self.spec.seed,
        )


def _refusal(workload: Workload, batch_size: int, microbatches: int) -> RefusedCount | None:
    """Why the model can't train on a batch cut so; None where it can. Both sizes are tried."""
    for samples in dict.fromkeys(microbatch_sizes(batch_size, microbatches)):
        try:
            workload.shapes.check_model(samples, workload.loss)
        except WorkloadError as exc:
            return RefusedCount(microbatches, samples, exc.message)
    return None


def load_plan_request(
    ref: WorkloadRef,
    microbatches: int,
    *,
    layers: int | None = None,
    learning_rate: float | None = None,
    data_path: str | None = None,
    ship: Sequence[str] = (),
    record_choices: RecordChoices | None = None,
    random_inputs: bool = False,
    recipe: Recipe | None = None,
    init: InitialWeights | None = None,
) -> tuple[TrainingRequest, Workload]:
    """The request that a plan was made for, and its workload, loaded again.

    Args:
        layers: how many the plan has.
        record_choices: how records are to be used; None: as by default.
        init: the weights to start from; None: random ones, or the folder's.

    Raises:
        MismatchError: the workload has changed since.
        WorkloadError: the workload can't be trained or validated as the recipe says, or the weights are not
            its model's.
    """
    from skyctl.workload.workload import load_workload  # late: it needs torch

    spec = make_spec(
        ref.source,
        batch_size=ref.batch_size,
        seed=ref.seed,
        dtype=ref.dtype,
        lora=ref.lora,
        learning_rate=learning_rate,
        data_path=data_path,
        ship=tuple(ship),
        record_choices=record_choices,
        random_inputs=random_inputs,
        validated=recipe is not None and recipe.validate_every is not None,
        **(init.spec_fields() if init is not None else {}),
    )
    workload = load_workload(spec)
    if recipe is not None:
        workload.check_recipe(recipe)
    digest = digest_training(spec, workload.digest)
    if digest != ref.digest:
        data = f" with --data {data_path}" if data_path is not None else ""
        raise MismatchError(
            f"{ref.source}{data} is not what the plan was made for (its digest is {digest[:12]}, "
            f"the plan's {ref.digest[:12]})",
            hint="give the --data or --ship that the plan was made with, or plan again: "
            f"skyctl plan {ref.source}",
        )
    if layers not in (None, workload.layers):  # model() may read their number from a shipped file
        raise MismatchError(
            f"{ref.source} has {workload.layers} layers, the plan was made for {layers}",
            hint=f"measure it again: skyctl probe {ref.source}; then plan",
        )
    return TrainingRequest(workload.spec, microbatches, recipe or Recipe()), workload


def refuse_unsummable(spec: WorkloadSpec) -> None:
    """Raises WorkloadError where pipelines side by side can't sum the gradients of the workload's layers.

    Weights to start from are left out: who asks may go on from a checkpoint, and they may be gone by then.
    """
    from skyctl.worker.sums.summed_gradients import check_summable  # late: they need torch
    from skyctl.workload.workload import load_workload

    check_summable(load_workload(replace(spec, init_from=None, init_sha256=None)).model.layers)


def digest_training(spec: WorkloadSpec, workload_digest: str) -> str:
    """The workload's digest, together with the user's own data: what ``--data`` names, or what is shipped."""
    data: bytes | None
    if spec.data_path is not None and spec.records is not None:
        data = digest_records(Path(spec.data_path), RecordOptions.from_dict(spec.records))
    elif spec.data_path is None:
        shipped = digest_data(spec)
        data = shipped.encode() if shipped is not None else None
    else:
        data = _read_data(spec) or b""
    if data is None:
        return workload_digest
    return hashlib.sha256(workload_digest.encode() + hashlib.sha256(data).digest()).hexdigest()


def shipped_data_changed(spec: WorkloadSpec) -> bool:
    """Whether the data files that are shipped are no longer those that the run began with."""
    return spec.path is not None and digest_data(spec) != spec.data_digest


def send_workload(
    spec: WorkloadSpec,
    sessions: Mapping[str, Session],
    with_data: Collection[str],
    layers: Mapping[str, Collection[int]] | None = None,
    files: Mapping[str, bytes] | None = None,
    note: Callable[[str], None] = lambda _text: None,
) -> dict[str, WorkloadSpec]:
    """Sends the user's code to every node, and data and stored weights to those that need and lack them.

    Args:
        with_data: the nodes that read training data.
        layers: by node, the layers it will hold: it gets their stored weights, if there are any. None: no
            node needs any.
        files: those to send (``files_to_ship``); None: as they are here now.
        note: told which nodes have the stored weights themselves.

    Returns:
        By node, the spec; paths in it are the node's own.
    """
    sent = dict(files_to_ship(spec) if files is None else files)
    is_text = spec.records is None
    data = encode_text(spec, _read_data(spec)) if with_data and is_text else None
    stored = find_stored_weights(spec) if layers is not None else None
    digest = hashlib.sha256(data).hexdigest() if data is not None else ""
    by_node = {}
    for name, session in sessions.items():
        node_spec = replace(spec, path=None, data_path=None, init_from=None)
        if spec.path is not None:
            node_spec = replace(node_spec, path=shipped_path(spec, session.push_tree(sent)))
        if data is not None and name in with_data:
            # The user's own data stays on the node no longer than the session.
            path = session.push(data, digest, keep=spec.data_path is None)
            node_spec = replace(node_spec, data_path=path)
        if not is_text and name in with_data and spec.data_path is not None:
            node_spec = replace(node_spec, data_path=_push_records(session, Path(spec.data_path)))
        by_node[name] = node_spec
    if stored is not None and layers is not None:
        for name, path in send_weights(sessions, stored, {n: layers[n] for n in sessions}, note).items():
            by_node[name] = replace(by_node[name], weights=path)
    return by_node


def _read_data(spec: WorkloadSpec) -> bytes | None:
    """The bytes that built-in models train on: the user's file, or the standard library's sources."""
    if spec.data_path is not None:
        return read_text(Path(spec.data_path))
    return default_corpus() if resolve_source(spec).kind != "file" else None


def _push_records(session: Session, data: Path) -> str:
    """Sends files of records, which are removed when the session ends, and a list of them.

    A node on this machine reads JSON lines where they are.

    Returns:
        The list's path on the node.
    """
    told = []
    own = find_record_files(data)
    for file in open_records(data):
        if session.node.transport == "local" and Path(file.path) in own:
            told.append(file)
            continue
        path = session.push(Path(file.path), digest_file(Path(file.path)), keep=False)
        told.append(replace(file, path=path, modified_ns=0))
    listed = write_file_list(told)
    return session.push(listed, hashlib.sha256(listed).hexdigest(), keep=False)
