"""``mgpu-pipe eval``: evaluates a run on held-out data and tasks."""

from __future__ import annotations

import argparse
import json
from collections.abc import Container, Sequence
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mgpu_pipe.checkpoint.manifest import read_manifest, read_state
from mgpu_pipe.checks.fitting import sample_errors, task_errors
from mgpu_pipe.cli.processes import add_harness_arguments, evaluate_by_harness, uses_harness
from mgpu_pipe.cli.verbs import Verb
from mgpu_pipe.config.data_sources import reads_tokenizer, samples_of
from mgpu_pipe.config.freeze import MAX_SIZES, untrusted_data
from mgpu_pipe.config.group_keys import EvalConfig
from mgpu_pipe.config.objective import description, descriptions, task_metrics
from mgpu_pipe.config.schema import DataConfig, ObjectiveConfig, RunConfig
from mgpu_pipe.data.text.tokenizer_folder import chat_of
from mgpu_pipe.errors import EXIT_OK, BadInputError, ConfigError, print_line, print_text
from mgpu_pipe.inference.model_arguments import add_device_argument, build_parser, open_run, parse_arguments
from mgpu_pipe.inference.open import LoadedRun
from mgpu_pipe.models.fields import HEADLESS, class_of
from mgpu_pipe.models.weights.sentence_modules import read_sentence_modules, require_cosine_or_dot
from mgpu_pipe.report.held_out_figures import HeldOutFigures
from mgpu_pipe.runs.hub_names import pin

if TYPE_CHECKING:
    from mgpu_pipe.data.samples import Prepared
    from mgpu_pipe.inference.tasks import TaskResult

SHARED_CLASSES = (HEADLESS, "AutoModelForSequenceClassification")
"""Classes of models that several objectives train on different data."""
USUAL = "labelled_text"
"""Data of the objective of a folder with a head of classes, where none are typed."""
PROMPTS = ("query", "document")
"""Kinds of prompts that the data of embeddings has."""


def evaluate(argv: Sequence[str]) -> int:
    """``mgpu-pipe eval [FOLDER] [data.KEY=VALUE eval.KEY=VALUE ...]``: held-out data and tasks, weights in fp32."""
    text = "The objective's metrics on held-out data, and the tasks', with the run's frozen configuration."
    parser = build_parser("eval", f"{text} With eval.KEY=VALUE and no data.KEY=VALUE the tasks alone.")
    add_device_argument(parser)
    add_harness_arguments(parser)
    parser.add_argument("--json", action="store_true", help="as JSON, every figure whole, with those of each class")
    overrides_help = "other data.* or eval.* than the run's; with --harness strategy, trainer.devices, launch.*"
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help=overrides_help)
    arguments = parse_arguments(parser, argv)
    if uses_harness(arguments):
        if arguments.json:
            raise BadInputError("--json: --harness prints no JSON; use --harness-output FILE")
        return evaluate_by_harness(arguments)
    _evaluate(arguments)
    return EXIT_OK


def _evaluate(arguments: argparse.Namespace) -> None:
    run = open_run(arguments)
    config = _evaluation_config(run, arguments.overrides)
    for error in task_errors(config.eval, config.objective, config.data):
        raise error
    weights = f"{'the average of ' if arguments.weights == 'ema' else ''}{run.source}"
    held_out = None if _tasks_alone(arguments.overrides) else _measure_held_out(run, config)
    results = _measure_tasks(run, config) if config.eval.tasks else {}
    if arguments.json:
        tasks = {name: {"value": result.value, "over": result.denominator} for name, result in results.items()}
        values = {**(held_out.values() if held_out else {}), **({"tasks": tasks} if tasks else {}), "weights": weights}
        print_text(json.dumps(values, indent=2, ensure_ascii=False))
        return
    metrics = held_out.described.metrics if held_out else ()
    width = max(12, *(len(name) + 2 for name in ("", *config.eval.tasks, *(metric.name for metric in metrics))))
    for line in held_out.lines(width) if held_out else ():
        print_line(line)
    for metric, (name, task) in zip(task_metrics(config.eval.tasks), config.eval.tasks.items(), strict=True):
        result = results[name]
        figure = f"{100 * result.value:.2f}%" if metric.percent else f"{result.value:.{metric.digits}f}"
        print_line(f"{name:<{width}}{figure} of {result.denominator} {task.kind if metric.percent else 'tokens'}")
    print_line(f"{'weights':<{width}}{weights}")


