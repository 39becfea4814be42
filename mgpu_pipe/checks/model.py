"""The model: its configuration, its folder, and what its family can do."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mgpu_pipe.config.hub import is_at_commit, local_folder
from mgpu_pipe.config.objective import description
from mgpu_pipe.config.plain_files import MAX_JSON_BYTES, parse_json, read_bytes
from mgpu_pipe.config.resolve import world_size
from mgpu_pipe.config.schema import RunConfig
from mgpu_pipe.data.audio.alphabet import own_alphabet
from mgpu_pipe.errors import BadInputError, ConfigError
from mgpu_pipe.families.family import FLASH
from mgpu_pipe.families.find import document_isolation
from mgpu_pipe.topology import ParallelDims

BEHIND_PADDING = (
    *("altclip", "camembert", "data2vec-text", "ibert", "longformer", "mpnet", "roberta", "roberta-prelayernorm"),
    *("xlm-roberta", "xlm-roberta-xl", "xmod"),
)
"""Families like RoBERTa, whose first position is the one behind ``pad_token_id``."""


def model_fields(config: RunConfig) -> dict[str, Any]:
    """The model's configuration fields as far as they are known without torch; empty where there is no model."""
    from mgpu_pipe.models.fields import resolved_fields

    if (config.model.type is None) == (config.model.path is None):
        return {}
    try:
        return resolved_fields(config.model)
    except BadInputError:  # said by the check of the model itself
        return {}


def check_model(config: RunConfig) -> None:
    from mgpu_pipe.models.fields import check_model_config
    from mgpu_pipe.models.folder import check_model_folder, check_vocabulary, read_config_json
    from mgpu_pipe.models.hub_folder import check_weights_listed

    model = config.model
    if (model.type is None) == (model.path is None):
        return  # said by relation_errors
    if model.path is not None:
        if is_at_commit(model.path):  # its weights are fetched by the launch, and looked at then
            check_weights_listed(model.path)
            folder = local_folder(model.path)
            ids, made_for = _tokenizer_ids(config)
            if ids is not None:
                check_vocabulary(folder, read_config_json(folder), ids, made_for)
        elif not model.path.strip() or not Path(model.path).expanduser().exists():
            return  # said by value_errors
        else:
            check_model_folder(model.path, *_tokenizer_ids(config))
    check_model_config(model, description(config.objective.name).model_class)


def _tokenizer_ids(config: RunConfig) -> tuple[int | None, int | None]:
    """Of the tokenizer of a fine-tuning run: its ids (largest + 1), None where there is no tokenizer.json; and the
    vocabulary of the model that it was trained for, where it says so."""
    from mgpu_pipe.data.text.tokenizer_folder import CONFIG, MODEL_VOCABULARY, json_file

    chosen = config.model.path if config.data.tokenizer == "auto" else config.data.tokenizer
    path = local_folder(str(chosen), "model.path" if config.data.tokenizer == "auto" else "data.tokenizer")
    file = path / "tokenizer.json" if path.is_dir() else path
    if not file.is_file():
        return None, None
    try:
        content = parse_json(read_bytes(file, MAX_JSON_BYTES), file)
        vocabulary = content["model"]["vocab"]
        ids = list(vocabulary.values()) if isinstance(vocabulary, dict) else list(range(len(vocabulary)))
        ids += [token["id"] for token in content.get("added_tokens") or []]
        settings = file.with_name(CONFIG)
        made_for = json_file(settings).get(MODEL_VOCABULARY) if settings.is_file() else None
        return int(max(ids)) + 1, made_for if isinstance(made_for, int) else None
    except (OSError, UnicodeDecodeError, KeyError, TypeError, ValueError) as error:
        raise ConfigError(
            "data.tokenizer", file, "give a whole tokenizer.json", f"cannot be read ({type(error).__name__})"
        ) from error


