"""Reads and writes the safetensors format: eight bytes of length, a JSON header, the tensors' bytes.

Our own, because a node has torch alone; tests compare it with the ``safetensors`` package. Little-endian, no
pickle; the format: https://huggingface.co/docs/safetensors. Tensors may have any names.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from skyctl.checkpoint.node.atomic_file import FileDigest, HashingWriter, atomic_writer
from skyctl.errors import RecordError, SkyctlError

HEADER_LIMIT_BYTES = 100_000_000
CHUNK_BYTES = 1 << 20
METADATA_KEY = "__metadata__"
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "C64": torch.complex64,
}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True)
class TensorEntry:
    """One tensor of a file; its data are bytes [start, stop) of the file."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


@dataclass(frozen=True)
class FileHeader:
    """The tensors and the metadata that a file holds, by name."""

    tensors: dict[str, TensorEntry]
    metadata: dict[str, str]


def save(
    path: str | Path,
    tensors: Mapping[str, Tensor],
    metadata: Mapping[str, str] | None = None,
    *,
    mode: int = 0o666,
) -> FileDigest:
    """Writes tensors, from any device, in natural order of their names. Atomic: the whole file or none of it.

    Args:
        mode: the file's permissions, less the umask.

    Raises:
        SkyctlError: the format has no such dtype, or the disk is full or not writable.
    """
    names = sorted(tensors, key=_natural_order)
    sizes = {}
    for name in names:
        tensor = tensors[name]
        if tensor.dtype not in _NAMES:
            raise SkyctlError(
                f"{path}: tensor {name!r} of type {tensor.dtype} can't be written as safetensors"
            )
        sizes[name] = (_NAMES[tensor.dtype], tuple(tensor.shape), tensor.numel() * tensor.element_size())

    with atomic_writer(Path(path), mode) as out:
        out.write(_encode_header(sizes, metadata or {}))
        for name in names:
            _write_tensor(out, tensors[name])
    return out.digest


def load(path: str | Path, names: Collection[str] | None = None) -> dict[str, Tensor]:
    """Reads the tensors of a file onto the CPU; with ``names``, only those.

    Raises:
        RecordError: the file is not safetensors, is damaged, or lacks a wanted name.
    """
    header = read_header(path)
    for name in names or ():
        _check_holds(path, header.tensors, name)
    found = {}
    with _open_for_reading(path) as file:
        for name, entry in header.tensors.items():
            if names is not None and name not in names:
                continue
            tensor = found[name] = torch.empty(entry.shape, dtype=DTYPES[entry.dtype])
            file.seek(entry.start)
            if tensor.numel() and file.readinto(_bytes_of(tensor)) != entry.stop - entry.start:  # type: ignore[attr-defined]
                raise RecordError(f"{path} ends inside tensor {name!r}")
    return found


def save_state_dict(path: str | Path, out: str | Path) -> None:
    """Writes the tensors of a safetensors file as ``torch.save`` does: a plain dict, by name. Atomic.

    Raises:
        RecordError: the file is not safetensors, or is damaged.
        SkyctlError: the disk is full or not writable.
    """
    held = load(path)
    with atomic_writer(Path(out)) as target:
        torch.save(held, target)  # type: ignore[arg-type]  # all it needs is write and flush


