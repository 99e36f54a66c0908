"""The stored weights that a model starts from, if it starts from any.

Torch is imported for these alone: without any, a workload that was measured is sent without it.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from skyctl.errors import WorkloadError
from skyctl.workload.workload_spec import WorkloadSpec, resolve_source

if TYPE_CHECKING:
    from skyctl.workload.hf.adapter_folder import AdapterFolder
    from skyctl.workload.stored_weights import StoredWeights


NO_WEIGHTS = "none"
"""In place of a digest: the folder has no weights."""


def with_frozen_digest(spec: WorkloadSpec) -> WorkloadSpec:
    """The spec with the digest of the folder's weights, where checkpoints hold adapters alone."""
    source = resolve_source(spec)
    if spec.lora is None or source.path is None:
        return spec
    from skyctl.workload.weight_files import weight_files, weights_digest

    there = weight_files(source.path) is not None
    return replace(spec, frozen_sha256=weights_digest(source.path) if there else NO_WEIGHTS)


def with_adapters(spec: WorkloadSpec, adapters: AdapterFolder) -> WorkloadSpec:
    """The spec of a base model with adapters in it, from their folder."""
    from skyctl.workload.weight_files import weights_digest

    digest = weights_digest(adapters.weights)
    return replace(spec, lora=adapters.lora, init_from=str(adapters.weights), init_sha256=digest)


def check_frozen_weights(spec: WorkloadSpec) -> None:
    """Raises WorkloadError where the folder's weights are no longer those that adapters are trained for."""
    if spec.frozen_sha256 not in (None, with_frozen_digest(spec).frozen_sha256):
        raise WorkloadError(
            f"the weights in {resolve_source(spec).path} have changed since the run began to train adapters "
            "for them",
            hint="bring them back: a run's checkpoints hold the adapters alone",
        )


def find_stored_weights(spec: WorkloadSpec) -> StoredWeights | None:
    """The weights that the model starts from, by layer: of ``--init-from``, or in the folder of ``hf:``.

    Returns:
        None where all start at random.

    Raises:
        WorkloadError: the weights are not the model's, or no longer those that the run was to start from.
    """
    source = resolve_source(spec)
    if source.kind != "hf" and spec.init_from is None:
        return None
    check_frozen_weights(spec)
    from skyctl.workload.layered_model import make_model
    from skyctl.workload.weight_files import weights_digest
    from skyctl.workload.workload import load_workload

    if spec.init_from is None:
        return make_model(source, spec.seed).stored
    digest = weights_digest(Path(spec.init_from))
    if digest != spec.init_sha256:
        raise WorkloadError(
            f"the weights {spec.init_from} have changed since the run was to start from them: their "
            f"SHA-256 is {digest[:12]}…, it was {str(spec.init_sha256)[:12]}…",
            hint="launch it again, with weights that stay as they are",
        )
    if source.kind == "hf":  # whose own weights stay below those of adapters
        model = make_model(source, spec.seed, own_weights=spec.lora is not None)
    else:
        model = load_workload(spec).model
    return model.starting_from(Path(spec.init_from)).stored
