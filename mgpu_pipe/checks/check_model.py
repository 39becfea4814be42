"""The model: its configuration, its folder, and what its family can do."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from mgpu_pipe.architectures.family import FLASH
from mgpu_pipe.architectures.find import document_isolation, families_with, family_of
from mgpu_pipe.checks.fitting import fitting_objectives, model_fix
from mgpu_pipe.config.data_sources import find_source, samples_of
from mgpu_pipe.config.group_keys import ALL_LINEAR
from mgpu_pipe.config.hub import hub_name, is_at_commit, local_folder
from mgpu_pipe.config.objective import description
from mgpu_pipe.config.schema import DataConfig, ModelConfig, ObjectiveConfig, RunConfig
from mgpu_pipe.data.model_field import model_vocab_size, resolve_packing
from mgpu_pipe.data.text.tokenizer_folder import (
    CONFIG,
    MODEL_VOCABULARY,
    chat_template,
    existing_file,
    json_file,
    spare_tokens,
    token_texts,
)
from mgpu_pipe.data.text.tokenizer_record import REPLACE
from mgpu_pipe.errors import BadInputError, ConfigError, ModelFolderError
from mgpu_pipe.models.field_sizes import largest_width, usable_positions
from mgpu_pipe.models.fields import CAUSAL, ModelClassError, check_model_config, model_fields, model_key
from mgpu_pipe.models.weights.folder import check_model_folder, check_vocabulary, check_weights_listed, read_config_json
from mgpu_pipe.objectives.vector_keys import VectorConfig
from mgpu_pipe.system.local_files import exists, expand_home, is_file, is_folder
from mgpu_pipe.topology import ParallelDims

BIDIRECTIONAL = "use_bidirectional_attention"
OF_IMAGES = "vision"
"""A value of :data:`BIDIRECTIONAL` that concerns only images (Gemma 4)."""


def check_causality(fields: Mapping[str, Any], objectives: Callable[[str], str] = lambda model_type: "") -> None:
    """Raise if a token of the model sees later tokens.

    Args:
        fields: of the model's configuration, with its ``model_type``.
        objectives: returns the objectives that train a model type unchanged, e.g. ``objective=masked_lm``.

    Raises:
        ConfigError: the family, or the field.
    """
    reason = "its tokens see those that they are to predict"
    model_type = fields.get("model_type")
    family = family_of(str(model_type))
    if not family.causal:
        raise ConfigError("model.type", model_type, "use a causal model", reason)
    name = family.causal_if
    if name and fields.get(name) is not True:
        others = objectives(str(model_type))
        fix = f"use {f'{others}, or ' if others else ''}model.config.{name}=true"
        raise ConfigError(f"model.config.{name}", fields.get(name, False), fix, reason)
    if fields.get(CAUSAL, True) is False:
        fix = f"leave out model.bidirectional, or {CAUSAL} of config.json where its maker trained it on the next token"
        raise ConfigError(f"model.config.{CAUSAL}", False, fix, reason)
    mixing = family.mixes_tokens
    if fields.get(mixing):
        fix = f"use model.config.{mixing}=false"
        raise ConfigError(f"model.config.{mixing}", True, fix, "its result depends on the micro-batch's other tokens")
    if fields.get(BIDIRECTIONAL) not in (None, False, OF_IMAGES):
        raise ConfigError(f"model.config.{BIDIRECTIONAL}", fields[BIDIRECTIONAL], "leave it out", reason)


def check_packing(fields: Mapping[str, Any], packing: str, attn_implementation: str = "auto") -> None:
    """Raise if documents of a packed sample would see each other.

    Args:
        fields: of the model's configuration, with its ``model_type``.

    Raises:
        ConfigError: ``data.packing`` packs, and the family (or its flash attention) cannot keep documents apart.
    """
    model_type = str(fields["model_type"])
    isolation = document_isolation(model_type, fields)
    if packing == "none" or isolation == "positions":
        return
    if isolation == "none":
        setting = family_of(model_type).unpacked_with
        having = f" with {setting}=true" if setting else ""
        raise ConfigError(
            "data.packing",
            packing,
            "use data.packing=none",
            f"attention of the {model_type} family{having} is not known to stay inside documents of a packed sample",
        )
    if attn_implementation in FLASH:
        reason = f"the {model_type} family needs a mask for packed samples, which flash attention does not take"
        raise ConfigError("model.attn_implementation", attn_implementation, "use sdpa, or data.packing=none", reason)


def check_model(model: ModelConfig, data: DataConfig, objective: ObjectiveConfig) -> None:
    """Check the model's folder and tokenizer, its class, and ``model.config``; the error names keys or files."""
    from mgpu_pipe.models.field_ranges import check_activations, check_ranges
    from mgpu_pipe.models.reached_fields import check_reached

    if (model.type is None) == (model.path is None):
        return  # value_errors reports it
    if model.path is not None:
        if is_at_commit(model.path):  # the launch fetches and checks its weights
            check_weights_listed(model.path)
            folder = local_folder(model.path)
            ids, made_for = _tokenizer_ids(model, data)
            if ids is not None and "vocab_size" not in model.config:
                check_vocabulary(folder, read_config_json(folder), ids, made_for)
        elif not model.path.strip() or not is_folder(expand_home(model.path)):
            return  # value_errors reports it
        else:
            # check_tokenizer_size compares a vocabulary that the run sets.
            check_model_folder(model.path, *([] if "vocab_size" in model.config else _tokenizer_ids(model, data)))
            if _reads_text(data, objective):
                existing_file(model, data)
    elif _tokenizer_is_here(data) and _reads_text(data, objective):
        existing_file(model, data)
    try:
        check_model_config(model, description(objective.name).model_class)
    except ModelClassError as error:
        fix = model_fix(model, data, objective, error.fix)
        raise ConfigError(error.key, error.value, fix, error.reason) from error
    check_activations(model)
    check_ranges(model)
    check_reached(model)
    check_family(model, objective)


