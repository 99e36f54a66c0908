"""One torch thread, and a way to write a user's file."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from skyctl.workload.workload import Workload, load_workload
from skyctl.workload.workload_spec import make_spec


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


DATA = """
def data(batch_size, seed):
    for i in range(3):
        g = torch.Generator().manual_seed(1000 * seed + i)
        yield torch.randn(batch_size, 6, generator=g), torch.randint(0, 4, (batch_size,), generator=g)
"""


@pytest.fixture
def user(tmp_path: Path) -> Callable[..., Workload]:
    """Writes train.py (``import torch`` and ``data`` of 6 numbers and 4 classes unless told) and loads it."""

    def make(body: str, *, data: str = DATA, folder: Path | None = None, **options: object) -> Workload:
        where = folder or tmp_path
        where.mkdir(parents=True, exist_ok=True)
        path = where / "train.py"
        path.write_text(f"import torch\nfrom torch import nn\n{data}\n{body}\n")
        return load_workload(make_spec(str(path), **{"batch_size": 8, **options}))

    return make
