"""The verbs ``eval``, ``generate`` and ``export``."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING

from mgpu_pipe.config.arguments import VerbParser, byte_size, non_negative, positive_int, share
from mgpu_pipe.config.foreign import foreign_data
from mgpu_pipe.config.hardware import usable_gpus
from mgpu_pipe.config.schema import DataConfig, RunConfig
from mgpu_pipe.errors import EXIT_OK, BadInputError, ConfigError, ConfigErrors, MgpuError, one_line
from mgpu_pipe.inference.load import LoadedRun, existing_folder, load_run, open_model
from mgpu_pipe.runs.newest import named_or_newest, split_root

if TYPE_CHECKING:
    from mgpu_pipe.data.prepare import PreparedData

FOLDER_HELP = "run's, step's or Hugging Face model's folder; default: the newest run with a checkpoint below " \
              "run.root=<folder> (outputs/)"


def evaluate(argv: Sequence[str]) -> int:
    """``mgpu-pipe eval [FOLDER] [data.KEY=VALUE ...]``: held-out loss and perplexity, weights in fp32."""
    parser = _parser("eval", "Held-out loss and perplexity, with the run's frozen configuration.")
    _computing(parser)
    parser.add_argument("overrides", nargs="*", metavar="data.KEY=VALUE", help="other data than the run's")
    return _told(lambda: _evaluate(_parsed(parser, argv)))


def generate(argv: Sequence[str]) -> int:
    """``mgpu-pipe generate [FOLDER] --prompt TEXT``: continues each prompt; prints prompt and continuation."""
    parser = _parser("generate", "Continue prompts.")
    parser.add_argument("--prompt", action="append", metavar="TEXT",
                        help="text to continue; repeatable; default: standard input")  # fmt: skip
    parser.add_argument("--max-new-tokens", type=positive_int, default=64, metavar="N", help="default 64")
    parser.add_argument("--temperature", type=non_negative, default=0.8, metavar="T",
                        help="default 0.8; 0 always takes the likeliest token")  # fmt: skip
    parser.add_argument("--top-k", type=positive_int, metavar="K", help="draw among the K likeliest tokens")
    parser.add_argument("--top-p", type=share, metavar="P", help="draw among the likeliest of total probability P")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the draws; default 0")
    _computing(parser)
    return _told(lambda: _generate(_parsed(parser, argv)))


def export(argv: Sequence[str]) -> int:
    """``mgpu-pipe export [FOLDER] --out FOLDER``: a Hugging Face folder, proved to load before it gets its name."""
    parser = _parser("export", "Write a Hugging Face model folder.")
    _writing(parser)
    return _told(lambda: _export(_parsed(parser, argv)))


def import_weights(argv: Sequence[str]) -> int:
    """``mgpu-pipe import --from PATH --out FOLDER model=... [model.KEY=VALUE ...]``: a Hugging Face folder."""
    parser = VerbParser(
        prog="mgpu-pipe import",
        description="Write another program's weights (a Lightning or torch file, a DeepSpeed ZeRO folder) as a Hugging "
        "Face folder, for model.path, checkpoint.init_from and every other program.",
    )
    parser.add_argument("--from", dest="source", required=True, type=Path, metavar="PATH", help="checkpoint to read")
    parser.add_argument("overrides", nargs="*", metavar="model.KEY=VALUE", help="the model that was trained")
    parser.add_argument("--prefix", default="", help="what stands before the model's own names, e.g. model.")
    parser.add_argument("--ignore", action="append", default=[], metavar="PATTERN",
                        help="tensors to leave out, e.g. 'metric.*'; repeatable")  # fmt: skip
    parser.add_argument("--tokenizer", type=Path, metavar="FOLDER", help="tokenizer to put beside the weights")
    parser.add_argument("--trust", action="store_true", help="run the code that a DeepSpeed folder's pickles bring")
    _writing(parser)
    return _told(lambda: _import(parser.parse_args(argv)))


def _writing(parser: argparse.ArgumentParser) -> None:
    """The arguments of a verb that writes a model folder."""
    parser.add_argument("--out", required=True, type=Path, help="folder to write")
    parser.add_argument("--dtype", choices=["fp32", "bf16"], default="fp32", help="type of the weights")
    parser.add_argument("--max-shard-size", type=byte_size, metavar="SIZE", help="of a weight file; default 5GB")
    parser.add_argument("--force", action="store_true", help="replace an existing model folder")


def _parser(verb: str, description: str) -> argparse.ArgumentParser:
    parser = VerbParser(prog=f"mgpu-pipe {verb}", description=description)
    parser.add_argument("folder", nargs="?", type=Path, help=FOLDER_HELP)
    return parser


def _computing(parser: argparse.ArgumentParser) -> None:
    """The argument of a verb that runs the model."""
    parser.add_argument("--device", default="auto", metavar="DEVICE",
                        help="auto (cuda where there is a GPU), cpu, cuda, cuda:1, ...")  # fmt: skip


def _parsed(parser: argparse.ArgumentParser, argv: Sequence[str]) -> argparse.Namespace:
    """Parse; a first argument like ``data.x=1`` is taken for an override, not for the folder.

    Raises:
        BadInputError: a wrong argument.
    """
    words, root = split_root(argv)
    parsed = parser.parse_args(words)
    first = parsed.folder
    if first is not None and "overrides" in parsed and "=" in str(first) and not first.exists():
        parsed.overrides = [str(first), *parsed.overrides]
        parsed.folder = None
    parsed.root = root
    return parsed


def _told(action: Callable[[], None]) -> int:
    """Run; a user's errors become one line each on stderr, and an exit code."""
    try:
        action()
    except MgpuError as error:
        for one in error.errors if isinstance(error, ConfigErrors) else [error]:
            print("error:", one_line(one), file=sys.stderr)
        return error.exit_code
    return EXIT_OK


