"""Lightning loggers, started before the first step: one that cannot start is refused there, in one line.

A run's folder keeps which run of W&B or MLflow is its own (``logger.json``), so that a resume writes to it.
"""

from __future__ import annotations

import base64
import io
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pytorch_lightning.loggers import Logger, MLFlowLogger, TensorBoardLogger, WandbLogger

from mgpu_pipe.config.convert import to_plain
from mgpu_pipe.config.group_keys import StrategyConfig
from mgpu_pipe.config.hydra.interpolation import EnvironmentText, hide_environment
from mgpu_pipe.config.paths import RunPaths
from mgpu_pipe.config.plugins import MAX_MESSAGE
from mgpu_pipe.config.schema import RunConfig, RunOptions
from mgpu_pipe.config.targets.build_target import TARGET, build, resolve_target
from mgpu_pipe.errors import BadInputError, ConfigError, conceal
from mgpu_pipe.runs.latest import read_record
from mgpu_pipe.system.local_files import MAX_JSON_BYTES, expand_home, parse_json, read_bytes, replace_file
from mgpu_pipe.topology import ParallelDims

SECRET = re.compile(r"(logger|callbacks)\..*(key|token|password|secret|credentials?)", re.IGNORECASE)
"""Keys of arguments for other people's classes whose values go to no service."""
USER = re.compile(r"://[^/@\s]+@")
"""User and password in an address."""
MASK = "***"


def tags(run: RunOptions, strategy: StrategyConfig, dims: ParallelDims) -> dict[str, str]:
    """Search terms of a run: its name, strategy and topology, and the tags of ``run.tags``."""
    sizes = ", ".join(f"{axis}={size}" for axis, size in dims.as_dict().items() if size > 1)
    known = {"run.name": run.name, "strategy": strategy.name, "topology": sizes or "1 process"}
    return known | ({"run.tags": ", ".join(run.tags)} if run.tags else {})


def command_line(folder: Path) -> str:
    """The command that started the run of ``folder``; empty where it is not recorded."""
    words = read_record(folder).get("command")
    if not isinstance(words, list):
        return ""
    masked = []
    for word in map(str, words):
        key, equals, value = word.partition("=")
        masked.append(f"{key}{equals}{without_secret(key.lstrip('+'), value)}")
    return " ".join(masked)


def without_secret(key: str, value: Any) -> Any:
    """``value`` with its secrets masked, fit to send to a service."""
    if not isinstance(value, str):
        return value
    return MASK if SECRET.fullmatch(key) else USER.sub(f"://{MASK}@", conceal(value))


