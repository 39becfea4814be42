"""Reads GGUF files: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md.

A file is data: every size is checked against the file's length before anything is read or allocated.
"""

from __future__ import annotations

import importlib.util
import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np

from mgpu_pipe.errors import BadInputError
from mgpu_pipe.system.local_files import check_plain

if TYPE_CHECKING:
    import torch

SIGNATURE = b"GGUF"
VERSIONS = (2, 3)
ALIGNMENT = "general.alignment"
DEFAULT_ALIGNMENT = 32
MAX_DIMENSIONS = 4
STRING, ARRAY = 8, 9
NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
"""Codes of the types of metadata, for the struct module and NumPy."""
MIN_ENTRY_BYTES, MIN_TENSOR_BYTES = 8 + 4 + 1, 8 + 4 + 8 + 4 + 8
"""Fewest bytes of a metadata entry and of a tensor's description."""


def require_package(option: str) -> None:
    """Refuse ``option`` where the gguf package is missing; BadInputError has the line that installs it."""
    if importlib.util.find_spec("gguf") is None:
        raise BadInputError(f"{option}: needs the gguf package; pip install 'mgpu_pipe[gguf]'")


def is_gguf(path: Path) -> bool:
    """Whether ``path`` is a file that begins as GGUF, or has its suffix."""
    if not path.is_file():
        return False
    with path.open("rb") as stream:
        return path.suffix == ".gguf" or stream.read(len(SIGNATURE)) == SIGNATURE


@dataclass(frozen=True)
class TensorEntry:
    """A tensor of the file.

    Attributes:
        shape: rows first, as in torch; the file lists the row's length first.
        kind: number of its ``ggml_type``.
        offset: of its first byte in the file.
    """

    shape: tuple[int, ...]
    kind: int
    offset: int
    nbytes: int


class _Header:
    """Reads the header's values one after another, never beyond the end of the file."""

    def __init__(self, stream: BinaryIO, path: Path) -> None:
        self.stream, self.path = stream, path
        self.size = path.stat().st_size
        self.position = 0

    def refuse(self, problem: str) -> BadInputError:
        return BadInputError(f"--from={self.path}: {problem}; copy the file again")

    def require(self, count: int, each: int, what: str) -> None:
        if count * each > self.size - self.position:
            raise self.refuse(f"is cut off: {what} needs more bytes than the file has")

    def take(self, count: int, what: str) -> bytes:
        self.require(count, 1, what)
        raw = self.stream.read(count)
        if len(raw) != count:
            raise self.refuse(f"is cut off: {what} needs more bytes than the file has")
        self.position += count
        return raw

    def number(self, code: str, what: str) -> Any:
        return struct.unpack("<" + code, self.take(struct.calcsize("<" + code), what))[0]

    def text(self, what: str) -> str:
        raw = self.take(self.number("Q", what), what)
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError:
            raise self.refuse(f"{what} is no text in UTF-8") from None

    def value(self, kind: int, what: str) -> Any:
        if kind == STRING:
            return self.text(what)
        if kind in NUMBERS:
            return self.number(NUMBERS[kind], what)
        if kind != ARRAY:
            raise self.refuse(f"{what} has the unknown type {kind}")
        kind, count = self.number("I", what), self.number("Q", what)
        if kind == STRING:
            self.require(count, 8, what)
            return [self.text(what) for _ in range(count)]
        if kind not in NUMBERS:
            raise self.refuse(f"{what} is a list of the unknown type {kind}")
        dtype = np.dtype("<" + NUMBERS[kind])
        self.require(count, dtype.itemsize, what)
        return np.frombuffer(self.take(count * dtype.itemsize, what), dtype)


