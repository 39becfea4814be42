"""``mgpu-pipe import``: another program's weights as a Hugging Face folder, which runs start from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path

import torch

from mgpu_pipe.config.hub import local_folder
from mgpu_pipe.config.schema import ModelConfig
from mgpu_pipe.errors import BadInputError
from mgpu_pipe.inference.load import StoredModel, read_from
from mgpu_pipe.models.build import build_meta, materialise_empty
from mgpu_pipe.models.slices import read_tensors

LISTED = 8
"""Names of each kind that an error lists."""


def fill_from_external(
    config: ModelConfig,
    weights: Mapping[str, torch.Tensor],
    source: Path,
    prefix: str = "",
    ignore: Sequence[str] = (),
    tokenizer: Path | None = None,
) -> StoredModel:
    """The model of ``config`` with foreign ``weights``, every one of which must find its place.

    Args:
        weights: under Hugging Face's names or transformers' modules', each after ``prefix``.
        source: named in errors.
        ignore: shell patterns of foreign names that are left out.

    Raises:
        BadInputError: tensors missing, unexpected or of other shapes; all kinds listed.
    """
    named, unexpected = {}, set()
    for name, tensor in weights.items():
        if any(fnmatchcase(name, pattern) for pattern in ignore):
            continue
        if name.startswith(prefix):
            named[name.removeprefix(prefix)] = tensor
        else:
            unexpected.add(name)
    twin = build_meta(replace(config, freeze=[]))
    state = twin.state_dict()
    rebuilt = dict(twin.named_buffers()).keys() - state.keys()  # follow from the configuration; old versions saved them
    named = {name: tensor for name, tensor in named.items() if name not in rebuilt}
    model = materialise_empty(build_meta(replace(config, freeze=[])), "cpu")
    parameters = dict(model.named_parameters(remove_duplicate=False))

    def take(name: str, tensor: torch.Tensor) -> None:
        parameters[name].data.copy_(tensor)

    readers = {name: partial(_itself, tensor) for name, tensor in named.items()}
    filled = read_tensors(twin, readers, parameters, {name: tuple(p.shape) for name, p in parameters.items()}, take)
    unexpected |= {prefix + name for name in filled["unexpected_keys"]}
    shapes = {name: tuple(tensor.shape) for name, tensor in state.items()}
    mismatched = [
        f"{name} {list(named[name].shape)} for {list(shapes[name])}" if name in named else name
        for name in sorted(filled["mismatched_keys"])
    ]
    listed = [
        f"{len(names)} {kind}: {', '.join(names[:LISTED])}{', ...' if len(names) > LISTED else ''}"
        for kind, names in (
            ("missing", sorted(filled["missing_keys"])),
            ("unexpected", sorted(unexpected)),
            ("of another shape", mismatched),
        )
        if names
    ]
    if listed:
        raise BadInputError(
            f"--from={source}: the tensors do not fit the model {config.name}: {'; '.join(listed)}; "
            + _advice(list(state), list(weights), prefix)
        )
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            if name in named and name in state:
                buffer.copy_(named[name])
    maker = None if config.path is None else local_folder(config.path)
    return StoredModel(model.eval(), read_from(model), source, tokenizer, None, None, maker is None, maker)


def _itself(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def _advice(expected: Sequence[str], given: Sequence[str], prefix: str) -> str:
    """What to change: the prefix, where another one fits the names."""
    probe = max(expected, key=len)
    fitting = sorted({name.removesuffix(probe) for name in given if name.endswith(probe)} - {prefix})
    if fitting:
        return f"the names begin with {fitting[0]!r}: use --prefix {fitting[0]}" if fitting[0] else "leave out --prefix"
    return "give the model it was trained with (model=..., model.config.*), --prefix or --ignore PATTERN"
