"""Files that are damaged or unusual: each error names file, line, what is wrong and what to do."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.workload.datasets.chat_tokenizers import write_tokenizer
from tests.workload.datasets.record_folders import VOCABULARY, chats, load, model_folder, write_lines

from skyctl.errors import WorkloadError
from skyctl.workload.datasets.checked_options import RecordChoices, find_record_options
from skyctl.workload.datasets.line_blocks import MAX_LINE_BYTES
from skyctl.workload.datasets.line_conversion import open_records
from skyctl.workload.datasets.row_order import BlockReader, RowOrder
from skyctl.workload.datasets.sample_maker import SampleMaker
from skyctl.workload.datasets.survey import Survey, survey_records

pytest.importorskip("transformers")

GOOD = json.dumps(chats(1)[0]).encode()
SKIP = RecordChoices(skip_bad=True)


def message(**parts: Any) -> bytes:
    return json.dumps(
        {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", **parts}]}
    ).encode()


FAULTS: dict[str, tuple[bytes, str]] = {
    "a line that is cut": (GOOD[:-9], "cut off: the line ends within a JSON value"),
    "a line that is cut in a text": (GOOD[: GOOD.index(b"say") + 2], "cut off"),
    "no JSON": (b"{'messages': 1}", "no JSON: Expecting property name"),
    "a wrong key": (b'{"massages": []}', "its keys are massages: a record of no known kind"),
    "a preference": (
        b'{"prompt": "a", "chosen": "b", "rejected": "c"}',
        "its keys are chosen, prompt, rejected",
    ),
    "an unknown role": (
        GOOD.replace(b'"user"', b'"robot"'),
        r"messages\[0\] has the role 'robot'; known are system",
    ),
    "no answer": (b'{"messages": [{"role": "user", "content": "a"}]}', "no message of the role assistant"),
    "an empty answer": (message(content=""), "no message of the role assistant that says anything"),
    "no content": (message(name="x"), r"messages\[1\] has no content"),
    "an image": (message(content=[{"type": "image"}]), "a part of the type 'image'; only text"),
    "a number": (message(content=5), r"messages\[1\]\.content must be a text, it is a number"),
    "no messages": (b'{"messages": []}', "must be a list with something in it"),
    "a list": (b"[1]", "it is a list of 1, not a JSON object"),
    "UTF-16": (GOOD.decode().encode("utf-16-le"), "bytes of 0, as UTF-16 has"),
    "Latin-1": (
        message(content="zwölf").decode().encode().replace(b"\\u00f6", b"\xf6"),
        "0xf6, and no UTF-8",
    ),
    "NaN": (GOOD[:-1] + b', "score": NaN}', "NaN is no JSON number"),
    "a key twice": (GOOD[:-1] + b', "messages": []}', "the key 'messages' is there twice"),
    "another kind": (
        b'{"prompt": "a", "completion": "b"}',
        "prompt and completion, those before it are messages",
    ),
    "half a character": (message(content="\ud800"), "half of a surrogate pair"),
    "deep": (b'{"messages": ' + b"[" * 100_000 + b"}", "no JSON"),
    "tools that are none": (GOOD[:-1] + b', "tools": "[{"}', "its tools are no JSON"),
}


@pytest.mark.parametrize("name", FAULTS)
@pytest.mark.parametrize("place", [3, 150])
def test_a_bad_record_is_named_by_file_and_line(tmp_path: Path, name: str, place: int) -> None:
    """The third line is seen when the data is named, the 150th when it is looked through."""
    line, said = FAULTS[name]
    lines = [json.dumps(one).encode() for one in chats(160)]
    lines[place - 1] = line
    data = tmp_path / "d.jsonl"
    data.write_bytes(b"\n".join(lines))
    folder = write_tokenizer(tmp_path / "m", "chatml")
    with pytest.raises(WorkloadError, match=rf"^d\.jsonl, line {place}: .*{said}") as caught:
        look(folder, data)
    assert caught.value.hint
    found = look(folder, data, SKIP)
    assert found.counts.bad == 1
    assert found.counts.records == 160
    assert f"1 are bad and left out, the first: d.jsonl, line {place}: " in found.lines()[1]


def look(folder: Path, data: Path, choices: RecordChoices | None = None, context: int = 48) -> Survey:
    """The launcher's survey of the data, without the model."""
    options = find_record_options(data, choices or RecordChoices())
    maker = SampleMaker(folder, context, VOCABULARY, train_on_inputs=options.train_on_inputs)
    return survey_records(BlockReader(open_records(data), options, maker))


