"""A node that lies in the files and logs of a run: of what is too much, or not its own, nothing is kept."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from skyctl.compare import chrome_trace, timeline
from skyctl.errors import ProtocolError
from skyctl.files import RunPaths
from skyctl.run.artifacts import _check_weights, _plain_trace, gather_weights
from skyctl.run.journal import FolderJournal
from skyctl.run.rank_spec import rank_task_name
from skyctl.supervision.run_journal import RunJournal

from ..helpers.orders import rank_order, rank_spec
from . import lies
from .lying_ranks import (
    NODES,
    SEED,
    names_the_liar,
    run_state,
)


def test_what_a_trace_holds() -> None:
    rng = random.Random(SEED)
    spec = rank_spec(1, lies.LIAR)
    refused = 0
    for lie in lies.lies(rng, [lies.TRACE], 80):
        try:
            found = _plain_trace(lie, spec)
        except ProtocolError as exc:
            refused += names_the_liar(exc)
            continue
        made = timeline.measured_timeline([lies.TRACE, found], ["a", "b"])
        if not made.steps:
            continue
        json.dumps(chrome_trace.trace_document(made, made, run_id="r"), allow_nan=False)
    assert refused > 20, refused


def test_of_a_file_that_is_too_large_nothing_is_taken(tmp_path: Path) -> None:
    """By its announced size, by what comes beyond that, by what is missing."""
    from skyctl.remote.agent_messages import FileChunk, FileReply, FileSize
    from skyctl.remote.file_transfers import FileTransfers

    def fetch(*replies: tuple[Any, bytes]) -> None:
        import itertools
        import threading

        connection: Any = SimpleNamespace(
            node=NODES[lies.LIAR],
            changed=threading.Condition(),
            lost=None,
            send=lambda _message: None,
            wait=lambda ready, _timeout, **_options: ready(),
        )
        transfers = FileTransfers(connection, itertools.count(1).__next__)
        expect = transfers._expect

        def expect_and_reply() -> int:
            number = expect()
            for message, body in replies:
                transfers.add_reply(message.model_copy(update={"id": number}), body)
            return number

        transfers._expect = expect_and_reply  # type: ignore[method-assign]
        transfers.fetch("/there", tmp_path / "here", 100)

    size = FileSize(op="size", id=0, bytes=50)
    chunk = FileChunk(op="chunk", id=0), b"x" * 50
    end = FileReply(op="reply", id=0, sha256="0" * 64), b""
    with pytest.raises(ProtocolError, match=r"node liar is 1073741824 bytes large; 100 are the most"):
        fetch((size.model_copy(update={"bytes": 1 << 30}), b""))
    with pytest.raises(ProtocolError, match="is -5 bytes large"):
        fetch((size.model_copy(update={"bytes": -5}), b""))
    with pytest.raises(ProtocolError, match="sent more than the 50 bytes"):
        fetch((size, b""), chunk, chunk)
    with pytest.raises(ProtocolError, match="sent more than the 0 bytes"):
        fetch(chunk)
    with pytest.raises(ProtocolError, match="ended 50 bytes before"):
        fetch((size, b""), end)
    with pytest.raises(ProtocolError, match="said twice"):
        fetch((size, b""), (size, b""))
    assert list(tmp_path.iterdir()) == []


def test_weights_that_are_not_its_own(tmp_path: Path) -> None:
    import torch

    from skyctl.checkpoint.node import safetensors

    spec = rank_spec(1, lies.LIAR, rank_order(layers=[2, 4]))
    file = tmp_path / "part"
    safetensors.save(file, {"2.weight": torch.ones(3), "3.weight": torch.ones(3)}, {"layer.2": "a"})
    _check_weights(file, spec)
    good = file.read_bytes()
    safetensors.save(file, {"0.weight": torch.ones(3)}, {})
    with pytest.raises(ProtocolError, match=r"weights of layers \[2, 4\): they are of layers 0"):
        _check_weights(file, spec)
    rng = random.Random(SEED)
    from ..fuzz.mutate import bytewise

    for _ in range(60):
        file.write_bytes(bytewise(good, rng, rng.choice([1, 3])))
        with suppress(ProtocolError):
            _check_weights(file, spec)
    results = {1: SimpleNamespace(weights=None)}
    state: Any = SimpleNamespace(specs=[None, spec], results=results)
    with pytest.raises(ProtocolError, match="node liar has no weights of rank 1"):
        gather_weights(state, RunPaths.new(), {})


@pytest.mark.parametrize("supervised", [False, True])
def test_logs_end_at_their_limit_and_it_is_said_once(
    supervised: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from skyctl.run import journal, log_limits
    from skyctl.supervision import run_journal

    def limits(note: Callable[[str], None]) -> log_limits.LogLimits:
        return log_limits.LogLimits(note, log_bytes=2 << 20, run_bytes=3 << 20)

    monkeypatch.setattr(journal, "LogLimits", limits)
    monkeypatch.setattr(run_journal, "LogLimits", limits)
    notes: list[str] = []
    paths = RunPaths.new()
    create: Any = RunJournal.create if supervised else FolderJournal
    sink = create(paths, run_state(paths), notes.append)
    notes.clear()
    line = {"event": "log", "text": "x" * 60_000}
    for rank in range(3):
        for _ in range(100):
            assert sink.heard(lies.LIAR, rank_task_name(rank), line)
    assert sink.heard(lies.LIAR, rank_task_name(0), lies.ERROR)
    if supervised:
        for _ in range(100):
            event = {"event": "unreplicated", "from": "b", "error": "x" * 60_000}
            assert sink.heard(lies.LIAR, "keeper", event)
    sink.close()
    told = [note for note in notes if "MiB" in note]
    assert len(told) == (4 if supervised else 3), notes
    kept = sum(path.stat().st_size for path in paths.folder.rglob("*") if path.is_file())
    assert kept < 3.2 * (1 << 20)
    first = paths.log(0).read_text().splitlines()
    assert "[skyctl: the log ends here: it has 2 MiB]" in first
    assert first[-1] == "Traceback …"
    assert "[skyctl: the log ends here: the run has 3 MiB]" in paths.log(1).read_text().splitlines()[-1]