def _open(arguments: argparse.Namespace) -> LoadedRun:
    folder, device = _folder(arguments), _device(arguments.device)
    _quiet()
    return load_run(folder, device)


def _folder(arguments: argparse.Namespace) -> Path:
    """The folder that is named, else the newest run's; looked for before anything slow is imported."""
    folder = named_or_newest(arguments.folder, arguments.root, saved=True)
    return existing_folder(folder)


def _device(wanted: str) -> str:
    """The device that ``--device`` names, judged without torch."""
    gpus = usable_gpus()
    if wanted == "auto":
        return "cuda" if gpus else "cpu"
    name = re.fullmatch(r"cpu|(?:cuda|gpu)(?::(\d+))?", wanted)
    if name is None:
        raise BadInputError(f"--device={wanted}: no such device; use auto, cpu, cuda or cuda:<number>")
    if wanted != "cpu" and int(name[1] or 0) >= gpus:
        has = f"has {gpus} GPU{'s' if gpus > 1 else ''} to use" if gpus else "can use no GPU here"
        raise BadInputError(f"--device={wanted}: torch {has}; use auto or cpu")
    return wanted.replace("gpu", "cuda")


def _quiet() -> None:
    """No progress bars or advice from transformers among this program's own output."""
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()


def _evaluate(arguments: argparse.Namespace) -> None:
    run = _open(arguments)
    from mgpu_pipe.data.loader import evaluation_windows
    from mgpu_pipe.inference.evaluate import evaluate_windows
    from mgpu_pipe.models.rotary import fix_rotary_length
    from mgpu_pipe.topology import BatchPlan

    config = _evaluation_config(run, arguments.overrides)
    prepared = _prepared(run, config)
    windows = evaluation_windows(prepared, BatchPlan.resolve(config.data, 1), 0)
    if not len(windows):
        raise ConfigError(
            "data.validation_fraction", config.data.validation_fraction,
            "set it above 0, or give held-out files by data.validation_paths", "nothing is held out",
        )
    fix_rotary_length(run.model, config.data.seq_len)
    result = evaluate_windows(run.model, windows)
    print(f"loss        {result.loss:.6f} nats a token")
    print(f"perplexity  {result.perplexity:.3f}")
    if prepared.unigram_perplexity is not None:
        print(f"unigram     {prepared.unigram_perplexity:.3f} (perplexity of the token frequencies alone)")
    print(f"over        {result.tokens} tokens of {result.samples} held-out samples, in fp32")
    print(f"weights     {run.source}")


def _evaluation_config(run: LoadedRun, overrides: Sequence[str]) -> RunConfig:
    """The run's configuration with the data overrides applied; for a model folder, the default data."""
    from mgpu_pipe.config.compose import compose

    strange = [text for text in overrides if not text.lstrip("+").startswith(("data.", "data="))]
    if strange:
        raise BadInputError(f"{strange[0]}: eval takes data overrides only, e.g. data.validation_paths=[held_out.txt]")
    if run.config is None:
        return compose(["model=hf", f"model.path={run.source.absolute()}", *overrides])[0]
    given = {text.lstrip("+").split("=")[0] for text in overrides}
    config = replace(run.config, data=_with_overrides(run.config.data, overrides)) if overrides else run.config
    return config if run.own else replace(config, data=foreign_data(config.data, given))