def _measure_tasks(run: LoadedRun, config: RunConfig) -> dict[str, TaskResult]:
    """Results of the tasks by name."""
    from mgpu_pipe.inference.tasks import measure, rows_of
    from mgpu_pipe.inference.tasks.judge import Judge
    from mgpu_pipe.models.rotary import fix_rotary_length
    from mgpu_pipe.objectives.registry import objective_class

    tokenizer = run.tokenizer()
    fix_rotary_length(run.model, config.data.seq_len)
    objective = objective_class(config.objective.name).from_config(config, run.model, None, lambda step: 1.0)
    template = chat_of(run.tokenizer_folder) if run.tokenizer_folder is not None else None
    judge = Judge(objective, tokenizer, template, config.data.seq_len)
    return {
        name: measure(rows_of(task, name, config.data.text_column), task, judge)
        for name, task in config.eval.tasks.items()
    }


def _measure_held_out(run: LoadedRun, config: RunConfig) -> HeldOutFigures:
    """The metrics on held-out data."""
    from mgpu_pipe.data.images.prepare_captions import PreparedCaptions
    from mgpu_pipe.data.loader import evaluation_step_batches
    from mgpu_pipe.inference.evaluate import evaluate_step_batches
    from mgpu_pipe.models.rotary import fix_rotary_length
    from mgpu_pipe.objectives.class_sums import ClassPrompts
    from mgpu_pipe.objectives.contrastive import ContrastiveObjective
    from mgpu_pipe.objectives.first_weights import MEASURED, RunStart
    from mgpu_pipe.objectives.protocols import WeightMeasurer
    from mgpu_pipe.objectives.registry import objective_class
    from mgpu_pipe.topology import BatchPlan

    data = pin(RunConfig(data=config.data)).require().data
    config = config if data == config.data else replace(config, data=data)
    errors = sample_errors(config.data, config.objective)
    if errors:
        raise errors[0]
    prepared = _prepare(run, config)
    chosen = objective_class(config.objective.name)
    step_batches = evaluation_step_batches(config, prepared, BatchPlan.resolve(config.data, 1), 0, chosen.samples)
    if not len(step_batches):
        fix = "set it above 0, or give held-out files by data.validation_paths"
        raise ConfigError("data.validation_fraction", config.data.validation_fraction, fix, "no data is held out")
    fix_rotary_length(run.model, config.data.seq_len)
    objective = chosen.from_config(config, run.model, None, lambda step: 1.0)
    objective.of_data(prepared)
    if isinstance(objective, ContrastiveObjective) and isinstance(prepared, PreparedCaptions):
        prompts = prepared.held_out_prompts(config.data)
        if prompts is not None:
            objective.classify_by(ClassPrompts.from_arrays(*prompts))
    if run.config is not None and isinstance(objective, WeightMeasurer):
        state = read_state(run.source, read_manifest(run.source), "full")
        plan, folder = BatchPlan.resolve(config.data, 1), run.source.parents[1]
        measured = partial(str, state.get(MEASURED))
        objective.of_run(RunStart(config, folder, prepared, plan, 0, 0, str(state.get("precision")), measured))
    result = evaluate_step_batches(objective, step_batches)
    return HeldOutFigures(result, objective.description, prepared, _classes_of(run))


def _evaluation_config(run: LoadedRun, overrides: Sequence[str]) -> RunConfig:
    """The run's configuration with the data overrides applied; for a model folder, the default data."""
    from mgpu_pipe.config.hydra.compose import compose

    strange = [text for text in overrides if not text.lstrip("+").startswith(("data.", "data=", "eval."))]
    if strange:
        raise BadInputError(f"{strange[0]}: eval takes data and eval overrides only, e.g. data.paths=[held_out.txt]")
    typed = {text.lstrip("+").split("=")[0] for text in overrides}
    if run.config is None:
        built_by = class_of([type(run.model).__name__])
        able = [candidate for candidate in descriptions() if candidate.model_class == built_by]
        kind = run.model.config.model_type
        able = [known for known in able if not known.families or kind in known.families] or able
        objective = next((candidate for candidate in able if candidate.samples == USUAL), able[0])
        if built_by in SHARED_CLASSES:  # the data tell which objective it is
            samples = samples_of(compose(overrides)[0].data.source)
            objective = next((candidate for candidate in able if candidate.samples == samples), objective)
        folder = ["model=hf", f"model.path={run.source.absolute()}", f"objective={objective.name}"]
        config = compose([*folder, *overrides])[0]
        data = _with_classes(config.data, config.objective, run)
        if not hasattr(config.objective, "pooling"):
            return replace(config, data=data)
        pooling, prompts = _keys_of_vectors(run.source, data, typed)
        return replace(config, objective=replace(config.objective, **pooling), data=replace(data, **prompts))
    config = replace(run.config, eval=_tasks_of(run, overrides))
    on_data = [text for text in overrides if text.lstrip("+").startswith("data")]
    config = replace(config, data=_with_overrides(run.config.data, on_data)) if on_data else config
    config = replace(config, data=_with_classes(config.data, config.objective, run))
    if not run.is_trusted and _tasks_alone(overrides):
        return replace(config, data=DataConfig(seq_len=min(config.data.seq_len, MAX_SIZES["seq_len"])))
    return config if run.is_trusted else replace(config, data=untrusted_data(config.data, typed))


