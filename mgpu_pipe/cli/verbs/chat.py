"""``mgpu-pipe chat``: a conversation with a model, in the terminal."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mgpu_pipe.cli.verbs import Verb
from mgpu_pipe.config.arguments import non_negative, positive_int, random_seed, share
from mgpu_pipe.errors import EXIT_OK, BadInputError, one_line, print_line, print_text
from mgpu_pipe.inference.model_arguments import (
    add_device_argument,
    add_visual_arguments,
    build_parser,
    open_run,
    parse_arguments,
)
from mgpu_pipe.system.local_files import expand_home

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from mgpu_pipe.data.text.render_chat import ChatTemplate
    from mgpu_pipe.inference.open import LoadedRun
    from mgpu_pipe.inference.visual_prompts import PromptVisuals

HELP = (
    "/image FILE shows a picture with the next question, /video FILE a video, /audio FILE plays a recording, "
    "/system TEXT sets how to answer, /reset clears the conversation, /save FILE saves it, /exit (or Ctrl-D) ends"
)


def chat(argv: Sequence[str]) -> int:
    """``mgpu-pipe chat [FOLDER]``: each line is a question; the answer is streamed."""
    parser = build_parser("chat", f"Talk to a model. In it: {HELP}.")
    parser.add_argument("--system", metavar="TEXT", help="the system message")
    parser.add_argument(
        "--max-new-tokens", type=positive_int, default=512, metavar="N", help="of an answer; default 512"
    )
    parser.add_argument(
        "--temperature", type=non_negative, default=0.8, metavar="T", help="default 0.8; 0 is the likeliest"
    )
    parser.add_argument("--top-k", type=positive_int, metavar="K", help="draw among the K likeliest tokens")
    parser.add_argument("--top-p", type=share, metavar="P", help="draw among the likeliest of total probability P")
    parser.add_argument("--seed", type=random_seed, default=0, metavar="N", help="of the draws; default 0")
    add_visual_arguments(parser)
    add_device_argument(parser)
    _chat(parse_arguments(parser, argv))
    return EXIT_OK


def _chat(arguments: argparse.Namespace) -> None:
    run = open_run(arguments)
    template = run.chat() if run.model.can_generate() and not run.model.config.is_encoder_decoder else None
    if template is None:
        raise BadInputError(
            f"{run.source}: was not trained on conversations, or has no chat template; use mgpu-pipe generate"
        )
    from mgpu_pipe.inference.visual_prompts import PromptVisuals, with_places

    files = {"/image": list(arguments.image), "/video": list(arguments.video), "/audio": list(arguments.audio)}
    used = dict.fromkeys(files, 0)
    """Numbers of pictures, videos and recordings in earlier questions."""
    PromptVisuals.from_files(run, *files.values())
    tokenizer, terminal = run.tokenizer(), sys.stdin.isatty()
    begin = [] if arguments.system is None else [{"role": "system", "content": arguments.system}]
    messages = list(begin)
    if terminal:
        print_line(run.source, file=sys.stderr)
        print_text(HELP, file=sys.stderr)
    for number, line in enumerate(iter(lambda: _line(terminal), None)):
        word, _, rest = line.strip().partition(" ")
        if word in ("/exit", "/quit"):
            return
        if word == "/reset":
            messages, files, used = list(begin), {name: [] for name in files}, dict.fromkeys(files, 0)
        elif word in files:
            _add_file(run, files, word, rest.strip())
        elif word == "/system":
            begin = [{"role": "system", "content": rest.strip()}] if rest.strip() else []
            messages = begin + [message for message in messages if message["role"] != "system"]
        elif word == "/save":
            _save(messages, rest.strip())
        elif word.startswith("/"):
            print_text(f"no such word: {word}; {HELP}", file=sys.stderr)
        elif word:
            new = [len(several) - used[name] for name, several in files.items()]
            conversation = [*messages, {"role": "user", "content": with_places(line.strip(), *new)}]
            visuals = partial(PromptVisuals.from_files, run, *files.values())
            answer = _answer(run, tokenizer, template, conversation, visuals, arguments, number)
            if answer is not None:
                messages = [*conversation, {"role": "assistant", "content": answer}]
                used = {name: len(several) for name, several in files.items()}


def _answer(
    run: LoadedRun,
    tokenizer: PreTrainedTokenizerBase,
    template: ChatTemplate,
    conversation: list[dict[str, Any]],
    visuals: Callable[[], PromptVisuals | None],
    arguments: argparse.Namespace,
    number: int,
) -> str | None:
    """Print the answer to ``conversation`` while it is generated; None where it was refused or interrupted."""
    from mgpu_pipe.inference.generation import AnswerStreamer, generate_text

    try:
        [answer] = generate_text(
            run.model,
            tokenizer,
            [conversation],
            chat=template,
            max_new_tokens=arguments.max_new_tokens,
            temperature=arguments.temperature,
            top_k=arguments.top_k,
            top_p=arguments.top_p,
            seed=arguments.seed + number,
            streamer=AnswerStreamer(tokenizer, template.lead()),
            visuals=visuals(),
        )
    except BadInputError as error:
        print_line(f"{one_line(error)}; /reset clears the conversation", file=sys.stderr)
    except KeyboardInterrupt:
        print_line(file=sys.stderr)
        print_line("(interrupted: the conversation goes without this question)", file=sys.stderr)
    else:
        return answer
    return None


def _add_file(run: LoadedRun, files: dict[str, list[Path]], word: str, name: str) -> None:
    """Adds the file ``name`` to those of ``word``, if the model accepts it."""
    from mgpu_pipe.inference.visual_prompts import PromptVisuals

    try:
        PromptVisuals.from_files(run, *([Path(name)] if kind == word else [] for kind in files))
    except BadInputError as error:
        print_line(one_line(error), file=sys.stderr)
    else:
        files[word].append(Path(name))


def _line(terminal: bool) -> str | None:
    """The next typed line; None at the end or after Ctrl-C."""
    if not terminal:
        return sys.stdin.readline() or None
    import readline  # noqa: F401 (gives input() line editing and history)

    try:
        return input("> ")
    except (EOFError, KeyboardInterrupt):
        print_line()
        return None


def _save(messages: Sequence[dict[str, str]], name: str) -> None:
    """Append the conversation to a file in the format of ``data=chat_jsonl``."""
    if not name:
        print_line("/save: name a file, e.g. /save talk.jsonl", file=sys.stderr)
        return
    path = expand_home(name)
    try:
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"messages": messages}, ensure_ascii=False) + "\n")
    except OSError as error:
        print_line(f"/save: {path}: {error.strerror}", file=sys.stderr)
    else:
        print_line(f"saved: {path}", file=sys.stderr)


VERB = Verb("talk to a model that was trained on conversations", chat)
