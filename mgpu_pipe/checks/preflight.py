"""Everything about a run that can be known to be wrong before a worker starts, without torch."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mgpu_pipe.checks.numerics import emulated_type, numerics_errors
from mgpu_pipe.checks.offload import offload_errors
from mgpu_pipe.checks.optimizer import optimizer_errors
from mgpu_pipe.checks.unused_keys import unused_options
from mgpu_pipe.config.hardware import gpu_count, torch_has_cuda
from mgpu_pipe.config.joined_world import joined_processes
from mgpu_pipe.config.paths import RunPaths
from mgpu_pipe.config.plain_files import MAX_JSON_BYTES, parse_json, read_bytes
from mgpu_pipe.config.plugins import OBJECTIVES, STRATEGY_GROUP, registered
from mgpu_pipe.config.schema import RunConfig
from mgpu_pipe.config.validate import range_errors, relation_errors, value_errors, world_size
from mgpu_pipe.errors import BadInputError, ConfigError, ConfigErrors
from mgpu_pipe.strategies.deepspeed_config import ENGINE, deepspeed_errors
from mgpu_pipe.topology import BatchPlan, ParallelDims

ENGINES = "no such engine"


@dataclass(frozen=True)
class Notice:
    """Something worth knowing that stops nothing."""

    key: str
    text: str


def preflight(config: RunConfig, alone: Sequence[str] = ()) -> list[Notice]:
    """Check a run: keys, sizes, model, data, folders.

    Args:
        alone: the words that start this run, for the lines that errors tell.

    Raises:
        ConfigErrors: everything that is wrong, together.
    """
    errors = preflight_errors(config, alone=alone)
    if errors:
        raise ConfigErrors(errors)
    return _notices(config)


def preflight_errors(
    config: RunConfig, known: list[BadInputError] | None = None, alone: Sequence[str] = ()
) -> list[BadInputError]:
    """All errors of ``config``, those that are ``known`` first.

    Args:
        known: errors of composing it. The keys they name hold defaults, so that only checks which do not depend
            on them are made: keys by themselves, and sections without a known error.
    """
    found = list(known or [])
    wrong_sections = {str(getattr(error, "key", "")).split(".")[0] for error in found}
    found += [error for error in value_errors(config) if _section(error) not in wrong_sections]
    if "model" not in wrong_sections:
        found += _collected(lambda: _check_model(config))
    if "data" not in wrong_sections:
        found += _collected(lambda: _check_data(config))
    if not known:
        found += [*relation_errors(config, joined=joined()), *numerics_errors(config)]
        found += _run_folder_errors(config, alone)
        if not any(_section(error) == "checkpoint" for error in found):
            found += _collected(lambda: _check_start(config))
        if not range_errors(config):
            found += _size_errors(config)
        if not any(_section(error) == "model" for error in found):
            found += _collected(lambda: _check_attention(config))
    if not found:  # these import a package, or torch
        found += [*_collected(lambda: _check_plug_ins(config)), *_collected(lambda: _check_freezing(config))]
    return _one_for_each_key(found)


def _section(error: BadInputError) -> str:
    return str(getattr(error, "key", "")).split(".")[0]


def _one_for_each_key(errors: list[BadInputError]) -> list[BadInputError]:
    """The first error of every key: two checks may see the same fault."""
    kept: dict[str, BadInputError] = {}
    for error in errors:
        key = str(getattr(error, "key", "")) or str(error)
        same_value = key in kept and str(getattr(kept[key], "value", "")) != str(getattr(error, "value", ""))
        kept.setdefault(f"{key}={getattr(error, 'value', '')}" if same_value else key, error)
    return list(kept.values())


def _collected(check: Callable[[], None]) -> list[BadInputError]:
    try:
        check()
    except ConfigErrors as several:
        return list(several.errors)
    except BadInputError as error:
        return [error]
    return []


def _check_model(config: RunConfig) -> None:
    from mgpu_pipe.models.fields import check_model_config
    from mgpu_pipe.models.folder import check_model_folder

    model = config.model
    if (model.type is None) == (model.path is None):
        return  # said by relation_errors
    if model.path is not None:
        if not model.path.strip() or not Path(model.path).expanduser().exists():
            return  # said by value_errors
        check_model_folder(model.path, *_tokenizer_ids(config))
    check_model_config(model)


def _check_start(config: RunConfig) -> None:
    """What the run is to begin from is a checkpoint that is whole by its files' sizes."""
    from mgpu_pipe.checkpoint.select import resolve_source

    start = config.checkpoint
    for key, source in (("checkpoint.resume", start.resume), ("checkpoint.init_from", start.init_from)):
        if source in (None, "none", "auto") or not Path(source).expanduser().exists():
            continue  # what does not exist is said by value_errors
        if key == "checkpoint.init_from" and (start.resume == "auto" or _is_model_folder(Path(source).expanduser())):
            continue  # a run that goes on needs it no more
        resolve_source(source, start.on_corruption, "size", key)


