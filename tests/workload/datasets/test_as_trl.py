"""Records as TRL's SFTTrainer prepares them: the same token ids, masks and counts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.workload.datasets.chat_tokenizers import write_tokenizer
from tests.workload.datasets.make_trl_samples import records, summary

from skyctl.workload.datasets.record_kinds import kind_of, read_source
from skyctl.workload.datasets.sample_maker import Sample, SampleMaker

pytest.importorskip("transformers")

RECORDED = json.loads(Path(__file__).with_name("trl_samples.json").read_text())


@pytest.mark.parametrize("marked", [False, True], ids=["unmarked", "marked"])
@pytest.mark.parametrize("style", ["chatml", "llama3", "gemma", "mistral"])
def test_samples_are_those_of_trl(tmp_path: Path, style: str, marked: bool) -> None:
    folder = write_tokenizer(tmp_path, style, marked=marked)
    for case in RECORDED["cases"]:
        if case["style"] != style:
            continue
        maker = SampleMaker(folder, case["context"], 400, train_on_inputs=False)
        given = records(case["kind"], style, 0)
        made = maker.make([read_source(one, kind_of(one)) for one in given])
        kept = [one for one in made if isinstance(one, Sample) and one.learnt_tokens]
        assert all(isinstance(one, Sample) for one in made)
        found: dict[str, Any] = summary([(list(one.ids), [bool(x) for x in one.learnt]) for one in kept])
        wanted = {key: value for key, value in case.items() if key in found}
        each = zip(found["each"], wanted["each"], strict=False)
        odd = next((n for n, (ours, theirs) in enumerate(each) if ours != theirs), None)
        assert found == wanted, f"{case['kind']}: {'' if odd is None else show(kept[odd], maker)}"


def show(sample: Sample, maker: SampleMaker) -> str:
    pieces = (
        (maker.decode([number]), learnt) for number, learnt in zip(sample.ids, sample.learnt, strict=True)
    )
    return "".join(f"[{piece}]" if learnt else piece for piece, learnt in pieces)
