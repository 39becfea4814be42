"""Checks of a configuration's slots: the places for a `_target_`, with the base class of each.

An optimizer, loggers and callbacks are checked before their construction: class, arguments, and for Lightning's own
packages, stores and keys of services.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

from mgpu_pipe.config.objective import description
from mgpu_pipe.config.plugins import OBJECTIVES
from mgpu_pipe.config.schema import ObjectiveConfig, OptimizerConfig, TrainerConfig
from mgpu_pipe.config.suggest import choose_from, nearest
from mgpu_pipe.config.targets.build_target import TARGET, check_target
from mgpu_pipe.config.targets.source_class import NoSuchName, NotAClass, Unknown, find_class, inherited_names, signature
from mgpu_pipe.errors import ConfigError
from mgpu_pipe.system.conf_folders import conf_dir
from mgpu_pipe.system.local_files import expand_home

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
    """Errors of the optimizer, loggers and callbacks; builds and calls nothing."""
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


CALLBACKS = "pytorch_lightning.callbacks"
PARTS = "it wants the whole model before the ranks have built their parts of it"
TUNER = "Lightning's tuner changes what this program derives"
REFUSED = {
    "Checkpoint": (
        "checkpoints are written by this program",
        "remove it, and use checkpoint.every_n_steps and checkpoint.keep_best",
    ),
    "ProgressBar": ("progress is shown by this program", "remove it, and use trainer.progress=bar"),
    "GradientAccumulationScheduler": (
        "the number of micro-batches is derived",
        "remove it, and use data.micro_batch_size",
    ),
    "LearningRateFinder": (TUNER, "remove it, and sweep the rate: -m optimizer.lr=1e-4,3e-4,1e-3"),
    "BatchSizeFinder": (TUNER, "remove it, and use data.micro_batch_size"),
    "WeightAveraging": (PARTS, "remove it"),
    "StochasticWeightAveraging": (PARTS, "remove it"),
    "ModelPruning": (PARTS, "remove it"),
    "BackboneFinetuning": ("the model has no part of the name backbone", "remove it, and use model.freeze=[...]"),
    "ThroughputMonitor": ("it needs a function", "remove it: metrics.csv has tokens/s and samples/s"),
}
"""Reason and fix for refusing each callback class and its subclasses."""
NEED_LOGGER = ("LearningRateMonitor", "DeviceStatsMonitor")


def callback_errors(leaf: Mapping[str, Any], key: str, has_logger: bool) -> Iterator[ConfigError]:
    """Errors of the callback in ``leaf``, none for other classes; ``has_logger``: the run has one of Lightning's."""
    target = str(leaf["_target_"])
    names = inherited_names(target, CALLBACKS)
    for reason, fix in (refusal for name, refusal in REFUSED.items() if name in names):
        yield ConfigError(f"{key}._target_", target, fix, reason)
        return
    if not has_logger and names.intersection(NEED_LOGGER):
        yield ConfigError(f"{key}._target_", target, "add logger=tensorboard, or remove it", "it writes to a logger")


LOGGERS = "pytorch_lightning.loggers"
PACKAGES = {
    "WandbLogger": ("wandb", "wandb"),
    "MLFlowLogger": ("mlflow", "mlflow-skinny"),
    "TensorBoardLogger": ("tensorboard", "tensorboard"),
    "NeptuneLogger": ("neptune", "neptune"),
    "CometLogger": ("comet_ml", "comet-ml"),
}
"""The module that each logger needs, and the package that brings it."""
DATABASES = ("sqlite", "mysql", "postgresql", "mssql")
DATABASE_PACKAGES = ("sqlalchemy", "alembic")
NOT_ONLINE = ("offline", "disabled", "dryrun")


