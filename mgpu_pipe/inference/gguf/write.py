"""Writes GGUF files, a tensor at a time, by the gguf package."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch

from mgpu_pipe.errors import BadInputError, MgpuError
from mgpu_pipe.inference.gguf.layouts import GGUF_FAMILIES, GgufFamily, Place, find_place, from_file, to_file
from mgpu_pipe.inference.open import ReadTensor

if TYPE_CHECKING:
    from gguf import GGMLQuantizationType, GGUFWriter
    from numpy import ndarray
    from transformers import PreTrainedModel

GgufDtype = Literal["fp32", "fp16", "bf16", "q8_0"]
KINDS: Mapping[GgufDtype, str] = {"fp32": "F32", "fp16": "F16", "bf16": "BF16", "q8_0": "Q8_0"}
"""Names of ggml's types."""
_FLOAT32 = np.dtype(np.float32)
CHUNK = 1 << 20
"""Values that are quantised together."""
KEPT_WHOLE = ("ffn_gate_inp.weight", "position_embd.weight")
"""Ends of the names of matrices that stay fp32, as in llama.cpp's converter."""
FLOAT_KEYS = ("_epsilon", "freq_base", "freq_base_swa", "scaling.factor", "softcapping")


@dataclass(frozen=True)
class GgufLayout:
    """Places of all weights of a model in a file."""

    model: PreTrainedModel
    family: GgufFamily
    places: Mapping[str, tuple[Place, tuple[str, ...]]]
    """By the weight's name, without those that are tied to another; the names of the file's tensors."""
    tied: Mapping[str, str]

    def file_tensors(self, name: str, read: ReadTensor) -> dict[str, torch.Tensor]:
        """The file's tensors of a weight, in fp32."""
        place, names = self.places[name]
        return dict(zip(names, to_file(place, read(name, torch.float32), self.model.config), strict=True))


def lay_out(model: PreTrainedModel) -> GgufLayout:
    """The layout of ``model``.

    Raises:
        BadInputError: the family has no table, or a weight has no place.
    """
    from mgpu_pipe.models.build import tied_sources

    model_type = model.config.model_type
    family = GGUF_FAMILIES.get(model_type)
    if family is None:
        raise BadInputError(
            f"--format=gguf: {model_type} has no table; use --format hf, or a model of {', '.join(GGUF_FAMILIES)}"
        )
    tied = tied_sources(model)
    places: dict[str, tuple[Place, tuple[str, ...]]] = {}
    for name, _ in model.named_parameters(remove_duplicate=False):
        entry = find_place(family, name)
        if entry is None:
            raise BadInputError(f"--format=gguf: llama.cpp's {family.architecture} has no {name}; use --format hf")
        if tied.get(name, name) == name:
            places[name] = entry
    return GgufLayout(model, family, places, tied)


def kind_of(name: str, shape: tuple[int, ...], dtype: GgufDtype) -> GGMLQuantizationType:
    """The type that the file stores a tensor in: vectors and routers in fp32, odd rows in fp16 instead of blocks."""
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    kind = GGMLQuantizationType[KINDS[dtype]]
    if len(shape) == 1 or name.endswith(KEPT_WHOLE):
        return GGMLQuantizationType.F32
    return GGMLQuantizationType.F16 if shape[-1] % GGML_QUANT_SIZES[kind][0] else kind


