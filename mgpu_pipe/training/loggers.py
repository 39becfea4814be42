"""Lightning loggers, started before the first step: one that cannot start is refused there, in one line."""

from __future__ import annotations

from pathlib import Path

from pytorch_lightning.loggers import Logger

from mgpu_pipe.config.build import TARGET, build
from mgpu_pipe.config.interpolation import EnvironmentText
from mgpu_pipe.config.plugins import LONGEST
from mgpu_pipe.config.schema import RunConfig
from mgpu_pipe.errors import BadInputError, ConfigError


def start_loggers(config: RunConfig, folder: Path) -> list[Logger]:
    """Build every logger of ``config`` and open what it writes to.

    Args:
        folder: the run's folder, where loggers that take a ``save_dir`` write.

    Raises:
        BadInputError: one that cannot be built, or whose store or service refuses it.
    """
    if config.logger:
        Path(config.run.root).expanduser().mkdir(parents=True, exist_ok=True)  # for a store that runs share
    started = []
    for name, node in config.logger.items():
        try:
            logger = build(node, Logger, f"logger.{name}", save_dir=str(folder))
            getattr(logger, "experiment", None)  # Lightning opens it at its first use
        except BadInputError:
            raise
        except Exception as error:  # each library has errors of its own
            said = f"cannot be started ({type(error).__name__}: {error})"
            for value in node.values():
                if isinstance(value, EnvironmentText):
                    said = said.replace(value, value.interpolation)
            reason = " ".join(said.split())[:LONGEST]
            fix = f"correct logger.{name}, or use logger=none"
            raise ConfigError(f"logger.{name}.{TARGET}", node[TARGET], fix, reason) from error
        started.append(logger)
    return started
