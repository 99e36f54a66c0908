"""The same training by torch's own means, an equal part for each node of a lab (``torch_rank.py``)."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from runs.labs import Bench

RANK = Path(__file__).with_name("torch_rank.py")
PORT = 29533


def torch_steps(
    bench: Bench, source: str | Path, form: str, *, batch: int, microbatches: int, steps: int
) -> list[float]:
    """Seconds of the steps but the first, the slowest rank's each.

    Args:
        source: a built-in workload, a train.py, or ``hf:`` and a folder with a config.json.
        form: ``data``, by ``DistributedDataParallel``; or ``pipeline``, by ``torch.distributed.pipelining``.
    """
    nodes = bench.lab_state().nodes
    told = {
        "world": len(nodes),
        "host": nodes[0].address,
        "port": PORT,
        "interface": "eth0",
        **carried(str(source)),
        "batch": batch,
        "microbatches": microbatches,
        "steps": steps,
        "form": form,
    }
    ranks = []
    try:
        for number, node in enumerate(nodes):
            argv = [sys.executable, str(RANK), json.dumps({**told, "rank": number})]
            ranks.append(bench.start_in(node.name, argv))
        said = [rank.communicate()[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    if not all(said):
        raise SystemExit("a rank failed; its error is above")
    took = [json.loads(text)[1:] for text in said]
    return [max(together) for together in zip(*took, strict=True)]


def carried(source: str) -> dict[str, str]:
    """A workload as ``torch_rank.py`` is told it: what is in a file goes along as text."""
    if source.startswith("hf:"):
        file = Path(source.removeprefix("hf:")) / "config.json"
        return {"source": "hf:{folder}", "file": file.name, "text": file.read_text()}
    if source.endswith(".py"):
        file = Path(source)
        return {"source": f"{{folder}}/{file.name}", "file": file.name, "text": file.read_text()}
    return {"source": source}
