"""Chooses and checks the step that an attempt resumes from, once, before any worker starts."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mgpu_pipe.checkpoint import layout
from mgpu_pipe.checkpoint.manifest import read_manifest, read_state
from mgpu_pipe.checkpoint.selection import newest_valid, resolve_source
from mgpu_pipe.config.freeze import load_untrusted
from mgpu_pipe.config.hub import is_at_commit
from mgpu_pipe.config.paths import RunPaths
from mgpu_pipe.config.resolve import resolve_precision
from mgpu_pipe.config.run_identity import Identity, differences, unequal
from mgpu_pipe.config.schema import CheckpointConfig, LaunchConfig, ModelConfig, RunConfig
from mgpu_pipe.data.text.tokenizer_folder import token_differences
from mgpu_pipe.errors import BadInputError, CheckpointError, ConfigError, ConfigErrors, one_line, print_line
from mgpu_pipe.models.weights.folder import read_config_json
from mgpu_pipe.runs.latest import STARTS_FROM, read_record
from mgpu_pipe.system.local_files import exists, expand_home
from mgpu_pipe.training.run_clock import run_length

if TYPE_CHECKING:
    from mgpu_pipe.data.samples import Prepared

LISTED = 3


def resume_step(checkpoint: CheckpointConfig, paths: RunPaths) -> Path | None:
    """Step folder that an attempt resumes from: this run's newest valid one, else the configured one, else None.

    A run that resumed another run's step and has not saved yet resumes from that step again.

    Raises:
        CheckpointError: none of the run's checkpoints, or not the configured one, is usable; or a damaged one under
            ``on_corruption=stop``.
    """
    newest = newest_valid(paths.checkpoints, checkpoint.on_corruption, checkpoint.verify)
    if newest is not None:
        return newest.path
    damaged = list(layout.committed_steps(paths.checkpoints))
    if damaged:
        # Starting afresh would cut the metrics and overwrite steps that a failing disk may still hold.
        raise CheckpointError(
            f"{paths.checkpoints}: no checkpoint in it can be read whole ({len(damaged)} damaged); look with mgpu-pipe "
            f"checkpoints check {paths.root} --full, or start in another run.dir"
        )
    source = checkpoint.resume
    if source == "auto":
        source = str(read_record(paths.root).get(STARTS_FROM, "none"))
    if source in ("none", "auto"):
        return None
    return resolve_source(source, checkpoint.on_corruption, checkpoint.verify).absolute()


def restarts_without_progress(launch: LaunchConfig) -> int:
    """Number of crashes in a row that a job may have without saving a step; 0 if the launcher never restarts."""
    return int(getattr(launch, "max_restarts_without_progress", 0))


def check_resume(config: RunConfig, prepared: Prepared, step: Path, is_own_step: bool = False) -> list[str]:
    """Compare this run with the one that saved ``step``.

    Args:
        is_own_step: whether the step is this run's; another run's must leave steps to train.

    Returns:
        Notices of differences that are allowed.

    Raises:
        ConfigErrors: all differences that are not allowed.
    """
    before, _ = load_untrusted(step / "config.yaml")
    manifest = read_manifest(step)
    length = run_length(config.data, config.trainer, prepared)
    errors: list[BadInputError] = []
    if not is_own_step and manifest.step >= length:
        key = "trainer.max_epochs" if config.trainer.max_steps is None else "trainer.max_steps"
        limit = config.trainer.max_steps or config.trainer.max_epochs
        fix = f"use more than {manifest.step} steps, counted from the start of the run"
        errors.append(ConfigError(key, limit, fix, f"the checkpoint {step} is at step {manifest.step} already"))
    errors += [
        ConfigError(
            name,
            now,
            f"use {then} to resume from it, or checkpoint.init_from for the weights alone",
            f"the checkpoint {step} was trained with {then}",
        )
        for name, now, then in differences(config, before, [Identity.FIXED])
    ]
    model, then = config.model.path or "", before.model.path or ""
    if model != then and is_at_commit(model) and is_at_commit(then):
        fix = f"give {then}, or use checkpoint.init_from for the weights alone"
        errors.append(ConfigError("model.path", model, fix, f"the checkpoint {step} was trained from {then}"))
    state = read_state(step, manifest, "off")
    if not errors:
        content = [name for name, _, _ in differences(config, before, [Identity.CONTENT]) if name.startswith("data.")]
        errors = _data_errors(content, config.data.validation_paths, prepared, step, state)
    if errors:
        raise ConfigErrors(errors)
    precision = resolve_precision(config.precision, config.trainer)
    changes = [
        difference
        for difference in differences(config, before, [Identity.NOTICE, Identity.RECORDED])
        if difference[0] != "precision.name"
    ]
    changes += unequal(
        "precision.name", precision, state.get("precision", precision)
    )  # auto may have meant another precision
    return [f"resuming with {name}={now} (was {then})" for name, now, then in changes]


def _data_errors(
    content: list[str], validation_paths: list[str], prepared: Prepared, step: Path, state: Mapping[str, Any]
) -> list[BadInputError]:
    """The error of data that is not that of the run that saved ``step``; ``content`` are the keys that differ."""
    if state.get("data_digest") != prepared.digest:
        tokens = token_differences(RunPaths(step.parents[1]).tokenizer, prepared.tokenizer_folder)
        changed = [*content, *([f"the tokenizer: {_join_texts(tokens)}"] if tokens else [])]
        reason = f"the data is not what it was trained on ({', '.join(changed) or 'the files changed'})"
        return [ConfigError("checkpoint.resume", step, "give the same data, or use checkpoint.init_from", reason)]
    held_out = state.get("validation_digest")
    if held_out and prepared.validation_digest and held_out != prepared.validation_digest:
        fix = "give the same files, or use checkpoint.init_from"
        reason = f"the held-out data is not what {step} was evaluated on"
        return [ConfigError("data.validation_paths", validation_paths, fix, reason)]
    return []


def check_init_from(
    model: ModelConfig, tokenizer: str | None, checkpoint: CheckpointConfig, prepared: Prepared
) -> list[str]:
    """Compare this run with the run that trained the weights of ``checkpoint.init_from``.

    Args:
        tokenizer: ``data.tokenizer``.

    Returns:
        Notices of differing model settings that change no tensor's shape.

    Raises:
        ConfigErrors: another type of model, or a tokenizer with other ids.
        CheckpointError: no whole checkpoint in the folder.
    """
    source = expand_home(str(checkpoint.init_from))
    errors: list[BadInputError] = []
    notices: list[str] = []
    if exists(source / "config.json") and not exists(source / "manifest.json"):
        their_tokenizer = source
        stored = read_config_json(source)
        if model.path is None and model.type != stored.get("model_type"):
            reason = f"the weights of {source} are a {stored.get('model_type')}'s"
            errors.append(ConfigError("model.type", model.type, f"use {stored.get('model_type')}", reason))
        settings = {name: value for name, value in model.config.items() if name in stored}
        notices = _trained_with(settings, {name: stored[name] for name in settings})
    else:
        step = resolve_source(source, checkpoint.on_corruption, "size", key="checkpoint.init_from")
        their_tokenizer = RunPaths(step.parents[1]).tokenizer
        before, _ = load_untrusted(step / "config.yaml")
        if model.path is None and before.model.path is None:
            if model.type != before.model.type:
                reason = f"the weights of {step} are a {before.model.type}'s"
                errors.append(ConfigError("model.type", model.type, f"use {before.model.type}", reason))
            notices = _trained_with(model.config, before.model.config)
    tokens = token_differences(their_tokenizer, prepared.tokenizer_folder)
    if tokens:
        fix = f"use data.tokenizer={their_tokenizer.absolute()}"
        reason = f"the weights of {source} were trained with a tokenizer that gives other ids ({_join_texts(tokens)})"
        errors.append(ConfigError("data.tokenizer", tokenizer, fix, reason))
    if errors:
        raise ConfigErrors(errors)
    return notices


def _trained_with(now: object, before: object) -> list[str]:
    return [
        f"starting from weights trained with {name}={then} (now {value})"
        for name, value, then in unequal("model.config", now, before)
    ]


def _join_texts(texts: list[str]) -> str:
    return "; ".join(texts[:LISTED]) + (f"; and {len(texts) - LISTED} more" if len(texts) > LISTED else "")


def announce_resume(config: RunConfig, prepared: Prepared, paths: RunPaths, step: Path | None) -> None:
    """Print the step to resume from and its differences; refuse a forbidden difference or a run without a step."""
    run_length(config.data, config.trainer, prepared)
    if prepared.tokenizer_folder is not None:
        errors = config.objective.tokenizer_errors(prepared.tokenizer_folder)
        if errors:
            raise errors[0]
    if step is not None:
        for notice in check_resume(config, prepared, step, is_own_step=step.parent == paths.checkpoints):
            print_line(f"note: {one_line(notice)}", file=sys.stderr)
        print_line(f"resuming from {step}", file=sys.stderr, flush=True)
    elif config.checkpoint.init_from is not None:
        for notice in check_init_from(config.model, config.data.tokenizer, config.checkpoint, prepared):
            print_line(f"note: {one_line(notice)}", file=sys.stderr)
