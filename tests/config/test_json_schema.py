"""The JSON schema names every key with its documentation and default. Oracle: the dataclass tree."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

from mgpu_pipe.config.convert import all_keys, to_plain
from mgpu_pipe.config.json_schema import field_documentation, json_schema
from mgpu_pipe.config.schema import RunConfig


def leaves(schema: dict[str, Any], path: str = "") -> dict[str, dict[str, Any]]:
    found = {}
    for name, entry in schema["properties"].items():
        key = f"{path}.{name}" if path else name
        found[key] = entry
        if "properties" in entry:
            found |= leaves(entry, key)
    return found


def test_every_key_is_in_it_and_nothing_else():
    assert set(leaves(json_schema())) - {"defaults", "hydra"} == set(all_keys())


def test_every_leaf_is_documented_and_has_its_default():
    flat: dict[str, Any] = {}

    def walk(config: Any, path: str) -> None:
        for field in dataclasses.fields(config):
            value = getattr(config, field.name)
            key = f"{path}.{field.name}" if path else field.name
            if dataclasses.is_dataclass(value):
                walk(value, key)
            else:
                flat[key] = to_plain(config)[field.name]

    walk(RunConfig(), "")
    described = leaves(json_schema())
    for key, default in flat.items():
        assert described[key].get("description"), key
        assert described[key]["default"] == default, key


def test_types_are_what_the_schema_says():
    described = leaves(json_schema())
    assert described["optimizer.lr"]["anyOf"][0] == {"type": "number"}
    assert {"enum": ["auto"]} in described["trainer.devices"]["anyOf"]
    assert {"type": "null"} in described["trainer.max_steps"]["anyOf"]
    assert described["data.paths"]["anyOf"][0] == {"type": "array", "items": {"type": "string"}}
    assert json_schema()["additionalProperties"] is False
    json.dumps(json_schema())


def test_a_keys_documentation_is_the_literal_below_it():
    assert field_documentation()["TrainerConfig", "num_nodes"] == "Nodes of the job."
