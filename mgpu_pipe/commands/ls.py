"""``mgpu-pipe ls``: the groups and their options."""

from __future__ import annotations

from collections.abc import Hashable
from typing import cast

from mgpu_pipe.commands import Verb
from mgpu_pipe.config.arguments import VerbParser, parse
from mgpu_pipe.errors import EXIT_OK


def ls(words: list[str]) -> int:
    """List the groups and their options; the default is marked with a star."""
    from mgpu_pipe.config.listing import list_groups

    parser = VerbParser(prog="mgpu-pipe ls", description="List the groups and their options; * marks the default.")
    parser.add_argument("group", nargs="?", metavar="GROUP", help="list this one alone")
    arguments = parse(parser, words)
    if arguments is None:
        return EXIT_OK
    for group, options in list_groups(arguments.group).items():
        print(group)
        width = max(len(option.name) for option in options)
        for option in options:
            print(f"  {'*' if option.is_default else ' '} {option.name:<{width}}  {option.description}".rstrip())
    if arguments.group == "objective":
        _print_objective_keys()
    return EXIT_OK


def _print_objective_keys() -> None:
    """Each objective's own keys with their types, those of installed packages too."""
    from dataclasses import fields

    from mgpu_pipe.config.convert import hints, type_name
    from mgpu_pipe.config.docs import field_documentation
    from mgpu_pipe.config.objective import descriptions

    documentation = field_documentation()
    for one in descriptions():
        print(f"\nkeys of objective.name={one.name}")
        types = hints(cast(Hashable, one.keys))
        for key in fields(one.keys)[1:]:
            text = documentation.get((one.keys.__name__, key.name), "")
            print(f"    objective.{key.name}  {type_name(types[key.name])}. {text}".rstrip())


def _groups() -> list[str]:
    from mgpu_pipe.config.listing import list_groups

    return list(list_groups())


VERB = Verb("the groups and their options", ls, first_words=_groups)
