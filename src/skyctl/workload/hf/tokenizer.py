"""Loads the tokenizer of a model's folder."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from skyctl.errors import WorkloadError
from skyctl.workload.hf.transformers_models import import_transformers
from skyctl.workload.user_code import describe_exception


def load_tokenizer(folder: Path) -> Any:
    """The tokenizer of a folder, as ``transformers`` has it.

    Raises:
        WorkloadError: it can't be loaded.
    """
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # it warns of processes started later
    try:
        transformers = import_transformers()
        # AutoTokenizer has classes that make up their own for some model_type, whatever tokenizer.json says
        whole = (folder / "tokenizer.json").is_file()
        kind = transformers.PreTrainedTokenizerFast if whole else transformers.AutoTokenizer
        return kind.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
    except WorkloadError:
        raise
    except Exception as exc:
        raise WorkloadError(f"the tokenizer in {folder} can't be used: {describe_exception(exc)}") from exc
