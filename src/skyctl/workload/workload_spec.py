"""Parses what the user typed as the workload into the spec that launcher and nodes share. No torch here."""

from __future__ import annotations

import difflib
import keyword
import os
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from skyctl.errors import WorkloadError
from skyctl.workload.datasets.checked_options import RecordChoices, find_record_options
from skyctl.workload.datasets.record_files import find_record_files
from skyctl.workload.hf import hub_folder as hub
from skyctl.workload.hf.lora_options import check_lora, format_lora, parse_lora
from skyctl.workload.text_files import check_beginning

DTYPES = ("float32", "bfloat16")
UNSUPPORTED_DTYPES = {
    "float16": "its range is so small that losses would have to be scaled; bfloat16 needs no scaling",
    "float64": "layers that a train.py makes in float64 stay so under --dtype float32",
}
DEFAULT_SIZES = {"layers": 8, "hidden": 256, "heads": 8, "context": 128}
BUILTINS = ("gpt", "bert")
KINDS = (*BUILTINS, "hf")
_WORKLOAD_HINT = (
    "a workload is the path of a python file (train.py,NAME=VALUE with arguments), or gpt:layers=8,… or "
    "bert:layers=8,…"
)


@dataclass(frozen=True)
class ModelSource:
    """The source of the model.

    Attributes:
        kind: ``gpt`` or ``bert``, with ``sizes``; ``file``, the user's file ``path`` with ``arguments``; or
            ``hf``, the folder ``path`` with ``options``.
        arguments: by name, the values as typed.
        lora: of ``hf``, the adapters that alone are trained (``lora_options``); None: the model is.
    """

    kind: str
    sizes: Mapping[str, int] = field(default_factory=dict)
    path: Path | None = None
    options: Mapping[str, int] = field(default_factory=dict)
    arguments: Mapping[str, str] = field(default_factory=dict)
    lora: Mapping[str, Any] | None = None

    @property
    def canonical(self) -> str:
        """A text that is the same for the same model: all its sizes; a file's name without its folder, with
        its arguments by name."""
        if self.kind == "hf":
            lora = "" if self.lora is None else f" lora:{format_lora(self.lora)}"
            return hub.canonical_options(self.options) + lora
        if self.path is not None:
            given = [f",{name}={self.arguments[name]}" for name in sorted(self.arguments)]
            return self.path.name + "".join(given)
        return f"{self.kind}:" + ",".join(f"{key}={self.sizes[key]}" for key in DEFAULT_SIZES)


