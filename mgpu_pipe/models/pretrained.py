"""A model folder's weights, loaded whole by transformers, and what does not fit in them."""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from mgpu_pipe.compat.transformers_private import attention_of
from mgpu_pipe.config.hub import local_folder
from mgpu_pipe.config.schema import ModelConfig
from mgpu_pipe.errors import ConfigError, ModelFolderError
from mgpu_pipe.models.adapters.lora import is_adapter
from mgpu_pipe.models.build import build_from, draw_parameter, first_line, model_config, recipe_of, tied_sources
from mgpu_pipe.models.folder import (
    check_model_folder,
    read_config_json,
    stored_elements,
    stored_tensors,
    too_many_modules,
)
from mgpu_pipe.models.freezing import freeze_parameters
from mgpu_pipe.models.hub_folder import whole_folder
from mgpu_pipe.models.new_rows import add_rows, stored_vocabulary
from mgpu_pipe.models.scalars import scalars_to_vectors

LEAST_ELEMENTS = 1 << 20

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def load_pretrained(
    model: ModelConfig,
    device: torch.device | str,
    settings: ModelConfig | None = None,
    model_class: str | None = None,
    seed: int | None = None,
) -> PreTrainedModel:
    """The model of the folder ``model.path`` with its safetensors weights, fp32, on ``device``.

    Args:
        model_class: as of :func:`build_meta`.
        seed: of what the folder does not have, a new head or further rows of the vocabulary; None: they are missing.
        settings: says what the model is, where the folder gives its weights alone; else ``model`` does.

    Raises:
        ModelFolderError: no or damaged weights, or tensors missing, unexpected or of other shapes (tied ones
            excepted), e.g. because ``model.config`` changes the architecture.
    """
    if model.path is None:
        raise ConfigError("model.path", None, "give a Hugging Face model folder")
    folder = whole_folder(model.path)
    check_model_folder(folder)
    config = model_config(settings or model)
    with at_most(stored_tensors(folder)):
        meta = build_from(config, model, model_class)
    _check_elements(folder, meta)
    rows = None if seed is None else stored_vocabulary(settings or model, folder)
    stored = copy.deepcopy(config)
    if rows is not None:
        stored.vocab_size = rows
    result: Any = type(meta).from_pretrained(
        str(folder),
        config=stored,
        local_files_only=True,
        use_safetensors=True,
        trust_remote_code=False,
        dtype=torch.float32,
        attn_implementation=attention_of(meta.config),
        output_loading_info=True,
        ignore_mismatched_sizes=True,
    )
    loaded, info = result
    scalars_to_vectors(loaded)
    if rows is not None and seed is not None:
        add_rows(loaded, meta, seed)
    for name, drawn in check_loading(model, info, meta, seed).items():
        loaded.get_parameter(name).data.copy_(drawn)
    freeze_parameters(loaded, model.freeze)
    trained: PreTrainedModel = loaded.to(device).train()
    return trained


@contextmanager
def at_most(tensors: int) -> Iterator[None]:
    """Refuse to go on with a model of far more parts than its weights have ``tensors``: it would never be built.

    Raises:
        ModelFolderError: it has.
    """
    from torch.nn.modules.module import register_module_module_registration_hook

    made = 0

    def count(*_: object) -> None:
        nonlocal made
        made += 1
        too_many_modules(made, tensors)

    hook = register_module_module_registration_hook(count)
    try:
        yield
    finally:
        hook.remove()


def _check_elements(folder: Path, model: PreTrainedModel) -> None:
    """Tensors that the weights lack, or hold in another shape, are made at full size before anything is told."""
    described, stored = sum(tensor.numel() for tensor in model.parameters()), stored_elements(folder)
    if described > 2 * stored + LEAST_ELEMENTS:
        raise ModelFolderError(
            f"model.path={folder}: config.json describes {described:,} parameters, the weights hold {stored:,}; "
            "check config.json and the model.config overrides"
        )


def check_loading(
    model: ModelConfig, info: Mapping[str, Any], twin: PreTrainedModel, seed: int | None
) -> dict[str, torch.Tensor]:
    """Raise for tensors that did not find their place, each kind listed with its first names.

    Where ``seed`` is given, tensors are no fault of a folder of another class of model that this class alone has (a
    new head), or that one alone (its own); nor the head of a classifier of another number of classes.

    Args:
        info: what transformers says of a loading: ``missing_keys``, ``unexpected_keys``, ``mismatched_keys``.
        twin: the model on the meta device, not split.

    Returns:
        The keyed initial values of the new ones, by name.
    """
    folder = local_folder(str(model.path))
    mismatched = {entry[0] if isinstance(entry, tuple) else str(entry) for entry in info["mismatched_keys"]}
    missing = set(info["missing_keys"]) - set(tied_sources(twin)) - mismatched
    adapters = {name for name in missing if is_adapter(name)}
    missing -= adapters
    new = _head_of_other_classes(folder, twin, mismatched) if seed is not None else set[str]()
    mismatched -= new
    unexpected = set(info["unexpected_keys"])
    theirs = _names_of_another_class(folder, twin) if seed is not None and (missing or unexpected) else set()
    if theirs:
        new |= missing - theirs
        missing, unexpected = missing & theirs, unexpected - theirs
    problems = [
        f"{len(names)} {kind}: {', '.join(sorted(names)[:3])}{', ...' if len(names) > 3 else ''}"
        for kind, names in (("missing", missing), ("unexpected", unexpected), ("of another shape", mismatched))
        if names
    ]
    problems += [first_line(message) for message in info.get("error_msgs") or []]
    if problems:
        raise ModelFolderError(
            f"model.path={folder}: the weights do not fit the configuration; tensors {'; '.join(problems)}; "
            "check config.json and the model.config overrides"
        )
    if not new and not adapters:
        return {}
    assert seed is not None
    if new and (not dist.is_initialized() or dist.get_rank() == 0):
        print(f"note: model.path={folder}: has no {', '.join(sorted(new))}: newly initialised", file=sys.stderr)
    recipe = recipe_of(twin)
    return {name: draw_parameter(twin, recipe, name, seed) for name in sorted(new | adapters)}


def _head_of_other_classes(folder: Path, twin: PreTrainedModel, names: set[str]) -> set[str]:
    """Those of ``names`` that have a row for each class, where the folder's model has another number of classes."""
    stored = read_config_json(folder)
    before = len(stored.get("id2label") or ()) or stored.get("num_labels", 2)  # transformers' default
    now = twin.config.num_labels
    return set() if before == now else {name for name in names if twin.get_parameter(name).shape[:1] == (now,)}


def _names_of_another_class(folder: Path, twin: PreTrainedModel) -> set[str]:
    """The tensors of a folder whose architecture is another class than ``twin``'s; none where it is the same."""
    import transformers

    named = next(iter(read_config_json(folder).get("architectures") or ()), None)
    own = getattr(transformers, str(named), None)
    if not (isinstance(own, type) and issubclass(own, transformers.PreTrainedModel)) or isinstance(twin, own):
        return set()
    with torch.device("meta"):
        names = set(own(twin.config).state_dict())
    return names | {f"{twin.base_model_prefix}.{name}" for name in names}
