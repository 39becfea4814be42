"""What makes two runs the same run. Oracle: the table of kinds as the documentation words it, key by key."""

from __future__ import annotations

import functools
from copy import deepcopy
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any

import pytest

from mgpu_pipe.config import plugins
from mgpu_pipe.config.convert import schema_keys
from mgpu_pipe.config.hydra.compose import compose
from mgpu_pipe.config.identity import FREE
from mgpu_pipe.config.objective import description
from mgpu_pipe.config.plugins import OBJECTIVES
from mgpu_pipe.config.run_identity import Identity, differences, identities, identity_of, mathematics_hash
from mgpu_pipe.config.schema import DataConfig, ObjectiveConfig, RunConfig
from mgpu_pipe.config.sections import hints

MIXED = ("model", "data", "objective")
"""Sections whose keys each state an identity: a new key has to be decided upon."""


@pytest.mark.slow
def test_every_key_of_the_schema_has_a_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plugins, "entry_points", functools.cache(plugins.entry_points))  # a scan takes 10 ms
    for key, hint in schema_keys():
        if not (isinstance(hint, type) and is_dataclass(hint)):
            assert isinstance(identity_of(key), Identity), f"state what {key} is to a run in the metadata of its field"
    stated = identities()
    for section in MIXED:
        unstated = [f"{section}.{key.name}" for key in fields(hints(RunConfig)[section])]
        assert not [key for key in unstated if key not in stated], f"{section}: state what these keys are to a run"


def test_the_field_of_an_installed_key_states_its_identity() -> None:
    @dataclass
    class Keys(DataConfig):
        folder: str = ""
        threads: int = field(default=1, metadata=FREE)

    plain = RunConfig()
    other, faster = replace(plain, data=Keys(folder="a")), replace(plain, data=Keys(threads=2))
    assert mathematics_hash(faster) == mathematics_hash(replace(plain, data=Keys())) != mathematics_hash(other)


def changed(key: str, value: object) -> RunConfig:
    config = deepcopy(RunConfig())
    node: Any = config
    *sections, name = key.split(".")
    for section in sections:
        node = getattr(node, section)
    assert getattr(node, name) != value
    setattr(node, name, value)
    return config


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("seed", 7),
        ("model.type", "gpt2"),
        ("model.path", "/m"),
        ("model.config", {"a": 1}),
        ("model.freeze", ["*"]),
        ("data.paths", ["x"]),
        ("data.tokenizer", "/t"),
        ("data.seq_len", 8),
        ("data.packing", "none"),
        ("data.global_batch_size", 8),
        ("data.validation_fraction", 0.1),
        ("data.validation_paths", ["x"]),
        ("data.synthetic.sigma", 0.1),
        ("objective.router_aux_loss", 0.1),
        ("optimizer._target_", "torch.optim.SGD"),
        ("optimizer.lr", 1.0),
        ("optimizer.options", {"betas": [0.5]}),
        ("scheduler.name", "wsd"),
        ("scheduler.total_steps", 9),
        ("trainer.gradient_clip_val", 2.0),
        ("checkpoint.init_from", "/w"),
    ],
)
def test_what_decides_the_numbers_makes_another_run(key: str, value: object) -> None:
    other = changed(key, value)
    assert mathematics_hash(other) != mathematics_hash(RunConfig())
    assert [name for name, _, _ in differences(other, RunConfig()) if not f"{name}.".startswith(f"{key}.")] == []
    assert differences(other, RunConfig())


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("run.name", "n"),
        ("run.root", "/r"),
        ("model.name", "n"),
        ("model.attn_implementation", "eager"),
        ("model.compile", True),
        ("data.micro_batch_size", 1),
        ("data.num_workers", 1),
        ("data.tokenize_workers", 1),
        ("data.cache_dir", "/c"),
        ("objective.sample_prompts", ["x"]),
        ("objective.loss_chunk_tokens", 8),
        ("strategy.tp", 2),
        ("strategy.engine", "deepspeed"),
        ("precision.name", "bf16"),
        ("trainer.max_steps", 9),
        ("trainer.max_epochs", 9),
        ("trainer.devices", 2),
        ("trainer.deterministic", True),
        ("launch.max_restarts", 1),
        ("checkpoint.resume", "auto"),
        ("checkpoint.keep_last", 1),
        ("logger", {"a": {}}),
        ("callbacks", {"a": {}}),
    ],
)
def test_what_does_not_is_the_same_run(key: str, value: object) -> None:
    other = changed(key, value)
    assert mathematics_hash(other) == mathematics_hash(RunConfig())
    assert differences(other, RunConfig()) == []


def test_a_composed_run_is_told_by_its_leaves() -> None:
    one, _ = compose(["model=llama_tiny"])
    other, _ = compose(["model=llama_tiny", "model.config.hidden_size=8", "optimizer.options.eps=1e-5"])
    assert differences(other, one) == [("model.config.hidden_size", 8, 64), ("optimizer.options.eps", 1e-5, 1e-8)]
    assert mathematics_hash(one) == mathematics_hash(compose(["model=llama_tiny", "strategy=fsdp"])[0])


def test_a_value_of_the_environment_is_not_what_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["model=llama_tiny", "data=text_files", "data.paths=['${oc.env:CORPUS}/*.txt']"]
    monkeypatch.setenv("CORPUS", "/here")
    here = mathematics_hash(compose(words)[0])
    monkeypatch.setenv("CORPUS", "/there")
    assert mathematics_hash(compose(words)[0]) == here


@dataclass
class FocalConfig(ObjectiveConfig):
    name: str = "focal"
    gamma: float = 2.0
    sample_prompts: list[str] = field(default_factory=list)


def test_samples_of_a_plug_in_that_states_nothing_change_no_run() -> None:
    config = compose([])[0]
    first, prompted, other = (
        replace(config, objective=keys)
        for keys in (FocalConfig(), FocalConfig(sample_prompts=["a"]), FocalConfig(gamma=1.0))
    )
    assert mathematics_hash(first) == mathematics_hash(prompted) != mathematics_hash(other)


@pytest.mark.parametrize("name", OBJECTIVES)
def test_a_run_and_the_table_of_all_objectives_agree(name: str) -> None:
    keys: Any = description(name).keys
    for key in (f"objective.{entry.name}" for entry in fields(keys)):
        assert identities(keys).get(key, Identity.FIXED) == identity_of(key), key
