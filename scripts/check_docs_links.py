"""Checks that relative links and anchors in the Markdown files lead somewhere. Standard library only.

A link to a line of source, ``[`Class.method`](../src/skyctl/room/module.py#L12)``, must lead to the line that
defines what its text names; ``--fix`` puts the numbers right where code has moved.
"""

from __future__ import annotations

import ast
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
SOURCE_LINE = re.compile(r"\[`([\w.]+)`\]\(([^()\s#]+\.py)#L(\d+)\)")
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
    """The anchors that ``#…`` may name in that file: GitHub's rule, a repeated heading counted up."""
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


def definitions(path: Path) -> dict[str, int]:
    """Line of every class, function, method and module-level name of a Python file, by its dotted name."""
    found: dict[str, int] = {}

    def visit(body: list[ast.stmt], prefix: str) -> None:
        for node in body:
            if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                found.setdefault(prefix + node.name, node.lineno)
                if isinstance(node, ast.ClassDef):
                    visit(node.body, f"{prefix}{node.name}.")
            elif isinstance(node, ast.Assign | ast.AnnAssign):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                names = [target.id for target in targets if isinstance(target, ast.Name)]
                for name in names:
                    found.setdefault(prefix + name, node.lineno)

    visit(ast.parse(path.read_text(encoding="utf-8")).body, "")
    return found


def source_faults(root: Path, *, fix: bool = False) -> list[str]:
    """Each link to source that misses the definition it names; with ``fix``, what can't be mended."""
    out = []
    for path in sorted(root.rglob("*.md")):
        if SKIPPED & set(path.relative_to(root).parts):
            continue
        text = path.read_text(encoding="utf-8")
        fixed = text
        for link in SOURCE_LINE.finditer(text):
            name, target, line = link[1], path.parent / link[2], int(link[3])
            if not target.exists():
                continue  # told by ``faults``
            there = definitions(target).get(name)
            where = f"{path.relative_to(root)}:{text.count(chr(10), 0, link.start()) + 1}: {link[2]}#L{line}"
            if there is None:
                out.append(f"{where}: {name} is not defined there")
            elif there != line and fix:
                fixed = fixed.replace(link[0], f"[`{name}`]({link[2]}#L{there})")
            elif there != line:
                out.append(f"{where}: {name} is on line {there} (scripts/check_docs_links.py --fix)")
        if fixed != text:
            path.write_text(fixed, encoding="utf-8")
    return out


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
    arguments = [argument for argument in sys.argv[1:] if argument != "--fix"]
    root = Path(arguments[0]) if arguments else Path(__file__).resolve().parent.parent
    found = source_faults(root, fix="--fix" in sys.argv) + faults(root)
    for line in found:
        print(line)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
