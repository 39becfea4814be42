"""``mgpu-pipe chat``: a conversation with a model, in the terminal."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from mgpu_pipe.commands import Verb
from mgpu_pipe.config.arguments import non_negative, positive_int, share
from mgpu_pipe.errors import EXIT_OK, BadInputError
from mgpu_pipe.inference.arguments import open_run, parsed, parser_of, takes_device, takes_images

if TYPE_CHECKING:
    from mgpu_pipe.inference.load import LoadedRun

HELP = (
    "/image FILE shows a picture with the next question, /video FILE a video, /system TEXT says how to answer, "
    "/reset forgets what was said, /save FILE keeps it, /exit (or Ctrl-D) ends"
)


def chat(argv: Sequence[str]) -> int:
    """``mgpu-pipe chat [FOLDER]``: each line is a question; the answer comes as it is written."""
    parser = parser_of("chat", f"Talk to a model. In it: {HELP}.")
    parser.add_argument("--system", metavar="TEXT", help="the system message")
    parser.add_argument(
        "--max-new-tokens", type=positive_int, default=512, metavar="N", help="of an answer; default 512"
    )
    parser.add_argument(
        "--temperature", type=non_negative, default=0.8, metavar="T", help="default 0.8; 0 is the likeliest"
    )
    parser.add_argument("--top-k", type=positive_int, metavar="K", help="draw among the K likeliest tokens")
    parser.add_argument("--top-p", type=share, metavar="P", help="draw among the likeliest of total probability P")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the draws; default 0")
    takes_images(parser)
    takes_device(parser)
    _chat(parsed(parser, argv))
    return EXIT_OK


def _chat(arguments: argparse.Namespace) -> None:
    run = open_run(arguments)
    template = run.chat() if run.model.can_generate() and not run.model.config.is_encoder_decoder else None
    if template is None:
        raise BadInputError(
            f"{run.source}: was not trained on conversations, or has no chat template; use mgpu-pipe generate"
        )
    from mgpu_pipe.inference.generation import generate_text
    from mgpu_pipe.inference.sight import Sight, with_places
    from mgpu_pipe.inference.spoken import Spoken

    images, videos = list(arguments.image), list(arguments.video)
    shown = (0, 0)  # how many of them were asked about
    Sight.of(run, images, videos)
    tokenizer, terminal = run.tokenizer(), sys.stdin.isatty()
    begin = [] if arguments.system is None else [{"role": "system", "content": arguments.system}]
    messages = list(begin)
    if terminal:
        print(f"{run.source}\n{HELP}", file=sys.stderr)
    for number, line in enumerate(iter(lambda: _line(terminal), None)):
        word, _, rest = line.strip().partition(" ")
        if word in ("/exit", "/quit"):
            return
        if word == "/reset":
            messages, images, videos, shown = list(begin), [], [], (0, 0)
        elif word == "/image":
            images = _with(run, images, rest.strip())
        elif word == "/video":
            videos = _with(run, videos, rest.strip(), video=True)
        elif word == "/system":
            begin = [{"role": "system", "content": rest.strip()}] if rest.strip() else []
            messages = begin + [message for message in messages if message["role"] != "system"]
        elif word == "/save":
            _save(messages, rest.strip())
        elif word.startswith("/"):
            print(f"no such word: {word}; {HELP}", file=sys.stderr)
        elif word:
            new = len(images) - shown[0], len(videos) - shown[1]
            asked = [*messages, {"role": "user", "content": with_places(line.strip(), *new)}]
            try:
                [answer] = generate_text(
                    run.model,
                    tokenizer,
                    [asked],
                    chat=template,
                    max_new_tokens=arguments.max_new_tokens,
                    temperature=arguments.temperature,
                    top_k=arguments.top_k,
                    top_p=arguments.top_p,
                    seed=arguments.seed + number,
                    streamer=Spoken(tokenizer),
                    sight=Sight.of(run, images, videos),
                )
            except BadInputError as error:
                print(f"{error}; /reset begins anew", file=sys.stderr)
            except KeyboardInterrupt:
                print("\n(broken off: the question is forgotten)", file=sys.stderr)
            else:
                messages = [*asked, {"role": "assistant", "content": answer}]
                shown = len(images), len(videos)


def _with(run: LoadedRun, files: list[Path], name: str, video: bool = False) -> list[Path]:
    """``files`` and one more, where it can be shown."""
    from mgpu_pipe.inference.sight import Sight

    one = [Path(name)]
    try:
        Sight.of(run, *([], one) if video else (one,))
    except BadInputError as error:
        print(error, file=sys.stderr)
        return files
    return [*files, *one]


def _line(terminal: bool) -> str | None:
    """The next line that is typed; None at the end, and after Ctrl-C."""
    if not terminal:
        return sys.stdin.readline() or None
    import readline  # noqa: F401 (input() then edits its line, and remembers earlier ones)

    try:
        return input("> ")
    except (EOFError, KeyboardInterrupt):
        print()
        return None


def _save(messages: Sequence[dict[str, str]], name: str) -> None:
    """Append the conversation to a file of conversations, as ``data=chat_jsonl`` reads them."""
    if not name:
        print("/save: name a file, e.g. /save talk.jsonl", file=sys.stderr)
        return
    path = Path(name).expanduser()
    try:
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"messages": messages}, ensure_ascii=False) + "\n")
    except OSError as error:
        print(f"/save: {path}: {error.strerror}", file=sys.stderr)
    else:
        print(f"saved: {path}", file=sys.stderr)


VERB = Verb("talk to a model that was trained on conversations", chat)
