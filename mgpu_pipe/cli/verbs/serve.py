"""``mgpu-pipe serve``: a model behind OpenAI's interface."""

from __future__ import annotations

import argparse
import secrets
import sys
from collections.abc import Sequence
from pathlib import Path

from mgpu_pipe.cli.verbs import Verb
from mgpu_pipe.config.arguments import count
from mgpu_pipe.errors import EXIT_OK, BadInputError, hide, print_line
from mgpu_pipe.inference.model_arguments import (
    add_device_argument,
    build_parser,
    folder_of,
    parse_arguments,
    resolve_device,
)
from mgpu_pipe.serving.engines import ENGINES, find_engine
from mgpu_pipe.serving.serve import ServeOptions, serve
from mgpu_pipe.serving.source import find_served

LOOPBACK = ("127.0.0.1", "localhost", "::1")
MAX_PORT = 65535


def run_serve(argv: Sequence[str]) -> int:
    """``mgpu-pipe serve [FOLDER] [--engine NAME]``: exports, starts, compares, and prints the address."""
    arguments = parse_arguments(_parser(), argv)
    _check(arguments)
    token = None if arguments.no_token else arguments.token or secrets.token_urlsafe(24)
    if token is not None:
        hide(token, "<token>")
    folder, average = folder_of(arguments), arguments.weights == "ema"
    engine, device = find_engine(arguments.engine), resolve_device(arguments.device)
    engine.require(Path(sys.executable))
    options = ServeOptions(
        engine=engine,
        host=arguments.host,
        port=arguments.port,
        device=device,
        dtype=arguments.dtype or "fp32",
        python=Path(sys.executable),
        out=None if arguments.out is None else arguments.out.expanduser(),
        force=arguments.force,
        frozen=arguments.frozen_weights,
        average=average,
        token=token,
        is_trial=arguments.check,
        is_verbose=arguments.verbose,
    )
    try:
        serve(find_served(folder, arguments.frozen_weights, average, arguments.name), options)
    except KeyboardInterrupt:
        print_line("stopped", file=sys.stderr)
    return EXIT_OK


def _parser() -> argparse.ArgumentParser:
    parser = build_parser("serve", "Answer requests of OpenAI's interface with a model, until Ctrl-C.")
    parser.add_argument("--engine", choices=ENGINES, default="transformers", help="default transformers")
    parser.add_argument("--host", default="127.0.0.1", help="address to bind; default 127.0.0.1, this machine alone")
    parser.add_argument("--port", type=count, default=8000, metavar="N", help="default 8000; 0 takes a free one")
    parser.add_argument("--token", metavar="TEXT", help="that requests must bear; default: a random one")
    parser.add_argument("--no-token", action="store_true", help="accept requests without a token")
    parser.add_argument("--name", help="of the model in requests; default: the run's")
    parser.add_argument("--dtype", choices=["fp32", "bf16", "fp16"], help="type of the weights; default fp32")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="folder of the export; default: in the cache")
    parser.add_argument("--force", action="store_true", help="replace an existing folder --out")
    parser.add_argument("--check", action="store_true", help="compare five answers with the run's, and end")
    parser.add_argument("--verbose", action="store_true", help="show all that the engine prints")
    add_device_argument(parser)
    return parser


def _check(arguments: argparse.Namespace) -> None:
    if arguments.port > MAX_PORT:
        raise BadInputError(f"--port={arguments.port}: above {MAX_PORT}; choose a smaller one")
    if arguments.no_token and arguments.token is not None:
        raise BadInputError("--no-token: contradicts --token; leave one out")
    if arguments.token is not None and (not arguments.token.isascii() or not arguments.token.isprintable()):
        raise BadInputError("--token: has characters that no header takes; use letters, digits, - and _")
    if arguments.token == "" or arguments.name == "":
        raise BadInputError("--token, --name: are empty; give a text, or leave them out")
    if arguments.no_token and arguments.host not in LOOPBACK:
        raise BadInputError(f"--no-token: lets everybody who reaches --host={arguments.host} in; leave one out")


VERB = Verb("answer requests of OpenAI's interface", run_serve)