def test_of_large_data_a_beginning_is_looked_through(tmp_path: Path) -> None:
    """However slow the machine: three seconds, and one block at least."""
    data = write_lines(tmp_path / "d.jsonl", chats(3000))
    maker = SampleMaker(model_folder(tmp_path / "m"), 48, VOCABULARY, train_on_inputs=False)
    reader = BlockReader(open_records(data), find_record_options(data, RecordChoices()), maker)
    assert len(reader.blocks) > 2
    found = survey_records(reader, clock=iter([0.0, 1.0, 4.0]).__next__)
    assert not found.whole
    assert found.read_bytes == reader.blocks[1][2]
    size = f"{found.read_bytes / 2**20:.1f} MiB of {data.stat().st_size / 2**20:.1f}"
    assert found.lines()[0].startswith(f"data: {found.counts.records:,} records in the first {size}, ")


def test_a_very_long_line_is_refused_and_passed_over(tmp_path: Path) -> None:
    data = tmp_path / "d.jsonl"
    long = json.dumps({"messages": [{"role": "user", "content": "x" * (MAX_LINE_BYTES + (2 << 20))}]})
    data.write_text(
        "\n".join([json.dumps(one) for one in chats(200)] + [long] + [json.dumps(chats(1)[0])]) + "\n"
    )
    folder = model_folder(tmp_path / "m")
    with pytest.raises(WorkloadError, match=r"d\.jsonl, line 201: it has more than 8 MiB"):
        look(folder, data)
    assert look(folder, data, SKIP).counts.records == 202


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "is empty"),
        (b"\xef\xbb\xbf", "is empty"),
        (b"\n \n\n", "holds no records"),
        (b"[]", "holds no records"),
    ],
)
def test_an_empty_file_is_refused(tmp_path: Path, content: bytes, said: str) -> None:
    data = tmp_path / "d.json"
    data.write_bytes(content)
    with pytest.raises(WorkloadError, match=said):
        load(model_folder(tmp_path / "m"), data)


def test_records_without_an_answer_in_reach_are_counted(tmp_path: Path) -> None:
    long = {"prompt": "one " * 50, "completion": "two"}
    cut = {"prompt": "one", "completion": "two " * 50}
    data = write_lines(tmp_path / "d.jsonl", [long, cut, {"prompt": "one", "completion": "two"}])
    folder = model_folder(tmp_path / "m")
    found = look(folder, data, context=16)
    assert (found.counts.records, found.counts.truncated, found.counts.dropped) == (3, 2, 1)
    assert "2 are longer than a row and cut off; 1 have no answer left and are dropped" in found.lines()[1]
    with pytest.raises(
        WorkloadError, match="nothing to train on: of 1 records 0 are bad and 1 have no answer within 16"
    ):
        next(load(folder, write_lines(tmp_path / "e.jsonl", [long]), "context=16").batches())


FORMS = ["lines", "array", "pretty array", "csv", "mark", "crlf"]


@pytest.mark.parametrize("form", FORMS)
def test_all_forms_of_files_are_the_same_data(tmp_path: Path, form: str) -> None:
    given = [
        {"instruction": f'say, "{n}"\nand ö', "input": "" if n % 2 else "猫, one", "output": f"say {n}"}
        for n in range(30)
    ]
    folder = model_folder(tmp_path / "m")
    plain = write_lines(tmp_path / "plain.jsonl", given)
    data = tmp_path / ("d.csv" if form == "csv" else "d.json")
    lines = plain.read_text().splitlines()
    if form == "csv":
        import csv

        with data.open("w", newline="") as file:
            writer = csv.DictWriter(file, ["instruction", "input", "output"])
            writer.writeheader()
            writer.writerows(given)
    else:
        text = {"array": json.dumps(given), "pretty array": json.dumps(given, indent=2, ensure_ascii=False)}
        ends = "\r\n" if form == "crlf" else "\n"
        data.write_bytes(
            (b"\xef\xbb\xbf" if form == "mark" else b"") + text.get(form, ends.join(lines)).encode()
        )
    found, wanted = look(folder, data), look(folder, plain)
    assert found == wanted
    assert found.counts.records == 30