def check_family(model: ModelConfig, objective: ObjectiveConfig) -> None:
    """Refuse a family that the objective does not train.

    Raises:
        ConfigError: the model's key, with the families that it trains.
    """
    families, kind = description(objective.name).families, model_fields(model).get("model_type")
    if families and kind is not None and kind not in families:
        reason = f"objective.name={objective.name} does not train the {kind} family"
        raise ConfigError(*model_key(model), f"use one of the families {', '.join(families)}", reason)


def check_tokenizer_size(model: ModelConfig, data: DataConfig, objective: ObjectiveConfig) -> None:
    """Refuse a vocabulary smaller than the tokenizer; :func:`check_model_folder` does so without overrides."""
    from mgpu_pipe.data.model_field import trained_vocab_size, transcripts_vocab_size

    samples = samples_of(data.source)
    template, spoken = data.chat_template, samples == "speech"
    if spoken and description(objective.name).alphabet:
        _check_alphabet(model, data)
    if not samples or not _reads_text(data, objective):
        return
    if template is not None:
        from mgpu_pipe.data.text.chat_templates import chosen_template

        chosen_template(model, data)  # a source without conversations keeps it for the export
    if model.path is None and data.tokenizer == "auto" and spoken:
        transcripts_vocab_size(model)
    elif model.path is None and data.tokenizer == "auto":
        special: Sequence[str] = ()
        if template is not None:
            from mgpu_pipe.data.text.chat_templates import SPECIAL

            special = SPECIAL.get(template, ())
        trained_vocab_size(model, data, objective, special)
    elif "vocab_size" in model.config if model.path else _tokenizer_is_here(data):
        size, ids = model_vocab_size(model), _tokenizer_ids(model, data)[0]
        if size is not None and ids is not None and ids > size:
            raise ConfigError(
                "model.config.vocab_size", size, f"use at least {ids}", f"the tokenizer has {ids} entries"
            )


def _check_alphabet(model: ModelConfig, data: DataConfig) -> None:
    """Refuse an alphabet that cannot be read, or has more characters than the folder's model has outputs."""
    from mgpu_pipe.data.audio.alphabet import Alphabet, named_alphabet

    folder = named_alphabet(model, data)
    if folder is None:
        return
    characters = Alphabet.from_folder(folder).size
    size = None if model.path is None else model_vocab_size(model)
    if size is not None and characters > size:
        fix = f"use at least {characters}, or the model's own alphabet"
        raise ConfigError("model.config.vocab_size", size, fix, f"the alphabet of {folder} has {characters} entries")


def _tokenizer_is_here(data: DataConfig) -> bool:
    """Whether the configuration names an existing local tokenizer; value_errors reports a missing one."""
    named = data.tokenizer
    return named != "auto" and hub_name(named) is None and exists(expand_home(named))


