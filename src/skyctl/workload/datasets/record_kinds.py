"""The kinds of records, told by their keys, each as one of three things to train on. No torch here.

A chat is rendered by the tokenizer's own template; a text is in pieces that are learnt or not; token ids are
taken as they are.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

FAULT_MARK = b"!"
"""So begins, in a file that was converted, the line of a record that could not be: what is wrong follows."""
IGNORED = -100
ROLES = ("system", "developer", "user", "assistant", "tool", "function")
SHAREGPT_ROLES = {
    **{"system": "system", "human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant"},
    **{"chatgpt": "assistant", "bing": "assistant", "bard": "assistant", "model": "assistant"},
    **{"tool": "tool", "observation": "tool", "function_response": "tool"},
}
_IMAGE_KEYS = ("images", "image", "audio", "videos")


class BadRecordError(Exception):
    """A record that can't be trained on. ``hint``: what to do about it."""

    def __init__(self, what: str, hint: str = "put it right, or leave such records out: --skip-bad") -> None:
        super().__init__(what)
        self.what, self.hint = what, hint


@dataclass(frozen=True)
class Chat:
    """A conversation for the tokenizer's chat template.

    Attributes:
        prompt: so many messages at the beginning are the prompt, and all behind them is learnt; None: what
            the assistant says is.
        settings: further values for the template (``tools``, ``chat_template_kwargs``).
        unlearnt: the numbers of the assistant's messages with ``"weight": 0``.
        plain: the same for a tokenizer without a template; None: it needs one.
    """

    messages: Sequence[Mapping[str, Any]]
    prompt: int | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    unlearnt: frozenset[int] = frozenset()
    plain: Text | None = None


@dataclass(frozen=True)
class Text:
    """Pieces of text, (text, whether it is learnt).

    Attributes:
        apart: each piece is tokenised by itself, and nothing is added; else they are one text, with the
            special tokens that the tokenizer adds, and its end mark.
    """

    pieces: Sequence[tuple[str, bool]]
    apart: bool = False


@dataclass(frozen=True)
class TokenIds:
    """A record of token ids (``ids``), and by token whether it is a target of the loss (``learnt``)."""

    ids: Sequence[int]
    learnt: Sequence[bool]


Source = Chat | Text | TokenIds


def parse_record(line: bytes) -> dict[str, Any]:
    """The object that a line holds.

    Raises:
        BadRecordError: it is not UTF-8, no JSON, no object, has a key twice, or a number that is none.
    """
    if line.startswith(FAULT_MARK):
        raise BadRecordError(line[len(FAULT_MARK) :].decode())
    try:
        text = line.decode()
    except UnicodeDecodeError as exc:
        raise BadRecordError(f"byte {exc.start} is 0x{line[exc.start]:02x}, and no UTF-8", _RECODE) from exc
    if "\0" in text:
        raise BadRecordError("it has bytes of 0, as UTF-16 has", _RECODE)
    try:
        value = json.loads(text, object_pairs_hook=_without_repeats, parse_constant=_refuse_constant)
    except json.JSONDecodeError as exc:
        cut = exc.pos >= len(text.rstrip()) or exc.msg.startswith("Unterminated")
        what = "it is cut off: the line ends within a JSON value" if cut else f"it is no JSON: {exc.msg}"
        raise BadRecordError(f"{what} (character {exc.pos + 1})") from exc
    except (ValueError, RecursionError) as exc:
        raise BadRecordError(f"it is no JSON that can be read: {exc}") from exc
    if not isinstance(value, dict):
        raise BadRecordError(f"it is {_kind(value)}, not a JSON object", _ONE_OBJECT)
    return value


_RECODE = "convert the file from the encoding that it is in: iconv -f UTF-16 -t UTF-8 FILE > NEW"
_ONE_OBJECT = "a record is one JSON object on one line; a file that is one JSON array must end in .json"


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise BadRecordError(f"the key {twice!r:.60} is there twice")
    return found


def _refuse_constant(name: str) -> NoReturn:
    raise BadRecordError(f"{name} is no JSON number")


def kind_of(record: Mapping[str, Any]) -> str:
    """The kind of a record, by its keys.

    Raises:
        BadRecordError: its keys are those of no kind.
    """
    for kind, (keys, _) in _KINDS.items():
        if all(record.get(key) is not None for key in keys):
            return kind
    has = ", ".join(sorted(record)[:8]) or "none"
    known = "; ".join(" and ".join(keys) for keys, _ in _KINDS.values())
    raise BadRecordError(
        f"its keys are {has[:200]}: a record of no known kind", f"name its keys one of: {known}"
    )


