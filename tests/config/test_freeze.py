"""The frozen file: what is written comes back, and values of the environment are never written."""

from __future__ import annotations

import copy
import os
import pickle
from dataclasses import replace
from pathlib import Path

import pytest

from mgpu_pipe.config.convert import to_plain
from mgpu_pipe.config.freeze import config_hash, freeze, load, load_untrusted, remember
from mgpu_pipe.config.hydra.compose import compose
from mgpu_pipe.config.paths import private_folder
from mgpu_pipe.errors import BadInputError, ConfigError, ConfigErrors
from mgpu_pipe.models.fields import check_model_config

SECRET = "s3cr3t-value"


def test_a_configuration_comes_back_the_same(tmp_path: Path) -> None:
    config, _ = compose(["experiment=quickstart", "trainer.accelerator=cpu", "optimizer.lr=1e-5", "data.paths=['ä b']"])
    freeze(config, tmp_path / "config.yaml")
    assert load(tmp_path / "config.yaml") == config
    assert [entry.name for entry in tmp_path.iterdir()] == ["config.yaml"]


@pytest.mark.parametrize("text", ["${x}", "a \\${b}", "\\\\${c} ${d}", "C:\\path", "$ { } ${"])
def test_literal_dollars_come_back_as_they_are(tmp_path: Path, text: str) -> None:
    config, _ = compose()
    config.objective.sample_prompts = [text]  # type: ignore[attr-defined]
    freeze(config, tmp_path / "config.yaml")
    assert load(tmp_path / "config.yaml").objective.sample_prompts == [text]  # type: ignore[attr-defined]


def test_a_secret_stays_an_interpolation_in_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_KEY", SECRET)
    config, _ = compose(
        [
            "logger.mine._target_=a.B",
            "logger.mine.key=${oc.env:MY_KEY}",
            "run.name=x-${oc.env:MY_KEY}",
            "run.root=${run.name}/y",
            "logger.mine.list=[1,'${oc.env:MY_KEY}']",
            "seed='${oc.decode:${oc.env:SEED,7}}'",
        ]
    )
    assert config.logger["mine"]["key"] == SECRET
    assert config.run.root == f"x-{SECRET}/y"
    assert config.seed == 7
    freeze(config, tmp_path / "config.yaml")
    text = (tmp_path / "config.yaml").read_text()
    assert SECRET not in text
    assert "key: ${oc.env:MY_KEY}" in text
    assert SECRET not in str(to_plain(config))
    assert SECRET not in repr(config)
    monkeypatch.setenv("MY_KEY", "another")
    again = load(tmp_path / "config.yaml")
    assert again.logger["mine"]["key"] == "another"
    assert again.run.root == "x-another/y"
    assert again.logger["mine"]["list"] == [1, "another"]


