"""Keys that a data source and a strategy of an installed package declare: typed, kept, hashed, a stranger's refused."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from mgpu_pipe.cli.verbs.eval import _with_overrides
from mgpu_pipe.config import convert, plugins, sections
from mgpu_pipe.config import json_schema as docs
from mgpu_pipe.config.freeze import freeze, load, untrusted_data
from mgpu_pipe.config.group_keys import StrategyConfig
from mgpu_pipe.config.hydra.compose import compose
from mgpu_pipe.config.run_identity import Identity, differences, identity_of, mathematics_hash
from mgpu_pipe.config.schema import DataConfig, RunConfig
from mgpu_pipe.errors import ConfigError, ConfigErrors


@dataclass
class Waves:
    period: int = 8
    """Samples a wave."""


@dataclass
class WavesConfig(DataConfig):
    folder: str = "."
    """Where they lie."""
    waves: Waves = field(default_factory=Waves)


@dataclass
class SlowConfig(StrategyConfig):
    pause: float = field(default=0.5, metadata={"at_least": 0})
    """Seconds."""


class Undecorated(DataConfig):
    height: int = 1


POINTS = {
    plugins.DATA_GROUP: {"waves": "WavesConfig", "tides": "Undecorated"},
    plugins.DATA_KEYS_GROUP: {"waves": "WavesConfig", "tides": "Undecorated"},
    plugins.STRATEGY_GROUP: {"slow": "SlowConfig"},
    plugins.STRATEGY_KEYS_GROUP: {"slow": "SlowConfig"},
}


def forget() -> None:
    for cache in (sections.all_hints, convert.all_keys, docs.field_documentation):
        cache.cache_clear()


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> Iterator[set[str]]:
    """The names that installed packages register."""
    names = {"waves", "slow"}

    def entry_points(group: str) -> list[EntryPoint]:
        named = POINTS.get(group, {}).items()
        return [EntryPoint(name, f"{__name__}:{cls}", group) for name, cls in named if name in names]

    monkeypatch.setattr(plugins, "entry_points", entry_points)
    forget()
    yield names
    forget()


def test_own_keys_are_typed_kept_and_part_of_the_run_only_where_they_are_content(
    registered: set[str], tmp_path: Path
) -> None:
    words = ["data.source=waves", "data.folder=a", "data.waves.period=4", "strategy.engine=slow", "strategy.pause=1"]
    config, _ = compose(words)
    assert (config.data.folder, config.data.waves, config.strategy.pause) == ("a", Waves(4), 1.0)  # type: ignore[attr-defined]
    freeze(config, tmp_path / "config.yaml")
    assert load(tmp_path / "config.yaml") == config
    assert (identity_of("data.waves.period"), identity_of("strategy.pause")) == (Identity.CONTENT, Identity.FREE)
    slower, _ = compose([*words, "strategy.pause=2"])
    longer, _ = compose([*words, "data.waves.period=5"])
    assert mathematics_hash(slower) == mathematics_hash(config) != mathematics_hash(longer)
    assert list(differences(longer, config, [Identity.CONTENT])) == [("data.waves.period", 5, 4)]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (
            ["data.source=waves", "data.waves.perod=4"],
            "data.waves.perod=4: no such key; did you mean data.waves.period?",
        ),
        (["data.source=waves", "data.waves.period=x"], "data.waves.period=x: use a whole number"),
        (["data.folder=a"], "data.folder=a: no such key here; leave it out, or choose waves"),
        (["strategy.pause=1"], "strategy.pause=1: no such key here; leave it out, or choose slow"),
    ],
)
def test_what_is_wrong_is_told_in_one_line(registered: set[str], words: list[str], told: str) -> None:
    with pytest.raises(ConfigErrors, match=re.escape(told)):
        compose(words)


def test_keys_that_are_no_dataclass_of_the_section_are_refused(registered: set[str]) -> None:
    registered.add("tides")
    with pytest.raises(ConfigError, match=r"declare them in a dataclass that is a subclass of .*DataConfig"):
        compose(["data.source=tides"])


def test_an_evaluation_may_change_a_sources_own_key(registered: set[str]) -> None:
    data = WavesConfig(source="waves", folder="a", seq_len=32)
    assert _with_overrides(data, ["data.waves.period=4"]) == WavesConfig(
        "waves", folder="a", seq_len=32, waves=Waves(4)
    )
    other = _with_overrides(data, ["data.source=synthetic"])
    assert type(other) is DataConfig and (other.source, other.seq_len) == ("synthetic", 32)
    back = _with_overrides(RunConfig().data, ["data.source=waves", "data.folder=b"])
    assert isinstance(back, WavesConfig) and back.folder == "b"


def test_a_strangers_run_names_no_file_by_a_sources_own_key() -> None:
    data = WavesConfig(source="waves", paths=["a"], folder="/etc")
    with pytest.raises(ConfigErrors, match=r"data.folder=/etc.*give data.folder on the command line"):
        untrusted_data(data, {"data.paths"})
    assert untrusted_data(data, {"data.paths", "data.folder"}).folder == "/etc"  # type: ignore[attr-defined]