def _is_model_folder(folder: Path) -> bool:
    return (folder / "config.json").exists() and not (folder / "manifest.json").exists()


def _check_attention(config: RunConfig) -> None:
    from mgpu_pipe.checks.causality import check_causality
    from mgpu_pipe.models.attention import check_packing

    fields = model_fields(config)
    if fields.get("model_type") is not None:
        check_causality(fields)
        check_packing(fields, config.data.packing, config.model.attn_implementation)


def _check_plug_ins(config: RunConfig) -> None:
    """The classes that a package registers are what they should be."""
    objective, engine = config.objective.name, config.strategy.engine
    if objective not in OBJECTIVES:
        from mgpu_pipe.training.plugins import objective_class

        objective_class(objective)
    if engine not in ("mesh", ENGINE):
        from mgpu_pipe.training.plugins import strategy_class

        strategy_class(engine)


def _check_freezing(config: RunConfig) -> None:
    """Each pattern matches a parameter: their names are those of the model on the meta device, without weights."""
    if config.model.freeze:
        from mgpu_pipe.models.build import build_meta

        build_meta(config.model)


def _check_data(config: RunConfig) -> None:
    from mgpu_pipe.data.text.sources import FILE_SOURCES, check_sources

    if config.data.source not in FILE_SOURCES or config.data.paths:
        check_sources(config)
    if config.data.source == "chat_jsonl" and config.data.paths:
        from mgpu_pipe.data.text.tokenizer import check_chat

        check_chat(config)


def _tokenizer_ids(config: RunConfig) -> tuple[int | None, int | None]:
    """Of the tokenizer of a fine-tuning run: its ids (largest + 1), None where there is no tokenizer.json; and the
    vocabulary of the model that it was trained for, where it says so."""
    from mgpu_pipe.data.text.tokenizer_folder import CONFIG, MODEL_VOCABULARY, json_file

    chosen = config.model.path if config.data.tokenizer == "auto" else config.data.tokenizer
    path = Path(str(chosen)).expanduser()
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


def _size_errors(config: RunConfig) -> list[BadInputError]:
    """Strategy, world, batch and sequence."""
    errors: list[BadInputError] = _strategy_errors(config)
    if not errors:
        try:
            dims = ParallelDims.resolve(config.strategy, world_size(config))
            plan = BatchPlan.resolve(config.data, dims.data_parallel_size, dims.pp)
            errors += _router_errors(config)
            if not any(_section(error) == "optimizer" for error in value_errors(config)):
                errors += optimizer_errors(config, dims)
            if config.strategy.engine == "mesh":
                errors += _model_axis_errors(config, dims, plan)
        except ConfigError as error:
            errors.append(error)
    return [*errors, *_sequence_errors(config)]


def _strategy_errors(config: RunConfig) -> list[BadInputError]:
    strategy, world = config.strategy, world_size(config)
    errors: list[BadInputError] = []
    if strategy.engine == ENGINE:
        return [*deepspeed_errors(config), *offload_errors(config)]
    engines = ("mesh", ENGINE, *registered(STRATEGY_GROUP)) if strategy.engine != "mesh" else ("mesh",)
    if strategy.engine not in engines:
        errors.append(ConfigError("strategy.engine", strategy.engine, f"use {' or '.join(engines)}", ENGINES))
    if strategy.name == "single" and strategy.dp_replicate == strategy.dp_shard == 1 and world != 1 and not errors:
        key, value = ("trainer.num_nodes", config.trainer.num_nodes)
        if config.trainer.devices != 1 and config.trainer.devices != "auto":
            key, value = "trainer.devices", config.trainer.devices
        errors.append(ConfigError(key, value, "use 1, or strategy=ddp", "strategy=single is one process"))
    return errors


def _router_errors(config: RunConfig) -> list[BadInputError]:
    from mgpu_pipe.models.experts import router_loss_errors

    model_type = model_fields(config).get("model_type")
    if not model_type or not config.objective.router_aux_loss:
        return []
    return list(router_loss_errors(str(model_type), config.objective.router_aux_loss))