def read_source(record: Mapping[str, Any], kind: str) -> Source:
    """The part of a record of that kind that is trained on.

    Raises:
        BadRecordError: it is of another kind, or a part of it is missing, empty or of a wrong type.
    """
    found = kind_of(record)
    if found != kind:
        raise BadRecordError(
            f"it is a record of the kind {found}, those before it are {kind}",
            "keep one kind of records in the files of one run",
        )
    if odd := next((key for key in _IMAGE_KEYS if record.get(key)), None):
        raise BadRecordError(f"it has {odd!r}; only text can be trained on")
    return _KINDS[kind][1](record)


def _read_messages(record: Mapping[str, Any]) -> Source:
    messages, unlearnt = _messages(record["messages"], "messages")
    return _chat(messages, record, unlearnt)


def _read_sharegpt(record: Mapping[str, Any]) -> Source:
    turns = record["conversations"]
    if isinstance(turns, list) and turns and isinstance(turns[0], dict) and "role" in turns[0]:
        messages, unlearnt = _messages(turns, "conversations")
        return _chat(messages, record, unlearnt)
    messages = []
    for place, turn in _objects(turns, "conversations"):
        speaker = turn.get("from")
        if not isinstance(speaker, str) or speaker not in SHAREGPT_ROLES:
            raise BadRecordError(f"{place} is from {speaker!r:.40}; known are {', '.join(SHAREGPT_ROLES)}")
        messages.append(
            {"role": SHAREGPT_ROLES[speaker], "content": _text(turn.get("value"), f"{place}.value")}
        )
    if isinstance(record.get("system"), str) and record["system"] and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": record["system"]})
    return _chat(messages, record, frozenset())


def _read_prompt(record: Mapping[str, Any]) -> Source:
    prompt, completion = record["prompt"], record["completion"]
    if isinstance(prompt, str) and isinstance(completion, str):
        if not completion:
            raise BadRecordError("there is no answer: completion is empty")
        return Text([(prompt, False), (completion, True)])
    if isinstance(prompt, str) or isinstance(completion, str):
        raise BadRecordError("prompt and completion must both be texts, or both be lists of messages")
    before, _ = _messages(prompt, "prompt")
    after, _ = _messages(completion, "completion")
    return Chat([*before, *after], len(before), _settings(record))


def _read_alpaca(record: Mapping[str, Any]) -> Source:
    asked = _text(record["instruction"], "instruction")
    more = _text(record.get("input") or "", "input")
    answer = _text(record["output"], "output")
    if not asked or not answer:
        raise BadRecordError(f"{'output' if asked else 'instruction'} is empty")
    further = ", paired with an input that provides further context" if more else ""
    inputs = f"### Input:\n{more}\n\n" if more else ""
    prompt = (
        f"Below is an instruction that describes a task{further}. Write a response that appropriately "
        f"completes the request.\n\n### Instruction:\n{asked}\n\n{inputs}### Response:\n"
    )
    messages = [
        {"role": "user", "content": f"{asked}\n\n{more}" if more else asked},
        {"role": "assistant", "content": answer},
    ]
    plain = Text([(prompt, False), (answer, True)])
    return Chat(messages, None, _settings(record), plain=plain)


def _read_segments(record: Mapping[str, Any]) -> Source:
    pieces = []
    for place, segment in _objects(record["segments"], "segments"):
        label = segment.get("label")
        if not isinstance(label, bool):
            raise BadRecordError(f"{place}.label must be true (it is learnt) or false, it is {label!r:.40}")
        pieces.append((_text(segment.get("text"), f"{place}.text"), label))
    return Text(pieces, apart=True)


def _read_text(record: Mapping[str, Any]) -> Source:
    text = _text(record["text"], "text")
    if not text:
        raise BadRecordError("its text is empty")
    return Text([(text, True)])


def _read_ids(record: Mapping[str, Any]) -> Source:
    ids = _numbers(record["input_ids"], "input_ids", None)
    labels = _numbers(record.get("labels", ids), "labels", len(ids))
    keep = _numbers(record.get("attention_mask", [1] * len(ids)), "attention_mask", len(ids))
    learnt = [label != IGNORED for label in labels]
    for place, (number, label) in enumerate(zip(ids, labels, strict=True)):
        if number < 0 or label not in (number, IGNORED):
            raise BadRecordError(
                f"labels[{place}] is {label} and input_ids[{place}] {number}: a label is {IGNORED} (not "
                "learnt) or the same id, one of 0 or more"
            )
    for key in ("completion_mask", "assistant_masks"):
        if key in record:
            mask = _numbers(record[key], key, len(ids))
            learnt = [one and bool(other) for one, other in zip(learnt, mask, strict=True)]
    kept = [place for place, one in enumerate(keep) if one]
    return TokenIds([ids[place] for place in kept], [learnt[place] for place in kept])


