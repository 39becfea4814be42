"""Which bytes hold infinity or NaN. Oracle: torch.isfinite, over every number of the small types."""

from __future__ import annotations

import pytest
import torch

from mgpu_pipe.checkpoint.host_bytes import DTYPES, byte_view
from mgpu_pipe.checkpoint.save import all_finite

FLOATS = [name for name, dtype in DTYPES.items() if dtype.is_floating_point]


def patterns(name: str) -> torch.Tensor:
    """Every bit pattern of up to 16 bits; of wider numbers random ones, and those about the borders."""
    dtype = DTYPES[name]
    if dtype.itemsize <= 2:
        return torch.arange(1 << (8 * dtype.itemsize)).to({1: torch.uint8, 2: torch.uint16}[dtype.itemsize]).view(dtype)
    info = torch.finfo(dtype)
    edges = torch.tensor([info.max, info.min, float("inf"), -float("inf"), float("nan"), 0.0, info.tiny], dtype=dtype)
    drawn = torch.randint(0, 256, (20_000 * dtype.itemsize,), dtype=torch.uint8).view(dtype)
    return torch.cat([edges, -edges, drawn])


@pytest.mark.parametrize("name", FLOATS)
def test_each_number_alone(name: str) -> None:
    numbers = patterns(name)
    finite = torch.isfinite(numbers.to(torch.float64)) if name.startswith("F8") else torch.isfinite(numbers)
    size = numbers.element_size()
    data = byte_view(numbers)
    found = [all_finite(data[at : at + size], name) for at in range(0, len(data), size)]
    assert found == finite.tolist() and not all(found) and any(found)


@pytest.mark.parametrize("name", FLOATS)
@pytest.mark.parametrize("place", [0, 500, 999])
def test_one_among_many(name: str, place: int) -> None:
    for value in (float("nan"), -float("nan"), float("inf"), float("-inf")):
        numbers = torch.linspace(-3, 3, 1000).to(DTYPES[name])
        assert all_finite(byte_view(numbers), name)
        if name == "F8_E4M3" and value in (float("inf"), float("-inf")):
            continue  # this type has none
        numbers[place] = value
        assert not all_finite(byte_view(numbers), name)


def test_whole_numbers_and_nothing_are_finite() -> None:
    assert all_finite(b"\xff" * 64, "I64") and all_finite(b"\xff" * 64, "U8") and all_finite(b"", "F32")