def _model_axis_errors(config: RunConfig, dims: ParallelDims, plan: BatchPlan) -> list[BadInputError]:
    fields = model_fields(config)
    if not fields or not (dims.uses_model_axes or _uses_axis_options(config)):
        return []
    from mgpu_pipe.checks.model_axes import model_axis_errors

    return model_axis_errors(config, dims, plan, fields)


def _uses_axis_options(config: RunConfig) -> bool:
    strategy = config.strategy
    return bool(strategy.sequence_parallel or strategy.pipeline.layers)


def _sequence_errors(config: RunConfig) -> list[BadInputError]:
    limit = model_fields(config).get("max_position_embeddings")
    if isinstance(limit, int) and config.data.seq_len > limit:
        own = "n_positions" if config.model.type == "gpt2" else "max_position_embeddings"
        fix = f"use at most {limit}, or raise model.config.{own}"
        reason = f"model {config.model.name} has {limit} positions"
        return [ConfigError("data.seq_len", config.data.seq_len, fix, reason)]
    return []


def model_fields(config: RunConfig) -> dict[str, Any]:
    """The model's configuration fields as far as they are known without torch; empty where there is no model."""
    from mgpu_pipe.models.fields import resolved_fields

    if (config.model.type is None) == (config.model.path is None):
        return {}
    try:
        return resolved_fields(config.model)
    except BadInputError:  # said by the check of the model itself
        return {}


def _run_folder_errors(config: RunConfig, alone: Sequence[str]) -> list[BadInputError]:
    """The run's folder can be made, and is not another run's. In a joined world rank 0's launch looks itself."""
    if joined():
        return []
    run = config.run
    key, given = ("run.root", run.root) if run.dir is None else ("run.dir", run.dir)
    if not given.strip():
        return []  # said by value_errors
    folder = Path(given).expanduser()
    if folder.exists() and not folder.is_dir():
        return [ConfigError(key, folder, "give another folder", "this is a file")]
    existing = folder
    while not existing.exists() and existing != existing.parent:
        existing = existing.parent
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        return [ConfigError(key, folder, "give a folder that can be written", f"{existing} cannot be written")]
    if run.dir is None or not folder.is_dir():
        return []
    from mgpu_pipe.runs.folder import refuse_contents
    from mgpu_pipe.runs.lock import is_held

    paths = RunPaths(folder.absolute())
    if is_held(paths.lock):  # the launch waits for who holds it, or names them
        return []
    return _collected(lambda: refuse_contents(paths, config.checkpoint.resume == "auto", alone))


def joined() -> bool:
    """Whether torchrun or srun started this process as one rank of a world."""
    return joined_processes() is not None


def _notices(config: RunConfig) -> list[Notice]:
    notices = [Notice(key, f"does nothing here: {why}") for key, why in unused_options(config)]
    if config.trainer.accelerator == "auto" and gpu_count() and not torch_has_cuda():
        notices.append(Notice("trainer.accelerator", f"runs on CPU: this torch cannot use the {gpu_count()} GPUs here"))
    if emulated := emulated_type(config):
        text = f"this CPU emulates {emulated}: correct, and several times slower than fp32"
        notices.append(Notice("precision.name", text))
    if not config.checkpoint.save_last and config.checkpoint.every_n_steps is None:
        notices.append(Notice("checkpoint", "nothing is saved unless a signal stops the run"))
        if config.objective.sample_prompts:
            notices.append(Notice("objective.sample_prompts", "no samples: they come from a saved checkpoint"))
    if joined() and config.launch.max_restarts:
        text = "does nothing here: whoever started this world restarts it"
        notices.append(Notice("launch.max_restarts", text))
    if config.trainer.num_nodes > 1 and config.strategy.engine == "mesh":
        from mgpu_pipe.checks.model_axes import across_nodes

        dims = ParallelDims.resolve(config.strategy, world_size(config))
        devices = dims.world_size // config.trainer.num_nodes
        notices += [Notice(key, text) for key, text in across_nodes(dims, devices)]
    notices += _noise_notice(config)
    keep = config.checkpoint
    if keep.keep_best and keep.best_metric.startswith("val/") and config.trainer.val_every_n_steps is None:
        text = f"{keep.best_metric} is measured at the end only; set trainer.val_every_n_steps"
        notices.append(Notice("checkpoint.keep_best", text))
    return notices


def _noise_notice(config: RunConfig) -> list[Notice]:
    from mgpu_pipe.models.fields import noise_fields

    text = "drops at random: under another strategy or number of processes the result is equal statistically only"
    return [Notice(f"model.config.{name}", text) for name in noise_fields(model_fields(config))[:1]]
