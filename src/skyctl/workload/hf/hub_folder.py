"""Parses ``hf:DIR[,context=N][,untie]``, and finds the files of that folder. No torch, no transformers.

``hf:ORG/NAME`` that is no folder is the model of that name in the Hub's cache on this machine.
"""

from __future__ import annotations

import difflib
import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

from skyctl.errors import WorkloadError
from skyctl.workload.user_code import read_file

CONFIG_NAME = "config.json"
DEFAULT_CONTEXT = 512
OPTION_NAMES = ("context", "untie")
RECORD_FORMS = ("", "padded", "packed")
"""The contents of a row of the data, by the option ``records``: a piece of a text, one record, or several."""
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "vocab.json",
    "merges.txt",
    "vocab.txt",
)
_TOKENIZER_ENOUGH = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")


def parse_hub_source(text: str) -> tuple[Path, dict[str, int]]:
    """Parses ``hf:…`` → (folder as typed, options ``context``, 0 where left out, and ``untie``, 0 or 1).

    The folder need not exist; its name may contain commas.

    Raises:
        WorkloadError: an unknown option or a value that can't be.
    """
    options = {"context": 0, "untie": 0}
    parts = text.removeprefix("hf:").strip().split(",")
    if parts == [""]:
        raise WorkloadError("hf: names no folder", hint="hf:DIR, where DIR holds a config.json")
    while len(parts) > 1 and not _folder(parts).is_dir() and _key(parts[-1]) in OPTION_NAMES:
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
        close = difflib.get_close_matches(key, OPTION_NAMES, n=1, cutoff=0.5)
        guess = f" (did you mean {close[0]!r}?)" if close else ""
        raise WorkloadError(f"{text}: hf has no {key!r}{guess}; it has {', '.join(OPTION_NAMES)}")
    return folder, options


def _folder(parts: Sequence[str]) -> Path:
    return Path(",".join(parts).strip()).expanduser()


def _key(part: str) -> str:
    return part.partition("=")[0].strip()


def check_folder(text: str, folder: Path) -> Path:
    """The absolute path of a folder with a config.json: that folder, or the cached model of that name.

    Raises:
        WorkloadError: there is neither, or it has no config.json.
    """
    if not folder.is_dir():
        cached = cached_model(str(folder))
        if cached is None and _is_model_name(str(folder)):
            raise WorkloadError(
                f"{text}: there is no folder {folder}, and the Hub's cache on this machine has no such model",
                hint=f"if it is a model of the Hub, download it: hf download {shlex.quote(str(folder))}",
            )
        if cached is None:
            raise WorkloadError(f"{text}: there is no folder {folder}")
        folder = cached
    if not (folder / CONFIG_NAME).is_file():
        raise WorkloadError(
            f"{text}: {folder} holds no {CONFIG_NAME}",
            hint="a model as `save_pretrained` writes it, or as it is downloaded from the Hugging Face Hub",
        )
    return folder.resolve()


def _is_model_name(text: str) -> bool:
    """Whether the Hub may have a model of that name: ``ORG/NAME``, or one of its first, as ``gpt2``."""
    return re.fullmatch(r"[\w-][\w.-]*(/[\w-][\w.-]*)?", text) is not None


def cached_model(name: str) -> Path | None:
    """The folder where the Hub's own library has put a model; None where it has not, or is not installed."""
    if not _is_model_name(name):
        return None
    try:
        import huggingface_hub  # late: it comes with transformers
    except ModuleNotFoundError:
        return None
    try:
        return Path(huggingface_hub.snapshot_download(name, local_files_only=True))
    except (OSError, ValueError):  # not there, or not there whole
        return None


def canonical_options(options: Mapping[str, int]) -> str:
    """The options as a text that is the same for the same use of any folder, for digests."""
    form = RECORD_FORMS[options.get("records", 0)]
    return "hf:" + ",".join(f"{key}={options[key]}" for key in OPTION_NAMES) + (f",{form}" if form else "")


def tokenizer_files(folder: Path) -> list[Path]:
    """The files of the folder's tokenizer, sorted; empty where there is no tokenizer."""
    files = [folder / name for name in TOKENIZER_FILES if (folder / name).is_file()]
    return sorted(files) if any(path.name in _TOKENIZER_ENOUGH for path in files) else []


def config_files(folder: Path) -> dict[str, bytes]:
    """The files that every node needs of the folder: its config. Text goes as token ids, weights by layer.

    A node that reads records needs ``digested_files``: it tokenises the records as it reads them.
    """
    return {CONFIG_NAME: read_file(folder / CONFIG_NAME)}


def digested_files(folder: Path) -> dict[str, bytes]:
    """The files that a workload's digest covers: config and tokenizer, not the weights."""
    return config_files(folder) | {path.name: read_file(path) for path in tokenizer_files(folder)}
