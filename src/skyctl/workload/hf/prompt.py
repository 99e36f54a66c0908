"""Prompts as token ids, and ids as text, by the tokenizer of an ``hf:`` folder; without one, as bytes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from skyctl.errors import WorkloadError
from skyctl.workload.hf.hub_folder import CONFIG_NAME, tokenizer_files
from skyctl.workload.hf.tokenizer import load_tokenizer
from skyctl.workload.user_code import describe_exception

GENERATION_CONFIG_NAME = "generation_config.json"
UNFINISHED = "\N{REPLACEMENT CHARACTER}"
"""The end of a text whose last character has not all of its bytes yet."""


class PromptTokenizer:
    """The tokenizer of the prompts to the model of a folder, and of its answers.

    Args:
        folder: with ``config.json`` and maybe a tokenizer.
        tokenizer: another folder whose tokenizer counts; None: this one's.
    """

    def __init__(self, folder: Path, tokenizer: Path | None = None) -> None:
        self._folder, source = folder, tokenizer or folder
        self._tokenizer: Any = load_tokenizer(source) if tokenizer_files(source) else None

    @property
    def is_chat(self) -> bool:
        """Whether the folder's tokenizer has a chat template, so that a prompt can be a user's message."""
        return self._tokenizer is not None and bool(self._tokenizer.chat_template)

    def encode(self, prompt: str, *, chat: bool, system: str | None = None) -> list[int]:
        """A prompt's ids.

        Args:
            chat: as a user's message, by the chat template, up to where the answer begins; else as it is.
            system: the message before it.

        Raises:
            WorkloadError: the prompt is empty, or the template refuses it.
        """
        if self._tokenizer is None:
            ids = list(prompt.encode())
        elif not chat:
            ids = list(self._tokenizer(prompt)["input_ids"])
        else:
            messages = [{"role": "system", "content": system}] if system is not None else []
            messages.append({"role": "user", "content": prompt})
            try:
                text = self._tokenizer.apply_chat_template(
                    messages, tokenize=False, add_generation_prompt=True
                )
            except Exception as exc:
                raise WorkloadError(
                    f"the chat template in {self._folder} refuses the prompt: {describe_exception(exc)}",
                    hint="--raw gives the prompt as it is, without the template",
                ) from exc
            ids = list(self._tokenizer(text, add_special_tokens=False)["input_ids"])
        if not ids:
            raise WorkloadError("the prompt is empty")
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """The text of token ids, special ones left out."""
        if self._tokenizer is None:
            return bytes(number for number in ids if number < 256).decode(errors="replace")
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=True))

    def end_ids(self) -> set[int]:
        """The ids that end a text, by the generation config, else the config; and the tokenizer's own."""
        ends: set[int] = set()
        for name in (GENERATION_CONFIG_NAME, CONFIG_NAME):
            if not ends and (self._folder / name).is_file():
                value = json.loads((self._folder / name).read_text(encoding="utf-8")).get("eos_token_id")
                ends |= {value} if isinstance(value, int) else set(value or ())
        own = getattr(self._tokenizer, "eos_token_id", None)
        return ends if own is None else ends | {own}
