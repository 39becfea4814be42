"""Models from a configuration on the meta device, and their keyed initial weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import nn

from mgpu_pipe.config.hub import local_folder
from mgpu_pipe.config.objective import description
from mgpu_pipe.config.schema import ModelConfig, RunConfig
from mgpu_pipe.errors import ConfigError
from mgpu_pipe.models.adapters.lora import adapter_of, add_adapters, is_adapter
from mgpu_pipe.models.adapters.qlora import pack, packed_weight
from mgpu_pipe.models.fields import LABELS, check_model_config, class_of, maker_of
from mgpu_pipe.models.folder import read_config_json
from mgpu_pipe.models.freezing import freeze_parameters
from mgpu_pipe.models.keyed_init import InitRecipe
from mgpu_pipe.models.parts import PartOf, fill_parameters
from mgpu_pipe.models.scalars import scalars_to_vectors

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
"""What transformers raises on fields that do not fit together; it has no class of its own for that."""

NOT_FOLLOWED = {
    "auto_map",
    "custom_pipelines",
    "quantization_config",
    "compression_config",
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
"""What a folder's config.json may not decide: code and kernels to be fetched and run, other folders."""

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel


def model_config(model: ModelConfig) -> PretrainedConfig:
    """The transformers configuration of ``model``: its folder's or its type's, with ``model.config`` applied.

    Always fp32: the precision policy casts, not the model.

    Raises:
        ConfigError: values that the configuration class refuses.
        ConfigErrors: unknown type or fields.
        ModelFolderError: a folder without a readable ``config.json``.
    """
    from transformers import AutoConfig

    check_model_config(model)
    fields: dict[str, Any] = {}
    if model.path is not None:
        fields.update(_without(NOT_FOLLOWED, read_config_json(local_folder(model.path))))
    model_type = str(fields.pop("model_type", None) or model.type)
    for name, value in model.config.items():
        merges = name not in LABELS and _both_mappings(fields.get(name), value)
        fields[name] = {**fields[name], **value} if merges else value
    try:
        config = AutoConfig.for_model(model_type, **fields)
    except REFUSALS as error:
        raise _refused(model, error) from error
    config.dtype = torch.float32
    if config.is_encoder_decoder and getattr(config, "decoder_start_token_id", None) is None:
        config.decoder_start_token_id = config.pad_token_id  # as of T5, whose class leaves it out
    return config


def run_model(config: RunConfig) -> PreTrainedModel:
    """The model of a run on the meta device, of the class that its objective trains, with its adapters; see
    :func:`build_meta`.
    """
    model = build_meta(config.model, description(config.objective.name).model_class)
    add_adapters(model, config.peft)
    return model


def build_meta(model: ModelConfig, model_class: str | None = None) -> PreTrainedModel:
    """The model on the meta device: fp32 parameters, tied weights tied, ``model.freeze`` frozen, in training mode.

    Args:
        model_class: transformers' ``AutoModelFor...``; None: the folder's, as its ``architectures`` say, else that of
            causal language models.
    """
    built = build_from(model_config(model), model, model_class)
    freeze_parameters(built, model.freeze)
    return built


def recipe_of(model: PreTrainedModel) -> InitRecipe:
    """How ``model``'s tensors are initialised, recorded on a twin made from its configuration.

    ``model`` itself may already be cut, sharded or moved: only its class and configuration are used.
    """

    def untied_twin() -> nn.Module:
        with _without_tying():
            twin = type(model)(model.config)
        add_adapters(twin, adapter_of(model).unquantised())
        return twin

    return InitRecipe.record(untied_twin, model.config.model_type)


def materialise(model: PreTrainedModel, seed: int, device: torch.device | str) -> PreTrainedModel:
    """Give a meta ``model`` its keyed initial parameters and its buffers, in place; ties are kept.

    A parameter that is sharded already gets its own part alone: nothing larger than that part, or than one whole
    parameter whose initialisation cannot be cut, is ever allocated.

    Args:
        device: where both belong; of parameters that stay on the meta device only.

    Raises:
        ConfigError: a tensor of this family has no initialisation that can be recorded.
    """
    recipe = recipe_of(model)

    def draw(name: str, box: PartOf) -> torch.Tensor:
        part = draw_parameter(model, recipe, name, seed, "cpu", box.rows)
        return box.rest_of(part)

    fill_parameters(model, draw, device)
    materialise_buffers(model, recipe, device)
    return model