def _chat(messages: list[dict[str, Any]], record: Mapping[str, Any], unlearnt: frozenset[int]) -> Chat:
    answers = [
        place
        for place, message in enumerate(messages)
        if message["role"] == "assistant" and (message.get("content") or message.get("tool_calls"))
    ]
    if not answers:
        raise BadRecordError("there is no answer: no message of the role assistant that says anything")
    return Chat(messages, None, _settings(record), unlearnt)


def _settings(record: Mapping[str, Any]) -> dict[str, Any]:
    """The other arguments of a template: tools, as a list or as its JSON, and settings of its own."""
    found = dict(record.get("chat_template_kwargs") or {})
    if record.get("functions"):
        raise BadRecordError("it has functions, an old form: name them as tools")
    tools = record.get("tools")
    if isinstance(tools, str):
        try:
            tools = json.loads(tools) if tools.strip() else None
        except ValueError as exc:
            raise BadRecordError(f"its tools are no JSON: {exc}") from exc
    if tools:
        if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
            raise BadRecordError(f"tools must be a list of objects, they are {_kind(tools)}")
        found["tools"] = tools
    return found


def _messages(value: Any, key: str) -> tuple[list[dict[str, Any]], frozenset[int]]:
    """Messages without what is null in them, and the numbers of those with ``"weight": 0``."""
    found, unlearnt = [], set()
    for number, (place, given) in enumerate(_objects(value, key)):
        message = {name: part for name, part in given.items() if part is not None}
        role = message.get("role")
        if role not in ROLES:
            raise BadRecordError(f"{place} has the role {role!r:.40}; known are {', '.join(ROLES)}")
        if "content" in message:
            message["content"] = _content(message["content"], f"{place}.content")
        elif not message.get("tool_calls"):
            raise BadRecordError(f"{place} has no content")
        weight = message.pop("weight", 1)
        if weight not in (0, 1):
            raise BadRecordError(f"{place}.weight must be 0 or 1, it is {weight!r:.40}")
        if not weight and role == "assistant":
            unlearnt.add(number)
        found.append(message)
    return found, frozenset(unlearnt)


def _content(value: Any, place: str) -> str:
    """A message's text, of one part or of several."""
    if isinstance(value, list):
        for part in value:
            if not isinstance(part, dict) or part.get("type") != "text":
                kind = part.get("type") if isinstance(part, dict) else _kind(part)
                raise BadRecordError(
                    f"{place} has a part of the type {kind!r:.40}; only text can be trained on"
                )
        return "".join(_text(part.get("text"), place) for part in value)
    return _text(value, place)


def _objects(value: Any, key: str) -> list[tuple[str, dict[str, Any]]]:
    if not isinstance(value, list) or not value:
        raise BadRecordError(f"{key} must be a list with something in it, it is {_kind(value)}")
    for number, one in enumerate(value):
        if not isinstance(one, dict):
            raise BadRecordError(f"{key}[{number}] must be an object, it is {_kind(one)}")
    return [(f"{key}[{number}]", one) for number, one in enumerate(value)]


def _text(value: Any, place: str) -> str:
    if not isinstance(value, str):
        raise BadRecordError(f"{place} must be a text, it is {_kind(value)}")
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError as exc:
            raise BadRecordError(f"{place} has half of a surrogate pair, which is no character") from exc
    return value


def _numbers(value: Any, key: str, length: int | None) -> list[int]:
    if not isinstance(value, list) or not all(type(one) is int for one in value):
        raise BadRecordError(f"{key} must be a list of whole numbers")
    if length is not None and len(value) != length:
        raise BadRecordError(f"{key} has {len(value)} numbers, input_ids {length}")
    return value


def _kind(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, list):
        return f"a list of {len(value)}"
    names = {str: "a text", dict: "an object", bool: "true or false", int: "a number", float: "a number"}
    return names.get(type(value), type(value).__name__)


_KINDS: dict[str, tuple[tuple[str, ...], Callable[[Mapping[str, Any]], Source]]] = {
    "token ids": (("input_ids",), _read_ids),
    "messages": (("messages",), _read_messages),
    "prompt and completion": (("prompt", "completion"), _read_prompt),
    "conversations": (("conversations",), _read_sharegpt),
    "segments": (("segments",), _read_segments),
    "instruction and output": (("instruction", "output"), _read_alpaca),
    "text": (("text",), _read_text),
}
KINDS = tuple(_KINDS)