def _tasks_alone(overrides: Sequence[str]) -> bool:
    """Whether the overrides set tasks and no data."""
    sections = {text.lstrip("+").partition(".")[0].partition("=")[0] for text in overrides}
    return "eval" in sections and "data" not in sections


def _tasks_of(run: LoadedRun, overrides: Sequence[str]) -> EvalConfig:
    """The command line's tasks over the run's tasks, which count only if this user launched the run."""
    from mgpu_pipe.config.hydra.compose import compose

    tasks = dict(run.config.eval.tasks) if run.config is not None and run.is_trusted else {}
    typed = [text for text in overrides if text.lstrip("+").startswith("eval.")]
    for name, task in compose(typed)[0].eval.tasks.items() if typed else ():
        keys = {text.lstrip("+").partition("=")[0].removeprefix(f"eval.tasks.{name}") for text in typed}
        named = {key[1:]: getattr(task, key[1:]) for key in keys if key.startswith(".")}
        tasks[name] = replace(tasks[name], **named) if name in tasks and "" not in keys else task
    return EvalConfig(tasks)


def _with_classes(data: DataConfig, objective: ObjectiveConfig, run: LoadedRun) -> DataConfig:
    """``data`` with all classes of the model in the model's order, where texts have classes."""
    labelled = description(objective.name).samples == "labelled_text"
    return replace(data, classes=_classes_of(run)) if labelled else data


def _classes_of(run: LoadedRun) -> list[str]:
    """Names of the model's classes by their numbers."""
    return [str(name) for _, name in sorted(dict(run.model.config.id2label or {}).items())]


def _keys_of_vectors(folder: Path, data: DataConfig, typed: Container[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Keys of ``objective`` and of ``data`` that a folder for sentence-transformers decides; ``typed`` ones stay."""
    modules = read_sentence_modules(folder)
    if modules is None:
        return {}, {}
    prompts = {f"{kind}_prompt": text or None for kind, text in modules.prompts.items() if kind in PROMPTS}
    missing = {key: text for key, text in prompts.items() if hasattr(data, key) and f"data.{key}" not in typed}
    require_cosine_or_dot(modules, folder)
    normalize = modules.normalize or modules.similarity == "cosine"
    return {"pooling": modules.pooling, "normalize": normalize}, missing


def _with_overrides(data: DataConfig, overrides: Sequence[str]) -> DataConfig:
    """``data`` with the keys of ``overrides``, composed by Hydra as for a training run."""
    from mgpu_pipe.config.hydra.compose import compose

    keys = {text.lstrip("+").split("=")[0] for text in overrides}
    plug_in = type(data) is not DataConfig and not keys & {"data", "data.source"}
    composed = compose([*([f"data.source={data.source}"] if plug_in else []), *overrides])[0].data
    named = {key.split(".")[1] for key in keys - {"data"}}
    if "data" in keys:  # another source keeps only the keys that the model depends on
        named = {field.name for field in fields(composed)} - ({"seq_len", "tokenizer"} - named)
    unchanged = [field.name for field in fields(composed) if field.name not in named and hasattr(data, field.name)]
    return replace(composed, **{name: getattr(data, name) for name in unchanged})


def _prepare(run: LoadedRun, config: RunConfig) -> Prepared:
    """Data tokenised as in the run: with the run's tokenizer if preparation would give another."""
    from mgpu_pipe.data.prepare_data import prepare

    tokenizer = run.tokenizer_folder
    if (
        not run.is_trusted
        and tokenizer is None
        and reads_tokenizer(config.data.source)
        and config.data.tokenizer == "auto"
    ):
        raise ConfigError("data.tokenizer", "auto", "give data.tokenizer=<folder>", f"{run.source} keeps no tokenizer")
    changed = run.config is None or config is not run.config
    if not changed or tokenizer is None:
        prepared = prepare(config)
        if tokenizer is None or _same_tokenizer(prepared.tokenizer_folder, tokenizer):
            return prepared
    return prepare(replace(config, data=replace(config.data, tokenizer=str(tokenizer.absolute()))))


def _same_tokenizer(first: Path | None, second: Path) -> bool:
    if first is None:
        return False
    files = [folder / "tokenizer.json" for folder in (first, second)]
    return all(file.is_file() for file in files) and files[0].read_bytes() == files[1].read_bytes()


VERB = Verb("what a run reaches on held-out data", evaluate, section="data")