def check_attention(config: RunConfig) -> None:
    from mgpu_pipe.checks.causality import check_causality
    from mgpu_pipe.checks.packing import check_packing

    fields = model_fields(config)
    told = description(config.objective.name)
    model_type, flash = fields.get("model_type"), config.model.attn_implementation in FLASH
    if model_type is None:
        return
    if told.families and model_type not in told.families:
        key = "model.type" if config.model.path is None else "model.path"
        value = config.model.type if config.model.path is None else config.model.path
        reason = f"objective.name={told.name} does not train the {model_type} family"
        raise ConfigError(key, value, f"use one of the families {', '.join(told.families)}", reason)
    refused = config.objective.model_errors(fields)
    if refused:
        raise refused[0]
    if told.attention == "causal":
        check_causality(fields)
        pairs = told.samples == "preferences"
        if pairs and document_isolation(str(model_type), fields) == "none":
            reason = f"attention of the {model_type} family is not known to stay inside one of a pair's conversations"
            raise ConfigError("objective.name", told.name, "use a model of another family, such as llama", reason)
        check_packing(fields, "best_fit" if pairs else config.data.packing, config.model.attn_implementation)
    elif told.samples == "picture_chats" and config.data.packing != "none":
        text = {"model_type": "llama", **(fields.get("text_config") or {})}
        if flash or document_isolation(text["model_type"], text) not in ("positions", "axes"):
            reason = f"attention{' of ' + text['model_type'] if not flash else ''} does not tell conversations apart"
            raise ConfigError(
                "data.packing", config.data.packing, "use none, or model.attn_implementation=auto", reason
            )
    elif flash and told.attention != "own":
        fix, reason = (
            "use sdpa or eager",
            f"objective.name={told.name} needs a mask, which flash attention does not take",
        )
        raise ConfigError("model.attn_implementation", config.model.attn_implementation, fix, reason)


def peft_errors(config: RunConfig) -> list[BadInputError]:
    """What adapters cannot be combined with."""
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
    if peft.name == "qlora" and config.objective.name == "seq2seq":
        reason = "T5 looks at the type of its weights"
        errors.append(ConfigError("peft", "qlora", "use peft=lora", reason))
    if config.objective.name == "sequence_classification" and not peft.train_also:
        fix = "name the head's parameters, such as [score.weight] or [classifier.*]"
        errors.append(ConfigError("peft.train_also", [], fix, "the new head of a classifier would stay untrained"))
    if config.objective.name == "ctc" and not peft.train_also and own_alphabet(config) is None:
        reason = "the head of a new alphabet would stay untrained"
        errors.append(ConfigError("peft.train_also", [], "use peft.train_also=[lm_head.*]", reason))
    return errors


def check_names(config: RunConfig) -> None:
    """Each pattern matches a parameter: their names are those of the model on the meta device, without weights. Where
    a tower's features are kept, none of its parameters learns."""
    keeps_features = getattr(config.data, "cache_features", False)
    if config.model.freeze or config.peft.name != "none" or config.optimizer.groups or keeps_features:
        from mgpu_pipe.models.build import run_model
        from mgpu_pipe.training.parameter_groups import treatments

        model = run_model(config)
        treatments(model, config.optimizer)
        if keeps_features:
            from mgpu_pipe.objectives.registry import objective_class
            from mgpu_pipe.objectives.tower_features import SeesPictures

            objective = objective_class(config.objective.name).from_config(config, model, None, lambda step: 1.0)
            if isinstance(objective, SeesPictures) and objective.features is not None:
                objective.features.check()
        if config.peft.name == "qlora":
            from mgpu_pipe.parallel.tensor_cut import check_blocks

            dims = ParallelDims.resolve(config.strategy, world_size(config))
            check_blocks(model, dims.tp, cuts_experts=dims.ep == 1)
        if config.peft.init_from is not None:
            from mgpu_pipe.models.adapters.lora import is_adapter
            from mgpu_pipe.models.adapters.peft_folder import check_peft_folder

            trained = {
                name: tuple(one.shape) if is_adapter(name) else None  # the data may add rows to others
                for name, one in model.named_parameters()
                if one.requires_grad
            }
            check_peft_folder(config.peft, trained)


def sequence_errors(config: RunConfig) -> list[BadInputError]:
    fields = model_fields(config)
    limit, padding = fields.get("max_position_embeddings"), fields.get("pad_token_id", 1)
    text = fields.get("text_config")
    kinds = (fields.get("model_type"), text.get("model_type") if isinstance(text, Mapping) else None)
    if isinstance(limit, int) and isinstance(padding, int) and set(kinds) & set(BEHIND_PADDING):
        limit -= padding + 1
    if isinstance(limit, int) and config.data.seq_len > limit:
        own = "n_positions" if config.model.type == "gpt2" else "max_position_embeddings"
        own = f"text_config.{own}" if isinstance(text, Mapping) else own
        fix = f"use at most {limit}, or raise model.config.{own}"
        reason = f"model {config.model.name} has {limit} positions"
        return [ConfigError("data.seq_len", config.data.seq_len, fix, reason)]
    return []