def _reads_text(data: DataConfig, objective: ObjectiveConfig) -> bool:
    """Whether the model's tokenizer prepares the data; a plug-in's arrays and an alphabet need none."""
    source = find_source(data.source)
    if source is not None:
        spelled = source.samples == "speech" and description(objective.name).alphabet
        return "tokenizer" in source.reads and not spelled
    from mgpu_pipe.data.arrays import array_class  # imports numpy, which other checks do without

    return array_class(data.source) is None


def _tokenizer_ids(model: ModelConfig, data: DataConfig) -> tuple[int | None, int | None]:
    """Ids (largest + 1) of a fine-tuning run's tokenizer, and the vocabulary size of its model; None if unknown."""
    chosen = model.path if data.tokenizer == "auto" else data.tokenizer
    path = local_folder(str(chosen), "model.path" if data.tokenizer == "auto" else "data.tokenizer")
    file = path / "tokenizer.json" if is_folder(path) else path
    if not is_file(file):
        return None, None
    try:
        ids = token_texts(file)
    except ModelFolderError as error:
        reason = str(error).removeprefix(f"{file}: ").removesuffix(REPLACE)
        raise ConfigError("data.tokenizer", file, "give a whole tokenizer.json", reason) from error
    if not ids:
        raise ConfigError("data.tokenizer", file, "give a whole tokenizer.json", "it has no vocabulary")
    settings = file.with_name(CONFIG)
    made_for = json_file(settings).get(MODEL_VOCABULARY) if is_file(settings) else None
    used = ids.keys() - _spare_tokens(model, data, file).keys()
    return max(used) + 1, made_for if isinstance(made_for, int) else None


def _spare_tokens(model: ModelConfig, data: DataConfig, file: Path) -> dict[int, str]:
    if data.chat_template is None:
        return spare_tokens(file, model_vocab_size(model), chat_template(file.parent))
    from mgpu_pipe.data.text.chat_templates import chosen_template

    template = chosen_template(model, data)
    return spare_tokens(file, model_vocab_size(model), None if template is None else template.text)


def check_attention(model: ModelConfig, data: DataConfig, objective: ObjectiveConfig) -> None:
    """Raise ConfigError where the model's attention does not fit the objective and the packing."""
    fields = model_fields(model)
    trained = description(objective.name)
    model_type, flash = fields.get("model_type"), model.attn_implementation in FLASH
    if model_type is None:
        return
    if model.bidirectional:
        check_bidirectional(objective, str(model_type))
    refused = objective.model_errors(fields)
    if refused:
        raise refused[0]
    if trained.attention == "causal":
        check_causality(fields, fitting_objectives)
        pairs = trained.samples == "preferences"
        if pairs and document_isolation(str(model_type), fields) == "none":
            reason = f"attention of the {model_type} family is not known to stay inside one of a pair's conversations"
            raise ConfigError("objective.name", trained.name, "use a model of another family, such as llama", reason)
        check_packing(
            fields, "best_fit" if pairs else resolve_packing(model, data, objective), model.attn_implementation
        )
    elif trained.samples == "picture_chats" and resolve_packing(model, data, objective) != "none":
        text = {"model_type": "llama", **(fields.get("text_config") or {})}
        if flash or document_isolation(text["model_type"], text) not in ("positions", "axes"):
            reason = f"attention{' of ' + text['model_type'] if not flash else ''} does not separate conversations"
            raise ConfigError("data.packing", data.packing, "use none, or model.attn_implementation=auto", reason)
    elif (
        trained.attention == "bidirectional"
        and data.packing == "best_fit"
        and not family_of(str(model_type)).token_mask
    ):
        reason = f"attention of the {model_type} family does not separate documents of a row"
        raise ConfigError("data.packing", data.packing, "use data.packing=none", reason)
    elif flash and trained.attention != "own":
        fix, reason = (
            "use sdpa or eager",
            f"objective.name={trained.name} needs a mask, which flash attention does not take",
        )
        raise ConfigError("model.attn_implementation", model.attn_implementation, fix, reason)


