"""``hf:DIR[,context=N][,untie]``: which folder, and how it is used. No torch, no transformers."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from pathlib import Path

from skyctl.errors import WorkloadError

CONFIG = "config.json"
DEFAULT_CONTEXT = 512
OPTIONS = ("context", "untie")
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "vocab.txt",
)
_ENOUGH = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")


def parse(text: str) -> tuple[Path, dict[str, int]]:
    """The folder (as typed, whether it is there or not) and the options: ``context`` 0 where left out,
    ``untie`` 0 or 1. Commas in the folder's own name are no matter.

    Raises:
        WorkloadError: an unknown option or a value that can't be.
    """
    options = {"context": 0, "untie": 0}
    parts = text.removeprefix("hf:").strip().split(",")
    if parts == [""]:
        raise WorkloadError("hf: names no folder", hint="hf:DIR, where DIR holds a config.json")
    while len(parts) > 1 and not _folder(parts).is_dir() and _key(parts[-1]) in OPTIONS:
        part = parts.pop()
        value = part.partition("=")[2].strip()
        if part.strip() == "untie":
            options["untie"] = 1
        elif _key(part) == "context" and value.isdecimal() and 1 <= int(value) < 10**9:
            options["context"] = int(value)
        else:
            raise WorkloadError(f"{text}: {part.strip()!r} must be context=N or untie")
    folder = _folder(parts)
    shorter = next((n for n in range(len(parts) - 1, 0, -1) if _folder(parts[:n]).is_dir()), None)
    if shorter is not None and not folder.is_dir():
        key = _key(parts[shorter])
        close = difflib.get_close_matches(key, OPTIONS, n=1, cutoff=0.5)
        guess = f" (did you mean {close[0]!r}?)" if close else ""
        raise WorkloadError(f"{text}: hf has no {key!r}{guess}; it has {', '.join(OPTIONS)}")
    return folder, options


def _folder(parts: Sequence[str]) -> Path:
    return Path(",".join(parts).strip()).expanduser()


def _key(part: str) -> str:
    return part.partition("=")[0].strip()


def check_folder(text: str, folder: Path) -> Path:
    """The folder's whole path, where it holds a config.json.

    Raises:
        WorkloadError: it does not.
    """
    if not folder.is_dir():
        raise WorkloadError(f"{text}: there is no folder {folder}")
    if not (folder / CONFIG).is_file():
        raise WorkloadError(
            f"{text}: {folder} holds no {CONFIG}",
            hint="a model as `save_pretrained` writes it, or as it is downloaded from the Hugging Face Hub",
        )
    return folder.resolve()


def canonical(options: Mapping[str, int]) -> str:
    """The same text for the same use of a folder, wherever it lies."""
    return "hf:" + ",".join(f"{key}={options[key]}" for key in OPTIONS)


def tokenizer_files(folder: Path) -> list[Path]:
    """The files a tokenizer is made of, sorted; empty where there is no tokenizer."""
    found = [folder / name for name in TOKENIZER_FILES if (folder / name).is_file()]
    return sorted(found) if any(path.name in _ENOUGH for path in found) else []


def ship(folder: Path) -> dict[str, bytes]:
    """What every node needs of the folder: its config. Text travels as token ids, weights by layer."""
    return {CONFIG: _read(folder / CONFIG)}


def digested(folder: Path) -> dict[str, bytes]:
    """What the model and its data are known by: the config and the tokenizer; not the weights' values."""
    return ship(folder) | {path.name: _read(path) for path in tokenizer_files(folder)}


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as exc:
        raise WorkloadError(f"{path} can't be read: {exc.strerror or exc}") from exc
