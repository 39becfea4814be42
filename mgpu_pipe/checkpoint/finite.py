"""Are the numbers in a tensor's bytes finite? Asked of what is being written, a block at a time. Torch-free.

A number is infinite or NaN where all bits of its exponent are set (of float8 e4m3, which has no infinity, where all
bits are). So among numbers of one sign their bits, read as an integer, are the largest: two maxima, one of the signed
and one of the unsigned integers, tell without a copy.
"""

from __future__ import annotations

import numpy as np

from mgpu_pipe.checkpoint.files import Buffer

_LEAST_NOT_FINITE = {
    "F64": (8, 0x7FF0_0000_0000_0000),
    "F32": (4, 0x7F80_0000),
    "F16": (2, 0x7C00),
    "BF16": (2, 0x7F80),
    "F8_E4M3": (1, 0x7F),
    "F8_E5M2": (1, 0x7C),
}
"""Bytes of a number, and the least bits (without the sign) of one that is not finite, by safetensors dtype."""


class NotFinite(Exception):
    """A tensor that is to be saved holds infinity or NaN; ``what`` names it."""

    def __init__(self, what: str) -> None:
        super().__init__(f"{what} is not finite")
        self.what = what


def all_finite(data: Buffer, dtype: str) -> bool:
    """Whether the numbers in ``data``, whole numbers of a safetensors dtype, are finite; integers always are."""
    if dtype not in _LEAST_NOT_FINITE or not len(data):
        return True
    size, least = _LEAST_NOT_FINITE[dtype]
    bits = np.frombuffer(data, f"<u{size}")
    return int(bits.view(f"<i{size}").max()) < least and int(bits.max()) < least + (1 << (8 * size - 1))
