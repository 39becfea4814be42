"""torch's pipeline schedules over the stages of a cut model.

Two things differ from torch's stage. The last stage computes the loss: its output is the micro-batch's sum of losses.
And shapes are known beforehand, so no rank sends pickled objects to find them out, as torch's would.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import (
    Schedule1F1B,
    ScheduleDualPipeV,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, PipelineScheduleSingle

from mgpu_pipe.architectures.formulas.pipeline_schedules import SCHEDULES
from mgpu_pipe.models.local_shards import local_tensor
from mgpu_pipe.parallel.pipeline.stages import tied_parameter
from mgpu_pipe.system.compat.torch_pipelining_private import LeanStage, actions_of, insert_communication


@torch.no_grad()
def reduce_tied_gradients(model: nn.Module, group: dist.ProcessGroup, first_rank: int, last_rank: int) -> None:
    """Give both copies of a tied weight the sum of their gradients; a collective call of the two ranks that have one.

    To be called once a step batch, after the gradients were reduced over the data-parallel ranks and before norm and
    clipping; other ranks return at once. Both ranks add the same two numbers, so the sums, and with them the weights
    after the optimizer's step, are equal to the bit. Shards of FSDP2 line up, for both ranks cut the same shape over
    meshes of the same sizes.

    Args:
        group: the pipeline's.
        first_rank: the rank in it that holds the first stage, ``last_rank`` that which holds the last one.
    """
    tied = tied_parameter(model)
    if tied is None or not tied[1].requires_grad:
        return
    _, parameter = tied
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    gradient = local_tensor(parameter.grad)
    if gradient.numel() == 0:  # this shard's part of both copies
        return
    here = dist.get_rank(group)
    other = last_rank if here == first_rank else first_rank
    sent = gradient.contiguous()
    received = torch.empty_like(sent)
    peer = dist.get_global_rank(group, other)
    operations = [dist.P2POp(dist.isend, sent, peer, group), dist.P2POp(dist.irecv, received, peer, group)]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    gradient.add_(received)


Compute = Callable[[torch.Tensor | None, Mapping[str, torch.Tensor]], torch.Tensor]
"""A stage's forward pass: what it received (None in the first stage) and the micro-batch, to hidden states or loss."""
LossFunction = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

SINGLE: dict[str, type[PipelineScheduleSingle]] = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}
MULTI: dict[str, type[PipelineScheduleMulti]] = {
    "interleaved_1f1b": ScheduleInterleaved1F1B,
    "interleaved_zero_bubble": ScheduleInterleavedZeroBubble,
    "zbv": ScheduleZBVZeroBubble,
    "dualpipev": ScheduleDualPipeV,
}


class ScheduledStage(LeanStage):
    """A stage of torch's schedules.

    Args:
        module: holds the stage's parameters; where FSDP2 shards it, torch gathers and reduces around the schedule.
        compute: the stage's forward pass.
        boundary: shape of the hidden states between stages.
        dtype: their type.
        share: the stages of this rank, which may hold one module together; gradients are reduced after the last one.
        after_weights: called when gradients of weights were computed apart from those of inputs.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        index: int,
        stages: int,
        device: torch.device,
        group: dist.ProcessGroup,
        compute: Compute,
        boundary: Sequence[int],
        dtype: torch.dtype,
        share: list[ScheduledStage],
        after_weights: Callable[[], None] = lambda: None,
    ) -> None:
        hidden = torch.empty(tuple(boundary), dtype=dtype, device="meta", requires_grad=True)
        loss = torch.empty((), dtype=torch.float64, device="meta", requires_grad=True)
        super().__init__(
            module,
            index,
            stages,
            device,
            input_args=() if index == 0 else (hidden,),
            output_args=(loss if index == stages - 1 else hidden,),
            group=group,
        )
        self._compute = compute
        self._share, self._after_weights = share, after_weights
        self._finished = False
        self.most_in_flight = 0
        """The most micro-batches whose activations this stage had in memory at once."""
        share.append(self)

    def forward_maybe_with_nosync(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        return self._compute(args[0] if args else None, kwargs)

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        try:
            output = super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)
        except RuntimeError as error:
            if error.__cause__ is None:
                raise
            raise error.__cause__ from None  # torch puts words about shapes around what the model raised
        self.free_received(fwd_chunk_id)
        self.most_in_flight = max(self.most_in_flight, len(self.fwd_cache))
        return output

    def backward_one_chunk(
        self,
        bwd_chunk_id: int,
        loss: torch.Tensor | None = None,
        full_backward: bool = True,
        last_backward: bool = False,
    ) -> None:
        super().backward_one_chunk(bwd_chunk_id, loss, full_backward, last_backward)
        if loss is not None:
            loss.detach_()  # the schedule keeps it, and with it its graph, to the step batch's end
        self.free_received_gradients(bwd_chunk_id)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        super().backward_weight_one_chunk(bwd_chunk_id, last_backward)
        self._after_weights()

    def clear_runtime_states(self) -> None:
        super().clear_runtime_states()
        self._finished = False

    def perform_reduce_grad(self, grad_scale_factor: int) -> None:
        """Once for all stages of the rank, whose gradients are in one module."""
        self._finished = True
        if all(stage._finished for stage in self._share):
            super().perform_reduce_grad(grad_scale_factor)


def build_schedule(
    name: str, stages: Sequence[ScheduledStage], num_micro_batches: int, loss_function: LossFunction
) -> PipelineScheduleSingle | PipelineScheduleMulti:
    """torch's schedule of that name over this rank's stages; gradients are summed, never scaled.

    Args:
        loss_function: of the last stage's output and a target, which is ignored: the micro-batch's own
            go to the stage itself.

    Raises:
        ValueError: a number of micro-batches that the schedule does not take (``check`` says it with the fix).
    """
    assert SCHEDULES[name].more_stages or len(stages) == SCHEDULES[name].stages_per_rank
    if name in SINGLE:
        return SINGLE[name](stages[0], num_micro_batches, loss_fn=loss_function, scale_grads=False)
    schedule = MULTI[name](list(stages), num_micro_batches, loss_fn=loss_function, scale_grads=False)
    _separate_pairs(schedule)
    _free_weights_last(schedule, dist.get_rank(stages[0].group))
    return schedule


def _separate_pairs(schedule: PipelineScheduleMulti) -> None:
    """Split overlapped passes (DualPipeV): torch sends the first result only after the second, so the next rank
    waits."""
    if not any(action and action.sub_actions for actions in schedule.pipeline_order.values() for action in actions):
        return
    schedule.pipeline_order = {
        rank: [single for action in actions for single in ((action.sub_actions if action else None) or (action,))]
        for rank, actions in schedule.pipeline_order.items()
    }
    insert_communication(schedule)


def _free_weights_last(schedule: PipelineScheduleMulti, rank: int) -> None:
    """Gather sharded weights once and free them after all the rank's stages; torch frees some in between."""
    order, rest = actions_of(schedule), list[Any]()
    gathered, frees = set[int](), dict[int, Any]()
    for action in order[rank]:
        kind, stage = action.computation_type.value, action.stage_index
        if kind == "RESHARD":
            frees[stage] = action
        elif kind != "UNSHARD" or stage not in gathered:
            rest.append(action)
        if kind == "UNSHARD":
            gathered.add(stage)
    order[rank] = [*rest, *frees.values()]
