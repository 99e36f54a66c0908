"""The right outcome for a file of ``workloads/``: it trains as in plain torch, or is refused by its line."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).parent / "workloads"


@dataclass(frozen=True)
class Case:
    """The outcomes that a file may have.

    Attributes:
        may_train: with plain torch's losses; with those of skyctl on one device where it ``draws``.
        may_be_refused: with exit code 2, a line of the file, and what to do.
        lines: texts of the lines of which a refusal names one; none: any line will do.
        draws: it draws random numbers in training, so that plain torch has other ones.
        stains: it changes torch for all that comes after it in the same process.
    """

    may_train: bool = True
    may_be_refused: bool = False
    lines: tuple[str, ...] = ()
    draws: bool = False
    stains: bool = False


def refused(*lines: str) -> Case:
    """Must be refused, with a line that has one of these texts."""
    return Case(may_train=False, may_be_refused=True, lines=lines)


def either(*lines: str, draws: bool = False, stains: bool = False) -> Case:
    """Trains rightly, or is refused with a line that has one of these texts."""
    return Case(may_be_refused=True, lines=lines, draws=draws, stains=stains)


TRAINS = Case()
DRAWS = Case(draws=True)

CASES = {
    "optimizer_of_global_net": refused("def optimizer(parameters):"),
    "hook_scales_parameter_gradient": TRAINS,
    "hook_masks_gradient": TRAINS,
    "hook_backward_on_container": either(),
    "hook_forward_on_root": either(),
    "frozen_norms_by_train": TRAINS,
    "warmup_counter": refused("self.seen += 1"),
    "temperature_decay": refused("self.temperature = max("),
    "autocast_whole": TRAINS,
    "autocast_off_inside": TRAINS,
    "autocast_reused_layer": TRAINS,
    "autocast_nested": TRAINS,
    "teacher_copy": TRAINS,
    "teacher_ema": either(),
    "optimizer_clips": either(),
    "weights_from_numpy_draws": TRAINS,
    "inplace_activations": TRAINS,
    "inplace_vgg": TRAINS,
    "inplace_bias": TRAINS,
    "inplace_skip": TRAINS,
    "checkpoint_reentrant": TRAINS,
    "checkpoint_not_reentrant": TRAINS,
    "experts_by_mask": TRAINS,
    "nan_check": TRAINS,
    "vectors_from_numpy": TRAINS,
    "weights_by_data": TRAINS,
    "scripted_block": either("net.blocks[0] = torch.jit.script("),
    "hf_gpt2_with_cache": either(),
    "hf_bert_from_config": TRAINS,
    "targets_ignored": TRAINS,
    "targets_ignored_per_token": TRAINS,
    "argparse_at_import": either("args = parser.parse_args()"),
    "forces_by_autograd": either("torch.autograd.grad("),
    "vmap_blocks": either("torch.vmap(block)(x)"),
    "batchnorm1d": TRAINS,
    "batchnorm2d": TRAINS,
    "batchnorm3d": TRAINS,
    "batchnorm_cumulative": TRAINS,
    "batchnorm_without_statistics": TRAINS,
    "sync_batchnorm": TRAINS,
    "instance_norm_statistics": TRAINS,
    "spectral_norm_old": TRAINS,
    "spectral_norm_new": TRAINS,
    "weight_norm_old": TRAINS,
    "weight_norm_new": TRAINS,
    "orthogonal_parametrization": TRAINS,
    "own_parametrization": TRAINS,
    "dropout_family": DRAWS,
    "rrelu": DRAWS,
    "lazy_linear": either(),
    "embedding_bag": TRAINS,
    "embedding_sparse": either(),
    "embedding_sparse_adam": either("def optimizer(parameters):"),
    "embedding_max_norm": TRAINS,
    "embedding_max_norm_in_model": TRAINS,
    "lstm_and_gru": TRAINS,
    "lstm_state_kept": refused("self.state = tuple(", "self.lstm(self.words(ids)"),
    "lstm_state_kept_in_layer": either("self.state = tuple(", "self.lstm(x, self.state)"),
    "multihead_attention": TRAINS,
    "transformer_encoder": TRAINS,
    "transformer_layers_dropout": DRAWS,
    "adaptive_softmax": either(),
    "running_mean_by_hand": TRAINS,
    "running_mean_in_root": either("self.mean.mul_(0.9)"),
    "buffer_reassigned": either("self.scale = 0.9 *"),
    "codebook_by_ema": TRAINS,
    "no_grad_part": TRAINS,
    "no_grad_decorated": either("self.encoder("),  # two calls, and all that there is between them,
    "enable_grad_part": TRAINS,
    "inference_mode_part": either("torch.inference_mode()", "self.frozen(x)"),
    "set_grad_enabled": TRAINS,
    "set_grad_enabled_as_call": either(stains=True),
    "fork_rng": either("torch.random.fork_rng()", "torch.manual_seed(11)", "torch.randn(12, 12)"),
    "fork_rng_in_layer": TRAINS,
    "manual_seed_in_forward": either("torch.manual_seed(3)"),
    "sdpa_kernel": TRAINS,
    "sdpa_kernel_around_model": TRAINS,
    "default_dtype_in_forward": either(
        "torch.set_default_dtype(torch.float64)", "torch.linspace(", stains=True
    ),
    "default_dtype_double": either(stains=True),
    "model_in_double": TRAINS,
    "device_context": TRAINS,
    "detect_anomaly": TRAINS,
    "record_function": TRAINS,
    "saved_tensors_hooks": TRAINS,
    "saved_tensors_hooks_around_model": either(),
    "save_on_cpu": TRAINS,
    "functional_call": either("torch.func.functional_call("),
    "vmap_experts": either("torch.vmap("),
    "jvp_in_layer": either("torch.func.jvp("),
    "gradient_in_layer": either("torch.autograd.grad("),
    "own_autograd_function": TRAINS,
    "layerdrop_python": refused(),  # the line after the draw: which one depends on what was drawn
    "stochastic_depth_numpy": refused(),  # the line after the draw: which one depends on what was drawn
    "stochastic_depth_in_layer": either(draws=True),
    "numpy_noise_in_layer": either(draws=True),
    "torch_noise_in_root": DRAWS,
    "own_generator": either(),
    "own_generator_in_root": either("generator=self.generator"),
    "hook_forward_on_layer": TRAINS,
    "hook_forward_pre_on_layer": TRAINS,
    "hook_full_backward_on_layer": TRAINS,
    "hook_full_backward_pre_on_layer": TRAINS,
    "hook_backward_on_root": either(),
    "hook_forward_on_module": either(),
    "hook_forward_on_container": either(),
    "hook_collects_features": either(),
    "hook_post_accumulate": either(),
    "hook_on_output": TRAINS,
    "hook_on_output_in_root": either("x.register_hook("),
    "hook_global": either("register_module_forward_hook(", stains=True),
    "counter_in_dict": either(),
    "counter_in_dict_of_root": refused('self.state["calls"] += 1', "def forward("),
    "counter_global": refused("STEP += 1", "def forward("),
    "counter_global_in_layers": either(),
    "counter_in_loss": either(),
    "counter_in_buffer": either(),
    "train_override_in_layer": TRAINS,
    "eval_in_model": either(),
    "eval_within_forward": either(),
    "requires_grad_in_forward": either(),
    "frozen_first_layers": TRAINS,
    "frozen_all_but_bias": TRAINS,
    "lora": TRAINS,
    "tied_head": TRAINS,
    "tied_in_list": TRAINS,
    "tied_same_module": either(),
    "tied_by_functional": either(),
    "tied_part_of_weight": either(),
    "siamese_towers": TRAINS,
    "state_dict_in_model": TRAINS,
    "state_dict_assigned": either(),
    "init_own_generator": TRAINS,
    "init_manual_seed": TRAINS,
    "init_copies_layer": TRAINS,
    "init_normalised": TRAINS,
    "init_orthogonal": TRAINS,
    "init_from_data": either(),
    "lists_of_parameters": TRAINS,
    "unused_parameters": TRAINS,
    "compiled_model": either(),
    "data_parallel_wrapped": either(),
    "early_exit_on_value": refused("if x.abs().mean() > 2:"),
    "number_from_item": either(".item()"),
    "numpy_in_forward": either(),
    "opt_sgd_nesterov": TRAINS,
    "opt_adam_amsgrad": TRAINS,
    "opt_adamw_groups": TRAINS,
    "opt_adamax": TRAINS,
    "opt_nadam": TRAINS,
    "opt_radam": TRAINS,
    "opt_rmsprop": TRAINS,
    "opt_rprop": TRAINS,
    "opt_adagrad": TRAINS,
    "opt_adadelta": TRAINS,
    "opt_asgd": TRAINS,
    "opt_adafactor": TRAINS,
    "opt_muon": TRAINS,
    "opt_lbfgs": refused("def optimizer(parameters):"),
    "opt_foreach": TRAINS,
    "opt_lars": TRAINS,
    "opt_sam": refused("def optimizer(parameters):"),
    "opt_lookahead": either(),
    "opt_agc": TRAINS,
    "opt_centralised": TRAINS,
    "opt_global_norm": either(),
    "opt_norm_by_hook": either(),
    "opt_step_counter": TRAINS,
    "opt_gradient_noise": refused("def optimizer(parameters):"),
    "opt_first_layer_rate": either(),
    "opt_scheduled": TRAINS,
    "loss_contrastive": TRAINS,
    "loss_variance": TRAINS,
    "loss_class_weights": TRAINS,
    "loss_with_parameters": either(),
    "loss_auxiliary": TRAINS,
    "loss_ctc": TRAINS,
    "inputs_dict": TRAINS,
    "inputs_nested": TRAINS,
    "masks_variable": TRAINS,
    "packed_sequences": either(),
    "outputs_tuple_none": TRAINS,
    "loss_inside_model": TRAINS,
}
