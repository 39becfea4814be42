"""The typed tree and its JSON schema: what is accepted, what is refused, and with which words.

Oracle: the dataclasses as written.
"""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest

from mgpu_pipe.config.convert import all_keys, convert, to_plain
from mgpu_pipe.config.json_schema import field_documentation, json_schema
from mgpu_pipe.config.schema import RunConfig


def messages(values: dict) -> list[str]:
    return [str(error) for error in convert(RunConfig, values)[1]]


def test_defaults_survive_the_way_there_and_back() -> None:
    assert convert(RunConfig, to_plain(RunConfig())) == (RunConfig(), [])


def test_given_values_are_kept_and_the_rest_defaults() -> None:
    config, _ = convert(RunConfig, {"trainer": {"devices": 4, "max_steps": None}, "optimizer": {"lr": 1}})
    assert config.trainer.devices == 4
    assert config.trainer.max_steps is None
    assert config.optimizer.lr == 1.0
    assert isinstance(config.optimizer.lr, float)
    assert config.data == RunConfig().data


@pytest.mark.parametrize("value", ["auto", 1, 64])
def test_a_size_may_be_auto(value: object) -> None:
    assert convert(RunConfig, {"data": {"micro_batch_size": value}})[0].data.micro_batch_size == value


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"trainer": {"devcies": 8}}, "trainer.devcies=8: no such key; did you mean trainer.devices?"),
        ({"trianer": {"devices": 8}}, "did you mean trainer?"),
        ({"lr": 0.1}, "did you mean optimizer.lr?"),
        ({"seed": True}, "seed=true: use a whole number"),
        ({"seed": 1.0}, "seed=1.0: a whole number is wanted; write 1"),
        ({"seed": "1"}, 'seed="1": this is text, not a number; leave out the inner quotes: seed=1'),
        ({"optimizer": {"lr": "1e-3"}}, "leave out the inner quotes: optimizer.lr=1e-3"),
        ({"optimizer": {"lr": float("nan")}}, "optimizer.lr=nan: use a finite number"),
        ({"run": {"name": 12}}, "run.name=12: this is not text; quote it twice: run.name=\"'12'\""),
        ({"precision": {"name": "bf61"}}, "did you mean bf16? (one of auto, bf16, bf16_true, fp16, fp32, fp8)"),
        ({"precision": {"name": "int3"}}, "one of auto, bf16, bf16_true, fp16, fp32, fp8"),
        ({"data": {"micro_batch_size": "atuo"}}, "did you mean auto? (or use a whole number or auto or max)"),
        ({"data": {"global_batch_size": None}}, "null is not a value of this key; use a whole number"),
        ({"trainer": {"deterministic": 1}}, "trainer.deterministic=1: use true or false"),
        ({"trainer": 3}, "trainer=3: use the section's keys"),
        ({"data": {"paths": "a.txt"}}, "data.paths=a.txt: write it as a list, 'data.paths=[\"a.txt\"]'"),
        ({"data": {"paths": ["a", 3]}}, "data.paths[1]=3: this is not text"),
        ({"model": {"config": [1]}}, "use a mapping, {name: value}"),
        ({"model": {"path": "???"}}, "must be given"),
        ({"model": {"config": {"vocab_size": "???"}}}, "model.config.vocab_size=???: must be given"),
    ],
)
def test_what_does_not_fit_is_refused_with_its_fix(values: dict, said: str) -> None:
    (message,) = messages(values)
    assert said in message
    assert "\n" not in message


def test_all_errors_come_together() -> None:
    found = messages({"seed": "x", "trainer": {"devcies": 1, "max_steps": "y"}, "data": {"seq_len": None}})
    assert [message.split("=")[0] for message in found] == [
        "seed",
        "trainer.devcies",
        "trainer.max_steps",
        "data.seq_len",
    ]


def test_every_key_of_every_section_is_known() -> None:
    keys = all_keys()
    assert {"trainer.devices", "data.synthetic.sigma", "model.config", "optimizer._target_"} <= set(keys)
    assert len(keys) == len(set(keys))


def leaves(schema: dict[str, Any], path: str = "") -> dict[str, dict[str, Any]]:
    found = {}
    for name, entry in schema["properties"].items():
        key = f"{path}.{name}" if path else name
        found[key] = entry
        if "properties" in entry:
            found |= leaves(entry, key)
    return found


def test_every_key_is_in_it_and_nothing_else() -> None:
    assert set(leaves(json_schema())) - {"defaults", "hydra"} == set(all_keys())


def test_every_leaf_is_documented_and_has_its_default() -> None:
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


def test_types_are_what_the_schema_says() -> None:
    described = leaves(json_schema())
    assert described["optimizer.lr"]["anyOf"][0] == {"type": "number"}
    assert {"enum": ["auto"]} in described["trainer.devices"]["anyOf"]
    assert {"type": "null"} in described["trainer.max_steps"]["anyOf"]
    assert described["data.paths"]["anyOf"][0] == {"type": "array", "items": {"type": "string"}}
    assert json_schema()["additionalProperties"] is False
    json.dumps(json_schema())


def test_a_keys_documentation_is_the_literal_below_it() -> None:
    assert field_documentation()["TrainerConfig", "num_nodes"] == "Nodes of the job."
