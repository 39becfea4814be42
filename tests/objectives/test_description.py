"""Objectives are asked: nobody else computes a loss or a perplexity, and their keys are typed and of their own."""

from __future__ import annotations

import ast
import math
import re
import subprocess
import sys
from dataclasses import dataclass, field
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

import mgpu_pipe
from mgpu_pipe.config import objective, plugins
from mgpu_pipe.config.freeze import freeze, load
from mgpu_pipe.config.hydra.compose import compose
from mgpu_pipe.config.json_schema import json_schema
from mgpu_pipe.config.objective import Description, Metric, bits_per_byte, description, higher_is_better
from mgpu_pipe.config.run_identity import mathematics_hash
from mgpu_pipe.config.schema import ObjectiveConfig, RunConfig
from mgpu_pipe.errors import ConfigError, ConfigErrors
from mgpu_pipe.objectives import registry
from mgpu_pipe.objectives.causal_lm import CausalLMObjective
from mgpu_pipe.objectives.registry import objective_class
from scripts.house import PACKAGE

COMPUTED = re.compile(r"\bcross_entropy\(|\bmath\.exp\(|log_softmax|nll_loss")
ASKED = (
    *("objectives/", "data/text/", "data/sources/mixture.py", "inference/generation.py", "inference/accuracy.py"),
    *("inference/check_onnx.py", "planning/"),
)


@dataclass
class TiltedConfig(ObjectiveConfig):
    name: str = "tilted"
    tilt: float = field(default=0.5, metadata={"at_least": 0})
    """How far."""


class HalfGatherer(CausalLMObjective):
    def gather_features(self, batches: object, num_valid: int, world: object) -> None:
        """The other method of the protocol is missing."""


TILTED = Description("tilted", TiltedConfig, (Metric("val/loss", "held-out loss"),), lambda sums: {"val/loss": sums[0]})


@pytest.fixture
def tilted(monkeypatch: pytest.MonkeyPatch) -> None:
    """An objective that an installed package describes."""
    point = EntryPoint("tilted", f"{__name__}:TILTED", plugins.OBJECTIVE_KEYS_GROUP)
    wanted = (plugins.OBJECTIVE_KEYS_GROUP, plugins.OBJECTIVE_GROUP)
    monkeypatch.setattr(plugins, "entry_points", lambda group: [point] if group in wanted else [])
    caches = (objective.description,)
    for cache in caches:
        cache.cache_clear()
    yield
    from mgpu_pipe.config import convert, sections
    from mgpu_pipe.config import json_schema as docs

    for cache in (*caches, sections.all_hints, convert.all_keys, docs.field_documentation):
        cache.cache_clear()


@pytest.fixture(autouse=True)
def fresh() -> None:
    from mgpu_pipe.config import convert, sections
    from mgpu_pipe.config import json_schema as docs

    for cache in (sections.all_hints, convert.all_keys, docs.field_documentation):
        cache.cache_clear()


def test_losses_are_computed_by_objectives_alone() -> None:
    package = Path(mgpu_pipe.__file__).parent
    told = [
        f"{file.relative_to(package)}:{number}"
        for file in sorted(package.rglob("*.py"))
        if not str(file.relative_to(package)).startswith(ASKED)
        for number, line in enumerate(file.read_text().splitlines(), 1)
        if COMPUTED.search(line)
    ]
    assert told == []


def test_a_plug_ins_keys_are_typed_checked_and_documented(tilted: None, tmp_path: Path) -> None:
    config, _ = compose(["objective.name=tilted", "objective.tilt=2"])
    assert config.objective == TiltedConfig(tilt=2.0)
    freeze(config, tmp_path / "config.yaml")
    assert load(tmp_path / "config.yaml").objective == TiltedConfig(tilt=2.0)
    other, _ = compose(["objective.name=tilted", "objective.tilt=3"])
    assert mathematics_hash(config) != mathematics_hash(other)
    assert json_schema()["properties"]["objective"]["properties"]["tilt"]["description"] == "How far."
    for override, told in (
        ("objective.tilted=2", "did you mean objective.tilt?"),
        ("objective.tilt=far", "use a number"),
        ("objective.loss_chunk_tokens=0", "objective.loss_chunk_tokens=0: no such key"),
    ):
        with pytest.raises(ConfigErrors, match=re.escape(told)):
            compose(["objective.name=tilted", override])


def test_another_objectives_key_is_none_of_causal_language_modellings(tilted: None) -> None:
    with pytest.raises(ConfigErrors, match=r"objective\.tilt=2: no such key"):
        compose(["objective.tilt=2"])


def test_every_objective_agrees_with_its_description() -> None:
    for name in plugins.OBJECTIVES:
        told, cls = description(name), objective_class(name)
        assert cls.description is told and told.name == told.keys().name == name
        assert told.metrics[0].key == "val/loss" and sum(metric.headline for metric in told.metrics) == 1
        measured = told.measured([1.0] * (cls.num_sums + 1))
        assert list(measured) == [metric.key for metric in told.metrics]


def test_bits_a_byte_are_the_loss_of_text_over_its_bytes() -> None:
    metrics = {"val/loss": 2 * math.log(2), "val/perplexity": 4.0}
    assert bits_per_byte(metrics, 30, 120) == {"val/bits_per_byte": pytest.approx(0.5)}
    assert bits_per_byte(metrics, 30, 0) == bits_per_byte({"val/loss": 1.0}, 30, 120) == {}


def test_half_a_protocol_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "load", lambda *names: HalfGatherer)
    with pytest.raises(ConfigError, match=r"has only a part of .*FeatureGatherer; define last_sums"):
        objective_class("half_gatherer")


def test_the_default_objective_is_causal_language_modelling() -> None:
    assert type(RunConfig().objective) is description("causal_lm").keys
    assert not higher_is_better({"objective": {"name": "causal_lm"}}, "val/perplexity")
    assert description("causal_lm").measured([2.0, 4.0])["val/perplexity"] == pytest.approx(2.718281828**0.5)


def test_descriptions_need_no_torch() -> None:
    code = (
        "import sys; from mgpu_pipe.config.objective import descriptions; descriptions(); print('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "False\n"


@pytest.mark.slow
def test_other_rooms_name_no_objective() -> None:
    """A new objective stands in its own room and its option alone: what others ask, its description answers."""
    others = [file for file in PACKAGE.rglob("*.py") if file.parent.name not in ("objectives", "losses")]
    names = {*plugins.OBJECTIVES} - {"causal_lm"}
    named = [
        (file.name, node.value)
        for file in others
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.Constant) and node.value in names
    ]
    assert not named


@pytest.mark.parametrize(
    ("word", "fix"),
    [
        ("asr", "use objective=ctc or speech_seq2seq"),
        ("CLIP", "use objective=contrastive"),
        ("translation", "use objective=seq2seq"),
        ("classification", "use objective=image_classification or sequence_classification"),
    ],
)
def test_other_programs_names_of_an_objective_are_known(word: str, fix: str) -> None:
    with pytest.raises(ConfigErrors, match=f"objective={word}: no such option; {fix}"):
        compose([f"objective={word}"])
