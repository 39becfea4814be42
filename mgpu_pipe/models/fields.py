"""Checks ``model.type`` and ``model.config.*`` against the model's configuration class."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from mgpu_pipe.architectures.config_source import (
    NO_DEFAULT,
    ConfigClass,
    auto_mapping,
    config_class,
    package_folder,
    rope_parameter_names,
)
from mgpu_pipe.architectures.find import family_of
from mgpu_pipe.architectures.pictures import picture_places
from mgpu_pipe.config.convert import merge
from mgpu_pipe.config.hub import local_folder
from mgpu_pipe.config.hydra.interpolation import EnvironmentText
from mgpu_pipe.config.objective import descriptions
from mgpu_pipe.config.schema import ModelConfig
from mgpu_pipe.config.suggest import MODEL_FIELDS, nearest
from mgpu_pipe.errors import BadInputError, ConfigError, ConfigErrors
from mgpu_pipe.models.field_sizes import size_errors
from mgpu_pipe.models.field_types import accepts, check_rotary, describe, floats_of
from mgpu_pipe.models.weights.folder import read_config_json

SET_ELSEWHERE = {
    "attn_implementation": "use model.attn_implementation",
    "dtype": "use precision=fp32 or precision=bf16",
    "torch_dtype": "use precision=fp32 or precision=bf16",
    "model_type": "use model.type",
    "name_or_path": "use model.path",
}
"""Fields of every configuration class that another key of this program sets."""
HEADLESS = "AutoModel"
"""Class of models without a head."""
MODEL_CLASSES = {
    "AutoModelForCausalLM": ("MODEL_FOR_CAUSAL_LM_MAPPING_NAMES", "causal language model"),
    "AutoModelForSeq2SeqLM": ("MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES", "sequence-to-sequence model"),
    "AutoModelForMaskedLM": ("MODEL_FOR_MASKED_LM_MAPPING_NAMES", "masked language model"),
    "AutoModelForImageClassification": ("MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES", "image classifier"),
    "AutoModelForZeroShotImageClassification": (
        "MODEL_FOR_ZERO_SHOT_IMAGE_CLASSIFICATION_MAPPING_NAMES",
        "model of pictures and texts",
    ),
    "AutoModelForImageTextToText": ("MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES", "vision-language model"),
    "AutoModelForCTC": ("MODEL_FOR_CTC_MAPPING_NAMES", "model of speech"),
    "AutoModelForAudioClassification": ("MODEL_FOR_AUDIO_CLASSIFICATION_MAPPING_NAMES", "sound classifier"),
    "AutoModelForSpeechSeq2Seq": ("MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES", "model that writes down speech"),
    "AutoModelForSequenceClassification": ("MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES", "sequence classifier"),
    HEADLESS: ("MODEL_MAPPING_NAMES", "model without a head"),
}
"""transformers' ``AutoModelFor...``, likeliest first: table of its types, and what it builds."""
EXTRA_TYPES = {
    "AutoModelForZeroShotImageClassification": {"vision-text-dual-encoder": ("VisionTextDualEncoderModel", HEADLESS)},
    "AutoModelForImageTextToText": {
        "phi4_multimodal": ("Phi4MultimodalForCausalLM", "AutoModelForCausalLM"),
        "qwen2_audio": ("Qwen2AudioForConditionalGeneration", "AutoModelForSeq2SeqLM"),
        "voxtral": ("VoxtralForConditionalGeneration", "AutoModelForSeq2SeqLM"),
    },
}
"""Types missing in these tables: class, and the ``AutoModel...`` that builds it."""
TEXT = "text_config"
"""Field of a model's text part."""
VISION = "vision_config"
"""Field of a model's vision part."""
CAUSAL = "is_causal"
"""Field that, when false, makes transformers' masks show later tokens in every family."""
LABELS = ("id2label", "label2id")
"""Lists of a classifier's classes; an override replaces the whole list."""
PROBLEM = "problem_type"
"""Kind of a classifier: one class a sample, or several."""
ALPHABET = {
    "AutoModelForCTC": ("vocab_size", "pad_token_id"),
    "AutoModelForSpeechSeq2Seq": (
        *(f"{name}_token_id" for name in ("bos", "eos", "pad", "decoder_start")),
        *("suppress_tokens", "begin_suppress_tokens"),
    ),
}
"""Fields that the alphabet of transcripts decides, by model class."""
WIDTHS = ("hidden_size", "intermediate_size")
"""Fields that decide the width of all weights; a vocabulary may get new rows instead."""


class ModelClassError(ConfigError):
    """transformers has no model of that type for the objective."""


def model_types(model_class: str = "AutoModelForCausalLM") -> list[str]:
    """Model types for which transformers has ``model_class``, one of :data:`MODEL_CLASSES`."""
    return sorted({*auto_mapping(MODEL_CLASSES[model_class][0]), *EXTRA_TYPES.get(model_class, {})})


