"""Private names of DeepSpeed (checked against 0.19)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

_STAGES_1_2 = "deepspeed.runtime.zero.stage_1_and_2:DeepSpeedZeroOptimizer"
_STAGE_3 = "deepspeed.runtime.zero.stage3:DeepSpeedZeroOptimizer_Stage3"
PRIVATE = (
    f"{_STAGES_1_2}._link_all_hp_params",
    f"{_STAGES_1_2}._use_compact_grad_partition_buffer",
    f"{_STAGES_1_2}.check_overflow",
    f"{_STAGE_3}._get_norm_groups",
    f"{_STAGE_3}._prepare_fp32_grad_for_sub_group",
    f"{_STAGE_3}._swappable_optimizer_subgroup",
    f"{_STAGE_3}._optimizer_states_and_gradient_swap_in",
    f"{_STAGE_3}._optimizer_states_and_gradient_swap_out",
    f"{_STAGE_3}._release_swap_buffers",
    f"{_STAGE_3}._reassign_or_swap_out_partitioned_parameters",
    "deepspeed.runtime.zero.partition_parameters:Init._convert_to_deepspeed_param",
    "deepspeed.ops.op_builder.builder:OpBuilder._loaded_ops",
    "deepspeed.runtime.engine:DeepSpeedEngine._do_optimizer_sanity_check",  # replaced in zero_build.py
)


def keep_one_copy(zero: Any) -> None:
    """Stages 1 and 2: link parameters to replaced masters, and accumulate gradients in this rank's part."""
    zero._link_all_hp_params()  # otherwise fragments of the old masters keep their memory
    zero._use_compact_grad_partition_buffer = lambda group: True


def take_over_gradients(zero: Any, take: Callable[[int, object], None], show: Callable[[int], None]) -> None:
    """Stage 3: call ``take`` instead of clipping and ``show`` instead of copying gradients; compute no norm."""
    import torch

    zero._get_norm_groups = lambda: [torch.ones(())]
    zero.unscale_and_clip_grads = take
    zero._prepare_fp32_grad_for_sub_group = show


def skip_update(zero: Any, step: Callable[[], object]) -> None:
    """Call ``step`` so that it drops the gradients and updates nothing, as after an overflow."""
    import torch

    def overflows(**_: object) -> None:
        zero.overflow = True

    # Stage 3 reads its norm from the first, where -1 means not finite; stages 1 and 2 call the second.
    replaced = {"_get_norm_groups": lambda: [-torch.ones(())], "check_overflow": overflows, "check_grad_overflow": True}
    originals = {name: vars(zero)[name] for name in replaced if name in vars(zero)}
    vars(zero).update(replaced)
    try:
        step()
    finally:
        for name in replaced:
            del vars(zero)[name]
        vars(zero).update(originals)


def publish_masters(zero: Any, group: int) -> None:
    """Stage 3: update a group's weights from its masters."""
    zero._reassign_or_swap_out_partitioned_parameters(group)


def is_swapped(zero: Any, group: int) -> bool:
    """Whether a group's state is on disk except during its update."""
    return bool(zero._swappable_optimizer_subgroup(group))


def swap_in(zero: Any, group: int) -> None:
    zero._optimizer_states_and_gradient_swap_in(group)


def swap_out(zero: Any, group: int) -> None:
    zero._optimizer_states_and_gradient_swap_out(group)


def forget_swapped_in(zero: Any, group: int) -> None:
    """Free the buffers of :func:`swap_in` without writing them back."""
    zero._release_swap_buffers(group)


def make_partitioned(context: Any, parameter: Any) -> None:
    """Convert a parameter to a partitioned DeepSpeed parameter, within ``zero.Init``."""
    context._convert_to_deepspeed_param(parameter)


def provide_extension(name: str, module: Any) -> None:
    """Let DeepSpeed find a compiled extension instead of compiling it."""
    from deepspeed.ops.op_builder.builder import OpBuilder

    OpBuilder._loaded_ops[name] = module
