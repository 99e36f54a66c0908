"""Checks that documents, docstrings and comments stay readable. Standard library only.

Hand-written pages have no long sentences, and are not long. No sentence starts with "What", "Where" or "Who"
as a noun, as in "What a rank holds.": it names the thing. Headings and questions may.

Left out are code, tables, and what lies between ``<!-- NAME: generated -->`` and ``<!-- NAME: end -->``.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from check_docs_links import prose

MOST_WORDS_A_SENTENCE = 40
MOST_WORDS_A_PAGE = 2500
ANY_LENGTH = ("docs/contract.md",)
"""Pages that may be longer."""
GENERATED = re.compile(r"<!-- ([\w-]+): generated.*?-->.*?<!-- \1: end -->", re.DOTALL)
NAME_IT = "name the thing"
COMMENT = re.compile(r"<!--.*?-->", re.DOTALL)
FOLDERS = ("src", "tests", "benchmarks", "scripts")
"""Of code whose docstrings and comments are read."""
NAMELESS = re.compile(r"(?:[-*#\s]|\*\*|\d+\.)*((?:What|Where|Who|Whoever)\b[^?]*)")
MAYBE_NAMELESS = re.compile(r"\b(What|Where|Who|Whoever)\b")
"""Other files need not be parsed."""
SENTENCE_END = re.compile(r"[.!?][\"')*_`]*(?=\s|$)")


def hand_written(text: str) -> str:
    """The words that a person wrote of a page, code left out."""
    return COMMENT.sub("", GENERATED.sub("", "\n".join(prose(text))))


def sentences(text: str) -> list[str]:
    """The sentences of its paragraphs and list items."""
    found: list[str] = []
    for block in re.split(r"\n\s*\n|\n(?=\s*(?:[-*]|\d+\.)\s)|\n(?=#)", text):
        if block.lstrip().startswith("|"):
            continue
        words = re.sub(r"`[^`]*`", "code", " ".join(block.split()))
        words = re.sub(r"\]\([^)]*\)", "]", words)
        found += [part.strip() for part in SENTENCE_END.split(words) if part.strip()]
    return found


def nameless(text: str) -> list[str]:
    """The sentences that start with "What", "Where" or "Who"."""
    found = []
    for block in re.split(r"\n\s*\n|\n(?=\s*(?:[-*]|\d+\.)\s)", text):
        for one in re.split(r"(?<=[.!?:]) ", " ".join(block.split())):
            if (match := NAMELESS.fullmatch(one)) is not None:
                found.append(match[1])
    return found


def written_in_code(source: str) -> Iterator[tuple[int, str]]:
    """The docstrings and comments of a Python file, each with its line; comments in a row are one."""
    for node in ast.walk(ast.parse(source)):
        body = getattr(node, "body", None)
        for statement in body if isinstance(body, list) else ():
            value = statement.value if isinstance(statement, ast.Expr) else None
            if isinstance(value, ast.Constant) and isinstance(value.value, str):
                yield statement.lineno, value.value
    first, last, words = 0, 0, ""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            line, text = token.start[0], token.string.lstrip("#").strip()
            if line == last + 1:
                last, words = line, f"{words} {text}"
                continue
            if words:
                yield first, words
            first, last, words = line, line, text
    if words:
        yield first, words


def problems_of_code(root: Path) -> list[str]:
    """A line for each docstring and comment with a sentence that does not name its thing."""
    out = []
    for path in sorted(path for folder in FOLDERS for path in (root / folder).rglob("*.py")):
        source = path.read_text(encoding="utf-8")
        for line, text in written_in_code(source) if MAYBE_NAMELESS.search(source) else ():
            out += [f"{path.relative_to(root)}:{line}: {NAME_IT}: {one[:80]}" for one in nameless(text)]
    return out


def problems(root: Path) -> list[str]:
    """A line for each page and sentence of a page that is too long, or does not name its thing."""
    out = []
    pages = [root / "README.md", root / "CONTRIBUTING.md", *sorted((root / "docs").rglob("*.md"))]
    for page in pages:
        name = page.relative_to(root).as_posix()
        if name.startswith("docs/reference/"):
            continue  # made from the commands themselves
        text = hand_written(page.read_text(encoding="utf-8"))
        count = len(text.split())
        if count > MOST_WORDS_A_PAGE and name not in ANY_LENGTH:
            out.append(f"{name}: {count} words, at most {MOST_WORDS_A_PAGE}")
        out += [
            f"{name}: a sentence of {len(one.split())} words, at most {MOST_WORDS_A_SENTENCE}: {one[:80]}…"
            for one in sentences(text)
            if len(one.split()) > MOST_WORDS_A_SENTENCE
        ]
        without_headings = re.sub(r"^#.*$", "", text, flags=re.MULTILINE)
        out += [f"{name}: {NAME_IT}: {one[:80]}" for one in nameless(without_headings)]
    return out


def main() -> int:
    """Prints the problems; 1 if there are any."""
    root = Path(__file__).resolve().parents[1]
    found = problems(root) + problems_of_code(root)
    print("\n".join(found), end="\n" if found else "")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
