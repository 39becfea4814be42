"""Loads a whole model folder by transformers, and reports tensors that do not fit."""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from mgpu_pipe.config.hub import local_folder
from mgpu_pipe.config.schema import ModelConfig
from mgpu_pipe.errors import CheckpointError, ConfigError, ModelFolderError, print_line
from mgpu_pipe.models.adapters.lora import is_adapter
from mgpu_pipe.models.build import (
    REFUSALS,
    build_from,
    draw_parameter,
    first_line,
    model_config,
    recipe_of,
    tied_sources,
)
from mgpu_pipe.models.model_parts import freeze_parameters, show_pictures_both_ways
from mgpu_pipe.models.shard_units import scalars_to_vectors
from mgpu_pipe.models.speech import read_recordings_alone
from mgpu_pipe.models.weights.folder import (
    check_model_folder,
    read_config_json,
    refuse_many_modules,
    stored_elements,
    stored_shapes,
    stored_tensors,
    whole_folder,
)
from mgpu_pipe.system.compat.transformers_private import attention_of_parts, drop_ignored_keys

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel


SCALARS = ("masked_bias", "scale_attn")
"""Constants in the attention of GPT-2, GPT-Neo, GPT-NeoX and GPT-J."""


def drop_harmless(
    twin: PreTrainedModel, missing: set[str], unexpected: set[str], shapes: Mapping[str, tuple[int, ...]]
) -> tuple[set[str], set[str]]:
    """Missing and unexpected tensors of the meta model ``twin``, without those that every reader of a folder
    ignores."""
    missing, unexpected = drop_ignored_keys(twin, missing, unexpected)
    return missing, unexpected - _leftovers(twin, unexpected, shapes)


def _leftovers(twin: PreTrainedModel, names: Iterable[str], shapes: Mapping[str, tuple[int, ...]]) -> set[str]:
    """Subset of ``names`` that follow from the configuration, or belong to another class of the family."""
    rebuilt = dict(twin.named_buffers())
    prefix = f"{twin.base_model_prefix}."
    dropped = {
        name
        for name in names
        if {name, prefix + name, name.removeprefix(prefix)} & rebuilt.keys() or _is_constant(name, shapes.get(name, ()))
    }
    others = set(names) - dropped
    return dropped | (others & _names_in_family(twin) if others else set())


def _is_constant(name: str, shape: tuple[int, ...]) -> bool:
    """Whether an old version saved this tensor: a square mask, positions, frequencies or a constant."""
    last = name.rpartition(".")[2]
    mask = len(shape) == 4 and shape[:2] == (1, 1) and shape[2] == shape[3]
    return (
        (last in ("bias", "causal_mask") and mask)
        or (last in SCALARS and shape in ((), (1,)))
        or (last == "position_ids" and len(shape) == 2 and shape[0] == 1)
        or (last == "inv_freq" and len(shape) == 1)
    )


def _names_in_family(twin: PreTrainedModel) -> set[str]:
    """Names of the tensors of all transformers classes for the model's configuration."""
    from transformers import PreTrainedModel

    names: set[str] = set()
    for other in vars(sys.modules[type(twin).__module__]).values():
        is_model = isinstance(other, type) and issubclass(other, PreTrainedModel)
        if is_model and other.config_class is type(twin.config):
            try:
                with torch.device("meta"):
                    built = other(twin.config)
            except REFUSALS:  # a base class, or a class that needs more fields
                continue
            names |= _with_and_without_prefix(built)
    return names


def _with_and_without_prefix(model: PreTrainedModel) -> set[str]:
    """Names of a model's tensors in its class and in its base class."""
    names, prefix = set(model.state_dict()), f"{model.base_model_prefix}."
    return names | {prefix + name for name in names} | {name.removeprefix(prefix) for name in names}


RECORDED = "buffers"
"""Entry of ``state.json`` with buffers: values by name."""


