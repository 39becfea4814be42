"""Collectives of a save, and conversion of live tensors to host bytes in slices of bounded size."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from mgpu_pipe.errors import CheckpointSaveError


def rank_and_size(group: dist.ProcessGroup | None) -> tuple[int, int]:
    """This process's rank in ``group`` (None: the world) and the group's size; ``0, 1`` without a world."""
    if not (dist.is_available() and dist.is_initialized()):
        return 0, 1
    return dist.get_rank(group), dist.get_world_size(group)


def exchange_json(value: object, group: dist.ProcessGroup | None) -> list[Any]:
    """Every rank's ``value``, in the order of ranks. A collective call.

    Args:
        value: a JSON value; floats keep every bit, tuples become lists.
    """
    text = json.dumps(value, allow_nan=False).encode()
    _, size = rank_and_size(group)
    if size == 1:
        return [json.loads(text)]
    device = _device_of(group)
    length = torch.tensor([len(text)], dtype=torch.int64, device=device)
    lengths = [torch.zeros_like(length) for _ in range(size)]
    dist.all_gather(lengths, length, group=group)
    counts = [int(count) for count in lengths]
    padded = torch.zeros(max(counts), dtype=torch.uint8, device=device)
    padded[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    texts = [torch.empty_like(padded) for _ in range(size)]
    dist.all_gather(texts, padded, group=group)
    return [json.loads(text[:count].cpu().numpy().tobytes()) for text, count in zip(texts, counts, strict=True)]


def _device_of(group: dist.ProcessGroup | None) -> torch.device:
    backend = str(dist.get_backend(group))
    return torch.device("cuda", torch.cuda.current_device()) if backend == "nccl" else torch.device("cpu")


def run_on_all_ranks(action: Callable[[], object], what: str, group: dist.ProcessGroup | None) -> list[Any]:
    """Run one part of a save on every rank and raise on all if it fails on any. A collective call.

    Args:
        action: this rank's part; all ranks get its result (JSON).
        what: description of the failure for the error.

    Returns:
        Every rank's result, in the order of ranks.

    Raises:
        CheckpointSaveError: on all ranks, with the first failing rank's message. On a failing rank, the cause is its
            exception.
    """
    cause: Exception | None = None
    reply: dict[str, object] = {}
    try:
        reply["result"] = action()
    except Exception as error:  # after any error, the other ranks must not wait for this one
        cause = error
        reply["error"] = str(error) if isinstance(error, OSError) else f"{type(error).__name__}: {error}"
    replies = exchange_json(reply, group)
    for rank, other in enumerate(replies):
        if "error" in other:
            raise CheckpointSaveError(f"{what} (rank {rank}: {other['error']})") from cause
    return [other["result"] for other in replies]


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
    """The safetensors name of a tensor's dtype.

    Raises:
        ValueError: a dtype that a checkpoint does not hold (complex, quantised).
    """
    if tensor.dtype not in _NAMES:
        raise ValueError(f"a checkpoint cannot hold {tensor.dtype}; it holds {', '.join(sorted(DTYPES))}")
    return _NAMES[tensor.dtype]


def byte_view(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous host tensor as bytes, without a copy."""
    return tensor.detach().reshape(-1).view(torch.uint8).numpy().data


def blocks(shape: tuple[int, ...], item_bytes: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Cut a tensor into blocks of at most ``SLICE_BYTES`` in row-major order.

    Yields:
        ``(offsets, shape)`` of each block; together they tile the tensor.
    """
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
    """The bytes of a tensor in row-major order, without a copy if possible, else in slices.

    Args:
        tensor: any shape, also a view, on any device.
    """
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
