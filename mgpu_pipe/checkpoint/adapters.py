"""From live modules and optimizers to pieces in canonical coordinates, and back to an optimizer's first state."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from mgpu_pipe.checkpoint.boxes import Box, Piece
from mgpu_pipe.errors import CheckpointError


def tensor_piece(name: str, tensor: torch.Tensor) -> Piece | None:
    """The part of ``name`` that this rank holds, as a live view; None where its shard is empty."""
    if not isinstance(tensor, DTensor):
        shape = tuple(tensor.shape)
        return Piece(Box.whole(name, shape), shape, tensor.detach())
    shape, offsets = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    local = tensor.to_local().detach()
    if local.numel() == 0:
        return None
    return Piece(Box(name, tuple(offsets), tuple(shape)), tuple(tensor.shape), local)


def named_tensor_pieces(named: Iterable[tuple[str, torch.Tensor]]) -> list[Piece]:
    """:func:`tensor_piece` of each, empty shards left out."""
    found = (tensor_piece(name, tensor) for name, tensor in named)
    return [piece for piece in found if piece is not None]


def optimizer_pieces(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> list[Piece]:
    """The optimizer's state as pieces named ``<parameter>/<state key>``.

    Raises:
        CheckpointError: a state that is not a tensor and so has no canonical form.
    """
    named: list[tuple[str, torch.Tensor]] = []
    for name, parameter in model.named_parameters():
        for key, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, torch.Tensor):
                named.append((f"{name}/{key}", value))
            elif value is not None:
                raise CheckpointError(
                    f"optimizer._target_={type(optimizer).__name__}: its state {key!r} is a "
                    f"{type(value).__name__}, not a tensor, and cannot be saved; use another optimizer"
                )
    return named_tensor_pieces(named)


def create_optimizer_state(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    stored: Mapping[str, tuple[tuple[int, ...], torch.dtype]],
    weights: Mapping[str, torch.dtype] | None = None,
) -> None:
    """Give ``optimizer`` the (empty) state tensors that a checkpoint holds values for.

    Args:
        stored: shape and type of every optimizer tensor of the checkpoint by its name ``<parameter>/<state key>``.
        weights: the type of every weight of the checkpoint. State of the weight's own type has the live weight's
            type, so that a run may go on in another precision.
    """
    by_parameter: dict[str, dict[str, tuple[tuple[int, ...], torch.dtype]]] = {}
    for name, entry in stored.items():
        parameter_name, _, key = name.rpartition("/")
        by_parameter.setdefault(parameter_name, {})[key] = entry
    on_device = {
        id(p): bool(group.get("fused") or group.get("capturable"))
        for group in optimizer.param_groups
        for p in group["params"]
    }
    for name, parameter in model.named_parameters():
        if id(parameter) not in on_device:
            continue
        state = optimizer.state[parameter]
        for key, (shape, dtype) in by_parameter.get(name, {}).items():
            if shape == tuple(parameter.shape) and shape != ():
                dtype = parameter.dtype if dtype == (weights or {}).get(name) else dtype
                state[key] = torch.zeros_like(parameter, dtype=dtype, requires_grad=False)
            else:
                # torch keeps step counters on the host unless the step itself runs on the device.
                device = parameter.device if shape or on_device[id(parameter)] else torch.device("cpu")
                state[key] = torch.zeros(shape, dtype=dtype, device=device)
