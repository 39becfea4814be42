"""``mgpu-pipe schema``: the JSON schema of a configuration."""

from __future__ import annotations

import json

from mgpu_pipe.cli.verbs import Verb, without_arguments
from mgpu_pipe.errors import EXIT_OK, print_text


def schema(words: list[str]) -> int:
    if without_arguments("schema", "Print the JSON schema (draft 2020-12) of every key, for editors.", words):
        from mgpu_pipe.config.json_schema import json_schema

        print_text(json.dumps(json_schema(), indent=2))
    return EXIT_OK


VERB = Verb("every key, its type and meaning, as a JSON schema", schema)
