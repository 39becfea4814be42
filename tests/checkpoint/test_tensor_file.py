"""Tensor files against the safetensors library, and against files that lie; finite bytes against torch.isfinite."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from mgpu_pipe.checkpoint.chunks import CHUNK_BYTES, FileRecord, record_of
from mgpu_pipe.checkpoint.live_tensors import DTYPES, all_finite, byte_view, dtype_name, host_bytes
from mgpu_pipe.checkpoint.tensor_file import Entry, TensorFile, file_order, write_tensor_file
from mgpu_pipe.errors import CheckpointError


def _tensors_of_every_dtype() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    found = {f"{name}@0,0": (torch.rand(5, 7, generator=generator) * 9).to(dtype) for name, dtype in DTYPES.items()}
    found["scalar@"] = torch.tensor(3.25)
    found["empty@0,0"] = torch.zeros(0, 4)
    found["transposed@0,0"] = torch.arange(12.0).reshape(3, 4).t()
    return found


def _bytes(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def _write(path: Path, tensors: dict[str, torch.Tensor]) -> FileRecord:
    entries = file_order(Entry(name, dtype_name(t), tuple(t.shape)) for name, t in tensors.items())
    data = (view for entry in entries for view in host_bytes(tensors[entry.name]))
    return write_tensor_file(path, entries, {"step": "3"}, data)


def test_the_safetensors_library_reads_what_is_written(tmp_path: Path) -> None:
    tensors = _tensors_of_every_dtype()
    _write(tmp_path / "a.safetensors", tensors)
    loaded = load_file(tmp_path / "a.safetensors")
    assert loaded.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert loaded[name].dtype == tensor.dtype and loaded[name].shape == tensor.shape
        assert _bytes(loaded[name]) == _bytes(tensor), name
    with safe_open(tmp_path / "a.safetensors", "pt") as file:
        assert file.metadata() == {"step": "3"}


def test_files_of_the_safetensors_library_are_read(tmp_path: Path) -> None:
    tensors = {name: tensor.contiguous() for name, tensor in _tensors_of_every_dtype().items()}
    save_file(tensors, tmp_path / "b.safetensors", {"step": "3"})
    with TensorFile(tmp_path / "b.safetensors", None) as file:
        assert file.metadata == {"step": "3"} and file.entries.keys() == tensors.keys()
        for name, tensor in tensors.items():
            stored = file.entries[name]
            data = bytearray(stored.entry.nbytes)
            file.read_into(stored.start, memoryview(data))
            assert stored.entry == Entry(name, dtype_name(tensor), tuple(tensor.shape))
            assert bytes(data) == _bytes(tensor), name


def test_the_record_hashes_each_chunk_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "big.safetensors"
    record = _write(path, {"a@0": torch.rand(3 * CHUNK_BYTES // 4 + 5), "b@0": torch.rand(10)})
    assert record == record_of(path.read_bytes())
    assert record.size == path.stat().st_size and len(record.sha256) == 4


def test_a_read_checks_each_chunk_it_touches_once_and_no_other(tmp_path: Path) -> None:
    path = tmp_path / "big.safetensors"
    values = torch.rand(4 * CHUNK_BYTES // 4)
    record = _write(path, {"a@0": values})
    data = bytearray(path.read_bytes())
    data[3 * CHUNK_BYTES + 17] ^= 4
    path.write_bytes(data)
    with TensorFile(path, record) as file:
        start = file.entries["a@0"].start
        before = file.data.bytes_read
        for offset in range(CHUNK_BYTES + 100, CHUNK_BYTES + 2100, 100):
            part = bytearray(100)
            file.read_into(start + offset, memoryview(part))
            assert part == values.numpy().tobytes()[offset : offset + 100]
        assert file.data.bytes_read - before == CHUNK_BYTES
        file.read_into(2 * CHUNK_BYTES + 5, memoryview(bytearray(10)))
        before = file.data.bytes_read
        file.read_into(start + CHUNK_BYTES, memoryview(part))
        assert file.data.bytes_read - before == 100
        assert part == values.numpy().tobytes()[CHUNK_BYTES : CHUNK_BYTES + 100]
        with pytest.raises(CheckpointError, match=r"big\.safetensors: chunk 3 of 5 .*SHA-256"):
            file.read_into(3 * CHUNK_BYTES, memoryview(bytearray(8)))


def test_a_file_without_hashes_reads_only_the_bytes_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "big.safetensors"
    _write(path, {"a@0": torch.rand(3 * CHUNK_BYTES // 4)})
    with TensorFile(path, None) as file:
        before = file.data.bytes_read
        file.read_into(CHUNK_BYTES - 50, memoryview(bytearray(100)))
        assert file.data.bytes_read - before == 100


def _file(header: object, data: bytes = b"", length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def _entry(begin: int, end: int, shape: list[object] | None = None, dtype: str = "F32") -> dict[str, object]:
    return {"dtype": dtype, "shape": [(end - begin) // 4] if shape is None else shape, "data_offsets": [begin, end]}


LIES = {
    "empty": (b"", "too few"),
    "short": (b"\0\0\0", "too few"),
    "claims gigabytes": (_file({}, length=8 << 30), "claims 8589934592 bytes"),
    "claims 2**64": (_file({}, length=2**64 - 1), "claims"),
    "claims more than there is": (_file({}, length=3), "claims 3 bytes"),
    "not JSON": (_file(b"{nonsense"), "not valid JSON"),
    "not UTF-8": (_file(b'{"\xff": 1}'), "not valid JSON"),
    "nested deeply": (_file(b"[" * 200_000), "not valid JSON"),
    "a list": (_file([]), "not a JSON object"),
    "NaN": (_file(b'{"a": NaN}'), "not valid JSON"),
    "double name": (_file(b'{"a": 1, "a": 1}'), "twice"),
    "unknown dtype": (_file({"a": _entry(0, 4, dtype="F12")}, b"abcd"), "unknown dtype"),
    "unknown field": (_file({"a": {**_entry(0, 4), "x": 1}}, b"abcd"), "has the keys"),
    "shape too large": (_file({"a": _entry(0, 4, [1 << 40])}, b"abcd"), "4 bytes for"),
    "negative size": (_file({"a": _entry(0, 4, [-1])}, b"abcd"), "not a size"),
    "true as a size": (_file({"a": _entry(0, 4, [True])}, b"abcd"), "not a size"),
    "fraction": (_file({"a": _entry(0, 4, [1.0])}, b"abcd"), "not a size"),
    "ends before it begins": (_file({"a": _entry(4, 0, [1])}, b"abcd"), "-4 bytes"),
    "beyond the end": (_file({"a": _entry(0, 400)}, b"abcd"), "describes 400 bytes of data, the file has 4"),
    "overlap": (_file({"a": _entry(0, 8), "b": _entry(4, 12)}, b"a" * 12), "b overlaps"),
    "hole": (_file({"a": _entry(0, 4), "b": _entry(8, 12)}, b"a" * 12), "hole before"),
    "data left over": (_file({"a": _entry(0, 4)}, b"a" * 8), "describes 4 bytes of data, the file has 8"),
    "metadata not text": (_file({"__metadata__": {"step": 3}}), "not text"),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_file_that_lies_is_refused(lie: str, tmp_path: Path) -> None:
    data, message = LIES[lie]
    path = tmp_path / "lie.safetensors"
    path.write_bytes(data)
    with pytest.raises(CheckpointError) as caught:
        TensorFile(path, None)
    assert message in str(caught.value) and str(path) in str(caught.value)


def test_a_pipe_in_a_files_place_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    import os

    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(CheckpointError, match="not a plain file"):
        TensorFile(tmp_path / "pipe", None)


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
def test_each_number_alone_is_finite_or_not(name: str) -> None:
    numbers = patterns(name)
    finite = torch.isfinite(numbers.to(torch.float64)) if name.startswith("F8") else torch.isfinite(numbers)
    size = numbers.element_size()
    data = byte_view(numbers)
    found = [all_finite(data[at : at + size], name) for at in range(0, len(data), size)]
    assert found == finite.tolist() and not all(found) and any(found)


@pytest.mark.parametrize("name", FLOATS)
@pytest.mark.parametrize("place", [0, 500, 999])
def test_what_is_not_finite_is_seen_among_many(name: str, place: int) -> None:
    for value in (float("nan"), -float("nan"), float("inf"), float("-inf")):
        numbers = torch.linspace(-3, 3, 1000).to(DTYPES[name])
        assert all_finite(byte_view(numbers), name)
        if name == "F8_E4M3" and value in (float("inf"), float("-inf")):
            continue  # this type has none
        numbers[place] = value
        assert not all_finite(byte_view(numbers), name)


def test_whole_numbers_and_nothing_are_finite() -> None:
    assert all_finite(b"\xff" * 64, "I64") and all_finite(b"\xff" * 64, "U8") and all_finite(b"", "F32")