def materialise_empty(model: PreTrainedModel, device: torch.device | str) -> PreTrainedModel:
    """Like :func:`materialise`, with parameters that hold nothing yet, for weights that are about to be read."""
    fill_parameters(model, lambda name, box: torch.empty(box.shape), device)
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
    """The initial value of the parameter that ``named_parameters()`` calls ``name``, or a range of its rows.

    A tied parameter takes its values from the side that transformers ties the others to, under ``name``'s key.
    """
    quantised = packed_weight(model, name)
    if quantised is not None:
        packed = pack(model, name, recipe.draw(quantised, seed)).to(device)
        return packed if rows is None else packed[slice(*rows)]
    source = tied_sources(model).get(name, name)
    if rows is None:
        whole = recipe.draw(source, seed, device, key=name)
        return whole if whole.dim() else whole.reshape(1)
    return recipe.draw_rows(source, seed, *rows, device, key=name)


def draw_adapters(model: PreTrainedModel, seed: int) -> None:
    """Give the adapters of ``model``, whose own weights are loaded, their keyed initial values, in place."""
    adapters = {name: parameter for name, parameter in model.named_parameters() if is_adapter(name)}
    recipe = recipe_of(model) if adapters else None
    for name, parameter in adapters.items():
        assert recipe is not None
        parameter.data.copy_(draw_parameter(model, recipe, name, seed))


def tied_sources(model: PreTrainedModel) -> dict[str, str]:
    """For each tied name, the name whose values it takes."""
    return dict(getattr(model, "all_tied_weights_keys", None) or {})


def materialise_buffers(model: nn.Module, recipe: InitRecipe, device: torch.device | str) -> None:
    """Rebuild every meta buffer (rotary tables, masks) and every meta tensor held as a plain attribute, in place."""
    for prefix, module in model.named_modules():
        for holder in (module._buffers, module.__dict__):
            for name, value in holder.items():
                if isinstance(value, torch.Tensor) and value.is_meta:
                    holder[name] = recipe.draw(f"{prefix}.{name}" if prefix else name, 0, device)


def _without(names: set[str], value: Any) -> Any:
    """A copy of nested mappings without these keys."""
    if isinstance(value, Mapping):
        return {key: _without(names, item) for key, item in value.items() if key not in names}
    return value


def build_from(config: PretrainedConfig, model: ModelConfig, model_class: str | None = None) -> PreTrainedModel:
    """The model of ``config`` on the meta device, in training mode; see :func:`build_meta`."""
    import transformers

    maker = getattr(transformers, maker_of(config.model_type, model_class or class_of(config.architectures)))
    wanted = None if model.attn_implementation == "auto" else model.attn_implementation
    try:
        with torch.device("meta"):
            built = maker.from_config(config, attn_implementation=wanted, dtype=torch.float32)
    except ImportError as error:
        fix = "install that package or use auto"
        raise ConfigError("model.attn_implementation", model.attn_implementation, fix, first_line(error)) from error
    except REFUSALS as error:
        if wanted is not None and "attention" in str(error).lower():
            raise ConfigError("model.attn_implementation", wanted, "use auto", first_line(error)) from error
        raise _refused(model, error) from error
    scalars_to_vectors(built)
    return built.train()


def _refused(model: ModelConfig, error: Exception) -> ConfigError:
    key, value = ("model.type", model.type) if model.path is None else ("model.path", model.path)
    return ConfigError(
        key, value, "change model.config", f"transformers refuses this configuration: {first_line(error)}"
    )


def _both_mappings(*values: object) -> bool:
    return all(isinstance(value, Mapping) for value in values)


def first_line(error: object) -> str:
    """The first telling line of a library's message."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(lines)[:300] if lines else type(error).__name__


@contextmanager
def _without_tying() -> Iterator[None]:
    """Build models whose tied parameters are still separate, so that each records its own initialisation."""
    from transformers import PreTrainedModel

    original = PreTrainedModel.tie_weights
    setattr(PreTrainedModel, "tie_weights", lambda self, *args, **kwargs: None)  # noqa: B010
    try:
        yield
    finally:
        setattr(PreTrainedModel, "tie_weights", original)  # noqa: B010
