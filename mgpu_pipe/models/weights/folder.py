"""Checks that a Hugging Face model folder is complete, by file sizes and safetensors headers.

The header of a safetensors file: 8 bytes little-endian length, then that many bytes of JSON with every tensor's dtype,
shape and byte range (https://github.com/huggingface/safetensors#format).
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from fnmatch import fnmatch
from math import prod
from pathlib import Path
from typing import Any

from mgpu_pipe.config.hub import SMALL, fetch, hub_name, is_at_commit, listing, local_folder
from mgpu_pipe.errors import ConfigError, ModelFolderError
from mgpu_pipe.models.weights.sentence_modules import save_anew
from mgpu_pipe.system.local_files import (
    MAX_JSON_BYTES,
    check_folder,
    check_plain,
    exists,
    expand_home,
    is_file,
    is_folder,
    parse_json,
    read_bytes,
)

KEY = "model.path"


def whole_folder(path: Path | str) -> Path:
    """Folder of a model with its weights. A path stays as it is; a name at a commit is fetched once per machine.

    Raises:
        ConfigError: it cannot be fetched, or has no safetensors weights.
    """
    folder = local_folder(path, KEY)
    if not is_at_commit(path):
        return folder
    check_weights_listed(str(path))
    name = hub_name(str(path))
    assert name is not None
    names = [WEIGHTS] if WEIGHTS in listing(name, KEY) else weight_files(folder)
    return fetch(name, (*SMALL, *names), KEY)


def check_weights_listed(path: str) -> None:
    """Refuses a name at a commit without weights that this program reads; fetches none.

    Raises:
        ConfigError: it has none, with what it has instead.
    """
    name = hub_name(path)
    assert name is not None
    there = listing(name, KEY)
    if WEIGHTS in there or f"{WEIGHTS}.index.json" in there:
        return
    if ADAPTER in there:
        reason = f"{ADAPTER} names other weights, which are not followed"
        raise ConfigError(KEY, path, "give a model of whole weights", reason)
    pickled = [file for file in there if any(fnmatch(file, pattern) for pattern in PICKLES)]
    fix = "give a model with safetensors weights (model.safetensors, or its index and shards)"
    reason = f"only pickled weights ({pickled[0]}), which are never fetched for they can run code" if pickled else ""
    raise ConfigError(KEY, path, fix, reason or "the repository has no weights")


WEIGHTS = "model.safetensors"
GENERATION = "generation_config.json"
INDEX = "model.safetensors.index.json"
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")
ADAPTER = "adapter_config.json"
MAX_HEADER_BYTES = 32 << 20
"""Enough for 300,000 tensors; the format's limit is 100 MB."""
DTYPE_BITS = {
    "F64": 64,
    "I64": 64,
    "U64": 64,
    "C64": 64,
    "F32": 32,
    "I32": 32,
    "U32": 32,
    "F16": 16,
    "BF16": 16,
    "I16": 16,
    "U16": 16,
    "F8_E4M3": 8,
    "F8_E5M2": 8,
    "F8_E8M0": 8,
    "F8_E4M3FNUZ": 8,
    "F8_E5M2FNUZ": 8,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
    "F4": 4,
    "I8": 8,
    "U8": 8,
    "BOOL": 8,
}
SMALL_FLOATS, PACKED = ("F8", "F6", "F4"), ("I8", "U8", "I32", "U32")
PACKED_NAMES = (".weight", ".qweight", ".weight_packed", "_blocks")
"""Types and names of quantised weights; positions and masks are whole numbers too."""
MODULES_A_TENSOR, LEAST_MODULES = 32, 4096
"""Modules allowed per tensor of the weights, and always."""
SIZES = ("vocab_size", "hidden_size", "intermediate_size")
"""Standard names of the fields that decide widths of matrices."""
LEAST_WIDTH = 1 << 20
"""Rows that a matrix may always have: a tiny model's configuration may contain unused sizes."""
LEAST_SHARE_USED = 0.9
"""Smallest used share of a vocabulary. Published models pad it by 2 % at most; less is another tokenizer."""
TAG = "__float__"
TAGGED = {"Infinity": math.inf, "-Infinity": -math.inf, "NaN": math.nan}
"""Numbers that JSON lacks, by the text that transformers 5 writes under the key :data:`TAG`."""


