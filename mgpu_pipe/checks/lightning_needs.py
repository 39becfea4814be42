"""Checks of Lightning's callbacks and loggers before their construction: packages, stores, keys of services."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

from mgpu_pipe.config.targets.source_class import inherited_names
from mgpu_pipe.errors import ConfigError
from mgpu_pipe.system.local_files import expand_home

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
    """Errors of the callback in ``leaf``; none for other classes.

    Args:
        has_logger: whether the run has one of Lightning's loggers.
    """
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