@dataclass(frozen=True)
class WorkloadSpec:
    """A workload and how it is trained, in JSON values, the same on the launcher and on the nodes.

    Attributes:
        source: as typed.
        path: the user's file or folder, rewritten to the shipped copy on a node; None for built-in models.
        arguments: of the user's file, by name, the values as typed; None: there are none.
        batch_size: samples per step.
        learning_rate: None: the model's own default.
        data_path: the text to train on; None: the standard library's sources. On a node: the shipped copy.
            Of records a file or a folder; on a node a list of the files that it was sent.
        records: how the records of ``data_path`` are used (``RecordOptions``); None: it is a text.
        ship: the data files beside the user's file that go along, as named by ``--ship``.
        data_digest: of the data files that are shipped, as ``Workload.spec`` fills it in; None: none are.
        random_inputs: train on random inputs with the shapes of the first batch.
        validated: data is held out for validation: the end of a text, which is then not trained on.
        example, boundaries: what a batch looks like, and the tensors between layers, as ``Workload.spec``
            fills them in; a node then needs neither ``data()`` nor a run on fake tensors. None: find out.
        weights: on a node, the file with the stored values of its layers; None: all start at random.
        init_from: on the launcher, the file or folder with the weights to start from (``--init-from``).
        init_sha256: the digest of those weights, on nodes too (``weight_files.weights_digest``).
        lora: the adapters that alone are trained, by the names of ``peft.LoraConfig``; None: the model is.
        frozen_sha256: of a run with adapters, the digest of the folder's weights, which its checkpoints lack
            (``starting_weights``); None: they may be any.
        owner: on a node, who owns the data that is trained on there, as data() is told; None: nobody alone.
    """

    source: str
    path: str | None = None
    arguments: Mapping[str, str] | None = None
    batch_size: int = 32
    seed: int = 0
    dtype: str = "float32"
    learning_rate: float | None = None
    data_path: str | None = None
    random_inputs: bool = False
    validated: bool = False
    example: Mapping[str, Any] | None = None
    boundaries: Sequence[Mapping[str, Any]] | None = None
    weights: str | None = None
    ship: Sequence[str] = ()
    data_digest: str | None = None
    init_from: str | None = None
    init_sha256: str | None = None
    lora: Mapping[str, Any] | None = None
    frozen_sha256: str | None = None
    owner: str | None = None
    records: Mapping[str, Any] | None = None

    @property
    def lora_text(self) -> str | None:
        """The adapters as ``--lora`` takes them; None: the model itself is trained."""
        return None if self.lora is None else format_lora(self.lora)

    def to_dict(self) -> dict[str, Any]:
        """The spec as values that JSON can hold."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> WorkloadSpec:
        """The spec that ``to_dict`` described; WorkloadError where a key is unknown."""
        fields = cls.__dataclass_fields__
        for key in values:
            if key not in fields:
                raise WorkloadError(f"a workload's description has no {key!r}{_suggest(key, list(fields))}")
        return cls(**{**values, "ship": tuple(values.get("ship", ()))})


def make_spec(
    source: str, *, lora: str | None = None, record_choices: RecordChoices | None = None, **options: Any
) -> WorkloadSpec:
    """Makes a checked spec from what was typed; ``options`` are fields of ``WorkloadSpec``.

    Args:
        lora: the adapters as ``--lora`` takes them; None: the model itself is trained.
        record_choices: how records are to be used, if ``data_path`` names some; None: as by default.

    Raises:
        WorkloadError: the source, the dtype, the batch size, the learning rate, the adapters or the data file
            is wrong.
    """
    parsed = parse_source(source)
    record_choices = record_choices or RecordChoices()
    if lora is not None:
        options["lora"] = parse_lora(lora)
    spec = WorkloadSpec(
        source=source,
        path=str(parsed.path) if parsed.path else None,
        arguments=dict(parsed.arguments) or None,
        **options,
    )
    check_options(spec)
    if spec.ship and parsed.kind != "file":
        raise WorkloadError(
            f"--ship {spec.ship[0]} is for data files beside a train.py; {source} has none",
            hint="the text that built-in models train on: --data FILE.txt",
        )
    data = Path(spec.data_path).expanduser() if spec.data_path is not None else None
    if parsed.kind == "hf" and data is not None and find_record_files(data) and data.exists():
        records = find_record_options(data, record_choices)
        return replace(spec, data_path=str(data.resolve()), records=records.to_dict())
    record_choices.refuse_without_records(spec.data_path, parsed.kind)
    if spec.data_path is not None and data is not None:
        if parsed.kind == "file":
            raise WorkloadError(
                f"--data {spec.data_path} is for built-in models; {source} brings its own data()",
                hint="read the file in data(batch_size, seed)",
            )
        if data.is_dir():
            raise WorkloadError(
                f"--data {spec.data_path} is a folder; it takes one text file",
                hint=f"put its texts together: cat {shlex.quote(str(data))}/*.txt > all.txt",
            )
        if not data.is_file():
            raise WorkloadError(
                f"--data {spec.data_path}: there is no such file{_guess_file(spec.data_path)}",
                hint="give a text to train on; left out, it is the standard library's sources",
            )
        check_beginning(data)  # before minutes of measuring
        spec = replace(spec, data_path=str(data.resolve()))
    return spec


def check_options(spec: WorkloadSpec) -> None:
    """Checks dtype, batch size, learning rate, seed and adapters; WorkloadError where one can't be."""
    if spec.dtype not in DTYPES:
        why = f" ({UNSUPPORTED_DTYPES[spec.dtype]})" if spec.dtype in UNSUPPORTED_DTYPES else ""
        raise WorkloadError(f"dtype {spec.dtype!r} can't be trained in{why}; there is {' and '.join(DTYPES)}")
    if spec.batch_size < 1:
        raise WorkloadError(f"a batch needs at least 1 sample, not {spec.batch_size}")
    if spec.learning_rate is not None and not 0 < spec.learning_rate < float("inf"):
        raise WorkloadError(f"the learning rate must be a positive number, not {spec.learning_rate}")
    if spec.seed < 0:
        raise WorkloadError(f"the seed must not be negative, it is {spec.seed}")
    if spec.lora is not None:
        check_lora(spec.lora)
        if not spec.source.startswith("hf:"):
            raise WorkloadError(
                f"--lora is for hf: workloads, not for {spec.source}",
                hint="in a train.py let model() give peft.get_peft_model(…)",
            )