def _quantise(name: str, tensor: torch.Tensor, kind: GGMLQuantizationType) -> ndarray[Any, Any]:
    """The tensor as the file's bytes, (rows, bytes of a row); MgpuError for a value that the type cannot hold."""
    import gguf

    values = tensor.contiguous().numpy()
    if kind == gguf.GGMLQuantizationType.F32:
        return values
    if kind == gguf.GGMLQuantizationType.F16 and not tensor.abs().max() <= torch.finfo(torch.float16).max:
        raise MgpuError(f"--dtype: {name} holds values beyond fp16; use --dtype bf16 or fp32")
    rows = values.reshape(-1, values.shape[-1])
    block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    stored = np.empty((len(rows), rows.shape[1] // block * block_bytes), np.uint8)
    step = max(1, CHUNK // rows.shape[1])
    for start in range(0, len(rows), step):
        stored[start : start + step] = gguf.quantize(rows[start : start + step], kind).view(np.uint8)
    return stored


def rounded_reader(layout: GgufLayout, read: ReadTensor, dtype: GgufDtype) -> ReadTensor:
    """A reader of the values that a file of ``dtype`` gives back.

    Raises:
        MgpuError: a layout and its inverse do not fit together.
    """
    import gguf

    def read_rounded(name: str, kind: torch.dtype) -> torch.Tensor:
        name = layout.tied.get(name, name)
        if name not in layout.places:
            return read(name, kind)
        place, rounded = layout.places[name][0], []
        stored = layout.file_tensors(name, read)
        again = from_file(place, list(stored.values()), layout.model.config)
        if not torch.allclose(again, read(name, torch.float32), rtol=0, atol=1e-6):
            raise MgpuError(f"--format=gguf: the layout of {name} is not the inverse of its reader's; report this")
        for stored_name, tensor in stored.items():
            stored_as = kind_of(stored_name, tuple(tensor.shape), dtype)
            values = gguf.dequantize(_quantise(stored_name, tensor, stored_as), stored_as)
            rounded.append(torch.from_numpy(values.copy()).reshape(tensor.shape))
        return from_file(place, rounded, layout.model.config).contiguous().to(kind)

    return read_rounded


def write_gguf(
    layout: GgufLayout,
    read: ReadTensor,
    file: Path,
    dtype: GgufDtype,
    metadata: Mapping[str, Any],
    more_tensors: Mapping[str, torch.Tensor],
) -> None:
    """Write ``file``; holds one weight in memory at a time.

    Args:
        metadata: by key; texts, numbers, truths and lists of texts or numbers.
        more_tensors: vectors that are no weights.

    Raises:
        OSError: the file cannot be written.
    """
    from gguf import GGUFWriter, LlamaFileType

    writer = GGUFWriter(file, layout.family.architecture)
    writer.add_file_type(
        {
            "fp32": LlamaFileType.ALL_F32,
            "fp16": LlamaFileType.MOSTLY_F16,
            "bf16": LlamaFileType.MOSTLY_BF16,
            "q8_0": LlamaFileType.MOSTLY_Q8_0,
        }[dtype]
    )
    writer.add_quantization_version(2)
    for key, value in metadata.items():
        _add(writer, key, value)
    for name, shape, kind in _shapes(layout, dtype):
        writer.add_tensor_info(name, shape, _FLOAT32, _nbytes(shape, kind), kind)
    for name, tensor in more_tensors.items():
        writer.add_tensor_info(name, tuple(tensor.shape), _FLOAT32, tensor.nbytes)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for name in layout.places:
        tensors = layout.file_tensors(name, read)
        for stored_name in list(tensors):
            tensor = tensors.pop(stored_name)
            writer.write_tensor_data(_quantise(stored_name, tensor, kind_of(stored_name, tuple(tensor.shape), dtype)))
            del tensor  # before the next is read
    for tensor in more_tensors.values():
        writer.write_tensor_data(tensor.numpy())
    writer.flush()
    writer.close()


def file_bytes(layout: GgufLayout, dtype: GgufDtype) -> int:
    """Bytes of all tensors of a file of ``dtype``."""
    return sum(_nbytes(shape, kind) for _, shape, kind in _shapes(layout, dtype))


def _shapes(layout: GgufLayout, dtype: GgufDtype) -> Iterator[tuple[str, tuple[int, ...], GGMLQuantizationType]]:
    """Name, shape and type of every tensor of the file."""
    parameters = dict(layout.model.named_parameters(remove_duplicate=False))
    for name, (place, names) in layout.places.items():
        tensors = to_file(place, torch.empty(parameters[name].shape, device="meta"), layout.model.config)
        for stored_name, tensor in zip(names, tensors, strict=True):
            shape = tuple(tensor.shape)
            yield stored_name, shape, kind_of(stored_name, shape, dtype)


def _nbytes(shape: tuple[int, ...], kind: GGMLQuantizationType) -> int:
    from gguf import GGML_QUANT_SIZES

    block, block_bytes = GGML_QUANT_SIZES[kind]
    return math.prod(shape) // block * block_bytes


def _add(writer: GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    elif isinstance(value, list):
        writer.add_array(key, value)
    elif key.endswith(FLOAT_KEYS):
        writer.add_float32(key, float(value))
    else:
        writer.add_uint32(key, int(value))
