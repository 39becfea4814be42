"""Checks of a configuration's slots: the places for a `_target_`, with the base class of each."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from mgpu_pipe.checks.lightning_needs import CALLBACKS, callback_errors, logger_errors
from mgpu_pipe.config.objective import description
from mgpu_pipe.config.plugins import OBJECTIVES
from mgpu_pipe.config.schema import ObjectiveConfig, OptimizerConfig, TrainerConfig
from mgpu_pipe.config.suggest import choose_from, nearest
from mgpu_pipe.config.targets.build_target import TARGET, check_target
from mgpu_pipe.config.targets.source_class import NoSuchName, NotAClass, Unknown, find_class, inherited_names, signature
from mgpu_pipe.errors import ConfigError
from mgpu_pipe.system.conf_folders import conf_dir

OPTIMIZER_BASE = "torch.optim.Optimizer"
LOGGER_BASE = "pytorch_lightning.loggers.Logger"
CALLBACK_BASE = "pytorch_lightning.Callback"
EARLY_STOPPING = "EarlyStopping"
MODES = ("min", "max")

OPTIMIZER_PROVIDES = ("params", "lr", "weight_decay", "fused")
LOGGER_PROVIDES = ("save_dir",)


def slot_errors(
    optimizer: OptimizerConfig, objective: ObjectiveConfig, logger: dict[str, Any], callbacks: dict[str, Any]
) -> list[ConfigError]:
    """Errors of the leaves of ``config``; builds and calls nothing."""
    errors = _optimizer_errors(optimizer)
    for section, leaves, base, provided in (
        ("logger", logger, LOGGER_BASE, LOGGER_PROVIDES),
        ("callbacks", callbacks, CALLBACK_BASE, ()),
    ):
        for name, leaf in leaves.items():
            key = f"{section}.{name}"
            meant = nearest(name, set(leaves) - {name})
            if meant and isinstance(leaf, Mapping) and leaf and TARGET not in leaf:  # an argument of a misspelt leaf
                fix = f"did you mean {section}.{meant}?"
                errors += [ConfigError(f"{key}.{word}", value, fix, "no such key") for word, value in leaf.items()]
                continue
            if isinstance(leaf, Mapping) and leaf and TARGET not in leaf and _is_option(section, name):
                fix, reason = f"choose it too, by {section}={name}", f"{section}={name} is not chosen"
                errors += [ConfigError(f"{key}.{word}", value, fix, reason) for word, value in leaf.items()]
                continue
            errors += check_target(leaf, base, key, provided) or [
                *logger_errors(leaf, key),
                *callback_errors(leaf, key, bool(logger)),
                *_metric_errors(objective, leaf, key),
            ]
    return errors


def _is_option(section: str, name: str) -> bool:
    return (conf_dir() / section / f"{name}.yaml").is_file()


def _metric_errors(objective: ObjectiveConfig, leaf: Mapping[str, Any], key: str) -> Iterator[ConfigError]:
    """Errors of early stopping: it must monitor a metric that the objective logs. A plug-in's may log any."""
    if EARLY_STOPPING not in inherited_names(leaf[TARGET], CALLBACKS) or objective.name not in OBJECTIVES:
        return
    monitor, mode = leaf["monitor"], leaf.get("mode", "min")
    logged = [metric.key for metric in description(objective.name).metrics]
    if monitor not in logged:
        yield ConfigError(f"{key}.monitor", monitor, choose_from(str(monitor), logged), "no such metric")
    patience = leaf.get("patience")
    if isinstance(patience, int) and patience < 0:
        yield ConfigError(f"{key}.patience", patience, "use a number of at least 0")
    if mode not in MODES:
        yield ConfigError(f"{key}.mode", mode, choose_from(str(mode), MODES))


def early_stopping_errors(trainer: TrainerConfig, callbacks: dict[str, Any]) -> Iterator[ConfigError]:
    """An error of early stopping in a run whose only evaluation is at its end."""
    every, last = trainer.val_every_n_steps, trainer.max_steps
    if every is not None and (last is None or every < last):
        return
    for name, leaf in callbacks.items():
        if isinstance(leaf, Mapping) and EARLY_STOPPING in inherited_names(str(leaf.get(TARGET)), CALLBACKS):
            fix = f"set e.g. trainer.val_every_n_steps={max(1, (last or 100) // 10)}, or leave callbacks.{name} out"
            reason = f"callbacks.{name} reads evaluations, and none runs before the end"
            yield ConfigError("trainer.val_every_n_steps", every, fix, reason)


NEEDS_CLOSURE = ("torch.optim.LBFGS", "torch.optim.lbfgs.LBFGS")
"""torch's optimizers that need a closure; for others this is known after construction."""


def _optimizer_errors(optimizer: OptimizerConfig) -> list[ConfigError]:
    errors = [
        ConfigError(f"optimizer.options.{name}", optimizer.options[name], f"set optimizer.{name} instead")
        for name in ("lr", "weight_decay")
        if name in optimizer.options
    ]
    leaf = {TARGET: optimizer._target_, **optimizer.options}
    errors += check_target(leaf, OPTIMIZER_BASE, "optimizer", OPTIMIZER_PROVIDES, "optimizer.options")
    if not errors and optimizer._target_ in NEEDS_CLOSURE:
        fix, reason = "use one that takes given gradients", "it evaluates the loss itself, several times a step"
        errors.append(ConfigError("optimizer._target_", optimizer._target_, fix, reason))
    if not errors and optimizer.weight_decay and "weight_decay" not in _argument_names(optimizer._target_):
        reason = f"{optimizer._target_} takes no weight decay"
        errors.append(ConfigError("optimizer.weight_decay", optimizer.weight_decay, "use 0", reason))
    return errors


def _argument_names(target: str) -> tuple[str, ...]:
    """The arguments of a class, from its source; without known arguments, those that are always passed."""
    try:
        taken = signature(find_class(target))
    except (NoSuchName, NotAClass, Unknown):
        return OPTIMIZER_PROVIDES
    return OPTIMIZER_PROVIDES if taken.takes_any_keyword else taken.names
