from __future__ import annotations

import json
import os
import re
import sysconfig
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from skyctl.errors import WorkloadError
from skyctl.workload import recipe
from skyctl.workload.corpus import LIMIT_BYTES, default_corpus, read_corpus
from skyctl.workload.shipped_files import digest_workload, shipped_path
from skyctl.workload.workload_spec import WorkloadSpec, make_spec, parse_source, resolve_source


def test_sizes_and_defaults() -> None:
    source = parse_source("gpt:layers=3,hidden=64,heads=4,context=32")
    assert source.kind == "gpt"
    assert dict(source.sizes) == {"layers": 3, "hidden": 64, "heads": 4, "context": 32}
    assert parse_source("bert").canonical == "bert:layers=8,hidden=256,heads=8,context=128"
    assert parse_source("gpt: heads=4 , layers=2").canonical == "gpt:layers=2,hidden=256,heads=4,context=128"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("gpt:layer=8", ["'layer'", "'layers'"]),
        ("gpt:layers=8,layers=9", ["'layers'", "twice"]),
        ("gpt:layers", ["'layers'", "whole number"]),
        ("gpt:layers=eight", ["'layers'", "'eight'"]),
        ("gpt:layers=0", ["'layers'", "'0'"]),
        ("gpt:vocab=3", ["'vocab'"]),
        ("gpt:hidden=100,heads=8", ["hidden (100)", "heads (8)"]),
        ("bert:context=2", ["context"]),
        ("gtp:layers=8", ["'gtp'", "'gpt'"]),
        ("hf:model", ["hf:model", "no folder"]),
        ("nowhere.py", ["nowhere.py", "no workload file"]),
        ("  ", ["empty"]),
    ],
)
def test_bad_sources(text: str, words: list[str]) -> None:
    with pytest.raises(WorkloadError) as error:
        parse_source(text)
    for word in words:
        assert word in str(error.value)
    assert error.value.exit_code == 2


def test_files(tmp_path: Path) -> None:
    with pytest.raises(WorkloadError, match="is a folder"):
        parse_source(str(tmp_path))
    (tmp_path / "train.txt").write_text("")
    with pytest.raises(WorkloadError, match=r"must end in \.py"):
        parse_source(str(tmp_path / "train.txt"))
    odd = tmp_path / "a b; $(echo) 'q'" / "gpt:x.py"
    odd.parent.mkdir()
    odd.write_text("")
    assert parse_source(str(odd)).path == odd.resolve()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"dtype": "float16"}, "losses would have to be scaled"),
        ({"dtype": "int3"}, "int3"),
        ({"batch_size": 0}, "at least 1 sample"),
        ({"learning_rate": -1.0}, "learning rate"),
        ({"learning_rate": float("nan")}, "learning rate"),
        ({"seed": -1}, "seed"),
        ({"data_path": "no.txt"}, "no such file"),
    ],
)
def test_bad_options(options: dict[str, object], words: str) -> None:
    with pytest.raises(WorkloadError, match=words):
        make_spec("gpt", **options)


def test_spec_is_json() -> None:
    spec = make_spec("gpt:layers=2", batch_size=4, seed=3)
    assert WorkloadSpec.from_dict(json.loads(json.dumps(spec.to_dict()))) == spec
    with pytest.raises(WorkloadError, match=r"'batchsize'.*'batch_size'"):
        WorkloadSpec.from_dict({"source": "gpt", "batchsize": 3})


def test_split() -> None:
    assert recipe.microbatch_sizes(10, 4) == [3, 3, 2, 2]
    assert recipe.microbatch_sizes(4, 4) == [1, 1, 1, 1]
    with pytest.raises(WorkloadError, match=r"5 microbatches.*has 4"):
        recipe.microbatch_sizes(4, 5)
    with pytest.raises(WorkloadError):
        recipe.microbatch_sizes(4, 0)


def test_corpus(tmp_path: Path) -> None:
    text = default_corpus()
    assert len(text) == LIMIT_BYTES
    assert b"def " in text
    default_corpus.cache_clear()
    assert default_corpus() == text
    (tmp_path / "a.txt").write_bytes(b"hello")
    assert read_corpus(str(tmp_path / "a.txt")) == b"hello"
    with pytest.raises(WorkloadError, match="can't be read"):
        read_corpus(str(tmp_path / "b.txt"))


def test_what_the_default_text_leaves_out_is_not_even_listed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The packages beside a standard library have tens of thousands of files."""
    for folder in ("email", "site-packages/torch", "email/test"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "a.py").write_text(f"# {folder}\n" * 10_000)
    listed: list[str] = []
    scandir = os.scandir

    def noting(path: str | Path) -> Any:
        listed.append(Path(path).relative_to(tmp_path).as_posix())
        return scandir(path)

    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path)})
    monkeypatch.setattr(os, "scandir", noting)
    default_corpus.cache_clear()
    try:
        assert default_corpus() == b"# email\n" * 10_000
    finally:
        default_corpus.cache_clear()
    assert sorted(set(listed)) == [".", "email"]


def test_arguments_of_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("")
    source = parse_source("train.py, width=512 ,name=a=b")
    assert source.path == (tmp_path / "train.py").resolve()
    assert source.arguments == {"width": "512", "name": "a=b"}
    assert source.canonical == "train.py,name=a=b,width=512"
    assert parse_source("train.py").canonical == "train.py"
    assert len(parse_source(f"train.py,text={'x' * 5000}").arguments["text"]) == 5000


def test_a_file_with_a_comma_in_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("a,b=1.py", "a.py"):
        (tmp_path / name).write_text("")
    source = parse_source("a,b=1.py,width=3")
    assert (source.path, source.arguments) == ((tmp_path / "a,b=1.py").resolve(), {"width": "3"})
    assert parse_source("a,b=1.py").arguments == {}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("train.py,width", r"train.py: 'width' is no argument"),
        ("train.py,", r"train.py: '' is no argument"),
        ("train.py,2x=3", r"'2x=3' is no argument"),
        ("train.py,class=3", r"'class=3' is no argument"),
        ("train.py,width=1,width=2", "'width' is given twice"),
        ("trian.py,width=1", r"no workload file trian.py \(did you mean 'train.py'\?\)"),
        ("gtp:layers=8,heads=2", "did you mean 'gpt'"),
    ],
)
def test_bad_arguments(text: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("")
    with pytest.raises(WorkloadError) as refused:
        parse_source(text)
    assert re.search(words, refused.value.message)


def test_arguments_travel_and_are_in_the_digest(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("")
    digests = {}
    for words in ("", ",width=256", ",width=512", ",width=512,depth=1", ",depth=1,width=512"):
        spec = make_spec(f"{tmp_path}/train.py{words}")
        sent = WorkloadSpec.from_dict(json.loads(json.dumps(spec.to_dict())))
        assert sent == spec
        assert resolve_source(sent) == parse_source(f"{tmp_path}/train.py{words}")
        on_node = replace(sent, path=shipped_path(sent, str(tmp_path)))
        assert resolve_source(on_node).arguments == resolve_source(spec).arguments
        digests[words] = digest_workload(spec)
    assert len(set(digests.values())) == 4
    assert digests[",width=512,depth=1"] == digests[",depth=1,width=512"]