def builder_of(model_type: str, model_class: str) -> str:
    """Name of transformers' class that builds a model of ``model_type`` and ``model_class``."""
    return EXTRA_TYPES.get(model_class, {}).get(model_type, ("", model_class))[1]


def class_of(architectures: Iterable[str] | None) -> str:
    """transformers' ``AutoModelFor...`` of models of ``architectures``; default: causal language models."""
    named = [str(architecture).removeprefix("FSDP") for architecture in architectures or ()]
    for name, extra in EXTRA_TYPES.items():
        if set(named) & {architecture for architecture, _ in extra.values()}:
            return name
    for name, (table, _) in MODEL_CLASSES.items():
        if set(named) & set(auto_mapping(table).values()):
            return name
    return "AutoModelForCausalLM"


def class_of_folder(model_type: str, architectures: Iterable[str] | None, is_tied: bool) -> str:
    """:func:`class_of` for a folder's weights; a causal language model may be stored without its head if that is
    tied."""
    named = class_of(architectures)
    has_head = is_tied and named == HEADLESS and model_type in model_types() and model_type not in _headless_types()
    return "AutoModelForCausalLM" if has_head else named


def _headless_types() -> set[str]:
    """Model types that an objective trains without a head; decoders have one elsewhere."""
    trained = (known.families or model_types(HEADLESS) for known in descriptions() if known.model_class == HEADLESS)
    return {name for families in trained for name in families if not family_of(name).bidirectional}


def config_fields(model_type: str) -> set[str] | None:
    """Keywords of the configuration class of ``model_type``; None if its source is not found."""
    cls = config_class(model_type)
    return None if cls is None else cls.names - set(SET_ELSEWHERE)


def check_model_config(model: ModelConfig, model_class: str | None = None) -> None:
    """Raises for all mistakes of ``model`` that the source of its configuration class shows.

    Args:
        model_class: class to build, one of :data:`MODEL_CLASSES`; None: any of them, and without a head only types
            that an objective trains so.

    Raises:
        ConfigErrors: neither or both of ``model.type`` and ``model.path``, an unknown type, an unknown field (with
            the nearest known one), a value of another type than the field's, heads that do not divide; or an
            interpreter that drops docstrings, from which transformers builds its models' classes.
        ModelFolderError: ``model.path`` has no readable ``config.json``.
    """
    errors: list[BadInputError] = []
    if model.type is None and model.path is None:
        errors.append(ConfigError("model.type", None, "choose a model, e.g. model=llama_tiny, or give model.path"))
    elif model.type is not None and model.path is not None:
        errors.append(ConfigError("model.type", model.type, "leave it out: model.path names the model's folder"))
    if errors:
        raise ConfigErrors(errors)
    if package_folder() is None:
        raise ConfigErrors([ConfigError("model.type", model.type, "install transformers")])
    if sys.flags.optimize > 1:
        fix, reason = "unset it or use 1, and leave -OO out", "transformers reads docstrings, which it removes"
        raise ConfigErrors([ConfigError("PYTHONOPTIMIZE", sys.flags.optimize, fix, reason)])
    model_type = _model_type(model)
    classes = [model_class] if model_class else [name for name in MODEL_CLASSES if name != HEADLESS]
    types = {name for known_class in classes for name in model_types(known_class)}
    if model_type not in types and (model_class or model_type not in _headless_types()):
        close, kind = nearest(model_type, types), MODEL_CLASSES[classes[0]][1]
        a = "an" if kind.startswith("image") else "a"
        exists = any(model_type in model_types(known_class) for known_class in MODEL_CLASSES)
        fix = f"did you mean {close}?" if close and not exists else f"use {a} {kind}"
        thinker = given_fields(model).get("thinker_config")
        name = auto_mapping(MODEL_CLASSES[classes[0]][0]).get(thinker.get("model_type"), "") if thinker else ""
        if name:  # a published whole folder of Qwen-Omni, whose thinker alone is trained
            saved = f"transformers.{name}.from_pretrained(folder).save_pretrained(new)"
            fix = f"write a folder of its thinker: {saved}, and copy the tokenizer and preprocessor files"
        raise ModelClassError(*model_key(model), fix, f"transformers has no {kind} {model_type}")
    known = config_class(model_type)
    if known is not None:
        parts = given_fields(model).items()
        kinds = {name: part_type(model_type, name, part) for name, part in parts if _is_part(name, part)}
        kinds[""] = model_type
        settings = model.config.items()
        errors = [error for name, value in settings for error in _check_field(known, name, value, kinds)]
        errors += [] if errors else _check_rotary_parts(model.config, given_fields(model), model_type)
        fields = resolved_fields(model)
        needs = family_of(model_type).needs.items()
        errors += [ConfigError(f"model.config.{name}", None, fix) for name, fix in needs if fields.get(name) is None]
        errors += [] if errors else [*_check_heads(fields, known), *_check_folder_sizes(model, known.attribute_map)]
    errors += [] if errors else size_errors(resolved_fields(model), model, part_type)
    if errors:
        raise ConfigErrors(errors)


