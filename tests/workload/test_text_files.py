"""Texts are UTF-8, are made so where a mark tells their encoding, or are refused with what to do."""

from __future__ import annotations

import codecs
import json
from pathlib import Path

import pytest

from skyctl.errors import WorkloadError
from skyctl.workload.corpus import read_corpus
from skyctl.workload.text_files import TOKENS_MAGIC, check_beginning, read_text
from skyctl.workload.workload_spec import make_spec

TEXT = "Ein Café, 愛, 🙂\n" * 50


@pytest.mark.parametrize(
    ("mark", "encoding"),
    [
        (b"", "utf-8"),
        (codecs.BOM_UTF8, "utf-8"),
        (codecs.BOM_UTF16_LE, "utf-16-le"),
        (codecs.BOM_UTF16_BE, "utf-16-be"),
        (codecs.BOM_UTF32_LE, "utf-32-le"),
        (codecs.BOM_UTF32_BE, "utf-32-be"),
    ],
)
def test_what_a_mark_tells_is_read_so(tmp_path: Path, mark: bytes, encoding: str) -> None:
    path = tmp_path / "text.txt"
    path.write_bytes(mark + TEXT.encode(encoding))
    assert read_text(path) == TEXT.encode()
    assert read_corpus(str(path)) == TEXT.encode()
    path.write_bytes(mark + TEXT.encode(encoding) + "🙂".encode(encoding)[:-1])  # cut off, as by head -c
    assert read_text(path) == TEXT.encode()


@pytest.mark.parametrize(
    ("data", "message", "hint"),
    [
        (b"caf\xe9 the a of", "must be UTF-8, and byte 3 is 0xe9", "iconv -f ISO-8859-1 -t UTF-8 'a b.txt'"),
        (b"x" * (1 << 20) + b"\xe9 of", "and byte 1048576 is 0xe9", "> 'a b.utf8.txt'"),
        ("the a of".encode("utf-16-le"), "must be UTF-8, and byte 1 is 0", "iconv -f UTF-16LE"),
        (codecs.BOM_UTF16_LE + b"\x00\xdc\x00\x00", "the mark of UTF-16, but byte", "in UTF-8"),
        (b"", "is empty", "give a file with the text"),
        (codecs.BOM_UTF8, "is empty", "give a file with the text"),
    ],
)
def test_what_is_a_guess_is_refused(tmp_path: Path, data: bytes, message: str, hint: str) -> None:
    path = tmp_path / "a b.txt"
    path.write_bytes(data)
    with pytest.raises(WorkloadError, match=r"the text .*a b\.txt") as caught:
        read_text(path)
    assert message in str(caught.value)
    assert hint in str(caught.value.hint)


def test_it_is_said_before_anything_is_measured(tmp_path: Path) -> None:
    path = tmp_path / "latin1.txt"
    path.write_bytes(b"caf\xe9 " * 1000)
    with pytest.raises(WorkloadError, match="must be UTF-8"):
        make_spec("gpt:layers=1,hidden=16,heads=2,context=8", data_path=str(path))
    path.write_bytes("é".encode() * (1 << 20))  # the first megabyte ends within a character
    path.write_bytes(b"x" + path.read_bytes())
    check_beginning(path)


@pytest.mark.parametrize("name", ["story.jsonl", "story.json"])
def test_json_lines_are_refused_with_the_field_that_is_text(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.write_text("".join(json.dumps({"id": "7", "the text": f"once {i}"}) + "\n" for i in range(9)))
    with pytest.raises(WorkloadError, match="is JSON lines") as caught:
        read_text(path)
    assert f"jq -r '.[\"the text\"]' {name} > story.txt" in str(caught.value.hint)
    assert read_text(path.rename(tmp_path / "as_it_is.txt")).startswith(b'{"id"')


def test_token_ids_are_no_text(tmp_path: Path) -> None:
    path = tmp_path / "ids"
    path.write_bytes(TOKENS_MAGIC + b"{}\n\x00\xff")
    assert read_text(path) == path.read_bytes()
