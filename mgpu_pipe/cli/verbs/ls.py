"""``mgpu-pipe ls``: the groups and their options."""

from __future__ import annotations

import shutil
import sys
import textwrap
from collections.abc import Iterable
from dataclasses import fields, is_dataclass
from typing import Any, cast

from mgpu_pipe.cli.verbs import Verb
from mgpu_pipe.config.arguments import VerbParser, parse
from mgpu_pipe.errors import EXIT_OK, print_line


def ls(words: list[str]) -> int:
    """List the groups and their options; the default is marked with a star."""
    from mgpu_pipe.config.sections import list_groups

    parser = VerbParser(prog="mgpu-pipe ls", description="List the groups and their options; * marks the default.")
    parser.add_argument(
        "group", nargs="?", metavar="GROUP", help="this one, the groups in it, and its keys with their defaults"
    )
    arguments = parse(parser, words)
    if arguments is None:
        return EXIT_OK
    for group, options in list_groups(arguments.group).items():
        print_line(group)
        width = max(len(option.name) for option in options)
        for option in options:
            _print(f"  {'*' if option.is_default else ' '} {option.name:<{width}}  {option.description}", width + 6)
    if arguments.group:
        _print_keys(arguments.group)
    return EXIT_OK


def _print_keys(group: str) -> None:
    """Print the keys of a group with default and type: common keys, then those of single choices."""
    from mgpu_pipe.config.schema import RunConfig
    from mgpu_pipe.config.sections import SECTIONS, hints, own_keys

    base = hints(RunConfig).get(group)
    if is_dataclass(base):
        print_line()
        print_line(f"keys of {group}, and what they are where neither an option nor you set them")
        _print_fields(group, cast(type, base)(), [field.name for field in fields(base)])
    for section in SECTIONS.values():
        alike: dict[type, list[str]] = {}
        for name, keys in section.all_keys().items() if section.name == group else ():
            alike.setdefault(keys, []).append(name)
        for keys, names in alike.items():
            print_line()
            _print(f"keys of {section.chooser}={' or '.join(names)}", 4)
            _print_fields(group, keys(), sorted(own_keys(keys), key=lambda name: name not in keys.__annotations__))


def _print_fields(path: str, keys: Any, names: Iterable[str]) -> None:
    from mgpu_pipe.config.convert import hide_environment, setting, type_name
    from mgpu_pipe.config.json_schema import key_documentation
    from mgpu_pipe.config.sections import hints

    cls: type = type(keys)
    for name in names:
        default = getattr(keys, name)
        if is_dataclass(default):
            _print_fields(f"{path}.{name}", default, [field.name for field in fields(default)])
            continue
        text = key_documentation(cls, name)
        _print(f"    {path}.{name}={setting(hide_environment(default))}  {type_name(hints(cls)[name])}. {text}", 8)


def _print(line: str, indent: int) -> None:
    """Print a line, wrapped only on a terminal, because other programs search it."""
    if sys.stdout.isatty():
        width = max(40, shutil.get_terminal_size().columns)
        line = textwrap.fill(line, width, subsequent_indent=" " * indent, break_on_hyphens=False)
    print_line(line.rstrip())


def _groups() -> list[str]:
    from mgpu_pipe.config.sections import list_groups

    return list(list_groups())


VERB = Verb("the groups and their options", ls, first_words=_groups)