def model_key(model: ModelConfig) -> tuple[str, str | None]:
    """Key that names the model, and its value."""
    return ("model.type", model.type) if model.path is None else ("model.path", model.path)


def given_fields(model: ModelConfig) -> dict[str, Any]:
    """Folder's ``config.json`` with ``model.config`` merged in at every depth, but lists of classes replaced."""
    folder = read_config_json(local_folder(model.path)) if model.path is not None else {}
    known = config_class(str(folder.get("model_type", model.type))) or ConfigClass()
    before, after = (
        {known.attribute_map.get(name, name): value for name, value in fields.items()}
        for fields in (folder, model.config)
    )
    both_ways = {CAUSAL: False} if model.bidirectional else {}
    merged_fields = {n: value if n in LABELS else merge(before.get(n), value) for n, value in after.items()}
    return {**before, **merged_fields, **both_ways}


def resolved_fields(model: ModelConfig) -> dict[str, Any]:
    """Known fields of the model: literal defaults, the folder's ``config.json``, overrides.

    They include standard names (``hidden_size``, ``num_hidden_layers``, ``num_attention_heads``, ...) next to the
    class's names. A composite model's fields are those of its ``text_config``.
    """
    known = config_class(_model_type(model)) or ConfigClass()
    own_names = known.attribute_map
    overrides = given_fields(model)
    defaults = {own_names.get(name, name): value for name, value in known.defaults.items() if value is not NO_DEFAULT}
    resolved = {**defaults, **overrides}
    nested = resolved.get(TEXT)
    if isinstance(nested, Mapping):
        resolved = {**part_fields(_model_type(model), TEXT, nested), **resolved, **nested}
    resolved.update({standard: resolved[name] for standard, name in own_names.items() if name in resolved})
    return {**resolved, "model_type": _model_type(model)}


def model_fields(model: ModelConfig) -> dict[str, Any]:
    """The model's configuration fields that are known without torch; empty without a valid model."""
    if (model.type is None) == (model.path is None):
        return {}
    try:
        return resolved_fields(model)
    except BadInputError:  # check_model reports it
        return {}


def _model_type(model: ModelConfig) -> str:
    if model.path is None:
        return str(model.type)
    return str(read_config_json(local_folder(model.path))["model_type"])


def _is_part(name: str, value: object) -> bool:
    """Whether a field configures a part of the model with its own class."""
    return name.endswith("_config") and isinstance(value, Mapping)


def _check_field(
    known: ConfigClass, name: str, value: Any, kinds: Mapping[str, str], within: str = "model.config"
) -> list[BadInputError]:
    """Errors of a field; ``kinds`` has the ``model_type`` of each part by field, and the model's under ""."""
    key = f"{within}.{name}"
    if name in SET_ELSEWHERE:
        return [ConfigError(key, value, SET_ELSEWHERE[name])]
    if name not in known.names:
        meant = MODEL_FIELDS.get(name, "")
        close = meant if meant in known.names else nearest(name, known.names - set(SET_ELSEWHERE))
        fix = f"did you mean {within}.{close}?" if close else "leave it out"
        return [ConfigError(key, value, fix, "the model's configuration has no such field")]
    annotation = known.annotations.get(known.attribute_map.get(name, name))
    if annotation is not None and not accepts(annotation, value):
        fix = f"give {describe(annotation)}"
        if isinstance(value, EnvironmentText):
            fix = f"{fix}: '{key}=\"${{oc.decode:{value.interpolation}}}\"'"
        return [ConfigError(key, value, fix, "wrong type")]
    if _is_part(name, value):
        inner, items = (
            config_class(kinds[name]),
            {field: item for field, item in value.items() if field != "model_type"},
        )
        parts = {field: part_type(kinds[name], field, item) for field, item in items.items() if _is_part(field, item)}
        parts[""] = kinds[name]
        if inner is None:
            return []
        return [error for field, item in items.items() for error in _check_field(inner, field, item, parts, key)]
    return []


def _check_rotary_parts(
    overrides: Mapping[str, Any], fields: Mapping[str, Any], model_type: str, within: str = "model.config"
) -> Iterator[BadInputError]:
    """Errors of the rotary fields of a model and its parts; see :func:`check_rotary`."""
    yield from check_rotary(overrides, rope_parameter_names(model_type), within)
    for name, value in overrides.items():
        part = fields.get(name)
        if _is_part(name, value) and isinstance(part, Mapping):
            yield from _check_rotary_parts(value, part, part_type(model_type, name, part), f"{within}.{name}")


