"""The meaning of ``--data`` with records beside its options, and what a plan made for it is recognised by."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.workload.datasets.record_folders import chats, model_folder, write_lines

from skyctl.errors import WorkloadError
from skyctl.jobs.training_request import TrainingRequest, digest_training
from skyctl.workload.datasets.checked_options import RecordChoices
from skyctl.workload.shipped_files import digest_workload, files_to_ship
from skyctl.workload.workload_spec import WorkloadSpec, make_spec

pytest.importorskip("transformers")


@pytest.fixture
def hub(tmp_path: Path) -> Path:
    return model_folder(tmp_path / "m")


def spec_of(hub: Path, data: Path, **choices: Any) -> WorkloadSpec:
    return make_spec(f"hf:{hub}", data_path=str(data), record_choices=RecordChoices(**choices))


def test_records_are_told_by_the_files_endings(hub: Path, tmp_path: Path) -> None:
    lines = write_lines(tmp_path / "d.jsonl", chats(3))
    packed = {"kind": "messages", "packing": True, "train_on_inputs": False, "skip_bad": False}
    assert spec_of(hub, lines).records == packed
    text = tmp_path / "d.txt"
    text.write_text(lines.read_text())
    assert spec_of(hub, text).records is None
    folder = tmp_path / "data"
    (folder / ".cache").mkdir(parents=True)
    (folder / "README.md").write_text("about it")
    (folder / "dataset_info.json").write_text("{}")
    (folder / ".cache" / "d.jsonl").write_text("{}")
    with pytest.raises(WorkloadError, match="is a folder; it takes one text file"):
        spec_of(hub, folder)
    (folder / "train").mkdir()
    write_lines(folder / "train" / "d.json", [{"text": "one"}])
    assert (spec_of(hub, folder).records or {})["kind"] == "text"
    with pytest.raises(WorkloadError, match="no such file"):
        spec_of(hub, tmp_path / "none.jsonl")


@pytest.mark.parametrize(
    ("choices", "word"),
    [
        ({"packing": True}, "--packing"),
        ({"packing": False}, "--no-packing"),
        ({"train_on_inputs": True}, "--train-on-inputs"),
        ({"skip_bad": True}, "--skip-bad"),
    ],
)
def test_options_of_records_are_refused_without_any(
    hub: Path, tmp_path: Path, choices: dict[str, bool], word: str
) -> None:
    text = tmp_path / "d.txt"
    text.write_text("one two")
    with pytest.raises(WorkloadError, match=rf"{word} is for records .* --data .*d\.txt is none"):
        spec_of(hub, text, **choices)
    with pytest.raises(
        WorkloadError, match=rf"{word} is for records .* the workload is of another kind \(gpt\)"
    ):
        make_spec("gpt:layers=1", record_choices=RecordChoices(**choices))
    request = TrainingRequest(spec_of(hub, write_lines(tmp_path / "d.jsonl", chats(3)), **choices))
    if word != "--packing":
        assert word in request.words()


def test_digests_cover_how_records_are_used(hub: Path, tmp_path: Path) -> None:
    data = write_lines(tmp_path / "d.jsonl", chats(3))
    specs = [
        spec_of(hub, data),
        spec_of(hub, data, train_on_inputs=True),
        spec_of(hub, data, skip_bad=True),
        spec_of(hub, data, packing=False),
        spec_of(hub, write_lines(tmp_path / "e.jsonl", chats(4))),
    ]
    assert len({digest_training(spec, digest_workload(spec)) for spec in specs}) == 5
    # what a profile is recognised by: the layers' shapes, not the data
    assert len({digest_workload(spec) for spec in specs}) == 2
    assert digest_workload(specs[0]) != digest_workload(make_spec(f"hf:{hub}"))
    data.write_text(json.dumps(chats(3)))
    assert WorkloadSpec.from_dict(json.loads(json.dumps(specs[1].to_dict()))) == specs[1]


def test_only_who_reads_records_is_sent_a_tokenizer(hub: Path, tmp_path: Path) -> None:
    data = write_lines(tmp_path / "d.jsonl", chats(3))
    assert set(files_to_ship(make_spec(f"hf:{hub}"))) == {"config.json"}
    names = {"config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"}
    assert set(files_to_ship(spec_of(hub, data))) == names
