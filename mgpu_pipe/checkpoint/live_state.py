"""Converts live modules and optimizers to local shards in canonical coordinates, and creates empty optimizer state."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

from mgpu_pipe.checkpoint.tensor_slices import LocalShard, TensorSlice
from mgpu_pipe.errors import CheckpointError
from mgpu_pipe.models.local_shards import Layout, fragments, layouts_of, local_tensor, unsharded_shape
from mgpu_pipe.optim.moving_average import EMA


def tensor_shards(name: str, tensor: torch.Tensor, layout: Layout | None = None) -> list[LocalShard]:
    """This rank's parts of the parameter ``name`` (in the unsharded model), as live views."""
    shape = unsharded_shape(tensor, layout)
    local = local_tensor(tensor).detach()
    return [
        LocalShard(TensorSlice(name, part.offsets, part.shape), shape, part.view(local))
        for part in fragments(tensor, layout)
    ]


def model_shards(model: torch.nn.Module) -> list[LocalShard]:
    """This rank's parts of the weights of ``model``."""
    return _shards_of((name, layout, parameter) for name, layout, parameter in _named_parameters(model))


def gradient_shards(model: torch.nn.Module) -> list[LocalShard]:
    """This rank's parts of the gradients; skips parameters without one."""
    return _shards_of(
        (name, layout, parameter.grad)
        for name, layout, parameter in _named_parameters(model)
        if parameter.grad is not None
    )


def _named_parameters(model: torch.nn.Module) -> Iterable[tuple[str, Layout | None, torch.nn.Parameter]]:
    """Every parameter with its name in the unsharded model and its layout."""
    layouts = layouts_of(model)
    for name, parameter in model.named_parameters():
        layout = layouts.get(name)
        yield (layout.name if layout else name), layout, parameter


def _shards_of(named: Iterable[tuple[str, Layout | None, torch.Tensor]]) -> list[LocalShard]:
    return [shard for name, layout, tensor in named for shard in tensor_shards(name, tensor, layout)]


def optimizer_shards(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> list[LocalShard]:
    """The optimizer's state as local shards named ``<parameter>/<state key>``.

    Raises:
        CheckpointError: a state is neither a tensor nor a number and has no canonical form.
    """
    shards: list[LocalShard] = []
    for name, layout, parameter in _named_parameters(model):
        for key, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, torch.Tensor):
                shards += _state_pieces(f"{name}/{key}", value, parameter, layout)
            elif isinstance(value, bool | int | float):
                shards.append(number_piece(f"{name}/{key}", value))
            elif value is not None:
                raise CheckpointError(
                    f"optimizer._target_={type(optimizer).__name__}: its state {key!r} is a "
                    f"{type(value).__name__}, neither a tensor nor a number, and cannot be saved; use another optimizer"
                )
    return shards


NUMBERS = {"bool": torch.bool, "int": torch.int64, "float": torch.float64}


def number_piece(name: str, value: bool | int | float) -> LocalShard:
    """A Python number of an optimizer's state as a scalar shard, whose name ends in the number's type."""
    kind = type(value).__name__
    return LocalShard(TensorSlice.whole(f"{name}:{kind}", ()), (), torch.tensor(value, dtype=NUMBERS[kind]))


def restore_numbers(optimizer: torch.optim.Optimizer) -> None:
    """Convert loaded scalars back to Python numbers (see :func:`number_piece`)."""
    for state in optimizer.state.values():
        for key in [key for key in state if str(key).rpartition(":")[2] in NUMBERS and ":" in str(key)]:
            state[key.rpartition(":")[0]] = state.pop(key).item()


def _state_pieces(name: str, value: torch.Tensor, parameter: torch.Tensor, layout: Layout | None) -> list[LocalShard]:
    """The shards of a state tensor: with the parameter's local shape it is sharded like the parameter.

    Any other (a step counter, a factor) is whole on every rank.
    """
    local = local_tensor(value).detach()
    if local.shape != local_tensor(parameter).shape:
        return tensor_shards(name, local)
    shape = unsharded_shape(parameter, layout)
    return [
        LocalShard(TensorSlice(name, part.offsets, part.shape), shape, part.view(local))
        for part in fragments(parameter, layout)
    ]


def create_optimizer_state(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    stored: Mapping[str, tuple[tuple[int, ...], torch.dtype]],
    weights: Mapping[str, torch.dtype] | None = None,
) -> None:
    """Create zero state tensors in ``optimizer`` for the values of a checkpoint.

    Args:
        stored: shape and type of every optimizer tensor of the checkpoint, by its name ``<parameter>/<state key>``.
        weights: the type of every weight of the checkpoint. State with its weight's type gets the live weight's type,
            so that a run can resume in another precision.
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
    for name, layout, parameter in _named_parameters(model):
        if id(parameter) not in on_device:
            continue
        state = optimizer.state[parameter]
        for key, (shape, dtype) in by_parameter.get(name, {}).items():
            if shape == unsharded_shape(parameter, layout) and shape != ():
                dtype = parameter.dtype if key != EMA and dtype == (weights or {}).get(name) else dtype
                state[key] = torch.zeros_like(local_tensor(parameter), dtype=dtype, requires_grad=False)
            else:
                # torch keeps step counters on the host unless the step itself runs on the device.
                device = parameter.device if shape or on_device[id(parameter)] else torch.device("cpu")
                state[key] = torch.zeros(shape, dtype=dtype, device=device)
