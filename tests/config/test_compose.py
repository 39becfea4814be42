"""Composition through Hydra's own machinery, with overrides checked first. Oracle: the shipped tree and the schema."""

from __future__ import annotations

from pathlib import Path

import pytest
from omegaconf import OmegaConf

from mgpu_pipe.config.convert import schema_keys
from mgpu_pipe.config.data_sources import all_sources
from mgpu_pipe.config.hydra.compose import compose, compose_raw, hydra_session, preprocess
from mgpu_pipe.config.sections import own_keys
from mgpu_pipe.errors import BadInputError, ConfigErrors
from mgpu_pipe.launch.slurm.slurm_keys import SlurmConfig
from mgpu_pipe.system.conf_folders import CONFIG_NAME, conf_dir
from tests.support import shared_conf


def messages(*overrides: str) -> list[str]:
    with pytest.raises(ConfigErrors) as caught:
        compose(list(overrides))
    return [str(error) for error in caught.value.errors]


def test_the_issues_own_command_composes() -> None:
    config, overrides = compose(
        [
            *("strategy=ddp", "trainer.devices=4", "model=llama_tiny", "precision=fp32", "optimizer.lr=3e-4"),
            "trainer.max_steps=20",
        ]
    )
    assert (config.strategy.name, config.strategy.dp_replicate) == ("ddp", "auto")
    assert (config.trainer.devices, config.trainer.max_steps, config.optimizer.lr) == (4, 20, 3e-4)
    assert config.model.name == "llama_tiny"
    assert "strategy=ddp" in overrides


def test_every_schema_key_can_be_set_without_a_plus() -> None:
    free = [(key, hint) for key, hint in schema_keys() if not isinstance(hint, type) or hint in (int, float, str, bool)]
    sections = {
        "model.config",
        "optimizer.options",
        "sweep.space",
        "logger",
        "callbacks",
        "data.paths",
        "data.validation_paths",
        "objective.sample_prompts",
    }
    settable = [key for key, _ in free if key not in sections]
    with hydra_session() as hydra:
        good, errors = preprocess(hydra, [f"{key}=1" for key in settable])
    assert errors == []
    own = {key for key in settable if key.startswith("objective.") and key != "objective.name"}  # of one objective only
    own |= {f"launch.{name}" for name in own_keys(SlurmConfig)}
    of_data = [source.keys for source in all_sources() if source.keys is not None]
    own |= {f"data.{name}" for keys in of_data for name in own_keys(keys)}
    own |= {"strategy.deepspeed_config", "optimizer.groups", "eval.tasks"}  # mappings, to which keys are added
    below = tuple(f"{key}." for key in own)  # data.augment has keys of its own
    assert good == [f"{'++' if key in own or key.startswith(below) else ''}{key}=1" for key in settable]


def test_a_plus_before_a_known_key_does_no_harm() -> None:
    config, overrides = compose(["+trainer.max_steps=7", "++seed=3", "+strategy=ddp", "+model.config.vocab_size=8"])
    assert (config.trainer.max_steps, config.seed, config.strategy.name) == (7, 3, "ddp")
    assert config.model.config["vocab_size"] == 8
    assert overrides[0] == "trainer.max_steps=7"


def test_free_form_keys_need_no_plus() -> None:
    config, _ = compose(
        [
            "model.config.attention_bias=true",
            "optimizer.options.amsgrad=true",
            "logger.tensorboard.name=x",
            "callbacks.mine._target_=a.B",
        ]
    )
    assert config.model.config["attention_bias"] is True
    assert config.optimizer.options == {"betas": [0.9, 0.95], "eps": 1e-8, "amsgrad": True}
    assert config.logger["tensorboard"]["name"] == "x"
    assert config.callbacks == {"mine": {"_target_": "a.B"}}


@pytest.mark.parametrize("prefix", ["", "+", "++"])
def test_a_misspelt_key_is_refused_also_after_a_plus(prefix: str) -> None:
    assert messages(f"{prefix}trainer.devcies=8") == ["trainer.devcies=8: no such key; did you mean trainer.devices?"]