def _with_overrides(data: DataConfig, overrides: Sequence[str]) -> DataConfig:
    """``data`` with the keys that ``overrides`` name, composed by Hydra like those of a training run."""
    from mgpu_pipe.config.compose import compose

    composed = compose(list(overrides))[0].data
    keys = {text.lstrip("+").split("=")[0] for text in overrides}
    named = {key.split(".")[1] for key in keys - {"data"}}
    if "data" in keys:  # another source: only what the model was trained to stays
        named = {field.name for field in fields(DataConfig)} - ({"seq_len", "tokenizer"} - named)
    return replace(data, **{name: getattr(composed, name) for name in named})


def _prepared(run: LoadedRun, config: RunConfig) -> PreparedData:
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


def _same_tokenizer(one: Path, other: Path) -> bool:
    files = [folder / "tokenizer.json" for folder in (one, other)]
    return all(file.is_file() for file in files) and files[0].read_bytes() == files[1].read_bytes()


def _generate(arguments: argparse.Namespace) -> None:
    prompts = arguments.prompt
    if prompts is None:
        if sys.stdin.isatty():
            raise BadInputError("--prompt: give a text to continue, or pipe one into standard input")
        prompts = [sys.stdin.read().removesuffix("\n")]
    run = _open(arguments)
    from mgpu_pipe.inference.generation import generate_text, without_controls

    texts = generate_text(
        run.model, run.tokenizer(), prompts, max_new_tokens=arguments.max_new_tokens,
        temperature=arguments.temperature, top_k=arguments.top_k, top_p=arguments.top_p, seed=arguments.seed,
    )  # fmt: skip
    for number, (prompt, text) in enumerate(zip(prompts, texts, strict=True)):
        if number:
            print("---")
        print(prompt + (without_controls(text) if sys.stdout.isatty() else text))


def _export(arguments: argparse.Namespace) -> None:
    from mgpu_pipe.inference.export import check_target, export_folder

    folder, out = _folder(arguments), arguments.out.expanduser()
    check_target(out, arguments.force)
    _quiet()
    run = open_model(folder)
    out = export_folder(run, out, arguments.dtype, arguments.force, arguments.max_shard_size)
    print(f"exported {run.source} to {out} ({arguments.dtype}; logits compared after loading it again)")
    print(f'load it: transformers.AutoModelForCausalLM.from_pretrained("{out}")')
    if run.tokenizer_folder is None:
        print("no tokenizer was kept beside the weights; add the one it was trained with")


def _import(arguments: argparse.Namespace) -> None:
    from mgpu_pipe.config.compose import compose

    strange = [text for text in arguments.overrides if not text.lstrip("+").startswith(("model.", "model="))]
    if strange:
        raise BadInputError(f"{strange[0]}: import takes model overrides only, e.g. model=llama_tiny")
    if not arguments.overrides:
        raise BadInputError("import: say which model it is, e.g. model=llama_tiny, or model=hf model.path=<folder>")
    if arguments.tokenizer is not None and not arguments.tokenizer.is_dir():
        raise BadInputError(f"--tokenizer={arguments.tokenizer}: no such folder")
    model = compose(arguments.overrides)[0].model
    from mgpu_pipe.inference.export import check_target, export_folder, working_folder

    out, source = arguments.out.expanduser(), arguments.source.expanduser()
    if not source.exists():
        raise BadInputError(f"--from={arguments.source}: nothing is there; correct the path")
    check_target(out, arguments.force)
    _quiet()
    from mgpu_pipe.inference.foreign import read_weights
    from mgpu_pipe.inference.importing import fill_from_foreign

    with working_folder(out, ".import") as scratch:
        weights = read_weights(source, arguments.trust, scratch)
        stored = fill_from_foreign(model, weights, source, arguments.prefix, arguments.ignore, arguments.tokenizer)
        export_folder(stored, out, arguments.dtype, arguments.force, arguments.max_shard_size)
    print(f"imported {source} to {out} ({len(weights)} tensors, {arguments.dtype}; logits compared)")
    print(f"train on: mgpu-pipe model=hf model.path={out}")
