"""The fields that records of measurements must have and most tests ignore: nothing found, nothing taken."""

from typing import Any

from skyctl.records.profile import CutComparison

OF_NODE: dict[str, Any] = {
    "skyctl": "0.1.0",
    "numa_nodes": None,
    "site": None,
    "max_cpu_isa": None,
    "quota_period_s": None,
}
OF_DEVICE: dict[str, Any] = {
    "handling_s": 0.0,
    "handling_byte_s": 0.0,
    "action_s": 0.0,
    "step_s": 0.0,
    "reduce_byte_s": 5e-10,
    "message_byte_s": 0.0,
    "gloo": None,
}
OF_LAYER: dict[str, Any] = {"deferred_bytes": 0.0, "gradient_bytes": 2.5e5, "gradient_matrices": ()}
OF_WORKLOAD: dict[str, Any] = {"ties": (), "comparison": CutComparison(verdict="same")}
OF_PROFILE: dict[str, Any] = {
    "lines": (),
    "sites": (),
    "uplinks": (),
    "encrypted": False,
    "interrupted": False,
}
NO_PARTS: dict[str, Any] = {
    "forward_s": 0.0,
    "backward_s": 0.0,
    "optimizer_s": 0.0,
    "input_message_s": None,
    "gradient_message_s": None,
}
OF_REPLICA: dict[str, Any] = {"layers_spread": None, "sync_s": None, "layer_steps_s": ()}
OF_MEASUREMENT: dict[str, Any] = {"predicted_interval": None, "backend": None}
