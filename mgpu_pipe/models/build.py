"""Models from a configuration on the meta device, and their keyed initial weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import nn

from mgpu_pipe.config.objective import description
from mgpu_pipe.config.schema import ModelConfig, RunConfig
from mgpu_pipe.errors import ConfigError
from mgpu_pipe.models.adapters.lora import adapter_of, add_adapters, is_adapter
from mgpu_pipe.models.adapters.qlora import pack, packed_weight
from mgpu_pipe.models.field_ranges import refused_activation, unknown_activations
from mgpu_pipe.models.fields import (
    HEADLESS,
    builder_of,
    check_model_config,
    class_of_folder,
    given_fields,
    model_key,
    with_floats,
)
from mgpu_pipe.models.init.keyed_init import InitRecipe
from mgpu_pipe.models.local_shards import TensorPart, fill_parameters
from mgpu_pipe.models.model_parts import freeze_parameters, show_pictures_both_ways
from mgpu_pipe.models.shard_units import scalars_to_vectors
from mgpu_pipe.models.speech import read_recordings_alone

REFUSALS = (
    TypeError,
    ValueError,
    LookupError,
    AttributeError,
    AssertionError,
    ArithmeticError,
    RuntimeError,
    StrictDataclassError,
)
"""Errors of transformers for fields that do not fit together."""

IGNORED_FIELDS = {
    "auto_map",
    "custom_pipelines",
    "quantization_config",
    "compression_config",
    "dtype",
    "torch_dtype",
    "attn_implementation",
    "_attn_implementation",
    "_attn_implementation_internal",
    "experts_implementation",
    "_experts_implementation",
    "_experts_implementation_internal",
    "name_or_path",
    "_name_or_path",
    "use_kernels",
}
"""Fields of a folder's config.json to ignore: code and kernels to fetch and run, other folders, the type of numbers
(``precision`` decides it, and old folders write ``torch.bfloat16``)."""

MATCHES_TOKENS = "_matches_tokens"
"""Attribute of a model whose attention starts on equal tokens, see ``objective.match_tokens`` of rerankers."""
MATCHING_SHARE = 0.25
"""Factor of the first embeddings of positions and text types of such a model, so that tokens outweigh them."""

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel


def model_config(model: ModelConfig) -> PretrainedConfig:
    """transformers configuration of ``model``: of its folder or type, with ``model.config`` applied.

    It is always fp32: the precision policy casts, not the model.

    Raises:
        ConfigError: the configuration class refuses a value.
        ConfigErrors: unknown type or fields.
        ModelFolderError: a folder without a readable ``config.json``.
    """
    from transformers import AutoConfig

    check_model_config(model)
    fields = _without(IGNORED_FIELDS, given_fields(model)) if model.path is not None else given_fields(model)
    model_type = str(fields.pop("model_type", None) or model.type)
    try:
        config = AutoConfig.for_model(model_type, **with_floats(fields, model_type))
    except REFUSALS as error:
        raise _refusal(model, error) from error
    config.dtype = torch.float32
    if config.is_encoder_decoder and getattr(config, "decoder_start_token_id", None) is None:
        config.decoder_start_token_id = config.pad_token_id  # like T5, whose class leaves it out
    return config


def run_model(config: RunConfig) -> PreTrainedModel:
    """Model of a run on the meta device, of its objective's class, with adapters; see :func:`build_meta`."""
    model = build_meta(config.model, description(config.objective.name).model_class)
    setattr(model, MATCHES_TOKENS, getattr(config.objective, "match_tokens", False))
    add_adapters(model, config.peft)
    for name in config.objective.untrained({name: value.numel() for name, value in model.named_parameters()}):
        model.get_parameter(name).requires_grad_(False)
    return model


def build_meta(model: ModelConfig, model_class: str | None = None) -> PreTrainedModel:
    """Model on the meta device: fp32, ties kept, ``model.freeze`` applied, in training mode; by the folder's class
    without ``model_class``."""
    built = build_from(model_config(model), model, model_class)
    freeze_parameters(built, model.freeze)
    return built


def recipe_of(model: PreTrainedModel) -> InitRecipe:
    """Initialisation of the tensors of a model, perhaps cut or moved, recorded on a twin of its configuration."""

    def untied_twin() -> nn.Module:
        with _without_tying():
            twin = type(model)(model.config)
        add_adapters(twin, adapter_of(model).without_quantisation())
        return twin

    return InitRecipe.record(untied_twin, model.config.model_type)


def materialise(model: PreTrainedModel, seed: int, device: torch.device | str) -> PreTrainedModel:
    """Gives a meta ``model`` its keyed initial parameters and its buffers, in place; ties are kept.

    A sharded parameter gets only its part. The largest allocation is that part, or one whole parameter whose
    initialisation cannot be cut.

    Args:
        device: device of parameters and buffers.

    Raises:
        ConfigError: a tensor of this family has no initialisation that can be recorded.
    """
    recipe = recipe_of(model)

    def draw(name: str, part: TensorPart) -> torch.Tensor:
        values = draw_parameter(model, recipe, name, seed, "cpu", part.rows)
        return part.narrow(values)

    fill_parameters(model, draw, device)
    materialise_buffers(model, recipe, device)
    return model