def check_model_folder(path: Path | str, tokenizer_vocab_size: int | None = None, made_for: int | None = None) -> None:
    """Raises unless the folder has a configuration and complete safetensors weights that fit the tokenizer.

    Args:
        tokenizer_vocab_size: number of token ids (largest id + 1) of the data's tokenizer.
        made_for: vocabulary of the model that this tokenizer was trained for, if known.

    Raises:
        ModelFolderError: no folder, no ``config.json``, no weights, a truncated or damaged file, a missing shard or
            tensor of the index, or a vocabulary other than the tokenizer's.
    """
    folder = expand_home(path)
    if not is_folder(folder):
        raise ModelFolderError(f"model.path={path}: no such folder; give a local Hugging Face model folder")
    check_folder(folder)  # transformers opens files there by itself
    if exists(folder / ADAPTER):
        raise ModelFolderError(
            f"model.path={folder}: {ADAPTER} names other weights, which are not followed; give one of whole weights"
        )
    config = read_config_json(folder)
    quantised = config.get("quantization_config")
    if isinstance(quantised, dict) and quantised.get("quant_method") == "bitnet":
        raise ModelFolderError(
            f"model.path={folder}: its layers round weights and inputs as they compute (quantization_config), which "
            "this program does not; remove that field to compute with the weights as they are"
        )
    if is_file(folder / GENERATION):
        _read_json(folder / GENERATION)
    if is_file(folder / WEIGHTS):
        headers = [read_header(folder / WEIGHTS)]
    elif is_file(folder / INDEX):
        headers = _check_index(folder)
    else:
        raise _no_weights(folder)
    for header in headers:
        _refuse_quantised(folder, header)
    if tokenizer_vocab_size is not None:
        check_vocabulary(folder, config, tokenizer_vocab_size, made_for)


def stored_elements(folder: Path) -> int:
    """Number of elements of a checked folder's weights, by their headers."""
    return sum(prod(entry["shape"]) for name in weight_files(folder) for entry in read_header(folder / name).values())


def stored_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """Shapes of a checked folder's tensors by name, from its headers."""
    return {
        name: tuple(entry["shape"])
        for file in weight_files(folder)
        for name, entry in read_header(folder / file).items()
    }


def stored_tensors(folder: Path) -> int:
    """Number of tensors of a checked folder's weights."""
    return sum(len(read_header(folder / name)) for name in weight_files(folder))


def refuse_many_modules(modules: int, tensors: int) -> None:
    """Raise ModelFolderError for a model with far more modules than its weights have ``tensors``."""
    most = LEAST_MODULES + MODULES_A_TENSOR * tensors
    if modules > most:
        raise ModelFolderError(
            f"the configuration describes more than {most:,} modules, the weights hold {tensors:,} tensors: they do "
            "not belong together; check its numbers of layers and experts"
        )


def refuse_wide_matrices(fields: Mapping[str, Any], numbers: int) -> None:
    """Raise ModelFolderError for a model with a matrix wider than its weights have ``numbers``."""
    for name in SIZES:
        if isinstance(fields.get(name), int) and fields[name] > max(numbers, LEAST_WIDTH):
            raise ModelFolderError(
                f"the configuration's {name} is {fields[name]:,}, the weights hold {numbers:,} numbers in all: they do "
                "not belong together; copy both from one place"
            )


def weight_files(folder: Path) -> list[str]:
    """Names of a checked folder's safetensors files."""
    if is_file(folder / WEIGHTS):
        return [WEIGHTS]
    return sorted({str(shard) for shard in _read_json(folder / INDEX)["weight_map"].values()})


def read_config_json(folder: Path) -> dict[str, Any]:
    """The folder's ``config.json``, with the type and the numbers that transformers' ``AutoConfig`` reads there."""
    file = folder / "config.json"
    if not is_file(file):
        fix = save_anew(folder) or "give a folder written by save_pretrained"
        if is_file(folder / "config.yaml"):
            fix = f"a run's weights become a folder by mgpu-pipe export {folder} --out <folder>"
        raise ModelFolderError(f"model.path={folder}: no config.json in this folder; {fix}")
    content = _read_json(file)
    if not isinstance(content.get("model_type"), str):
        raise ModelFolderError(f"model.path={folder}: {file.name} names no model_type; give a causal LM's folder")
    if content["model_type"] == "mistral" and "layer_types" in content:  # AutoConfig's one rule of this kind
        content["model_type"] = "ministral"
    return {name: with_infinities(value) for name, value in content.items()}


def with_infinities(value: Any) -> Any:
    """A JSON value with the numbers that transformers 5 writes as ``{"__float__": "Infinity"}``."""
    if isinstance(value, dict):
        tag = value.get(TAG)
        if len(value) == 1 and isinstance(tag, str) and tag in TAGGED:
            return TAGGED[tag]
        return {name: with_infinities(inner) for name, inner in value.items()}
    return [with_infinities(inner) for inner in value] if isinstance(value, list) else value


def check_vocabulary(
    folder: Path, config: dict[str, Any], tokenizer_vocab_size: int, made_for: int | None = None
) -> None:
    """Raises unless the model's embedding has a row for every token id, and uses most of its rows."""
    nested = config.get("text_config")
    size = config.get("vocab_size", nested.get("vocab_size") if isinstance(nested, dict) else None)
    if not isinstance(size, int):
        return
    if tokenizer_vocab_size > size or (tokenizer_vocab_size < LEAST_SHARE_USED * size and made_for != size):
        fix = "set data.tokenizer to the folder of the tokenizer that this model was trained with"
        if tokenizer_vocab_size > size:
            fix += f", or add model.config.vocab_size={tokenizer_vocab_size}, which gives the model new rows"
        raise ModelFolderError(
            f"model.path={folder}: the model's vocabulary has {size} entries, the tokenizer's {tokenizer_vocab_size}; "
            f"{fix}"
        )