def part_type(model_type: str, name: str, fields: Mapping[str, Any]) -> str:
    """``model_type`` of the part that ``fields`` configure under ``name``, such as vision_config."""
    usual = f"{model_type}_{name.removesuffix('_config')}"
    return str(fields.get("model_type", usual if config_class(usual) else f"{usual}_model"))


def part_fields(model_type: str, name: str, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of a model's part with the literal defaults of its class."""
    known = config_class(part_type(model_type, name, fields)) or ConfigClass()
    return {**{field: value for field, value in known.defaults.items() if value is not NO_DEFAULT}, **fields}


def with_floats(fields: Mapping[str, Any], model_type: str) -> dict[str, Any]:
    """Fields of a model or part, whole numbers as floats where its class takes no others (``initializer_range: 1``)."""
    known = config_class(model_type)
    exact = floats_of(fields, known) if known is not None else dict(fields)
    parts = {name: part for name, part in exact.items() if _is_part(name, part)}
    return {**exact, **{name: with_floats(part, part_type(model_type, name, part)) for name, part in parts.items()}}


def _check_folder_sizes(model: ModelConfig, own_names: Mapping[str, str]) -> list[BadInputError]:
    """Errors of widths that do not fit the folder's weights."""
    folder = read_config_json(local_folder(model.path)) if model.path is not None else {}
    return [
        ConfigError(f"model.config.{name}", value, "leave it out", f"the weights of {model.path} have {folder[field]}")
        for name, value in model.config.items()
        for field in (own_names.get(name, name),)
        if field in {own_names.get(size, size) for size in WIDTHS} and folder.get(field, value) != value
    ]


def _check_heads(fields: Mapping[str, Any], known: ConfigClass) -> list[BadInputError]:
    own_names = known.attribute_map
    names = ("num_attention_heads", "num_key_value_heads", "hidden_size")
    heads, key_value, width = (fields.get(name) for name in names)
    heads_key, key_value_key, width_key = (f"model.config.{own_names.get(name, name)}" for name in names)
    errors: list[BadInputError] = []
    if not isinstance(heads, int) or not _positive(heads):
        return errors
    if isinstance(key_value, int) and _positive(key_value) and heads % key_value:
        reason = f"does not divide {heads_key}={heads}"
        errors.append(ConfigError(key_value_key, key_value, f"use a divisor of {heads}", reason))
    derived = family_of(fields["model_type"]).width_is_heads and not fields.get("head_dim")
    derived = derived or known.heads_divide
    if derived and isinstance(width, int) and width % heads:
        reason = f"not a multiple of {heads_key}={heads}"
        errors.append(ConfigError(width_key, width, f"use {max(width // heads, 1) * heads}", reason))
    if len(errors) == 2 and isinstance(width, int) and isinstance(key_value, int):  # fits neither of the others
        fitting = [number for number in range(1, width + 1) if width % number == 0 and number % key_value == 0]
        fix = f"use one of {', '.join(map(str, fitting[:8]))}" if fitting else f"change {width_key} too"
        reason = f"fits neither {width_key}={width} nor {key_value_key}={key_value}"
        return [ConfigError(heads_key, heads, fix, reason)]
    return errors


def _positive(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def picture_shape(config: Any) -> tuple[int, int, int]:
    """Channels, height and width of the pictures of the model with ``config``."""
    vision = getattr(config, "vision_config", config)
    size = vision.image_size
    height, width = (size, size) if isinstance(size, int) else size
    return int(getattr(vision, "num_channels", 3)), int(height), int(width)


def picture_tokens(config: Any) -> int:
    """Tokens that a picture takes in a text of the vision-language model with ``config``."""
    vision = config.vision_config
    patch = vision.patch_size if isinstance(vision.patch_size, int) else vision.patch_size[0]
    across = picture_shape(config)[1] // patch
    return picture_places(vision.model_type, across, lambda name: getattr(config, name, getattr(vision, name, None)))


def has_two_towers(model: Any) -> bool:
    """Whether a model compares pictures or recordings with texts, as CLIP and CLAP do: it learns the scale of logits, a
    number in Cohere."""
    return any(hasattr(getattr(model, name, None), "requires_grad") for name in ("logit_scale", "logit_scale_a"))


def noise_fields(fields: Mapping[str, Any]) -> list[str]:
    """Names of fields that enable randomness."""
    return sorted(
        name for name, value in fields.items() if is_noise(name) and isinstance(value, int | float) and value > 0
    )


def is_noise(name: str) -> bool:
    """Whether a field of a causal language model enables randomness in its forward pass."""
    return ("drop" in name or name == "router_jitter_noise") and not name.startswith(("summary_", "classifier_"))