class GgufFile:
    """Metadata and tensors of a GGUF file. Holds the header in memory and reads tensors on demand.

    Attributes:
        metadata: texts, numbers, truths, lists of texts, and vectors of numbers or truths, which take no more memory
            than bytes of the file.
        tensors: by name, in the file's order.
    """

    def __init__(self, path: Path) -> None:
        """Read the header.

        Raises:
            BadInputError: the file is cut off, damaged, or of another format or version.
        """
        check_plain(path)
        self.path = path
        with path.open("rb") as stream:
            header = _Header(stream, path)
            if header.take(len(SIGNATURE), "the signature") != SIGNATURE:
                raise BadInputError(f"--from={path}: is no GGUF file; give a file that llama.cpp or Ollama reads")
            version = header.number("I", "the version")
            if version not in VERSIONS:
                raise BadInputError(f"--from={path}: GGUF version {version} is unknown; give a file of version 2 or 3")
            tensors, entries = header.number("Q", "the counts"), header.number("Q", "the counts")
            header.require(entries, MIN_ENTRY_BYTES, "the metadata")
            self.metadata: dict[str, Any] = {}
            for _ in range(entries):
                key = header.text("a name of the metadata")
                if key in self.metadata:
                    raise header.refuse(f"names {key!r} twice")
                self.metadata[key] = header.value(header.number("I", key), key)
            header.require(tensors, MIN_TENSOR_BYTES, "the list of tensors")
            self.tensors = _read_entries(header, tensors, self.metadata.get(ALIGNMENT, DEFAULT_ALIGNMENT))

    def read(self, name: str) -> torch.Tensor:
        """The tensor in fp32, dequantised.

        Raises:
            BadInputError: its type cannot be read, or it holds a number that is not finite.
        """
        import torch
        from gguf import GGMLQuantizationType, dequantize

        entry, kind = self.tensors[name], GGMLQuantizationType(self.tensors[name].kind)
        with self.path.open("rb") as stream:
            stream.seek(entry.offset)
            raw = stream.read(entry.nbytes)
        if len(raw) != entry.nbytes:
            raise BadInputError(f"--from={self.path}: {name} is cut off; copy the file again")
        try:
            values = dequantize(np.frombuffer(raw, np.uint8).reshape(*entry.shape[:-1], -1), kind)
        except NotImplementedError as error:
            raise BadInputError(
                f"--from={self.path}: {name} is of type {kind.name}, which cannot be read; "
                "give a file of F32, F16, BF16, Q8_0, Q4_0, Q4_1, Q4_K or Q6_K"
            ) from error
        tensor = torch.from_numpy(values.copy()).float().reshape(entry.shape)
        if not tensor.isfinite().all():
            raise BadInputError(f"--from={self.path}: {name} holds numbers that are not finite; copy the file again")
        return tensor


def _read_entries(header: _Header, count: int, alignment: object) -> dict[str, TensorEntry]:
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    if type(alignment) is not int or alignment < 8 or alignment & (alignment - 1):
        raise header.refuse(f"{ALIGNMENT} is {alignment!r} and not a power of two from 8")
    described: dict[str, tuple[tuple[int, ...], int, int]] = {}
    for _ in range(count):
        name = header.text("a name of a tensor")
        dimensions = header.number("I", name)
        if name in described or not 1 <= dimensions <= MAX_DIMENSIONS:
            raise header.refuse(f"{name!r} stands there twice, or has {dimensions} dimensions")
        shape = tuple(header.number("Q", name) for _ in range(dimensions))[::-1]
        kind, offset = header.number("I", name), header.number("Q", name)
        if kind not in {known.value for known in GGMLQuantizationType}:
            raise header.refuse(f"{name!r} is of the unknown type {kind}")
        described[name] = (shape, kind, offset)
    start = -(-header.position // alignment) * alignment
    tensors: dict[str, TensorEntry] = {}
    for name, (shape, kind, offset) in described.items():
        block, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType(kind)]
        if not all(shape) or shape[-1] % block:
            raise header.refuse(f"{name!r} has the shape {list(shape)}, and rows are in blocks of {block}")
        nbytes = math.prod(shape) // block * block_bytes
        if offset % alignment or start + offset + nbytes > header.size:
            raise header.refuse(f"is cut off: {name!r} of {nbytes} bytes ends outside of the file")
        tensors[name] = TensorEntry(shape, kind, start + offset, nbytes)
    return tensors