def stored_buffers(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Persistent buffers of ``model`` by name."""
    persistent = model.state_dict(keep_vars=True)
    return {name: buffer for name, buffer in model.named_buffers(remove_duplicate=False) if name in persistent}


def buffer_entry(buffers: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """Entry of ``state.json`` for ``buffers``; empty without any."""
    values = {name: buffer.tolist() for name, buffer in buffers.items() if bool(buffer.isfinite().all())}
    return {RECORDED: values} if values else {}


@torch.no_grad()
def restore_buffers(model: torch.nn.Module, state: Mapping[str, Any], folder: Path) -> None:
    """Fills the buffers of ``model``, whole or a stage, from a checkpoint's ``state.json``, in place.

    Sharded buffers follow from the configuration and stay.

    Raises:
        CheckpointError: a value of another shape, or not a number.
    """
    entry = state.get(RECORDED)
    values: Mapping[str, Any] = entry if isinstance(entry, Mapping) else {}
    for name, buffer in stored_buffers(model).items() if values else ():
        if name not in values:
            continue
        try:
            value = torch.tensor(values[name], dtype=buffer.dtype)
        except (TypeError, ValueError, RuntimeError) as error:
            raise CheckpointError(f"{folder}: its state.json holds no numbers for the buffer {name}") from error
        if value.dim() != buffer.dim():
            raise CheckpointError(f"{folder}: its state.json holds the buffer {name} in another shape")
        if value.shape == buffer.shape:
            buffer.copy_(value)


def adds_rows(model: ModelConfig, stored: tuple[int, ...], wanted: tuple[int, ...]) -> bool:
    """Whether a tensor of shape ``stored`` only lacks rows of the vocabulary."""
    size = model.config.get("vocab_size")
    return bool(wanted) and wanted[0] == size and 0 < stored[0] < wanted[0] and stored[1:] == wanted[1:]


def with_new_rows(twin: PreTrainedModel, name: str, stored: Any, seed: int) -> torch.Tensor:
    """The whole parameter ``name`` of the meta model ``twin``: the ``stored`` rows, then keyed initial values."""
    whole = draw_parameter(twin, recipe_of(twin), name, seed)
    rows: torch.Tensor = stored[...]
    whole[: len(rows)] = rows
    return whole


def stored_vocabulary(model: ModelConfig, folder: Path) -> int | None:
    """Vocabulary of a folder to which ``model.config.vocab_size`` adds rows; None if it adds none."""
    size, stored = model.config.get("vocab_size"), read_config_json(folder).get("vocab_size")
    return stored if isinstance(size, int) and isinstance(stored, int) and 0 < stored < size else None


def add_rows(model: PreTrainedModel, twin: PreTrainedModel, seed: int) -> None:
    """Adds the rows to ``model`` that only its ``twin`` on the meta device has, with keyed initial values."""
    before = {name: len(parameter) for name, parameter in model.named_parameters() if parameter.ndim}
    model.resize_token_embeddings(twin.config.vocab_size, mean_resizing=False)
    recipe = recipe_of(twin)
    for name, parameter in model.named_parameters():
        if parameter.ndim and len(parameter) > before[name]:
            new = (before[name], len(parameter))
            parameter.data[new[0] :] = draw_parameter(twin, recipe, name, seed, rows=new)


LEAST_ELEMENTS = 1 << 20
UNTIED = "untied"
"""Entry of the result of a loading: tied names whose folder holds other values than their source's."""
TRAINED_ONLY = ("masked_spec_embed",)
"""Parameters used only in training, which published folders may lack (wav2vec 2.0)."""


def load_pretrained(
    model: ModelConfig,
    device: torch.device | str,
    settings: ModelConfig | None = None,
    model_class: str | None = None,
    seed: int | None = None,
) -> PreTrainedModel:
    """Model of the folder ``model.path`` with its safetensors weights, fp32, on ``device``.

    Args:
        model_class: as in :func:`build_meta`.
        seed: seed of a new head or of further rows of the vocabulary; None: these count as missing.
        settings: configuration of the model if the folder only gives weights; default: ``model``.

    Raises:
        ModelFolderError: no or damaged weights, or tensors missing, unexpected or of other shapes (tied ones
            excepted), e.g. because ``model.config`` changes the architecture; or tied ones that differ.
    """
    if model.path is None:
        raise ConfigError("model.path", None, "give a Hugging Face model folder")
    folder = whole_folder(model.path)
    check_model_folder(folder)
    config = model_config(settings or model)
    with limit_modules(stored_tensors(folder)):
        meta = build_from(config, model, model_class)
    _check_elements(folder, meta)
    rows = None if seed is None else stored_vocabulary(settings or model, folder)
    stored = copy.deepcopy(config)
    if rows is not None:
        stored.vocab_size = rows
    loaded, info = _load(meta, folder, stored)
    tensors = loaded.state_dict(keep_vars=True)
    info[UNTIED] = {name for name, tied in tied_sources(meta).items() if tensors.get(name) is not tensors.get(tied)}
    scalars_to_vectors(loaded)
    read_recordings_alone(loaded)
    show_pictures_both_ways(loaded)
    if rows is not None and seed is not None:
        add_rows(loaded, meta, seed)
    for name, value in check_loading(model, info, meta, seed).items():
        loaded.get_parameter(name).data.copy_(value)
    for name, parameter in meta.named_parameters():
        if not parameter.requires_grad:  # transformers unfreezes all it loads, even Whisper's fixed positions
            loaded.get_parameter(name).requires_grad_(False)
    freeze_parameters(loaded, model.freeze)
    trained: PreTrainedModel = loaded.to(device).train()
    return trained


def _load(meta: PreTrainedModel, folder: Path, config: PretrainedConfig) -> tuple[Any, dict[str, Any]]:
    """Model of the class of ``meta`` with the weights of ``folder``, and transformers' account of the loading."""
    result: Any = type(meta).from_pretrained(
        str(folder),
        config=config,
        local_files_only=True,
        use_safetensors=True,
        trust_remote_code=False,
        dtype=torch.float32,
        attn_implementation=attention_of_parts(meta.config),
        output_loading_info=True,
        ignore_mismatched_sizes=True,
    )
    loaded, info = result
    return loaded, info


@contextmanager
def limit_modules(tensors: int) -> Iterator[None]:
    """Context that refuses to build a model with far more modules than its weights have ``tensors``.

    Raises:
        ModelFolderError: the model has.
    """
    from torch.nn.modules.module import register_module_module_registration_hook

    built = 0

    def count(*_: object) -> None:
        nonlocal built
        built += 1
        refuse_many_modules(built, tensors)

    hook = register_module_module_registration_hook(count)
    try:
        yield
    finally:
        hook.remove()


def _check_elements(folder: Path, model: PreTrainedModel) -> None:
    """Refuses a model far larger than its weights, before transformers allocates missing tensors."""
    described, stored = sum(tensor.numel() for tensor in model.parameters()), stored_elements(folder)
    if described > 2 * stored + LEAST_ELEMENTS:
        raise ModelFolderError(
            f"model.path={folder}: config.json describes {described:,} parameters, the weights hold {stored:,}; "
            "check config.json and the model.config overrides"
        )


def check_loading(
    model: ModelConfig, info: Mapping[str, Any], twin: PreTrainedModel, seed: int | None
) -> dict[str, torch.Tensor]:
    """Raises for tensors that do not fit, each kind with its first names; returns keyed values of new ones by name.

    With a ``seed``, a folder of another model class may lack tensors of this class (a new head) and may have its own;
    and the head of a classifier may have another number of classes. ``info`` is transformers' result of a loading,
    with :data:`UNTIED`; ``twin`` is the unsharded model on the meta device.
    """
    folder = local_folder(str(model.path))
    if untied := min(info.get(UNTIED) or (), default=None):
        raise ModelFolderError(
            f"model.path={folder}: config.json ties {untied} to {tied_sources(twin)[untied]}, and the folder "
            "holds other values for each; train them apart by model.config.tie_word_embeddings=false"
        )
    mismatched = {entry[0] if isinstance(entry, tuple) else str(entry) for entry in info["mismatched_keys"]}
    missing = set(info["missing_keys"]) - set(tied_sources(twin)) - mismatched
    adapters = {name for name in missing if is_adapter(name)}
    missing -= adapters
    new = _head_of_other_classes(folder, twin, mismatched) if seed is not None else set[str]()
    mismatched -= new
    unexpected = set(info["unexpected_keys"])
    if missing or unexpected:
        shapes = stored_shapes(whole_folder(str(model.path)))
        missing, unexpected = drop_harmless(twin, missing, unexpected, shapes)
    trained_only = {name for name in missing if name.rpartition(".")[2] in TRAINED_ONLY} if seed is not None else set()
    new |= trained_only
    missing -= trained_only
    theirs = _names_of_another_class(folder, twin) if seed is not None and (missing or unexpected) else set()
    if theirs:
        new |= missing - theirs
        missing, unexpected = missing & theirs, unexpected - theirs
    unread = {name for name in missing if name.startswith("pooler.")}  # of a model without a head; see build_from
    new |= unread
    missing -= unread
    problems = _misfits(missing, unexpected, mismatched)
    problems += [first_line(message) for message in info.get("error_msgs") or []]
    if problems:
        raise ModelFolderError(
            f"model.path={folder}: the weights do not fit the configuration; tensors {'; '.join(problems)}; "
            "check config.json and the model.config overrides"
        )
    if not new and not adapters:
        return {}
    assert seed is not None or not (new | adapters) - unread
    if new and (not dist.is_initialized() or dist.get_rank() == 0):
        print_line(f"note: model.path={folder}: has no {', '.join(sorted(new))}: newly initialised", file=sys.stderr)
    recipe = recipe_of(twin)
    return {name: draw_parameter(twin, recipe, name, seed or 0) for name in sorted(new | adapters)}


def _misfits(missing: set[str], unexpected: set[str], mismatched: set[str]) -> list[str]:
    """Each kind of tensor that does not fit, with its first names."""
    return [
        f"{len(names)} {kind}: {', '.join(sorted(names)[:3])}{', ...' if len(names) > 3 else ''}"
        for kind, names in (("missing", missing), ("unexpected", unexpected), ("of another shape", mismatched))
        if names
    ]


def _head_of_other_classes(folder: Path, twin: PreTrainedModel, names: set[str]) -> set[str]:
    """Subset of ``names`` with a row per class, if the folder's model has another number of classes."""
    stored = read_config_json(folder)
    before = len(stored.get("id2label") or ()) or stored.get("num_labels", 2)  # transformers' default
    now, tensors = twin.config.num_labels, twin.state_dict()
    return set() if before == now else {name for name in names if tensors[name].shape[:1] == (now,)}


def _names_of_another_class(folder: Path, twin: PreTrainedModel) -> set[str]:
    """Tensor names of the folder's architecture if it is another class than ``twin``'s, else none."""
    import transformers

    named = next(iter(read_config_json(folder).get("architectures") or ()), None)
    folder_class = getattr(transformers, str(named), None)
    if not (isinstance(folder_class, type) and issubclass(folder_class, transformers.PreTrainedModel)) or isinstance(
        twin, folder_class
    ):
        return set()
    with torch.device("meta"):
        names = set(folder_class(twin.config).state_dict())
    return names | {f"{twin.base_model_prefix}.{name}" for name in names}
