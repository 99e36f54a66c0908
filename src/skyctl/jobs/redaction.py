"""Takes out of texts what a bug report must not carry: hosts, people, keys, passwords, addresses, paths.

Two ways at once. Known words (the cluster file's nodes, hosts, users and key paths; this machine's user and
name) are replaced everywhere. Each always has the same substitute, so that a reader can follow it: ``node2``,
``host1``. Text that only looks like them (addresses, ``user@host``, ``password=…``, tokens) is found by its
form. Numbered, not hashed: who can guess a name can hash it and look.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

_WHOLE = 6
"""Known words of at least so many characters are replaced inside longer words, too."""
_KEPT_ADDRESSES = ("127.0.0.1", "127.0.1.1", "0.0.0.0", "::1", "::")  # noqa: S104
"""Addresses that help to find a fault, and identify nobody."""
_SYSTEM = r"usr|lib|lib64|bin|sbin|opt/hostedtoolcache|proc|sys|dev|etc|run|tmp|nonexistent"
_ENDINGS = (
    "com|org|net|edu|gov|io|ai|dev|lan|local|home|internal|intranet|corp|cloud|de|uk|fr|eu|ch|at|nl|us|ca"
)

_NAMED = (  # what a secret is called
    r"[\w.-]*(?:pass(?:word|wd|phrase)?|secret|token|credential|api[_-]?key|private[_-]?key|cookie)[\w.-]*"
)
_FORMS: tuple[tuple[str, str], ...] = (
    (r"-----BEGIN [^-\n]*-----.*?(?:-----END [^-\n]*-----|\Z)", "[a key]"),
    (r"(?i)\b(authorization\s*[:=]\s*)(?:bearer|basic)?\s*\S+", r"\1[removed]"),
    (r"(?i)\b(bearer\s+)[\w.~+/=-]{8,}", r"\1[removed]"),
    (rf"(?i)([\"']?\b{_NAMED}[\"']?\s*[:=]\s*)(\"[^\"\n]*\"|'[^'\n]*'|[^\s,;)\]}}]+)", r"\1[removed]"),
    (r"\b([a-z][a-z0-9+.-]*://)[^/\s@]*@", r"\1[removed]@"),
    (
        r"\b(?:(?:hf|gh[pos]|github_pat|glpat|sk|pk|xox[abp])[-_]|AKIA|ASIA|eyJ)[\w.-]{8,}",
        "[a token]",
    ),
    (r"\b(?:ssh-(?:rsa|ed25519|dss)|ecdsa-\S+)\s+[A-Za-z0-9+/=]{16,}(?:[ \t]+\S+)?", "[a public key]"),
    (r"\bSHA256:[A-Za-z0-9+/=]{20,}", "[a fingerprint]"),
    (r"(?<![\w./-])(?=[\w+-]*\d)(?=[\w+-]*[A-Za-z])[A-Za-z0-9+_-]{32,}={0,2}(?![\w./-])", "[long word]"),
    (r"\b[\w.+-]+@(?=[\w\[])[\w.-]*\w", "[user@host]"),
    (rf"(?i)\b(?:[a-z0-9](?:[a-z0-9-]*[a-z0-9])?\.)+(?:{_ENDINGS})\b(?!\()", "[host]"),
    (r"(?i)\b(?:[0-9a-f]{2}:){5}[0-9a-f]{2}\b", "[hardware address]"),
)
_FOUR = re.compile(r"(?<![\w.])(?:\d{1,3}\.){3}\d{1,3}(?![\w.]\d|\w)")
_SIX = re.compile(r"(?<![\w:.])(?:[0-9A-Fa-f]{0,4}:){2,7}[0-9A-Fa-f]{0,4}(?:%\w+)?(?![\w:])")
_PATH = re.compile(r"(?<![\w.~\]>)/-])(?:~/|/(?!(?:" + _SYSTEM + r")(?:/|\b)))[^\s\"'`,:;()<>|]+")
_OWN = re.compile(r"/((?:site-packages|dist-packages|lib/python3\.\d+|src/skyctl)/.+)")
"""The part of an installed package's path that is kept: tracebacks need it."""
_REMOVED = "[removed]"
_TIME = re.compile(r"^\d{1,2}:\d{2}:\d{2}$")


