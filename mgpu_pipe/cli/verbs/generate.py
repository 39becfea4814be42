"""``mgpu-pipe generate``: continues prompts, or answers them."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from mgpu_pipe.cli.verbs import Verb
from mgpu_pipe.config.arguments import non_negative, positive_int, share
from mgpu_pipe.errors import EXIT_OK, BadInputError, print_line, print_text
from mgpu_pipe.inference.model_arguments import (
    add_device_argument,
    add_visual_arguments,
    build_parser,
    find_inputs,
    open_run,
    parse_arguments,
)


def generate(argv: Sequence[str]) -> int:
    """``mgpu-pipe generate [FOLDER] --prompt TEXT``: continues each prompt; prints prompt and continuation.

    A model that was trained on conversations answers it.
    """
    parser = build_parser("generate", "Continue prompts.")
    parser.add_argument(
        "--prompt", action="append", metavar="TEXT", help="text to continue; repeatable; default: standard input"
    )
    parser.add_argument("--max-new-tokens", type=positive_int, default=64, metavar="N", help="default 64")
    parser.add_argument(
        "--temperature",
        type=non_negative,
        default=None,
        metavar="T",
        help="default 0.8, of encoder-decoder models 0, which always takes the likeliest token",
    )
    parser.add_argument("--top-k", type=positive_int, metavar="K", help="draw among the K likeliest tokens")
    parser.add_argument("--top-p", type=share, metavar="P", help="draw among the likeliest of total probability P")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the draws; default 0")
    parser.add_argument(
        "--raw", action="store_true", help="continue the prompt, also where the model has a chat template"
    )
    add_visual_arguments(parser)
    add_device_argument(parser)
    _generate(parse_arguments(parser, argv))
    return EXIT_OK


def _generate(arguments: argparse.Namespace) -> None:
    find_inputs(arguments)  # before waiting for a prompt
    prompts = arguments.prompt
    if prompts is None:
        if sys.stdin.isatty():
            raise BadInputError("--prompt: give a text to continue, or pipe one into standard input")
        prompts = [sys.stdin.read().removesuffix("\n")]
    run = open_run(arguments)
    if not run.model.can_generate():
        raise BadInputError(f"{run.source}: {type(run.model).__name__} does not generate text; use mgpu-pipe eval")
    from mgpu_pipe.inference.generation import generate_text
    from mgpu_pipe.inference.visual_prompts import PromptVisuals, with_places

    chat = None if arguments.raw or run.model.config.is_encoder_decoder else run.chat()
    texts = generate_text(
        run.model,
        run.tokenizer(),
        [with_places(prompt, len(arguments.image), len(arguments.video)) for prompt in prompts],
        chat=chat,
        max_new_tokens=arguments.max_new_tokens,
        temperature=arguments.temperature,
        top_k=arguments.top_k,
        top_p=arguments.top_p,
        seed=arguments.seed,
        visuals=PromptVisuals.from_files(run, arguments.image, arguments.video),
    )
    for number, (prompt, text) in enumerate(zip(prompts, texts, strict=True)):
        if number:
            print_line("---")
        # An answer stands by itself: it does not go on from the prompt.
        print_text(text if run.model.config.is_encoder_decoder or chat is not None else prompt + text)


VERB = Verb("continue prompts", generate)
