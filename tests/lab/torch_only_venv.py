"""An environment that holds torch alone, made of the one in use: nothing is downloaded."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path

from skyctl.errors import SkyctlError


def make_torch_only_venv(path: str | Path) -> Path:
    """Makes a virtual environment whose only packages are torch and what torch requires, as links.

    Args:
        path: where; a folder that does not exist yet.

    Returns:
        The environment's interpreter.

    Raises:
        SkyctlError: the environment in use has no torch, or the folder can't be written.
    """
    root = Path(path)
    done = subprocess.run(
        [sys.executable, "-m", "venv", "--without-pip", str(root)],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise SkyctlError(
            f"can't make a virtual environment in {root}: {(done.stderr or done.stdout).strip()}"
        )
    packages = next(root.glob("lib/python3*/site-packages"))
    for package in _with_requirements("torch"):
        for source in _top_level(package):
            target = packages / source.name
            if not target.exists():
                target.symlink_to(source)
    return root / "bin" / "python"


def _with_requirements(name: str) -> list[Distribution]:
    distributions: dict[str, Distribution] = {}
    wanted = [name]
    while wanted:
        current = wanted.pop()
        if current in distributions:
            continue
        try:
            distributions[current] = distribution(current)
        except PackageNotFoundError as exc:
            if current == name:
                raise SkyctlError(f"the environment of {sys.executable} has no {name}") from exc
            continue  # required on other systems or Python versions only
        for requirement in distributions[current].requires or ():
            text, _, marker = requirement.partition(";")
            match = re.match(r"[A-Za-z0-9._-]+", text.strip())
            if match and "extra ==" not in marker:
                wanted.append(re.sub(r"[-_.]+", "-", match[0]).lower())
    return list(distributions.values())


def _top_level(package: Distribution) -> list[Path]:
    """The folders and files of a package that lie in site-packages itself."""
    names = {file.parts[0] for file in package.files or ()} - {"..", "__pycache__"}
    paths = [Path(str(package.locate_file(name))) for name in sorted(names)]
    return [path.resolve() for path in paths if path.exists() and not path.name.endswith(".pth")]
