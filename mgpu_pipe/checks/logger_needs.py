"""What Lightning's loggers need that is known before they are built: packages, stores, keys of services. No torch."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

from mgpu_pipe.config.source_class import inherited_names
from mgpu_pipe.errors import ConfigError

LOGGERS = "pytorch_lightning.loggers"
PACKAGES = {
    "WandbLogger": ("wandb", "wandb"),
    "MLFlowLogger": ("mlflow", "mlflow-skinny"),
    "TensorBoardLogger": ("tensorboard", "tensorboard"),
    "NeptuneLogger": ("neptune", "neptune"),
    "CometLogger": ("comet_ml", "comet-ml"),
}
"""The module that each needs, and the package that brings it."""
DATABASES = ("sqlite", "mysql", "postgresql", "mssql")
DATABASE_PACKAGES = ("sqlalchemy", "alembic")
NOT_ONLINE = ("offline", "disabled", "dryrun")


def logger_errors(leaf: Mapping[str, Any], key: str) -> Iterator[ConfigError]:
    """What is missing for the logger of ``leaf``; nothing for other classes."""
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
    """Without a terminal to ask for it, W&B needs its key beforehand."""
    offline = leaf.get("offline") or os.environ.get("WANDB_MODE", "").lower() in NOT_ONLINE
    if offline or leaf.get("mode") in NOT_ONLINE or "WANDB_API_KEY" in os.environ or _remembered_by_wandb():
        return
    fix = f"set WANDB_API_KEY, run wandb login, or write {key}.offline=true"
    yield ConfigError(f"{key}._target_", leaf["_target_"], fix, "W&B has no key for its service")


def _remembered_by_wandb() -> bool:
    """Whether ``wandb login`` left a key, or ``wandb offline`` its settings, where wandb looks for them."""
    places = (os.environ.get("NETRC") or "~/.netrc", "~/_netrc", "~/.config/wandb/settings", "wandb/settings")
    return any(_mentions(Path(place).expanduser()) for place in places)


def _mentions(file: Path) -> bool:
    try:
        text = file.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False
    return "wandb" in text or "offline" in text or "disabled" in text
