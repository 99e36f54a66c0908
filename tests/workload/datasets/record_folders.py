"""Models of hf: with chat tokenizers, and files of records for them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tests.workload.datasets.chat_tokenizers import write_tokenizer
from tests.workload.hf import hub_folders

from skyctl.workload.datasets.checked_options import RecordChoices
from skyctl.workload.hf.tokenizer import load_tokenizer
from skyctl.workload.workload import Workload, load_workload
from skyctl.workload.workload_spec import make_spec

VOCABULARY = 400


def model_folder(
    folder: Path, style: str = "chatml", *, config: str = "qwen2", marked: bool = False, **more: Any
) -> Path:
    """A folder with a small model's config and a tokenizer of that style."""
    hub_folders.write(folder, {**hub_folders.CONFIGS[config], "vocab_size": VOCABULARY, **more})
    return write_tokenizer(folder, style, marked=marked)


def write_lines(path: Path, records: Iterable[Any]) -> Path:
    """A file of JSON lines."""
    path.write_text("".join(json.dumps(one, ensure_ascii=False) + "\n" for one in records))
    return path


def chats(count: int, first: int = 0) -> list[dict[str, Any]]:
    """Chats of different lengths; the answer to number N begins with ``say N``."""
    return [
        {
            "messages": [
                {"role": "user", "content": "what is " + "one " * (n * 7 % 5)},
                {"role": "assistant", "content": f"say {n} " + "two " * (n * 3 % 7)},
            ]
        }
        for n in range(first, first + count)
    ]


def load(
    folder: Path, data: Path, options: str = "context=48", choices: RecordChoices | None = None, **more: Any
) -> Workload:
    """The workload that trains that model on that data, with batches of 4 unless told."""
    more = {"batch_size": 4, "data_path": str(data), "record_choices": choices, **more}
    return load_workload(make_spec(f"hf:{folder},{options}", **more))


def answers(workload: Workload, targets: Any) -> list[int]:
    """The numbers of the chats whose answers are learnt in a batch."""
    assert workload.model.hub is not None
    tokenizer = load_tokenizer(workload.model.hub.folder)
    labels = [[n if n >= 0 else 0 for n in row] for row in targets["labels"].tolist()]
    return [int(n) for row in labels for n in re.findall(r"say (\d+)", tokenizer.decode(row))]
