"""``hf:DIR`` as a ``Model``: layers without values, their names, where their values come from, the loss."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from skyctl.errors import WorkloadError
from skyctl.workload.deferred import Record, deferring
from skyctl.workload.hf import cut, library, same, stored, text
from skyctl.workload.usercode import in_words

FINE_TUNING_RATE = 5e-5


@dataclass(frozen=True)
class HubModel:
    """A folder's model, cut.

    Attributes:
        architecture: the library's class.
        names: per layer, own name → name in the library's model.
        values: a layer's index → its stored values by own name; None where all start at random.
        stored: on the launcher, where weights lie in the folder: what nodes are sent their part of.
        notes: what a user should know of how it was taken.
    """

    folder: Path
    architecture: str
    settings: library.Settings
    layers: cut.Named
    record: Record
    names: list[dict[str, str]]
    values: Callable[[int], Mapping[str, Tensor]] | None
    stored: stored.Stored | None
    notes: list[str]

    @property
    def learning_rate(self) -> float:
        """AdamW's default: 5e-5 for stored weights (as in the library), else as for built-in models."""
        if self.values is not None:
            return FINE_TUNING_RATE
        return min(1e-3, 0.128 / int(self.settings.config.hidden_size))

    def losses(self) -> Callable[[Any, Any], Tensor]:
        """The loss of its task."""
        return text.losses(self.settings)


def make(
    folder: Path, options: Mapping[str, int], seed: int, *, part: str | None, count: int | None
) -> HubModel:
    """Reads the config, builds the model without values and cuts it.

    Args:
        part: on a node: the file with its layers' values; None on the launcher, and where there are none.
        count: on a node: how many layers the launcher found; it has checked them, and what the folder holds.

    Raises:
        WorkloadError: see ``library``, ``cut`` and ``stored``; or the layers would not compute what the
            library's model computes.
    """
    try:
        settings = library.read(folder, options["context"], bool(options["untie"]))
    except ModuleNotFoundError as exc:
        if count is not None:
            raise  # the launcher names the node
        raise WorkloadError(
            f"hf: needs the Python package {exc.name!r}, which is not installed here",
            hint="pip install 'skyctl[hf]' here, and `pip install transformers` on every node",
        ) from exc
    with deferring(seed) as record:
        model = library.build(settings, folder)
    layers, notes = _cut(model, settings, folder, count)
    names = cut.hub_names(model, layers)
    values: Callable[[int], Mapping[str, Tensor]] | None = None
    kept = None
    if part is not None:
        values = stored.Part(Path(part)).layer
    elif count is None:
        text.check_vocabulary(settings, folder)
        if stored.weight_files(folder) is not None:
            shapes = [{n: tuple(t.shape) for n, t in layer.state_dict().items()} for _, layer in layers]
            prefix = f"{model.base_model_prefix}."
            kept = stored.Stored(folder, names, shapes, prefix=prefix, ties=library.tied(model))
            values = kept.layer
            if kept.fresh:
                notes.append(f"{folder.name}: no weights for {', '.join(kept.fresh)}: they start at random")
    return HubModel(folder, type(model).__name__, settings, layers, record, names, values, kept, notes)


def _cut(
    model: Any, settings: library.Settings, folder: Path, count: int | None
) -> tuple[cut.Named, list[str]]:
    """The finest cut that computes the same as the whole."""
    kind = settings.config.model_type
    why = "another result"
    for finer in (True, False):
        layers = cut.cut(model, settings, halves=finer)
        whole = not any(name.endswith(".mlp") for name, _ in layers)
        try:
            modules = [layer for _, layer in layers]
            fits = same.same(model, modules, settings) if count is None else len(layers) == count
        except Exception as exc:  # noqa: BLE001 - the library's own code; it is told below
            fits, why = False, in_words(exc)
        if fits:
            note = (
                f"{folder.name}: blocks of model_type {kind!r} are of no known form: cut between blocks only"
            )
            return layers, [note] if whole else []
    raise WorkloadError(
        f"{folder.name}: model_type {kind!r} does more between its layers than is known of it: cut into "
        f"layers it gives {why}",
        hint=f"supported are {library.SUPPORTED}; else {library.WRITE}",
    )
