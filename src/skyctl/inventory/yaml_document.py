"""YAML as plain Python values that remember their lines, so that an error can say ``cluster.yaml:7``.

Used for cluster.yaml and for lab.yaml::

    document = load_yaml("lab.yaml")
    top = document.mapping((), {"nodes", "sites"}, "lab.yaml")
    raise document.error(("nodes", 0, "rate_mbit"), "rate_mbit of node 'n1' must be more than 0")
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from skyctl.errors import InvalidRecordError, InventoryError
from skyctl.files import read_text

YamlPath = tuple[str | int, ...]
"""A place in the document: keys and indices from the top."""

_NODES_LIMIT = 200_000
_COLLECTIONS = ("tag:yaml.org,2002:map", "tag:yaml.org,2002:seq")
_NOT_TEXT = "YAML reads it as a {kind}; put it in quotes to make it text"


@dataclass(frozen=True)
class YamlDocument:
    """One YAML file. ``lines``: the line (from 1) of every key and list item."""

    path: str
    data: Any
    lines: Mapping[YamlPath, int]

    def line(self, loc: YamlPath) -> int:
        """The line of ``loc``, or of the nearest thing around it that stands in the file."""
        while loc not in self.lines and loc:
            loc = loc[:-1]
        return self.lines.get(loc, 1)

    def error(self, loc: YamlPath, message: str, *, hint: str | None = None) -> InventoryError:
        """An error that begins with the file and the line."""
        return InventoryError(f"{self.path}:{self.line(loc)}: {message}", hint=hint)

    def at(self, loc: YamlPath) -> Any:
        """The value there (None where a key is missing)."""
        value = self.data
        for part in loc:
            if isinstance(value, list) and isinstance(part, int):
                value = value[part] if part < len(value) else None
            else:
                value = value.get(part) if isinstance(value, dict) else None
        return value

    def mapping(self, loc: YamlPath, allowed: Collection[str] | None, where: str) -> dict[str, Any]:
        """The mapping there, its keys checked; an empty one where nothing stands.

        Args:
            allowed: the keys there may be; None: any.
            where: what it is, for errors: ``node 'tower'``.

        Raises:
            InventoryError: something else than a mapping, or an unknown key (with the nearest known one).
        """
        value = self.at(loc)
        if value is None:
            return {}
        if not isinstance(value, dict):
            raise self.error(loc, f"{where} must be a mapping (KEY: VALUE), it is {describe_value(value)}")
        for key in value:
            if allowed is not None and key not in allowed:
                raise self.error(
                    (*loc, key), f"unknown key {key!r} in {where}{nearest_word_hint(key, allowed)}"
                )
        return value

    def sequence(self, loc: YamlPath, where: str) -> list[Any]:
        """The list there; an empty one where nothing stands. Raises InventoryError for anything else."""
        value = self.at(loc)
        if value is None:
            return []
        if not isinstance(value, list):
            raise self.error(loc, f"{where} must be a list, it is {describe_value(value)}")
        return value

    def text(self, loc: YamlPath, where: str) -> str:
        """The text there. Raises InventoryError for anything else (with the cure, where it is quotes)."""
        value = self.at(loc)
        if not isinstance(value, str) or not value.strip():
            raise self.error(
                loc, f"{where} must be a text, it is {describe_value(value)}{quoting_advice(value)}"
            )
        return value

    def validation(self, exc: InvalidRecordError, loc: YamlPath, where: str) -> InventoryError:
        """A record's first complaint, at the line of the key it is about.

        Args:
            loc: where the mapping stands that the record was made of.
            where: what that mapping is: ``node 'tower'``.
        """
        first: Any = exc.errors()[0]
        inner = tuple(part for part in first["loc"] if isinstance(part, str | int))
        value = first.get("input")
        message = str(first["msg"]).removeprefix("Value error, ")
        message = message[:1].lower() + message[1:]
        if inner:
            key = ".".join(str(part) for part in inner)
            advice = quoting_advice(value) if first["type"] == "string_type" else ""
            simple = value is None or isinstance(value, str | int | float | bool)
            ending = f", it is {describe_value(value)}{advice}" if simple else ""
            return self.error((*loc, *inner), f"{key!r} in {where}: {message}{ending}")
        return self.error(loc, f"{where}: {message}")


def describe_value(value: object) -> str:
    """A value as an error shows it."""
    if value is None:
        return "empty"
    if isinstance(value, dict):
        return "a mapping"
    return "a list" if isinstance(value, list) else repr(value)


def quoting_advice(value: object) -> str:
    """The advice for a value that YAML took for something else than the text it was meant as."""
    kinds = {bool: "truth value", int: "number", float: "number"}
    return f" ({_NOT_TEXT.format(kind=kinds[type(value)])})" if type(value) in kinds else ""


def nearest_word(word: str, words: Collection[str]) -> str | None:
    """The known word that ``word`` is most likely a misspelling of; None where none is close."""
    return next(iter(difflib.get_close_matches(word, list(words), n=1, cutoff=0.6)), None)


def nearest_word_hint(word: str, words: Collection[str]) -> str:
    """``; did you mean 'port'?``, or a list of the known words where none is close."""
    if (close := nearest_word(word, words)) is not None:
        return f"; did you mean {close!r}?"
    return f"; there are {', '.join(sorted(words))}" if words else ""


def load_yaml(path: str | Path, *, hint: str | None = None) -> YamlDocument:
    """Reads a YAML file with ``yaml.SafeLoader``.

    Raises:
        InputError: missing, unreadable or not UTF-8 (with ``hint``).
        InventoryError: not YAML, a tab, a key that stands twice, or more than one document.
    """
    return parse_yaml(read_text(path, hint=hint), str(path))


def parse_yaml(text: str, path: str) -> YamlDocument:
    """As ``load_yaml``, from text; ``path`` is what errors call it."""
    try:
        loader = yaml.SafeLoader(text)
    except yaml.YAMLError as exc:  # a character that YAML forbids
        raise InventoryError(f"{path}: not YAML: {exc}") from exc
    try:
        builder = _ValueBuilder(path, loader)
        root = loader.get_single_node()
        data = None if root is None else builder.build(root, ())
    except yaml.MarkedYAMLError as exc:
        raise _syntax_error(exc, text, path) from exc
    except yaml.YAMLError as exc:
        raise InventoryError(f"{path}: not YAML: {exc}") from exc
    except RecursionError as exc:
        raise InventoryError(f"{path}: nested too deeply") from exc
    finally:
        loader.dispose()
    return YamlDocument(path, data, builder.lines)


def _syntax_error(exc: yaml.MarkedYAMLError, text: str, path: str) -> InventoryError:
    mark = exc.problem_mark or exc.context_mark
    number = mark.line + 1 if mark else 1
    lines = text.splitlines()
    line = lines[number - 1] if number <= len(lines) else ""
    indent = line[: len(line) - len(line.lstrip())]
    if "\t" in indent or "'\\t'" in str(exc.problem):
        message = "a tab; YAML is indented with blanks only"
        return InventoryError(f"{path}:{number}: {message}", hint="replace the tab with blanks")
    parts = [str(part) for part in (exc.context, exc.problem) if part]
    return InventoryError(f"{path}:{number}: not YAML: {', '.join(parts) or exc}")


class _ValueBuilder:
    """Makes plain values of PyYAML's nodes and notes each key's line."""

    def __init__(self, path: str, loader: yaml.SafeLoader) -> None:
        self.path = path
        self.loader = loader
        self.lines: dict[YamlPath, int] = {}
        self.open: list[yaml.Node] = []
        self.built = 0

    def build(self, node: yaml.Node, loc: YamlPath) -> Any:
        self.lines.setdefault(loc, node.start_mark.line + 1)
        self.built += 1
        if self.built > _NODES_LIMIT:
            raise self._fault(node, "too large: more than 200 000 values, aliases counted")
        if any(node is other for other in self.open):
            raise self._fault(node, "an alias that holds itself")
        if isinstance(node, yaml.CollectionNode) and node.tag not in _COLLECTIONS:
            raise self._fault(node, f"a value may not carry the tag {node.tag}")
        self.open.append(node)
        try:
            if isinstance(node, yaml.MappingNode):
                return self._mapping(node, loc)
            if isinstance(node, yaml.SequenceNode):
                return [self.build(item, (*loc, i)) for i, item in enumerate(node.value)]
            try:
                return self.loader.construct_object(node)
            except ValueError as exc:  # 2026-99-99 looks like a date to YAML
                raise self._fault(node, f"{node.value!r}: {exc}; put it in quotes") from exc
        finally:
            self.open.pop()

    def _mapping(self, node: yaml.MappingNode, loc: YamlPath) -> dict[str, Any]:
        # Doubles are looked for before merge keys (<<) are put in: those may be overridden.
        first: dict[str, int] = {}
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise self._fault(key, "a key must be a text")
            number = key.start_mark.line + 1
            if key.value in first:
                raise self._fault(key, f"key {key.value!r} stands twice (first on line {first[key.value]})")
            first[key.value] = number
        self.loader.flatten_mapping(node)
        result: dict[str, Any] = {}
        for key, value in node.value:
            inner = (*loc, key.value)
            self.lines[inner] = key.start_mark.line + 1
            result[key.value] = self.build(value, inner)
        return result

    def _fault(self, node: yaml.Node, message: str) -> InventoryError:
        return InventoryError(f"{self.path}:{node.start_mark.line + 1}: {message}")
