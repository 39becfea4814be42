"""Opens a GGUF file as a model whose weights are read on demand."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from mgpu_pipe.config.schema import ModelConfig
from mgpu_pipe.errors import BadInputError
from mgpu_pipe.inference.gguf.file import GgufFile
from mgpu_pipe.inference.open import ReadTensor, StoredModel

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel


def open_gguf(source: Path, scratch: Path) -> StoredModel:
    """The model of a GGUF file. The weights are dequantised one at a time.

    Args:
        scratch: an empty folder, which gets the tokenizer.

    Raises:
        BadInputError: the file is damaged, of another format, or of a family without a table.
    """
    from mgpu_pipe.inference.gguf.model_metadata import model_type_of, settings_of
    from mgpu_pipe.inference.gguf.read_tokenizer import write_tokenizer_folder
    from mgpu_pipe.models.build import build_meta, materialise_buffers, recipe_of

    file = GgufFile(source)
    model_type = model_type_of(file)
    model = build_meta(ModelConfig(name=model_type, type=model_type, config=settings_of(file, model_type)))
    read = _reader(file, model, model_type)
    write_tokenizer_folder(file, scratch)
    materialise_buffers(model, recipe_of(model), "cpu")
    return StoredModel(model.eval(), read, source, scratch, None, None, adopts_special_tokens=True)


def _reader(file: GgufFile, model: PreTrainedModel, model_type: str) -> ReadTensor:
    """The function that reads a weight of ``model``, after every tensor's place and shape has been checked.

    Raises:
        BadInputError: a tensor is missing, of another shape, or has no place in the model.
    """
    import torch

    from mgpu_pipe.inference.gguf.layouts import GGUF_FAMILIES, find_place, from_file, to_file
    from mgpu_pipe.inference.gguf.model_metadata import FREQUENCIES
    from mgpu_pipe.models.build import tied_sources

    family, tied = GGUF_FAMILIES[model_type], tied_sources(model)
    places = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        name = tied.get(name, name)
        entry = find_place(family, name)
        if entry is None:
            raise BadInputError(f"--from={file.path}: the weight {name} has no place in such a file; give another file")
        place, stored = entry
        expected = to_file(place, torch.empty(parameter.shape, device="meta"), model.config)
        for part, tensor in zip(stored, expected, strict=True):
            shape = file.tensors[part].shape if part in file.tensors else None
            if shape != tuple(tensor.shape):
                problem = "is missing" if shape is None else f"has the shape {list(shape)} for {list(tensor.shape)}"
                raise BadInputError(f"--from={file.path}: {part} {problem}; copy the file again, or give another")
        places[name] = entry
    used = {part for _, stored in places.values() for part in stored}
    rotations = getattr(model.config, "rope_parameters", None) or {}
    if rotations.get("rope_type") == "llama3":
        used.add(FREQUENCIES)  # the settings hold it
    unused = [name for name in file.tensors if name not in used]
    if unused:
        raise BadInputError(
            f"--from={file.path}: {len(unused)} tensors have no place in {model_type}: {', '.join(unused[:3])}; "
            "give another file"
        )
    buffers = dict(model.named_buffers())

    def read(name: str, dtype: torch.dtype) -> torch.Tensor:
        if name in buffers:
            return buffers[name].to(dtype)
        place, stored = places[tied.get(name, name)]
        return from_file(place, [file.read(part) for part in stored], model.config).contiguous().to(dtype)

    return read