@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        ("optimizer.lr", "2e-4", 2e-4),
        ("trainer.max_steps", "7", 7),
        ("data.micro_batch_size", "auto", "auto"),
        ("data.micro_batch_size", "4", 4),
        ("trainer.deterministic", "True", True),
    ],
)
def test_a_text_of_the_environment_is_what_its_key_takes(
    key: str, text: str, value: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_KEY", text)
    config = to_plain(compose([f"{key}=${{oc.env:MY_KEY}}"])[0])
    section, name = key.split(".")
    assert config[section][name] == value and type(config[section][name]) is type(value)
    monkeypatch.setenv("MY_KEY", "nothing of it")
    with pytest.raises(ConfigErrors, match=rf"{key}=\$\{{oc\.env:MY_KEY\}}: use "):
        compose([f"{key}=${{oc.env:MY_KEY}}"])


def test_a_model_field_of_the_environment_names_what_reads_its_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_LAYERS", "2")
    key = "model.config.num_hidden_layers"
    config, _ = compose(["model=llama_tiny", f"{key}=${{oc.env:MY_LAYERS}}"])
    with pytest.raises(ConfigErrors, match="give a whole number: '") as refused:
        check_model_config(config.model)
    _, fix, _ = str(refused.value).split("'")
    config, _ = compose(["model=llama_tiny", fix])
    check_model_config(config.model)
    assert config.model.config["num_hidden_layers"] == 2


def test_a_secret_survives_copies_unwritten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_KEY", SECRET)
    config, _ = compose(["run.name=${oc.env:MY_KEY}"])
    for made in (copy.deepcopy(config), pickle.loads(pickle.dumps(config)), replace(config, seed=1)):
        assert made.run.name == SECRET
        freeze(made, tmp_path / "config.yaml")
        assert SECRET not in (tmp_path / "config.yaml").read_text()


def test_a_missing_variable_is_named_on_loading(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_KEY", SECRET)
    config, _ = compose(["run.name=${oc.env:MY_KEY}"])
    freeze(config, tmp_path / "config.yaml")
    monkeypatch.delenv("MY_KEY")
    with pytest.raises(ConfigErrors, match=r"run\.name=\$\{oc\.env:MY_KEY\}: Environment variable 'MY_KEY' not found"):
        load(tmp_path / "config.yaml")


def test_the_hash_tells_configurations_apart_and_not_environments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_KEY", "one")
    first = compose(["run.name=${oc.env:MY_KEY}"])[0]
    monkeypatch.setenv("MY_KEY", "two")
    assert config_hash(compose(["run.name=${oc.env:MY_KEY}"])[0]) == config_hash(first)
    assert config_hash(compose(["run.name=two"])[0]) != config_hash(first)
    assert config_hash(compose()[0]) != config_hash(compose(["seed=1"])[0])
    assert len(config_hash(first)) >= 8


@pytest.mark.parametrize("content", ["a: [", "- 1\n", "trainer: {devices: x}\n", "nothing: 1\n"])
def test_a_file_that_is_no_configuration_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "config.yaml").write_text(content)
    with pytest.raises(BadInputError):
        load(tmp_path / "config.yaml")


def test_a_configuration_is_ones_own_as_it_was_launched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MGPU_PIPE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("LONG_NAME", "value-of-the-environment")
    path = tmp_path / "config.yaml"
    path.write_text("run: {name: '${oc.env:LONG_NAME}'}\ndata: {text_column: 'a\\${b}'}\n")
    config, own = load_untrusted(path)
    assert (config.run.name, config.data.text_column, own) == ("${oc.env:LONG_NAME}", "a${b}", False)
    remember(path)
    config, own = load_untrusted(path)
    assert (str(config.run.name), config.data.text_column, own) == ("value-of-the-environment", "a${b}", True)
    path.write_text(path.read_text() + "seed: 2\n")
    assert load_untrusted(path)[1] is False
    assert (tmp_path / "cache").stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize(
    ("mode", "owner", "said"),
    [(0o777, 0, "others can write"), (0o700, 12345, "belongs to another user"), (0o755, 0, "")],
)
def test_the_cache_is_private(mode: int, owner: int, said: str, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    (cache / "something").mkdir(parents=True)
    cache.chmod(mode)
    if owner:
        if os.geteuid() != 0:
            pytest.skip("giving a folder to another user needs root")
        os.chown(cache, owner, owner)
    if not said:
        private_folder(cache)
        (cache / "something").rmdir()
        for open_mode in (0o755, 0o777):
            cache.chmod(open_mode)
            private_folder(cache)
            assert cache.stat().st_mode & 0o777 == 0o700
        return
    with pytest.raises(ConfigError, match=said):
        private_folder(cache)


def test_what_others_put_into_an_open_cache_until_it_closes_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    close = Path.chmod

    def close_late(folder: Path, mode: int) -> None:
        (folder / "inductor").mkdir()
        close(folder, mode)

    close(tmp_path, 0o777)
    monkeypatch.setattr(Path, "chmod", close_late)
    with pytest.raises(ConfigError, match="others can write"):
        private_folder(tmp_path)
