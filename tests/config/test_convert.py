"""The typed tree: what is accepted, what is refused, and with which words. Oracle: the schema as written."""

from __future__ import annotations

import pytest

from mgpu_pipe.config.convert import all_keys, convert, to_plain
from mgpu_pipe.config.schema import RunConfig


def messages(values: dict) -> list[str]:
    return [str(error) for error in convert(RunConfig, values)[1]]


def test_defaults_survive_the_way_there_and_back():
    assert convert(RunConfig, to_plain(RunConfig())) == (RunConfig(), [])


def test_given_values_are_kept_and_the_rest_defaults():
    config, _ = convert(RunConfig, {"trainer": {"devices": 4, "max_steps": None}, "optimizer": {"lr": 1}})
    assert config.trainer.devices == 4
    assert config.trainer.max_steps is None
    assert config.optimizer.lr == 1.0
    assert isinstance(config.optimizer.lr, float)
    assert config.data == RunConfig().data


@pytest.mark.parametrize("value", ["auto", 1, 64])
def test_a_size_may_be_auto(value: object):
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
def test_what_does_not_fit_is_refused_with_its_fix(values: dict, said: str):
    (message,) = messages(values)
    assert said in message
    assert "\n" not in message


def test_all_errors_come_together():
    found = messages({"seed": "x", "trainer": {"devcies": 1, "max_steps": "y"}, "data": {"seq_len": None}})
    assert [message.split("=")[0] for message in found] == [
        "seed",
        "trainer.devcies",
        "trainer.max_steps",
        "data.seq_len",
    ]


def test_every_key_of_every_section_is_known():
    keys = all_keys()
    assert {"trainer.devices", "data.synthetic.sigma", "model.config", "optimizer._target_"} <= set(keys)
    assert len(keys) == len(set(keys))
