"""Models from a configuration or a local folder; with save.py and attention.py, all that touches transformers' API."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from huggingface_hub.errors import StrictDataclassError
from torch import nn

from mgpu_pipe.compat.transformers_private import attention_of
from mgpu_pipe.config.objective import description
from mgpu_pipe.config.schema import ModelConfig, RunConfig
from mgpu_pipe.errors import ConfigError, ModelFolderError
from mgpu_pipe.models.fields import LABELS, check_model_config, class_of
from mgpu_pipe.models.folder import check_model_folder, read_config_json, stored_elements, stored_tensors
from mgpu_pipe.models.freezing import freeze_parameters
from mgpu_pipe.models.keyed_init import InitRecipe
from mgpu_pipe.models.parts import PartOf, fill_parameters

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
MODULES_A_TENSOR, LEAST_MODULES = 32, 4096
"""Modules that a model may have for each tensor of its weights, and always."""
LEAST_ELEMENTS = 1 << 20

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
        fields.update(_without(NOT_FOLLOWED, read_config_json(Path(model.path).expanduser())))
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
    """The model of a run on the meta device, of the class that its objective trains; see :func:`build_meta`."""
    return build_meta(config.model, description(config.objective.name).model_class)


def build_meta(model: ModelConfig, model_class: str | None = None) -> PreTrainedModel:
    """The model on the meta device: fp32 parameters, tied weights tied, ``model.freeze`` frozen, in training mode.

    Args:
        model_class: transformers' ``AutoModelFor...``; None: the folder's, as its ``architectures`` say, else that of
            causal language models.
    """
    built = _build_meta(model_config(model), model, model_class)
    freeze_parameters(built, model.freeze)
    return built


def recipe_of(model: PreTrainedModel) -> InitRecipe:
    """How ``model``'s tensors are initialised, recorded on a twin made from its configuration.

    ``model`` itself may already be cut, sharded or moved: only its class and configuration are used.
    """

    def untied_twin() -> nn.Module:
        with _without_tying():
            return type(model)(model.config)

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
    source = tied_sources(model).get(name, name)
    if rows is None:
        return recipe.draw(source, seed, device, key=name)
    return recipe.draw_rows(source, seed, *rows, device, key=name)


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


def load_pretrained(
    model: ModelConfig,
    device: torch.device | str,
    settings: ModelConfig | None = None,
    model_class: str | None = None,
    seed: int | None = None,
) -> PreTrainedModel:
    """The model of the local folder ``model.path`` with its safetensors weights, fp32, on ``device``.

    Args:
        model_class: as of :func:`build_meta`.
        seed: of tensors that the folder's own class does not have, a new head's; None: they are missing.
        settings: says what the model is, where the folder gives its weights alone; else ``model`` does.

    Raises:
        ModelFolderError: no or damaged weights, or tensors missing, unexpected or of other shapes (tied ones
            excepted), e.g. because ``model.config`` changes the architecture.
    """
    if model.path is None:
        raise ConfigError("model.path", None, "give a Hugging Face model folder")
    folder = Path(model.path).expanduser()
    check_model_folder(folder)
    config = model_config(settings or model)
    with at_most(stored_tensors(folder)):
        meta = _build_meta(config, model, model_class)
    _check_elements(folder, meta)
    result: Any = type(meta).from_pretrained(
        str(folder),
        config=config,
        local_files_only=True,
        use_safetensors=True,
        trust_remote_code=False,
        dtype=torch.float32,
        attn_implementation=attention_of(meta.config),
        output_loading_info=True,
        ignore_mismatched_sizes=True,
    )
    loaded, info = result
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

    most, made = LEAST_MODULES + MODULES_A_TENSOR * tensors, 0

    def count(*_: object) -> None:
        nonlocal made
        made += 1
        if made > most:
            raise ModelFolderError(
                f"the configuration describes more than {most:,} modules, the weights hold {tensors:,} tensors: they "
                "do not belong together; look at its numbers of layers and experts"
            )

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


def _without(names: set[str], value: Any) -> Any:
    """A copy of nested mappings without these keys."""
    if isinstance(value, Mapping):
        return {key: _without(names, item) for key, item in value.items() if key not in names}
    return value


def _build_meta(config: PretrainedConfig, model: ModelConfig, model_class: str | None = None) -> PreTrainedModel:
    import transformers

    maker = getattr(transformers, model_class or class_of(config.architectures))
    wanted = None if model.attn_implementation == "auto" else model.attn_implementation
    try:
        with torch.device("meta"):
            built = maker.from_config(config, attn_implementation=wanted, dtype=torch.float32)
    except ImportError as error:
        fix = "install that package or use auto"
        raise ConfigError("model.attn_implementation", model.attn_implementation, fix, _first_line(error)) from error
    except REFUSALS as error:
        if wanted is not None and "attention" in str(error).lower():
            raise ConfigError("model.attn_implementation", wanted, "use auto", _first_line(error)) from error
        raise _refused(model, error) from error
    return built.train()


def _refused(model: ModelConfig, error: Exception) -> ConfigError:
    key, value = ("model.type", model.type) if model.path is None else ("model.path", model.path)
    return ConfigError(
        key, value, "change model.config", f"transformers refuses this configuration: {_first_line(error)}"
    )


def check_loading(
    model: ModelConfig, info: Mapping[str, Any], twin: PreTrainedModel, seed: int | None
) -> dict[str, torch.Tensor]:
    """Raise for tensors that did not find their place, each kind listed with its first names.

    Where ``seed`` is given, tensors are no fault of a folder of another class of model that this class alone has (a
    new head), or that one alone (its own).

    Args:
        info: what transformers says of a loading: ``missing_keys``, ``unexpected_keys``, ``mismatched_keys``.
        twin: the model on the meta device, not split.

    Returns:
        The keyed initial values of the new ones, by name.
    """
    folder = Path(str(model.path)).expanduser()
    mismatched = {entry[0] if isinstance(entry, tuple) else str(entry) for entry in info["mismatched_keys"]}
    missing = set(info["missing_keys"]) - set(tied_sources(twin)) - mismatched
    unexpected, new = set(info["unexpected_keys"]), set[str]()
    theirs = _names_of_another_class(folder, twin) if seed is not None and (missing or unexpected) else set()
    if theirs:
        new = missing - theirs
        missing, unexpected = missing & theirs, unexpected - theirs
    problems = [
        f"{len(names)} {kind}: {', '.join(sorted(names)[:3])}{', ...' if len(names) > 3 else ''}"
        for kind, names in (("missing", missing), ("unexpected", unexpected), ("of another shape", mismatched))
        if names
    ]
    problems += [_first_line(message) for message in info.get("error_msgs") or []]
    if problems:
        raise ModelFolderError(
            f"model.path={folder}: the weights do not fit the configuration; tensors {'; '.join(problems)}; "
            "check config.json and the model.config overrides"
        )
    if not new:
        return {}
    assert seed is not None
    if not dist.is_initialized() or dist.get_rank() == 0:
        print(f"note: model.path={folder}: has no {', '.join(sorted(new))}: newly initialised", file=sys.stderr)
    recipe = recipe_of(twin)
    return {name: draw_parameter(twin, recipe, name, seed) for name in sorted(new)}


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


def _both_mappings(*values: object) -> bool:
    return all(isinstance(value, Mapping) for value in values)


def _first_line(error: object) -> str:
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
