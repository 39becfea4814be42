"""Private names of torch's pipelining (checked against 2.13), apart from the others because its import is slow.

Under torch 2.10 to 2.12 the schedules run that do not split the backward pass.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import PipelineScheduleMulti

_STAGE = "torch.distributed.pipelining.stage:_PipelineStageBase"
PRIVATE = (
    f"{_STAGE}.args_recv_info",
    f"{_STAGE}.grad_recv_info",
    f"{_STAGE}.fwd_cache",
    f"{_STAGE}.get_fwd_recv_ops",
    f"{_STAGE}.get_bwd_recv_ops",
    f"{_STAGE}.forward_one_chunk",
    f"{_STAGE}.backward_one_chunk",
    f"{_STAGE}.backward_weight_one_chunk",
    f"{_STAGE}.forward_maybe_with_nosync",
    f"{_STAGE}.clear_runtime_states",
    f"{_STAGE}.perform_reduce_grad",
    "torch.distributed.pipelining:PipelineStage._prepare_forward_infra",
    "torch.distributed.pipelining:PipelineStage._prepare_backward_infra",
    "torch.distributed.pipelining.schedules:_PipelineScheduleRuntime._prepare_schedule_with_comms",
    "torch.distributed.pipelining.schedules:_PipelineScheduleRuntime.pipeline_order_with_comms",
)


class LeanStage(PipelineStage):
    """A stage whose receive buffers exist only between their receive and their last use.

    torch keeps one per micro-batch of the step batch, which would undo the savings of 1F1B.
    """

    def free_received(self, chunk: int) -> None:
        """Free the received inputs of a micro-batch's forward pass, which its graph holds now."""
        _free(self.args_recv_info[chunk])

    def free_received_gradients(self, chunk: int) -> None:
        _free(self.grad_recv_info.get(chunk, ()))

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        _allocate(self.args_recv_info[fwd_chunk_id])
        return super().get_fwd_recv_ops(fwd_chunk_id)

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        if self.has_backward and not self.is_last:
            _allocate(self.grad_recv_info[bwd_chunk_id])
        return super().get_bwd_recv_ops(bwd_chunk_id)

    def _prepare_forward_infra(self, *args: Any, **kwargs: Any) -> Any:
        result = super()._prepare_forward_infra(*args, **kwargs)
        _replace_buffers(self.args_recv_info)
        return result

    def _prepare_backward_infra(self, *args: Any, **kwargs: Any) -> Any:
        result = super()._prepare_backward_infra(*args, **kwargs)
        _replace_buffers(self.grad_recv_info)
        return result


def _replace_buffers(by_chunk: Mapping[int, Sequence[Any]]) -> None:
    """Note how each buffer is allocated and free it. Root arguments have none, before torch 2.12 not even as None."""
    for infos in by_chunk.values():
        for info in infos:
            buffer = getattr(info, "buffer", None)
            if buffer is not None:
                info.no_elements = buffer.new_empty(0)
                info.allocate = partial(
                    torch.empty,
                    buffer.shape,
                    dtype=buffer.dtype,
                    device=buffer.device,
                    requires_grad=buffer.requires_grad,
                )
        _free(infos)


def _allocate(infos: Sequence[Any]) -> None:
    for info in infos:
        if hasattr(info, "allocate"):
            info.buffer = info.allocate()


def _free(infos: Sequence[Any]) -> None:
    """Put an empty tensor in a buffer's place: torch before 2.12 clears its gradient after a step."""
    for info in infos:
        if hasattr(info, "allocate"):
            info.buffer = info.no_elements


def insert_communication(schedule: PipelineScheduleMulti) -> None:
    """Recompute communication for a changed ``pipeline_order``."""
    schedule._prepare_schedule_with_comms(schedule.pipeline_order)  # type: ignore[attr-defined]


def actions_of(schedule: PipelineScheduleMulti) -> dict[int, list[Any]]:
    """Actions of the schedule by rank, with communication; may be changed in place."""
    order: dict[int, list[Any]] = schedule.pipeline_order_with_comms  # type: ignore[attr-defined]
    return order