def parse_source(text: str) -> ModelSource:
    """Parses ``gpt:layers=8,…``, ``bert:…``, ``hf:DIR`` or ``FILE.py[,NAME=VALUE…]``.

    A file whose own name has a comma is found, too: the longest beginning that is a file counts.

    Raises:
        WorkloadError: unknown kind, key or value (the nearest known one is named), or no such file.
    """
    if not text.strip():
        raise WorkloadError("the workload is empty", hint="gpt:layers=8,hidden=256 or the path of a train.py")
    kind, colon, rest = text.partition(":")
    if (colon or kind in BUILTINS) and kind in KINDS and not _is_file(text):
        if kind == "hf":
            folder, options = hub.parse_hub_source(text)
            return ModelSource(kind="hf", path=hub.check_folder(text, folder), options=options)
        return ModelSource(kind=kind, sizes=_parse_sizes(text, kind, rest))
    parts = text.split(",")
    beginnings = range(len(parts), 0, -1)
    length = next((n for n in beginnings if _is_file(",".join(parts[:n]))), None)
    if length is None:
        length = next((n for n in beginnings if "=" not in parts[n - 1]), len(parts))
    name = ",".join(parts[:length])
    path = Path(name).expanduser()
    if path.is_dir():
        raise WorkloadError(
            f"{name} is a folder; a workload is a python file, or gpt:… or bert:…",
            hint=f"give the file in it that defines model(); a folder with a config.json is hf:{name}",
        )
    if not _is_file(name):
        if colon and re.fullmatch(r"[A-Za-z]\w*", kind) and os.sep not in text:
            raise WorkloadError(
                f"unknown kind of model {kind!r}{_suggest(kind, KINDS)}; there are {', '.join(KINDS)}"
            )
        raise WorkloadError(
            f"there is no workload file {name}{_guess_file(name, '.py') or _suggest(name, BUILTINS)}",
            hint=_WORKLOAD_HINT,
        )
    if path.suffix != ".py":
        json_hint = (
            f"a problem is planned with skyctl plan --problem {shlex.quote(name)}, a plan trained with "
            f"skyctl launch {shlex.quote(name)}"
        )
        raise WorkloadError(
            f"{name} is no python file: its name must end in .py",
            hint=json_hint if path.suffix == ".json" else _WORKLOAD_HINT,
        )
    return ModelSource(kind="file", path=path.resolve(), arguments=_parse_arguments(name, parts[length:]))