def check_bidirectional(objective: ObjectiveConfig, model_type: str) -> None:
    """Raise if ``model.bidirectional`` is not for the objective or the family."""
    if not isinstance(objective, VectorConfig):
        reason = f"objective.name={objective.name} makes no vectors of texts"
        raise ConfigError("model.bidirectional", True, "leave it out, or use objective=text_embedding", reason)
    if not family_of(model_type).bidirectional:
        fix = f"leave it out, or use a model of {', '.join(families_with(lambda family: family.bidirectional))}"
        reason = f"the {model_type} family is no decoder that is known to see later tokens"
        raise ConfigError("model.bidirectional", True, fix, reason)


def peft_errors(config: RunConfig) -> list[BadInputError]:
    """Errors of settings that adapters cannot be combined with."""
    peft, errors = config.peft, list[BadInputError]()
    if peft.name == "none":
        return []
    if peft.dropout and config.strategy.tp != 1:
        reason = "tensor-parallel ranks would have to drop the same inputs"
        errors.append(ConfigError("peft.dropout", peft.dropout, "use peft.dropout=0 with strategy.tp", reason))
    if config.precision.name == "fp8":
        errors.append(ConfigError("precision.name", "fp8", "use bf16", "adapters do not compute in float8"))
    if peft.init_from is not None and config.model.path is None:
        fix = "give the model that they were trained on by model=hf model.path=<folder>"
        errors.append(ConfigError("peft.init_from", peft.init_from, fix, "the adapters belong to a model's weights"))
    if peft.init_from is not None and "experts" in peft.targets:
        reason = "peft names adapters of packed experts by their order"
        errors.append(ConfigError("peft.init_from", peft.init_from, "target no experts", reason))
    if not peft.targets:
        errors.append(ConfigError("peft.targets", [], f"use [{ALL_LINEAR}]", "no linear layer is targeted"))
    most = largest_width(model_fields(config.model))
    if most and peft.r > most:
        errors.append(ConfigError("peft.r", peft.r, f"use at most {most}", "no layer of the model is that wide"))
    return [*errors, *config.objective.adapter_errors(config.model, peft)]


def check_built(config: RunConfig) -> None:
    """Refuse what only the model shows, built on the meta device: patterns that match no parameter, odd activations.

    If a tower's features are cached, refuse trained parameters in it.
    """
    from mgpu_pipe.models.field_ranges import unknown_activations

    caches_features = getattr(config.data, "cache_features", False)
    names_parts = config.model.freeze or config.peft.name != "none" or config.optimizer.groups or caches_features
    if names_parts or unknown_activations(config.model):
        from mgpu_pipe.models.build import run_model
        from mgpu_pipe.optim.optimizers import treatments

        model = run_model(config)
        treatments(model, config.optimizer)
        if caches_features:
            from mgpu_pipe.objectives.registry import objective_class
            from mgpu_pipe.objectives.tower_features import PictureObjective

            objective = objective_class(config.objective.name).from_config(config, model, None, lambda step: 1.0)
            if isinstance(objective, PictureObjective) and objective.features is not None:
                objective.features.check()
        if config.peft.name == "qlora":
            from mgpu_pipe.models.model_parts import tower_names
            from mgpu_pipe.parallel.tensor.cut import check_blocks

            dims = ParallelDims.from_config(config.trainer, config.strategy)
            towers = tower_names(model, config.strategy.parts.whole).values()
            check_blocks(model, dims.tp, cuts_experts=dims.ep == 1, whole=list(towers))
        if config.peft.init_from is not None:
            from mgpu_pipe.models.adapters.peft_folder import check_peft_folder

            check_peft_folder(config.peft, model, adapters_alone=True)


def sequence_errors(model: ModelConfig, data: DataConfig) -> list[BadInputError]:
    """An error if ``data.seq_len`` is longer than the model's positions."""
    fields = model_fields(model)
    limit, padding = fields.get("max_position_embeddings"), fields.get("pad_token_id", 1)
    text = fields.get("text_config")
    kinds = (fields.get("model_type"), text.get("model_type") if isinstance(text, Mapping) else None)
    if isinstance(limit, int):
        limit = usable_positions(limit, padding if isinstance(padding, int) else None, *kinds)
    if isinstance(limit, int) and data.seq_len > limit:
        field = "n_positions" if model.type == "gpt2" else "max_position_embeddings"
        field = f"text_config.{field}" if isinstance(text, Mapping) else field
        fix = f"use at most {limit}, or raise model.config.{field}"
        reason = f"model {model.name} has {limit} positions"
        return [ConfigError("data.seq_len", data.seq_len, fix, reason)]
    return []
