"""Every check of a run before a worker starts, in one list, with what each of them needs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

from mgpu_pipe.checks.model import check_attention, check_model, check_names, peft_errors
from mgpu_pipe.checks.notices import Notice, notices
from mgpu_pipe.checks.numerics import numerics_errors
from mgpu_pipe.checks.ranges import range_errors
from mgpu_pipe.checks.sizes import size_errors, update_errors
from mgpu_pipe.checks.start import check_start, joined, run_folder_errors
from mgpu_pipe.checks.tasks import task_errors
from mgpu_pipe.checks.values import relation_errors, sample_errors, value_errors
from mgpu_pipe.config.hardware import usable_gpus
from mgpu_pipe.config.plugins import ENGINES, FILE_SOURCES, OBJECTIVES, PICTURE_CHAT_SOURCES
from mgpu_pipe.config.resolve import device_type, world_size
from mgpu_pipe.config.schema import RunConfig
from mgpu_pipe.errors import BadInputError, ConfigErrors, raised_by, section_of
from mgpu_pipe.topology import ParallelDims

Look = Callable[[RunConfig], Iterable[BadInputError]]


@dataclass(frozen=True)
class Check:
    """A check, and what must be right before it can be made.

    Attributes:
        look: gives the errors of a configuration.
        sections: those of the configuration in which nothing may be wrong.
        composed: whether keys of other sections must be right too: one that is wrong holds its default.
        ranges: whether every number must be in its range.
        last: whether nothing at all may be wrong, because it imports a package or torch.
    """

    look: Look
    sections: tuple[str, ...] = ()
    composed: bool = True
    ranges: bool = False
    last: bool = False


def checks(alone: Sequence[str] = (), elsewhere: bool = False) -> list[Check]:
    """All of them, in order; arguments as of :func:`preflight`."""
    return [
        Check(value_errors, composed=False),
        Check(_raising(check_model), ("model",), composed=False),
        Check(_raising(_check_data), ("data",), composed=False),
        Check(lambda config: relation_errors(config, joined(), elsewhere)),
        Check(numerics_errors),
        Check(peft_errors, ("peft", "objective", "strategy")),
        Check(lambda config: run_folder_errors(config, alone)),
        Check(_raising(check_start), ("checkpoint",)),
        Check(lambda config: size_errors(config, elsewhere), ranges=True),
        Check(update_errors, ("optimizer",), ranges=True),
        Check(_raising(check_attention), ("model",)),
        Check(task_errors, ranges=True),
        Check(_raising(_check_plug_ins), last=True),
        Check(_raising(check_names), last=True),
    ]


def preflight(config: RunConfig, alone: Sequence[str] = (), elsewhere: bool = False) -> list[Notice]:
    """Check a run: keys, sizes, model, data, folders.

    Args:
        alone: the words that start this run, for the commands that errors name.
        elsewhere: nothing is started here; a machine without a GPU checks a run on GPUs for another one.

    Raises:
        ConfigErrors: everything that is wrong, together.
    """
    errors = preflight_errors(config, alone=alone, elsewhere=elsewhere)
    if errors:
        raise ConfigErrors(errors)
    told = notices(config)
    if elsewhere and config.launch.type == "local" and device_type(config) == "cuda" and not usable_gpus():
        told.append(Notice("trainer.accelerator", "torch can use no GPU here: this is checked for another machine"))
    return told


def preflight_errors(
    config: RunConfig, known: Sequence[BadInputError] = (), alone: Sequence[str] = (), elsewhere: bool = False
) -> list[BadInputError]:
    """All errors of ``config``, those that are ``known`` first.

    Args:
        known: errors of composing it; the keys they name hold defaults.
        alone, elsewhere: as of :func:`preflight`.
    """
    errors = list(known)
    misread = {section_of(error) for error in known}
    for check in checks(alone, elsewhere):
        wrong = misread if not check.composed else {section_of(error) for error in errors}
        if wrong.intersection(check.sections) or (check.composed and known) or (check.last and errors):
            continue
        if check.ranges and range_errors(config):
            continue
        errors += [error for error in check.look(config) if section_of(error) not in misread]
    return _one_for_each_key(errors)


def _raising(check: Callable[[RunConfig], None]) -> Look:
    return lambda config: raised_by(partial(check, config))


def _one_for_each_key(errors: list[BadInputError]) -> list[BadInputError]:
    """The first error of every key: two checks may see the same fault."""
    kept: dict[str, BadInputError] = {}
    for error in errors:
        key = str(getattr(error, "key", "")) or str(error)
        same_value = key in kept and str(getattr(kept[key], "value", "")) != str(getattr(error, "value", ""))
        kept.setdefault(f"{key}={getattr(error, 'value', '')}" if same_value else key, error)
    return list(kept.values())


def _check_data(config: RunConfig) -> None:
    from mgpu_pipe.data.text.sources import check_sources

    if sample_errors(config):  # what is of another kind is not judged as if it were of this one
        return
    if config.data.source == "mixture":
        from mgpu_pipe.data.text.mixture_check import check_mixture

        check_mixture(config)
    if config.data.source not in FILE_SOURCES or config.data.paths:
        check_sources(config)
    if config.data.holds_conversations() and config.data.paths and config.data.source not in PICTURE_CHAT_SOURCES:
        from mgpu_pipe.data.text.chat_templates import check_chat

        check_chat(config)


def _check_plug_ins(config: RunConfig) -> None:
    """The classes that a package registers are what they should be."""
    objective, engine = config.objective.name, config.strategy.engine
    if objective not in OBJECTIVES:
        from mgpu_pipe.checks.model_axes import refused_axes_errors
        from mgpu_pipe.training.plugins import objective_class

        axes = ("pp", "cp") if objective_class(objective).samples_meet else ()
        refused = refused_axes_errors(config, ParallelDims.resolve(config.strategy, world_size(config)), axes)
        if refused:
            raise refused[0]
    if engine not in ENGINES:
        from mgpu_pipe.training.plugins import strategy_class

        strategy_class(engine)
