"""The stored weights that a model starts from, if it starts from any.

Torch is imported for these alone: without any, a workload that was measured is sent without it.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from skyctl.errors import WorkloadError
from skyctl.workload.workload_spec import WorkloadSpec, resolve_source

if TYPE_CHECKING:
    from skyctl.workload.stored_weights import StoredWeights


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
    from skyctl.workload.layered_model import make_model
    from skyctl.workload.stored_weights import weights_digest
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
    return load_workload(spec).model.starting_from(Path(spec.init_from)).stored
