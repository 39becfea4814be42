"""``mgpu-pipe schema``: the JSON schema of a configuration."""

from __future__ import annotations

from mgpu_pipe.commands import Verb, takes_nothing
from mgpu_pipe.errors import EXIT_OK


def schema(words: list[str]) -> int:
    import json

    if takes_nothing("schema", "Print the JSON schema (draft 2020-12) of every key, for editors.", words):
        from mgpu_pipe.config.json_schema import json_schema

        print(json.dumps(json_schema(), indent=2))
    return EXIT_OK


VERB = Verb("every key, its type and meaning, as a JSON schema", schema)
