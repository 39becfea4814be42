"""Sphinx's configuration (``make docs``), and the reference pages that are written from the program itself.

A page with a line ``<!-- generated: NAME -->`` gets the tables of keys, or the help of every verb, in its place while
it is built; nothing generated lies in the repository.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
from collections.abc import Iterator, Mapping
from typing import Any

from mgpu_pipe.cli.verbs import find_verb, verb_names
from mgpu_pipe.config.json_schema import INTERPOLATION, json_schema

project = "mgpu_pipe"
html_title = "mgpu_pipe"
html_theme = "furo"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_show_copyright = False
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
myst_enable_extensions = ["deflist"]
myst_heading_anchors = 3
nitpicky = True
nitpick_ignore_regex = [("py:.*", ".*")]  # docstrings name classes of other packages and of other pages
autodoc_member_order = "bysource"
autodoc_typehints = "none"  # the docstrings state shapes and units
autodoc_inherit_docstrings = False

GENERATED = re.compile(r"^<!-- generated: (\w+) -->$", re.MULTILINE)
SUBCOMMANDS = {"checkpoints": ("list", "check", "compare", "prune")}
Entry = Mapping[str, Any]


def keys() -> str:
    """A section a group, and in it a table of its keys."""
    properties: Mapping[str, Entry] = json_schema()["properties"]
    groups = {name: entry for name, entry in properties.items() if "properties" in entry}
    plain = {name: entry for name, entry in properties.items() if name not in (*groups, "defaults", "hydra")}
    parts = ["## At the top", _table(_rows("", plain))]
    for name, entry in groups.items():
        description = _text(entry["description"]) if "description" in entry else ""
        parts += [f"## {name}", description, _table(_rows(f"{name}.", entry["properties"]))]
    return "\n\n".join(part for part in parts if part)


def _rows(prefix: str, properties: Mapping[str, Entry]) -> Iterator[tuple[str, ...]]:
    for name, entry in properties.items():
        if "properties" in entry:
            yield from _rows(f"{prefix}{name}.", entry["properties"])
        else:
            default = json.dumps(entry["default"]) if "default" in entry else ""
            yield f"`{prefix}{name}`", _type(entry), f"`{default}`", _text(entry.get("description", ""))


def _type(entry: Entry) -> str:
    if "anyOf" in entry:
        return " or ".join(_type(arm) for arm in entry["anyOf"] if arm != INTERPOLATION)
    if "enum" in entry:
        return ", ".join(f"`{value}`" for value in entry["enum"])
    kind = str(entry.get("type", "anything"))
    return f"list of {_type(entry['items'])}" if kind == "array" and "items" in entry else kind


def _text(plain: str) -> str:
    """Plain text as Markdown that shows it."""
    return re.sub(r"([\\`*_{}\[\]<>$|])", r"\\\1", " ".join(plain.split()))


def _table(rows: Iterator[tuple[str, ...]]) -> str:
    head = ["| key | type | default | meaning |", "|---|---|---|---|"]
    return "\n".join([*head, *(f"| {' | '.join(row)} |" for row in rows)])


def verbs() -> str:
    """The help of every verb, as ``mgpu-pipe VERB --help`` prints it."""
    parts = []
    for name in verb_names():
        parts += [f"## {name}", _text(find_verb(name).line)]
        commands = [(), *((subcommand,) for subcommand in SUBCOMMANDS.get(name, ()))]
        parts += [f"```text\n{_help(name, *words)}```" for words in commands]
    return "\n\n".join(parts)


def _help(verb: str, *words: str) -> str:
    output = io.StringIO()
    os.environ["COLUMNS"] = "80"
    with contextlib.redirect_stdout(output), contextlib.suppress(SystemExit):  # a subcommand's help ends the program
        find_verb(verb).run([*words, "--help"])
    return output.getvalue()


def _generate(app: object, page: str, source: list[str]) -> None:
    parts = {"keys": keys, "verbs": verbs}
    source[0] = GENERATED.sub(lambda found: parts[found[1]](), source[0])


def _keep_first_line(app: object, kind: str, name: str, value: object, options: object, lines: list[str]) -> None:
    """Let a property's first line stand, which Napoleon would take for ``type: description``."""
    if kind in ("property", "attribute", "data") and lines:
        lines[0] = lines[0].replace(": ", " -- ")


def setup(app: Any) -> None:
    app.connect("source-read", _generate)
    app.connect("autodoc-process-docstring", _keep_first_line, priority=400)  # before Napoleon