def materialise_empty(model: PreTrainedModel, device: torch.device | str) -> PreTrainedModel:
    """Like :func:`materialise` with uninitialised parameters, before weights are read."""
    fill_parameters(model, lambda name, part: torch.empty(part.shape), device)
    materialise_buffers(model, recipe_of(model), device)
    return model


def draw_parameter(
    model: PreTrainedModel,
    recipe: InitRecipe,
    name: str,
    seed: int,
    device: torch.device | str = "cpu",
    rows: tuple[int, int] | None = None,
) -> torch.Tensor:
    """Initial value of the parameter ``name`` or a range of its rows; a tied one takes the source's, under its key."""
    quantised = packed_weight(model, name)
    if quantised is not None:
        packed = pack(model, name, recipe.draw(quantised, seed)).to(device)
        return packed if rows is None else packed[slice(*rows)]
    source, key, factor = tied_sources(model).get(name, name), name, 1.0
    if getattr(model, MATCHES_TOKENS, False):
        if name.endswith(".key.weight"):
            source = key = name.removesuffix("key.weight") + "query.weight"
        elif name.endswith((".position_embeddings.weight", ".token_type_embeddings.weight")):
            factor = MATCHING_SHARE
    if rows is None:
        values = recipe.draw(source, seed, device, key=key)
        values = values if values.dim() else values.reshape(1)
    else:
        values = recipe.draw_rows(source, seed, *rows, device, key=key)
    return values if factor == 1 else values.mul_(factor)


def draw_adapters(model: PreTrainedModel, seed: int) -> None:
    """Gives the adapters of ``model`` their keyed initial values, in place; other weights are already loaded."""
    adapters = {name: parameter for name, parameter in model.named_parameters() if is_adapter(name)}
    recipe = recipe_of(model) if adapters else None
    for name, parameter in adapters.items():
        assert recipe is not None
        parameter.data.copy_(draw_parameter(model, recipe, name, seed))


def tied_sources(model: PreTrainedModel) -> dict[str, str]:
    """Source of each tied name."""
    return dict(getattr(model, "all_tied_weights_keys", None) or {})


def materialise_buffers(model: nn.Module, recipe: InitRecipe, device: torch.device | str) -> None:
    """Rebuilds every meta buffer (rotary tables, masks) and every meta tensor in a plain attribute, in place."""
    for prefix, module in model.named_modules():
        for holder in (module._buffers, module.__dict__):
            for name, value in holder.items():
                if isinstance(value, torch.Tensor) and value.is_meta:
                    holder[name] = recipe.draw(f"{prefix}.{name}" if prefix else name, 0, device)


def _without(names: set[str], value: Any) -> Any:
    """Copy of nested mappings without the keys ``names``."""
    if isinstance(value, Mapping):
        return {key: _without(names, item) for key, item in value.items() if key not in names}
    return value


def build_from(config: PretrainedConfig, model: ModelConfig, model_class: str | None = None) -> PreTrainedModel:
    """Model of ``config`` on the meta device, in training mode; see :func:`build_meta`."""
    import transformers

    chosen = model_class or class_of_folder(
        config.model_type, config.architectures, getattr(config, "tie_word_embeddings", True)
    )
    maker = getattr(transformers, builder_of(config.model_type, chosen))
    wanted = None if model.attn_implementation == "auto" else model.attn_implementation
    try:
        with torch.device("meta"):
            built = maker.from_config(config, attn_implementation=wanted, dtype=torch.float32)
    except ImportError as error:
        key, value = ("model.attn_implementation", wanted) if wanted else model_key(model)
        fix = f"install that package or use {'auto' if wanted else 'another family'}"
        raise ConfigError(key, value, fix, first_line(error)) from error
    except REFUSALS as error:
        if wanted is not None and "attention" in str(error).lower():
            raise ConfigError("model.attn_implementation", wanted, "use auto", first_line(error)) from error
        raise _refusal(model, error) from error
    scalars_to_vectors(built)
    read_recordings_alone(built)
    show_pictures_both_ways(built)
    if model_class == HEADLESS and (pooler := getattr(built, "pooler", None)) is not None:
        pooler.requires_grad_(False)  # no state of a token goes through it
    return built.train()


def _refusal(model: ModelConfig, error: Exception) -> ConfigError:
    for key, name in unknown_activations(model):
        if isinstance(error, LookupError) and name in str(error):
            return refused_activation(key, name)
    reason = f"transformers refuses this configuration: {first_line(error)}"
    return ConfigError(*model_key(model), "change model.config", reason)


def first_line(error: object) -> str:
    """Message of a library on one line, at most 300 characters."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(lines)[:300] if lines else type(error).__name__


@contextmanager
def _without_tying() -> Iterator[None]:
    """Context that builds models with untied parameters, so that each records its initialisation."""
    from transformers import PreTrainedModel

    original = PreTrainedModel.tie_weights
    setattr(PreTrainedModel, "tie_weights", lambda self, *args, **kwargs: None)  # noqa: B010
    try:
        yield
    finally:
        setattr(PreTrainedModel, "tie_weights", original)  # noqa: B010
