"""What a plain Hugging Face folder holds besides its weights, and which of a model's tensors make which of its.

transformers' modules may hold tensors that its folders keep under other names, or cut differently (the experts of a
mixture). Its own conversion, run on meta tensors, says which; so weights can be written a few at a time.
"""

from __future__ import annotations

import copy
import json
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from mgpu_pipe.compat.transformers_private import keys_not_saved
from mgpu_pipe.models.build import REFUSALS, tied_sources
from mgpu_pipe.models.scalars import as_saved

if TYPE_CHECKING:
    from transformers import PreTrainedModel

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "tokenizer.model",
    "spiece.model",
    "chat_template.jinja",
    "chat_template.json",
    "preprocessor_config.json",
)

GENERATION = "generation_config.json"

_BLOCK = re.compile(r"(?:.*?\.)?\d+(?=\.)")

Shapes = dict[str, tuple[int, ...]]


@dataclass(frozen=True)
class SavedGroup:
    """Tensors of the module that are converted together, and the folder's tensors that come out."""

    sources: tuple[str, ...]
    outputs: Shapes


def saved_groups(model: PreTrainedModel) -> list[SavedGroup]:
    """How the tensors of ``model`` (meta is enough) are written, in the order of its modules; of tied ones the first.

    Most tensors are written alone; those that transformers merges are grouped by their block.
    """
    tied = tied_sources(model)
    ignored = set(keys_not_saved(model))
    shapes = {
        name: tuple(tensor.shape)
        for name, tensor in model.state_dict().items()
        if name not in ignored and tied.get(name, name) == name
    }
    together = _converted_shapes(model, list(shapes)) or {}
    groups: dict[str, list[str]] = {}
    for name in shapes:
        alone = _converted_shapes(model, [name])
        complete = alone is not None and all(together.get(key) == shape for key, shape in alone.items())
        block = _BLOCK.match(name)
        groups.setdefault(name if complete else block[0] if block else "", []).append(name)
    apart = [SavedGroup(tuple(names), _converted_shapes(model, names) or {}) for names in groups.values()]
    outputs = [(name, shape) for group in apart for name, shape in group.outputs.items()]
    if len(outputs) != len(together) or dict(outputs) != together:  # merged over blocks: all at once
        return [SavedGroup(tuple(shapes), together)]
    return apart


def _converted_shapes(model: PreTrainedModel, names: list[str]) -> Shapes | None:
    """Names and shapes that the conversion of ``names`` gives; None where it needs further tensors."""
    state = model.state_dict()
    try:
        done = convert_for_saving(model, {name: state[name].to("meta") for name in names})
    except REFUSALS:
        return None
    return {name: tuple(tensor.shape) for name, tensor in done.items()}


def convert_for_saving(model: PreTrainedModel, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The folder's tensors, under its names, that the module's ``tensors`` make."""
    from transformers.core_model_loading import revert_weight_conversion

    converted: dict[str, torch.Tensor] = revert_weight_conversion(model, as_saved(model, tensors))
    return converted


def write_configuration(model: PreTrainedModel, out: Path, dtype: torch.dtype, maker: Path | None = None) -> None:
    """Write ``config.json`` and ``generation_config.json`` for weights of ``dtype``.

    Args:
        maker: the model folder that the model was made from. How it generates is kept as it is there.
    """
    config = copy.deepcopy(model.config)
    config.dtype = str(dtype).removeprefix("torch.")
    config.architectures = [type(model).__name__.removeprefix("FSDP")]
    config.save_pretrained(str(out))
    kept = generation_settings(maker) if maker is not None else None
    if kept is not None:
        (out / GENERATION).write_text(json.dumps(kept, indent=2) + "\n", encoding="utf-8")
    elif model.can_generate() and model.generation_config is not None:
        model.generation_config.save_pretrained(str(out))


def generation_settings(folder: Path) -> dict[str, object] | None:
    """A model folder's ``generation_config.json``; None where there is none that can be read."""
    try:
        settings = json.loads((folder / GENERATION).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return settings if isinstance(settings, dict) else None


def write_tokenizer(tokenizer_folder: Path, out: Path, adopt_special_tokens: bool) -> None:
    """Copy the tokenizer's files.

    Args:
        adopt_special_tokens: write its special ids into the configurations, for a model that was not made from a
            folder whose own configuration says where texts end.
    """
    for name in TOKENIZER_FILES:
        if (tokenizer_folder / name).is_file():
            shutil.copyfile(tokenizer_folder / name, out / name)
    if adopt_special_tokens:
        _adopt_special_tokens(out)


def _adopt_special_tokens(out: Path) -> None:
    """Write the tokenizer's end-of-text id into the folder's configurations, so that ``generate`` stops there."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(out), local_files_only=True, trust_remote_code=False)
    if tokenizer.eos_token_id is None:
        return
    for name in ("config.json", GENERATION):
        file = out / name
        if not file.is_file():
            continue
        content = json.loads(file.read_text(encoding="utf-8"))
        content["eos_token_id"] = tokenizer.eos_token_id
        if tokenizer.bos_token_id is not None:
            content["bos_token_id"] = tokenizer.bos_token_id
        file.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