def resolve_source(spec: WorkloadSpec) -> ModelSource:
    """The source of a spec, with the path of the user's file or folder on this machine.

    Raises:
        WorkloadError: as ``parse_source``.
    """
    if spec.path is None:
        return replace(parse_source(spec.source), lora=spec.lora)
    path = Path(spec.path)
    if spec.source.startswith("hf:") and not path.is_file():
        options = hub.parse_hub_source(spec.source)[1] | {"records": _record_form(spec)}
        return ModelSource("hf", path=hub.check_folder(spec.source, path), options=options, lora=spec.lora)
    return ModelSource("file", path=path, arguments=spec.arguments or {})


def _record_form(spec: WorkloadSpec) -> int:
    """The number of what a row of the data is, among ``hub_folder.RECORD_FORMS``."""
    if spec.records is None:
        return 0
    return hub.RECORD_FORMS.index("packed" if spec.records["packing"] else "padded")


def _is_file(text: str) -> bool:
    try:
        return Path(text).expanduser().is_file()
    except OSError:  # too long for a name, as many arguments are
        return False


def _parse_arguments(file: str, parts: Sequence[str]) -> dict[str, str]:
    """By name, the arguments ``NAME=VALUE`` that follow a file's name."""
    arguments: dict[str, str] = {}
    for part in parts:
        name, equals, value = (piece.strip() for piece in part.partition("="))
        if not equals or not name.isidentifier() or keyword.iskeyword(name):
            raise WorkloadError(
                f"{file}: {part.strip()!r:.80} is no argument; arguments are NAME=VALUE, with commas between",
                hint=f"as in {file},width=512,depth=4",
            )
        if name in arguments:
            raise WorkloadError(f"{file}: {name!r} is given twice")
        arguments[name] = value
    return arguments


def _parse_sizes(text: str, kind: str, rest: str) -> dict[str, int]:
    sizes = dict(DEFAULT_SIZES)
    seen: set[str] = set()
    for part in rest.split(",") if rest.strip() else []:
        key, equals, value = (piece.strip() for piece in part.partition("="))
        if key not in DEFAULT_SIZES:
            raise WorkloadError(
                f"{text}: {kind} has no {key!r}{_suggest(key, list(DEFAULT_SIZES))}; "
                f"it has {', '.join(DEFAULT_SIZES)}"
            )
        if key in seen:
            raise WorkloadError(f"{text}: {key!r} is given twice")
        seen.add(key)
        if not equals or not re.fullmatch(r"[0-9]{1,9}", value) or int(value) < 1:
            raise WorkloadError(f"{text}: {key!r} must be a whole number of at least 1, not {value!r}")
        sizes[key] = int(value)
    if sizes["hidden"] % sizes["heads"]:
        raise WorkloadError(
            f"{text}: hidden ({sizes['hidden']}) must divide by heads ({sizes['heads']})",
            hint=f"hidden={max(1, round(sizes['hidden'] / sizes['heads'])) * sizes['heads']}",
        )
    if kind == "bert" and sizes["context"] < 3:
        raise WorkloadError(
            f"{text}: bert needs a context of at least 3: a class token and two halves of text"
        )
    return sizes


def similar_files(text: str, *suffixes: str) -> list[str]:
    """The files that may be meant by the path of one that there is not, of the same folder.

    Args:
        suffixes: how their names may end; none: like the path itself.
    """
    try:
        path = Path(text).expanduser()
        ends = suffixes or (path.suffix,)
        there = sorted(file.name for file in path.parent.iterdir() if file.suffix in ends)
    except (OSError, ValueError, RuntimeError):  # a path that no system takes
        return []
    return [str(Path(text).with_name(name)) for name in difflib.get_close_matches(path.name, there)]


def _guess_file(text: str, *suffixes: str) -> str:
    near = similar_files(text, *suffixes)
    return f" (did you mean {near[0]!r}?)" if near else ""


def _suggest(word: str, words: Sequence[str]) -> str:
    close = difflib.get_close_matches(word, words, n=1, cutoff=0.5)
    return f" (did you mean {close[0]!r}?)" if close else ""
