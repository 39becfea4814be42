"""``mgpu-pipe eval``: what a run reaches on held-out data."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING

from mgpu_pipe.checks.values import sample_errors
from mgpu_pipe.commands import Verb
from mgpu_pipe.config.objective import description, descriptions
from mgpu_pipe.config.schema import DataConfig, RunConfig
from mgpu_pipe.config.untrusted_run import untrusted_data
from mgpu_pipe.errors import EXIT_OK, BadInputError, ConfigError
from mgpu_pipe.inference.arguments import open_run, parsed, parser_of, takes_device
from mgpu_pipe.inference.load import LoadedRun
from mgpu_pipe.models.fields import class_of
from mgpu_pipe.runs.hub_names import at_commits

if TYPE_CHECKING:
    from mgpu_pipe.data.samples import Prepared


def evaluate(argv: Sequence[str]) -> int:
    """``mgpu-pipe eval [FOLDER] [data.KEY=VALUE ...]``: the objective's metrics on held-out data, weights in fp32."""
    parser = parser_of("eval", "The objective's metrics on held-out data, with the run's frozen configuration.")
    takes_device(parser)
    parser.add_argument("overrides", nargs="*", metavar="data.KEY=VALUE", help="other data than the run's")
    _evaluate(parsed(parser, argv))
    return EXIT_OK


def _evaluate(arguments: argparse.Namespace) -> None:
    run = open_run(arguments)
    from mgpu_pipe.data.loader import evaluation_step_batches
    from mgpu_pipe.inference.evaluate import evaluate_step_batches
    from mgpu_pipe.models.rotary import fix_rotary_length
    from mgpu_pipe.objectives.first_weights import RunStart
    from mgpu_pipe.objectives.registry import objective_class
    from mgpu_pipe.topology import BatchPlan

    config = _evaluation_config(run, arguments.overrides)
    data = at_commits(RunConfig(data=config.data)).data
    config = config if data == config.data else replace(config, data=data)
    refused = sample_errors(config)
    if refused:
        raise refused[0]
    prepared = _prepared(run, config)
    chosen = objective_class(config.objective.name)
    step_batches = evaluation_step_batches(config, prepared, BatchPlan.resolve(config.data, 1), 0, chosen.samples)
    if not len(step_batches):
        fix = "set it above 0, or give held-out files by data.validation_paths"
        raise ConfigError("data.validation_fraction", config.data.validation_fraction, fix, "nothing is held out")
    fix_rotary_length(run.model, config.data.seq_len)
    objective = chosen.from_config(config, run.model, None, lambda step: 1.0)
    if run.config is not None:
        objective.of_run(RunStart(config, run.source.parents[1], prepared, BatchPlan.resolve(config.data, 1), 0, 0))
    result = evaluate_step_batches(objective, step_batches)
    told = objective.description
    width = max(12, *(len(metric.name) + 2 for metric in told.metrics))
    for metric in told.metrics:
        value = result.metrics.get(metric.key, math.nan)
        shown = f"{100 * value:.2f}%" if metric.percent else f"{value:.{metric.digits}f}"
        print(f"{metric.name:<{width}}{shown} {metric.unit}".rstrip())
        baseline = None if metric.baseline is None else getattr(prepared, metric.baseline, None)
        if baseline is not None:
            print(f"{'unigram':<{width}}{baseline:.{metric.digits}f} ({metric.name} of the token frequencies alone)")
    print(f"{'over':<{width}}{result.counted} {told.counts} of {result.samples} held-out samples, in fp32")
    print(f"{'weights':<{width}}{'the average of ' if arguments.weights == 'ema' else ''}{run.source}")


def _evaluation_config(run: LoadedRun, overrides: Sequence[str]) -> RunConfig:
    """The run's configuration with the data overrides applied; for a model folder, the default data."""
    from mgpu_pipe.config.compose import compose

    strange = [text for text in overrides if not text.lstrip("+").startswith(("data.", "data="))]
    if strange:
        raise BadInputError(f"{strange[0]}: eval takes data overrides only, e.g. data.validation_paths=[held_out.txt]")
    if run.config is None:
        built_by = class_of([type(run.model).__name__])
        objective = next(one.name for one in descriptions() if one.model_class == built_by)
        folder = ["model=hf", f"model.path={run.source.absolute()}", f"objective={objective}"]
        return _with_classes(compose([*folder, *overrides])[0], run)
    given = {text.lstrip("+").split("=")[0] for text in overrides}
    config = replace(run.config, data=_with_overrides(run.config.data, overrides)) if overrides else run.config
    config = _with_classes(config, run)
    return config if run.own else replace(config, data=untrusted_data(config.data, given))


def _with_classes(config: RunConfig, run: LoadedRun) -> RunConfig:
    """``config`` with the model's classes in the model's order, whichever of them the data has."""
    if description(config.objective.name).samples != "labelled_text":
        return config
    classes = [name for _, name in sorted(dict(run.model.config.id2label or {}).items())]
    return replace(config, data=replace(config.data, classes=classes))


def _with_overrides(data: DataConfig, overrides: Sequence[str]) -> DataConfig:
    """``data`` with the keys that ``overrides`` name, composed by Hydra like those of a training run."""
    from mgpu_pipe.config.compose import compose

    keys = {text.lstrip("+").split("=")[0] for text in overrides}
    plug_in = type(data) is not DataConfig and not keys & {"data", "data.source"}
    composed = compose([*([f"data.source={data.source}"] if plug_in else []), *overrides])[0].data
    named = {key.split(".")[1] for key in keys - {"data"}}
    if "data" in keys:  # another source: only what the model was trained to stays
        named = {field.name for field in fields(composed)} - ({"seq_len", "tokenizer"} - named)
    kept = [field.name for field in fields(composed) if field.name not in named and hasattr(data, field.name)]
    return replace(composed, **{name: getattr(data, name) for name in kept})


def _prepared(run: LoadedRun, config: RunConfig) -> Prepared:
    """The data, tokenised as the run's was: by the tokenizer that the run keeps, where another would come out."""
    from mgpu_pipe.data.prepare import prepare

    kept = run.tokenizer_folder
    if not run.own and kept is None and config.data.source != "synthetic" and config.data.tokenizer == "auto":
        raise ConfigError("data.tokenizer", "auto", "give data.tokenizer=<folder>", f"{run.source} keeps no tokenizer")
    changed = run.config is None or config is not run.config
    if not changed or kept is None:
        prepared = prepare(config)
        if kept is None or _same_tokenizer(prepared.tokenizer_folder, kept):
            return prepared
    return prepare(replace(config, data=replace(config.data, tokenizer=str(kept.absolute()))))


def _same_tokenizer(one: Path | None, other: Path) -> bool:
    if one is None:
        return False
    files = [folder / "tokenizer.json" for folder in (one, other)]
    return all(file.is_file() for file in files) and files[0].read_bytes() == files[1].read_bytes()


VERB = Verb("what a run reaches on held-out data", evaluate, section="data")
