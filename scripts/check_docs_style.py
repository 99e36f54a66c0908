"""Checks that hand-written documents stay readable: no long sentences, no long pages. Standard library only.

Left out are code, tables, and what lies between ``<!-- NAME: generated -->`` and ``<!-- NAME: end -->``.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from check_docs_links import prose

MOST_WORDS_A_SENTENCE = 40
MOST_WORDS_A_PAGE = 2500
ANY_LENGTH = ("docs/contract.md",)
"""Pages that may be longer."""
GENERATED = re.compile(r"<!-- ([\w-]+): generated.*?-->.*?<!-- \1: end -->", re.DOTALL)
COMMENT = re.compile(r"<!--.*?-->", re.DOTALL)
SENTENCE_END = re.compile(r"[.!?][\"')*_`]*(?=\s|$)")


def hand_written(text: str) -> str:
    """What a person wrote of a page, code left out."""
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


def problems(root: Path) -> list[str]:
    """A line for each sentence and page that is too long."""
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
    return out


def main() -> int:
    """Prints what is too long; 1 if anything is."""
    found = problems(Path(__file__).resolve().parents[1])
    print("\n".join(found), end="\n" if found else "")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
