"""Text as token ids, and the batches drawn from them for each task.

The tokenizer runs once, on the launcher; nodes are sent ids (``tokenize``). Without a tokenizer, ids are
bytes.
"""

from __future__ import annotations

import hashlib
import json
import random
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor

from skyctl.errors import WorkloadError
from skyctl.workload.data import Batch, BatchExample, TensorExample
from skyctl.workload.hf.hub_folder import tokenizer_files
from skyctl.workload.hf.tokenizer import load_tokenizer
from skyctl.workload.hf.transformers_models import HubSettings
from skyctl.workload.loss_functions import IGNORED_TARGET
from skyctl.workload.text_files import TOKENS_MAGIC
from skyctl.workload.user_code import describe_exception

BYTE_VALUES = 256
PIECE_CHARACTERS = 1 << 15
MASKED_SHARE = 0.15


@dataclass(frozen=True)
class TokenizedText:
    """A text as token ids (int32), and the tokenizer's special ids; None where it has none."""

    ids: Tensor
    cls: int | None = None
    sep: int | None = None
    mask: int | None = None


def tokenize(folder: Path, text: bytes) -> bytes:
    """A text as nodes are sent it: as token ids where the folder has a tokenizer, else unchanged.

    Raises:
        WorkloadError: the tokenizer can't be loaded.
    """
    files = tokenizer_files(folder)
    if not files:
        return text
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()
    return _tokenize_cached(folder, digest, text)


@lru_cache(maxsize=2)
def _tokenize_cached(folder: Path, _digest: str, text: bytes) -> bytes:
    tokenizer = load_tokenizer(folder)
    try:
        pieces = list(_pieces(text.decode("utf-8", errors="replace")))
        ids = tokenizer(pieces, add_special_tokens=False, verbose=False)["input_ids"]
    except Exception as exc:
        raise WorkloadError(f"the tokenizer in {folder} can't be used: {describe_exception(exc)}") from exc
    flat = array("i", (number for piece in ids for number in piece))
    marks = {name: getattr(tokenizer, f"{name}_token_id", None) for name in ("cls", "sep", "mask")}
    head = json.dumps(marks).encode() + b"\n"
    return TOKENS_MAGIC + head + flat.tobytes()


def _pieces(text: str) -> Iterator[str]:
    """The text in pieces, at line ends where possible: tokenizers slow down on very long texts."""
    start = 0
    while start < len(text):
        stop = start + PIECE_CHARACTERS
        line = text.rfind("\n", start, stop) + 1
        stop = line if stop < len(text) and line > start else stop
        yield text[start:stop]
        start = stop


def parse_tokens(data: bytes) -> TokenizedText:
    """The token ids that ``tokenize`` wrote, or a text's bytes as ids."""
    if not data.startswith(TOKENS_MAGIC):
        raw = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0)
        return TokenizedText(raw.to(torch.int32))
    start = data.index(b"\n", len(TOKENS_MAGIC)) + 1
    marks = json.loads(data[len(TOKENS_MAGIC) : start])
    rest = bytearray(data[start:])
    ids = torch.frombuffer(rest, dtype=torch.int32) if rest else torch.empty(0, dtype=torch.int32)
    return TokenizedText(ids, **marks)


class TokenData:
    """Batches for the three tasks; every sample is drawn from (seed, step, its place in the batch).

    causal: inputs and targets are the same ids, int64 [samples, context] (the loss shifts them). masked: 15%
    of each sample's ids are masked as in Devlin et al. 2018; the other targets are ``IGNORED_TARGET``.
    classes: [CLS] half [SEP] half [SEP]; targets int64 [samples], 1 where the second half follows the first
    in the text, else 0.
    """

    def __init__(
        self, settings: HubSettings, tokens: TokenizedText, batch_size: int, seed: int, name: str
    ) -> None:
        self.task, self.context, self.vocabulary = settings.task, settings.context, settings.vocabulary
        self.tokens, self.batch_size, self.seed = tokens, batch_size, seed
        self._check(name)

    def batches(self, first_step: int, start: int, stop: int) -> Iterator[Batch]:
        """Samples [start, stop) of every step's batch from ``first_step`` on, without end."""
        draw: Callable[[random.Random], tuple[Tensor, Tensor]] = getattr(self, f"_{self.task}")
        step = first_step
        while True:
            rows = [draw(random.Random(f"skyctl hf {self.seed} {step} {i}")) for i in range(start, stop)]  # noqa: S311
            yield torch.stack([row for row, _ in rows]), torch.stack([target for _, target in rows])
            step += 1

    def _check(self, name: str) -> None:
        have, ids = self.tokens.ids.numel(), self.tokens.ids
        if have <= self.context:
            raise WorkloadError(
                f"the text {name} has {have} tokens, one sample of context={self.context} needs more",
                hint="a longer text, or a smaller context: hf:DIR,context=N",
            )
        marks = [m for m in (self.tokens.cls, self.tokens.sep, self.tokens.mask) if m is not None]
        top = max(int(ids.max()), *marks) if marks else int(ids.max())
        if top >= self.vocabulary:
            raise WorkloadError(
                f"the tokenizer gives the id {top}, the model's vocab_size is {self.vocabulary}",
                hint="tokenizer and config.json must be of the same model",
            )

    def _piece(self, rng: random.Random, length: int) -> Tensor:
        at = rng.randrange(self.tokens.ids.numel() - length + 1)
        return self.tokens.ids[at : at + length].long()

    def _causal(self, rng: random.Random) -> tuple[Tensor, Tensor]:
        ids = self._piece(rng, self.context)
        return ids, ids

    def _masked(self, rng: random.Random) -> tuple[Tensor, Tensor]:
        ids = self._piece(rng, self.context)
        targets = torch.full_like(ids, IGNORED_TARGET)
        shown = ids.clone()
        for place in rng.sample(range(self.context), max(1, round(MASKED_SHARE * self.context))):
            targets[place] = ids[place]
            luck = rng.random()
            if luck < 0.8:
                shown[place] = self.tokens.mask or 0
            elif luck < 0.9:
                shown[place] = rng.randrange(self.vocabulary)
        return shown, targets

    def _classes(self, rng: random.Random) -> tuple[Tensor, Tensor]:
        sep = [] if self.tokens.sep is None else [self.tokens.sep]
        room = self.context - 1 - 2 * len(sep)
        first = room // 2
        both = self._piece(rng, room)
        follows = rng.randrange(2)
        second = both[first:] if follows else self._piece(rng, room - first)
        ids = [self.tokens.cls or 0, *both[:first].tolist(), *sep, *second.tolist(), *sep]
        return torch.tensor(ids), torch.tensor(follows)


def make_batch_example(settings: HubSettings) -> BatchExample:
    """The shapes, dtypes and ranges of one sample of ``TokenData``'s batches, without reading a text."""
    ids = TensorExample((settings.context,), "int64", 0, settings.vocabulary - 1)
    targets = TensorExample((), "int64", 0, 1) if settings.task == "classes" else ids
    return BatchExample((ids,), (targets,))


def check_vocabulary(settings: HubSettings, folder: Path) -> None:
    """Refuses a folder without a tokenizer whose model has fewer ids than bytes: it could read no text."""
    if settings.vocabulary < BYTE_VALUES and not tokenizer_files(folder):
        raise WorkloadError(
            f"{folder.name} has no tokenizer, so text is read as bytes, and vocab_size is "
            f"{settings.vocabulary}: it needs at least {BYTE_VALUES}",
            hint="put tokenizer.json beside config.json, or a larger vocab_size",
        )
