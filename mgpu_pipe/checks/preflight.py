"""Runs all checks of a run before a worker starts, in order and with their prerequisites."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

from mgpu_pipe.checks.check_model import (
    check_attention,
    check_built,
    check_family,
    check_model,
    check_tokenizer_size,
    peft_errors,
    sequence_errors,
)
from mgpu_pipe.checks.check_sizes import range_errors, size_errors, update_errors
from mgpu_pipe.checks.devices import numerics_errors
from mgpu_pipe.checks.fitting import sample_errors, task_errors
from mgpu_pipe.checks.model_axes import refused_axes_errors
from mgpu_pipe.checks.notices import Notice, notices
from mgpu_pipe.checks.parameter_names import name_errors
from mgpu_pipe.checks.start import cache_errors, check_start, is_joined, run_folder_errors
from mgpu_pipe.checks.values import relation_errors, value_errors
from mgpu_pipe.config.data_sources import find_source
from mgpu_pipe.config.plugins import ENGINES, OBJECTIVES
from mgpu_pipe.config.resolve import device_type
from mgpu_pipe.config.schema import DataConfig, ModelConfig, ObjectiveConfig, RunConfig, StrategyConfig, TrainerConfig
from mgpu_pipe.errors import BadInputError, ConfigErrors, raised_by, section_of
from mgpu_pipe.planning.memory_limits import memory_notice, predict_fit
from mgpu_pipe.system.hardware import usable_gpus
from mgpu_pipe.topology import ParallelDims

FindErrors = Callable[[], Iterable[BadInputError]]


@dataclass(frozen=True)
class Check:
    """A check with its prerequisites.

    Attributes:
        find_errors: returns the errors of the sections that it reads.
        sections: sections of the configuration that must have no errors.
        composed: whether the other sections must be composed without errors too; a wrong key holds its default.
        ranges: whether every number must be in its range.
        last: whether there must be no errors at all, because the check imports a package or torch.
    """

    find_errors: FindErrors
    sections: tuple[str, ...] = ()
    composed: bool = True
    ranges: bool = False
    last: bool = False


def checks(config: RunConfig, alone: Sequence[str] = (), elsewhere: bool = False) -> list[Check]:
    """All checks of ``config`` in order, each with the sections that it reads.

    Args:
        alone: the words that start this run, for the commands in errors.
        elsewhere: nothing is started here; the run may be for another machine with GPUs.
    """
    return [
        Check(lambda: value_errors(config), composed=False),
        Check(
            _return_errors(lambda: check_model(config.model, config.data, config.objective)), ("model",), composed=False
        ),
        Check(
            _return_errors(lambda: _check_data(config.model, config.data, config.objective)), ("data",), composed=False
        ),
        Check(lambda: relation_errors(config, is_joined(), elsewhere)),
        Check(lambda: sample_errors(config.data, config.objective), ("model",)),
        Check(lambda: numerics_errors(config)),
        Check(lambda: peft_errors(config), ("peft", "objective", "strategy")),
        Check(lambda: run_folder_errors(config.run, config.checkpoint, alone)),
        Check(lambda: cache_errors(config.data), ("data",)),
        Check(_return_errors(lambda: check_start(config.checkpoint)), ("checkpoint",)),
        Check(lambda: size_errors(config, elsewhere), ranges=True),
        Check(lambda: sequence_errors(config.model, config.data), ("model", "data"), ranges=True),
        Check(lambda: update_errors(config), ("optimizer",), ranges=True),
        Check(_return_errors(lambda: check_attention(config.model, config.data, config.objective)), ("model", "data")),
        Check(lambda: task_errors(config.eval, config.objective, config.data), ranges=True),
        Check(lambda: name_errors(config.model, config.optimizer, config.peft), ("model", "peft", "objective")),
        Check(_return_errors(lambda: check_tokenizer_size(config.model, config.data, config.objective)), last=True),
        Check(_return_errors(lambda: _check_plug_ins(config.objective, config.strategy, config.trainer)), last=True),
        Check(_return_errors(lambda: check_built(config)), last=True),
    ]


def preflight(config: RunConfig, alone: Sequence[str] = (), elsewhere: bool = False) -> list[Notice]:
    """Check a run: keys, sizes, model, data, folders.

    Args:
        alone: the words that start this run, for the commands in errors.
        elsewhere: nothing is started here; a machine without GPUs may check a run for one with GPUs.

    Raises:
        ConfigErrors: all errors together.
    """
    errors = preflight_errors(config, alone=alone, elsewhere=elsewhere)
    if errors:
        raise ConfigErrors(errors)
    messages = notices(config)
    if text := memory_notice(predict_fit(config, elsewhere), config.trainer):
        messages.append(Notice("trainer.memory_check", text))
    if elsewhere and config.launch.type == "local" and device_type(config.trainer) == "cuda" and not usable_gpus():
        messages.append(Notice("trainer.accelerator", "torch can use no GPU here: this is checked for another machine"))
    return messages


def preflight_errors(
    config: RunConfig, known: Sequence[BadInputError] = (), alone: Sequence[str] = (), elsewhere: bool = False
) -> list[BadInputError]:
    """All errors of ``config``, starting with ``known``.

    Args:
        known: errors of composing it; their keys hold defaults.
        alone: the words that start this run, for the commands in errors.
        elsewhere: nothing is started here; the run may be for another machine with GPUs.
    """
    errors = list(known)
    misread = {section_of(error) for error in known}
    for check in checks(config, alone, elsewhere):
        sections = misread if not check.composed else {section_of(error) for error in errors}
        if sections.intersection(check.sections) or (check.composed and known) or (check.last and errors):
            continue
        if check.ranges and range_errors(config):
            continue
        errors += [error for error in check.find_errors() if section_of(error) not in misread]
    return _first_of_each_key(errors)


def _return_errors(check: Callable[[], None]) -> FindErrors:
    """Turns a check that raises into one that returns its errors."""
    return partial(raised_by, check)


def _first_of_each_key(errors: list[BadInputError]) -> list[BadInputError]:
    """The first error of each key, because two checks may report the same fault."""
    first_errors: dict[str, BadInputError] = {}
    for error in errors:
        key = str(getattr(error, "key", "")) or str(error)
        same_value = key in first_errors and str(getattr(first_errors[key], "value", "")) != str(
            getattr(error, "value", "")
        )
        first_errors.setdefault(f"{key}={getattr(error, 'value', '')}" if same_value else key, error)
    return list(first_errors.values())


def _check_data(model: ModelConfig, data: DataConfig, objective: ObjectiveConfig) -> None:
    from mgpu_pipe.data.data_source import check_sources

    # Data of another kind, and a family that the objective does not train, have their own errors.
    if sample_errors(data, objective) or raised_by(partial(check_family, model, objective)):
        return
    source = find_source(data.source)
    if source is None or not source.reads_files or data.paths:
        check_sources(model, data)


def _check_plug_ins(objective: ObjectiveConfig, strategy: StrategyConfig, trainer: TrainerConfig) -> None:
    """Refuse plug-in classes of a wrong kind, and axes that a plug-in's objective cannot use."""
    if objective.name not in OBJECTIVES:
        from mgpu_pipe.objectives.protocols import FeatureGatherer
        from mgpu_pipe.objectives.registry import objective_class

        axes = ("pp", "cp") if issubclass(objective_class(objective.name), FeatureGatherer) else ()
        refused = refused_axes_errors(objective, ParallelDims.from_config(trainer, strategy), axes)
        if refused:
            raise refused[0]
    if strategy.engine not in ENGINES:
        from mgpu_pipe.training.trainer import strategy_class

        strategy_class(strategy.engine)