class Redactor:
    """Replaces known words and forms; the same word always by the same placeholder."""

    def __init__(self) -> None:
        self._words: dict[str, str] = {}
        self._counts: dict[str, int] = {}
        self._lower: dict[str, str] = {}
        self._pattern: re.Pattern[str] | None = None
        self._compiled = [(re.compile(form, re.DOTALL), by) for form, by in _FORMS]

    def know(self, kind: str, words: Iterable[str | None]) -> None:
        """Words to be replaced by ``kind`` and a number: ``know("host", ["192.0.2.10"])`` → ``host1``."""
        for word in words:
            if word and not word.isdigit() and word not in self._words:
                self._words[word] = self._next(kind)
                self._pattern = None

    def know_as(self, word: str, by: str) -> None:
        """A word to be replaced by ``by``."""
        if word:
            self._words.setdefault(word, by)
            self._pattern = None

    def text(self, text: str) -> str:
        """``text`` with known words and forms replaced."""
        text = self._known(text)
        for form, by in self._compiled:
            text = form.sub(by, text)
        text = _FOUR.sub(lambda match: self._address(match[0]), text)
        text = _SIX.sub(lambda match: self._address(match[0]), text)
        return _PATH.sub(_redact_path, text)

    def value(self, value: Any) -> Any:
        """A JSON value with all its texts and keys redacted.

        Texts that go by a secret's name are removed; of variables (``env``) only the names are kept.
        """
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, list | tuple):
            return [self.value(item) for item in value]
        if isinstance(value, dict):
            return {self.text(key): self._member(key, item) for key, item in value.items()}
        return value

    def _member(self, key: str, item: Any) -> Any:
        if key == "env" and isinstance(item, dict):
            return {self.text(name): _REMOVED for name in item}
        if names_a_secret(key) and isinstance(item, str):
            return _REMOVED
        return self.value(item)

    def _next(self, kind: str) -> str:
        self._counts[kind] = self._counts.get(kind, 0) + 1
        return f"{kind}{self._counts[kind]}"

    def _address(self, address: str) -> str:
        if address in _KEPT_ADDRESSES or _TIME.match(address) or not any(c.isalnum() for c in address):
            return address
        if address not in self._words:
            self._words[address] = self._next("address")
            self._pattern = None
        return self._words[address]

    def _known(self, text: str) -> str:
        if not self._words:
            return text
        if self._pattern is None:
            longest = sorted(self._words, key=len, reverse=True)
            self._pattern = re.compile("|".join(_word_pattern(word) for word in longest), re.IGNORECASE)
            self._lower = {word.lower(): by for word, by in self._words.items()}
        return self._pattern.sub(lambda match: self._lower[match[0].lower()], text)


def _word_pattern(word: str) -> str:
    """A pattern for a word; a short one matches only as a whole word: a node ``a`` is not every a."""
    bare = re.escape(word)
    return bare if len(word) >= _WHOLE else rf"(?<![A-Za-z0-9_]){bare}(?![A-Za-z0-9_])"


def names_a_secret(key: str) -> bool:
    """Whether a variable or key of that name holds a secret: ``HF_TOKEN``, ``db_password``."""
    return re.fullmatch(_NAMED, key, re.IGNORECASE) is not None


def _redact_path(match: re.Match[str]) -> str:
    """Replaces a path outside of the system's folders; only its extension is kept, as in ``[path].py``."""
    installed = _OWN.search(match[0])
    if installed is not None:
        return f"[path]/{installed[1]}"
    name = match[0].rstrip("/").rpartition("/")[2]
    _, dot, ending = name.rpartition(".")
    return f"[path]{dot}{ending}" if dot and ending.isalnum() and len(ending) <= 11 else "[path]"
