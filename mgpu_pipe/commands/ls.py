"""``mgpu-pipe ls``: the groups and their options."""

from __future__ import annotations

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
    _print_own_keys(arguments.group)
    return EXIT_OK


def _print_own_keys(group: str | None) -> None:
    """The keys of their own, with their types, of what can be chosen in ``group``, installed packages' too."""
    from mgpu_pipe.config.convert import type_name
    from mgpu_pipe.config.docs import field_documentation
    from mgpu_pipe.config.sections import SECTIONS, hints, own_keys

    documentation = field_documentation()
    for section in SECTIONS.values():
        for name, keys in section.all_keys().items() if section.name == group else ():
            print(f"\nkeys of {section.chooser}={name}")
            for key in own_keys(keys):
                text = documentation.get((keys.__name__, key), "")
                print(f"    {group}.{key}  {type_name(hints(keys)[key])}. {text}".rstrip())


def _groups() -> list[str]:
    from mgpu_pipe.config.listing import list_groups

    return list(list_groups())


VERB = Verb("the groups and their options", ls, first_words=_groups)