def logger_errors(leaf: Mapping[str, Any], key: str) -> Iterator[ConfigError]:
    """Errors of the logger in ``leaf``: missing packages, stores or keys; none for other classes."""
    target = str(leaf["_target_"])
    names = inherited_names(target, LOGGERS)
    for name, (module, package) in PACKAGES.items():
        if name not in names:
            continue
        if PathFinder.find_spec(module) is None:
            reason = f"needs {package}, not installed here"
            yield ConfigError(f"{key}._target_", target, f"pip install {package}", reason)
        elif name == "MLFlowLogger":
            yield from _mlflow_errors(str(leaf.get("tracking_uri") or os.environ.get("MLFLOW_TRACKING_URI") or ""), key)
        elif name == "WandbLogger":
            yield from _wandb_errors(leaf, key)
        elif name == "CometLogger":
            yield from _comet_errors(leaf, key)


def _mlflow_errors(uri: str, key: str) -> Iterator[ConfigError]:
    scheme = uri.partition(":")[0].partition("+")[0] if ":" in uri else ""
    missing = [package for package in DATABASE_PACKAGES if PathFinder.find_spec(package) is None]
    if scheme in DATABASES and missing:
        fix = f"pip install {' '.join(missing)}, or give a server's http address"
        yield ConfigError(f"{key}.tracking_uri", f"{scheme}:...", fix, "MLflow needs more for a database")
    if scheme in ("", "file") and os.environ.get("MLFLOW_ALLOW_FILE_STORE", "").lower() not in ("true", "1"):
        fix = f"give a database or a server, e.g. {key}.tracking_uri=sqlite:///outputs/mlflow.db"
        yield ConfigError(f"{key}.tracking_uri", uri or None, fix, "MLflow no longer writes to folders")


def _wandb_errors(leaf: Mapping[str, Any], key: str) -> Iterator[ConfigError]:
    """An error if W&B has no key, because workers have no terminal to ask for it."""
    offline = leaf.get("offline") or os.environ.get("WANDB_MODE", "").lower() in NOT_ONLINE
    if offline or leaf.get("mode") in NOT_ONLINE or "WANDB_API_KEY" in os.environ or _has_wandb_settings():
        return
    fix = f"set WANDB_API_KEY, run wandb login, or write {key}.offline=true"
    yield ConfigError(f"{key}._target_", leaf["_target_"], fix, "W&B has no key for its service")


def _has_wandb_settings() -> bool:
    """Whether wandb's files hold a key of ``wandb login`` or the settings of ``wandb offline``."""
    places = (os.environ.get("NETRC") or "~/.netrc", "~/_netrc", "~/.config/wandb/settings", "wandb/settings")
    return any(_mentions(place, ("wandb", "offline", "disabled")) for place in places)


def _comet_errors(leaf: Mapping[str, Any], key: str) -> Iterator[ConfigError]:
    """An error if Comet logs nothing, or has no key for its service."""
    if leaf.get("online") is False:
        fix = "leave it out, and set COMET_START_ONLINE=false for an archive in the run's folder"
        yield ConfigError(f"{key}.online", False, fix, "Lightning then logs nothing to Comet")
        return
    offline = os.environ.get("COMET_START_ONLINE", "").lower() in ("false", "0")
    if offline or leaf.get("api_key") or os.environ.get("COMET_API_KEY") or _has_comet_key():
        return
    fix = "set COMET_API_KEY, run comet login, or set COMET_START_ONLINE=false"
    yield ConfigError(f"{key}._target_", leaf["_target_"], fix, "Comet has no key for its service")


def _has_comet_key() -> bool:
    """Whether a configuration file of Comet holds the key of ``comet login``."""
    named = os.environ.get("COMET_CONFIG") or "~"
    places = (named, str(Path(named) / ".comet.config"), ".comet.config", "~/.comet.config", ".env")
    return any(_mentions(place, ("api_key", "COMET_API_KEY")) for place in places)


def _mentions(place: str, words: tuple[str, ...]) -> bool:
    """Whether the file holds one of the words."""
    try:
        text = expand_home(place).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False
    return any(word in text for word in words)