def test_a_fault_in_an_array_or_a_table_is_named_by_its_number(tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "m")
    data = tmp_path / "d.json"
    given = chats(130)
    given[119]["messages"][0]["role"] = "robot"
    data.write_text(json.dumps(given))
    with pytest.raises(WorkloadError, match=r"^d\.json, record 120: messages\[0\] has the role 'robot'"):
        look(folder, data)
    data.write_text(json.dumps(given)[:-2000])
    with pytest.raises(WorkloadError, match=r"^d\.json, record 1\d\d: "):
        look(folder, data)
    data.write_text(json.dumps(given[:3])[:-2] + ', "x": NaN, "x": 1}]')
    with pytest.raises(WorkloadError, match=r"^d\.json, record 3: the key 'x' is there twice|NaN"):
        look(folder, data)
    table = tmp_path / "d.csv"
    table.write_text("text\n" + "one two\n" * 110 + "one,two\n")
    with pytest.raises(WorkloadError, match=r"^d\.csv, row 111: it has 2 fields, the first row names 1"):
        look(folder, table)
    table.write_text('text\none\n"two')
    with pytest.raises(WorkloadError, match=r"^d\.csv, row 2: it can't be read: unexpected end of data"):
        look(folder, table)


def test_parquet_without_pyarrow_says_how_to_install_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    data = tmp_path / "d.parquet"
    data.write_bytes(b"PAR1")
    with pytest.raises(WorkloadError, match=r"d\.parquet: Parquet files are read with pyarrow") as caught:
        load(model_folder(tmp_path / "m"), data)
    assert "pip install pyarrow" in str(caught.value.hint)


def test_parquet_files_are_read(tmp_path: Path) -> None:
    pyarrow = importlib.import_module("pyarrow")  # it has no types
    parquet = importlib.import_module("pyarrow.parquet")
    table = pyarrow.Table.from_pylist(chats(30))
    folder = tmp_path / "data"
    folder.mkdir()
    parquet.write_table(table, folder / "train-00000.parquet")
    found = look(model_folder(tmp_path / "m"), folder)
    assert found == look(tmp_path / "m", write_lines(tmp_path / "plain.jsonl", chats(30)))


def test_a_template_whose_beginnings_differ_is_refused_with_the_reason(tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "m")
    template = folder / "chat_template.jinja"
    template.write_text(
        template.read_text().replace("message.role + ", "message.role + (loop.length | string) + ")
    )
    data = write_lines(tmp_path / "d.jsonl", chats(3))
    with pytest.raises(
        WorkloadError, match=r"^d\.jsonl, line 1: where message 2 stands can't be told: .*'1\\n"
    ) as caught:
        look(folder, data)
    assert "--train-on-inputs" in str(caught.value.hint)
    found = look(folder, data, RecordChoices(train_on_inputs=True))
    assert found.counts.learnt == found.counts.tokens - 3
    template.unlink()
    with pytest.raises(WorkloadError, match="m has no chat template, and the data is chats"):
        look(folder, data)


def test_the_sample_shows_what_is_learnt(tmp_path: Path) -> None:
    data = write_lines(tmp_path / "d.jsonl", chats(3))
    *_, last = look(model_folder(tmp_path / "m"), data).lines()
    said = "⟦say 0 <|im_end|>⟧"
    assert last.endswith(f"is learnt: <|im_start|>user\nwhat is <|im_end|>\n<|im_start|>assistant\n{said}\n")


def test_a_message_of_weight_0_is_not_learnt(tmp_path: Path) -> None:
    turns = [*chats(1)[0]["messages"], *chats(1, first=7)[0]["messages"]]
    turns[1]["weight"] = 0
    folder, data = model_folder(tmp_path / "m", marked=True), tmp_path / "d.jsonl"
    *_, last = look(folder, write_lines(data, [{"messages": turns}]), context=96).lines()
    assert last.count("⟦") == 2  # the first one is the note's own
    assert "⟦say 7 <|im_end|>⟧" in last


def test_a_record_found_bad_in_training_ends_it_with_its_line(tmp_path: Path) -> None:
    data = write_lines(tmp_path / "d.jsonl", [*chats(5000), {"messages": [{"role": "robot"}]}])
    workload = load(model_folder(tmp_path / "m"), data)
    with pytest.raises(WorkloadError, match=r"^d\.jsonl, line 5001: "):
        for _ in RowOrder(workload.record_reader(), 0).rows(0):
            pass
