"""Live tensors of a checkpoint: as local shards in canonical coordinates, and as host bytes in small slices."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import numpy as np
import torch

from mgpu_pipe.checkpoint.file_operations import Buffer
from mgpu_pipe.checkpoint.tensor_slices import LocalShard, TensorSlice
from mgpu_pipe.errors import CheckpointError
from mgpu_pipe.models.local_shards import Layout, fragments, layouts_of, local_tensor, unsharded_shape
from mgpu_pipe.optim.moving_average import EMA


def tensor_shards(
    name: str, tensor: torch.Tensor, layout: Layout | None = None, cut_like: torch.Tensor | None = None
) -> list[LocalShard]:
    """This rank's parts of the tensor ``name`` (in the unsharded model), as live views.

    Args:
        layout: how the tensor is cut; ``cut_like`` is the parameter whose layout that is, ``tensor`` by default.
    """
    parameter = tensor if cut_like is None else cut_like
    shape, local = unsharded_shape(parameter, layout), local_tensor(tensor).detach()
    return [
        LocalShard(TensorSlice(name, part.offsets, part.shape), shape, part.view(local))
        for part in fragments(parameter, layout)
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
    """State as local shards ``<parameter>/<state key>``; CheckpointError if it is neither tensor nor number."""
    shards: list[LocalShard] = []
    for name, layout, parameter in _named_parameters(model):
        for key, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, torch.Tensor):
                shards += _state_shards(f"{name}/{key}", value, parameter, layout)
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


def _state_shards(name: str, value: torch.Tensor, parameter: torch.Tensor, layout: Layout | None) -> list[LocalShard]:
    """Shards of a state tensor: cut like the parameter where it has its local shape, else whole on every rank."""
    local = local_tensor(value)
    if local.shape != local_tensor(parameter).shape:
        return tensor_shards(name, local)
    return tensor_shards(name, local, layout, cut_like=parameter)


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


SLICE_BYTES = 8 * 1024 * 1024
"""Most bytes of host memory for a copy of a block."""

DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}
"""Torch's dtype of each safetensors dtype."""

_NAMES = {dtype: name for name, dtype in DTYPES.items()}


def dtype_name(tensor: torch.Tensor) -> str:
    """The safetensors name of a tensor's dtype; ValueError for one without (complex, quantised)."""
    if tensor.dtype not in _NAMES:
        raise ValueError(f"a checkpoint cannot hold {tensor.dtype}; it holds {', '.join(sorted(DTYPES))}")
    return _NAMES[tensor.dtype]


def byte_view(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous host tensor as bytes, without a copy."""
    return tensor.detach().reshape(-1).view(torch.uint8).numpy().data


def blocks(shape: tuple[int, ...], item_bytes: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Yields ``(offsets, shape)`` of row-major blocks of at most ``SLICE_BYTES`` that tile a tensor."""
    nbytes = item_bytes
    for size in shape:
        nbytes *= size
    if nbytes == 0:
        return
    if nbytes <= SLICE_BYTES or not shape:
        yield (0,) * len(shape), shape
        return
    rows, rest = shape[0], shape[1:]
    row_bytes = nbytes // rows
    if row_bytes > SLICE_BYTES:
        inner = list(blocks(rest, item_bytes))
        for row in range(rows):
            for offsets, block in inner:
                yield (row, *offsets), (1, *block)
        return
    step = SLICE_BYTES // row_bytes
    for row in range(0, rows, step):
        yield (row, *(0,) * len(rest)), (min(step, rows - row), *rest)


def host_bytes(tensor: torch.Tensor) -> Iterator[memoryview]:
    """Bytes of any tensor or view on any device in row-major order, without a copy if possible, else in slices."""
    tensor = tensor.detach()
    if tensor.numel() == 0:
        return
    if tensor.device.type == "cpu" and tensor.is_contiguous():
        yield byte_view(tensor)
        return
    for offsets, shape in blocks(tuple(tensor.shape), tensor.element_size()):
        block = select(tensor, offsets, shape)
        yield byte_view(block.contiguous().cpu())


def select(tensor: torch.Tensor, offsets: tuple[int, ...], shape: tuple[int, ...]) -> torch.Tensor:
    """The view of a block of a tensor."""
    for dim, (offset, size) in enumerate(zip(offsets, shape, strict=True)):
        tensor = tensor.narrow(dim, offset, size)
    return tensor


_LEAST_NOT_FINITE = {
    "F64": (8, 0x7FF0_0000_0000_0000),
    "F32": (4, 0x7F80_0000),
    "F16": (2, 0x7C00),
    "BF16": (2, 0x7F80),
    "F8_E4M3": (1, 0x7F),
    "F8_E5M2": (1, 0x7C),
}
"""Bytes of a number, and the smallest bits (without the sign) of a non-finite one, by safetensors dtype."""


def all_finite(data: Buffer, dtype: str) -> bool:
    """Whether all numbers in ``data`` (complete elements of a safetensors dtype) are finite; integers always are."""
    if dtype not in _LEAST_NOT_FINITE or not len(data):
        return True
    size, least = _LEAST_NOT_FINITE[dtype]
    bits = np.frombuffer(data, f"<u{size}")
    return int(bits.view(f"<i{size}").max()) < least and int(bits.max()) < least + (1 << (8 * size - 1))
