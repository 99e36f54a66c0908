"""Makes report.png, report-layers.png and compare.svg of docs/images from a comparison's folder.

    skyctl demo -o demo                                  # or compare WORKLOAD --measure --trace -o demo
    python scripts/make_images.py demo --command "skyctl demo"

The picture of the report needs a chromium on PATH; with the font Inter (fonts-inter) it looks as in the
documents. The picture of the terminal is the table that ``skyctl compare`` prints, drawn by rich.
"""

from __future__ import annotations

import argparse
import io
import re
import sys
from pathlib import Path

from rich.console import Console
from rich.text import Text

sys.path.insert(0, str(Path(__file__).resolve().parent))
from browser import browser

from skyctl.compare.comparison import Comparison, comparison_table
from skyctl.files import read_record

IMAGES = Path(__file__).resolve().parent.parent / "docs" / "images"
WIDE = 1280
MARGIN = 32
"""Pixels left around what a picture shows."""
MOST_BYTES = 300_000


def pictures_of_report(report: Path, folder: Path) -> None:
    """Its head with the verdict, and who holds which layers, in the light."""
    with browser() as shown:
        shown.show(report, WIDE, dark=False)
        ends = {
            ident: shown.value(
                f"(() => {{ const at = document.getElementById('{ident}').getBoundingClientRect();"
                "return [at.top + scrollY, at.bottom + scrollY]; })()"
            )
            for ident in ("verdict", "maps")
        }
        head = shown.picture((0, 0, WIDE, ends["verdict"][1] + MARGIN / 4))
        top = ends["maps"][0] + MARGIN
        layers = shown.picture((0, top, WIDE, ends["maps"][1] + MARGIN / 4 - top))
    for name, drawn in (("report.png", head), ("report-layers.png", layers)):
        (folder / name).write_bytes(drawn)
        smaller(folder / name, MOST_BYTES)


def smaller(path: Path, most: int) -> None:
    """The same picture with 256 colours, where it is larger than that."""
    if path.stat().st_size <= most:
        return
    from PIL import Image

    with Image.open(path) as picture:
        few = picture.convert("RGB").quantize(256, dither=Image.Dither.NONE)
    few.save(path, optimize=True)


def picture_of_table(document: Path, command: str, path: Path) -> None:
    """The table, and the sentence below it; in the reader's own monospaced font: nothing is loaded."""
    made = read_record(Comparison, document)
    console = Console(record=True, width=92, file=io.StringIO(), force_terminal=True)
    console.print(Text(f"$ {command}", style="dim"))
    console.print(comparison_table(made.rows, made.conclusion.best if made.conclusion else None))
    console.print()
    console.print(Text(made.verdict or "", style="bold"))
    drawn = re.sub(r"@font-face\s*{[^}]*}", "", console.export_svg(title="skyctl"))
    path.write_text(drawn.replace("Fira Code", "ui-monospace"), encoding="utf-8")


def main() -> None:
    """All pictures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="what compare or demo wrote with -o")
    parser.add_argument(
        "--command", default="skyctl compare WORKLOAD --measure", help="what made that folder"
    )
    parser.add_argument("-o", "--output", type=Path, default=IMAGES, help="default: docs/images")
    given = parser.parse_args()
    pictures_of_report(given.folder / "report.html", given.output)
    picture_of_table(given.folder / "comparison.json", given.command, given.output / "compare.svg")
    for name in ("report.png", "report-layers.png", "compare.svg"):
        print(f"{given.output / name}: {(given.output / name).stat().st_size} bytes")


if __name__ == "__main__":
    main()
