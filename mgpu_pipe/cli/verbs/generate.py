"""``mgpu-pipe generate``: continues prompts, or answers them."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from mgpu_pipe.cli.verbs import Verb
from mgpu_pipe.config.arguments import non_negative, positive_int, random_seed, share
from mgpu_pipe.errors import EXIT_OK, BadInputError, print_line, print_text
from mgpu_pipe.inference.batch.settings import BATCH_SIZE, AnswerSettings
from mgpu_pipe.inference.find_model import existing_folder, find_model
from mgpu_pipe.inference.model_arguments import (
    MapSettings,
    add_device_argument,
    add_map_arguments,
    add_visual_arguments,
    build_parser,
    find_inputs,
    folder_of,
    open_run,
    parse_arguments,
    read_map_arguments,
    silence_transformers,
)
from mgpu_pipe.inference.open import LoadedRun


def generate(argv: Sequence[str]) -> int:
    """``mgpu-pipe generate [FOLDER] --prompt TEXT``: continues each prompt; prints prompt and continuation.

    A model that was trained on conversations answers it. ``--input FILE --output FILE`` answers a file of prompts.
    """
    arguments = parse_arguments(_build_parser(), argv)
    _check_file_arguments(arguments)
    _check_draft(arguments)
    settings = read_map_arguments(arguments)
    if arguments.input is not None:
        return _answer_file(arguments)
    if settings is not None and arguments.print:
        _print_map(arguments, settings)
    else:
        _generate(arguments, settings)
    return EXIT_OK


def _build_parser() -> argparse.ArgumentParser:
    parser = build_parser("generate", "Continue prompts.")
    parser.usage = "%(prog)s [FOLDER] [--prompt TEXT] [options] [KEY=VALUE ...]"
    parser.add_argument(
        "--prompt", action="append", metavar="TEXT", help="text to continue; repeatable; default: standard input"
    )
    parser.add_argument("--max-new-tokens", type=positive_int, default=64, metavar="N", help="default 64")
    parser.add_argument(
        "--temperature",
        type=non_negative,
        default=None,
        metavar="T",
        help="default 0.8, of encoder-decoders 0 (likeliest)",
    )
    parser.add_argument("--top-k", type=positive_int, metavar="K", help="draw among the K likeliest tokens")
    parser.add_argument("--top-p", type=share, metavar="P", help="draw among the likeliest of total probability P")
    parser.add_argument("--min-p", type=share, metavar="P", help="draw among tokens of P times the likeliest's share")
    parser.add_argument("--stop", action="append", metavar="TEXT", help="end an answer before this text; repeatable")
    parser.add_argument("--seed", type=random_seed, default=0, metavar="N", help="of the draws; default 0")
    parser.add_argument("--raw", action="store_true", help="continue the prompt, without a chat template")
    parser.add_argument("--input", type=Path, metavar="FILE", help="prompts or recordings: JSON Lines, CSV or Parquet")
    parser.add_argument("--output", type=Path, metavar="FILE", help="answers to --input, one a line in their order")
    parser.add_argument(
        "--batch-size",
        type=positive_int,
        metavar="N",
        help=f"prompts of --input in a forward pass; default {BATCH_SIZE}",
    )
    parser.add_argument("--on-bad-row", choices=["refuse", "skip"], help="for rows of --input; default refuse")
    parser.add_argument(
        "--draft", type=Path, metavar="FOLDER", help="smaller model that proposes tokens; temperature 0"
    )
    add_visual_arguments(parser)
    add_device_argument(parser)
    add_map_arguments(parser)
    help_text = "with --input: strategy, trainer.devices, trainer.num_nodes, trainer.accelerator or launch.*"
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help=help_text)
    return parser


def _check_file_arguments(arguments: argparse.Namespace) -> None:
    """Refuse options that belong to ``--input`` without it, and options that do not go with it."""
    has_file = arguments.input is not None
    names = ("prompt", "image", "video", "audio") if has_file else ("output", "batch_size", "on_bad_row", "overrides")
    for name in names:
        if getattr(arguments, name):
            option = arguments.overrides[0] if name == "overrides" else f"--{name.replace('_', '-')}"
            problem = "a file of prompts holds all prompts" if has_file else "only works with --input"
            raise BadInputError(f"{option}: {problem}; leave it out" + ("" if has_file else ", or add --input FILE"))
    if "" in (arguments.stop or ()):
        raise BadInputError("--stop=: every text holds an empty one; give a text")
    if has_file and arguments.output is None:
        raise BadInputError(f"--input={arguments.input}: nowhere to write the answers; add --output FILE")


def _check_draft(arguments: argparse.Namespace) -> None:
    """Refuse options that do not go with ``--draft``, and a folder that does not exist."""
    draft = arguments.draft
    if draft is None:
        return
    for option in ("input", "image", "video", "audio"):
        if getattr(arguments, option):
            raise BadInputError(f"--draft={draft}: does not work with --{option}; leave one of them out")
    if arguments.temperature != 0:
        raise BadInputError(f"--draft={draft}: takes the likeliest tokens; add --temperature 0")
    existing_folder(draft)


def _answer_file(arguments: argparse.Namespace) -> int:
    """Answer the file of prompts on the processes that the overrides name."""
    from mgpu_pipe.cli.processes import compose_processes, job_settings, refuse_whole_weights
    from mgpu_pipe.launch.batch_job import run_job

    source = find_model(find_inputs(arguments))
    config = compose_processes("generate", arguments.overrides, arguments.device, strategies=True)
    refuse_whole_weights(source, config.trainer, config.strategy, arguments)
    settings = AnswerSettings(
        **job_settings(arguments, source, config.trainer),
        max_new_tokens=arguments.max_new_tokens,
        temperature=arguments.temperature,
        top_k=arguments.top_k,
        top_p=arguments.top_p,
        seed=arguments.seed,
        raw=arguments.raw,
        on_bad_row=arguments.on_bad_row or "refuse",
        min_p=arguments.min_p,
        stop=arguments.stop,
    )
    return run_job(settings, source, config)


def _print_map(arguments: argparse.Namespace, settings: MapSettings) -> None:
    source = find_model(folder_of(arguments))
    silence_transformers()
    from mgpu_pipe.inference.placed_model import print_map

    print_map(source, settings, arguments.weights == "ema")


@contextmanager
def _opened_run(arguments: argparse.Namespace, settings: MapSettings | None) -> Iterator[LoadedRun]:
    """Context with the model on its device, or its parts on the devices of ``settings``."""
    if settings is None:
        yield open_run(arguments)
        return
    source = find_model(folder_of(arguments))
    silence_transformers()
    from mgpu_pipe.inference.placed_model import open_placed_run

    with open_placed_run(source, settings, arguments.weights == "ema") as run:
        yield run


def _generate(arguments: argparse.Namespace, settings: MapSettings | None) -> None:
    find_inputs(arguments)  # before waiting for a prompt
    prompts = arguments.prompt
    if prompts is None:
        if sys.stdin.isatty():
            raise BadInputError("--prompt: give a text to continue, or pipe one into standard input")
        prompts = [sys.stdin.read().removesuffix("\n")]
    with _opened_run(arguments, settings) as run:
        _answer(arguments, run, prompts)


def _answer(arguments: argparse.Namespace, run: LoadedRun, prompts: Sequence[str]) -> None:
    """Print the continuation or answer of each prompt."""
    if not run.model.can_generate():
        raise BadInputError(f"{run.source}: {type(run.model).__name__} does not generate text; use mgpu-pipe eval")
    from mgpu_pipe.inference.generation import generate_text
    from mgpu_pipe.inference.visual_prompts import PromptVisuals, with_places

    draft = None
    if arguments.draft is not None:
        from mgpu_pipe.inference.open import open_draft

        draft = open_draft(arguments.draft, run)
    files = (arguments.image, arguments.video, arguments.audio)
    chat = None if arguments.raw or run.model.config.is_encoder_decoder else run.chat()
    texts = generate_text(
        run.model,
        run.tokenizer(),
        [with_places(prompt, *map(len, files)) for prompt in prompts],
        chat=chat,
        max_new_tokens=arguments.max_new_tokens,
        temperature=arguments.temperature,
        top_k=arguments.top_k,
        top_p=arguments.top_p,
        min_p=arguments.min_p,
        stop=arguments.stop or (),
        seed=arguments.seed,
        visuals=PromptVisuals.from_files(run, *files),
        draft=draft,
    )
    for number, (prompt, text) in enumerate(zip(prompts, texts, strict=True)):
        if number:
            print_line("---")
        # An answer stands by itself: it does not continue the prompt.
        print_text(text if run.model.config.is_encoder_decoder or chat is not None else prompt + text)


VERB = Verb("continue prompts", generate)
