"""Is a Hugging Face model folder whole? Decided from file sizes and safetensors headers, without torch.

The header of a safetensors file: 8 bytes little-endian length, then that many bytes of JSON that give every tensor's
dtype, shape and byte range (https://github.com/huggingface/safetensors#format).
"""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

from mgpu_pipe.errors import ModelFolderError

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")
MAX_HEADER_BYTES = 100_000_000
"""The format's own limit."""
LEAST_SHARE_USED = 0.9
"""Models pad their vocabulary (by 2 % at most in published ones); fewer used rows than this is another tokenizer."""


def check_model_folder(
    path: Path | str, tokenizer_vocab_size: int | None = None, made_for: int | None = None
) -> None:
    """Raise unless the folder has a configuration and whole safetensors weights that fit the tokenizer.

    Args:
        tokenizer_vocab_size: number of token ids (largest id + 1) of the tokenizer that the data uses.
        made_for: the vocabulary of the model that this tokenizer was trained for, where it says so.

    Raises:
        ModelFolderError: no folder, no ``config.json``, no weights, a truncated or damaged file, a shard or a tensor
            of the index that is not there, or a vocabulary other than the tokenizer's.
    """
    folder = Path(path).expanduser()
    if not folder.is_dir():
        raise ModelFolderError(f"model.path={path}: no such folder; give a local Hugging Face model folder")
    config = read_config_json(folder)
    if (folder / WEIGHTS).is_file():
        read_header(folder / WEIGHTS)
    elif (folder / INDEX).is_file():
        _check_index(folder)
    else:
        raise _no_weights(folder)
    if tokenizer_vocab_size is not None:
        check_vocabulary(folder, config, tokenizer_vocab_size, made_for)


def read_config_json(folder: Path) -> dict[str, Any]:
    """The folder's ``config.json``."""
    file = folder / "config.json"
    if not file.is_file():
        raise ModelFolderError(
            f"model.path={folder}: no config.json in this folder; give a folder written by save_pretrained"
        )
    content = _read_json(file)
    if not isinstance(content.get("model_type"), str):
        raise ModelFolderError(f"model.path={folder}: {file.name} names no model_type; give a causal LM's folder")
    return content


def check_vocabulary(
    folder: Path, config: dict[str, Any], tokenizer_vocab_size: int, made_for: int | None = None
) -> None:
    """Raise unless the model's embedding has a row for every token id, and uses most of its rows."""
    nested = config.get("text_config")
    size = config.get("vocab_size", nested.get("vocab_size") if isinstance(nested, dict) else None)
    if not isinstance(size, int):
        return
    if tokenizer_vocab_size > size or (tokenizer_vocab_size < LEAST_SHARE_USED * size and made_for != size):
        raise ModelFolderError(
            f"model.path={folder}: the model's vocabulary has {size} entries, the tokenizer's {tokenizer_vocab_size}; "
            "set data.tokenizer to the folder of the tokenizer that this model was trained with"
        )


def read_header(file: Path) -> dict[str, dict[str, Any]]:
    """Tensor entries of a safetensors file, after checking that every byte they name is in the file.

    Raises:
        ModelFolderError: truncated, or not a safetensors file.
    """
    size = file.stat().st_size
    with file.open("rb") as stream:
        start = stream.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else None
        if length is None or (length <= MAX_HEADER_BYTES and size < 8 + length):
            raise _truncated(file, size, 8 + (length or 0))
        if length > MAX_HEADER_BYTES:
            raise _damaged(file, "its header has an impossible length")
        raw = stream.read(length)
    try:
        header = json.loads(raw)
        entries = {name: entry for name, entry in header.items() if name != "__metadata__"}
        data = max((entry["data_offsets"][1] for entry in entries.values()), default=0)
    except (ValueError, TypeError, KeyError, IndexError, AttributeError):
        raise _damaged(file, "its header is not readable") from None
    if size < 8 + length + data:
        raise _truncated(file, size, 8 + length + data)
    if size > 8 + length + data:
        raise _damaged(file, f"it has {size - 8 - length - data} bytes more than its header says")
    return entries


def _check_index(folder: Path) -> None:
    index = _read_json(folder / INDEX)
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise _damaged(folder / INDEX, "it has no weight_map")
    held: dict[str, set[str]] = {}
    for shard in sorted(set(weight_map.values())):
        file = folder / Path(str(shard)).name
        if not file.is_file():
            raise ModelFolderError(
                f"model.path={folder}: {shard} is missing, which {INDEX} names; copy the whole folder again"
            )
        held[shard] = set(read_header(file))
    for name, shard in weight_map.items():
        if name not in held[shard]:
            raise ModelFolderError(
                f"model.path={folder}: {INDEX} puts {name} into {shard}, which does not hold it; "
                "copy the whole folder again"
            )


def _no_weights(folder: Path) -> ModelFolderError:
    pickles = sorted(file.name for pattern in PICKLES for file in folder.glob(pattern))
    if pickles:
        return ModelFolderError(
            f"model.path={folder}: only pickled weights ({pickles[0]}), which are never loaded for they can run code; "
            "convert them to safetensors with save_pretrained"
        )
    return ModelFolderError(
        f"model.path={folder}: no weights in this folder; it needs {WEIGHTS} or {INDEX} with its shards"
    )


def _read_json(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise _damaged(file, f"not readable as JSON ({error})") from error
    if not isinstance(content, dict):
        raise _damaged(file, "not a JSON object")
    return content


def _truncated(file: Path, size: int, expected: int) -> ModelFolderError:
    return ModelFolderError(
        f"model.path={file.parent}: {file.name} is truncated: {size} bytes of at least {expected}; copy it again"
    )


def _damaged(file: Path, what: str) -> ModelFolderError:
    return ModelFolderError(f"model.path={file.parent}: {file.name} is damaged: {what}; copy it again")