def read_header(file: Path) -> dict[str, dict[str, Any]]:
    """Tensor entries of a safetensors file, after a check that all their bytes are in the file.

    Raises:
        ModelFolderError: truncated, or not a safetensors file.
    """
    check_plain(file)
    size = file.stat().st_size
    with file.open("rb") as stream:
        start = stream.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else None
        if length is None or (length <= MAX_HEADER_BYTES and size < 8 + length):
            raise _truncation_error(file, size, 8 + (length or 0))
        if length > MAX_HEADER_BYTES:
            raise _damage_error(file, "its header has an impossible length")
        raw = stream.read(length)
    try:
        header = parse_json(raw, file)
        entries = {name: entry for name, entry in header.items() if name != "__metadata__"}
        data = _data_bytes(entries)
    except (ValueError, TypeError, KeyError, IndexError, AttributeError):
        raise _damage_error(file, "its header is not readable") from None
    if size < 8 + length + data:
        raise _truncation_error(file, size, 8 + length + data)
    if size > 8 + length + data:
        raise _damage_error(file, f"it has {size - 8 - length - data} bytes more than its header says")
    return entries


def _data_bytes(entries: dict[str, dict[str, Any]]) -> int:
    """Bytes of all tensors; raises ValueError, TypeError or KeyError unless they follow each other."""
    end = 0
    for entry in sorted(entries.values(), key=lambda entry: list(entry["data_offsets"])):
        begin, stop = entry["data_offsets"]
        numbers = [begin, stop, *entry["shape"]]
        if any(type(number) is not int or number < 0 for number in numbers) or begin != end or stop < begin:
            raise ValueError(entry)
        if prod(entry["shape"]) * DTYPE_BITS[entry["dtype"]] != (stop - begin) * 8:
            raise ValueError(entry)
        end = stop
    return end


def _refuse_quantised(folder: Path, header: Mapping[str, Mapping[str, Any]]) -> None:
    """Refuses weights of few bits (GPTQ, AWQ, bitsandbytes, FP8, MXFP4), whose numbers mean nothing without scales."""
    for name, entry in header.items():
        dtype = entry["dtype"]
        if dtype.startswith(SMALL_FLOATS) or (dtype in PACKED and name.endswith(PACKED_NAMES)):
            raise ModelFolderError(
                f"model.path={folder}: its weights are quantised ({name} is {dtype}); give the folder of the original "
                "weights, which peft=qlora quantises as it reads them"
            )


def _check_index(folder: Path) -> list[dict[str, dict[str, Any]]]:
    """Headers of the shards of an index that are complete.

    Raises:
        ModelFolderError: a shard or a tensor is missing.
    """
    index = _read_json(folder / INDEX)
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map or not all(isinstance(v, str) for v in weight_map.values()):
        raise _damage_error(folder / INDEX, "it has no weight_map")
    headers: dict[str, dict[str, dict[str, Any]]] = {}
    for shard in sorted(set(weight_map.values())):
        file = folder / Path(str(shard)).name
        if shard != file.name:
            raise _damage_error(folder / INDEX, f"{shard[:80]} is no name of a file in this folder")
        if not is_file(file):
            raise ModelFolderError(
                f"model.path={folder}: {shard} is missing, which {INDEX} names; copy the whole folder again"
            )
        headers[shard] = read_header(file)
    for name, shard in weight_map.items():
        if name not in headers[shard]:
            raise ModelFolderError(
                f"model.path={folder}: {INDEX} puts {name} into {shard}, which does not hold it; "
                "copy the whole folder again"
            )
    return list(headers.values())


def _no_weights(folder: Path) -> ModelFolderError:
    pickles = sorted(file.name for pattern in PICKLES for file in folder.glob(pattern))
    if pickles:
        return ModelFolderError(
            f"model.path={folder}: only pickled weights ({pickles[0]}), which can run code; write safetensors of their "
            f"tensors alone: mgpu-pipe import --from={folder} --out=<new folder> model=hf model.path={folder}"
        )
    return ModelFolderError(
        f"model.path={folder}: no weights in this folder; it needs {WEIGHTS} or {INDEX} with its shards"
    )


def _read_json(file: Path) -> dict[str, Any]:
    try:
        content = parse_json(read_bytes(file, MAX_JSON_BYTES), file)
    except (ValueError, OSError) as error:
        raise _damage_error(file, f"not readable as JSON ({error})") from error
    if not isinstance(content, dict):
        raise _damage_error(file, "not a JSON object")
    return content


def _truncation_error(file: Path, size: int, expected: int) -> ModelFolderError:
    return ModelFolderError(
        f"model.path={file.parent}: {file.name} is truncated: {size} bytes of at least {expected}; copy it again"
    )


def _damage_error(file: Path, what: str) -> ModelFolderError:
    return ModelFolderError(f"model.path={file.parent}: {file.name} is damaged: {what}; copy it again")
