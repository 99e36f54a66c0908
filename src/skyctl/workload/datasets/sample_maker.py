"""Records as token ids, each with whether it is learnt: by the tokenizer and its chat template.

A template with ``{% generation %}`` marks says itself what the assistant's words are. Of any other one the
beginnings of a chat are rendered: up to an answer, with what asks for one, and with that answer. Both must
be beginnings of the whole, or the answer's place in it is not known.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from skyctl.errors import WorkloadError
from skyctl.workload.datasets.record_kinds import BadRecordError, Chat, Source, Text, TokenIds
from skyctl.workload.hf.tokenizer import load_tokenizer
from skyctl.workload.user_code import describe_exception

Span = tuple[int, int]
_MARKED = re.compile(r"\{%-?\s*generation\s*-?%\}")
_OTHER_WAYS = (
    "train on all of it with --train-on-inputs, write prompt and completion, or mark the answers in the "
    "template with {% generation %}"
)


@dataclass(frozen=True)
class Sample:
    """One record's tokens.

    Attributes:
        ids: its token ids, int32.
        learnt: by token 1 where it is a target of the loss, else 0; the first one never is.
        truncated: it was longer than a row.
    """

    ids: array[int]
    learnt: bytes
    truncated: bool = False

    @property
    def learnt_tokens(self) -> int:
        """How many of its tokens are targets of the loss."""
        return self.learnt.count(1)


@dataclass(frozen=True)
class _Prompted:
    """A text that is tokenised together with others, and the spans of it that are learnt; None: all of it."""

    text: str
    spans: Sequence[Span] | None
    adds_special: bool


class SampleMaker:
    """Makes samples of the records that a tokenizer can render.

    Args:
        folder: the model's, with the tokenizer's files.
        context: the most tokens of a sample; the rest is cut off.
        vocabulary: how many ids the model knows.
        train_on_inputs: all tokens are learnt.

    Raises:
        WorkloadError: the tokenizer can't be loaded, or can't tell where in a text its tokens are.
    """

    def __init__(self, folder: Path, context: int, vocabulary: int, *, train_on_inputs: bool) -> None:
        self._tokenizer = load_tokenizer(folder)
        self._name, self.context, self._vocabulary = folder.name, context, vocabulary
        self._all = train_on_inputs
        self._end: str = getattr(self._tokenizer, "eos_token", None) or ""
        self._special = set(getattr(self._tokenizer, "all_special_tokens", None) or ())
        if not self._tokenizer.is_fast:
            raise WorkloadError(
                f"the tokenizer in {folder.name} can't tell where in a text its tokens are",
                hint="records need tokenizer.json in the folder: save_pretrained writes it",
            )

    def make(self, sources: Sequence[Source]) -> list[Sample | BadRecordError]:
        """The samples of some records, in their order; an error in the place of one that can't be rendered.

        Raises:
            WorkloadError: an id is not the model's.
        """
        found: dict[int, Sample | BadRecordError] = {}
        texts: dict[int, _Prompted] = {}
        for number, source in enumerate(sources):
            try:
                made = self._prepare(source)
            except BadRecordError as exc:
                found[number] = exc
                continue
            if isinstance(made, _Prompted):
                texts[number] = made
            else:
                found[number] = self._sample(*made)
        for adds_special in (False, True):
            group = [number for number, text in texts.items() if text.adds_special == adds_special]
            if not group:
                continue
            encoded = self._tokenize([texts[number].text for number in group], adds_special)
            for place, number in enumerate(group):
                ids = encoded["input_ids"][place]
                found[number] = self._sample(ids, self._mask(encoded, place, len(ids), texts[number].spans))
        return [found[number] for number in range(len(sources))]

    def decode(self, ids: Sequence[int]) -> str:
        """The text that token ids stand for, special ones included."""
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=False))

    @property
    def padding(self) -> int:
        """The id that fills rows up; no token of a sample sees it."""
        for name in ("pad_token_id", "eos_token_id"):
            number = getattr(self._tokenizer, name, None)
            if isinstance(number, int) and number < self._vocabulary:
                return number
        return 0

    def _sample(self, ids: Sequence[int], learnt: Sequence[int]) -> Sample:
        if ids and max(ids) >= self._vocabulary:
            raise WorkloadError(
                f"the data has the token id {max(ids)}, the model's vocab_size is {self._vocabulary}",
                hint="tokenizer and config.json must be of the same model",
            )
        mask = bytearray(b"\1" * len(ids) if self._all else bytes(map(bool, learnt)))[: self.context]
        if mask:
            mask[0] = 0  # nothing before it predicts it
        return Sample(array("i", ids[: self.context]), bytes(mask), len(ids) > self.context)

    def _tokenize(self, texts: Sequence[str], adds_special: bool) -> Any:
        return self._tokenizer(list(texts), add_special_tokens=adds_special, verbose=False)

    def _mask(self, encoded: Any, place: int, length: int, spans: Sequence[Span] | None) -> bytearray:
        """By token 1 where any of its characters is in one of the spans."""
        if spans is None:
            return bytearray(b"\1" * length)
        mask = bytearray(length)
        for start, stop in spans:
            first = next(self._tokens_at(encoded, place, range(start, stop)), None)
            last = next(self._tokens_at(encoded, place, range(stop - 1, start - 1, -1)), None)
            if first is not None and last is not None:
                mask[first : last + 1] = b"\1" * (last + 1 - first)
        return mask

    @staticmethod
    def _tokens_at(encoded: Any, place: int, characters: range) -> Iterator[int]:
        """The tokens that hold these characters; of a blank there may be none."""
        found = (encoded.char_to_token(place, character) for character in characters)
        return (token for token in found if token is not None)

    # --- what is tokenised

    def _prepare(self, source: Source) -> _Prompted | tuple[Sequence[int], Sequence[int]]:
        if isinstance(source, TokenIds):
            return source.ids, source.learnt
        if isinstance(source, Chat) and not self._tokenizer.chat_template:
            if source.plain is None:
                raise WorkloadError(
                    f"{self._name} has no chat template, and the data is chats",
                    hint="take the folder of a model that was trained to chat, or write records of prompt "
                    "and completion as texts",
                )
            source = source.plain
        if isinstance(source, Chat):
            return self._prepare_chat(source)
        return self._prepare_text(source)

    def _prepare_text(self, source: Text) -> _Prompted | tuple[Sequence[int], Sequence[int]]:
        pieces = [(text, learnt) for text, learnt in source.pieces if text]
        if source.apart:
            if not pieces:
                raise BadRecordError("all of its segments are empty")
            each = self._tokenize([text for text, _ in pieces], adds_special=False)["input_ids"]
            ids = [number for piece in each for number in piece]
            return ids, [learnt for piece, (_, learnt) in zip(each, pieces, strict=True) for _ in piece]
        last, learnt = pieces[-1]
        if not last.endswith(self._end):
            pieces[-1] = (last + self._end, learnt)
        spans, at = [], 0
        for text, learnt in pieces:
            if learnt:
                spans.append((at, at + len(text)))
            at += len(text)
        whole = "".join(text for text, _ in pieces)
        return _Prompted(whole, None if all(learnt for _, learnt in pieces) else spans, True)

    def _prepare_chat(self, chat: Chat) -> _Prompted | tuple[Sequence[int], Sequence[int]]:
        template = self._tokenizer.get_chat_template(tools=chat.settings.get("tools"))
        marked = _MARKED.search(template) is not None
        if marked and chat.prompt is None and not chat.unlearnt and not self._all:
            made = self._apply(
                chat, chat.messages, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
            )
            if 1 not in made["assistant_masks"]:
                raise BadRecordError("there is no answer: the chat template marks nothing of it as generated")
            return made["input_ids"], made["assistant_masks"]
        whole = self._render(chat, len(chat.messages))
        if self._all:
            return _Prompted(whole, (), False)
        if chat.prompt is not None:
            start = self._beginning(chat, chat.prompt, whole, asks=True)
            return _Prompted(whole, [(start, len(whole))], False)
        spans = []
        for number, message in enumerate(chat.messages):
            if message["role"] == "assistant" and number not in chat.unlearnt:
                start = self._beginning(chat, number, whole, asks=True)
                stop = self._beginning(chat, number + 1, whole, asks=False)
                spans.append((start, self._without_blank_end(whole, start, stop)))
        return _Prompted(whole, spans, False)

    def _beginning(self, chat: Chat, messages: int, whole: str, *, asks: bool) -> int:
        """How much of the rendered chat its first messages are; ``asks``: with what asks for an answer."""
        if not messages:
            raise BadRecordError(
                "its first message is the assistant's, and where that begins the chat template does not tell",
                f"begin chats with a user's message; or {_OTHER_WAYS}",
            )
        if messages == len(chat.messages) and not asks:
            return len(whole)
        begun = self._render(chat, messages, asks=asks)
        if whole.startswith(begun):
            return len(begun)
        same = next((i for i, (a, b) in enumerate(zip(begun, whole, strict=False)) if a != b), 0)
        raise BadRecordError(
            f"where message {messages + 1 if asks else messages} stands can't be told: the chat template "
            f"renders the first {messages} messages alone as …{begun[same:][:40]!r}, and within the whole "
            f"chat as …{whole[same:][:40]!r}",
            _OTHER_WAYS,
        )

    def _without_blank_end(self, whole: str, start: int, stop: int) -> int:
        """The end of an answer without blanks behind its end mark, which nobody generates."""
        end = start + len(whole[start:stop].rstrip())
        marked = any(whole.endswith(mark, start, end) for mark in self._special)
        return end if marked else stop

    def _render(self, chat: Chat, messages: int, *, asks: bool = False) -> str:
        return str(self._apply(chat, chat.messages[:messages], tokenize=False, add_generation_prompt=asks))

    def _apply(self, chat: Chat, messages: Sequence[Any], **how: Any) -> Any:
        try:
            return self._tokenizer.apply_chat_template(list(messages), **how, **chat.settings)
        except ImportError as exc:
            raise WorkloadError(
                f"chat templates need the Python package jinja2: {exc}",
                hint="pip install jinja2, here and on every node",
            ) from exc
        except Exception as exc:
            raise BadRecordError(f"the chat template can't render it: {describe_exception(exc)}") from exc
