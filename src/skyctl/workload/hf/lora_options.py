"""Parses ``--lora r=16,alpha=32,…`` into JSON values by the names of ``peft.LoraConfig``. No torch."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from typing import Any

from skyctl.errors import WorkloadError

ALL_LINEAR = "all-linear"
LORA_DEFAULTS: Mapping[str, Any] = {
    "r": 8,
    "lora_alpha": 8,
    "lora_dropout": 0.0,
    "target_modules": ALL_LINEAR,
    "modules_to_save": None,
    "bias": "none",
    "use_rslora": False,
    "use_dora": False,
}
"""Every option with its default: those of ``LoraConfig``, but all linear layers as targets."""
SHORT_NAMES: Mapping[str, str] = {
    "alpha": "lora_alpha",
    "dropout": "lora_dropout",
    "targets": "target_modules",
}
_BIASES = ("none", "all", "lora_only")
_FLAGS = ("use_rslora", "use_dora")
_LISTS = ("target_modules", "modules_to_save")
_HINT = "as in --lora r=16,alpha=32,dropout=0.05,targets=q_proj,v_proj"


def parse_lora(text: str) -> dict[str, Any]:
    """Parses what ``--lora`` says → every option by its name in ``LoraConfig``.

    Words without ``=`` after ``targets=`` or ``modules_to_save=`` are more of its modules.

    Raises:
        WorkloadError: an unknown option (names the nearest one), a value that can't be, or one given twice.
    """
    found: dict[str, Any] = {}
    last = ""
    for part in text.split(","):
        word, equals, value = (piece.strip() for piece in part.partition("="))
        if not equals and word and last in _LISTS and word not in _FLAGS:
            found[last].append(word)
            continue
        last = SHORT_NAMES.get(word, word)
        if last not in LORA_DEFAULTS:
            raise WorkloadError(f"--lora has no {word!r}{_suggest(word)}; it has {_all_names()}", hint=_HINT)
        if last in found:
            raise WorkloadError(f"--lora {text}: {word!r} is given twice")
        if not equals and last not in _FLAGS:
            raise WorkloadError(f"--lora {text}: {word!r} needs a value", hint=_HINT)
        found[last] = _parse_value(last, value, flag=not equals)
    if found.get("target_modules") == [ALL_LINEAR]:
        found["target_modules"] = ALL_LINEAR
    return check_lora({**LORA_DEFAULTS, **found})


def _parse_value(name: str, value: str, *, flag: bool) -> Any:
    """A value as JSON has it; as typed where it can't be one, for ``check_lora`` to refuse."""
    if name in _LISTS:
        return [value]
    if name in _FLAGS:
        return True if flag else {"true": True, "false": False}.get(value.lower(), value)
    if name == "bias":
        return value
    try:
        return float(value) if name == "lora_dropout" else int(value)
    except ValueError:
        return value


def check_lora(values: Mapping[str, Any]) -> dict[str, Any]:
    """The options, checked: all of them must be there.

    Raises:
        WorkloadError: one is missing, unknown or of a value that can't be; names it.
    """
    if odd := sorted(values.keys() ^ LORA_DEFAULTS.keys()):
        raise WorkloadError(f"the options of lora are {', '.join(LORA_DEFAULTS)}: not so with {odd[0]!r}")
    for name in ("r", "lora_alpha"):
        value = values[name]
        if type(value) is not int or not 1 <= value < 10**6:
            raise _value_error(name, value, "must be a whole number of at least 1")
    dropout = values["lora_dropout"]
    if type(dropout) not in (int, float) or not 0 <= dropout < 1:
        raise _value_error("lora_dropout", dropout, "must be a number from 0 to below 1")
    if values["bias"] not in _BIASES:
        close = difflib.get_close_matches(str(values["bias"]), _BIASES, n=1, cutoff=0.5)
        guess = f" (did you mean {close[0]!r}?)" if close else ""
        raise _value_error("bias", values["bias"], f"must be {', '.join(_BIASES)}{guess}")
    for name in _FLAGS:
        if type(values[name]) is not bool:
            raise _value_error(name, values[name], "must be true or false")
    if values["target_modules"] != ALL_LINEAR:
        _check_names("target_modules", values["target_modules"])
    if values["modules_to_save"] is not None:
        _check_names("modules_to_save", values["modules_to_save"])
    return dict(values)


def _check_names(name: str, value: object) -> None:
    listed = value if isinstance(value, list | tuple) else []
    if not listed or not all(isinstance(one, str) and one for one in listed):
        raise _value_error(name, value, "must be names of modules, as in q_proj,v_proj")
    if ALL_LINEAR in listed:
        raise _value_error(name, ",".join(listed), f"{ALL_LINEAR} stands alone")


def _value_error(name: str, value: object, need: str) -> WorkloadError:
    short = next((s for s, of in SHORT_NAMES.items() if of == name), name)
    return WorkloadError(f"--lora: {short}={value!s:.80} {need}", hint=_HINT)


def format_lora(values: Mapping[str, Any]) -> str:
    """The text that ``parse_lora`` reads as these options."""
    short = {name: word for word, name in SHORT_NAMES.items()}
    words = [f"r={values['r']}"]
    for name, default in LORA_DEFAULTS.items():
        value = values[name]
        if name == "r" or value == default:
            continue
        if name in _FLAGS:
            words.append(name)
        else:
            shown = ",".join(value) if name in _LISTS else f"{value:g}" if name == "lora_dropout" else value
            words.append(f"{short.get(name, name)}={shown}")
    return ",".join(words)


def _all_names() -> str:
    short = {name: word for word, name in SHORT_NAMES.items()}
    return ", ".join(short.get(name, name) for name in LORA_DEFAULTS)


def _suggest(word: str) -> str:
    close = difflib.get_close_matches(word, [*SHORT_NAMES, *LORA_DEFAULTS], n=1, cutoff=0.5)
    return f" (did you mean {close[0]!r}?)" if close else ""


def suggest_module(word: str, known: Sequence[str]) -> str:
    """The suggestion for a module that the model lacks: one of its own, or an option of ``--lora``."""
    close = difflib.get_close_matches(word, [*known, *SHORT_NAMES, *LORA_DEFAULTS], n=1, cutoff=0.5)
    return f" (did you mean {close[0]!r}?)" if close else ""