def merge(
    paths: Sequence[str | Path],
    out: str | Path,
    *,
    named: Callable[[Path, str], str | None] = lambda _path, name: name,
    shared: bool = False,
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Merges several files into one, streamed: never more than a chunk in memory. Atomic.

    Args:
        named: (file, name) → the tensor's name in ``out``; None leaves it out.
        shared: a tensor that several hold under one name is one that they share: the first is taken.
        metadata: the metadata of ``out``; None: that of all the files.

    Raises:
        RecordError: an input is damaged, or two hold the same tensor or contradicting metadata.
        SkyctlError: the disk is full or not writable.
    """
    sizes: dict[str, tuple[str, tuple[int, ...], int]] = {}
    source: dict[str, tuple[Path, TensorEntry]] = {}
    found: dict[str, str] = {}
    for path in map(Path, paths):
        header = read_header(path)
        for own, entry in header.tensors.items():
            name = named(path, own)
            if name is None:
                continue
            size = entry.dtype, entry.shape, entry.stop - entry.start
            if shared and sizes.get(name) == size:
                continue
            if name in source:
                raise RecordError(f"tensor {name!r} is in both {source[name][0]} and {path}")
            source[name] = (path, entry)
            sizes[name] = size
        for key, value in header.metadata.items() if metadata is None else ():
            if found.setdefault(key, value) != value:
                raise RecordError(f"{path} says {key}={value!r}, another says {found[key]!r}")
    _write_copies(Path(out), source, found if metadata is None else metadata)


def gather(sources: Mapping[str, tuple[Path, str]], out: str | Path) -> None:
    """Writes a file of tensors that other files hold, streamed as ``merge`` does it. Atomic.

    Args:
        sources: by the tensor's name in ``out``, the file that holds it and its name there; several may
            take the same one.

    Raises:
        RecordError: a file is damaged, or lacks a tensor.
        SkyctlError: the disk is full or not writable.
    """
    headers = {path: read_header(path).tensors for path in {path: None for path, _ in sources.values()}}
    for path, name in sources.values():
        _check_holds(path, headers[path], name)
    _write_copies(Path(out), {new: (path, headers[path][name]) for new, (path, name) in sources.items()}, {})


def _write_copies(
    out: Path, source: Mapping[str, tuple[Path, TensorEntry]], metadata: Mapping[str, str]
) -> None:
    """Writes a file of tensors, each copied from another file, in natural order of their names."""
    names = sorted(source, key=_natural_order)
    entries = [source[name][1] for name in names]
    sizes = {n: (e.dtype, e.shape, e.stop - e.start) for n, e in zip(names, entries, strict=True)}
    with atomic_writer(out) as target:
        target.write(_encode_header(sizes, metadata))
        for name in names:
            path, entry = source[name]
            with _open_for_reading(path) as file:
                file.seek(entry.start)
                _copy(file, target, entry.stop - entry.start, path)


def read_header(path: str | Path) -> FileHeader:
    """Reads and checks a file's header: every tensor's dtype, shape and place, without a gap or an overlap.

    Raises:
        RecordError: the file can't be read, or is no (whole) safetensors file; says what is wrong.
    """
    with _open_for_reading(path) as file:
        size = os.fstat(file.fileno()).st_size
        length = int.from_bytes(file.read(8), "little") if size >= 8 else -1
        if not 2 <= length <= min(HEADER_LIMIT_BYTES, size - 8):
            raise RecordError(
                f"{path} is no safetensors file: its {size} bytes can't hold the header it announces"
            )
        text = file.read(length)
    try:
        raw = json.loads(text)
    except (ValueError, RecursionError) as exc:
        raise RecordError(f"{path} is no safetensors file: its header is not JSON ({exc})") from exc
    if not isinstance(raw, dict):
        raise RecordError(f"{path}: the header must be a JSON object, it is a {type(raw).__name__}")
    metadata = raw.pop(METADATA_KEY, {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise RecordError(f"{path}: {METADATA_KEY} must map names to texts")
    entries = {name: _parse_entry(path, name, value, 8 + length) for name, value in raw.items()}
    at = 8 + length
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].start, item[1].stop)):
        if entry.start != at:
            raise RecordError(f"{path}: tensor {name!r} starts at byte {entry.start}, expected {at}")
        at = entry.stop
    if at != size:
        raise RecordError(
            f"{path} has {size} bytes, its header describes {at}", hint="the file was cut or damaged"
        )
    return FileHeader(entries, metadata)


def _check_holds(path: str | Path, tensors: Mapping[str, TensorEntry], name: str) -> None:
    if name not in tensors:
        raise RecordError(f"{path} holds no tensor {name!r}; it has {len(tensors)}")


def _parse_entry(path: str | Path, name: str, value: Any, base: int) -> TensorEntry:
    fault = None
    if not isinstance(value, dict) or set(value) != {"dtype", "shape", "data_offsets"}:
        fault = "must have dtype, shape and data_offsets"
    elif not isinstance(value["dtype"], str) or value["dtype"] not in DTYPES:
        fault = f"has the unknown type {value['dtype']!r}"
    elif not _is_naturals(value["shape"]):
        fault = f"has the shape {value['shape']!r}"
    elif not _is_naturals(value["data_offsets"]) or len(value["data_offsets"]) != 2:
        fault = f"has the offsets {value['data_offsets']!r}"
    else:
        start, stop = value["data_offsets"]
        need = prod(value["shape"]) * DTYPES[value["dtype"]].itemsize
        if stop - start == need:
            return TensorEntry(value["dtype"], tuple(value["shape"]), base + start, base + stop)
        fault = f"needs {need} bytes for its shape, it has {stop - start}"
    raise RecordError(f"{path}: tensor {name!r} {fault}")


def _is_naturals(value: Any) -> bool:
    return isinstance(value, list) and all(type(v) is int and v >= 0 for v in value)


def _natural_order(name: str) -> tuple[tuple[int, int, str], ...]:
    """A sort key in which numbers within a name sort as numbers: layer 2 before layer 10."""
    return tuple((0, int(p), "") if p.isdecimal() else (1, 0, p) for p in re.split(r"(\d+)", name) if p)


def _encode_header(
    sizes: Mapping[str, tuple[str, tuple[int, ...], int]], metadata: Mapping[str, str]
) -> bytes:
    raw: dict[str, Any] = {METADATA_KEY: dict(metadata)} if metadata else {}
    at = 0
    for name, (dtype, shape, nbytes) in sizes.items():
        raw[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, at + nbytes]}
        at += nbytes
    text = json.dumps(raw, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _write_tensor(out: HashingWriter, tensor: Tensor) -> None:
    if tensor.numel() == 0:
        return
    plain = tensor.detach().to("cpu").contiguous().resolve_conj().resolve_neg()
    out.write(_bytes_of(plain))


def _bytes_of(tensor: Tensor) -> memoryview:
    """The memory of a contiguous tensor on the CPU, which must stay alive meanwhile; it is not empty."""
    nbytes = tensor.numel() * tensor.element_size()
    return memoryview((ctypes.c_char * nbytes).from_address(tensor.data_ptr()))


def _copy(file: BinaryIO, target: HashingWriter, count: int, path: Path) -> None:
    while count:
        chunk = file.read(min(count, CHUNK_BYTES))
        if not chunk:
            raise RecordError(f"{path} ends too early")
        target.write(chunk)
        count -= len(chunk)


@contextmanager
def _open_for_reading(path: str | Path) -> Iterator[BinaryIO]:
    try:
        with Path(path).open("rb") as file:
            yield file
    except OSError as exc:
        raise RecordError(f"{path} can't be read: {exc.strerror or exc}") from exc
