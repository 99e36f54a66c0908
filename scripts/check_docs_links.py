"""Checks that relative links and anchors in the Markdown files lead somewhere. Standard library only."""

from __future__ import annotations

import re
import sys
from collections import Counter
from pathlib import Path
from urllib.parse import unquote

LINK = re.compile(
    r"!?\[(?:[^\[\]]|\[[^\]]*\])*\]\(\s*<?([^()<>\s]+(?:\([^()]*\)[^()<>\s]*)?)>?(?:\s+\"[^\"]*\")?\s*\)"
)
HTML = re.compile(r"<(?:a|img)\s[^>]*?(?:href|src)=\"([^\"]+)\"", re.IGNORECASE)
HEADING = re.compile(r"^#{1,6}\s+(.*?)\s*#*\s*$")
ANCHOR = re.compile(r"<a\s+(?:id|name)=\"([^\"]+)\"", re.IGNORECASE)
FENCE = re.compile(r"^\s*(```+|~~~+)")
OUTSIDE = re.compile(r"^[a-z][a-z0-9+.-]*:|^//", re.IGNORECASE)
SKIPPED = {".git", ".venv", "node_modules", "dist", "build"}


def prose(text: str) -> list[str]:
    """The lines, those of fenced code emptied."""
    lines, fence = [], ""
    for line in text.splitlines():
        found = FENCE.match(line)
        if found and (not fence or found[1].startswith(fence)):
            fence = "" if fence else found[1]
            lines.append("")
        else:
            lines.append("" if fence else line)
    return lines


def anchors(path: Path) -> set[str]:
    """What ``#…`` may name in that file: GitHub's rule, a repeated heading counted up."""
    seen: Counter[str] = Counter()
    found: set[str] = set()
    for line in prose(path.read_text(encoding="utf-8")):
        found |= set(ANCHOR.findall(line))
        heading = HEADING.match(line)
        if heading:
            shown = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", heading[1])
            slug = re.sub(r"[^\w\- ]", "", shown.lower()).replace(" ", "-")
            found.add(f"{slug}-{seen[slug]}" if seen[slug] else slug)
            seen[slug] += 1
    return found


def faults(root: Path) -> list[str]:
    """One line a dead link: file:line and what it names."""
    out = []
    for path in sorted(root.rglob("*.md")):
        if SKIPPED & set(path.relative_to(root).parts):
            continue
        for number, line in enumerate(prose(path.read_text(encoding="utf-8")), 1):
            bare = re.sub(r"(`+).*?\1", "", line)
            for target in LINK.findall(bare) + HTML.findall(bare):
                if OUTSIDE.match(target):
                    continue
                name, _, anchor = unquote(target).partition("#")
                there = (root / name[1:] if name.startswith("/") else path.parent / name) if name else path
                if not there.exists():
                    out.append(f"{path.relative_to(root)}:{number}: {target}: no such file")
                elif not there.resolve().is_relative_to(root.resolve()):
                    out.append(f"{path.relative_to(root)}:{number}: {target}: leads out of the repository")
                elif anchor and there.suffix == ".md" and anchor not in anchors(there):
                    out.append(f"{path.relative_to(root)}:{number}: {target}: no such heading")
    return out


def main() -> int:
    """Prints what is dead; 1 where there is any."""
    found = faults(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).resolve().parent.parent)
    for line in found:
        print(line)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
