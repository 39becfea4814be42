"""Between live tensors and host bytes, in slices of bounded size."""

from __future__ import annotations

from collections.abc import Iterator

import torch

SLICE_BYTES = 8 * 1024 * 1024
"""Most host memory for a copy of a block."""

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
    """The memory of a contiguous host tensor as bytes, not copied."""
    return tensor.detach().reshape(-1).view(torch.uint8).numpy().data


def blocks(shape: tuple[int, ...], item_bytes: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Cut a tensor into blocks of at most ``SLICE_BYTES`` that follow one another in row-major order.

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
    """The bytes of a tensor in row-major order: its own memory where that is possible, else a slice at a time.

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
