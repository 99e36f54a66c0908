"""A text file of the user's, as UTF-8. No torch here.

Only a byte order mark makes another encoding certain. Bytes that are no UTF-8 would become tokens that stand
for nothing, without a word; so a file of which the encoding is a guess is refused.
"""

from __future__ import annotations

import codecs
import json
import shlex
from pathlib import Path

from skyctl.errors import WorkloadError

TOKENS_MAGIC = b"skyctl token ids 1\n"
"""So begins what a node is sent in the place of a text: its token ids, which are no text."""

JSON_LINES = (".jsonl", ".ndjson", ".json")
_MARKS = (  # UTF-32's mark begins as UTF-16's does
    (codecs.BOM_UTF8, "utf-8"),
    (codecs.BOM_UTF32_LE, "utf-32"),
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)
_CHUNK = 1 << 20


def read_text(path: Path) -> bytes:
    """The text in a file as UTF-8, without a byte order mark; token ids as they are.

    Raises:
        WorkloadError: the file can't be read, is empty, holds JSON lines, or is in an encoding that nothing
            in it tells; says how to convert it.
    """
    return _text_of(_read(path), path)


def check_beginning(path: Path) -> None:
    """Raises what ``read_text`` would raise, as far as the first megabyte of a long file tells."""
    _text_of(_read(path, _CHUNK), path)


def _read(path: Path, most_bytes: int = -1) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(most_bytes)
    except OSError as exc:
        raise WorkloadError(
            f"the text {path} can't be read: {exc.strerror or exc}", hint="give a readable text file"
        ) from exc


def _text_of(data: bytes, path: Path) -> bytes:
    if data.startswith(TOKENS_MAGIC):
        return data
    mark, encoding = next((pair for pair in _MARKS if data.startswith(pair[0])), (b"", "utf-8"))
    text = _checked(data[len(mark) :], path) if encoding == "utf-8" else _recoded(data, encoding, path)
    if not text:
        raise WorkloadError(f"the text {path} is empty", hint="give a file with the text to train on")
    if path.suffix.lower() in JSON_LINES:
        _refuse_json_lines(text, path)
    return text


def _checked(data: bytes, path: Path) -> bytes:
    """The data where it is UTF-8, without what is left of a character that is cut off at the end."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    for start in range(0, len(data), _CHUNK):
        before = len(decoder.getstate()[0])
        try:
            decoder.decode(data[start : start + _CHUNK])
        except UnicodeDecodeError as exc:
            at = start - before + exc.start
            raise _not_utf8(path, f"byte {at} is 0x{data[at]:02x}", "ISO-8859-1") from exc
    if (zero := data.find(0)) >= 0:
        raise _not_utf8(path, f"byte {zero} is 0", "UTF-16LE")
    return data[: len(data) - len(decoder.getstate()[0])]


def _recoded(data: bytes, encoding: str, path: Path) -> bytes:
    """The text of another encoding, as a byte order mark has told it."""
    try:
        return codecs.getincrementaldecoder(encoding)().decode(data).encode()
    except UnicodeDecodeError as exc:
        raise WorkloadError(
            f"the text {path} begins with the mark of {encoding.upper()}, but byte {exc.start} is none of it",
            hint="save it anew, in UTF-8",
        ) from exc


def _not_utf8(path: Path, what: str, perhaps: str) -> WorkloadError:
    name = shlex.quote(path.name)
    new = shlex.quote(f"{path.stem}.utf8{path.suffix}")
    return WorkloadError(
        f"the text {path} must be UTF-8, and {what}",
        hint=f"convert it from the encoding that it is in: iconv -f {perhaps} -t UTF-8 {name} > {new}",
    )


def _refuse_json_lines(text: bytes, path: Path) -> None:
    first = text.lstrip().split(b"\n", 1)[0]
    try:
        values = json.loads(first)
    except ValueError:
        return
    texts = (
        {name: value for name, value in values.items() if isinstance(value, str)}
        if isinstance(values, dict)
        else {}
    )
    field = max(texts, key=lambda name: len(texts[name]), default="text")
    field_of = shlex.quote(f".[{json.dumps(field)}]")
    files = f"{shlex.quote(path.name)} > {shlex.quote(f'{path.stem}.txt')}"
    raise WorkloadError(
        f"the text {path} is JSON lines: training would be on their brackets and names as well",
        hint=f"write the text out: jq -r {field_of} {files}",
    )