def test_a_section_may_be_given_as_a_mapping() -> None:
    config, _ = compose(["trainer={max_steps: 3, val_every_n_steps: 1}", "optimizer.options={eps: 1e-6}"])
    assert (config.trainer.max_steps, config.trainer.val_every_n_steps) == (3, 1)
    assert config.optimizer.options["eps"] == 1e-6 and "betas" in config.optimizer.options
    assert config.trainer.log_every_n_steps == compose([])[0].trainer.log_every_n_steps


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("strategy=ddpp", "strategy=ddpp: no such option; did you mean ddp?"),
        ("+strategy=ddpp", "did you mean ddp?"),
        ("experiment=quikstart", "did you mean quickstart?"),
        ("modle=llama_tiny", "modle=llama_tiny: no such key or group; did you mean model?"),
        ("model.cnfig.vocab_size=3", "did you mean model.config.vocab_size?"),
        ("max_steps=3", "did you mean trainer.max_steps?"),
        ("trainer.devices", "an override needs a value; write trainer.devices=<value>"),
        ("trainer={max_stepss: 3}", "trainer.max_stepss=3: no such key; did you mean trainer.max_steps?"),
        ("~optimizer.options", "a key cannot be deleted; its default is {}"),
        ("trainer.devices.x=1", "trainer.devices.x=1: no such key"),
        ("optimizer.lr=1e-3,1e-4", "several values; add -m for one run each"),
        ("run.name=[a", "add the missing ]"),
        ("optimizer=null", "use one of adamw, adamw_bf16, muon, muon_small, sgd"),
        ("nosuch/group=x", "no such group"),
    ],
)
def test_a_wrong_override_is_one_line_with_its_fix(override: str, said: str) -> None:
    (message,) = messages(override)
    assert said in message
    assert "\n" not in message


def test_errors_of_keys_options_and_types_come_together() -> None:
    found = messages("trainer.devcies=4", "strategy=dpp", "data.seq_len=long", "precision.name=bf61")
    assert [message.split("=")[0] for message in found] == [
        "trainer.devcies",
        "strategy",
        "data.seq_len",
        "precision.name",
    ]


def test_null_chooses_nothing() -> None:
    config, _ = compose(["logger=null", "callbacks=null", "experiment=null"])
    assert (config.logger, config.callbacks) == ({}, {})


def test_a_search_path_brings_options_and_they_are_suggested(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "mine.yaml").write_text("name: mine\ntype: llama\nconfig: {vocab_size: 7}\n")
    search_path = f"hydra.searchpath=[file://{tmp_path}]"
    config, overrides = compose([search_path, "model=mine"])
    assert config.model.config["vocab_size"] == 7
    assert overrides == ["model=mine"]
    assert "did you mean mine?" in messages(search_path, "model=mien")[0]
    assert "mine" not in messages("model=mien")[0].split("one of")[1]


def test_an_unknown_key_in_a_users_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "mine.yaml").write_text("# @package _global_\ntrainer: {devcies: 2}\n")
    (message,) = messages(f"hydra.searchpath=[file://{tmp_path}]", "experiment=mine")
    assert message == "trainer.devcies=2: no such key; did you mean trainer.devices?"


def test_broken_yaml_names_file_and_line(tmp_path: Path) -> None:
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "mine.yaml").write_text("# @package _global_\ntrainer: [\n")
    with pytest.raises(BadInputError, match=r"mine\.yaml.*line 3"):
        compose([f"hydra.searchpath=[file://{tmp_path}]", "experiment=mine"])


def test_a_missing_search_path_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInputError, match="nothing_here is not available"):
        compose([f"hydra.searchpath=[file://{tmp_path}/nothing_here]"])


def test_interpolations_are_resolved_and_bad_ones_named() -> None:
    assert compose(["run.name=x", "run.root=${run.name}/y"])[0].run.root == "x/y"
    (message,) = messages("run.name=${nope.nothing}")
    assert message.startswith("run.name=${nope.nothing}: Interpolation key 'nope.nothing' not found")


def test_the_conf_tree_is_the_source_trees() -> None:
    assert conf_dir() == Path(__file__).resolve().parents[2] / "conf"


@pytest.mark.parametrize(
    "words",
    [
        ["model=llama_tiny", "strategy=fsdp", "trainer.devices=2", "+data.x=3"],
        ["experiment=vlm_digits", "logger=none", "strategy.pp=2"],
        ["peft=lora", "~callbacks", "hydra.sweep.dir=x", "launch=slurm"],
    ],
)
def test_the_files_that_tests_share_compose_as_files_read_anew(
    words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def composed() -> tuple[str, str]:
        with hydra_session() as hydra:
            good, errors = preprocess(hydra, words)
            return OmegaConf.to_yaml(compose_raw(hydra, good, CONFIG_NAME)), str(errors)

    shared = [composed() for _ in range(3)]
    monkeypatch.setattr(shared_conf, "SHIPPED", [])
    assert shared == [composed()] * 3