def _flat(node: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every key below ``node`` with its value; lists as JSON, texts of the environment as their interpolation."""
    for name, value in node.items():
        key = f"{prefix}{name}"
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{key}.")
        elif value is None or isinstance(value, bool | int | float | str):
            yield key, value
        else:
            yield key, json.dumps(value, ensure_ascii=False, default=str)


REFUSED = re.compile(r"[^a-zA-Z0-9_/. -]")
"""Characters that MLflow accepts in no name."""


def mlflow_name(name: str) -> str:
    """``name`` without characters that MLflow refuses: ``recall@5`` becomes ``recall_at_5``."""
    return REFUSED.sub("_", name.replace("@", "_at_"))


def log_metrics(logger: Logger, values: Mapping[str, float], step: int) -> None:
    """Add a row of metrics."""
    if isinstance(logger, MLFlowLogger):
        values = {mlflow_name(name): value for name, value in values.items()}
    logger.log_metrics(dict(values), step=step)


def log_samples(loggers: Sequence[Logger], step: int, samples: Sequence[Mapping[str, str]]) -> None:
    """Log the model's answers to the prompts at ``step``, to loggers that keep texts and pictures."""
    for logger in loggers if samples else ():
        if isinstance(logger, TensorBoardLogger):
            _to_tensorboard(logger, step, samples)
        elif isinstance(logger, WandbLogger):
            _to_wandb(logger, step, samples)
        elif isinstance(logger, MLFlowLogger):
            _to_mlflow(logger, step, samples)


def _to_tensorboard(logger: TensorBoardLogger, step: int, samples: Sequence[Mapping[str, str]]) -> None:
    import numpy

    texts = "\n\n".join(f"    {_line(sample)}" for sample in samples)  # indented: Markdown that shows it as it is
    logger.experiment.add_text("samples", texts, step)
    for index, sample in enumerate(samples):
        if sample.get("image"):
            pixels = numpy.asarray(_picture(sample).convert("RGB"))
            logger.experiment.add_image(f"samples/{index}", pixels, step, dataformats="HWC")


def _to_wandb(logger: WandbLogger, step: int, samples: Sequence[Mapping[str, str]]) -> None:
    logger.log_text(
        "samples", ["prompt", "text"], [[sample["prompt"], sample["text"]] for sample in samples], step=step
    )
    pictured = [sample for sample in samples if sample.get("image")]
    if pictured:
        captions = [_line(sample) for sample in pictured]
        logger.log_image("pictures", [_picture(sample) for sample in pictured], step=step, caption=captions)


def _to_mlflow(logger: MLFlowLogger, step: int, samples: Sequence[Mapping[str, str]]) -> None:
    client, run_id, name = logger.experiment, logger.run_id, f"samples/step-{step:08d}"
    client.log_text(run_id, "".join(_line(sample) + "\n" for sample in samples), f"{name}.txt")
    for index, sample in enumerate(samples):
        if sample.get("image"):
            client.log_image(run_id, _picture(sample), f"{name}-{index}.png")


def _line(sample: Mapping[str, str]) -> str:
    return (sample["prompt"] + sample["text"]).replace("\n", " ")


def _picture(sample: Mapping[str, str]) -> Any:
    from PIL import Image

    return Image.open(io.BytesIO(base64.b64decode(sample["image"])))


WHERE = ("tracking_uri", "entity", "project")
"""Arguments that name the store of a run."""
LONGEST_TAG = 64
"""Characters of a tag of W&B's."""
LONGEST_PARAMETER = 250
"""Characters of a parameter that Lightning gives to MLflow."""
SERVERS = ("http:", "https:", "databricks")


def start_loggers(config: RunConfig, folder: Path, dims: ParallelDims) -> list[Logger]:
    """Build every logger of ``config``, open its store, and describe the run to it.

    Args:
        folder: the run's folder, where loggers that take a ``save_dir`` write.

    Raises:
        BadInputError: one that cannot be built, or whose store or service refuses it.
    """
    if config.logger:
        expand_home(config.run.root).mkdir(parents=True, exist_ok=True)  # for a store that runs share
    path, started = RunPaths(folder).logger, []
    runs = _kept_runs(path)
    parameters = {key: without_secret(key, value) for key, value in _flat(to_plain(config))}
    marks, command = tags(config.run, config.strategy, dims), command_line(folder)
    for name, node in config.logger.items():
        store = {key: without_secret(key, hide_environment(node[key])) for key in (TARGET, *WHERE) if key in node}
        before = runs.get(name, {})
        run_id = str(before["id"]) if before.get("store") == store and "id" in before else None
        try:
            options = _options(config.run, node, name, marks, command, run_id)
            logger = build(node, Logger, f"logger.{name}", save_dir=str(folder), **options)
            getattr(logger, "experiment", None)  # Lightning opens it at its first use
            _describe(logger, parameters, marks, command)
        except BadInputError:
            raise
        except Exception as error:  # each library has its own errors
            said = f"cannot be started ({type(error).__name__}: {error})"
            for value in node.values():
                if isinstance(value, EnvironmentText):
                    said = said.replace(value, value.interpolation)
            reason = " ".join(said.split())[:MAX_MESSAGE]
            fix = f"correct logger.{name}, or use logger=none"
            if run_id is not None:
                fix += f", or remove {path} to begin another run there"
            raise ConfigError(f"logger.{name}.{TARGET}", node[TARGET], fix, reason) from error
        started.append(logger)
        if (opened_id := _run_id(logger)) is not None:
            runs[name] = {"store": store, "id": opened_id}
            replace_file(path, json.dumps(runs, indent=2) + "\n")
    return started


def _kept_runs(path: Path) -> dict[str, Any]:
    try:
        content = parse_json(read_bytes(path, MAX_JSON_BYTES), path)
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise BadInputError(f"{path}: cannot be read ({error}); remove it, and the loggers start new runs") from error
    if not isinstance(content, dict) or not all(isinstance(value, dict) for value in content.values()):
        raise BadInputError(f"{path}: holds no runs of loggers; remove it, and the loggers start new runs")
    return content


def _options(
    run: RunOptions, node: Mapping[str, Any], name: str, marks: Mapping[str, str], command: str, run_id: str | None
) -> dict[str, Any]:
    """Arguments for a logger's constructor in addition to those of its configuration."""
    cls, _ = resolve_target(node, Logger, f"logger.{name}")
    if issubclass(cls, WandbLogger):
        known = [marks["run.name"], marks["strategy"], marks["topology"], *run.tags]
        short = [tag[:LONGEST_TAG] for tag in known if tag]
        return {"id": run_id, "resume": "allow", "tags": list(dict.fromkeys(short)), "notes": command}
    if issubclass(cls, MLFlowLogger):
        options: dict[str, Any] = {"run_id": run_id, "tags": {**marks, "mlflow.note.content": command}}
        uri = node.get("tracking_uri") or os.environ.get("MLFLOW_TRACKING_URI") or ""
        if not str(uri).startswith(SERVERS):  # MLflow's own place is the working folder
            place = expand_home(run.root).absolute() / "mlartifacts"
            options["artifact_location"] = place.as_uri()
        return options
    return {}


def _describe(logger: Logger, parameters: dict[str, Any], marks: Mapping[str, str], command: str) -> None:
    """Log the run's configuration, and its tags and command as texts where the logger has no field for them."""
    if isinstance(logger, MLFlowLogger):
        _describe_to_mlflow(logger, {mlflow_name(key): value for key, value in parameters.items()})
        return
    logger.log_hyperparams(parameters)
    if isinstance(logger, TensorBoardLogger):
        logger.experiment.add_text("run/tags", "\n".join(f"    {key}: {value}" for key, value in marks.items()), 0)
        logger.experiment.add_text("run/command", f"    {command}", 0)


def _describe_to_mlflow(logger: MLFlowLogger, parameters: Mapping[str, Any]) -> None:
    """Log parameters once, since MLflow keeps the first value; a changed value becomes a tag of the same name."""
    client, run_id = logger.experiment, logger.run_id
    run = client.get_run(run_id)
    first = run.data.params
    logger.log_hyperparams({key: value for key, value in parameters.items() if key not in first})
    for key, value in parameters.items():
        if key in first and str(value)[:LONGEST_PARAMETER] != first[key]:
            client.set_tag(run_id, key, str(value))
    if run.info.status != "RUNNING":
        client.update_run(run_id, "RUNNING")


def _run_id(logger: Logger) -> str | None:
    """ID of the service's run that a logger writes to; None for loggers that write to the run's folder."""
    if isinstance(logger, WandbLogger):
        return str(logger.experiment.id)
    return str(logger.run_id) if isinstance(logger, MLFlowLogger) else None
